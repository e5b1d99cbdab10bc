"""``echo2-scenario reproduce broadcast``: how does the time of a broadcast grow with the peers?

One payload to N peers on equal lines of several bandwidths: one-to-many, ours, and libtorrent where
it is installed; as processes in network namespaces up to what one machine forwards, and in virtual
time up to a thousand. Everything is measured by `echo2-scenario bench broadcast`; what is here asks
for one cell of the table after the other and keeps it. The claim of the paper (ECHO-2,
arXiv:2602.02192): about twice as fast as one-to-many where bandwidth is short, and nearly flat in
the number of peers.

A cell whose processes kept `BUSY_SHARE` of this machine's cores busy says so: it has measured the
cores, not the lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from echo2p2p.errors import ConfigError
from scenarios import bench_broadcast, bench_report, broadcast_virtual, pictures
from scenarios.arguments import between, whole
from scenarios.broadcast_lab import Work
from scenarios.broadcast_rows import MB, Case
from scenarios.cells import Cells
from scenarios.namespaces import TOTAL_MBIT_MAX

PEERS: Final = (1, 2, 4, 8, 16, 32, 64)
VIRTUAL_PEERS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
PEERS_MAX: Final = 1000
MBITS: Final = (3.0, 10.0)
PAYLOAD_MB: Final = 4.0
LINKS: Final = "homogeneous"
OURS: Final = "echo2p2p"
ONE_TO_MANY: Final = "one-to-many"
BUSY_SHARE: Final = 0.8
LIVE, VIRTUAL = "namespaces", "virtual"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/broadcast"),
        help="where each cell is kept; started again it goes on (default: runs/broadcast)",
    )
    parser.add_argument(
        "--peers",
        type=whole(0, PEERS_MAX),
        nargs="+",
        default=list(PEERS),
        help="as processes; 0: none",
    )
    parser.add_argument(
        "--virtual-peers",
        type=whole(0, PEERS_MAX),
        nargs="+",
        default=list(VIRTUAL_PEERS),
        help="in virtual time; 0: none",
    )
    parser.add_argument(
        "--mbit",
        type=between(0.1, 250),
        nargs="+",
        default=list(MBITS),
        help="of each line, both ways",
    )
    parser.add_argument(
        "--payload-mb", type=between(0.1, 250), default=PAYLOAD_MB, help="of 1,000,000 bytes"
    )
    parser.add_argument(
        "--runs", type=whole(1, 100), default=1, help="of each cell; the median counts"
    )
    parser.add_argument("--seed", type=int, default=0, help="of keys, payload and choices")
    parser.add_argument("--virtual", action="store_true", help="in virtual time only, without root")
    parser.add_argument("--plot", type=Path, help="draw time against peers into this PNG file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def plan(arguments: argparse.Namespace) -> list[tuple[str, str, str, Case]]:
    """Return all cells: network, system, its settings, and on what.

    Live ones whose lines together are more than a machine forwards are left out.
    """
    live = [] if arguments.virtual else [count for count in arguments.peers if count]
    systems = bench_broadcast.systems_of([ONE_TO_MANY, OURS, "libtorrent"] if live else [])
    found = []
    for mbit in arguments.mbit:
        given = {
            "links": LINKS,
            "rtt_ms": 0.0,
            "payload_bytes": int(arguments.payload_mb * MB),
            "seed": arguments.seed,
            "mbit": mbit,
        }
        for count in live:
            if (count + 1) * mbit <= TOTAL_MBIT_MAX:
                case = Case(peers=count, tls=True, **given)
                found += [(LIVE, system, settings, case) for system, settings in systems]
        for count in arguments.virtual_peers:
            if count:
                case = Case(peers=count, **given)
                found += [(VIRTUAL, system, "", case) for system in (ONE_TO_MANY, OURS)]
    return found


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what has not been measured yet.

    Raises:
        EchoError: There is no root, a part failed, or the folder holds something else.
    """
    pictures.check_target(arguments.plot)
    cells = plan(arguments)
    if not cells:
        raise ConfigError("--peers", "there is nothing to measure: name a number of peers")
    live = [case for network, _, _, case in cells if network == LIVE]
    if live:
        bench_broadcast.check(live)
    machine, versions = bench_report.machine(), bench_report.versions("libtorrent")
    settings = {
        "links": LINKS,
        "payload_mb": arguments.payload_mb,
        "runs": arguments.runs,
        "seed": arguments.seed,
    }
    conditions = {**settings, "machine": machine, "versions": versions}
    kept = Cells(arguments.folder, conditions, len(cells))
    rows = []
    for network, system, how, case in cells:
        name = "-".join(
            filter(None, (network, f"{case.mbit:g}-mbit", f"{case.peers}-peers", system, how))
        )
        measure = partial(_measure, network, system, how, case, arguments.runs)
        rows.append(await kept.get(name, measure, _line))
    if arguments.plot is not None:
        draw(rows, arguments.seed, arguments.plot)
    return {"settings": settings, "rows": rows, "machine": machine, "versions": versions}


