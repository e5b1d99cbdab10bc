"""Composition root of a coordinator: builds the parts, supervises them, ends the run.

Starting and resuming are one path: whatever the store holds is taken up, then the learner starts
(from its newest checkpoint if there is one) and publishes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import trio
from blake3 import blake3

from coordinator import addresses, report
from coordinator.api import Api, Secrets
from coordinator.board import Board
from coordinator.book import Book
from coordinator.config import LOOPBACK_HOSTS, Settings
from coordinator.held_out import HeldOut
from coordinator.intake import Intake
from coordinator.learner.base import Learner, Progress
from coordinator.leases import LeaseDesk
from coordinator.membership import MEMBERS_MAX, Membership
from coordinator.publish import Publisher
from coordinator.roster import Roster
from coordinator.run_state import RunState
from coordinator.task_keeper import TaskKeeper
from coordinator.task_port import TaskInfo, TaskSetup, TaskWorker
from coordinator.training import Shelf, StepRecord, Trainer, learner_setup
from echo2p2p.errors import ConfigError, EchoError, EngineError, StoreError
from echo2p2p.ids import SOURCE, Generation, Step
from echo2p2p.limits import Fill
from echo2p2p.net.payloads import RelaySettings
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
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.tls_streams import TlsStreams
from echo2p2p.net.trust import CertificateAuthority, JoinToken, RunKeys, draw_admin_token
from echo2p2p.rollouts.batch import GroupQueue
from echo2p2p.rollouts.ledger import Balance
from echo2p2p.rollouts.trajectory import Reason
from echo2p2p.weights.layout import Layout
from echo2p2p.wire.messages import Address, CaReply, LayoutTable

RUN_OPENED: Final = "run.opened"
RUN_ENDED: Final = "run.ended"
OVERDUE_S: Final = 1.0
"""How long after its end a term or a lease may still be there: somebody has to be woken."""


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
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    """By name: what peers may have of the model's folder."""
    cores: int = 1
    """That this process may use."""


