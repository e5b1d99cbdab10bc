"""The checkers of a virtual world, all of them always on.

Some see every event as it happens (`echo2p2p.testing.checkers`, which also fit a real run's log),
one sees every frame that an honest machine sends, some look at the apps every virtual second, and
some look back when all is over. A breach is a line that begins with the checker's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio

from echo2p2p.errors import RemoteProtocolError
from echo2p2p.ids import DIGEST_BYTES, ManifestId, digest_of, manifest_id_of
from echo2p2p.limits import Fill
from echo2p2p.net.ports import Journal, Rows
from echo2p2p.testing.checkers import (
    Checker,
    LedgerBalances,
    NothingTooOld,
    StepsOnlyGoBackByRollback,
    VersionsAreWhole,
    VersionsNeverFork,
)
from echo2p2p.testing.journal import Entry, TraceJournal
from echo2p2p.wire import codec
from echo2p2p.wire.frames import ChunkPayload, Event
from echo2p2p.wire.messages import ManifestHeader, Offer
from scenarios.audit import audit_rows, surviving
from scenarios.machines import COORDINATOR

if TYPE_CHECKING:
    from scenarios.machines import Machine
    from scenarios.world import World

SAMPLE_S: Final = 1.0
BREACHES_MAX: Final = 100
"""Further ones are counted only: one bug can break an invariant at every event."""

UNSENT_BYTES: Final = 256 * 1024
"""What links that broke may have taken, and counted, and never carried."""

QUEUES_BOUNDED: Final = "every queue is bounded"
NOTHING_UNVERIFIED: Final = "no unverified byte is relayed"
NO_HONEST_EVICTED: Final = "no honest peer is evicted"
TRAINED_ONCE: Final = "acknowledged is trained once or rejected with a reason"
BYTES_AGREE: Final = "nobody tells of more bytes than its line has carried"
EVERYTHING_ENDS: Final = "leases and terms end"
CONVERGES: Final = "live peers converge after healing"
NO_IDLING: Final = "the learner idles no more than stated"
STATED_RATE: Final = "the run goes on at the stated rate"
ENDS_WELL: Final = "the run ends"
LOOKS: Final = (
    QUEUES_BOUNDED,
    NOTHING_UNVERIFIED,
    TRAINED_ONCE,
    BYTES_AGREE,
    EVERYTHING_ENDS,
    CONVERGES,
    NO_IDLING,
    STATED_RATE,
    ENDS_WELL,
)
"""Checkers that look at something else than single events."""
EVENT_CHECKERS: Final = (
    LedgerBalances.name,
    NothingTooOld.name,
    VersionsNeverFork.name,
    VersionsAreWhole.name,
    StepsOnlyGoBackByRollback.name,
    NO_HONEST_EVICTED,
)
"""Those that look at every event."""


class Watch:
    """All checkers of one world.

    Args:
        world: Looked at, never touched.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        rollouts = world.spec.settings.rollouts
        self.checkers: list[Checker] = [
            LedgerBalances(lambda: None if world.app is None else world.app.balance()),
            NothingTooOld(rollouts.staleness_budget),
            VersionsNeverFork(),
            VersionsAreWhole(),
            StepsOnlyGoBackByRollback(),
            NoHonestPeerPunished(world),
        ]
        self.newest: int | None = None
        """Version."""
        self._applied = -1
        """Newest that anybody has applied."""
        self.proved: dict[str, int] = {}
        """Version that each machine's engine has proved in this life of its peer."""
        self.converged_s: float | None = None
        """When every live peer had caught up after healing."""
        self.breaches: list[str] = []
        self.breaches_more = 0
        self.fullest: dict[str, Fill] = {}
        """The highest fill seen of each bound."""

    def breach(self, checker: str, detail: str) -> None:
        """Note that an invariant is broken."""
        if len(self.breaches) >= BREACHES_MAX:
            self.breaches_more += 1
            return
        self.breaches.append(f"{checker}: {detail} (t = {trio.current_time():.3f} s)")

    def see(self, name: str, fields: Mapping[str, object]) -> None:
        """Show an event to all checkers."""
        version = fields.get("version")
        if name == "version.published" and isinstance(version, int):
            self.newest = version
        elif name == "versions.restored":
            self.newest = int(str(fields.get("latest")))
        elif name == "version.applied" and isinstance(version, int):
            self._applied = max(self._applied, version)
        elif name == "version.loaded" and isinstance(version, int):
            self.proved[str(fields.get("node"))] = version
        for checker in self.checkers:
            if (wrong := checker.see(name, fields)) is not None:
                self.breach(checker.name, wrong)

    async def sample(self) -> None:
        """Look at the apps every virtual second, until cancelled."""
        while True:
            await trio.sleep(SAMPLE_S)
            if self._world.app is not None and self._world.is_open:
                self.look_at("coordinator", self._world.app.fills())
            for machine in self._world.machines.values():
                if machine.app is not None and machine.honest:
                    self.look_at("peer", machine.app.fills())

    def look_at(self, who: str, fills: Iterable[Fill]) -> None:
        """Compare how full everything of one machine is with what it may be."""
        for fill in fills:
            key = f"{who}: {fill.what}"
            known = self.fullest.get(key)
            if known is None or fill.now > known.now:
                self.fullest[key] = fill
                if fill.now > fill.limit:
                    name = EVERYTHING_ENDS if fill.what in OVERDUE else QUEUES_BOUNDED
                    self.breach(name, f"{key}: {fill.now}, at most {fill.limit}")

    def peer_ended(self, machine: Machine) -> None:
        """A peer's life is over."""
        self.proved.pop(machine.spec.name, None)
        if machine.outcome in {"finished", "killed"} or machine.excused(trio.current_time()):
            return
        if machine.honest and not self._world.ended.is_set():
            self.breach(NO_HONEST_EVICTED, f"{machine.spec.name} gave up: {machine.outcome}")

    def look_back(self, rows: Rows) -> None:
        """Compare store, clients and learner, once nothing runs any more."""
        world = self._world
        history = surviving(world.history)
        groups = world.spec.settings.rollouts.prompts_per_step
        look = audit_rows(rows, history, world.record, groups_per_step=groups)
        for problem in [*look.findings.problems, *world.record.problems]:
            self.breach(TRAINED_ONCE, problem)
        (row,) = rows.execute("SELECT coalesce(max(version), -1) FROM versions").fetchall()
        if self._applied > int(str(row[0])):
            detail = f"version {self._applied} was applied, the store ends at {row[0]}"
            self.breach(VersionsNeverFork.name, detail)
        summary = world.summary
        if summary is None:
            self.breach(ENDS_WELL, "the coordinator has left no summary")
            return
        counts = summary["trajectories"]
        if not (counts["balances"] and counts["recount_agrees"]):
            self.breach("ledger balances", f"at the end: {counts}")
        if counts["in_flight"]:
            self.breach(EVERYTHING_ENDS, f"{counts['in_flight']} trajectories are in flight")
        self._compare_bytes(summary)
        for machine in world.machines.values():
            if machine.honest and machine.running:
                self.breach(ENDS_WELL, f"{machine.spec.name} has not heard of it")

    def _compare_bytes(self, summary: Mapping[str, Any]) -> None:
        """Lay what was told of chunks beside what each line has carried, of everything."""
        world = self._world
        told = {COORDINATOR: int(summary["weights"]["source_bytes"])}
        for peer in summary["peers"]:
            told[peer["name"]] = told.get(peer["name"], 0) + int(peer["relayed_bytes"])
        for name, sent in told.items():
            machine = world.machines.get(name)
            if name != COORDINATOR and (machine is None or not machine.honest):
                continue
            carried = world.network.traffic(name).sent_bytes
            if sent > carried + UNSENT_BYTES:
                detail = f"{name} tells of {sent} bytes in chunks, its line carried {carried}"
                self.breach(BYTES_AGREE, detail)