async def _measure(network: str, system: str, how: str, case: Case, runs: int) -> dict[str, Any]:
    if network == VIRTUAL:
        (row,) = await trio.to_thread.run_sync(broadcast_virtual.measure, case, [system], runs)
        return asdict(row)
    (found,) = await bench_broadcast.in_namespaces(Work(case, [(system, how)], runs))
    return found


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['last_s']:.2f} s, {row['multiple']:.2f} x the bound"


def is_busy(row: Mapping[str, Any], cores: int) -> bool:
    """Return whether the cores were the bound, and not the lines."""
    return bool(row["network"] == LIVE and row["cpu_s"] > BUSY_SHARE * cores * row["last_s"])


def table(result: Mapping[str, Any]) -> str:
    """Return the result for a person."""
    settings, machine = result["settings"], result["machine"]
    lines = [
        f"{settings['payload_mb']:g} MB over equal lines; live: processes with TLS in namespaces, "
        f"virtual: without; seed {settings['seed']}, median of {settings['runs']}",
        f"{bench_report.stated()}, libtorrent "
        f"{result['versions'].get('libtorrent', 'not installed')}",
    ]
    rows = result["rows"]
    for network, mbit in dict.fromkeys((row["network"], row["mbit"]) for row in rows):
        mine = [row for row in rows if (row["network"], row["mbit"]) == (network, mbit)]
        lines += ["", f"{network}, {mbit:g} Mbit/s", *_block(mine, machine["cores"])]
    return "\n".join(lines)


def _block(rows: Sequence[Mapping[str, Any]], cores: int) -> list[str]:
    lines = [
        f"{'peers':>7}{'bound':>10}{'ours':>10}{'x bound':>9}{ONE_TO_MANY:>13}{'over ours':>11}"
        f"{'libtorrent':>12}"
    ]
    for count in dict.fromkeys(row["peers"] for row in rows):
        mine = [row for row in rows if row["peers"] == count]
        by_system = {row["system"]: row for row in mine if row["system"] != "libtorrent"}
        rivals = [row["last_s"] for row in mine if row["system"] == "libtorrent"]
        ours, many = by_system[OURS], by_system[ONE_TO_MANY]
        best = f"{min(rivals):.2f} s" if rivals else "-"
        busy = "  cores were busy" if is_busy(ours, cores) else ""
        lines.append(
            f"{count:>7}{ours['bound_s']:>8.2f} s{ours['last_s']:>8.2f} s{ours['multiple']:>9.2f}"
            f"{many['last_s']:>11.2f} s{many['last_s'] / ours['last_s']:>11.2f}{best:>12}{busy}"
        )
    return lines


def draw(rows: Sequence[Mapping[str, Any]], seed: int, target: Path) -> None:
    """Write a PNG file; matplotlib (extra ``report``) must be there."""
    figure, axes = pictures.new_figure()
    colours = {OURS: "C0", ONE_TO_MANY: "C1", "libtorrent": "C2"}
    marks = ("o", "s", "^", "v", "D", "x")
    mbits = list(dict.fromkeys(row["mbit"] for row in rows))
    keys = dict.fromkeys(
        (row["system"], row["settings"], row["network"], row["mbit"]) for row in rows
    )
    for system, settings, network, mbit in keys:
        mine = [
            row
            for row in rows
            if (row["system"], row["settings"], row["network"], row["mbit"])
            == (system, settings, network, mbit)
        ]
        axes.plot(
            [row["peers"] for row in mine],
            [row["last_s"] for row in mine],
            color=colours[system],
            linestyle="-" if network == LIVE else ":",
            marker=marks[mbits.index(mbit) % len(marks)],
            label=f"{system} {settings}".rstrip() + f", {mbit:g} Mbit/s, {network}",
        )
    counts = sorted({row["peers"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, labels=[str(count) for count in counts])
    axes.set_xlabel("peers")
    axes.set_ylabel("seconds until the last peer has it")
    axes.set_title(f"{rows[0]['payload_bytes'] / MB:g} MB over equal lines")
    axes.grid(visible=True, color="#eeeeee")
    axes.legend(frameon=False, fontsize="small")
    pictures.save(figure, target, f"processes with TLS, virtual without; seed {seed}")
