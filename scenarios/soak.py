"""``echo2-scenario soak``: does memory stay flat for hours, while peers come, die and come back?

A coordinator and its peers run as processes on loopback. Some peers are left alone; others are
killed with ``kill -9`` and started again under their old identity, and strangers join for half a
minute and leave. The memory of every process that lives on is looked at every few seconds. With
``--real`` the demo's model is trained with torch, and the children are looked at too; otherwise
learner, task worker and engines are fakes inside the processes (`scenarios.live_fakes`), which
makes more steps, versions and uploads an hour.

What is judged is *private* memory (`echo2p2p.net.process_memory`), after a warm-up, by the
Theil-Sen slope: the median of the slopes of all pairs of samples, which a garbage collector's saw
teeth do not move. A process that ends by itself fails the soak as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import trio

from echo2p2p.errors import ChildError
from echo2p2p.net.child import last_words_of
from echo2p2p.net.process_memory import PROC, Memory, memory_of
from scenarios.arguments import positive_time

MB: Final = 1e6
SAMPLE_S: Final = 5.0
WARM_UP_SHARE: Final = 0.3
WARM_UP_S_MAX: Final = 300.0
"""Not judged: caches fill, allocators grow. The share, but no longer than this."""
STEADY: Final = ("ann", "bob")
CHURNING: Final = ("cem", "dan", "eva")
KILL_EVERY_S: Final = 8.0
STRANGER_EVERY_S: Final = 25.0
STRANGER_STAYS_S: Final = 20.0
DOWN_S: Final = (0.5, 6.0)
"""A killed peer is started again after a time in this range."""
CURVE_POINTS: Final = 60
"""Of a process in the result."""
START_S: Final = 120.0
STOP_S: Final = 5.0
RATES: Final = (
    *("--rollouts.prompts_per_step", "8"),
    *("--rollouts.samples_per_prompt", "4"),
    *("--rollouts.staleness_budget", "2"),
    *("--rollouts.publication_period", "1"),
    *("--rollouts.lease_timeout_s", "10"),
    *("--learner.checkpoint_every_steps", "20"),
    *("--membership.term_s", "4"),
    *("--membership.heartbeat_s", "1"),
)


@dataclass
class Series:
    """One process over time."""

    name: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    def judged(self, since_s: float) -> tuple[list[float], list[float]]:
        """Return times and private bytes after the warm-up."""
        pairs = [
            (at_s, float(memory.private_bytes))
            for at_s, memory in zip(self.at_s, self.memory, strict=True)
            if at_s >= since_s
        ]
        return [at_s for at_s, _ in pairs], [size for _, size in pairs]


def slope_per_hour(at_s: Sequence[float], values: Sequence[float]) -> float:
    """Return the Theil-Sen slope, in units an hour; 0 for fewer than two samples."""
    times, sizes = np.asarray(at_s), np.asarray(values)
    first, second = np.triu_indices(len(times), k=1)
    if not len(first):
        return 0.0
    slopes = (sizes[second] - sizes[first]) / (times[second] - times[first])
    return float(3600.0 * np.median(slopes))


@dataclass
class Soak:
    """One soak.

    Args:
        folder: Of the run and the peers; must be empty.
        minutes: How long.
        real: Whether models are trained.
        slope_mb_per_hour_max: A larger slope of any process fails.
        seed: Of whom is killed when.
    """

    folder: Path
    minutes: float
    real: bool
    slope_mb_per_hour_max: float
    seed: int = 7
    kills: int = 0
    strangers: int = 0
    series: dict[tuple[str, int], Series] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    async def run(self) -> dict[str, object]:
        """Run it and return what came out.

        Raises:
            ChildError: The coordinator did not come up.
        """
        began_s = trio.current_time()
        async with self._coordinator() as (pid, join), trio.open_nursery() as nursery:
            nursery.start_soon(self._look, "coordinator", pid, began_s)
            for name in STEADY:
                nursery.start_soon(self._steady, name, join, began_s)
            for place, name in enumerate(CHURNING):
                nursery.start_soon(self._churning, name, join, place)
            nursery.start_soon(self._strangers, join)
            await trio.sleep(60.0 * self.minutes)
            nursery.cancel_scope.cancel()
        return self._result()

    # --- processes ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _coordinator(self) -> AsyncIterator[tuple[int, Mapping[str, str]]]:
        run = self.folder / "run"
        words = ["--run.folder", str(run), "--run.steps", "100000000", "--server.port", "0"]
        command = [*_module(self.real, "coordinator"), "run", *words, *RATES]
        command += ["--config", "@demo"] if self.real else ["--fake-step-s", "0.4"]
        async with self._process("coordinator", command) as process:
            with trio.move_on_after(START_S) as waiting:
                join_file = run / "join.json"
                while process.poll() is None and not join_file.exists():  # noqa: ASYNC110 its own
                    await trio.sleep(0.1)
            if waiting.cancelled_caught or process.poll() is not None:
                raise ChildError("coordinator", "did not come up", log_tail=self._tail())
            join = json.loads(join_file.read_text(encoding="utf-8"))
            yield process.pid, join
            if process.poll() is not None:
                self.problems.append(f"the coordinator ended by itself: {self._tail()}")

    def _tail(self) -> str:
        log = self.folder / "coordinator.log"
        return last_words_of(log.read_text(encoding="utf-8", errors="replace"))

    @asynccontextmanager
    async def _process(self, name: str, command: list[str]) -> AsyncIterator[trio.Process]:
        """Run a process while the context is open; then SIGINT, and SIGKILL if it lingers."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with trio.CancelScope(shield=True):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
                with trio.move_on_after(STOP_S):
                    await process.wait()
                if process.poll() is None:
                    process.kill()
                    await process.wait()

    def _peer(self, name: str, join: Mapping[str, str]) -> list[str]:
        return [
            *_module(self.real, "peer"),
            *("join", join["url"], "--token", join["token"], "--name", name, "--quiet"),
            *("--folder", str(self.folder / "peers" / name), "--relay.host", "127.0.0.1"),
            *(() if self.real else ("--fake-token-s", "0.01")),
        ]

    async def _steady(self, name: str, join: Mapping[str, str], began_s: float) -> None:
        """Run a peer that is left alone."""
        async with self._process(name, self._peer(name, join)) as process:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look, name, process.pid, began_s)
                code = await process.wait()
                nursery.cancel_scope.cancel()
            self.problems.append(f"peer {name} ended by itself with code {code}")

    async def _churning(self, name: str, join: Mapping[str, str], place: int) -> None:
        """Run a peer that is killed again and again."""
        rng = random.Random(f"{self.seed} {name}")  # noqa: S311 - to be repeatable
        await trio.sleep(place * KILL_EVERY_S)
        while True:
            async with self._process(name, self._peer(name, join)) as process:
                with trio.move_on_after(len(CHURNING) * KILL_EVERY_S * rng.uniform(0.5, 1.5)):
                    code = await process.wait()
                    self.problems.append(f"peer {name} ended by itself with code {code}")
                process.kill()
                await process.wait()
            self.kills += 1
            await trio.sleep(rng.uniform(*DOWN_S))

    async def _strangers(self, join: Mapping[str, str]) -> None:
        """Let new identities join, and leave after a while."""
        while True:
            await trio.sleep(STRANGER_EVERY_S)
            self.strangers += 1
            async with self._process("strangers", self._peer(f"new-{self.strangers}", join)):
                await trio.sleep(STRANGER_STAYS_S)

    # --- figures ------------------------------------------------------------------------------

    async def _look(self, name: str, pid: int, began_s: float) -> None:
        """Take samples of a process and, if they are real, of its children."""
        while True:
            at_s = trio.current_time() - began_s
            for each, each_pid in [(name, pid), *(_children(name, pid) if self.real else ())]:
                memory = memory_of(each_pid)
                if memory is not None:
                    series = self.series.setdefault((each, each_pid), Series(each, each_pid))
                    series.at_s.append(at_s)
                    series.memory.append(memory)
            await trio.sleep(SAMPLE_S)

    def _result(self) -> dict[str, object]:
        warm_s = min(WARM_UP_SHARE * 60.0 * self.minutes, WARM_UP_S_MAX)
        rows = [row for series in self.series.values() if (row := _row(series, warm_s))]
        steep = [row for row in rows if row["slope_mb_per_hour"] > self.slope_mb_per_hour_max]
        problems = [
            *self.problems,
            *(
                f"{row['process']} grows by {row['slope_mb_per_hour']:.1f} MB an hour"
                for row in steep
            ),
        ]
        return {
            "minutes": self.minutes,
            "models": "real" if self.real else "fake",
            "warm_up_s": warm_s,
            "steps": self._steps(),
            "kills": self.kills,
            "strangers": self.strangers,
            "slope_mb_per_hour_max": self.slope_mb_per_hour_max,
            "processes": rows,
            "problems": problems,
            "held": not problems,
        }

    def _steps(self) -> int:
        metrics = self.folder / "run" / "metrics.jsonl"
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0


