"""A peer's work against the real desk and intake, and against a coordinator that misbehaves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from coordinator.api import Api, Secrets
from echo2p2p.errors import RefusedError
from echo2p2p.ids import Incarnation, Step, Version
from echo2p2p.net.ports import Endpoint, HttpClient, Request, Response, Route
from echo2p2p.net.routing import refusal
from echo2p2p.net.trust import JoinToken
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.http import SimHttp
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import InlineOffload, MemoryState, SimEntropy
from echo2p2p.weights.state import state_digest
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.messages import (
    CaReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Outcome,
    Sampling,
    Upload,
    UploadReply,
)
from peer import coordinator_client
from peer.coordinator_client import CoordinatorClient
from peer.engine.base import EngineSetup
from peer.keeper import EngineKeeper, WeightState
from peer.outbox import LEASES_MAX
from peer.rollouts import LANES, RETRY_S, Rollouts
from scenarios.fake_engine import EngineFaults, FakeEngine
from scenarios.middle import LAYOUT, Bench, heartbeat, open_bench

AT = Endpoint("c", 80)
URL = "http://c:80"
SETUP = EngineSetup(layout=LAYOUT.table, model_config="{}")


def weights(version: int) -> WeightState:
    state = MemoryState(LAYOUT.total_bytes)
    state.view[:] = bytes([version]) * LAYOUT.total_bytes
    return WeightState(Version(version), state_digest(LAYOUT, bytes(state.view)), state)


class Machine:
    """A peer's engine, keeper and work, with one version in place."""

    def __init__(
        self, *engines: FakeEngine, leases_at_once: int = 2, setup: EngineSetup = SETUP
    ) -> None:
        self.journal = TraceJournal()
        self._engines = list(engines)
        self._leases_at_once = leases_at_once
        self.keeper = EngineKeeper(
            make_engine=lambda: self._engines.pop(0) if self._engines else FakeEngine(),
            setup=setup,
            restarts_max=3,
            journal=self.journal,
            offload=InlineOffload(),
        )
        self.keeper.offer(weights(0))

    def work_for(self, client: CoordinatorClient, incarnation: int = 1) -> Rollouts:
        return Rollouts(
            client=client,
            incarnation=Incarnation(incarnation),
            keeper=self.keeper,
            leases_at_once=self._leases_at_once,
            journal=self.journal,
        )


# --- with the real coordinator's middle -------------------------------------------------------


class World:
    """A bench behind real routes on a simulated network, one peer in front of it."""

    def __init__(self, bench: Bench, machine: Machine) -> None:
        self.bench = bench
        self.machine = machine
        self.network = SimHttp(latency_s=0.01)
        entropy = SimEntropy("world")
        self.token = JoinToken.create(entropy, bench.keys.public_key)
        self.routes = Api(
            secrets=Secrets(
                self.token, "e2a-x", False, CaReply(run_public_key=b"", certificate=b"")
            ),
            state=bench.state,
            roster=bench.roster,
            desk=bench.desk,
            intake=bench.intake,
            publisher=None,
            status=None,
            stop=None,
            journal=bench.journal,
        ).routes()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """Let the coordinator answer while the context is open."""
        async with self.network.server("c", self.bench.journal).serve(self.routes, AT):
            yield

    async def beats(self, client: CoordinatorClient) -> None:
        """Send heartbeats; a refusal ends nothing here."""
        while True:
            told = self.machine.keeper.version
            try:
                await client.heartbeat(heartbeat(1, told))
            except (coordinator_client.HttpError, RefusedError):
                await trio.sleep(0.5)
            with trio.move_on_after(2.0):
                while self.machine.keeper.version == told:
                    await self.machine.keeper.changed.park()

    @asynccontextmanager
    async def peer(self) -> AsyncIterator[Rollouts]:
        """Join, and work beside the body; the coordinator must be served."""
        async with self.network.clients("p").connect(URL, None) as http:
            request = self.bench.request("p")
            reply = await coordinator_client.join(http, self.token.encode(), request)
            client = CoordinatorClient(http, reply.credential, Incarnation(1), lambda: None)
            work = self.machine.work_for(client)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.machine.keeper.run)
                nursery.start_soon(self.beats, client)
                nursery.start_soon(self.bench.roster.run)
                nursery.start_soon(self.bench.desk.run)
                nursery.start_soon(self.bench.intake.run)
                nursery.start_soon(work.run)
                yield work
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def world(*engines: FakeEngine) -> AsyncIterator[World]:
    async with open_bench(SimDisk()) as bench:
        yield World(bench, Machine(*engines))


