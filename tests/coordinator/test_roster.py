"""Membership with its consequences: keys, rows, leases, plans; also over our own restarts."""

from functools import partial
from typing import Any

import msgspec
import pytest
import trio

from coordinator import roster
from coordinator.config import MembershipSection
from coordinator.membership import Duplicate, Member, State, Wait
from coordinator.roster import REPLAN_S, Starting
from echo2p2p.broadcast import overlay
from echo2p2p.broadcast.overlay import Neighbours
from echo2p2p.broadcast.relay_rates import RATE_ASSUMED_BYTES_PER_S
from echo2p2p.broadcast.settings import MESH_NODES_MAX
from echo2p2p.errors import RemoteProtocolError
from echo2p2p.ids import SOURCE, PeerId
from echo2p2p.net.trust import credential_digest
from echo2p2p.testing.clock import EPOCH_S
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.system import SimEntropy
from echo2p2p.wire.messages import Address, Caps, JoinReply, Measurements, MemberCard, Plan
from echo2p2p.wire.signing import open_record
from scenarios.middle import LAYOUT, Bench, heartbeat, open_bench


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
async def bench(disk: SimDisk):
    async with open_bench(disk) as opened:
        yield opened


def relayed(count: int) -> Measurements:
    return Measurements(
        relayed_bytes=count,
        received_bytes=0,
        duplicate_bytes=0,
        tokens_generated=0,
        engine_tokens_per_s=0.0,
        queue_leases=0,
    )


def beat_relayed(bench: Bench, member: Member, count: int) -> Member:
    beat = heartbeat(member.incarnation, 0, measurements=relayed(count))
    renewed = bench.roster.heartbeat(member, beat, trio.current_time())
    assert renewed is not None
    return renewed


def neighbours(plan: Plan) -> dict[str, Address | None]:
    return {neighbour.peer_id: neighbour.address for neighbour in plan.neighbours}


# --- joining ----------------------------------------------------------------------------------


async def test_a_newcomer_gets_all_that_it_needs(autojump_clock, bench: Bench) -> None:
    reply = await bench.join("p")
    member = bench.member("p")
    identity = bench.identities["p"]
    assert (reply.peer_id, reply.incarnation, reply.run_id) == (identity.peer_id, 1, "run")
    settings = MembershipSection()
    assert (reply.term_s, reply.heartbeat_s) == (settings.term_s, settings.heartbeat_s)
    assert reply.now_s == pytest.approx(EPOCH_S + trio.current_time())
    assert (reply.layout, reply.model_config) == (LAYOUT.table, "{}")
    assert reply.certificate == b""
    assert bench.state.members.by_credential(credential_digest(reply.credential)) == member
    card = open_record(reply.card, bench.keys.public_key, MemberCard)
    assert card == MemberCard(
        run_id="run", peer_id=identity.peer_id, incarnation=1, public_key=identity.public_key
    )
    assert neighbours(reply.plan) == {SOURCE: Address(host="coordinator.sim", port=7001)}
    (row,) = await bench.book.members()
    assert (row.peer_id, row.incarnation, row.live) == (identity.peer_id, 1, True)
    assert row.credential == credential_digest(reply.credential)
    assert reply.credential.encode() not in row.credential + row.join_body
    (joined,) = bench.journal.named("peer.joined")
    assert (joined.fields["peer"], joined.fields["who"]) == (identity.peer_id, "p")


async def test_two_joins_never_share_a_credential(autojump_clock, bench: Bench) -> None:
    assert (await bench.join("a")).credential != (await bench.join("b")).credential


@pytest.mark.parametrize("field", ["name", "csr", "nonce", "public_key", "proof"])
async def test_a_proof_for_something_else_is_refused_and_nobody_joins(
    autojump_clock, bench: Bench, field: str
) -> None:
    good = bench.request("p")
    other = bench.request("q", csr=b"other")
    forged = msgspec.structs.replace(good, **{field: getattr(other, field)})
    with pytest.raises(RemoteProtocolError):
        await bench.roster.join(forged)
    assert bench.state.members.live() == []
    assert await bench.book.members() == []


