"""A coordinator's middle on a test bench: from leases to scored groups, without learner and relay.

Members, leases, uploads and the book are the real parts on a simulated disk; the task worker is
the inline one. Whoever holds the bench plays the learner (`publish`, `roll_back`) and the peers
(`join`, `lease`, `right_answers`). A bench opened again on the same disk is the coordinator's next
life. It knows nothing of HTTP: tests put `coordinator.api.Api` in front where they need it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import trio

from coordinator.book import Book
from coordinator.config import MembershipSection, RolloutsSection
from coordinator.intake import Intake
from coordinator.leases import LeaseDesk
from coordinator.membership import NO_MEASUREMENTS, Member, Membership
from coordinator.roster import Roster
from coordinator.run_state import RunState
from coordinator.schema import MIGRATIONS, VersionRow
from coordinator.task_keeper import TaskKeeper
from coordinator.task_port import TaskSetup, TaskWorker
from echo2p2p.ids import Generation, PeerId, Step, Version
from echo2p2p.limits import PROTOCOL
from echo2p2p.net.ports import Store
from echo2p2p.net.trust import CertificateAuthority, PeerIdentity, RunKeys, fingerprint, join_proof
from echo2p2p.rollouts.batch import GroupQueue
from echo2p2p.testing.clock import SimClock
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import SimEntropy
from echo2p2p.weights.layout import plan_layout
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_logprobs, from_tokens, to_tokens
from echo2p2p.wire.messages import (
    Address,
    Caps,
    Hardware,
    Heartbeat,
    JoinReply,
    JoinRequest,
    Lease,
    LeaseRequest,
    Measurements,
    Sample,
    Sampling,
    Span,
    Upload,
    UploadReply,
)
from scenarios.parts import InlineTaskWorker

LAYOUT: Final = plan_layout([("weight", "bf16", (16, 4), ())])
"""Small, but real."""

ROLLOUTS: Final = RolloutsSection(
    prompts_per_step=2,
    samples_per_prompt=2,
    staleness_budget=1,
    tokens_max=8,
    lease_timeout_s=30.0,
)
"""Batches of two groups of two; two batches may be admitted on the first version."""

EngineKind = Literal["none", "hf", "vllm", "fake"]


@dataclass
class Bench:
    """All parts, open to be played with."""

    book: Book
    state: RunState
    desk: LeaseDesk
    queue: GroupQueue
    intake: Intake
    tasks: TaskKeeper
    roster: Roster
    keys: RunKeys
    entropy: SimEntropy
    journal: TraceJournal
    told: list[tuple[Mapping[PeerId, float], frozenset[PeerId]]]
    """What the source was told of uplinks, and who cannot be dialled, each time."""
    identities: dict[str, PeerIdentity] = field(default_factory=dict)

    @property
    def uplinks(self) -> Mapping[PeerId, float]:
        """What the source knows of uplinks."""
        return self.told[-1][0]

    # --- the learner's part -------------------------------------------------------------------

    async def publish(self, step: int) -> Version:
        """Make the next version, of this step."""
        latest = self.state.latest
        version = Version(0 if latest is None else latest + 1)
        row = VersionRow(version, Step(step), self.state.generation, dead=False)
        await self.book.add_version(row, [])
        self.state.add_version(version, Step(step))
        return version

    async def train(self) -> bool:
        """Consume a batch if there is one, as the trainer does."""
        await self.intake.drop(self.queue.drop_stale(self.state.step))
        groups = self.queue.take(self.state.step, ROLLOUTS.prompts_per_step)
        if groups is None:
            return False
        step = Step(self.state.step + 1)
        taken = [(scored.group.lease_id, len(scored.group.turns)) for scored in groups]
        await self.book.train(taken, step, b"")
        for scored in groups:
            self.intake.decided(scored.group, None)
        self.state.step = step
        self.state.notify()
        return True

    async def roll_back(self, step: int) -> None:
        """Start again from a checkpoint at ``step``, in the trainer's order."""
        self.state.generation = Generation(self.state.generation + 1)
        await self.book.roll_back(Step(step))
        self.state.roll_back(Step(step))
        await self.intake.roll_back()

    # --- the peers' part ----------------------------------------------------------------------

    def request(self, name: str, *, engine: EngineKind = "fake", csr: bytes = b"") -> JoinRequest:
        """Return a join request of the identity called ``name``, with a proof of its key."""
        identity = self.identities.get(name)
        if identity is None:
            identity = self.identities[name] = PeerIdentity.create(SimEntropy(name))
        nonce = self.entropy.secret(16)
        run = fingerprint(self.keys.public_key)
        return JoinRequest(
            protocol=PROTOCOL,
            name=name,
            public_key=identity.public_key,
            proof=join_proof(identity, run, nonce, csr, name),
            nonce=nonce,
            csr=csr,
            relay=Address(host=f"{name}.sim", port=7000),
            engine=engine,
            hardware=Hardware(accelerator="cpu", cores=1, memory_bytes=0),
            caps=Caps(upload_bytes_per_s=None, download_bytes_per_s=None, bytes_per_day=None),
        )

    async def join(self, name: str, *, engine: EngineKind = "fake") -> JoinReply:
        """Join; it must be possible."""
        reply = await self.roster.join(self.request(name, engine=engine))
        assert isinstance(reply, JoinReply), reply
        return reply

    async def ready(self, name: str, version: int = 0, *, engine: EngineKind = "fake") -> Member:
        """Join and send the first heartbeat with a proved version."""
        await self.join(name, engine=engine)
        return self.beat(self.member(name), version)

    def member(self, name: str) -> Member:
        """Return a live member by its name."""
        return next(member for member in self.state.members.live() if member.name == name)

    def beat(self, member: Member, version: int | None) -> Member:
        """Send a heartbeat of a live member."""
        beat = heartbeat(member.incarnation, version)
        renewed = self.roster.heartbeat(member, beat, trio.current_time())
        assert renewed is not None
        return renewed

    async def lease(
        self, member: Member, *, count: int = 64, version: int = 0, wait_s: float = 0.0
    ) -> list[Lease]:
        """Ask for work."""
        request = LeaseRequest(
            incarnation=member.incarnation, version=version, leases_max=count, wait_s=wait_s
        )
        return await self.desk.request(member, request)

    async def upload(self, member: Member, upload: Upload) -> UploadReply:
        """Hand samples in."""
        return await self.intake.upload(member, upload, codec.encode(upload))


