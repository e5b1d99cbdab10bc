"""A peer's memory has bounds: payloads kept for others, and payloads fetched ahead."""

import msgspec
import pytest
import trio

import peer.weights
from echo2p2p.ids import Digest, Version
from echo2p2p.net.relay import RelayNode
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import RUN_ID, RunKeys
from echo2p2p.testing.system import InlineOffload, SimEntropy, SimSharedMemory
from echo2p2p.weights.chunks import split
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import manifest_id
from echo2p2p.wire.signing import sign_record
from peer.state import Weights
from peer.weights import PAYLOADS_AHEAD, PAYLOADS_KEPT, Follower

LAYOUT = plan_layout([("weight", "bf16", (64, 512), ())])
"""64 KiB."""
KEYS = RunKeys()


def make_relay() -> RelayNode:
    peer_id, key = KEYS.identity("p")
    network, entropy = SimNetwork(), SimEntropy(1)
    network.add_node("p", up_bytes_per_s=1e6)
    return RelayNode(
        me=peer_id,
        run_id=RUN_ID,
        run_public_key=KEYS.run_public_key,
        sign=key.sign,
        card=KEYS.card("p"),
        streams=network.streams("p"),
        endpoint=None,
        wants=lambda _: False,
        journal=TraceJournal(),
        entropy=entropy,
        rng=entropy.rng("relay"),
    )


class Subject:
    """A follower that holds version 0, and a relay without links."""

    def __init__(self, client=None) -> None:
        self.relay = make_relay()
        self.weights = Weights(LAYOUT, SimSharedMemory())
        self.weights.switch(Version(0), Digest(bytes(32)))
        self.follower = Follower(
            client=client,
            relay=self.relay,
            weights=self.weights,
            keeper=None,
            run_public_key=KEYS.run_public_key,
            offload=InlineOffload(),
            journal=TraceJournal(),
            stall_timeout_s=20.0,
        )

    def offer(self, version: int, size: int) -> bool:
        """A neighbour shows the delta to this version; return whether it is fetched."""
        header, signed = signed_delta(version, size)
        wanted = self.follower.wants(header)
        if wanted:
            self.relay.follow(signed, push=True)
        return wanted

    def applied(self, version: int, size: int) -> None:
        """The delta to this version is whole, and applied."""
        header, signed = signed_delta(version, size)
        self.relay.follow(signed, push=True)
        self.weights.switch(Version(version), Digest(bytes(32)))
        self.follower._keep(manifest_id(signed), header)

    def versions(self) -> list[int]:
        return sorted(header.version for header in self.relay.headers().values())


def signed_delta(version: int, size: int):
    header = KEYS.payload(version, size, chunk_bytes=1024).assembly.header
    header = msgspec.structs.replace(header, layout_digest=LAYOUT.digest)
    assert split(bytes(size), 1024).payload is not None
    return header, sign_record(KEYS.run_key, header)


@pytest.fixture
async def subject():
    return Subject()


async def test_a_peer_that_cannot_keep_up_fetches_a_bounded_number_ahead(subject) -> None:
    taken = [subject.offer(version, 100) for version in range(1, 30)]
    assert taken == [True] * PAYLOADS_AHEAD + [False] * (29 - PAYLOADS_AHEAD)
    assert subject.versions() == list(range(1, PAYLOADS_AHEAD + 1))


async def test_what_is_fetched_ahead_takes_no_more_than_the_model(subject) -> None:
    size = LAYOUT.total_bytes * 2 // 5
    assert [subject.offer(version, size) for version in range(1, 5)] == [True, True, False, False]


async def test_room_is_there_again_once_something_was_applied(subject) -> None:
    for version in range(1, PAYLOADS_AHEAD + 1):
        assert subject.offer(version, 100)
    assert not subject.offer(PAYLOADS_AHEAD + 1, 100)
    subject.applied(1, 100)
    assert subject.offer(PAYLOADS_AHEAD + 1, 100)


async def test_applied_payloads_are_kept_for_others_up_to_a_number(subject) -> None:
    for version in range(1, 30):
        subject.applied(version, 100)
    assert subject.versions() == list(range(30 - PAYLOADS_KEPT, 30))


async def test_applied_payloads_are_kept_up_to_half_a_model_and_the_newest_always(subject) -> None:
    quarter = LAYOUT.total_bytes // 4
    for version in range(1, 6):
        subject.applied(version, quarter)
    assert subject.versions() == [4, 5]
    subject.applied(6, LAYOUT.total_bytes * 3 // 4)
    assert subject.versions() == [6]
    subject.applied(7, 100)
    assert subject.versions() == [7]


class Coordinator:
    """Answers for chunks of these payloads."""

    def __init__(self, payloads) -> None:
        self._assemblies = {payload.manifest_id: payload.assembly for payload in payloads}

    async def chunk(self, identity, index) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(self._assemblies[identity].chunk(index))


class TakesAll:
    """An `Apply` that takes every payload for a good one."""

    def __init__(self, header, assembly, *, weights, **_) -> None:
        self._header, self._assembly, self._weights = header, assembly, weights

    async def advance(self) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    async def finish(self, *, offer: bool) -> None:
        await trio.lowlevel.checkpoint()
        assert self._assembly.complete
        self._weights.switch(Version(self._header.version), Digest(bytes(32)))


async def test_a_way_may_lead_over_payloads_that_were_kept_and_forgotten_on_it(
    autojump_clock, monkeypatch
) -> None:
    monkeypatch.setattr(peer.weights, "Apply", TakesAll)
    chain = [KEYS.payload(1, 5000, chunk_bytes=1024, anchor=True)]
    chain += [KEYS.payload(v, 5000, chunk_bytes=1024) for v in range(2, PAYLOADS_KEPT + 2)]
    subject = Subject(Coordinator(chain))
    follower = subject.follower
    for payload in chain[1:]:  # from before the weights were lost, or their numbers came again
        subject.relay.publish(payload.signed, payload.assembly, push=True)
        follower._keep(payload.manifest_id, payload.assembly.header)
    subject.weights.forget()
    with trio.fail_after(1000):
        await follower._follow([payload.signed for payload in chain])
    assert subject.weights.version == PAYLOADS_KEPT + 1


async def test_payloads_that_another_way_has_passed_by_are_forgotten(subject) -> None:
    for version in range(1, 6):
        assert subject.offer(version, 100)
    subject.applied(9, 100)  # an anchor, say
    assert subject.versions() == [9]
