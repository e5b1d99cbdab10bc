"""``echo2-scenario bench delta``: how small and how fast are weight deltas, beside what others do?

The update traces are made here, by a real AdamW run on a small Qwen3 in a child process (see
`coordinator.learner.trace`), or read from two safetensors folders. Every scheme's round trip is
compared bit for bit. Sizes are exact. Speeds are gigabytes of raw state by seconds of one core's
CPU time, the best of several runs, so that other work on the machine disturbs them little; decode
means to have the new state in memory that held the old one.

``bound_ratio`` is raw bytes by the entropy given the old exponents (`scenarios.delta_bounds`).
``tight`` is that form alone, in one block; ``auto`` is what a publisher sends.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time  # noqa: TID251 - a benchmark reads its own thread's CPU clock
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np
import trio

from echo2p2p.errors import ConfigError, EchoError
from echo2p2p.weights import kernels
from echo2p2p.weights.anchor import decode_anchor, encode_anchor
from echo2p2p.weights.delta import apply_delta, encode_delta
from echo2p2p.weights.forms import Form
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.policy import SMALLEST, FormPolicy
from echo2p2p.wire.messages import LayoutTable
from scenarios import bench_report
from scenarios.arguments import positive
from scenarios.checkpoints import read_pair
from scenarios.delta_bounds import Bounds, bounds_of
from scenarios.delta_rivals import Rival, rivals

PARAMETERS: Final = 12_000_000
"""Traces of all learning rates take about two minutes on two cores."""

LEARNING_RATES: Final = (1e-6, 3e-6, 1e-5, 1e-4)
SCHEMES: Final = {
    "auto": SMALLEST,
    "tight": FormPolicy("tight", frozenset({Form.TIGHT}), whole=True),
    "fast": FormPolicy("fast", frozenset({Form.FAST})),
}
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One scheme on one trace; the keys of the JSON output."""

    lr: float | None
    start: str
    scheme: str
    ratio: float
    bound_ratio: float
    bytes: int
    encode_gb_per_s: float
    decode_gb_per_s: float
    exact: bool