PUNISHES: Final = {"peer.evicted": "peer", "link.violated": "peer", "chunk.rejected": "source"}
"""Events that blame somebody, and the field that says whom."""
OVERDUE: Final = frozenset({"leases past their deadline", "members past their term"})


class NoHonestPeerPunished:
    """Nobody who keeps to the protocol, and whom no fault has hit, is evicted or cut off.

    Args:
        world: Knows who that is.
    """

    name = NO_HONEST_EVICTED

    def __init__(self, world: World) -> None:
        self._world = world

    def see(self, event: str, fields: Mapping[str, object]) -> str | None:
        """Look at evictions, and at what honest machines say of others."""
        if event not in PUNISHES:
            return None
        accused, accuser = fields.get(PUNISHES[event]), str(fields.get("node"))
        world, now = self._world, trio.current_time()
        if accuser in world.machines and not world.machines[accuser].honest:
            return None
        if accused == "source":
            return f"{accuser} says {event} of the source"
        machine = world.machine_of(str(accused))
        if machine is None or not machine.honest or machine.excused(now) or world.excused:
            return None
        return f"{accuser} says {event} of {machine.spec.name}"


@dataclass
class CheckedJournal:
    """A `TraceJournal` that shows each event to the checkers."""

    trace: TraceJournal
    watch: Watch
    happened: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    def event(self, name: str, /, **fields: object) -> None:
        """Record, then look."""
        self.trace.event(name, **fields)
        self._look()

    def heard(self, at_s: float, name: str, fields: Mapping[str, object]) -> None:
        """Record what another process says of an earlier moment, then look."""
        self.trace.entries.append(Entry(at_s, name, {**self.trace.bound, **fields}))
        self._look()

    def _look(self) -> None:
        entry = self.trace.entries[-1]
        self.watch.see(entry.name, entry.fields)
        self.happened.unpark_all()

    def bind(self, **fields: object) -> Journal:
        """Return a journal on the same trace and checkers."""
        return CheckedJournal(self.trace.bind(**fields), self.watch, self.happened)


