"""``echo2-coordinator``: run a training run; check its settings; ask a running one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import trio

from coordinator import fetch_command, status_command
from coordinator.access import JOIN_FILE, write_access
from coordinator.app import CoordinatorApp, CoordinatorPorts, Opened, StepView
from coordinator.check_command import check
from coordinator.config import Settings
from coordinator.machine import export_trained, open_machine, write_json
from coordinator.plots import PlotError, plot
from coordinator.recorder import EVENTS_FOLDER, Recorder
from coordinator.view import RunView
from echo2p2p.cli import load_settings
from echo2p2p.errors import EchoError
from echo2p2p.log import LOG_HELP, LogFlags, open_journal, take_log_flags
from echo2p2p.net.disk_errors import make_folders
from echo2p2p.net.ports import Journal
from echo2p2p.net.program import OK, USAGE, run_program
from echo2p2p.net.system import SystemClock
from echo2p2p.terminal import Screen, can_draw, open_screen

USAGE_TEXT: Final = """\
usage: echo2-coordinator COMMAND [options]

commands:
  run     run a training run, or go on with one whose folder exists
          (--config FILE, --section.key value; run --help lists all settings)
  fetch   fetch a model that model.path can name (@smollm2)
  check   print the settings as a run would use them, or what is wrong with them
  status  show what a running run says of itself (a run folder, or URL and admin token)

Every command has --help.
"""
PRESETS: Final = Path(__file__).parent / "presets"
Machine = Callable[[Settings, Journal], AbstractAsyncContextManager[CoordinatorPorts]]
PLOT_FAILED: Final = "plot.failed"
VIEW_S: Final = 1.0
"""A live view is drawn so often."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in {"-h", "--help"}:
        print(USAGE_TEXT, end="")
        return OK
    command = words[0] if words else ""
    try:
        if command == "run":
            flags, rest = take_log_flags(words[1:])
            settings = _settings(command, rest, LOG_HELP)
            return run_program(lambda: run(settings, flags=flags))
        if command == "check":
            print(check(_settings(command, words[1:], "")), end="")
            return OK
        if command == "fetch":
            return fetch_command.fetch(fetch_command.parse(words[1:]))
        if command == "status":
            arguments = status_command.parse(words[1:])
            return run_program(lambda: status_command.status(arguments))
    except EchoError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    print(USAGE_TEXT, end="", file=sys.stderr)
    return USAGE


def _settings(command: str, words: Sequence[str], notes: str) -> Settings:
    presets = {f"@{file.stem}": file for file in sorted(PRESETS.glob("*.toml"))}
    program = f"echo2-coordinator {command}"
    return load_settings(Settings, words, program=program, presets=presets, notes=notes)


async def run(
    settings: Settings, *, machine: Machine = open_machine, flags: LogFlags | None = None
) -> int:
    """Run one coordinator to the end; shows progress and writes the run's files.

    Args:
        settings: Validated.
        machine: Opens the world; the default is the real one.
        flags: What the terminal shows.
    """
    flags = flags or LogFlags()
    folder = Path(settings.run.folder).expanduser()
    make_folders("run.folder", folder, folder / "logs")
    live = flags.shows_progress and can_draw(sys.stdout)
    with ExitStack() as stack:
        screen = stack.enter_context(open_screen(sys.stdout, live=live))
        stream: TextIO = screen.stream() if live else sys.stderr
        events = folder / "logs" / "events.jsonl"
        journal = stack.enter_context(
            open_journal(stream, SystemClock(), form=flags.form, lowest=flags.lowest, file=events)
        )
        recorder = stack.enter_context(closing(Recorder(folder, SystemClock(), journal)))
        teller = Teller(folder, settings, screen if flags.shows_progress else None, recorder)
        try:
            async with machine(settings, journal) as ports:
                app = CoordinatorApp(
                    settings,
                    ports,
                    tls=settings.server.uses_tls,
                    on_opened=teller.opened,
                    on_step=teller.stepped,
                    on_start=teller.starting,
                )
                async with trio.open_nursery() as nursery:
                    if live:
                        nursery.start_soon(teller.draw, app)
                    summary = await app.run()
                    nursery.cancel_scope.cancel()
        except (EchoError, BaseExceptionGroup):
            if teller.steps:  # why it failed may be seen in how it went
                teller.say(await _plotted(folder, journal))
            raise
        write_json(folder / "summary.json", summary)
        trained = await trio.to_thread.run_sync(export_trained, folder)
        if trained is not None:
            teller.say(f"trained model in {trained}")
        teller.say(await _plotted(folder, journal))
        teller.say(f"TensorBoard: tensorboard --logdir {folder / EVENTS_FOLDER}")
        teller.say(f"summary in {folder / 'summary.json'}")
    return OK


async def _plotted(folder: Path, journal: Journal) -> str:
    """Draw reward.png and say so; a run without its picture is a good run all the same."""
    try:
        picture = await plot(folder)
    except PlotError as error:
        journal.event(PLOT_FAILED, detail=str(error))
        return str(error)
    if picture is None:
        return "no reward.png: pip install 'echo2p2p[report]' for it"
    return f"reward plot in {picture}"


class Teller:
    """Tells the user how the run goes, and the run's folder what is kept.

    Args:
        folder: Of the run.
        settings: Of the run.
        screen: For the user; ``None``: no lines.
        recorder: Writes the steps down.
    """

    def __init__(
        self, folder: Path, settings: Settings, screen: Screen | None, recorder: Recorder
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._screen = screen
        self._recorder = recorder
        self._url = ""
        self.steps = 0
        """Done in this life."""

    def say(self, line: str) -> None:
        """Show a line."""
        if self._screen is not None:
            self._screen.line(line)

    def opened(self, what: Opened) -> None:
        """The server listens: say how to join."""
        write_access(self._folder, what)
        self._url = what.url
        self.say(f"coordinator at {what.url}, dashboard at {what.url}/dashboard")
        self.say(f"  echo2-peer join {what.url} --token {what.token}")
        self.say(f"  echo2-coordinator status {self._folder}   (secrets in {JOIN_FILE} there)")

    def stepped(self, view: StepView) -> None:
        """A step is done."""
        self._recorder.step(view.record, view.version)
        self.steps += 1
        if self._screen is not None and not self._screen.live:
            self.say(progress_line(view))

    def starting(self, phase: str, figures: Mapping[str, float]) -> None:
        """A learner is on its way up."""
        if self._screen is not None and not self._screen.live:
            self.say(start_line(phase, figures, self._settings))

    async def draw(self, app: CoordinatorApp) -> None:
        """Keep the view fresh until cancelled."""
        while True:
            await trio.sleep(VIEW_S)
            if self._url and self._screen is not None:
                view = partial(RunView, await app.status(), f"{self._url}/dashboard")
                self._screen.show(view)


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
