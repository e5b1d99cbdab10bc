"""The real coordinator and the real peer, no faster than they would be on machines of their own.

``python -m scenarios.paced run|join`` are ``echo2-coordinator run`` and ``echo2-peer join`` with
torch, engine and all, except that a step of the learner and a sample of the engine take at least
as long as ``--pace-step-s`` and ``--pace-sample-s`` say. Many peers on one machine share its cores:
one that dies would make all others faster. With paces that leave the cores idle it does not, so
that what a fleet loses with a peer can be told. Each ends when its standard input does, so that
none outlives whoever measures.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import trio
from numpy.typing import NDArray
from pydantic import BaseModel

from coordinator.app import CoordinatorPorts
from coordinator.command import PRESETS
from coordinator.command import run as run_coordinator
from coordinator.config import Settings
from coordinator.learner.base import (
    Exported,
    Learner,
    LearnerReady,
    LearnerSetup,
    Progress,
    StepReport,
    TrainBatch,
)
from coordinator.machine import open_machine as open_coordinator
from echo2p2p.cli import load_settings
from echo2p2p.errors import ConfigError, EchoError
from echo2p2p.ids import Digest, Step, Version
from echo2p2p.log import LogFlags, take_log_flags
from echo2p2p.net.ports import Journal, SharedState
from echo2p2p.net.program import USAGE, run_program
from echo2p2p.wire.messages import Lease
from peer.app import PeerPorts
from peer.command import join as run_peer
from peer.config import PeerSettings
from peer.engine.base import (
    Between,
    Engine,
    EngineInfo,
    EngineSetup,
    Generated,
    Heard,
    LoadReport,
    Selection,
)
from peer.machine import open_machine as open_peer
from peer.touched import Touched
from scenarios import namespaces

SettingsT = TypeVar("SettingsT", bound=BaseModel)


@asynccontextmanager
async def lasting(seconds: float) -> AsyncIterator[None]:
    """Let the context take at least so long, if it ends well."""
    began_s = trio.current_time()
    yield
    await trio.sleep_until(began_s + seconds)


class PacedLearner:
    """A `Learner` whose steps take at least ``step_s``."""

    def __init__(self, learner: Learner, step_s: float) -> None:
        self._learner = learner
        self._step_s = step_s

    async def start(self, setup: LearnerSetup, progress: Progress) -> LearnerReady:
        """See `Learner`."""
        return await self._learner.start(setup, progress)

    async def train(self, batch: TrainBatch) -> StepReport:
        """See `Learner`."""
        async with lasting(self._step_s):
            return await self._learner.train(batch)

    async def export(self, state: SharedState, found: SharedState | None) -> Exported:
        """See `Learner`."""
        return await self._learner.export(state, found)

    async def answer(
        self, prompts: Sequence[NDArray[np.uint32]], *, tokens_max: int, stop_ids: Sequence[int]
    ) -> list[NDArray[np.uint32]]:
        """See `Learner`."""
        return await self._learner.answer(prompts, tokens_max=tokens_max, stop_ids=stop_ids)

    async def save(self, folder: Path) -> Step:
        """See `Learner`."""
        return await self._learner.save(folder)

    async def close(self) -> None:
        """See `Learner`."""
        await self._learner.close()


class PacedEngine:
    """An `Engine` that needs at least ``sample_s`` for each sample, one after another."""

    def __init__(self, engine: Engine, sample_s: float) -> None:
        self._engine = engine
        self._sample_s = sample_s

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """See `Engine`."""
        return await self._engine.start(setup)

    async def load(
        self, version: Version, state: SharedState, touched: Touched | None = None
    ) -> LoadReport:
        """See `Engine`."""
        return await self._engine.load(version, state, touched)

    async def prove(self, selection: Selection | None = None) -> Digest:
        """See `Engine`."""
        return await self._engine.prove(selection)

    async def generate(
        self,
        leases: list[Lease],
        *,
        timeout_s: float = math.inf,
        between: Between | None = None,
        heard: Heard | None = None,
    ) -> list[Generated]:
        """See `Engine`."""
        samples = sum(len(lease.seeds) for lease in leases)
        async with lasting(samples * self._sample_s):
            return await self._engine.generate(
                leases, timeout_s=timeout_s, between=between, heard=heard
            )

    def interrupt(self) -> None:
        """See `Engine`."""
        self._engine.interrupt()

    async def close(self) -> None:
        """See `Engine`."""
        await self._engine.close()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scenarios.paced",
        description="echo2-coordinator run and echo2-peer join at a given pace",
        epilog="all other options are those of the real commands",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("run", "join"))
    parser.add_argument("--pace-step-s", type=float, default=0.0, help="a step takes so long")
    parser.add_argument("--pace-sample-s", type=float, default=0.0, help="a sample takes so long")
    known, words = parser.parse_known_args(argv)
    flags, rest = take_log_flags(words)
    try:
        if known.command == "run":
            return _run(_settings(Settings, rest), known.pace_step_s, flags)
        return _join(_settings(PeerSettings, rest), known.pace_sample_s, flags)
    except EchoError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def _settings(kind: type[SettingsT], words: list[str]) -> SettingsT:
    presets = {f"@{file.stem}": file for file in sorted(PRESETS.glob("*.toml"))}
    return load_settings(kind, words, program="paced", presets=presets)


def _run(settings: Settings, step_s: float, flags: LogFlags) -> int:
    @asynccontextmanager
    async def machine(settings: Settings, journal: Journal) -> AsyncIterator[CoordinatorPorts]:
        async with open_coordinator(settings, journal) as ports:
            make = ports.make_learner
            yield replace(ports, make_learner=lambda: PacedLearner(make(), step_s))

    return run_program(lambda: run_coordinator(settings, machine=machine, flags=flags))


def _join(settings: PeerSettings, sample_s: float, flags: LogFlags) -> int:
    @asynccontextmanager
    async def machine(settings: PeerSettings, journal: Journal) -> AsyncIterator[PeerPorts]:
        async with open_peer(settings, journal) as ports:
            make = ports.make_engine
            if make is None:
                raise ConfigError("engine.kind", "there is none to be paced: install torch")
            yield replace(ports, make_engine=lambda: PacedEngine(make(), sample_s))

    return run_program(lambda: run_peer(settings, machine=machine, flags=flags))


if __name__ == "__main__":
    namespaces.end_with_parent()
    sys.exit(main())
