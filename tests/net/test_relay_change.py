"""Lines that change while a payload is on them: nobody else waits, and whoever can do more does."""

import statistics

import pytest
import trio

from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import RelayNet, wait_whole

RATE = 2_400_000.0
SIZE = 10_000_000
CHUNK = 48 * 1024


class Play:
    """One broadcast to ``peers``, while `changes` at given times change lines or start peers."""

    def __init__(self, peers, *, size=SIZE, up=None, late=()):
        self.names = ["source", *(f"p{place}" for place in range(peers))]
        self.size, self.up, self.late = size, up or {}, late
        self.changes = {}
        self.finished_s = {}
        self.relayed = {}
        """By the time of a change, and at the end: what each had sent."""

    def line(self, at_s, name, share):
        """At ``at_s`` give a peer's line this share of the usual rates, both ways."""
        self.changes[at_s] = lambda: self.network.set_rates(
            name, up_bytes_per_s=share * RATE, down_bytes_per_s=2 * share * RATE
        )

    def run(self):
        run_virtual(self._main, seed=0)
        return self

    def last_s(self, *but):
        return max(at_s for name, at_s in self.finished_s.items() if name not in but)

    def between(self, one, other, name):
        return self.relayed[other][name] - self.relayed[one].get(name, 0)

    async def _main(self):
        self.network = SimNetwork()
        for name in self.names:
            up = self.up.get(name, RATE)
            self.network.add_node(
                name, up_bytes_per_s=up, down_bytes_per_s=2 * RATE, latency_s=0.005
            )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.network.run)
            self.relays = RelayNet(nursery, self.network.streams)
            for name in self.names:
                if name not in self.late:
                    await self.relays.start(name)
            self.relays.link_up()
            await self.relays.wait_linked()
            self.payload = self.relays.keys.payload(1, self.size, chunk_bytes=CHUNK)
            self.start_s = trio.current_time()
            self.relays.source.node.publish(self.payload.signed, self.payload.assembly, push=True)
            async with trio.open_nursery() as self.waiting:
                for member in self.relays.peers:
                    self.waiting.start_soon(self._wait, member)
                for at_s, change in sorted(self.changes.items()):
                    await trio.sleep_until(self.start_s + at_s)
                    self._note(at_s)
                    change()
            self._note("end")
            nursery.cancel_scope.cancel()

    async def _wait(self, member):
        member.node.follow(self.payload.signed, push=True)
        await wait_whole(member.node, self.payload.manifest_id)
        self.finished_s[member.name] = trio.current_time() - self.start_s

    def _note(self, when):
        members = self.relays.members.items()
        self.relayed[when] = {name: one.node.statistics().relayed_bytes for name, one in members}

    def join(self, at_s, name):
        """At ``at_s`` start a peer and link it with all others."""

        async def start():
            member = await self.relays.start(name)
            self.relays.link_up()
            await self._wait(member)

        self.changes[at_s] = lambda: self.waiting.start_soon(start)


@pytest.mark.slow
def test_a_peer_that_slows_down_to_a_twentieth_holds_up_only_itself():
    undisturbed_s = Play(5).run().last_s()
    play = Play(5)
    play.line(1.5, "p1", 1 / 20)
    play.run()
    assert play.last_s("p1") <= 1.15 * undisturbed_s
    assert play.finished_s["p1"] > 2 * undisturbed_s, "or nothing was shown"


@pytest.mark.slow
def test_a_line_that_recovers_is_used_again():
    play = Play(4, size=2 * SIZE)
    play.line(1.5, "p1", 1 / 20)
    play.line(3.5, "p1", 1)
    play.line(5.5, "p1", 1)
    play.run()
    slow = play.between(1.5, 3.5, "p1") / play.between(1.5, 3.5, "p2")
    recovered = play.between(5.5, "end", "p1") / play.between(5.5, "end", "p2")
    assert slow < 0.25
    assert recovered > 0.5


@pytest.mark.slow
def test_a_fast_newcomer_takes_load_in_the_same_broadcast():
    slow = {f"p{place}": RATE / 4 for place in range(4)}
    without_s = Play(4, up=slow).run().last_s()
    play = Play(5, up=slow | {"p4": 4 * RATE}, late=("p4",))
    play.join(1.5, "p4")
    play.run()
    assert play.last_s("p4") <= 0.9 * without_s
    others = [play.between(1.5, "end", f"p{place}") for place in range(4)]
    assert play.relayed["end"]["p4"] > 2 * max(others)


@pytest.mark.slow
def test_who_has_twice_the_uplink_relays_about_twice_as_much():
    up = {f"p{place}": (0.5, 1.0, 2.0)[place % 3] * RATE for place in range(6)}
    sent = Play(6, up=up).run().relayed["end"]
    weak, middle, strong = (sent[f"p{place}"] + sent[f"p{place + 3}"] for place in range(3))
    assert weak < 0.75 * middle
    assert strong > 1.2 * middle


class Deltas:
    """Small deltas, one after the other, to near peers of thin uplinks and far ones of wide."""

    NEAR = ("near0", "near1", "near2")
    FAR = ("far0", "far1", "far2")

    def __init__(self, count, *, size=200_000, far_latency_s=0.06):
        self.count, self.size, self.far_latency_s = count, size, far_latency_s
        self.last_s = []
        self.sent = []
        """Of each delta: what each peer has passed on of it."""

    def run(self):
        run_virtual(self._main, seed=0)
        return self

    def share_of_far(self, number):
        sent = self.sent[number]
        return sum(sent[name] for name in self.FAR) / sum(sent.values())

    async def _main(self):
        network = SimNetwork()
        network.add_node("source", up_bytes_per_s=RATE / 2, down_bytes_per_s=RATE, latency_s=0.001)
        for names, share, latency_s in ((self.NEAR, 0.1, 0.001), (self.FAR, 1, self.far_latency_s)):
            for name in names:
                network.add_node(
                    name, up_bytes_per_s=share * RATE, down_bytes_per_s=RATE, latency_s=latency_s
                )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.run)
            relays = RelayNet(nursery, network.streams)
            for name in ("source", *self.NEAR, *self.FAR):
                await relays.start(name)
            relays.link_up()
            await relays.wait_linked()
            for version in range(1, 1 + self.count):
                before = {one.name: one.node.statistics().relayed_bytes for one in relays.peers}
                payload = relays.keys.payload(version, self.size)
                self.last_s.append(await relays.broadcast(payload))
                await trio.sleep(1)
                self.sent.append(
                    {
                        one.name: one.node.statistics().relayed_bytes - before[one.name]
                        for one in relays.peers
                    }
                )
            nursery.cancel_scope.cancel()


def test_far_wide_uplinks_get_their_share_of_small_deltas_from_the_second_on():
    deltas = Deltas(8).run()
    first_s, *later_s = deltas.last_s
    # The middle one: while uplinks become known, single ones may take as long as the first.
    assert statistics.median(later_s) < 0.7 * first_s
    assert min(deltas.share_of_far(number) for number in range(1, 8)) > 0.4
