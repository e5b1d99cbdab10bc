"""One process of a live story: the real coordinator or the real peer, with scripted models.

``python -m scenarios.live_node coordinator|peer PART`` plays a `CoordinatorPart` or a `PeerPart`,
given as JSON. Everything is as shipped (sockets, TLS, SQLite, files, signals) except learner, task
worker and engine, which are those of the virtual world. What the clients are told, and what the
learner consumes, is written down in files that are on none of the disks which faults fill.

Faults of the inside (lies, a slow CPU, a wrong clock, an engine that dies) are ordered by
``orders.json`` in the process's folder, looked at ten times a second. Relay lies need links without
TLS: frames are twisted between the relay and its stream.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from coordinator.app import CoordinatorPorts
from coordinator.command import run as run_coordinator
from coordinator.config import Settings
from coordinator.machine import open_machine as open_coordinator
from echo2p2p.log import LogFlags
from echo2p2p.net.ports import Journal
from echo2p2p.net.program import run_program
from echo2p2p.net.system import SystemClock
from echo2p2p.wire.messages import UploadReply
from peer.app import PeerPorts
from peer.command import join as run_peer
from peer.config import PeerSettings
from peer.machine import open_machine as open_peer
from scenarios import namespaces
from scenarios.fake_engine import FakeEngine, Lengths
from scenarios.fake_learner import FakeLearner
from scenarios.false_uploads import Loot, WatchedHttp
from scenarios.lies import Lies, WatchedStreams
from scenarios.live_fakes import CheckpointFiles, make_model
from scenarios.live_usage import Meter
from scenarios.parts import InlineTaskWorker, Pace
from scenarios.record import Record

ORDERS: Final = "orders.json"
LOOK_EVERY_S: Final = 0.1
WITH_PARENT: Final = "--with-parent"
"""Behind a part: end when standard input does. In `namespaces.WRAP` the kernel sees to it."""


class CoordinatorPart(msgspec.Struct, frozen=True):
    """What the coordinator's process is."""

    settings: dict[str, Any]
    """`coordinator.config.Settings`, as JSON has them."""
    start_s: float
    step_s: float
    save_s: float
    changed_share: float
    ballast: int
    trained: str
    """File of what the learner has consumed."""
    usage: str = ""
    """File for what the process uses (`scenarios.live_usage`); empty: nobody counts."""


class PeerPart(msgspec.Struct, frozen=True):
    """What a peer's process is."""

    settings: dict[str, Any]
    """`peer.config.PeerSettings`."""
    start_s: float
    load_s: float
    seconds_per_token: float
    lengths: tuple[int, int, bool]
    """See `scenarios.fake_engine.Lengths`."""
    seed: int
    can_lie: bool
    """Whether its frames may be twisted; not with TLS."""
    record: str
    """File of what it was told."""
    usage: str = ""
    """See `CoordinatorPart.usage`."""


class Orders(msgspec.Struct):
    """What a process is told to suffer; counts say how often, so that none is done twice."""

    lies: list[str] = []
    pace: float = 1.0
    ahead_s: float = 0.0
    kills: int = 0
    hangs: int = 0
    spoils: int = 0


class _Sent(dict[str, str]):
    """The lease of each sample, which is in a file before the sample leaves."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __setitem__(self, name: str, lease_id: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, lease_id]) + "\n")


class FileRecord(Record):
    """A `Record` that is in a file before anybody acts on it."""

    def __init__(self, path: Path) -> None:
        super().__init__(samples=_Sent(path))
        self._path = path

    def decided(self, lease_id: str, samples: int, reply: UploadReply) -> None:
        """Note an answer."""
        outcome = reply.outcome
        line = [lease_id, samples, outcome.accepted, outcome.reason or "", reply.duplicate]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class OrderedClock:
    """`WallClock` of a machine whose clock can be set wrong."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def time(self) -> float:
        """Return seconds since 1970 UTC, more or less."""
        return SystemClock().time() + self.ahead_s


class Body:
    """The parts of a peer that orders act on."""

    def __init__(self, part: PeerPart) -> None:
        self._part = part
        self.pace = Pace()
        self.clock = OrderedClock()
        self.lies = Lies(random.Random(part.seed))  # noqa: S311 - to be repeatable
        self.engine: FakeEngine | None = None
        self._done = Orders()

    def make_engine(self) -> FakeEngine:
        """Return a new engine."""
        part = self._part
        self.engine = FakeEngine(
            start_s=part.start_s,
            load_s=part.load_s,
            seconds_per_token=part.seconds_per_token,
            lengths=Lengths(*part.lengths),
            pace=self.pace,
        )
        return self.engine

    def obey(self, orders: Orders) -> None:
        """Suffer what is ordered."""
        self.pace.factor = orders.pace
        self.clock.ahead_s = orders.ahead_s
        self.lies.told.clear()
        self.lies.told.update(orders.lies)
        done, self._done = self._done, orders
        if self.engine is None:
            return
        if orders.kills > done.kills:
            self.engine.kill()
        if orders.hangs > done.hangs:
            self.engine.hang()
        if orders.spoils > done.spoils:
            self.engine.spoil()