async def test_leases_are_taken_generated_and_handed_in(autojump_clock) -> None:
    async with world(FakeEngine(seconds_per_token=0.1)) as at, at.served(), at.peer() as work:
        await trio.sleep(10.0)
        balance = at.bench.book.ledger.statistics()
        assert (balance.issued, balance.queued, balance.rejected) == (8, 8, {})
        assert (work.accepted, work.held, work.rejected) == (4, 0, {})
        assert len(at.bench.queue) == 4
        assert at.machine.journal.entries
        assert at.machine.journal.named("leases.lost") == []


async def test_work_goes_on_over_versions_and_nothing_is_lost(autojump_clock) -> None:
    async with world(FakeEngine(seconds_per_token=0.1)) as at, at.served(), at.peer() as work:
        with trio.fail_after(60.0):
            while at.bench.state.step < 6:
                if await at.bench.train():
                    version = await at.bench.publish(at.bench.state.step)
                    at.machine.keeper.offer(weights(version))
                else:
                    await at.bench.state.changed.park()
        await trio.sleep(5.0)  # for replies that are on their way
        balance = at.bench.book.ledger.statistics()
        assert (balance.trained, balance.rejected) == (6 * 4, {})
        assert work.accepted == (balance.trained + balance.queued) // 2 > 12


async def test_what_is_switched_in_flight_is_as_old_as_its_oldest_token(autojump_clock) -> None:
    machine = Machine(FakeEngine(seconds_per_token=1.0), setup=replace(SETUP, in_flight=True))
    async with open_bench(SimDisk()) as bench:
        at = World(bench, machine)
        async with at.served(), at.peer() as work:
            await trio.sleep(3.0)
            bench.state.step = Step(1)
            machine.keeper.offer(weights(await bench.publish(1)))
            await trio.sleep(9.0)
            assert machine.journal.named("version.loaded")[-1].at_s < 5.0, "in the first batch"
            assert work.accepted > 0
            assert work.rejected == {}
            groups = bench.queue.take(bench.state.step, 1)
            assert groups is not None
            group = groups[0].group
            assert (group.oldest_step, group.newest_step) == (0, 1)


async def test_while_the_coordinator_is_away_finished_work_is_kept_and_sent_later(
    autojump_clock,
) -> None:
    async with world(FakeEngine(seconds_per_token=1.0)) as at, at.served(), at.peer() as work:
        await trio.sleep(2.0)
        assert (work.held, at.bench.book.ledger.statistics().in_flight) == (4, 8)
        at.network.crash("c")
        await trio.sleep(6.0)  # less than a term
        assert (work.held, work.accepted) == (4, 0)
        async with at.served():
            await trio.sleep(9.0)
            assert (work.held, work.accepted, work.rejected) == (0, 4, {})
            balance = at.bench.book.ledger.statistics()
            assert (balance.queued, balance.in_flight, balance.rejected) == (8, 0, {})


@pytest.mark.parametrize(
    "faults", [EngineFaults(die_at_generate=1), EngineFaults(hang_at_generate=1)], ids=str
)
async def test_an_engine_that_fails_gives_its_leases_back_and_work_goes_on(
    autojump_clock, faults: EngineFaults
) -> None:
    bad = FakeEngine(seconds_per_token=0.1, faults=faults, timeout_s=5.0)
    async with world(bad) as at, at.served(), at.peer() as work:
        await trio.sleep(20.0)
        balance = at.bench.book.ledger.statistics()
        # Both lanes held two leases when it failed.
        assert balance.rejected == {"aborted": 8}
        assert (balance.queued, balance.in_flight) == (8, 0)
        assert (work.held, work.accepted, work.rejected) == (0, 4, {"aborted": 4})
        lost = at.machine.journal.named("leases.lost")
        assert [entry.fields["leases"] for entry in lost] == [2, 2]


async def test_who_is_no_member_any_more_stops_working(autojump_clock) -> None:
    async with world(FakeEngine(seconds_per_token=0.1)) as at, at.served():
        with pytest.RaisesGroup(
            pytest.RaisesExc(RefusedError, match="not_a_member"), flatten_subgroups=True
        ):
            async with at.peer():
                await trio.sleep(5.0)
                member = at.bench.member("p")
                await at.bench.roster.leave(member.peer_id, member.incarnation, "evicted")
                await trio.sleep(60.0)
                pytest.fail("it works on")


# --- with a coordinator that misbehaves -------------------------------------------------------


