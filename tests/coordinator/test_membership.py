"""Terms, incarnations and copies, in the core's own time."""

import itertools

import msgspec
import pytest

from coordinator import membership
from coordinator.membership import (
    Duplicate,
    Full,
    Joined,
    Member,
    Membership,
    State,
    Wait,
    uplink_of,
)
from echo2p2p.ids import Incarnation, PeerId, Version
from echo2p2p.limits import PROTOCOL
from echo2p2p.wire.messages import Address, Caps, Hardware, JoinRequest
from scenarios.middle import heartbeat

TERM_S = 10.0
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")

REQUEST = JoinRequest(
    protocol=PROTOCOL,
    name="box",
    public_key=bytes(32),
    proof=b"",
    nonce=bytes(16),
    csr=b"",
    relay=Address(host="h", port=1),
    engine="fake",
    hardware=Hardware(accelerator="cpu", cores=1, memory_bytes=0),
    caps=Caps(upload_bytes_per_s=None, download_bytes_per_s=None, bytes_per_day=None),
)
RELAY_ONLY = msgspec.structs.replace(REQUEST, engine="none")


@pytest.mark.parametrize(
    ("upload", "per_day", "expected"),
    [
        (None, None, 1024 * 1024),
        (50e6, None, 1024 * 1024),
        (250_000.0, None, 250_000),
        (250_000.0, 17_280_000_000, 100_000),
        (None, 100_000_000, 8_000),
        (-1.0, None, 8_000),
        (float("nan"), None, 8_000),
        (float("inf"), None, 8_000),
    ],
)
def test_limits_make_a_peer_count_for_less_and_never_for_more(upload, per_day, expected):
    caps = Caps(upload_bytes_per_s=upload, download_bytes_per_s=None, bytes_per_day=per_day)
    assert uplink_of(caps) == expected


@pytest.fixture
def members() -> Membership:
    return Membership(term_s=TERM_S)


def joined(members: Membership, peer_id: PeerId, now: float, request=REQUEST) -> Member:
    outcome = members.join(peer_id, request, f"{peer_id} {now}".encode(), now)
    assert isinstance(outcome, Joined), outcome
    return outcome.member


# --- terms ------------------------------------------------------------------------------------


def test_a_member_lives_for_its_term_and_heartbeats_renew_it(members: Membership) -> None:
    member = joined(members, A, 100.0)
    assert (member.state, member.incarnation) == (State.JOINING, 1)
    assert members.next_deadline() == 110.0
    assert members.on_time(109.9) == []
    renewed = members.heartbeat(A, heartbeat(1, 3), 109.9)
    assert renewed is not None
    assert (renewed.state, renewed.version) == (State.ACTIVE, 3)
    assert members.on_time(119.8) == []
    (gone,) = members.on_time(119.9)
    assert (gone.peer_id, gone.state) == (A, State.GONE)
    assert members.next_deadline() is None
    assert members.live() == []
    assert members.heartbeat(A, heartbeat(1, 3), 119.9) is None


def test_the_dead_are_evicted_in_order_of_their_ids_and_only_they(members: Membership) -> None:
    for peer_id, now in [(C, 0.0), (A, 0.0), (B, 5.0)]:
        joined(members, peer_id, now)
    assert members.next_deadline() == 10.0
    assert [member.peer_id for member in members.on_time(10.0)] == [A, C]
    assert [member.peer_id for member in members.live()] == [B]
    assert members.next_deadline() == 15.0


def test_a_heartbeat_brings_all_that_it_says(members: Membership) -> None:
    joined(members, A, 0.0)
    said = msgspec.structs.replace(membership.NO_MEASUREMENTS, relayed_bytes=7, queue_leases=2)
    beat = msgspec.structs.replace(
        heartbeat(1, 4, measurements=said),
        price_usd_per_hour=0.5,
        available_s=60.0,
        holdings=[b"x", b"y"],
    )
    member = members.heartbeat(A, beat, 1.0)
    assert member is not None
    assert member == members.find(A, Incarnation(1)) == members.get(A)
    assert (member.measurements, member.price_usd_per_hour, member.available_s) == (said, 0.5, 60.0)
    assert member.holdings == {b"x", b"y"}
    assert member.version == Version(4)


def test_credentials_open_while_the_member_lives(members: Membership) -> None:
    member = joined(members, A, 0.0)
    assert members.by_credential(b"a 0.0") == member
    assert members.by_credential(b"a 0.1") is None
    members.on_time(10.0)
    assert members.by_credential(b"a 0.0") is None


# --- leaving and coming back ------------------------------------------------------------------


def test_who_leaves_is_gone_at_once_and_may_come_back(members: Membership) -> None:
    joined(members, A, 0.0)
    assert members.leave(A, Incarnation(2)) is None
    left = members.leave(A, Incarnation(1))
    assert left is not None
    assert left.state is State.GONE
    assert members.leave(A, Incarnation(1)) is None
    assert joined(members, A, 0.5).incarnation == 2


def test_a_restarted_machine_waits_out_its_old_term_and_gets_in(members: Membership) -> None:
    joined(members, A, 0.0)
    members.heartbeat(A, heartbeat(1, 0), 4.0)
    outcome = members.join(A, REQUEST, b"new", 6.0)
    assert outcome == Wait(retry_after_s=8.0)
    assert members.by_credential(b"new") is None
    members.on_time(14.0)
    assert joined(members, A, 14.0).incarnation == 2


def test_one_beat_of_the_old_copy_may_cross_the_newcomers_first_try(members: Membership) -> None:
    joined(members, A, 0.0)
    assert isinstance(members.join(A, REQUEST, b"new", 1.0), Wait)
    members.heartbeat(A, heartbeat(1, 0), 1.1)
    assert members.join(A, REQUEST, b"new", 11.0) == Wait(pytest.approx(0.1))
    members.on_time(11.1)
    assert joined(members, A, 11.2).incarnation == 2


