"""Each checker is able to fail: bugs planted here, and the checker that must catch each of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio

import coordinator.app
import coordinator.intake
import coordinator.leases
import coordinator.publish
import coordinator.training
import peer.apply
import peer.weights
from coordinator.book import Book
from coordinator.intake import Intake
from coordinator.leases import LeaseDesk
from coordinator.membership import Membership
from coordinator.publish import Publisher
from coordinator.training import Trainer
from echo2p2p.errors import EngineError
from echo2p2p.ids import Digest
from echo2p2p.net.relay import RelayNode
from echo2p2p.rollouts import batch
from echo2p2p.rollouts.batch import GroupQueue
from echo2p2p.weights.assembly import Assembly
from scenarios import watch
from scenarios.play import play
from scenarios.story import read_story
from scenarios.world import World

pytestmark = pytest.mark.slow

SEEDS = (1, 2, 3)
"""A bug must be caught within so many."""
CALM = """
[world]
stop_s = 40
heal_s = 18
learner_step_s = 1.5
[[peers]]
count = 3
seconds_per_token = [0.02, 0.04]
tokens = [5, 30]
[checks]
converge_s = 15
idle_share_max = 0.5
"""
LOST_LEARNER = (
    CALM
    + """
[[nemesis]]
fault = "learner-crash"
at_s = 12
"""
)
LOST_PEER = (
    CALM.replace("stop_s = 40", "stop_s = 75")
    + """
[[nemesis]]
fault = "freeze"
at_s = 8
for_s = 4
[settings.rollouts]
lease_timeout_s = 3.0
[settings.membership]
term_s = 30.0
"""
)
LIARS = (
    CALM.replace("count = 3", "count = 6")
    + """
