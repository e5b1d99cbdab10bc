"""``echo2-scenario bench broadcast``: how long until the last peer has a payload, and who sent it?

The systems, on the same lines in the same run: one-to-many (the source sends all of it to
everybody, on a plain TCP stream each), ours (`RelayNode` as shipped, relay links with their mutual
hello, a process a peer), and libtorrent where its Python package is installed. The lines are
network namespaces with token buckets (`scenarios.namespaces`), which take root; with ``--virtual``
they are simulated, and libtorrent is left out. Multiples are of the fluid bound
(`scenarios.broadcast_links`).

The clock runs from the word to the source until the last peer has every chunk, verified; all are
connected before. Bytes are the kernel's, of the token buckets; duplicates are our own count; CPU is
that of all processes, per megabyte delivered. Of several runs the row is that of the median time.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec
import trio

from echo2p2p.errors import ConfigError, EchoError
from scenarios import (
    broadcast_lab,
    broadcast_plot,
    broadcast_torrent,
    broadcast_virtual,
    namespaces,
    pictures,
)
from scenarios.arguments import between, whole
from scenarios.broadcast_faults import FAULTS, lie_of
from scenarios.broadcast_links import KINDS, plan_lines
from scenarios.broadcast_rows import MB, Case, table

__all__ = ["add_arguments", "check", "in_namespaces", "run", "systems_of", "table"]

OURS: Final = ("one-to-many", "echo2p2p")
OTHERS: Final = ("libtorrent",)
PEERS_MAX: Final = 4096
PAYLOAD_MB_MAX: Final = 250
"""What a generator of random bytes makes at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this benchmark understands, beside ``--json``."""
    parser.add_argument(
        "--peers",
        type=whole(1, PEERS_MAX),
        nargs="+",
        default=[8],
        help="how many, one or several numbers",
    )
    parser.add_argument("--links", choices=KINDS, default="homogeneous", help="the peers' lines")
    parser.add_argument("--rtt-ms", type=between(0, 10_000), default=0.0, help="round trip")
    parser.add_argument(
        "--payload-mb", type=between(0.1, PAYLOAD_MB_MAX), default=20.0, help="of 1,000,000 bytes"
    )
    parser.add_argument(
        "--runs", type=whole(1, PEERS_MAX), default=1, help="the median counts (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of keys, payload and choices")
    parser.add_argument(
        "--systems", choices=(*OURS, *OTHERS), nargs="+", help="only these (default: all)"
    )
    parser.add_argument("--no-tls", action="store_true", help="relay links without TLS")
    parser.add_argument(
        "--fault",
        choices=sorted(FAULTS),
        metavar="FAULT",
        default="",
        help=f"go wrong in the middle, beside a run without: {', '.join(sorted(FAULTS))}",
    )
    parser.add_argument("--virtual", action="store_true", help="in virtual time, without root")
    parser.add_argument("--plot", type=Path, help="draw time against peers into this PNG file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


async def run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure; returns the rows, and tells of each run on standard error.

    Raises:
        EchoError: There is no root, or a part failed.
    """
    pictures.check_target(arguments.plot)
    cases = [
        Case(
            peers=peers,
            links=arguments.links,
            rtt_ms=arguments.rtt_ms,
            payload_bytes=int(arguments.payload_mb * MB),
            seed=arguments.seed,
            tls=not (arguments.no_tls or arguments.virtual or lie_of(arguments.fault)),
            fault=arguments.fault,
        )
        for peers in arguments.peers
    ]
    wanted = arguments.systems or ([*OURS, *OTHERS] if not arguments.fault else ["echo2p2p"])
    rows: list[dict[str, object]] = []
    if arguments.fault and (arguments.virtual or wanted != ["echo2p2p"]):
        raise ConfigError(
            "--fault", "only for echo2p2p on namespaces; stories have them in virtual"
        )
    if arguments.virtual:
        ours = [system for system in wanted if system in OURS]
        for case in cases:
            found = await trio.to_thread.run_sync(
                broadcast_virtual.measure, case, ours, arguments.runs
            )
            rows += map(asdict, found)
    else:
        check(cases)
        systems = systems_of(wanted)
        for case in cases:
            rows += await in_namespaces(broadcast_lab.Work(case, systems, arguments.runs))
    if arguments.plot is not None:
        broadcast_plot.draw(rows, arguments.plot)
    return rows


def systems_of(wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Return the systems that can run here, with their settings."""
    found = [(system, "") for system in wanted if system in OURS]
    if "libtorrent" in wanted:
        if importlib.util.find_spec("libtorrent") is None:
            print("libtorrent is not installed: it is left out", file=sys.stderr)
        else:
            found += [("libtorrent", settings) for settings in broadcast_torrent.SETTINGS]
    return found


def check(cases: Sequence[Case]) -> None:
    """Refuse what cannot be measured on namespaces.

    Raises:
        EchoError: And why.
    """
    why = namespaces.why_impossible()
    if why is not None:
        raise EchoError(why)
    for case in cases:
        lines = plan_lines(case.links, case.peers, case.mbit)
        if case.rtt_ms or case.fault == "flap" or any(line.rtt_ms or line.loss for line in lines):
            why = namespaces.why_no_packets_held()
            if why is not None:
                raise ConfigError("--fault" if case.fault == "flap" else "--rtt-ms", why)
        uplinks_mbit = sum(line.up_mbit for line in lines)
        if uplinks_mbit > namespaces.TOTAL_MBIT_MAX:
            detail = (
                f"{case.peers} peers have {uplinks_mbit:g} Mbit/s together, one machine"
                f" forwards {namespaces.TOTAL_MBIT_MAX:g}: take fewer, or --virtual"
            )
            raise ConfigError("--peers", detail)


async def in_namespaces(work: broadcast_lab.Work) -> list[dict[str, object]]:
    """Run `scenarios.broadcast_lab`; its end is the end of everything that it built."""
    printed = await namespaces.run_inside(
        "scenarios.broadcast_lab", msgspec.json.encode(work).decode()
    )
    return [msgspec.json.decode(line, type=dict[str, object]) for line in printed.splitlines()]
