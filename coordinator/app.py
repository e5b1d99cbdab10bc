"""Composition root of a coordinator: builds the parts, supervises them, ends the run.

Starting and resuming are one path: whatever the store holds is taken up, then the learner starts
(from its newest checkpoint if there is one) and publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import trio

from coordinator import report
from coordinator.api import Api, Secrets
from coordinator.book import Book
from coordinator.config import Settings
from coordinator.intake import Intake
from coordinator.learner.base import Learner, LearnerSetup, Progress, WarmStart
from coordinator.leases import LeaseDesk
from coordinator.membership import Membership
from coordinator.publish import Publisher
from coordinator.roster import Roster
from coordinator.run_state import RunState
from coordinator.task_keeper import TaskKeeper
from coordinator.task_port import TaskInfo, TaskSetup, TaskWorker
from coordinator.training import Shelf, StepRecord, Trainer
from echo2p2p.errors import EchoError, EngineError
from echo2p2p.ids import SOURCE, Generation, Step
from echo2p2p.net.ports import (
    Blobs,
    Endpoint,
    Entropy,
    HttpServer,
    Journal,
    Offload,
    SharedMemory,
    Store,
    Streams,
    TlsServer,
    WallClock,
)
from echo2p2p.net.relay import RelayNode, RelaySettings
from echo2p2p.net.trust import CertificateAuthority, JoinToken, RunKeys, draw_admin_token
from echo2p2p.rollouts.batch import GroupQueue
from echo2p2p.rollouts.ledger import Balance
from echo2p2p.rollouts.trajectory import Reason
from echo2p2p.weights.layout import Layout
from echo2p2p.wire.messages import Address, CaReply, LayoutTable

RUN_OPENED: Final = "run.opened"
RUN_ENDED: Final = "run.ended"


@dataclass(frozen=True)
class CoordinatorPorts:
    """The world, real or simulated."""

    clock: WallClock
    entropy: Entropy
    journal: Journal
    offload: Offload
    streams: Streams
    make_http_server: Callable[[TlsServer | None], HttpServer]
    store: Store
    """Opened with `coordinator.schema.MIGRATIONS`."""
    blobs: Blobs
    memory: SharedMemory
    shelf: Shelf
    make_learner: Callable[[], Learner]
    make_task_worker: Callable[[], TaskWorker]
    model_dir: Path
    model_config: str
    """The model's ``config.json``."""


@dataclass(frozen=True)
class Opened:
    """What a user needs to know once the coordinator answers."""

    url: str
    token: str
    admin_token: str
    relay: Address


@dataclass(frozen=True)
class StepView:
    """What a progress line shows."""

    step: int
    steps: int
    reward: float
    reward_recent: float | None
    version: int | None
    peers_ready: int
    peers: int
    trained: int
    idle_share: float
    record: StepRecord