def read_orders(folder: Path) -> Orders:
    """Return what is ordered; whoever orders replaces the file at once."""
    try:
        return msgspec.json.decode((folder / ORDERS).read_bytes(), type=Orders)
    except FileNotFoundError:
        return Orders()


@asynccontextmanager
async def peer_machine(
    part: PeerPart, settings: PeerSettings, journal: Journal
) -> AsyncIterator[PeerPorts]:
    """Open a peer's world with a fake engine in it, which obeys."""
    body, folder = Body(part), Path(settings.folder)
    record = FileRecord(Path(part.record))
    body.obey(read_orders(folder))

    async def listen() -> None:
        while True:
            await trio.sleep(LOOK_EVERY_S)
            body.obey(read_orders(folder))

    async with open_peer(settings, journal) as real, trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        streams, http, offload = real.streams, real.http, real.offload
        if part.usage:
            meter = Meter(Path(part.usage))
            nursery.start_soon(meter.run)
            streams, http = meter.streams(streams), meter.clients(http)
            offload = meter.offload(offload)
        if part.can_lie:
            streams = WatchedStreams(streams, body.lies, lambda _: None)
        yield replace(
            real,
            clock=body.clock,
            streams=streams,
            offload=offload,
            http=WatchedHttp(http, settings.name, body.lies, record, Loot()),
            make_engine=body.make_engine,
            engine_kind="fake",
        )
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def coordinator_machine(
    part: CoordinatorPart, settings: Settings, journal: Journal
) -> AsyncIterator[CoordinatorPorts]:
    """Open a coordinator's world with a fake learner and task worker in it."""
    folder, trained = Path(settings.run.folder), Path(part.trained)
    make_model(Path(settings.model.path))
    learners: list[FakeLearner] = []

    def note(what: str, step: int, names: list[str]) -> None:
        line = {"start": step} if what == "start" else {"step": step, "samples": names}
        with trained.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def make_learner() -> FakeLearner:
        learner = FakeLearner(
            CheckpointFiles(),
            start_s=part.start_s,
            step_s=part.step_s,
            save_s=part.save_s,
            changed_share=part.changed_share,
            ballast=part.ballast,
            history=note,
        )
        learners[:] = [learner]
        return learner

    async def listen() -> None:
        kills = read_orders(folder).kills
        while True:
            await trio.sleep(LOOK_EVERY_S)
            before, kills = kills, read_orders(folder).kills
            if kills > before and learners:
                learners[-1].kill()

    async with open_coordinator(settings, journal) as real, trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        streams, offload = real.streams, real.offload
        if part.usage:
            meter = Meter(Path(part.usage))
            nursery.start_soon(meter.run)
            streams, offload = meter.streams(streams), meter.offload(offload)
        yield replace(
            real,
            streams=streams,
            offload=offload,
            make_learner=make_learner,
            make_task_worker=InlineTaskWorker,
        )
        nursery.cancel_scope.cancel()


def main(what: str, text: str) -> int:
    """Play a part; returns the exit code."""
    flags = LogFlags(lowest="warning")
    if what == "coordinator":
        part = msgspec.json.decode(text, type=CoordinatorPart)
        settings = Settings.model_validate(part.settings)
        machine = partial(coordinator_machine, part)
        return run_program(lambda: run_coordinator(settings, machine=machine, flags=flags))
    one = msgspec.json.decode(text, type=PeerPart)
    mine = PeerSettings.model_validate(one.settings)
    return run_program(lambda: run_peer(mine, machine=partial(peer_machine, one), flags=flags))


def read_record(path: Path, record: Record) -> None:
    """Add what one peer's lives were told; a line that was cut off by a kill is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            match json.loads(line):
                case [str(name), str(lease_id)]:
                    record.samples[name] = lease_id
                case [lease_id, samples, accepted, reason, duplicate]:
                    record.told(
                        lease_id, samples, accepted=accepted, reason=reason, duplicate=duplicate
                    )


if __name__ == "__main__":
    what, text, *more = sys.argv[1:]
    if more == [WITH_PARENT]:
        namespaces.end_with_parent()
    sys.exit(main(what, text))
