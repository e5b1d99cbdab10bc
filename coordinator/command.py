"""``echo2-coordinator``: run a training run; ask a running one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import trio

from coordinator.app import CoordinatorApp, CoordinatorPorts, Opened, StepView
from coordinator.config import Settings
from coordinator.machine import export_trained, open_machine, write_json
from coordinator.report import step_line
from echo2p2p.cli import load_settings
from echo2p2p.errors import EchoError
from echo2p2p.log import open_journal
from echo2p2p.net.ports import Journal
from echo2p2p.net.program import OK, USAGE, run_program
from echo2p2p.net.system import SystemClock

USAGE_TEXT: Final = """\
usage: echo2-coordinator COMMAND [options]

commands:
  run     run a training run, or go on with one whose folder exists
          (--config FILE, --section.key value; run --help lists all settings)

Every command has --help.
"""
PRESETS: Final = Path(__file__).parent / "presets"
Machine = Callable[[Settings, Journal], AbstractAsyncContextManager[CoordinatorPorts]]
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in {"-h", "--help"}:
        print(USAGE_TEXT, end="")
        return OK
    if not words or words[0] != "run":
        print(USAGE_TEXT, end="", file=sys.stderr)
        return USAGE
    try:
        presets = {f"@{file.stem}": file for file in sorted(PRESETS.glob("*.toml"))}
        settings = load_settings(
            Settings, words[1:], program="echo2-coordinator run", presets=presets
        )
    except EchoError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    return run_program(lambda: run(settings))


async def run(settings: Settings, *, machine: Machine = open_machine) -> int:
    """Run one coordinator to the end; prints progress and writes the run's files.

    ``machine`` opens the world; the default is the real one.
    """
    folder = Path(settings.run.folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    tls = settings.server.tls
    use_tls = tls == "on" or (tls == "auto" and settings.server.host not in LOOPBACK)
    with (
        open_journal(sys.stderr, SystemClock(), file=folder / "logs" / "events.jsonl") as journal,
        (folder / "metrics.jsonl").open("a", encoding="utf-8") as metrics,
    ):
        async with machine(settings, journal) as ports:

            def opened(what: Opened) -> None:
                secrets = {"url": what.url, "token": what.token, "admin_token": what.admin_token}
                join = folder / "join.json"
                join.touch(mode=0o600)
                write_json(join, secrets)
                join.chmod(0o600)
                print(f"coordinator at {what.url}", flush=True)
                print(f"  echo2-peer join {what.url} --token {what.token}", flush=True)

            def stepped(view: StepView) -> None:
                metrics.write(json.dumps(step_line(view.record, view.version)) + "\n")
                metrics.flush()
                print(progress_line(view), flush=True)

            def starting(phase: str, figures: Mapping[str, float]) -> None:
                print(start_line(phase, figures, settings), flush=True)

            app = CoordinatorApp(
                settings,
                ports,
                tls=use_tls,
                on_opened=opened,
                on_step=stepped,
                on_start=starting,
            )
            summary = await app.run()
    write_json(folder / "summary.json", summary)
    trained = await trio.to_thread.run_sync(export_trained, folder)
    print(f"trained model in {trained}")
    print(f"summary in {folder / 'summary.json'}")
    return OK


def start_line(phase: str, figures: Mapping[str, float], settings: Settings) -> str:
    """Return the progress of a starting learner for a person."""
    if phase == "warm_start":
        steps = settings.learner.warm_start.steps
        return f"warm start {figures['step']:>3.0f}/{steps}  loss {figures['loss']:.3f}"
    return f"learner: {phase}"


def progress_line(view: StepView) -> str:
    """Return one step for a person."""
    return (
        f"step {view.step:>4}/{view.steps}  reward {view.reward:.3f}"
        f"  version {view.version}  peers {view.peers_ready}/{view.peers}"
        f"  trained {view.trained}  age {view.record.age_mean:.1f}"
        f"  idle {100 * view.idle_share:.0f} %"
    )
