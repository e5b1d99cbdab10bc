"""``echo2-scenario``: run a story, in virtual time or as processes; measure a part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from echo2p2p.errors import EchoError
from echo2p2p.net.program import FAILED, OK, run_program
from echo2p2p.testing.clock import run_virtual
from scenarios import bench_delta, bench_intake, bench_report, first_light, soak, torture
from scenarios.demo import Demo
from scenarios.world import World

STORIES = {"first-light": first_light}
"""Stories in virtual time, by name."""
BENCHES = {"delta": bench_delta, "intake": bench_intake}
"""Benchmarks by name: modules with `add_arguments` and `run`, which returns what is printed."""
TABLES: dict[str, Callable[[Any], str]] = {
    "delta": bench_delta.table,
    "intake": bench_report.table,
}
"""What makes text of it."""
HELD: dict[str, Callable[[Any], bool]] = {
    "delta": lambda rows: all(row["exact"] for row in rows),
    "intake": lambda result: bool(result["held"]),
}
"""Whether what must hold did; no time is ever part of that."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="echo2-scenario", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the stories")
    run = commands.add_parser("run", help="run one story")
    run.add_argument("name", help="a story's name, or `demo`")
    run.add_argument("--seed", type=int, default=7, help="of everything random (default: 7)")
    run.add_argument("--trace", type=Path, help="write every event here, as JSON lines")
    run.add_argument("--json", action="store_true", help="print the result as JSON")
    run.add_argument("--folder", type=Path, default=Path("runs/demo"), help="of the demo")
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
    known, more = parser.parse_known_args(argv)
    if more and not (known.command == "run" and known.name == "demo"):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if known.command == "list":
        print("demo          one coordinator and three peers as processes; trains a tiny model")
        for name, story in STORIES.items():
            print(f"{name:<13} {(story.__doc__ or '').splitlines()[0]}")
        return OK
    if known.command == "torture":
        return run_program(partial(torture.torture, known))
    if known.command == "soak":
        return run_program(partial(_soak, known))
    if known.command == "bench":
        return run_program(partial(_bench, known))
    if known.name == "demo":
        return run_program(Demo(known.folder, more).run)
    if known.name not in STORIES:
        parser.error(f"no story {known.name!r}; `echo2-scenario list` names them")
    return _run_story(known.name, known.seed, known.trace, as_json=known.json)


async def _bench(arguments: argparse.Namespace) -> int:
    result = await BENCHES[arguments.name].run(arguments)
    print(json.dumps(result, indent=2) if arguments.json else TABLES[arguments.name](result))
    return OK if HELD[arguments.name](result) else FAILED


async def _soak(arguments: argparse.Namespace) -> int:
    result = await soak.run(arguments)
    print(json.dumps(result, indent=2) if arguments.json else soak.table(result))
    return OK if result["held"] else FAILED


def _run_story(name: str, seed: int, trace: Path | None, *, as_json: bool) -> int:
    story = STORIES[name]
    made: list[World] = []

    async def play() -> None:
        made.append(story.make_world(seed))
        await made[0].run(story.nemesis)

    problem = ""
    try:
        run_virtual(play, seed=seed)
    except (EchoError, BaseExceptionGroup) as error:
        problem = f"{type(error).__name__}: {error}"
    world = made[0]
    if trace is not None:
        trace.write_text("".join(f"{line}\n" for line in world.trace_lines()), encoding="utf-8")
    problems = [*world.breaches, *([problem] if problem else [])]
    result = {
        "story": name,
        "seed": seed,
        "held": not problems,
        "problems": problems,
        "trace": world.trace.digest().hex(),
        "events": len(world.trace.entries),
        "summary": world.summary,
    }
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    return FAILED if problems else OK


def _print(result: dict[str, object]) -> None:
    summary = result["summary"]
    print(f"{result['story']} with seed {result['seed']}: {result['events']} events")
    if isinstance(summary, dict):
        print(f"  {summary['steps']} steps in {summary['wall_s']:.1f} virtual seconds")
        print(f"  trajectories {summary['trajectories']}")
    for problem in result["problems"] if isinstance(result["problems"], list) else []:
        print(f"  BROKEN: {problem}")
    print(f"  trace {result['trace']}")
    if result["held"]:
        print("  every checker held")
    else:
        print(f"  replay: echo2-scenario run {result['story']} --seed {result['seed']}")
