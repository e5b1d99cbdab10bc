"""A whole run in virtual time: the real coordinator and the real peers on simulated ports.

Only clock, network, HTTP, disks, child processes, memory and randomness are replaced, by
arguments; nothing of ours is patched. A world is made from one seed: same seed, same trace. TLS is
off here (its bytes are random); links open with the signed hello instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from coordinator.app import CoordinatorApp, CoordinatorPorts, Opened
from coordinator.config import Settings
from coordinator.schema import MIGRATIONS
from echo2p2p.errors import EchoError
from echo2p2p.net.ports import Journal
from echo2p2p.net.trust import PeerIdentity
from echo2p2p.testing.checkers import (
    Checker,
    LedgerBalances,
    NothingTooOld,
    StepsOnlyGoBackByRollback,
    VersionsNeverFork,
)
from echo2p2p.testing.clock import SimClock
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.http import SimHttp
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.system import InlineOffload, SimEntropy, SimSharedMemory
from echo2p2p.wire.messages import Hardware
from peer.app import PeerApp, PeerPorts
from peer.config import PeerSettings
from scenarios.parts import FakeEngine, FakeLearner, InlineTaskWorker, LearnerFaults

COORDINATOR: Final = "coordinator"


@dataclass(frozen=True)
class PeerSpec:
    """One simulated machine."""

    name: str
    up_bytes_per_s: float = 2.5e6
    down_bytes_per_s: float = 5e6
    latency_s: float = 0.02
    start_s: float = 2.0
    """Of the engine."""
    seconds_per_token: float = 0.1
    leases_at_once: int = 2


@dataclass(frozen=True)
class WorldSpec:
    """Everything but the seed."""

    settings: Settings
    peers: tuple[PeerSpec, ...]
    source_up_bytes_per_s: float = 2.5e6
    learner_start_s: float = 3.0
    learner_step_s: float = 1.0
    learner_faults: tuple[LearnerFaults, ...] = ()
    """One a life of the learner; later lives have none."""


class MemoryShelf:
    """Checkpoints as keys of the dictionary that fake learners write to."""

    def __init__(self, saved: MutableMapping[str, bytes]) -> None:
        self._saved = saved

    def folder(self, step: int) -> Path:
        """Return a free name."""
        name = f"checkpoints/step-{step:06d}"
        self._saved.pop(name, None)
        return Path(name)

    def newest(self) -> Path | None:
        """Return the newest checkpoint."""
        return Path(max(self._saved)) if self._saved else None

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep``."""
        for name in sorted(self._saved)[:-keep]:
            del self._saved[name]


class Breach(EchoError):  # noqa: N818 a finding, not a failure of this program
    """A checker saw its invariant broken."""


@dataclass
class CheckedJournal:
    """A `TraceJournal` that shows each event to the checkers."""

    trace: TraceJournal
    checkers: list[Checker] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    happened: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    def event(self, name: str, /, **fields: object) -> None:
        """Record, then look."""
        self.trace.event(name, **fields)
        seen = self.trace.entries[-1].fields
        for checker in self.checkers:
            if (wrong := checker.see(name, seen)) is not None:
                self.breaches.append(f"{checker.name}: {wrong} (t = {trio.current_time():.3f} s)")
        self.happened.unpark_all()

    def bind(self, **fields: object) -> Journal:
        """Return a journal on the same trace and checkers."""
        trace = self.trace.bind(**fields)
        return CheckedJournal(trace, self.checkers, self.breaches, self.happened)


@dataclass
class _Machine:
    """A simulated machine and what runs on it now."""

    spec: PeerSpec
    identity: PeerIdentity
    scope: trio.CancelScope | None = None
    lives: int = 0
    outcome: str | None = None