class FrameWatch:
    """Compares every chunk that an honest machine sends with the signed manifest's digests."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._headers: dict[ManifestId, ManifestHeader] = {}
        self._digests: dict[ManifestId, bytes] = {}
        self._early: dict[ManifestId, list[tuple[int, bytes]]] = {}

    def seen(self, event: Event) -> None:
        """Look at one outgoing frame or chunk."""
        if isinstance(event, ChunkPayload):
            self._look_at(event)
        elif isinstance(event.message, Offer):
            body = event.message.manifest.body
            if manifest_id_of(body) not in self._headers:
                try:
                    self._headers[manifest_id_of(body)] = codec.decode(body, ManifestHeader)
                except RemoteProtocolError as error:
                    self._watch.breach(NOTHING_UNVERIFIED, f"a manifest of garbage: {error}")

    def _look_at(self, chunk: ChunkPayload) -> None:
        manifest_id, digest = chunk.manifest_id, digest_of(chunk.data)
        header, digests = self._headers.get(manifest_id), self._digests.get(manifest_id)
        if chunk.index == 0 and header is not None:
            self._compare(manifest_id, 0, digest, header.index_digest)
            if digests is None and digest == header.index_digest:
                self._digests[manifest_id] = bytes(chunk.data)
                for index, early in self._early.pop(manifest_id, []):
                    self._compare(manifest_id, index, early, _digest_at(chunk.data, index))
        elif digests is not None:
            self._compare(manifest_id, chunk.index, digest, _digest_at(digests, chunk.index))
        else:
            self._early.setdefault(manifest_id, []).append((chunk.index, digest))

    def _compare(self, manifest_id: ManifestId, index: int, digest: bytes, wanted: bytes) -> None:
        if digest != wanted:
            detail = f"chunk {index} of {manifest_id.hex()} is not the manifest's"
            self._watch.breach(NOTHING_UNVERIFIED, detail)


def _digest_at(index: bytes | memoryview, at: int) -> bytes:
    """Return the digest of chunk ``at``, from chunk 0."""
    return bytes(index[(at - 1) * DIGEST_BYTES : at * DIGEST_BYTES])


def idle_share(summary: Mapping[str, object]) -> float:
    """Return the learner's idle share of a run."""
    share = summary.get("learner_idle_share")
    return float(share) if isinstance(share, int | float) else math.nan