@dataclass(frozen=True)
class Pair:
    """Two flat states of one layout."""

    lr: float | None
    start: str
    layout: Layout
    old: bytes
    new: bytes

    @property
    def name(self) -> str:
        """For files and headings."""
        return self.start if self.lr is None else f"{self.lr:g}-{self.start}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this benchmark understands, beside ``--json``."""
    parser.add_argument(
        "--params", type=_count, default=PARAMETERS, help="of the model, like 50M (default: 12M)"
    )
    parser.add_argument(
        "--lr", type=_rates, nargs="+", action="extend", help="learning rates (default: four)"
    )
    parser.add_argument("--threads", type=positive, default=2, help="of the training (default: 2)")
    parser.add_argument("--repeat", type=positive, default=3, help="runs, best counts (default: 3)")
    parser.add_argument("--old", type=Path, help="folder of safetensors: use it instead of traces")
    parser.add_argument("--new", type=Path, help="the folder after it")
    parser.add_argument("--traces", type=Path, help="folder of traces that were dumped before")
    parser.add_argument("--dump", type=Path, help="write old, new and wire bytes into this folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


async def run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure; returns the rows, and tells of each trace on stderr as it is done."""
    work = partial(_measure_all, arguments)
    rows = await trio.to_thread.run_sync(work)
    return [asdict(row) for row in rows]


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as text."""
    lines = [bench_report.stated()]
    last = None
    for row in (msgspec.convert(row, Row) for row in rows):
        heading = (row.lr, row.start)
        if heading != last:
            lr = "" if row.lr is None else f"lr {row.lr:g}, "
            lines.append(f"{lr}start {row.start}: bound {row.bound_ratio:.1f}x")
            last = heading
        lines.append(
            f"  {row.scheme:<18}{row.bytes:>12,} bytes {row.ratio:>8.1f}x"
            f"  {row.bound_ratio / row.ratio:>6.3f} of the bound"
            f"  {row.encode_gb_per_s:>6.2f} / {row.decode_gb_per_s:.2f} GB/s"
            f"{'' if row.exact else '  NOT EXACT'}"
        )
    return "\n".join(lines)


def _measure_all(arguments: argparse.Namespace) -> list[Row]:
    if not kernels.warm_up():
        print("numba is missing: these are the numpy loops' speeds", file=sys.stderr)
    if "zipnn" not in {rival.name for rival in rivals()}:
        print("zipnn is not installed: it is left out", file=sys.stderr)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in _pairs(arguments, Path(folder)):
            if arguments.dump is not None:
                _dump(arguments.dump, pair)
            rows += measure(pair, repeat=arguments.repeat, dump=arguments.dump)
    return rows


def measure(pair: Pair, *, repeat: int, dump: Path | None = None) -> Iterator[Row]:
    """Yield a row for each scheme on one pair of states."""
    bounds = bounds_of(pair.layout, pair.old, pair.new)
    _tell(pair, bounds)
    for name, policy in SCHEMES.items():
        encode_s, wire = _best(
            repeat, partial(encode_delta, pair.layout, pair.old, pair.new, policy=policy)
        )
        target = bytearray(pair.old)
        decode_s = float("inf")
        for _ in range(repeat):
            target[:] = pair.old
            seconds, _none = _best(1, partial(apply_delta, pair.layout, wire, target))
            decode_s = min(decode_s, seconds)
        yield _row(pair, bounds, name, wire, (encode_s, decode_s), bytes(target), dump)
    if {sequence.dtype for sequence in pair.layout.sequences} == {"bf16"}:
        for rival in rivals():
            yield _row_of(rival, pair, bounds, repeat, dump)


def _row_of(rival: Rival, pair: Pair, bounds: Bounds, repeat: int, dump: Path | None) -> Row:
    old, new = (np.frombuffer(state, dtype=np.uint16) for state in (pair.old, pair.new))
    encode_s, wire = _best(repeat, lambda: rival.encode(old, new))
    decode_s, result = _best(repeat, lambda: rival.decode(old, wire))
    return _row(pair, bounds, rival.name, wire, (encode_s, decode_s), result.tobytes(), dump)


def _row(
    pair: Pair,
    bounds: Bounds,
    scheme: str,
    wire: bytes,
    seconds: tuple[float, float],
    result: bytes,
    dump: Path | None,
) -> Row:
    if dump is not None:
        (dump / f"{pair.name}.{scheme}.wire").write_bytes(wire)
    raw = len(pair.new)
    encode, decode = (raw / max(each, 1e-9) / 1e9 for each in seconds)
    return Row(
        lr=pair.lr,
        start=pair.start,
        scheme=scheme,
        ratio=round(raw / max(1, len(wire)), 3),
        bound_ratio=round(raw / max(1.0, bounds.exponent), 3),
        bytes=len(wire),
        encode_gb_per_s=round(encode, 3),
        decode_gb_per_s=round(decode, 3),
        exact=result == pair.new,
    )


def _best(repeat: int, work: Callable[[], T]) -> tuple[float, T]:
    """Return the least CPU seconds of this thread that ``work`` took, and what it returned."""
    seconds = float("inf")
    for _ in range(repeat):
        began = time.thread_time()
        result = work()
        seconds = min(seconds, time.thread_time() - began)
    return seconds, result


def _pairs(arguments: argparse.Namespace, scratch: Path) -> Iterator[Pair]:
    if (arguments.old is None) != (arguments.new is None):
        raise ConfigError("--old", "two folders are needed, --old and --new")
    if arguments.old is not None:
        yield Pair(None, "folders", *read_pair(arguments.old, arguments.new))
        return
    folder = arguments.traces or scratch
    if arguments.traces is None:
        command = [sys.executable, "-P", "-m", "coordinator.learner.trace", str(folder)]
        command += ["--params", str(arguments.params), "--threads", str(arguments.threads)]
        command += ["--lr", *(f"{lr:g}" for lr in _chosen(arguments))]
        done = subprocess.run(command, stdout=sys.stderr, check=False)  # noqa: S603 - our own module
        if done.returncode:
            raise EchoError(f"making the traces failed with exit code {done.returncode}")
    table = msgspec.json.decode((folder / "layout.json").read_bytes(), type=LayoutTable)
    layout = Layout.from_table(table)
    for lr in _chosen(arguments):
        for old in sorted(folder.glob(f"{lr:g}-*.old")):
            start = old.stem.removeprefix(f"{lr:g}-")
            yield Pair(lr, start, layout, old.read_bytes(), old.with_suffix(".new").read_bytes())


def _dump(folder: Path, pair: Pair) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "layout.json").write_bytes(msgspec.json.encode(pair.layout.table))
    (folder / f"{pair.name}.old").write_bytes(pair.old)
    (folder / f"{pair.name}.new").write_bytes(pair.new)


def _tell(pair: Pair, bounds: Bounds) -> None:
    """Print what the rows have no place for: density, both bounds, the anchor."""
    raw = len(pair.new)
    encode_s, wire = _best(1, partial(encode_anchor, pair.layout, pair.new))
    target = bytearray(raw)
    decode_s, _none = _best(1, partial(decode_anchor, pair.layout, wire, target))
    print(
        f"{pair.name}: {bounds.changed / bounds.elements:.3%} of {bounds.elements:,} elements"
        f" changed; bounds {raw / max(1, bounds.independent):.1f}x independent,"
        f" {raw / max(1, bounds.exponent):.1f}x by exponent;"
        f" anchor {1 - len(wire) / raw:.1%} smaller at {raw / encode_s / 1e9:.2f} /"
        f" {raw / decode_s / 1e9:.2f} GB/s{'' if target == pair.new else ' NOT EXACT'}",
        file=sys.stderr,
        flush=True,
    )


def _chosen(arguments: argparse.Namespace) -> list[float]:
    """Return the learning rates, each once, in order."""
    given = [lr for group in arguments.lr or [LEARNING_RATES] for lr in group]
    return list(dict.fromkeys(given))


def _rates(text: str) -> list[float]:
    """Parse ``1e-6`` or ``1e-6,1e-5``."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no learning rate") from error
    if not all(0 < rate < 1 for rate in rates):
        raise argparse.ArgumentTypeError("a learning rate is between 0 and 1")
    return rates


def _count(text: str) -> int:
    """Parse ``12000000``, ``50M`` or ``1.5B``."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9}
    unit = units.get(text[-1:].upper())
    try:
        count = int(float(text[:-1]) * unit) if unit else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters") from error
    if not 100_000 <= count <= 4_000_000_000:
        raise argparse.ArgumentTypeError("between 100K and 4B parameters")
    return count