[[peers]]
name = "late"
count = 3
seconds_per_token = [0.02, 0.04]
tokens = [5, 30]
joins_s = [7, 14]
[[nemesis]]
fault = "lie"
lies = ["corrupt"]
on = "peer"
count = 3
at_s = 4
"""
)
"""Who comes late asks the others for what a liar has sent them."""


class Agreeable(bytes):
    """A digest that equals every other."""

    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def lose_a_rejection(monkeypatch) -> None:
    """A rejection moves the row and is not counted."""
    monkeypatch.setattr("coordinator.book.count_event", lambda rows, event: None)


def train_on_anything(monkeypatch) -> None:
    """Admission and the queue know no age."""
    monkeypatch.setattr(coordinator.leases, "room", lambda **_: 10_000)
    monkeypatch.setattr(GroupQueue, "drop_stale", lambda self, step: [])
    monkeypatch.setattr(batch, "age", lambda **_: 0)
    monkeypatch.setattr(Intake, "_too_old", lambda self, group: False)


def admit_without_end(monkeypatch) -> None:
    """Admission knows no bound."""
    monkeypatch.setattr(coordinator.leases, "room", lambda **_: 10_000)


def skip_a_number(monkeypatch) -> None:
    """Publications count in twos from the third on."""
    real = coordinator.publish.Version
    monkeypatch.setattr(coordinator.publish, "Version", lambda n: real(n + 1 if n == 3 else n))


def apply_a_wrong_bit(monkeypatch) -> None:
    """A peer's memory flips a bit, and it takes the header's word for the result."""
    real = peer.apply.state_digest

    def flipped(layout, state) -> Digest:
        state[7] ^= 1
        return Digest(Agreeable(real(layout, state)))

    monkeypatch.setattr(peer.apply, "state_digest", flipped)


def relay_unverified(monkeypatch) -> None:
    """Chunks are stored, and so passed on, without a look at their digest."""
    monkeypatch.setattr(Assembly, "_verify", lambda self, index, view, source: None)


def forget_heartbeats(monkeypatch) -> None:
    """A heartbeat does not renew the term."""
    real = Membership.heartbeat

    def deaf(self, peer_id, beat, now):
        before = self.get(peer_id)
        member = real(self, peer_id, beat, now)
        if before is not None and member is not None:
            object.__setattr__(member, "term_end_s", before.term_end_s)
        return member

    monkeypatch.setattr(Membership, "heartbeat", deaf)


def acknowledge_before_the_disk(monkeypatch) -> None:
    """One upload in eight is acknowledged and not written."""
    real, calls = Book.accept, [0]

    async def careless(self, lease_id, samples, upload):
        calls[0] += 1
        if calls[0] % 8 == 0:
            await trio.lowlevel.checkpoint()
            return True
        return await real(self, lease_id, samples, upload)

    monkeypatch.setattr(Book, "accept", careless)


def train_twice(monkeypatch) -> None:
    """The queue keeps a group that it has handed out."""
    real, kept = GroupQueue.take, []

    def generous(self, step, groups):
        taken = real(self, step, groups)
        if taken and not kept:
            kept.append(taken[0])
            self.add(taken[0])
        return taken

    monkeypatch.setattr(GroupQueue, "take", generous)
    real_train = Book.train

    async def unsuspecting(self, leases, step, record=None):
        await real_train(self, leases, step, record)
        return [lease_id for lease_id, _ in leases]

    monkeypatch.setattr(Book, "train", unsuspecting)


def count_bits(monkeypatch) -> None:
    """A relay tells of bits where it should tell of bytes."""
    real = RelayNode.statistics

    def boastful(self):
        said = real(self)
        return replace(said, relayed_bytes=8 * said.relayed_bytes)

    monkeypatch.setattr(RelayNode, "statistics", boastful)


def let_leases_be(monkeypatch) -> None:
    """Nobody ends a lease whose time is over."""

    async def rest(self) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(LeaseDesk, "run", rest)


def roll_back_in_silence(monkeypatch) -> None:
    """A rollback happens and is not told."""
    monkeypatch.setattr(coordinator.training, "ROLLED_BACK", "run.went_on")


def publish_and_keep(monkeypatch) -> None:
    """Peers that hold something are never told of anything newer."""
    real = Publisher.path

    async def once(self, member, have, wait_s):
        if have is not None:
            await trio.sleep(wait_s)
            return []
        return await real(self, member, have, wait_s)

    monkeypatch.setattr(Publisher, "path", once)
    monkeypatch.setattr(peer.weights.Follower, "wants", lambda self, header: False)


def lease_at_leisure(monkeypatch) -> None:
    """Every lease waits for four seconds."""
    real = LeaseDesk._grant

    async def slow(self, member, request):
        await trio.sleep(4)
        return await real(self, member, request)

    monkeypatch.setattr(LeaseDesk, "_grant", slow)


def fail_at_the_end(monkeypatch) -> None:
    """Told to stop, the trainer fails."""

    def stop(self) -> bool:
        raise EngineError("planted")

    monkeypatch.setattr(Trainer, "stop", stop)


def stand_still(monkeypatch) -> None:
    """After some steps the learner takes a minute for each."""
    real = coordinator.training.Trainer._step

    async def tired(self, *args):
        if self._state.step > 8:
            await trio.sleep(60)
        return await real(self, *args)

    monkeypatch.setattr(Trainer, "_step", tired)


SMALL_BATCHES = CALM + "\n[settings.rollouts]\nprompts_per_step = 2\n"
BUGS = [
    (lose_a_rejection, CALM, "ledger balances"),
    (
        train_on_anything,
        CALM + "\n[settings.rollouts]\nprompts_per_step = 2\n",
        "nothing older than S is trained",
    ),
    (admit_without_end, CALM.replace("step_s = 1.5", "step_s = 6"), watch.QUEUES_BOUNDED),
    (skip_a_number, CALM, "versions never fork"),
    (apply_a_wrong_bit, CALM, "a version is whole or absent"),
    (relay_unverified, LIARS, watch.NOTHING_UNVERIFIED),
    (forget_heartbeats, CALM, watch.NO_HONEST_EVICTED),
    (acknowledge_before_the_disk, CALM, watch.TRAINED_ONCE),
    (train_twice, CALM, watch.TRAINED_ONCE),
    (count_bits, CALM, watch.BYTES_AGREE),
    (let_leases_be, LOST_PEER, watch.EVERYTHING_ENDS),
    (roll_back_in_silence, LOST_LEARNER, "steps only go back by rollback"),
    (publish_and_keep, CALM, watch.CONVERGES),
    (lease_at_leisure, CALM, watch.NO_IDLING),
    (fail_at_the_end, CALM, watch.ENDS_WELL),
    (stand_still, CALM + "steps_per_s_min = 0.3\n", watch.STATED_RATE),
]


@pytest.mark.parametrize(("plant", "text", "checker"), BUGS, ids=[bug[0].__name__ for bug in BUGS])
def test_a_planted_bug_is_caught_by_its_checker(plant, text, checker, monkeypatch):
    story = read_story(text, "planted")
    plant(monkeypatch)
    seen: set[str] = set()
    for seed in SEEDS:
        seen |= {problem.partition(":")[0] for problem in play("planted", story, seed).problems}
        if checker in seen:
            return
    pytest.fail(f"seen by {sorted(seen) or 'nobody'} within {len(SEEDS)} seeds")


@pytest.mark.parametrize(
    "text", [CALM, LOST_LEARNER, LOST_PEER, LIARS], ids=["calm", "learner", "peer", "liars"]
)
def test_without_a_bug_the_same_stories_hold(text):
    for seed in SEEDS[:1]:
        assert play("planted", read_story(text, "planted"), seed).problems == []


def test_every_checker_has_a_bug():
    story = read_story(CALM, "planted")
    events = World(story.draw(random.Random(1)), seed=1).watch.checkers
    assert {checker.name for checker in events} | set(watch.LOOKS) == {bug[2] for bug in BUGS}