async def test_a_key_or_a_nonce_that_is_none_is_the_senders_fault(
    autojump_clock, bench: Bench
) -> None:
    good = bench.request("p")
    for bad in ({"public_key": b"short"}, {"nonce": b""}, {"proof": b""}):
        with pytest.raises(RemoteProtocolError):
            await bench.roster.join(msgspec.structs.replace(good, **bad))


async def test_with_tls_the_newcomer_gets_a_leaf_for_its_own_key(
    autojump_clock, disk: SimDisk
) -> None:
    async with open_bench(disk, tls=True) as bench:
        bench.request("p")
        csr, _ = bench.identities["p"].make_csr(SimEntropy("csr"))
        reply = await bench.roster.join(bench.request("p", csr=csr))
        assert reply.certificate.startswith(b"-----BEGIN CERTIFICATE")


async def test_a_certificate_request_that_is_none_is_refused_and_keeps_nobody_out(
    autojump_clock, disk: SimDisk
) -> None:
    async with open_bench(disk, tls=True) as bench:
        with pytest.raises(RemoteProtocolError):
            await bench.roster.join(bench.request("p", csr=b"nonsense"))
        assert bench.state.members.live() == []
        csr, _ = bench.identities["p"].make_csr(SimEntropy("csr"))
        reply = await bench.roster.join(bench.request("p", csr=csr))
        assert not isinstance(reply, Wait)
        assert bench.member("p").incarnation == reply.incarnation


# --- coming back ------------------------------------------------------------------------------


async def test_a_killed_peer_waits_out_its_term_gets_in_and_its_leases_go_to_others(
    autojump_clock, bench: Bench
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.roster.run)
        member = await bench.ready("p")
        await bench.lease(member, count=1)
        await trio.sleep(3.0)
        outcome = await bench.roster.join(bench.request("p"))
        assert isinstance(outcome, Wait)
        assert outcome.retry_after_s == pytest.approx(7.0, abs=0.1)
        await trio.sleep(outcome.retry_after_s + 0.05)
        assert (await bench.join("p")).incarnation == 2
        assert bench.book.ledger.statistics().rejected == {"peer_gone": 2}
        (evicted,) = bench.journal.named("peer.evicted")
        assert (evicted.fields["peer"], evicted.fields["incarnation"]) == (member.peer_id, 1)
        (row,) = await bench.book.members()
        assert (row.incarnation, row.live) == (2, True)
        nursery.cancel_scope.cancel()


async def test_of_two_live_copies_the_first_lives_on_and_the_second_is_refused(
    autojump_clock, bench: Bench
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.roster.run)
        member = await bench.ready("p")
        assert isinstance(await bench.roster.join(bench.request("p")), Wait)
        for _ in range(5):
            await trio.sleep(2.0)
            bench.beat(member, 0)
        assert await bench.roster.join(bench.request("p")) == Duplicate()
        await trio.sleep(5.0)
        assert bench.member("p").incarnation == 1
        assert bench.journal.named("peer.evicted") == []
        nursery.cancel_scope.cancel()


async def test_each_is_evicted_when_its_own_term_ends(autojump_clock, bench: Bench) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.roster.run)
        await trio.sleep(53.0)  # asleep, with nobody there
        began = trio.current_time()
        for name in "abc":
            await bench.ready(name)
            await trio.sleep(3.0)
        await trio.sleep(20.0)
        times = [entry.at_s - began for entry in bench.journal.named("peer.evicted")]
        assert times == pytest.approx([10.0, 13.0, 16.0], abs=0.1)
        assert bench.state.members.live() == []
        nursery.cancel_scope.cancel()


