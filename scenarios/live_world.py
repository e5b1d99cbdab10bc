"""A story's world of real processes, on machines that are network namespaces.

It is a `World` whose orders are done for real: a crash is ``kill -9``, a freeze SIGSTOP, a full
disk a small file system that is filled, cuts and lines are the kernel's (`scenarios.live_network`).
Faults of the inside go to each process through a file (`scenarios.live_node`). The checkers are the
same and look from outside: they are shown the lines that every process writes into its journal,
and in the end the store, the clients' record and the learner's own log.

How full each queue is they ask over HTTP (`scenarios.live_eyes`), and what each line has carried
the kernel. What only the inside knows is not looked at: the bytes of each chunk.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import trio

from coordinator.app import Opened
from echo2p2p.errors import ChildError
from echo2p2p.net.ports import Rows
from echo2p2p.net.system import SystemClock
from echo2p2p.wire.messages import Address
from scenarios import live_eyes, live_node, namespaces, torture_audit
from scenarios.broadcast_links import BYTES_PER_MBIT, Line
from scenarios.fake_engine import FakeEngine
from scenarios.fake_learner import FakeLearner
from scenarios.live_load import Load
from scenarios.live_network import LiveNetwork
from scenarios.machines import Machine
from scenarios.world import COORDINATOR, RELAY_PORT, PeerSpec, World, WorldSpec

PORT: Final = 7070
TELL_EVERY_S: Final = 0.1
LOOK_EVERY_S: Final = 2.0
"""At how full each queue is: every look costs the machine that is looked at milliseconds."""
DISK_BYTES: Final = 512 << 20
"""Of a machine, in memory, as used."""
STOP_TRIES: Final = 20
STOP_AGAIN_S: Final = 0.5
EVENTS: Final = "events.jsonl"
FILLER: Final = "filler"
TRAINED: Final = "trained.jsonl"
ENTRY_KEYS: Final = frozenset({"timestamp", "level", "event"})
"""Of a journal's line, beside the event's own fields."""


class _Told:
    """Counts what an engine, or a learner, is ordered to do."""

    def __init__(self) -> None:
        self.kills = self.hangs = self.spoils = 0

    def kill(self) -> None:
        """Die."""
        self.kills += 1

    def hang(self) -> None:
        """Hang in the next call."""
        self.hangs += 1

    def spoil(self) -> None:
        """Load one wrong bit next time."""
        self.spoils += 1


def lines_of(spec: WorldSpec) -> list[Line]:
    """Return the machines' lines, the coordinator's first."""

    def line(up: float, down: float, *, reachable: bool = True) -> Line:
        return Line(up / BYTES_PER_MBIT, down / BYTES_PER_MBIT, reachable)

    return [
        line(spec.source_up_bytes_per_s, spec.source_down_bytes_per_s),
        *(
            line(peer.up_bytes_per_s, peer.down_bytes_per_s, reachable=not peer.nat)
            for peer in spec.peers
        ),
    ]


def coordinator_part(
    spec: WorldSpec, settings: dict[str, Any], *, trained: Path
) -> live_node.CoordinatorPart:
    """Return what the coordinator's process is told."""
    return live_node.CoordinatorPart(
        settings=settings,
        start_s=spec.learner_start_s,
        step_s=spec.learner_step_s,
        save_s=spec.learner_save_s,
        changed_share=spec.learner_changed_share,
        ballast=spec.learner_ballast,
        trained=str(trained),
    )


def peer_part(
    spec: PeerSpec, settings: dict[str, Any], *, seed: int, can_lie: bool, record: Path
) -> live_node.PeerPart:
    """Return what a peer's process is told."""
    return live_node.PeerPart(
        settings=settings,
        start_s=spec.start_s,
        load_s=spec.load_s,
        seconds_per_token=spec.seconds_per_token,
        lengths=(spec.lengths.low, spec.lengths.high, spec.lengths.tail),
        seed=seed,
        can_lie=can_lie,
        record=str(record),
    )


