"""``echo2-scenario swarm``: play a story with many seeds, in several processes, and report."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time  # noqa: TID251 how long real work took
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import trio

from echo2p2p.errors import ChildError
from echo2p2p.net.program import FAILED, OK, collect_rarely, run_program
from scenarios import swarm
from scenarios.arguments import positive
from scenarios.play import play
from scenarios.story_command import find_story

TOLD_EVERY = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    parser.add_argument("--seeds", type=positive, default=100, help="how many (default: 100)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default: 1)")
    parser.add_argument("--step", type=positive, default=1, help="from seed to seed (default: 1)")
    parser.add_argument("--jobs", type=positive, default=1, help="processes (default: 1)")
    parser.add_argument("--story", default=swarm.NAME, help="play this story instead")
    parser.add_argument("--lines", action="store_true", help="print a JSON line a seed, no report")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Play them all; returns the exit code."""
    if arguments.lines:
        return _play_lines(arguments)
    return run_program(partial(_run, arguments))


def _play_lines(arguments: argparse.Namespace) -> int:
    """Play all seeds in this process and print a JSON line for each."""
    collect_rarely()
    for seed in _seeds(arguments):
        began = time.monotonic()
        problems = play(arguments.story, find_story(arguments.story, seed), seed).problems
        line = {"seed": seed, "problems": problems, "seconds": time.monotonic() - began}
        print(json.dumps(line), flush=True)
    return OK


async def _run(arguments: argparse.Namespace) -> int:
    """Play all seeds in processes, and report.

    Raises:
        ConfigError: There is no such story.
        ChildError: A process has died.
    """
    find_story(arguments.story, arguments.first)  # a wrong name is one error, not one a process
    began = time.monotonic()
    failed: dict[str, list[str]] = {}
    seconds: list[float] = []

    def note(line: dict[str, Any]) -> None:
        seconds.append(line["seconds"])
        if line["problems"]:
            failed[str(line["seed"])] = line["problems"]
            print(f"seed {line['seed']}: {line['problems'][0]}", file=sys.stderr, flush=True)
        elif len(seconds) % TOLD_EVERY == 0:
            print(f"{len(seconds)} of {arguments.seeds} seeds", file=sys.stderr, flush=True)

    async with trio.open_nursery() as nursery:
        for words in _shares(arguments):
            nursery.start_soon(_child, words, note)
    checkers = Counter(problem.partition(":")[0] for p in failed.values() for problem in p)
    result = {
        "story": arguments.story,
        "seeds": len(seconds),
        "failed": dict(sorted(failed.items(), key=lambda item: int(item[0]))),
        "checkers": dict(checkers),
        "seconds": round(time.monotonic() - began, 1),
        "slowest_s": round(max(seconds, default=0.0), 1),
    }
    print(json.dumps(result, indent=2) if arguments.json else _table(result))
    return FAILED if failed else OK


def _seeds(arguments: argparse.Namespace) -> range:
    step = arguments.step
    return range(arguments.first, arguments.first + step * arguments.seeds, step)


def _shares(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the command line of each process: every n-th seed."""
    jobs, step = min(arguments.jobs, arguments.seeds), arguments.step
    for number in range(jobs):
        words = {
            "--story": arguments.story,
            "--first": arguments.first + number * step,
            "--step": step * jobs,
            "--seeds": len(range(number, arguments.seeds, jobs)),
        }
        given = [str(word) for pair in words.items() for word in pair]
        yield [sys.executable, "-m", "scenarios", "swarm", "--lines", *given]


async def _child(words: list[str], note: Callable[[dict[str, Any]], None]) -> None:
    process = await trio.lowlevel.open_process(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        rest = b""
        async for data in process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                note(json.loads(line))
        if await process.wait() != OK:
            raise ChildError("swarm", f"exit code {process.returncode}; its words are above")
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def _table(result: dict[str, Any]) -> str:
    failed = result["failed"]
    lines = [
        f"{result['story']}: {result['seeds']} seeds in {result['seconds']} s, the slowest "
        f"{result['slowest_s']} s; {len(failed)} failed"
    ]
    lines += [f"  {count:>5}  {checker}" for checker, count in result["checkers"].items()]
    for seed, problems in failed.items():
        lines.append(f"  seed {seed}: {problems[0]}")
        lines.append(f"    replay: echo2-scenario run {result['story']} --seed {seed}")
    return "\n".join(lines)