def test_the_wait_is_never_so_short_that_a_peer_would_spin(members: Membership) -> None:
    joined(members, A, 0.0)
    assert members.join(A, REQUEST, b"new", 10.0) == Wait(0.1)


def test_a_second_live_copy_is_refused_and_the_first_lives_on(members: Membership) -> None:
    first = joined(members, A, 100.0)
    assert isinstance(members.join(A, REQUEST, b"copy", 101.0), Wait)
    for now in (102.0, 104.0, 106.0, 108.0, 110.0):
        assert members.heartbeat(A, heartbeat(1, 0), now) is not None
    assert members.join(A, REQUEST, b"copy", 111.0) == Duplicate()
    assert members.find(A, first.incarnation) is not None
    assert members.by_credential(b"copy") is None
    assert members.on_time(119.9) == []
    # Whoever comes next, perhaps the first one's own restart, is judged by what happens then.
    assert isinstance(members.join(A, REQUEST, b"restarted", 112.0), Wait)


def test_a_copy_that_gave_up_long_ago_does_not_stand_against_a_restart(
    members: Membership,
) -> None:
    joined(members, A, 0.0)
    assert isinstance(members.join(A, REQUEST, b"copy", 1.0), Wait)  # and is never seen again
    now = 1.0
    while now < 1000.0:
        now += 2.0
        members.heartbeat(A, heartbeat(1, 0), now)
    assert members.join(A, REQUEST, b"restarted", now + 1.0) == Wait(9.0)
    members.on_time(now + 10.0)
    assert joined(members, A, now + 10.0).incarnation == 2


def test_a_restart_during_a_copys_wait_is_counted_from_its_own_first_try(
    members: Membership,
) -> None:
    joined(members, A, 0.0)
    members.join(A, REQUEST, b"copy", 1.0)
    for now in (2.0, 4.0, 6.0):
        members.heartbeat(A, heartbeat(1, 0), now)
    members.leave(A, Incarnation(1))
    joined(members, A, 7.0)
    assert isinstance(members.join(A, REQUEST, b"again", 8.0), Wait)


def test_a_full_run_takes_nobody_but_tells_no_lie_to_a_live_identity(
    members: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MEMBERS_MAX", 1)
    joined(members, A, 0.0)
    assert members.join(B, REQUEST, b"b", 0.0) == Full()
    assert isinstance(members.join(A, REQUEST, b"a", 0.0), Wait)


# --- our own restart --------------------------------------------------------------------------


def test_members_of_our_last_life_have_a_whole_term_to_be_heard(members: Membership) -> None:
    old = joined(Membership(term_s=TERM_S), A, 0.0)
    members.restore(old, 500.0)
    assert members.by_credential(old.credential) is not None
    assert members.on_time(509.9) == []
    assert members.heartbeat(A, heartbeat(1, 0), 509.9) is not None
    assert [member.peer_id for member in members.on_time(519.9)] == [A]
    assert joined(members, A, 520.0).incarnation == 2


def test_incarnations_count_up_across_our_restart_also_for_the_gone(members: Membership) -> None:
    members.remember(A, Incarnation(7))
    members.remember(A, Incarnation(3))
    assert joined(members, A, 0.0).incarnation == 8


# --- states -----------------------------------------------------------------------------------

ALLOWED = {
    State.JOINING: {State.WARMING, State.ACTIVE, State.IDLE, State.DRAINING, State.GONE},
    State.WARMING: {State.ACTIVE, State.IDLE, State.DRAINING, State.GONE},
    State.ACTIVE: {State.WARMING, State.IDLE, State.DRAINING, State.GONE},
    State.IDLE: {State.WARMING, State.ACTIVE, State.DRAINING, State.GONE},
    State.DRAINING: {State.GONE},
    State.GONE: set(),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_states_change_only_as_the_picture_says(
    members: Membership, before: State, after: State
) -> None:
    start = joined(members, A, 0.0)
    member_in = {State.JOINING: start}
    for state in (State.WARMING, State.ACTIVE, State.IDLE, State.DRAINING, State.GONE):
        member_in[state] = start.moved(state)
    if after is before or after in ALLOWED[before]:
        assert member_in[before].moved(after).state is after
    else:
        with pytest.raises(AssertionError):
            member_in[before].moved(after)


def test_heartbeats_walk_through_the_states(members: Membership) -> None:
    joined(members, A, 0.0)

    def beat(state: str, version: int | None) -> State:
        said = msgspec.structs.replace(heartbeat(1, version), state=state)
        member = members.heartbeat(A, said, 1.0)
        assert member is not None
        return member.state

    assert beat("warming", None) is State.WARMING
    assert beat("warming", None) is State.WARMING
    assert beat("ready", 0) is State.ACTIVE
    assert beat("warming", None) is State.WARMING
    assert beat("ready", 0) is State.ACTIVE
    assert beat("draining", 0) is State.DRAINING
    assert beat("ready", 0) is State.DRAINING
    assert beat("warming", None) is State.DRAINING


def test_who_was_told_to_idle_is_not_made_active_by_its_heartbeats(members: Membership) -> None:
    idle = joined(Membership(term_s=TERM_S), A, 0.0).moved(State.IDLE)
    members.restore(idle, 0.0)
    member = members.heartbeat(A, heartbeat(1, 0), 1.0)
    assert member is not None
    assert member.state is State.IDLE


def test_a_peer_without_an_engine_is_never_active(members: Membership) -> None:
    joined(members, A, 0.0, RELAY_ONLY)
    member = members.heartbeat(A, heartbeat(1, 0), 1.0)
    assert member is not None
    assert member.state is State.IDLE
