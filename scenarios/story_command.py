"""``echo2-scenario list | run | new``: stories of the virtual world on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from echo2p2p.errors import ConfigError
from echo2p2p.net.program import FAILED, OK, USAGE, run_program
from scenarios import bench_report, report_page, story_report, swarm
from scenarios.arguments import positive_time
from scenarios.live_lab import play_live
from scenarios.play import play
from scenarios.story import Story, load_story, shipped, shipped_apart

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 it has no other

TEMPLATE: Final = Path(__file__).parent / "template.toml"
DEMO: Final = "one coordinator and three peers as processes; trains a tiny model"


def add_commands(commands: Commands) -> None:
    """Add ``list``, ``run`` and ``new``."""
    commands.add_parser("list", help="name the stories")
    run = commands.add_parser("run", help="run one story")
    run.add_argument("name", help="a story's name, the path of a .toml file, or `demo`")
    run.add_argument("--seed", type=int, default=7, help="of everything random (default: 7)")
    run.add_argument("--trace", type=Path, help="write every event here, as JSON lines")
    run.add_argument("--report", type=Path, help="write a page with pictures here (HTML)")
    run.add_argument("--until", type=positive_time, metavar="T", help="stop at this virtual second")
    run.add_argument(
        "--live", action="store_true", help="with real processes on shaped lines (root)"
    )
    run.add_argument("--json", action="store_true", help="print the result as JSON")
    run.add_argument("--folder", type=Path, default=Path("runs/demo"), help="of the demo")
    new = commands.add_parser("new", help="write a commented story to begin with")
    new.add_argument("name", help="of the story; its file is NAME.toml")


def list_stories() -> int:
    """Print one line a story."""
    print(f"{'demo':<22} {DEMO}")
    for name, story in {**shipped(), **shipped_apart()}.items():
        print(f"{name:<22} {story.about}")
    print(f"{swarm.NAME:<22} everything drawn from the seed: machines, settings, faults")
    return OK


def find_story(name: str, seed: int) -> Story:
    """Return the story that a name means with this seed.

    Raises:
        ConfigError: There is none, or it is wrong.
    """
    return swarm.draw_story(seed) if name == swarm.NAME else load_story(name)


def run_story(arguments: argparse.Namespace) -> int:
    """Play one story."""
    try:
        story = find_story(arguments.name, arguments.seed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    if arguments.live:
        return run_program(partial(_run_live, arguments, story))
    played = play(arguments.name, story, arguments.seed, until_s=arguments.until)
    return _tell(arguments, played.result(), played.world.trace_lines())


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
    return _tell(arguments, *await play_live(arguments.name, story, arguments.seed))


def new_story(arguments: argparse.Namespace) -> int:
    """Write a commented story that runs as it is."""
    path = Path(arguments.name.removesuffix(".toml") + ".toml")
    text = TEMPLATE.read_text(encoding="utf-8").replace("{name}", path.stem)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        print(f"error: {path} exists: choose another name, or remove it", file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"error: cannot write {path}: {error.strerror}", file=sys.stderr)
        return FAILED
    print(f"wrote {path}; play it with: echo2-scenario run {path} --seed 7")
    return OK