@dataclass(frozen=True)
class Opened:
    """What a user needs to know once the coordinator answers."""

    url: str
    token: str
    admin_token: str
    relay: Address
    authority: bytes | None
    """Certificate of the run's authority, PEM; ``None`` without TLS."""


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
        addresses.check_addresses(settings.server, tls=tls)
        self._settings = settings
        self._ports = ports
        self._tls = tls
        self._on_opened = on_opened
        self._on_step = on_step
        self._on_start = on_start
        self._stopping = trio.Event()
        self._broken = trio.Event()
        self._disk_error: StoreError | None = None
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
            self._authority, self._leaf = self._certificates(keys)
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

    def _certificates(self, keys: RunKeys) -> tuple[CertificateAuthority | None, TlsServer | None]:
        """Return the authority and a fresh leaf for HTTP and relay links; nothing without TLS."""
        if not self._tls:
            return None, None
        authority = CertificateAuthority(keys, self._ports.clock, self._ports.entropy)
        hosts = addresses.certificate_hosts(self._settings.server)
        leaf, key = authority.issue_coordinator(hosts)
        return authority, TlsServer(authority.certificate, leaf, key)

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
            streams=TlsStreams(ports.streams, self._leaf) if self._leaf else ports.streams,
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
            item_secret=_item_secret(keys, settings.run.seed),
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
        self._held_out = HeldOut(
            settings=settings,
            tasks=self._tasks,
            info=info,
            book=self._book,
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
            threads=settings.weights.encoder_threads or _encoder_threads(ports.cores),
        )

    async def _serve(
        self, keys: RunKeys, token: JoinToken, admin_token: str
    ) -> Mapping[str, object]:
        ports, settings, server = self._ports, self._settings, self._settings.server
        authority, tls = self._authority, self._leaf
        async with trio.open_nursery() as nursery:
            real_relay = await nursery.start(self._relay.run)
            assert isinstance(real_relay, Endpoint)
            source = addresses.relay_address(server, real_relay)
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
                on_uplinks=self._relay.set_uplinks,
            )
            self._board = Board(
                settings=settings,
                clock=ports.clock,
                book=self._book,
                state=self._state,
                roster=self._roster,
                intake=self._intake,
                queue=self._queue,
                publisher=self._publisher,
                fills=self.fills,
                held_out=self._held_out.summary,
            )
            api = Api(
                secrets=Secrets(
                    token=token,
                    admin_token=admin_token,
                    tls=self._tls,
                    local=server.host in LOOPBACK_HOSTS and server.public_url is None,
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
                status=self._board.status,
                stop=self.stop,
                journal=ports.journal,
                fail=self._fail,
                model_files=ports.model_files,
                upload_bytes_max=settings.rollouts.upload_bytes_max,
            )
            bind = Endpoint(server.host, server.port)
            async with ports.make_http_server(tls).serve(api.routes(), bind) as real:
                url = addresses.public_url(server, real, tls=self._tls)
                ports.journal.event(RUN_OPENED, url=url, run=self._state.run_id)
                root = None if authority is None else authority.certificate
                self._on_opened(Opened(url, token.encode(), admin_token, source, root))
                summary = await self._train(nursery)
            nursery.cancel_scope.cancel()
        return summary

    async def _train(self, nursery: trio.Nursery) -> Mapping[str, object]:
        """Run the trainer beside the services; then tell the peers and take leave."""
        trainer = self._trainer()
        failure: EchoError | None = None
        scope = trio.CancelScope()

        async def work(part: Callable[[], Awaitable[None]]) -> None:
            nonlocal failure
            try:
                await part()
            except (EngineError, ConfigError) as error:  # the task's: peers are to hear of it
                failure = error
                scope.cancel()

        async with trio.open_nursery() as services:
            services.start_soon(self._roster.run)
            services.start_soon(work, self._desk.run)
            services.start_soon(work, self._intake.run)
            services.start_soon(self._board.watch)
            services.start_soon(self._publisher.run)
            services.start_soon(self._end_when_broken)
            try:
                with scope:
                    services.start_soon(self._stop_when_told, trainer, scope)
                    await trainer.run()
            except (EngineError, ConfigError) as error:
                failure = error
            self._state.outcome = "finished" if failure is None else "failed"
            self._state.leasing = False
            self._state.notify()
            await self._desk.end_all(Reason.UNUSED)
            with trio.move_on_after(self._settings.run.exit_grace_s):
                while self._members.live():
                    await self._state.changed.park()
            summary = await self._board.summary()
            services.cancel_scope.cancel()
        del nursery
        self._ports.journal.event(RUN_ENDED, outcome=self._state.outcome, step=self._state.step)
        if failure is not None:
            raise failure
        return summary

    def _fail(self, error: StoreError) -> None:
        """A request has met a disk that refuses: the run ends as if the learner had met it."""
        self._disk_error = self._disk_error or error
        self._broken.set()

    async def _end_when_broken(self) -> None:
        await self._broken.wait()
        assert self._disk_error is not None
        raise self._disk_error

    async def _stop_when_told(self, trainer: Trainer, scope: trio.CancelScope) -> None:
        await self._stopping.wait()
        if not trainer.stop():
            scope.cancel()

    def _trainer(self) -> Trainer:
        settings, ports = self._settings, self._ports
        return Trainer(
            settings=settings,
            setup=learner_setup(settings, ports.model_dir),
            make_learner=ports.make_learner,
            checkpoints=ports.shelf,
            memory=ports.memory,
            book=self._book,
            state=self._state,
            intake=self._intake,
            queue=self._queue,
            publisher=self._publisher,
            held_out=self._held_out,
            journal=ports.journal,
            record=self._record,
            on_rolled_back=self._on_rolled_back,
            on_start=self._on_starting,
            on_layout=self._take_up,
        )

    async def _take_up(self, layout: LayoutTable) -> None:
        """Rebuild what the store knows; order matters: versions, leases, uploads, members."""
        generation = await self._book.get("generation")
        self._state.generation = Generation(int(generation) if generation else 0)
        began = await self._book.get("began_s")
        rows = await self._book.steps()
        if began is not None:
            self._board.progress = report.Progress(
                began_s=float(began),
                records=(msgspec.json.decode(row, type=StepRecord) for row in rows),
            )
        self._state.step = Step(self._board.progress.step)
        await self._publisher.load(Layout.from_table(layout))
        await self._desk.load()
        await self._intake.load()
        await self._roster.load(layout)

    def _on_starting(self, phase: str, figures: Mapping[str, float]) -> None:
        self._board.starting(phase, figures)
        self._on_start(phase, figures)

    def _on_rolled_back(self, step: Step) -> None:
        self._board.progress.roll_back(step)

    def _record(self, record: StepRecord) -> None:
        self._board.progress.add(record)
        members = self._members.live()
        self._on_step(
            StepView(
                step=record.step,
                steps=self._settings.run.steps,
                reward=record.reward,
                reward_recent=self._board.progress.reward_recent(),
                version=self._state.latest,
                peers_ready=sum(member.version is not None for member in members),
                peers=len(members),
                trained=self._book.ledger.statistics().trained,
                idle_share=self._board.progress.idle_share,
                record=record,
            )
        )

    def stop(self) -> None:
        """End the run after the step under way, with a checkpoint; peers are told."""
        self._stopping.set()

    def balance(self) -> Balance | None:
        """Return the ledger as it is now; ``None`` before the store is open."""
        book = self._opened_book
        return None if book is None else book.ledger.statistics()

    def fills(self) -> Iterator[Fill]:
        """Yield how full everything is that has a bound; call it once the server has opened."""
        rollouts, now = self._settings.rollouts, trio.current_time()
        balance = self._book.ledger.statistics()
        admitted = (rollouts.staleness_budget + 1) * rollouts.batch
        yield Fill("trajectories under way", balance.queued + balance.in_flight, admitted)
        yield Fill("members", len(self._members), MEMBERS_MAX)
        yield Fill("leases past their deadline", self._desk.overdue(now - OVERDUE_S), 0)
        yield Fill("members past their term", self._members.overdue(now - OVERDUE_S), 0)
        yield from self._intake.fills()
        yield from self._relay.fills()

    async def status(self) -> Mapping[str, object]:
        """Return all that can be said of the run now; call it once the server has opened."""
        return await self._board.status()


def _encoder_threads(cores: int) -> int:
    """Return how many threads encode: one core is the learner's, and of more than 4 few win."""
    return max(1, min(4, cores - 1))


def _item_secret(keys: RunKeys, seed: int) -> bytes:
    """Return 32 bytes from which item seeds are drawn: the same for a run's whole life."""
    return blake3(keys.sign(b"echo2p2p items 0\x00" + str(seed).encode())).digest()