class Scripted:
    """Hands out leases without end (or up to a number) and answers uploads as it is told."""

    def __init__(self, *, leases_max: int = 10**6, lease_s: float = 0.0) -> None:
        self.given = 0
        self.uploads: list[Upload] = []
        self.polls = 0
        self.answer: Response | None = None
        self.lease_answer: Response | None = None
        self.hangs = 0
        self._leases_max = leases_max
        self._lease_s = lease_s

    async def lease(self, request: Request) -> Response:
        """Answer a poll."""
        asked = codec.decode(request.body, LeaseRequest)
        self.polls += 1
        await trio.sleep(self._lease_s)
        if self.lease_answer is not None:
            return self.lease_answer
        count = min(asked.leases_max, self._leases_max - self.given)
        if count == 0:
            await trio.sleep(asked.wait_s)
        names = [f"l{self.given + number}" for number in range(count)]
        self.given += count
        return Response(200, codec.encode(LeaseReply(leases=[lease(name) for name in names])))

    async def upload(self, request: Request) -> Response:
        """Answer an upload."""
        upload = codec.decode(request.body, Upload)
        self.uploads.append(upload)
        if self.hangs:
            self.hangs -= 1
            await trio.sleep_forever()
        if self.answer is not None:
            return self.answer
        outcome = Outcome(lease_id=upload.lease_id, accepted=True, reason=None)
        return Response(200, codec.encode(UploadReply(outcome=outcome, duplicate=False)))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HttpClient]:
        """Serve, and connect."""
        network = SimHttp(latency_s=0.0)
        routes = (
            Route("POST", "/lease", self.lease, 10**6),
            Route("POST", "/upload", self.upload, 10**7),
        )
        async with (
            network.server("c", TraceJournal()).serve(routes, AT),
            network.clients("p").connect(URL, None) as http,
        ):
            yield http


def lease(name: str) -> Lease:
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
        version=0,
        deadline_s=60.0,
        affinity=None,
    )


@asynccontextmanager
async def working(scripted: Scripted, machine: Machine) -> AsyncIterator[Rollouts]:
    async with scripted.open() as http, trio.open_nursery() as nursery:
        client = CoordinatorClient(http, "e2c-x", Incarnation(1), lambda: None)
        work = machine.work_for(client)
        nursery.start_soon(machine.keeper.run)
        nursery.start_soon(work.run)
        yield work
        nursery.cancel_scope.cancel()


async def test_nothing_is_asked_for_before_a_version_is_proved(autojump_clock) -> None:
    scripted = Scripted()
    async with working(scripted, Machine(FakeEngine(start_s=30.0, seconds_per_token=0.1))):
        await trio.sleep(29.0)
        assert scripted.polls == 0
        await trio.sleep(2.0)
        assert scripted.polls > 0


async def test_while_uploads_are_put_off_generation_stops_at_a_bound_and_all_is_sent_later(
    autojump_clock,
) -> None:
    scripted = Scripted(leases_max=400)
    scripted.answer = refusal(503, "busy", "later", retry_after_s=2.0)
    machine = Machine(FakeEngine(seconds_per_token=0.01), leases_at_once=4)
    async with working(scripted, machine) as work:
        await trio.sleep(100.0)
        assert LEASES_MAX <= scripted.given < LEASES_MAX + LANES * 4
        assert work.held == scripted.given
        before = scripted.given
        await trio.sleep(100.0)
        assert scripted.given == before
        scripted.answer = None
        scripted.uploads.clear()
        await trio.sleep(100.0)
        assert scripted.given == 400
        assert sorted(upload.lease_id for upload in scripted.uploads) == sorted(
            f"l{number}" for number in range(400)
        )
        assert (work.held, work.accepted) == (0, 400)


async def test_a_pause_that_the_coordinator_asks_for_is_kept(autojump_clock) -> None:
    scripted = Scripted(leases_max=1)
    scripted.answer = refusal(429, "busy", "later", retry_after_s=7.0)
    async with working(scripted, Machine()):
        await trio.sleep(20.0)
        assert len(scripted.uploads) == 3  # at 0, 7 and 14 s


