"""``echo2-scenario run``: play a story, in virtual time or with real processes; or the demo."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from echo2p2p.errors import ConfigError
from echo2p2p.net.program import FAILED, OK, USAGE, collect_rarely, run_program
from scenarios import bench_report, report_page, story_report, swarm
from scenarios.arguments import positive_time
from scenarios.list_command import DEMO
from scenarios.play import play
from scenarios.story import Story, load_story


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    parser.add_argument("name", help="a story's name, the path of a .toml file, or `demo`")
    parser.add_argument("--seed", type=int, default=7, help="of everything random (default: 7)")
    parser.add_argument("--trace", type=Path, help="write every event here, as JSON lines")
    parser.add_argument("--report", type=Path, help="write a page with pictures here (HTML)")
    parser.add_argument(
        "--until", type=positive_time, metavar="T", help="stop at this virtual second"
    )
    parser.add_argument(
        "--live", action="store_true", help="with real processes on shaped lines (root)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="of the demo")


def main(arguments: argparse.Namespace) -> int:
    """Play one story; returns the exit code."""
    if arguments.name == DEMO:
        from scenarios.demo import Demo

        return run_program(Demo(arguments.folder, arguments.more).run)
    try:
        story = find_story(arguments.name, arguments.seed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    if arguments.live:
        return run_program(partial(_run_live, arguments, story))
    collect_rarely()
    played = play(arguments.name, story, arguments.seed, until_s=arguments.until)
    return _tell(arguments, played.result(), played.world.trace_lines())


def find_story(name: str, seed: int) -> Story:
    """Return the story that a name means with this seed.

    Raises:
        ConfigError: There is none, or it is wrong.
    """
    return swarm.draw_story(seed) if name == swarm.NAME else load_story(name)


def _tell(arguments: argparse.Namespace, result: dict[str, Any], trace: list[str]) -> int:
    """Print and write what was asked for; returns the exit code."""
    wanted: list[tuple[Path, str]] = []
    if arguments.trace is not None:
        wanted.append((arguments.trace, "".join(f"{line}\n" for line in trace)))
    if arguments.report is not None:
        entries = list(map(json.loads, trace))
        made = bench_report.machine(), bench_report.versions()
        wanted.append((arguments.report, report_page.page(result, entries, *made)))
    for path, text in wanted:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"error: cannot write {path}: {error.strerror}", file=sys.stderr)
            return FAILED
    print(json.dumps(result, indent=2) if arguments.json else story_report.table(result))
    return OK if result["held"] else FAILED


async def _run_live(arguments: argparse.Namespace, story: Story) -> int:
    if arguments.until is not None:
        raise ConfigError("--until", "only without --live")
    from scenarios.live_lab import play_live

    return _tell(arguments, *await play_live(arguments.name, story, arguments.seed))