async def test_who_leaves_gives_everything_back_at_once(autojump_clock, bench: Bench) -> None:
    member = await bench.ready("p")
    member = beat_relayed(bench, member, 500)
    await bench.lease(member, count=1)
    await bench.roster.leave(member.peer_id, member.incarnation, "x" * 1000)
    assert bench.book.ledger.statistics().rejected == {"peer_gone": 2}
    (row,) = await bench.book.members()
    assert (row.live, row.relayed_bytes) == (False, 500)
    (left,) = bench.journal.named("peer.left")
    assert len(str(left.fields["reason"])) == 200
    await bench.roster.leave(member.peer_id, member.incarnation, "again")
    assert len(bench.journal.named("peer.left")) == 1


async def test_a_goodbye_that_is_cut_off_still_gives_everything_back(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    await bench.lease(member, count=1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await bench.roster.leave(member.peer_id, member.incarnation, "in haste")
    assert bench.book.ledger.statistics().rejected == {"peer_gone": 2}
    (row,) = await bench.book.members()
    assert not row.live


async def test_whoever_waits_for_the_last_member_to_go_is_woken(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def leave() -> None:
            await trio.sleep(1.0)
            await bench.roster.leave(member.peer_id, member.incarnation, "the run is over")

        with trio.fail_after(2.0):
            while bench.state.members.live():
                await bench.state.changed.park()


async def test_relayed_bytes_are_summed_over_lives_and_live_members(
    autojump_clock, bench: Bench
) -> None:
    member = beat_relayed(bench, await bench.ready("p"), 500)
    beat_relayed(bench, await bench.ready("q"), 30)
    await bench.roster.leave(member.peer_id, member.incarnation, "")
    beat_relayed(bench, await bench.ready("p"), 7)
    assert await bench.roster.relayed_bytes() == 500 + 7 + 30


async def test_no_boast_of_relayed_bytes_stops_the_evictions(autojump_clock, bench: Bench) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.roster.run)
        beat_relayed(bench, await bench.ready("liar"), 2**64 - 1)
        await trio.sleep(8.0)
        await bench.ready("honest")
        await trio.sleep(20.0)
        assert len(bench.journal.named("peer.evicted")) == 2
        nursery.cancel_scope.cancel()


# --- heartbeats -------------------------------------------------------------------------------


async def test_the_first_proved_version_is_told_once(autojump_clock, bench: Bench) -> None:
    await bench.join("p")
    member = bench.beat(bench.member("p"), None)
    assert bench.journal.named("peer.ready") == []
    member = bench.beat(member, 0)
    (ready,) = bench.journal.named("peer.ready")
    assert ready.fields["version"] == 0
    bench.beat(member, 0)
    assert len(bench.journal.named("peer.ready")) == 1


async def test_the_source_is_told_whose_uplink_it_may_count_on(
    autojump_clock, bench: Bench
) -> None:
    await bench.ready("p")
    thrifty = bench.request("q")
    caps = Caps(upload_bytes_per_s=50_000.0, download_bytes_per_s=None, bytes_per_day=None)
    assert isinstance(
        await bench.roster.join(msgspec.structs.replace(thrifty, caps=caps)), JoinReply
    )
    p, q = bench.member("p"), bench.member("q")
    assert bench.uplinks == {p.peer_id: RATE_ASSUMED_BYTES_PER_S, q.peer_id: 50_000.0}
    beat = msgspec.structs.replace(heartbeat(q.incarnation, 0), relays=False)
    bench.roster.heartbeat(q, beat, trio.current_time())
    assert bench.uplinks[q.peer_id] == 0.0
    bench.beat(bench.member("q"), 0)
    assert bench.uplinks[q.peer_id] == 50_000.0, "its day is over"
    await bench.roster.leave(p.peer_id, p.incarnation, "")
    assert set(bench.uplinks) == {q.peer_id}


async def test_the_source_is_told_who_cannot_be_dialled(autojump_clock, bench: Bench) -> None:
    await bench.ready("p")
    assert bench.told[-1][1] == frozenset()
    await bench.roster.join(msgspec.structs.replace(bench.request("q"), relay=None))
    assert bench.told[-1][1] == {bench.member("q").peer_id}


async def test_limits_are_known_to_our_next_life(autojump_clock, disk: SimDisk) -> None:
    caps = Caps(upload_bytes_per_s=50_000.0, download_bytes_per_s=None, bytes_per_day=None)
    async with open_bench(disk) as bench:
        await bench.roster.join(msgspec.structs.replace(bench.request("q"), caps=caps))
    async with open_bench(disk, seed=9) as bench:
        assert list(bench.uplinks.values()) == [50_000.0]


@pytest.mark.parametrize(
    ("version", "wakes"), [(0, False), (1, True), (None, True)], ids=["same", "newer", "warming"]
)
async def test_a_heartbeat_wakes_others_exactly_if_it_changes_what_the_peer_can_do(
    autojump_clock, bench: Bench, version: int | None, wakes: bool
) -> None:
    member = await bench.ready("p")
    woken = False

    async def wait() -> None:
        nonlocal woken
        await bench.state.changed.park()
        woken = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(0.1)
        bench.beat(member, version)
        await trio.sleep(0.1)
        assert woken is wakes
        nursery.cancel_scope.cancel()


async def test_nobody_elses_and_no_dead_incarnations_heartbeat_counts(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    assert bench.roster.heartbeat(member, heartbeat(2, 0), trio.current_time()) is None
    await bench.roster.leave(member.peer_id, member.incarnation, "")
    assert bench.roster.heartbeat(member, heartbeat(1, 0), trio.current_time()) is None


# --- our own restart --------------------------------------------------------------------------


async def test_it_does_not_open_before_it_knows_its_members(autojump_clock, disk: SimDisk) -> None:
    async with open_bench(disk, seed=1) as bench:
        peer_id = (await bench.join("ann")).peer_id
    async with open_bench(disk, seed=2, learner_up=False) as bench:
        seen: list[tuple[bool, bool]] = []

        async def look() -> None:
            while True:
                known = bench.state.members.is_live(PeerId(peer_id))
                seen.append((bench.roster.is_open, known))
                await trio.sleep(0.0005)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await bench.roster.load(LAYOUT.table)
            nursery.cancel_scope.cancel()
        assert bench.roster.is_open
    assert (False, False) in seen
    assert (True, False) not in seen, "who asked then was told that it is no member"


async def test_members_live_on_through_our_restart_with_their_credentials(
    autojump_clock, disk: SimDisk
) -> None:
    async with open_bench(disk, seed=1) as bench:
        credential = (await bench.join("p")).credential
        await bench.join("q")
        left = await bench.ready("left")
        await bench.roster.leave(left.peer_id, left.incarnation, "")
        disk.crash()
    async with open_bench(disk, seed=2) as bench, trio.open_nursery() as nursery:
        nursery.start_soon(bench.roster.run)
        member = bench.state.members.by_credential(credential_digest(credential))
        assert member is not None
        assert (member.name, member.engine, member.state) == ("p", "fake", State.JOINING)
        assert member.relay == Address(host="p.sim", port=7000)
        other = bench.member("q")
        assert len(bench.state.members.live()) == 2
        assert neighbours(bench.roster.plan_for(member))[other.peer_id] == other.relay
        await trio.sleep(9.0)
        assert bench.beat(member, 0).state is State.ACTIVE
        assert (await bench.join("left")).incarnation == 2
        await trio.sleep(10.5)
        assert (await bench.join("p")).incarnation == 2
        nursery.cancel_scope.cancel()


async def test_before_the_learner_is_up_nobody_can_join(autojump_clock, disk: SimDisk) -> None:
    async with open_bench(disk, learner_up=False) as bench:
        assert not bench.roster.is_open
        assert await bench.roster.join(bench.request("p")) == Starting()
        await bench.roster.load(LAYOUT.table)
        assert bench.roster.is_open
        assert (await bench.join("p")).incarnation == 1


# --- plans ------------------------------------------------------------------------------------


async def test_the_overlay_follows_the_members(autojump_clock, bench: Bench) -> None:
    members = {name: await bench.ready(name) for name in "abc"}
    plan = bench.roster.plan_for(members["a"])
    assert neighbours(plan) == {
        SOURCE: Address(host="coordinator.sim", port=7001),
        members["b"].peer_id: Address(host="b.sim", port=7000),
        members["c"].peer_id: Address(host="c.sim", port=7000),
    }
    await bench.roster.leave(members["b"].peer_id, 1, "")
    assert set(neighbours(bench.roster.plan_for(members["a"]))) == {SOURCE, members["c"].peer_id}


async def test_in_a_large_run_newcomers_have_neighbours_at_once_and_plans_wait_for_company(
    autojump_clock, disk: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[float] = []

    def plan_overlay(*args: Any, **options: Any) -> Neighbours:
        planned.append(trio.current_time())
        return overlay.plan_overlay(*args, **options)

    monkeypatch.setattr(roster, "plan_overlay", plan_overlay)
    settings = MembershipSection(degree=8)
    async with open_bench(disk, membership=settings) as bench, trio.open_nursery() as nursery:
        nursery.start_soon(bench.roster.run)
        replies = [await bench.join(f"p{number}") for number in range(MESH_NODES_MAX)]
        assert [reply.plan.peers for reply in replies] == [*range(1, MESH_NODES_MAX + 1)]
        planned.clear()
        for number in range(30):
            plan = (await bench.join(f"late{number}")).plan
            assert plan.peers > MESH_NODES_MAX
            assert len(plan.neighbours) == 1 + 4
            assert all(neighbour.address for neighbour in plan.neighbours)
        assert planned == []
        await trio.sleep(REPLAN_S + 0.1)
        assert len(planned) == 1
        gone, *members = bench.state.members.live()
        plans = [bench.roster.plan_for(member) for member in members]
        assert all(len(plan.neighbours) >= 1 + 8 for plan in plans)
        await bench.roster.leave(gone.peer_id, gone.incarnation, "")
        for member in members:
            assert gone.peer_id not in neighbours(bench.roster.plan_for(member))
        assert len(planned) == 1
        await trio.sleep(REPLAN_S + 0.1)
        assert len(planned) == 2
        nursery.cancel_scope.cancel()


async def test_in_a_very_large_run_not_all_are_linked_to_the_source(
    autojump_clock, disk: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "SOURCE_LINKS_MAX", 20)
    monkeypatch.setattr(roster, "plan_source_links", partial(overlay.plan_source_links, most=20))
    async with open_bench(disk) as bench, trio.open_nursery() as nursery:
        nursery.start_soon(bench.roster.run)
        plans = [(await bench.join(f"p{number}")).plan for number in range(30)]
        assert [SOURCE in neighbours(plan) for plan in plans] == [True] * 20 + [False] * 10
        assert all(len(plan.neighbours) >= 4 for plan in plans[8:])

        def linked() -> int:
            live = bench.state.members.live()
            return sum(SOURCE in neighbours(bench.roster.plan_for(one)) for one in live)

        for member in list(bench.state.members.live())[:5]:
            await bench.roster.leave(member.peer_id, member.incarnation, "")
        await trio.sleep(REPLAN_S + 0.1)
        assert linked() == 20
        nursery.cancel_scope.cancel()


async def test_a_peer_that_cannot_be_dialled_has_no_address_but_has_neighbours(
    autojump_clock, bench: Bench
) -> None:
    seen = await bench.ready("seen")
    request = msgspec.structs.replace(bench.request("hidden"), relay=None)
    await bench.roster.join(request)
    hidden = bench.member("hidden")
    assert neighbours(bench.roster.plan_for(seen))[hidden.peer_id] is None
    assert neighbours(bench.roster.plan_for(hidden))[seen.peer_id] == seen.relay


async def test_orders_depend_on_the_engine_and_on_the_run(autojump_clock, bench: Bench) -> None:
    worker = await bench.ready("worker")
    relay = await bench.ready("relay", engine="none")
    assert bench.roster.plan_for(worker).activation == "active"
    assert bench.roster.plan_for(relay).activation == "idle"
    bench.state.outcome = "failed"
    for member in (worker, relay):
        plan = bench.roster.plan_for(member)
        assert (plan.activation, plan.run_state) == ("drain", "failed")
