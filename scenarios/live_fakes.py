"""A real coordinator and real peers as processes, with everything real but the models.

``python -m scenarios.live_fakes run`` and ``... join`` are ``echo2-coordinator run`` and
``echo2-peer join`` with a fake learner, task worker and engine (`scenarios.parts`): sockets, TLS,
SQLite, files, signals, exit codes and messages are those of the real commands, and a start takes
half a second and no torch. They take all settings of the real commands, and ``--fake-*`` ones for
what the fakes should do (``--help`` lists these). Checkpoints are files, so a coordinator that is
killed goes on from its folder.

For tests of whole processes, and for trying a network by hand. Nothing is learnt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel

from coordinator.app import CoordinatorPorts
from coordinator.command import run as run_coordinator
from coordinator.config import Settings
from coordinator.learner.base import (
    LearnerReady,
    LearnerSetup,
    Progress,
    StepReport,
    TrainBatch,
)
from coordinator.machine import open_machine as open_coordinator
from echo2p2p.cli import load_settings
from echo2p2p.errors import EchoError
from echo2p2p.log import LogFlags, take_log_flags
from echo2p2p.net.disk_errors import guard_disk
from echo2p2p.net.ports import Journal
from echo2p2p.net.program import USAGE, run_program
from echo2p2p.net.system import SystemClock
from peer.app import PeerPorts
from peer.command import join as run_peer
from peer.config import PeerSettings
from peer.machine import open_machine as open_peer
from scenarios.fake_engine import FakeEngine
from scenarios.fake_learner import FakeLearner
from scenarios.parts import InlineTaskWorker
from scenarios.record import sample_name

SettingsT = TypeVar("SettingsT", bound=BaseModel)

MODEL_FILES: Final = ("config.json", "tokenizer.json")
"""What a folder must have to pass for a model's; the fakes do not read it."""


@dataclass(frozen=True)
class Fakes:
    """What the fakes do; the ``--fake-*`` options."""

    start_s: float
    step_s: float
    token_s: float
    clock_ahead_s: float
    memory_bytes: int | None
    train_log: Path | None
    ballast: int


class NotedLearner(FakeLearner):
    """A fake learner that writes down what it consumes: one JSON line a start and a step.

    A sample is known by the digest of its log-probs, which whoever uploads should make unique.
    """

    def __init__(self, file: Path, checkpoints: MutableMapping[str, bytes], fakes: Fakes) -> None:
        super().__init__(
            checkpoints, start_s=fakes.start_s, step_s=fakes.step_s, ballast=fakes.ballast
        )
        self._file = file

    async def start(self, setup: LearnerSetup, progress: Progress) -> LearnerReady:
        """See `Learner`."""
        ready = await super().start(setup, progress)
        self._note({"start": ready.step})
        return ready

    async def train(self, batch: TrainBatch) -> StepReport:
        """See `Learner`."""
        report = await super().train(batch)
        samples = [sample_name(sample.logprobs.tobytes()) for sample in batch.samples]
        self._note({"step": report.step, "samples": samples})
        return report

    def _note(self, line: dict[str, object]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class ShiftedClock:
    """`WallClock` of a machine whose clock is wrong."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def time(self) -> float:
        """Return seconds since 1970 UTC, more or less."""
        return SystemClock().time() + self._ahead_s


class CheckpointFiles(MutableMapping[str, bytes]):
    """The fake learner's checkpoints as folders, each with one file and whole or absent."""

    def __getitem__(self, name: str) -> bytes:
        """Return a checkpoint's content."""
        try:
            return (Path(name) / "state").read_bytes()
        except FileNotFoundError as error:
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: bytes) -> None:
        """Write a checkpoint.

        Raises:
            StoreError: The disk refused.
        """
        partial = Path(f"{name}.partial")
        with guard_disk(f"write {name}"):
            partial.mkdir(parents=True, exist_ok=True)
            (partial / "state").write_bytes(value)
            partial.rename(name)

    def __delitem__(self, name: str) -> None:
        """Remove a checkpoint."""
        (Path(name) / "state").unlink()
        Path(name).rmdir()

    def __iter__(self) -> Iterator[str]:
        """Say that there is none: the learner is told where its checkpoint is."""
        return iter(())

    def __len__(self) -> int:
        """Count none, as `__iter__`."""
        return 0


