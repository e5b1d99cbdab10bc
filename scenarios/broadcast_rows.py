"""What `echo2-scenario bench broadcast` says of one system on one set of lines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scenarios import bench_report
from scenarios.broadcast_links import RATE_MBIT, Bound

MB = 1e6


@dataclass(frozen=True)
class Case:
    """On what the systems are compared; from the command line."""

    peers: int
    links: str
    rtt_ms: float
    payload_bytes: int
    seed: int = 0
    tls: bool = False
    fault: str = ""
    """Of `scenarios.broadcast_faults`; each system then runs without it too."""
    mbit: float = RATE_MBIT
    """Of the source, and of equal peers."""


@dataclass(frozen=True)
class Outcome:
    """What came of one broadcast."""

    finished_s: tuple[float, ...]
    """When each peer had all of it, verified, in the order of the peers that were not hit."""
    source_copies: float
    """Payloads that left the source's line until the last peer was done."""
    duplicate_share: float
    """Of the chunk bytes that peers received: what they had already."""
    cpu_s: float
    """Of all processes, from the start of the clock to the last peer's end."""
    up_bytes: tuple[int, ...] = ()
    """By the line's account, headers included; the source's first."""
    down_bytes: tuple[int, ...] = ()
    redealt: int = 0
    """Chunks that the source gave to a second relay."""
    hit_finished_s: tuple[float, ...] = ()
    """The same of those that a fault hit and that recovered."""

    @property
    def last_s(self) -> float:
        """When the last peer had it."""
        return max(self.finished_s)


@dataclass(frozen=True)
class Row:
    """One system; the keys of the JSON output. Of several runs, that with the median time."""

    system: str
    """``one-to-many``, ``echo2p2p`` or ``libtorrent``."""
    settings: str
    """Of a system that was tried with several; else empty."""
    network: str
    """``namespaces`` or ``virtual``."""
    peers: int
    links: str
    rtt_ms: float
    payload_bytes: int
    bound_s: float
    last_s: float
    multiple: float
    source_copies: float
    duplicate_share: float
    cpu_ms_per_mb: float
    fluid_bound_s: float
    cut_bound_s: float
    first_s: float
    middle_s: float
    runs_s: list[float] = field(default_factory=list)
    """The last peer's time in each run."""
    redealt: int = 0
    up_bytes: list[int] = field(default_factory=list)
    down_bytes: list[int] = field(default_factory=list)
    tls: bool = False
    fault: str = ""
    times_faultless: float | None = None
    """The time over that of the row without the fault."""
    mbit: float = RATE_MBIT
    cpu_s: float = 0.0
    """Of all processes."""
    hit_last_s: float | None = None
    """When the last of those had it that the fault had hit, if they recover."""
    seed: int = 0
    """Of the first run; each has the next."""
    machine: str = ""
    """It and the versions, in words."""


def row_of(
    system: str,
    settings: str,
    network: str,
    case: Case,
    bound: Bound,
    outcomes: Sequence[Outcome],
) -> Row:
    """Return the row of a system's runs; of an even number, the better middle one counts."""
    order = sorted(outcomes, key=lambda outcome: outcome.last_s)
    chosen = order[(len(order) - 1) // 2]
    delivered_mb = case.peers * case.payload_bytes / MB
    return Row(
        system=system,
        settings=settings,
        network=network,
        peers=case.peers,
        links=case.links,
        rtt_ms=case.rtt_ms,
        payload_bytes=case.payload_bytes,
        bound_s=round(bound.seconds, 4),
        last_s=round(chosen.last_s, 4),
        multiple=round(chosen.last_s / bound.seconds, 4),
        source_copies=round(chosen.source_copies, 4),
        duplicate_share=round(chosen.duplicate_share, 5),
        cpu_ms_per_mb=round(1000 * chosen.cpu_s / delivered_mb, 3),
        fluid_bound_s=round(bound.fluid_s, 4),
        cut_bound_s=round(bound.cut_s, 4),
        first_s=round(min(chosen.finished_s), 4),
        middle_s=round(statistics.median(chosen.finished_s), 4),
        runs_s=[round(outcome.last_s, 4) for outcome in outcomes],
        redealt=chosen.redealt,
        up_bytes=list(chosen.up_bytes),
        down_bytes=list(chosen.down_bytes),
        tls=case.tls,
        fault=case.fault,
        mbit=case.mbit,
        cpu_s=round(chosen.cpu_s, 3),
        hit_last_s=max(chosen.hit_finished_s, default=None),
        seed=case.seed,
        machine=bench_report.stated(),
    )


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the rows for a person."""
    lines = [f"{rows[0]['machine']}; seed {rows[0]['seed']}"] if rows else []
    last: object = None
    for row in rows:
        case = (row["network"], row["links"], row["peers"], row["payload_bytes"], row["rtt_ms"])
        if case != last:
            lines += ["", *_heading(row)]
            last = case
        name = " ".join(str(row[key]) for key in ("system", "settings", "fault") if row[key])
        lines.append(
            f"  {name:<26}{row['last_s']:>9.2f} s{row['multiple']:>8.2f}"
            f"{row['source_copies']:>9.2f}{100 * _number(row['duplicate_share']):>12.1f} %"
            f"{row['cpu_ms_per_mb']:>9.1f}{_beside(row)}"
        )
    return "\n".join(lines)


def _beside(row: Mapping[str, object]) -> str:
    """Return what is to be said of a fault."""
    words = ""
    if row["times_faultless"] is not None:
        words += f"  {_number(row['times_faultless']):.2f} x without"
    if row["hit_last_s"] is not None:
        words += f", who was hit {_number(row['hit_last_s']):.2f} s"
    return words


def _heading(row: Mapping[str, object]) -> list[str]:
    size_mb = _number(row["payload_bytes"]) / MB
    cut = f", of it by who can be dialled {row['cut_bound_s']:.2f} s" if row["cut_bound_s"] else ""
    delay = f", RTT {row['rtt_ms']:g} ms" if row["rtt_ms"] else ""
    return [
        f"{row['peers']} peers, {row['links']} links{delay}, {size_mb:g} MB, {row['network']}"
        f"{', TLS' if row['tls'] else ''}: "
        f"at least {row['bound_s']:.2f} s{cut}",
        f"  {'':<26}{'last peer':>11}{'x bound':>8}{'copies':>9}{'duplicates':>14}{'ms/MB':>9}",
    ]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