def heartbeat(
    incarnation: int, version: int | None, *, measurements: Measurements = NO_MEASUREMENTS
) -> Heartbeat:
    """Return a heartbeat of a peer without holdings."""
    return Heartbeat(
        incarnation=incarnation,
        state="warming" if version is None else "ready",
        version=version,
        holdings=[],
        relays=True,
        measurements=measurements,
        price_usd_per_hour=0.0,
        available_s=None,
    )


def right_answers(lease: Lease, incarnation: int, *, version: int | None = None) -> Upload:
    """Return an upload in which every sample but the first sorts the prompt's digits."""
    digits = sorted(to_tokens(lease.prompt).tolist()[1:-1])
    version = lease.version if version is None else version
    good = sample([*digits, lease.stop_ids[0]], version)
    return Upload(
        incarnation=incarnation,
        lease_id=lease.lease_id,
        samples=[sample([lease.stop_ids[0]], version), *[good] * (lease.samples - 1)],
        seconds=1.0,
    )


def loose_lease(name: str = "l", version: int = 0) -> Lease:
    """Return a lease of two samples that no desk has given out, for engines alone."""
    return Lease(
        lease_id=name,
        kind="train",
        prompt=from_tokens([1, 9, 7, 8, 4]),
        samples=2,
        seeds=[1, 2],
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0),
        tokens_max=8,
        stop_ids=[2],
        forced=None,
        version=version,
        deadline_s=60.0,
        affinity=None,
    )


def sample(tokens: list[int], version: int) -> Sample:
    """Return a stopped sample of one span."""
    return Sample(
        tokens=from_tokens(tokens),
        logprobs=from_logprobs([-0.5] * len(tokens)),
        spans=[Span(version=version, start=0, end=len(tokens))],
        finish="stop",
    )


@asynccontextmanager
async def open_bench(
    disk: SimDisk,
    *,
    rollouts: RolloutsSection = ROLLOUTS,
    membership: MembershipSection | None = None,
    make_worker: Callable[[], TaskWorker] = InlineTaskWorker,
    tls: bool = False,
    learner_up: bool = True,
    seed: int = 0,
) -> AsyncIterator[Bench]:
    """Open a coordinator's middle on a disk, with all that it finds there; nothing runs yet.

    Args:
        disk: The first life on it publishes version 0 at step 0.
        rollouts: Settings of leases and batches.
        membership: Settings of terms.
        make_worker: Called for each life of the task worker.
        tls: Whether members get certificates.
        learner_up: Whether the roster is open; `Roster.load` opens it later.
        seed: Of all that is drawn; each life on a disk needs one of its own.
    """
    async with disk.open_store("coordinator", MIGRATIONS) as store:
        bench = await _build(
            store, rollouts, membership or MembershipSection(), make_worker, tls=tls, seed=seed
        )
        if learner_up:
            await bench.roster.load(LAYOUT.table)
        try:
            yield bench
        finally:
            with trio.CancelScope(shield=True):
                await bench.tasks.close()


async def _build(
    store: Store,
    rollouts: RolloutsSection,
    membership: MembershipSection,
    make_worker: Callable[[], TaskWorker],
    *,
    tls: bool,
    seed: int,
) -> Bench:
    entropy, journal = SimEntropy(seed), TraceJournal()
    keys = RunKeys.create(SimEntropy(0))
    book = Book(store)
    await book.load()
    tasks = TaskKeeper(
        make_worker=make_worker, setup=TaskSetup(Path("model"), "sort_digits"), journal=journal
    )
    info = await tasks.start()
    members = Membership(term_s=membership.term_s)
    state = RunState(run_id="run", members=members, vocabulary=info.vocab_size)
    desk = LeaseDesk(
        book=book,
        state=state,
        tasks=tasks,
        info=info,
        settings=rollouts,
        item_secret=bytes(32),
        entropy=entropy,
        journal=journal,
    )
    queue = GroupQueue(staleness_budget=rollouts.staleness_budget)
    intake = Intake(
        book=book,
        state=state,
        desk=desk,
        tasks=tasks,
        queue=queue,
        staleness_budget=rollouts.staleness_budget,
        journal=journal,
    )
    clock = SimClock()
    told: list[tuple[Mapping[PeerId, float], frozenset[PeerId]]] = []
    roster = Roster(
        members=members,
        settings=membership,
        book=book,
        state=state,
        desk=desk,
        keys=keys,
        authority=CertificateAuthority(keys, clock, entropy) if tls else None,
        model_config="{}",
        source=Address(host="coordinator.sim", port=7001),
        clock=clock,
        entropy=entropy,
        journal=journal,
        on_uplinks=lambda *both: told.append(both),
    )
    bench = Bench(book, state, desk, queue, intake, tasks, roster, keys, entropy, journal, told)
    versions = await book.versions()
    for row in versions:
        state.add_version(row.version, row.step, dead=row.dead)
    if not versions:
        await bench.publish(0)
    await desk.load()
    await intake.load()
    state.leasing = True
    return bench