def _module(real: bool, program: str) -> list[str]:
    return [sys.executable, "-P", "-m", program if real else "scenarios.live_fakes"]


def _children(name: str, pid: int) -> Iterator[tuple[str, int]]:
    """Yield the children of a process, named after what they are."""
    with contextlib.suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                words = (PROC / child / "cmdline").read_bytes().split(b"\0")
                module = words[words.index(b"-m") + 1].decode() if b"-m" in words else "child"
                yield (
                    f"{name} {module.removeprefix('coordinator.').removeprefix('peer.')}",
                    int(child),
                )


def _row(series: Series, warm_s: float) -> dict[str, Any] | None:
    """Return the figures of one process, or ``None`` if it did not live long enough for any."""
    at_s, values = series.judged(warm_s)
    if len(values) < 10:
        return None
    edge = max(1, len(values) // 10)
    return {
        "process": series.name,
        "pid": series.pid,
        "samples": len(values),
        "start_mb": round(median(values[:edge]) / MB, 2),
        "end_mb": round(median(values[-edge:]) / MB, 2),
        "largest_mb": round(max(values) / MB, 2),
        "slope_mb_per_hour": round(slope_per_hour(at_s, values) / MB, 2),
        "resident_end_mb": round(series.memory[-1].resident_bytes / MB, 2),
        "curve": _curve(series),
    }


def _curve(series: Series) -> list[tuple[float, float]]:
    """Return minutes and private megabytes over the whole life, in medians of neighbours."""
    width = max(1, -(-len(series.at_s) // CURVE_POINTS))
    return [
        (
            round(series.at_s[start] / 60, 2),
            round(median(m.private_bytes for m in series.memory[start : start + width]) / MB, 2),
        )
        for start in range(0, len(series.at_s), width)
    ]


def table(result: Mapping[str, Any]) -> str:
    """Return a result for a person."""
    lines = [
        f"{result['minutes']:g} minutes with {result['models']} models: {result['steps']} steps, "
        f"{result['kills']} peers killed, {result['strangers']} strangers came and went",
        f"private memory after {result['warm_up_s']:.0f} s of warm-up:",
        "",
        f"{'process':<28}{'start MB':>10}{'end MB':>10}{'largest':>10}{'MB an hour':>12}",
    ]
    lines += [
        f"{row['process']:<28}{row['start_mb']:>10.1f}{row['end_mb']:>10.1f}"
        f"{row['largest_mb']:>10.1f}{row['slope_mb_per_hour']:>+12.1f}"
        for row in result["processes"]
    ]
    limit = result["slope_mb_per_hour_max"]
    lines += ["", f"flat: no process grows by more than {limit:g} MB an hour"]
    if not result["held"]:
        lines[-1:] = [f"FAILED: {problem}" for problem in result["problems"]]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a soak."""
    parser.add_argument(
        "--minutes", type=positive_time, default=20.0, help="how long (default: 20)"
    )
    parser.add_argument("--real", action="store_true", help="train the demo's model, with torch")
    parser.add_argument("--folder", type=Path, help="keep logs and run here; must not exist")
    parser.add_argument("--seed", type=int, default=7, help="of whom is killed when (default: 7)")
    parser.add_argument(
        "--slope-max",
        type=float,
        default=20.0,
        metavar="MB",
        help="megabytes an hour by which no process may grow (default: 20)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Soak as the options say."""
    with contextlib.ExitStack() as stack:
        folder = arguments.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo2-soak-")))
        else:
            folder.mkdir(parents=True)
        soak = Soak(
            folder=folder,
            minutes=arguments.minutes,
            real=arguments.real,
            slope_mb_per_hour_max=arguments.slope_max,
            seed=arguments.seed,
        )
        return await soak.run()