class CoordinatorApp:
    """One run.

    Args:
        settings: Validated.
        ports: The world.
        tls: Whether HTTP is TLS; the caller has resolved ``auto``.
        on_opened: Called once, when the server listens.
        on_step: Called after each step.
        on_start: Called while a learner starts, which may take minutes.
    """

    def __init__(
        self,
        settings: Settings,
        ports: CoordinatorPorts,
        *,
        tls: bool,
        on_opened: Callable[[Opened], None] = lambda _: None,
        on_step: Callable[[StepView], None] = lambda _: None,
        on_start: Progress = lambda _phase, _figures: None,
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._tls = tls
        self._on_opened = on_opened
        self._on_step = on_step
        self._on_start = on_start
        self._stopping = trio.Event()
        self._progress = report.Progress(began_s=ports.clock.time())
        self._opened_book: Book | None = None

    @property
    def _book(self) -> Book:
        assert self._opened_book is not None
        return self._opened_book

    async def run(self) -> Mapping[str, object]:
        """Run to the last step (or until told to stop) and return the summary.

        Raises:
            EchoError: The run has failed; peers have been told.
        """
        ports = self._ports
        book = Book(ports.store)
        await book.load()
        self._opened_book = book
        keys, run_id, token, admin_token = await self._identity()
        self._tasks = TaskKeeper(
            make_worker=ports.make_task_worker,
            setup=TaskSetup(
                ports.model_dir, self._settings.task.name, dict(self._settings.task.options)
            ),
            journal=ports.journal,
        )
        try:
            info = await self._tasks.start()
            self._build(keys, run_id, info)
            return await self._serve(keys, token, admin_token)
        finally:
            with trio.CancelScope(shield=True):
                await self._tasks.close()

    async def _identity(self) -> tuple[RunKeys, str, JoinToken, str]:
        """Return the run's keys and secrets, drawn once and kept in the store."""
        book, entropy = self._book, self._ports.entropy
        stored = await book.get("run_key")
        if stored is None:
            keys = RunKeys.create(entropy)
            token = JoinToken.create(entropy, keys.public_key)
            await book.put("began_s", repr(self._ports.clock.time()).encode())
            await book.put("run_id", entropy.secret(8).hex().encode())
            await book.put("token", token.encode().encode())
            await book.put("admin_token", draw_admin_token(entropy).encode())
            await book.put("run_key", keys.pem())
            stored = keys.pem()
        values = [await book.get(key) for key in ("run_id", "token", "admin_token")]
        run_id, token_text, admin = (value.decode() for value in values if value is not None)
        return RunKeys.from_pem(stored), run_id, JoinToken.parse(token_text), admin

    # --- parts --------------------------------------------------------------------------------

    def _build(self, keys: RunKeys, run_id: str, info: TaskInfo) -> None:
        """Build everything that needs no address."""
        ports, settings = self._ports, self._settings
        self._members = Membership(term_s=settings.membership.term_s)
        self._state = RunState(run_id=run_id, members=self._members, vocabulary=info.vocab_size)
        self._relay = RelayNode(
            me=SOURCE,
            run_id=run_id,
            run_public_key=keys.public_key,
            sign=keys.sign,
            card=None,
            streams=ports.streams,
            endpoint=Endpoint(settings.server.host, settings.server.relay_port),
            wants=lambda _: False,
            journal=ports.journal,
            entropy=ports.entropy,
            rng=ports.entropy.rng("relay"),
            settings=RelaySettings(),
        )
        self._desk = LeaseDesk(
            book=self._book,
            state=self._state,
            tasks=self._tasks,
            info=info,
            settings=settings.rollouts,
            run_seed=settings.run.seed,
            entropy=ports.entropy,
            journal=ports.journal,
        )
        self._queue = GroupQueue(staleness_budget=settings.rollouts.staleness_budget)
        self._intake = Intake(
            book=self._book,
            state=self._state,
            desk=self._desk,
            tasks=self._tasks,
            queue=self._queue,
            staleness_budget=settings.rollouts.staleness_budget,
            journal=ports.journal,
        )
        self._publisher = Publisher(
            book=self._book,
            blobs=ports.blobs,
            offload=ports.offload,
            relay=self._relay,
            key=keys.private,
            state=self._state,
            settings=settings.weights,
            journal=ports.journal,
        )

    async def _serve(
        self, keys: RunKeys, token: JoinToken, admin_token: str
    ) -> Mapping[str, object]:
        ports, settings = self._ports, self._settings
        server = settings.server
        authority, tls = None, None
        if self._tls:
            authority = CertificateAuthority(keys, ports.clock, ports.entropy)
            certificate, key = authority.issue_coordinator([server.host])
            tls = TlsServer(authority.certificate, certificate, key)
        async with trio.open_nursery() as nursery:
            real_relay = await nursery.start(self._relay.run)
            assert isinstance(real_relay, Endpoint)
            source = Address(host=server.relay_public_host or real_relay.host, port=real_relay.port)
            self._roster = Roster(
                members=self._members,
                settings=settings.membership,
                book=self._book,
                state=self._state,
                desk=self._desk,
                keys=keys,
                authority=authority,
                model_config=ports.model_config,
                source=source,
                clock=ports.clock,
                entropy=ports.entropy,
                journal=ports.journal,
            )
            api = Api(
                secrets=Secrets(
                    token=token,
                    admin_token=admin_token,
                    tls=self._tls,
                    ca=CaReply(
                        run_public_key=keys.public_key,
                        certificate=b"" if authority is None else authority.certificate,
                    ),
                ),
                state=self._state,
                roster=self._roster,
                desk=self._desk,
                intake=self._intake,
                publisher=self._publisher,
                status=self.summary,
                stop=self._stopping.set,
                journal=ports.journal,
            )
            bind = Endpoint(server.host, server.port)
            async with ports.make_http_server(tls).serve(api.routes(), bind) as real:
                url = server.public_url or _url(real, tls=self._tls)
                ports.journal.event(RUN_OPENED, url=url, run=self._state.run_id)
                self._on_opened(Opened(url, token.encode(), admin_token, source))
                summary = await self._train(nursery)
            nursery.cancel_scope.cancel()
        return summary

    async def _train(self, nursery: trio.Nursery) -> Mapping[str, object]:
        """Run the trainer beside the services; then tell the peers and take leave."""
        trainer = self._trainer()
        failure: EchoError | None = None
        async with trio.open_nursery() as services:
            services.start_soon(self._roster.run)
            services.start_soon(self._desk.run)
            services.start_soon(self._intake.run)
            try:
                with trio.CancelScope() as scope:
                    services.start_soon(self._stop_when_told, scope)
                    await trainer.run()
            except EngineError as error:
                failure = error
            self._state.outcome = "finished" if failure is None else "failed"
            self._state.leasing = False
            self._state.notify()
            await self._desk.end_all(Reason.UNUSED)
            with trio.move_on_after(self._settings.run.exit_grace_s):
                while self._members.live():
                    await self._state.changed.park()
            summary = await self.summary()
            services.cancel_scope.cancel()
        del nursery
        self._ports.journal.event(RUN_ENDED, outcome=self._state.outcome, step=self._state.step)
        if failure is not None:
            raise failure
        return summary

    async def _stop_when_told(self, scope: trio.CancelScope) -> None:
        await self._stopping.wait()
        scope.cancel()

    def _trainer(self) -> Trainer:
        settings, ports = self._settings, self._ports
        learner, warm = settings.learner, settings.learner.warm_start
        setup = LearnerSetup(
            model_dir=ports.model_dir,
            task=settings.task.name,
            task_options=dict(settings.task.options),
            seed=settings.run.seed,
            warm_start=WarmStart(warm.steps, warm.batch, warm.learning_rate, warm.warmup_steps),
            learning_rate=learner.learning_rate,
            betas=learner.betas,
            weight_decay=learner.weight_decay,
            warmup_steps=learner.warmup_steps,
            gradient_norm_max=learner.gradient_norm_max,
            clip_low=learner.clip_low,
            clip_high=learner.clip_high,
            correction=learner.correction,
            correction_cap=learner.correction_cap,
            micro_batch=learner.micro_batch,
            threads=learner.threads,
        )
        return Trainer(
            settings=settings,
            setup=setup,
            make_learner=ports.make_learner,
            checkpoints=ports.shelf,
            memory=ports.memory,
            book=self._book,
            state=self._state,
            intake=self._intake,
            queue=self._queue,
            publisher=self._publisher,
            journal=ports.journal,
            record=self._record,
            on_rolled_back=self._on_rolled_back,
            on_start=self._on_start,
            on_layout=self._take_up,
        )

    async def _take_up(self, layout: LayoutTable) -> None:
        """Rebuild what the store knows; order matters: versions, leases, uploads, members."""
        generation = await self._book.get("generation")
        self._state.generation = Generation(int(generation) if generation else 0)
        began = await self._book.get("began_s")
        records = [msgspec.json.decode(row, type=StepRecord) for row in await self._book.steps()]
        if began is not None:
            self._progress = report.Progress(began_s=float(began), records=records)
        self._state.step = Step(max((record.step for record in records), default=0))
        await self._publisher.load(Layout.from_table(layout))
        await self._desk.load()
        await self._intake.load()
        await self._roster.load(layout)

    def _on_rolled_back(self, step: Step) -> None:
        self._progress.roll_back(step)

    def _record(self, record: StepRecord) -> None:
        self._progress.add(record)
        members = self._members.live()
        self._on_step(
            StepView(
                step=record.step,
                steps=self._settings.run.steps,
                reward=record.reward,
                reward_recent=self._progress.reward_recent(),
                version=self._state.latest,
                peers_ready=sum(member.version is not None for member in members),
                peers=len(members),
                trained=self._book.ledger.statistics().trained,
                idle_share=self._progress.idle_share,
                record=record,
            )
        )

    def balance(self) -> Balance | None:
        """Return the ledger as it is now; ``None`` before the store is open."""
        book = self._opened_book
        return None if book is None else book.ledger.statistics()

    # --- status -------------------------------------------------------------------------------

    async def summary(self) -> dict[str, object]:
        """Return everything about the run so far; the answer of /status, and summary.json."""
        outcome: Literal["running", "finished", "failed"] = self._state.outcome
        traffic = await self._roster.traffic()
        fates = await self._book.by_peer()
        names = {row.peer_id: row.name for row in await self._book.members()}
        states = {member.peer_id: member for member in self._members.live()}
        latest = self._state.latest
        return {
            "outcome": outcome,
            "run": self._state.run_id,
            **self._progress.summary(self._ports.clock.time()),
            "step": self._state.step,
            "generation": self._state.generation,
            "versions_published": 0 if latest is None else latest + 1,
            "trajectories": report.trajectories(
                self._book.ledger.statistics(), await self._book.recount()
            ),
            "weights": report.weights(
                self._publisher.statistics(),
                source_bytes=self._publisher.source_bytes,
                peer_bytes=sum(traffic.values()),
            ),
            "peers": [
                {
                    "peer": peer_id,
                    "name": name,
                    "state": states[peer_id].state.value if peer_id in states else "gone",
                    "version": states[peer_id].version if peer_id in states else None,
                    "accepted": fates.get(peer_id, {}).get("trained", 0)
                    + fates.get(peer_id, {}).get("queued", 0),
                    "rejected": fates.get(peer_id, {}).get("rejected", 0),
                    "relayed_bytes": traffic.get(peer_id, 0),
                }
                for peer_id, name in names.items()
            ],
        }


def _url(real: Endpoint, *, tls: bool) -> str:
    host = f"[{real.host}]" if ":" in real.host else real.host
    return f"{'https' if tls else 'http'}://{host}:{real.port}"