def coordinator_machine(
    fakes: Fakes,
) -> Callable[[Settings, Journal], AbstractAsyncContextManager[CoordinatorPorts]]:
    """Return what opens a coordinator's world with a fake learner and task worker in it."""

    @asynccontextmanager
    async def machine(settings: Settings, journal: Journal) -> AsyncIterator[CoordinatorPorts]:
        make_model(Path(settings.model.path))
        async with open_coordinator(settings, journal) as ports:
            yield replace(
                ports,
                clock=ShiftedClock(fakes.clock_ahead_s),
                make_learner=lambda: _learner(fakes),
                make_task_worker=InlineTaskWorker,
            )

    return machine


def make_model(folder: Path) -> None:
    """Make what passes for a model's folder.

    Raises:
        StoreError: The disk refused.
    """
    with guard_disk(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in MODEL_FILES:
            (folder / name).write_text("{}\n", encoding="utf-8")


def _learner(fakes: Fakes) -> FakeLearner:
    if fakes.train_log is not None:
        return NotedLearner(fakes.train_log, CheckpointFiles(), fakes)
    return FakeLearner(
        CheckpointFiles(), start_s=fakes.start_s, step_s=fakes.step_s, ballast=fakes.ballast
    )


def peer_machine(
    fakes: Fakes,
) -> Callable[[PeerSettings, Journal], AbstractAsyncContextManager[PeerPorts]]:
    """Return what opens a peer's world with a fake engine in it."""

    @asynccontextmanager
    async def machine(settings: PeerSettings, journal: Journal) -> AsyncIterator[PeerPorts]:
        real = settings.model_copy(
            update={"engine": settings.engine.model_copy(update={"kind": "none"})}
        )
        async with open_peer(real, journal) as opened:
            ports = replace(opened, clock=ShiftedClock(fakes.clock_ahead_s))
            if fakes.memory_bytes is not None:
                ports = replace(ports, memory_free=lambda: fakes.memory_bytes)
            if settings.engine.kind != "none":
                ports = replace(
                    ports,
                    engine_kind="fake",
                    make_engine=lambda: FakeEngine(
                        start_s=fakes.start_s, seconds_per_token=fakes.token_s
                    ),
                )
            yield ports

    return machine


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scenarios.live_fakes",
        description="echo2-coordinator run and echo2-peer join without models",
        epilog="all other options are those of the real commands",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("run", "join"))
    for option, kind, default, text in (
        ("--fake-start-s", float, 0.0, "start of learner or engine takes so long"),
        ("--fake-step-s", float, 0.1, "one step of the learner takes so long"),
        ("--fake-token-s", float, 0.002, "one token of the engine takes so long"),
        ("--fake-clock-ahead-s", float, 0.0, "the clock of this machine is wrong by this"),
        ("--fake-memory-bytes", int, None, "this peer has so much free memory"),
        ("--fake-train-log", Path, None, "the learner writes down what it consumes"),
        ("--fake-ballast", int, 0, "the learner's model has so many more weights"),
    ):
        parser.add_argument(option, type=kind, default=default, help=text)
    known, words = parser.parse_known_args(argv)
    flags, rest = take_log_flags(words)
    fakes = Fakes(
        known.fake_start_s,
        known.fake_step_s,
        known.fake_token_s,
        known.fake_clock_ahead_s,
        known.fake_memory_bytes,
        known.fake_train_log,
        known.fake_ballast,
    )
    if known.command == "run":
        return _run(rest, fakes, flags)
    return _join(rest, fakes, flags)


def _run(words: list[str], fakes: Fakes, flags: LogFlags) -> int:
    values = {
        "run": {"folder": "run", "steps": 1_000_000},
        "server": {"port": 0},
        "model": {"path": os.devnull},
        "rollouts": {"prompts_per_step": 2, "samples_per_prompt": 2, "tokens_max": 8},
    }
    settings = _load(Settings, words, values)
    if settings is None:
        return USAGE
    if settings.model.path == os.devnull:
        model = settings.model.model_copy(update={"path": f"{settings.run.folder}/model"})
        settings = settings.model_copy(update={"model": model})
    machine = coordinator_machine(fakes)
    return run_program(lambda: run_coordinator(settings, machine=machine, flags=flags))


def _join(words: list[str], fakes: Fakes, flags: LogFlags) -> int:
    if words and not words[0].startswith("-"):
        words = ["--url", *words]
    settings = _load(PeerSettings, words, {"relay": {"host": "127.0.0.1"}})
    if settings is None:
        return USAGE
    machine = peer_machine(fakes)
    return run_program(lambda: run_peer(settings, machine=machine, flags=flags))


def _load(kind: type[SettingsT], words: list[str], values: dict[str, object]) -> SettingsT | None:
    try:
        return load_settings(kind, words, program="live_fakes", presets={}, values=values)
    except EchoError as error:
        print(f"error: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main())
