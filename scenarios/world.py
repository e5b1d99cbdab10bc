"""A whole run in virtual time: the real coordinator and the real peers on simulated ports.

Only clock, network, HTTP, disks, child processes, memory and randomness are replaced, by
arguments; nothing of ours is patched. A world is made from one seed: same seed, same trace. TLS is
off here (its bytes are random); links open with the signed hello instead.

The world runs things and breaks them; what to break, and when, is the nemesis's, and whether all is
well is for the checkers (`scenarios.watch`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import trio

from coordinator.app import CoordinatorApp, CoordinatorPorts, Opened
from coordinator.config import Settings
from coordinator.schema import MIGRATIONS
from echo2p2p.errors import EchoError
from echo2p2p.ids import PeerId
from echo2p2p.net.ports import Rows
from echo2p2p.testing.clock import SimClock
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.http import SimHttp
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.system import SimEntropy, SimSharedMemory
from echo2p2p.wire.frames import Event
from echo2p2p.wire.messages import Hardware
from peer.app import PeerApp, PeerPorts
from peer.config import PeerSettings
from scenarios.costs import Cores, Process
from scenarios.fake_engine import FakeEngine
from scenarios.fake_learner import PARAMETERS, FakeLearner
from scenarios.false_uploads import Loot, WatchedHttp
from scenarios.lies import Lies, WatchedStreams
from scenarios.machines import COORDINATOR, GRACE_S, Machine, PeerSpec, WorldSpec
from scenarios.parts import InlineTaskWorker, MemoryShelf
from scenarios.record import Record
from scenarios.watch import CheckedJournal, FrameWatch, Watch

__all__ = ["COORDINATOR", "PeerSpec", "World", "WorldSpec"]

STORE: Final = "run"
RELAY_PORT: Final = 7071
HANG_S: Final = 30.0
"""A batch of an engine whose pace is not known yet may take so long; worlds are short."""
GOODBYE_S: Final = 60.0
"""At the end, for peers to hear that the run is over."""


class World:
    """One simulated run.

    Args:
        spec: What there is.
        seed: Of everything that is random.
    """

    def __init__(self, spec: WorldSpec, *, seed: int) -> None:
        self.spec = spec
        self.entropy = SimEntropy(seed)
        self.trace = TraceJournal()
        self.app: CoordinatorApp | None = None
        """While the coordinator runs."""
        self._cores = Cores(spec.costs, _state_mb(spec))
        self.network = SimNetwork(self.entropy.rng("loss"), framing=self._cores.framing)
        self.http = SimHttp(links=self.network)
        self.disk = SimDisk(rng=self.entropy.rng("disk"))
        self.checkpoints: dict[str, bytes] = {}
        self.record = Record()
        self.history: list[tuple[str, int, list[str]]] = []
        """What the learners have done, see `scenarios.audit.surviving`."""
        self.learner: FakeLearner | None = None
        self.summary: Mapping[str, Any] | None = None
        """Of the coordinator's last life, if it ended by itself."""
        self.ended = trio.Event()
        """The coordinator has taken leave."""
        self.machines = {
            peer.name: Machine.create(peer, self.entropy.fork(peer.name)) for peer in spec.peers
        }
        self._names = {machine.identity.peer_id: name for name, machine in self.machines.items()}
        self.watch = Watch(self)
        self.journal = CheckedJournal(self.trace, self.watch)
        self._frames = FrameWatch(self.watch)
        self._loot = Loot()
        self._learner_lives = 0
        self._coordinator_lives = 0
        self._coordinator_scope: trio.CancelScope | None = None
        self._stops = False
        self.is_open = False
        """The coordinator answers."""
        self._excused_until_s = -math.inf
        self._downs = self._fulls = 0
        """Faults that keep the coordinator down, and those of them that fill its disk; `_wanted`
        brings it back when the last of them is over."""
        self._dying = False
        """Its disk has refused something, so this life of it may end with an error."""
        self._wanted = trio.Event()
        self._uplink_shares: list[float] = []
        """What the faults under way leave of the coordinator's uplink."""
        self._settings = _with_fixed_ports(spec.settings)
        self._truth = Lies(self.entropy.rng("truth"))
        self._address: Opened | None = None
        self._opened = trio.Event()
        self._over = trio.lowlevel.ParkingLot()
        self._nursery: trio.Nursery | None = None
        self._add_lines()

    def _add_lines(self) -> None:
        spec = self.spec
        self.network.add_node(
            COORDINATOR,
            up_bytes_per_s=spec.source_up_bytes_per_s,
            down_bytes_per_s=spec.source_down_bytes_per_s,
            latency_s=spec.source_latency_s,
        )
        for peer in spec.peers:
            self.network.add_node(
                peer.name,
                up_bytes_per_s=peer.up_bytes_per_s,
                down_bytes_per_s=peer.down_bytes_per_s,
                latency_s=peer.latency_s,
                loss=peer.loss,
            )
            if peer.nat:
                self.network.refuse(peer.name)

    # --- running ------------------------------------------------------------------------------

    async def run(self, nemesis: Callable[[World], Awaitable[None]] | None = None) -> None:
        """Run coordinator, peers and nemesis until the coordinator is done, and look at the rest.

        ``nemesis`` is an async function that does harm.

        Raises:
            EchoError: The coordinator has failed, and nobody had killed it.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.network.run)
            nursery.start_soon(self.watch.sample)
            for name, machine in self.machines.items():
                if machine.spec.joins_s is not None:
                    nursery.start_soon(self._start_later, name, machine.spec.joins_s)
            if nemesis is not None:
                nursery.start_soon(nemesis, self)
            nursery.start_soon(self._stop_in_time)
            try:
                await self._keep_coordinator()
            finally:  # peers hear of a failed run too, and come to their own end
                self.ended.set()
                with trio.move_on_after(GOODBYE_S):
                    while any(machine.running for machine in self.machines.values()):
                        await self._over.park()
            nursery.cancel_scope.cancel()
        with self._rows() as rows:
            self.watch.look_back(rows)

    @contextlib.contextmanager
    def _rows(self) -> Iterator[Rows]:
        """Give what the coordinator's disk holds."""
        yield self.disk.look(STORE)

    async def _start_later(self, name: str, at_s: float) -> None:
        await trio.sleep_until(at_s)
        await self.run_peer(name)

    async def _stop_in_time(self) -> None:
        if self.spec.stop_s is not None:
            await trio.sleep_until(self.spec.stop_s)
            self.journal.event("world.stops")
            self._stops = True
            if self.app is not None:
                self.app.stop()

    # --- the coordinator ----------------------------------------------------------------------

    async def _keep_coordinator(self) -> None:
        """Run the coordinator, once more after each kill, until a life ends by itself."""
        while True:
            failure: BaseException | None = None
            with trio.CancelScope() as self._coordinator_scope:
                try:
                    await self.run_coordinator()
                except (EchoError, BaseExceptionGroup) as error:
                    failure = error
            self.app = self.learner = None
            self.is_open = False
            killed = self._coordinator_scope.cancel_called
            if not (self._downs or killed or (self._dying and failure is not None)):
                if failure is not None:
                    raise failure
                return
            self._dying = False
            await self._wanted.wait()

    async def run_coordinator(self) -> None:
        """Run the coordinator to its end; once more on the same disk is its next life."""
        self._coordinator_lives += 1
        life = f" life {self._coordinator_lives}" if self._coordinator_lives > 1 else ""
        entropy = self.entropy.fork(COORDINATOR + life)
        journal = self.journal.bind(node=COORDINATOR)
        process = await self._cores.start_process()
        async with self.disk.open_store(STORE, MIGRATIONS) as store:
            ports = CoordinatorPorts(
                clock=SimClock(),
                entropy=entropy,
                journal=journal,
                offload=self._cores,
                streams=WatchedStreams(
                    process.streams(self.network.streams(COORDINATOR)),
                    self._truth,
                    self._frames.seen,
                ),
                make_http_server=lambda _: process.server(self.http.server(COORDINATOR, journal)),
                store=store,
                blobs=self.disk.blobs(),
                memory=SimSharedMemory(),
                shelf=MemoryShelf(self.checkpoints),
                make_learner=self._make_learner,
                make_task_worker=InlineTaskWorker,
                model_dir=Path("model"),
                model_config="{}",
            )
            self.app = CoordinatorApp(self._settings, ports, tls=False, on_opened=self._on_opened)
            self.summary = await self.app.run()

    def _on_opened(self, opened: Opened) -> None:
        self._address = opened
        self.is_open = True
        if self._stops and self.app is not None:
            self.app.stop()
        self._excused_until_s = trio.current_time() + GRACE_S
        self._opened.set()

    def _make_learner(self) -> FakeLearner:
        spec, lives, faults = self.spec, self._learner_lives, self.spec.learner_faults
        self._learner_lives += 1
        self.learner = FakeLearner(
            self.checkpoints,
            start_s=spec.learner_start_s,
            step_s=self._cores.step_s(spec.learner_step_s),
            save_s=spec.learner_save_s,
            changed_share=spec.learner_changed_share,
            finds=spec.learner_finds,
            ballast=spec.learner_ballast,
            timeout_s=spec.settings.learner.step_timeout_s,
            faults=faults[lives] if lives < len(faults) else None,
            history=lambda what, step, names: self.history.append((what, step, names)),
        )
        return self.learner

    # --- peers --------------------------------------------------------------------------------

    async def run_peer(self, name: str) -> None:
        """Run one peer until it ends or is crashed."""
        machine = self.machines[name]
        assert not machine.running, f"{name} already runs"
        machine.lives += 1
        machine.outcome = None
        failure: EchoError | None = None
        outcome: str | None = "killed"
        with machine.process.inside(), trio.CancelScope() as machine.scope:
            await self._opened.wait()
            process = await self._cores.start_process()
            settings, ports = self._peer_settings(machine), self._ports(machine, process)
            machine.app = PeerApp(settings, ports, machine.identity)
            try:
                outcome = await machine.app.run()
            except EchoError as error:
                failure = error
        machine.ended(failure, outcome)
        self.watch.peer_ended(machine)
        self._over.unpark_all()

    def _peer_settings(self, machine: Machine) -> PeerSettings:
        assert self._address is not None
        spec = machine.spec
        return PeerSettings.model_validate(
            {
                "url": self._address.url,
                "token": self._address.token,
                "name": spec.name,
                "price_usd_per_hour": spec.price_usd_per_hour,
                "data_cap_per_day": spec.data_cap_per_day,
                "relay": {"public_host": None if spec.nat else spec.name},
                "engine": {
                    "leases_at_once": spec.leases_at_once,
                    "switch": spec.switch,
                    "generate_timeout_s": HANG_S,
                },
            }
        )

    def _ports(self, machine: Machine, process: Process) -> PeerPorts:
        spec = machine.spec
        watched = self._frames.seen if machine.honest else _not_seen
        return PeerPorts(
            clock=machine.clock,
            entropy=machine.entropy.fork(f"life {machine.lives}"),
            journal=self.journal.bind(node=spec.name),
            offload=self._cores,
            streams=WatchedStreams(
                process.streams(self.network.streams(spec.name)),
                machine.lies,
                watched,
                hides=spec.nat,
            ),
            http=WatchedHttp(
                process.clients(self.http.clients(spec.name)),
                spec.name,
                machine.lies,
                self.record,
                self._loot,
            ),
            memory=SimSharedMemory(files=machine.files),
            make_engine=lambda: self._make_engine(machine),
            engine_kind="fake",
            hardware=Hardware(accelerator="virtual", cores=1, memory_bytes=1 << 30),
            outbox=machine.disk.blobs(),
        )

    def _make_engine(self, machine: Machine) -> FakeEngine:
        spec = machine.spec
        machine.engine = FakeEngine(
            start_s=spec.start_s,
            load_s=spec.load_s,
            seconds_per_token=spec.seconds_per_token,
            lengths=spec.lengths,
            pace=machine.pace,
        )
        return machine.engine

    @property
    def excused(self) -> bool:
        """Whether peers may be lost because the coordinator is, or was of late, away."""
        return not self.is_open or trio.current_time() < self._excused_until_s

    def peer_id(self, name: str) -> str:
        """Return the id of a machine's identity."""
        return self.machines[name].identity.peer_id

    def machine_of(self, peer_id: str) -> Machine | None:
        """Return whose identity this is, or was."""
        name = self._names.get(PeerId(peer_id))
        return None if name is None else self.machines[name]

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
        """Kill -9: nothing is said, every connection breaks, unsynced writes are lost."""
        machine = self.machines[name]
        self.journal.event("nemesis.crash", node=name)
        machine.harm_begins()
        machine.disk.crash()
        machine.tear_files()
        self.network.crash(name)
        self.http.cut(name, COORDINATOR)
        if machine.scope is not None:
            machine.scope.cancel()

    def restart_peer(self, name: str, *, with_disk: bool = True) -> None:
        """Start a crashed machine again, as itself, or as a stranger if its disk is lost."""
        machine = self.machines[name]
        self.journal.event("nemesis.restart", node=name, with_disk=with_disk)
        if not with_disk:
            machine.lose_disk()
            self._names[machine.identity.peer_id] = name
        machine.harm_ends()
        assert self._nursery is not None
        self._nursery.start_soon(self._restart, machine)

    async def _restart(self, machine: Machine) -> None:
        """Let the tasks of the life that was killed end before its line is mended."""
        name = machine.spec.name
        while machine.running:
            await self._over.park()
        self.network.restart(name)
        self.http.heal(name, COORDINATOR)
        await self.run_peer(name)

    def start_peer(self, name: str) -> None:
        """Start a peer that does not run."""
        assert self._nursery is not None
        self._nursery.start_soon(self.run_peer, name)

    def freeze_peer(self, name: str) -> None:
        """SIGSTOP: nothing of it runs, timers included, and its line is silent."""
        machine = self.machines[name]
        machine.process.stop()
        machine.pace.stop()
        self.network.freeze(name)

    def thaw_peer(self, name: str) -> None:
        """SIGCONT: it goes on, with timers that are all over and what has come meanwhile."""
        machine = self.machines[name]
        self.network.thaw(name)
        machine.pace.go_on()
        machine.process.go_on()

    def crash_coordinator(self) -> None:
        """Kill -9 of the coordinator and its children; its disk loses what was not synced."""
        self.journal.event("nemesis.crash", node=COORDINATOR)
        self._goes_down()
        self.disk.crash()
        self.network.crash(COORDINATOR)
        self.http.crash(COORDINATOR)
        assert self._coordinator_scope is not None
        self._coordinator_scope.cancel()

    def fill_disk(self) -> None:
        """Refuse every write of the coordinator, which must end because of it."""
        self.journal.event("nemesis.disk_full", node=COORDINATOR)
        self._goes_down()
        self._fulls += 1
        self.disk.full = self._dying = True

    def _goes_down(self) -> None:
        if not self._downs:
            self._wanted = trio.Event()
        self._downs += 1

    def restart_coordinator(self, *, room: bool = False) -> None:
        """End a fault that kept it down; after the last it is started on what is left of its disk.

        ``room``: the fault had filled the disk.
        """
        self._downs -= 1
        self._fulls -= room
        self.disk.full = self._fulls > 0
        if not self._downs:
            self.journal.event("nemesis.restart", node=COORDINATOR)
            self.network.restart(COORDINATOR)
            self._wanted.set()

    def squeeze_coordinator(self, share: float) -> None:
        """Leave so much of its uplink; of several at once the least counts."""
        self._uplink_shares.append(share)
        self._set_uplink()

    def widen_coordinator(self, share: float) -> None:
        """End a `squeeze_coordinator`."""
        self._uplink_shares.remove(share)
        self._set_uplink()

    def _set_uplink(self) -> None:
        spec = self.spec
        self.network.set_rates(
            COORDINATOR,
            up_bytes_per_s=spec.source_up_bytes_per_s * min(self._uplink_shares, default=1.0),
            down_bytes_per_s=spec.source_down_bytes_per_s,
        )

    # --- what came out ------------------------------------------------------------------------

    @property
    def breaches(self) -> list[str]:
        """What the checkers found."""
        return self.watch.breaches

    def trace_lines(self) -> list[str]:
        """Return every event as one JSON line."""
        return [
            json.dumps({"t": entry.at_s, "event": entry.name, **entry.fields}, sort_keys=True)
            for entry in self.trace.entries
        ]


def _state_mb(spec: WorldSpec) -> float:
    """Return the size of the scripted learner's model."""
    return 2 * (PARAMETERS + spec.learner_ballast) / 1e6


def _not_seen(event: Event) -> None:
    """A liar's frames are no evidence."""


def _with_fixed_ports(settings: Settings) -> Settings:
    """Return the settings of a coordinator that is found again after a restart."""
    server = settings.server.model_copy(update={"host": COORDINATOR, "relay_port": RELAY_PORT})
    return settings.model_copy(update={"server": server})
