"""``echo2-scenario``: run a story, in virtual time or as processes; measure a part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from echo2p2p.net.program import FAILED, OK, run_program
from scenarios import (
    agree,
    bench_broadcast,
    bench_costs,
    bench_delta,
    bench_engine,
    bench_intake,
    bench_report,
    compare,
    overlap,
    reproduce_broadcast,
    reproduce_faults,
    soak,
    story_command,
    swarm_command,
    torture,
)
from scenarios.demo import Demo

BENCHES = {
    "broadcast": bench_broadcast,
    "costs": bench_costs,
    "delta": bench_delta,
    "engine": bench_engine,
    "intake": bench_intake,
}
"""Benchmarks by name: modules with `add_arguments` and `run`, which returns what is printed."""
CLAIMS: dict[str, Any] = {
    "broadcast": reproduce_broadcast,
    "faults": reproduce_faults,
    "overlap": overlap,
}
"""What is put to the test: modules with `add_arguments`, `run` and `table`."""
TABLES: dict[str, Callable[[Any], str]] = {
    "broadcast": bench_broadcast.table,
    "costs": bench_report.table,
    "delta": bench_delta.table,
    "engine": bench_report.table,
    "intake": bench_report.table,
}
"""What makes text of it."""
HELD: dict[str, Callable[[Any], bool]] = {
    "broadcast": bool,  # a peer that does not have the payload, verified, is an error
    "costs": lambda result: bool(result["held"]),
    "delta": lambda rows: all(row["exact"] for row in rows),
    "engine": lambda result: bool(result["held"]),
    "intake": lambda result: bool(result["held"]),
}
"""Whether what must hold did; no time is ever part of that."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="echo2-scenario", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    story_command.add_commands(commands)
    swarm_command.add_command(commands)
    bench = commands.add_parser("bench", help="measure one part, for real").add_subparsers(
        dest="name", required=True
    )
    for name, module in BENCHES.items():
        about = (module.__doc__ or "").splitlines()[0].partition(": ")[2]
        one = bench.add_parser(name, help=about, description=about)
        module.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print the result as JSON")
    about = "kill -9 a coordinator under load at random moments, and look at what is left"
    torture.add_arguments(commands.add_parser("torture", help=about, description=about))
    about = "watch the memory of real processes while peers come and go"
    soaking = commands.add_parser("soak", help=about, description=about)
    soak.add_arguments(soaking)
    soaking.add_argument("--json", action="store_true", help="print the result as JSON")
    about = "lay two results of `run --json` beside each other"
    compare.add_arguments(commands.add_parser("compare", help=about, description=about))
    about = "play stories in virtual time and with real processes, and see whether figures agree"
    agree.add_arguments(commands.add_parser("agree", help=about, description=about))
    reproduce = commands.add_parser("reproduce", help="put a claim of the paper to the test")
    claims = reproduce.add_subparsers(dest="name", required=True)
    for name, claim in CLAIMS.items():
        about = (claim.__doc__ or "").splitlines()[0].partition(": ")[2]
        claim.add_arguments(claims.add_parser(name, help=about, description=about))
    known, more = parser.parse_known_args(argv)
    if more and not (known.command == "run" and known.name == "demo"):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if known.command == "list":
        return story_command.list_stories()
    if known.command == "new":
        return story_command.new_story(known)
    if known.command == "swarm":
        if known.lines:
            return swarm_command.play_lines(known)
        return run_program(partial(swarm_command.run, known))
    if known.command == "compare":
        return compare.compare(known)
    if known.command == "agree":
        return run_program(partial(_agree, known))
    if known.command == "torture":
        return run_program(partial(torture.torture, known))
    if known.command == "soak":
        return run_program(partial(_soak, known))
    if known.command == "reproduce":
        return run_program(partial(_reproduce, known))
    if known.command == "bench":
        return run_program(partial(_bench, known))
    if known.name == "demo":
        return run_program(Demo(known.folder, more).run)
    return story_command.run_story(known)


async def _bench(arguments: argparse.Namespace) -> int:
    result = await BENCHES[arguments.name].run(arguments)
    print(json.dumps(result, indent=2) if arguments.json else TABLES[arguments.name](result))
    return OK if HELD[arguments.name](result) else FAILED


async def _agree(arguments: argparse.Namespace) -> int:
    result = await agree.run(arguments)
    print(json.dumps(result, indent=2) if arguments.json else agree.table(result))
    return OK if result["agree"] else FAILED


async def _reproduce(arguments: argparse.Namespace) -> int:
    claim = CLAIMS[arguments.name]
    result = await claim.run(arguments)
    print(json.dumps(result, indent=2) if arguments.json else claim.table(result))
    return OK


async def _soak(arguments: argparse.Namespace) -> int:
    result = await soak.run(arguments)
    print(json.dumps(result, indent=2) if arguments.json else soak.table(result))
    return OK if result["held"] else FAILED