class World:
    """One simulated run.

    Args:
        spec: What there is.
        seed: Of everything that is random.
    """

    def __init__(self, spec: WorldSpec, *, seed: int) -> None:
        self.spec = spec
        self._entropy = SimEntropy(seed)
        self.trace = TraceJournal()
        self.app: CoordinatorApp | None = None
        self.journal = CheckedJournal(
            self.trace,
            [
                LedgerBalances(lambda: None if self.app is None else self.app.balance()),
                NothingTooOld(spec.settings.rollouts.staleness_budget),
                VersionsNeverFork(),
                StepsOnlyGoBackByRollback(),
            ],
        )
        self.network = SimNetwork()
        self.http = SimHttp()
        self.disk = SimDisk()
        self.checkpoints: dict[str, bytes] = {}
        self.summary: Mapping[str, Any] | None = None
        self._learner_lives = 0
        self._coordinator_lives = 0
        self._opened = trio.Event()
        self._ended = trio.lowlevel.ParkingLot()
        self._address: Opened | None = None
        self.network.add_node(COORDINATOR, up_bytes_per_s=spec.source_up_bytes_per_s)
        self._machines = {
            peer.name: _Machine(peer, PeerIdentity.create(self._entropy.fork(peer.name)))
            for peer in spec.peers
        }
        for peer in spec.peers:
            self.network.add_node(
                peer.name,
                up_bytes_per_s=peer.up_bytes_per_s,
                down_bytes_per_s=peer.down_bytes_per_s,
                latency_s=peer.latency_s,
            )

    # --- running ------------------------------------------------------------------------------

    async def run(self, nemesis: Callable[[World, trio.Nursery], Any] | None = None) -> None:
        """Run coordinator, peers and nemesis until the coordinator is done.

        ``nemesis`` is an async function that does harm; it gets this world and the nursery in
        which peers run.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.network.run)
            for name in self._machines:
                nursery.start_soon(self.run_peer, name)
            if nemesis is not None:
                nursery.start_soon(nemesis, self, nursery)
            try:
                await self.run_coordinator()
            finally:  # peers hear of a failed run too, and come to their own end
                with trio.move_on_after(60.0):
                    while any(machine.scope is not None for machine in self._machines.values()):
                        await self._ended.park()
            nursery.cancel_scope.cancel()

    async def run_coordinator(self) -> None:
        """Run the coordinator to its end; once more on the same disk is its next life."""
        self._coordinator_lives += 1
        life = f" life {self._coordinator_lives}" if self._coordinator_lives > 1 else ""
        entropy = self._entropy.fork(COORDINATOR + life)
        journal = self.journal.bind(node=COORDINATOR)
        async with self.disk.open_store("run", MIGRATIONS) as store:
            ports = CoordinatorPorts(
                clock=SimClock(),
                entropy=entropy,
                journal=journal,
                offload=InlineOffload(),
                streams=self.network.node(COORDINATOR),
                make_http_server=lambda _: self.http.server(COORDINATOR, journal),
                store=store,
                blobs=self.disk.blobs(),
                memory=SimSharedMemory(),
                shelf=MemoryShelf(self.checkpoints),
                make_learner=self._make_learner,
                make_task_worker=InlineTaskWorker,
                model_dir=Path("model"),
                model_config="{}",
            )
            self.app = CoordinatorApp(
                self.spec.settings, ports, tls=False, on_opened=self._on_opened
            )
            self.summary = await self.app.run()

    def _on_opened(self, opened: Opened) -> None:
        self._address = opened
        self._opened.set()

    def _make_learner(self) -> FakeLearner:
        lives, faults = self._learner_lives, self.spec.learner_faults
        self._learner_lives += 1
        return FakeLearner(
            self.checkpoints,
            start_s=self.spec.learner_start_s,
            step_s=self.spec.learner_step_s,
            timeout_s=self.spec.settings.learner.step_timeout_s,
            faults=faults[lives] if lives < len(faults) else None,
        )

    async def run_peer(self, name: str) -> None:
        """Run one peer until it ends or is crashed."""
        machine = self._machines[name]
        assert machine.scope is None, f"{name} already runs"
        await self._opened.wait()
        assert self._address is not None
        machine.lives += 1
        entropy = self._entropy.fork(f"{name} life {machine.lives}")
        spec = machine.spec
        ports = PeerPorts(
            clock=SimClock(),
            entropy=entropy,
            journal=self.journal.bind(node=name),
            offload=InlineOffload(),
            streams=self.network.node(name),
            http=self.http.clients(name),
            memory=SimSharedMemory(),
            make_engine=lambda: FakeEngine(
                start_s=spec.start_s, load_s=0.05, seconds_per_token=spec.seconds_per_token
            ),
            engine_kind="fake",
            hardware=Hardware(accelerator="virtual", cores=1, memory_bytes=1 << 30),
        )
        settings = PeerSettings.model_validate(
            {
                "url": self._address.url,
                "token": self._address.token,
                "name": name,
                "relay": {"public_host": name},
                "engine": {"leases_at_once": spec.leases_at_once},
            }
        )
        with trio.CancelScope() as machine.scope:
            machine.outcome = await PeerApp(settings, ports, machine.identity).run()
        machine.scope = None
        self._ended.unpark_all()

    def peer_id(self, name: str) -> str:
        """Return the id of a machine's identity."""
        return self._machines[name].identity.peer_id

    async def wait_event(self, name: str, **fields: object) -> None:
        """Wait until an event of this name and with these fields happens from now on."""
        seen = len(self.trace.entries)
        while True:
            for entry in self.trace.entries[seen:]:
                if entry.name == name and fields.items() <= entry.fields.items():
                    return
            seen = len(self.trace.entries)
            await self.journal.happened.park()

    # --- harm ---------------------------------------------------------------------------------

    def crash_peer(self, name: str) -> None:
        """Kill -9: nothing is said, every connection breaks."""
        machine = self._machines[name]
        self.journal.event("nemesis.crash", node=name)
        self.network.crash(name)
        self.http.cut(name, COORDINATOR)
        if machine.scope is not None:
            machine.scope.cancel()

    def restart_peer(self, name: str, nursery: trio.Nursery) -> None:
        """Start it again with its old identity."""
        self.journal.event("nemesis.restart", node=name)
        self.network.restart(name)
        self.http.heal(name, COORDINATOR)
        nursery.start_soon(self.run_peer, name)

    # --- what came out ------------------------------------------------------------------------

    @property
    def breaches(self) -> list[str]:
        """What the checkers found."""
        return self.journal.breaches

    def trace_lines(self) -> list[str]:
        """Return every event as one JSON line."""
        return [
            json.dumps({"t": entry.at_s, "event": entry.name, **entry.fields}, sort_keys=True)
            for entry in self.trace.entries
        ]