@pytest.mark.parametrize(
    ("answer", "every_s"),
    [
        (refusal(503, "starting", "soon", retry_after_s=7.0), 7.0),
        (Response(502, b"<html>a proxy in between</html>"), RETRY_S),
    ],
    ids=["put off", "no answer of ours"],
)
async def test_questions_that_are_not_answered_are_asked_again_at_a_modest_pace(
    autojump_clock, answer: Response, every_s: float
) -> None:
    scripted = Scripted(leases_max=1)
    scripted.answer = scripted.lease_answer = answer
    async with working(scripted, Machine()) as work:
        await trio.sleep(10 * every_s - 0.5)
        assert scripted.polls == LANES * 10
        scripted.lease_answer = None
        await trio.sleep(every_s)
        assert work.held == 1
        scripted.uploads.clear()
        await trio.sleep(10 * every_s)
        assert len(scripted.uploads) == 10


async def test_leases_of_a_lost_engine_are_given_back_though_the_coordinator_is_busy(
    autojump_clock,
) -> None:
    scripted = Scripted(leases_max=2)
    scripted.answer = refusal(503, "busy", "later", retry_after_s=7.0)
    machine = Machine(FakeEngine(faults=EngineFaults(die_at_generate=1)))
    async with working(scripted, machine) as work:
        await trio.sleep(20.0)
        assert [upload.samples for upload in scripted.uploads] == [[], [], []]  # 0, 7, 14 s
        scripted.answer = None
        scripted.uploads.clear()
        await trio.sleep(10.0)
        assert sorted(upload.lease_id for upload in scripted.uploads) == ["l0", "l1"]
        assert work.held == 0


async def test_an_empty_answer_is_no_work_for_the_engine(autojump_clock) -> None:
    machine = Machine(FakeEngine(faults=EngineFaults(die_at_generate=1)))
    async with working(Scripted(leases_max=0), machine):
        await trio.sleep(100.0)
        assert machine.journal.named("engine.lost") == []


async def test_an_upload_that_is_never_answered_is_sent_again(autojump_clock) -> None:
    scripted = Scripted(leases_max=1)
    scripted.hangs = 2
    async with working(scripted, Machine()) as work:
        await trio.sleep(600.0)
        assert (work.held, work.accepted) == (0, 1)
        assert [upload.lease_id for upload in scripted.uploads] == ["l0"] * 3


async def test_an_upload_that_is_refused_for_good_is_dropped_and_told(autojump_clock) -> None:
    scripted = Scripted(leases_max=3)
    scripted.answer = refusal(400, "malformed", "no such field")
    machine = Machine()
    async with working(scripted, machine) as work:
        await trio.sleep(10.0)
        assert (work.held, work.accepted) == (0, 0)
        assert len(scripted.uploads) == 3
        told = machine.journal.named("upload.refused")
        assert [entry.fields["reason"] for entry in told] == ["malformed"] * 3
        scripted.answer = None
        scripted._leases_max = 5
        await trio.sleep(60.0)
        assert work.accepted == 2


async def test_what_is_not_accepted_is_counted_by_its_reason(autojump_clock) -> None:
    scripted = Scripted(leases_max=2)
    outcome = Outcome(lease_id="l", accepted=False, reason="stale")
    scripted.answer = Response(200, codec.encode(UploadReply(outcome=outcome, duplicate=False)))
    async with working(scripted, Machine()) as work:
        await trio.sleep(5.0)
        assert (work.accepted, work.rejected, work.held) == (0, {"stale": 2}, 0)


async def test_an_upload_that_says_not_a_member_ends_the_work(autojump_clock) -> None:
    scripted = Scripted(leases_max=1)
    scripted.answer = refusal(401, "not_a_member", "join again")
    with pytest.RaisesGroup(
        pytest.RaisesExc(RefusedError, match="not_a_member"), flatten_subgroups=True
    ):
        async with working(scripted, Machine()):
            await trio.sleep(60.0)
            pytest.fail("it works on")


async def test_one_lane_fetches_while_the_other_generates(autojump_clock) -> None:
    # A batch takes 4 or 5 s, a lease answer 2 s: the engine must not wait for the answers.
    scripted = Scripted(lease_s=2.0)
    machine = Machine(FakeEngine(seconds_per_token=1.0), leases_at_once=1)
    async with working(scripted, machine):
        await trio.sleep(200.0)
        busy_s = sum(upload.seconds for upload in scripted.uploads)
        assert busy_s > 0.95 * 200.0


async def test_uploads_say_what_was_generated_and_by_whom(autojump_clock) -> None:
    scripted = Scripted(leases_max=1)
    async with working(scripted, Machine(FakeEngine(seconds_per_token=1.0))):
        await trio.sleep(10.0)
    (upload,) = scripted.uploads
    assert (upload.incarnation, upload.lease_id, len(upload.samples)) == (1, "l0", 2)
    assert upload.seconds == max(sample.tokens.length for sample in upload.samples)