class LiveWorld(World):
    """One run of real processes; only inside of `namespaces.WRAP`.

    Args:
        spec: What there is.
        seed: Of choices; the processes draw their own.
        folder: Of all machines' disks.
        network: Their lines.
        tls: Whether the run uses it, as shipped; not where relays lie.
    """

    def __init__(
        self, spec: WorldSpec, *, seed: int, folder: Path, network: LiveNetwork, tls: bool
    ) -> None:
        super().__init__(spec, seed=seed)
        self.network = network
        self._folder = folder
        self._tls = tls
        self._index = {name: place for place, name in enumerate((COORDINATOR, *self.machines))}
        self._processes: dict[str, trio.Process] = {}
        self._read_bytes: dict[Path, int] = {}
        self._zero_s = 0.0
        """When the story began, by the clock that all its processes write into their journals."""
        self._load = Load()
        self._told: dict[str, live_node.Orders] = {}
        self._learner = _Told()
        self._engines = {name: _Told() for name in self.machines}
        for name in self._index:
            self._make_disk(name)

    def _add_lines(self) -> None:
        """The test-bed has made them."""

    def _make_disk(self, name: str) -> None:
        place = self._folder / name
        place.mkdir(parents=True)
        size = f"size={DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", place], check=True)  # noqa: S603, S607 - our own words
        self._link_journal(name)
        if name != COORDINATOR:
            self.machines[name].identity.save(place / "identity")

    def _journal_of(self, name: str) -> Path:
        return self._folder / name / ("logs" if name == COORDINATOR else "") / EVENTS

    def _link_journal(self, name: str) -> None:
        """Let what a process says of itself be on another disk, or a full one would make us deaf.

        A process gives its journal up when it cannot be written.
        """
        journal = self._journal_of(name)
        journal.parent.mkdir(exist_ok=True)
        journal.symlink_to(self._folder / f"{name}.events")

    # --- processes ----------------------------------------------------------------------------

    async def run(self, nemesis: Any = None) -> None:  # noqa: ANN401 - as in `World`
        """See `World.run`."""
        self._load = Load()
        self._zero_s = SystemClock().time() - trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_and_tell)
                for name in self._index:
                    nursery.start_soon(self._look_inside, name)
                await super().run(nemesis)
                nursery.cancel_scope.cancel()
        finally:  # what was said between two looks stands beside what was done meanwhile
            self.trace.entries.sort(key=lambda entry: entry.at_s)

    def load(self) -> dict[str, object]:
        """Return who had the cores so far."""
        return self._load.figures(trio.current_time())

    async def _look_inside(self, name: str) -> None:
        """Ask one machine again and again how full its queues are."""
        while True:
            await trio.sleep(LOOK_EVERY_S)
            if name != COORDINATOR:
                machine = self.machines[name]
                if machine.running and machine.honest and not machine.faults:
                    self.watch.look_at("peer", await live_eyes.peer_fills(self._index[name]))
            elif self.is_open and self._address is not None:
                status = await live_eyes.status_of(self._address)
                self.watch.look_at(name, [] if status is None else live_eyes.fills_of(status))

    async def _spawn(self, name: str, part: object) -> trio.Process:
        command = [sys.executable, "-P", "-m", "scenarios.live_node"]
        command += ["coordinator" if name == COORDINATOR else "peer"]
        command += [msgspec.json.encode(part).decode()]
        self._tell(name)
        with (self._folder / f"{name}.log").open("ab") as log:
            process = await trio.lowlevel.open_process(
                namespaces.inside(self._index[name], command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder / name,
            )
        self._processes[name] = process
        return process

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            process.send_signal(number)

    async def run_coordinator(self) -> None:
        """Run the coordinator's process to its end."""
        self._coordinator_lives += 1
        spec, place = self.spec, self._folder / COORDINATOR
        settings = self._settings.model_dump(mode="json")
        address = namespaces.address_of(0)
        settings["server"] |= {"host": address, "port": PORT, "relay_port": RELAY_PORT}
        settings["server"]["tls"] = "on" if self._tls else "off"
        settings["run"]["folder"] = str(place)
        settings["model"]["path"] = str(place / "model")
        part = coordinator_part(spec, settings, trained=self._folder / TRAINED)
        self._fill(COORDINATOR)
        process = await self._spawn(COORDINATOR, part)
        self.learner = cast("FakeLearner", self._learner)
        try:
            code = await process.wait()
        finally:
            process.kill()
        self._drain()
        if code:
            raise ChildError(COORDINATOR, self._last_words(COORDINATOR))
        self.summary = json.loads((place / "summary.json").read_bytes())

    async def run_peer(self, name: str) -> None:
        """Run one peer's process until it ends or is killed."""
        machine = self.machines[name]
        assert not machine.running, f"{name} already runs"
        machine.lives += 1
        machine.outcome = None
        outcome = "killed"
        with trio.CancelScope() as machine.scope:
            await self._opened.wait()
            machine.engine = cast("FakeEngine", self._engines[name])
            process = await self._spawn(name, self._peer_part(machine))
            try:
                code = await process.wait()
                if code >= 0:
                    outcome = self._last_words(name) if code else "finished"
            finally:
                process.kill()
        self._drain()
        machine.ended(None, outcome)
        self.watch.peer_ended(machine)
        self._over.unpark_all()

    def _peer_part(self, machine: Machine) -> live_node.PeerPart:
        spec = machine.spec
        settings = self._peer_settings(machine).model_dump(mode="json")
        address = namespaces.address_of(self._index[spec.name])
        host = "0.0.0.0" if spec.nat else address  # noqa: S104 - dials out only
        settings["relay"] |= {"host": host, "public_host": None}
        settings["folder"] = str(self._folder / spec.name)
        settings["metrics"]["port"] = live_eyes.METRICS_PORT
        return peer_part(
            spec,
            settings,
            seed=self._index[spec.name],
            can_lie=not self._tls,
            record=self._record_of(spec.name),
        )

    def _record_of(self, name: str) -> Path:
        return self._folder / f"{name}.record"

    def _last_words(self, name: str) -> str:
        text = (self._folder / f"{name}.log").read_text("utf-8", errors="replace")
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        return (errors or text.splitlines() or ["no words"])[-1]

    # --- what they say, and what they are told ------------------------------------------------

    async def _look_and_tell(self) -> None:
        while True:
            await trio.sleep(TELL_EVERY_S)
            self._drain()
            for name in self._index:
                self._tell(name)
                self._fill(name)
                process = self._processes.get(name)
                if process is not None and process.returncode is None:
                    self._load.look(name, process.pid)

    def _drain(self) -> None:
        """Show the checkers what was written since the last look, in order of its time.

        The coordinator's file is read last: what a peer tells of a version is then never seen
        before the publication.
        """
        entries = [entry for name in self.machines for entry in self._new_entries(name)]
        entries[:0] = self._new_entries(COORDINATOR)
        for name, entry in sorted(entries, key=lambda one: str(one[1]["timestamp"])):
            fields = {key: value for key, value in entry.items() if key not in ENTRY_KEYS}
            at_s = datetime.fromisoformat(entry["timestamp"]).timestamp() - self._zero_s
            self.journal.heard(at_s, entry["event"], {"node": name, **fields})
            if name == COORDINATOR and entry["event"] == "run.opened":
                self._on_opened(self._access())

    def _new_entries(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        path = self._journal_of(name)
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(self._read_bytes.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(line)
                yield name, json.loads(line)

    def _access(self) -> Opened:
        said = json.loads((self._folder / COORDINATOR / "join.json").read_bytes())
        authority = said["authority"]
        return Opened(
            url=said["url"],
            token=said["token"],
            admin_token=said["admin_token"],
            relay=Address(host=namespaces.address_of(0), port=RELAY_PORT),
            authority=None if authority is None else authority.encode(),
        )

    def _tell(self, name: str) -> None:
        """Write down what a process is to suffer, if that has changed."""
        if name == COORDINATOR:
            orders = live_node.Orders(kills=self._learner.kills)
        else:
            machine, engine = self.machines[name], self._engines[name]
            orders = live_node.Orders(
                lies=sorted(machine.lies.told),
                pace=machine.pace.factor,
                ahead_s=machine.clock.skew_s,
                kills=engine.kills,
                hangs=engine.hangs,
                spoils=engine.spoils,
            )
        if self._told.get(name) != orders:
            self._told[name] = orders
            place = self._folder / name
            fresh = place / f"{live_node.ORDERS}.new"
            with suppress(OSError):  # a full disk: it is told when there is room
                fresh.write_bytes(msgspec.json.encode(orders))
                fresh.replace(place / live_node.ORDERS)

    def _fill(self, name: str) -> None:
        """Let a machine's disk be as full as it is ordered to be."""
        disk = self.disk if name == COORDINATOR else self.machines[name].disk
        filler = self._folder / name / FILLER
        if disk.full and not filler.exists():
            with suppress(OSError), filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _room(filler.parent))
        elif not disk.full and filler.exists():
            filler.unlink()

    # --- harm ---------------------------------------------------------------------------------

    def crash_peer(self, name: str) -> None:
        """Kill -9."""
        self.journal.event("nemesis.crash", node=name)
        self.machines[name].harm_begins()
        self._signal(name, signal.SIGKILL)

    def restart_peer(self, name: str, *, with_disk: bool = True) -> None:
        """Start a crashed machine again, as itself, or as a stranger if its disk is lost."""
        if not with_disk:
            for path in (self._folder / name).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._told.pop(name, None)
        super().restart_peer(name, with_disk=with_disk)
        if not with_disk:
            self._link_journal(name)
            self.machines[name].identity.save(self._folder / name / "identity")

    async def _restart(self, machine: Machine) -> None:
        while machine.running:
            await self._over.park()
        await self.run_peer(machine.spec.name)

    def freeze_peer(self, name: str) -> None:
        """SIGSTOP, and nothing through its line."""
        self.network.freeze(name)
        self._signal(name, signal.SIGSTOP)

    def thaw_peer(self, name: str) -> None:
        """SIGCONT."""
        self.network.thaw(name)
        self._signal(name, signal.SIGCONT)

    def crash_coordinator(self) -> None:
        """Kill -9 of the coordinator."""
        self.journal.event("nemesis.crash", node=COORDINATOR)
        self._goes_down()
        assert self._coordinator_scope is not None
        self._coordinator_scope.cancel()  # which kills the process

    async def _stop_in_time(self) -> None:
        """Tell every life of the coordinator to stop from then on; one that is down is waited for.

        Raises:
            ChildError: It is up, and does not listen.
        """
        await trio.sleep_until(cast("float", self.spec.stop_s))
        self.journal.event("world.stops")
        self._stops = True
        while True:
            while not self.is_open or self._address is None:
                await self.journal.happened.park()
            life, failures = self._coordinator_lives, 0
            while self.is_open and life == self._coordinator_lives:
                try:
                    await live_eyes.stop(self._address)
                    break
                except OSError as error:  # it may just have been killed
                    failures += 1
                    if failures == STOP_TRIES:
                        raise ChildError(COORDINATOR, f"cannot be stopped: {error}") from error
                    await trio.sleep(STOP_AGAIN_S)
            while life == self._coordinator_lives:
                await self.journal.happened.park()

    @contextmanager
    def _rows(self) -> Iterator[Rows]:
        """Give the store, and everything that was written down beside it."""
        place = self._folder / COORDINATOR
        self.history = torture_audit.entries(self._folder / TRAINED)
        for name in self.machines:
            live_node.read_record(self._record_of(name), self.record)
        with torture_audit.copied(place, self._folder / "scratch") as rows:
            yield rows


def _room(folder: Path) -> int:
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize
