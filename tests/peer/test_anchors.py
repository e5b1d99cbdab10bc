"""An anchor is made from our own weights: on demand, of our version, once, and the very same."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from coordinator.config import Settings
from echo2p2p.ids import RunId, Step, Version
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.relays import RunKeys
from echo2p2p.testing.states import trained_step
from echo2p2p.testing.system import InlineOffload, SimSharedMemory
from echo2p2p.weights.anchor import encode_anchor
from echo2p2p.weights.chunks import split
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import build_header, manifest_id
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import ManifestHeader
from echo2p2p.wire.signing import sign_record
from peer.anchors import AnchorMaker
from peer.state import Weights
from scenarios.world import PeerSpec, World, WorldSpec

COUNT = 30_000
LAYOUT = plan_layout([("w", "bf16", (COUNT,), ())])
BITS, _ = trained_step(COUNT, deviation=0.02, step=0.0, seed=1)
PAYLOAD = encode_anchor(LAYOUT, BITS)
KEYS = RunKeys()


class Relay:
    """Notes what is served."""

    def __init__(self) -> None:
        self.served: dict[bytes, bytes] = {}
        self.followed: set[bytes] = set()

    def assembly(self, identity):
        return "followed" if identity in self.followed else None

    def publish(self, signed, assembly, *, push, memory) -> None:
        assert assembly.complete
        assert not push
        assert memory.view[: len(PAYLOAD)] == assembly.payload(), "it lies in the file"
        self.served[manifest_id(signed)] = bytes(assembly.payload())


class Subject:
    """A maker, and weights of version 5."""

    def __init__(self, *, work_s: float = 0.0, room: int | None = None) -> None:
        self.weights = Weights(LAYOUT, SimSharedMemory(room))
        self.weights.view[:] = BITS
        self.weights.switch(Version(5), state_digest(LAYOUT, BITS))
        self.relay, self.journal = Relay(), TraceJournal()
        self.kept: list[bytes] = []
        self.maker = AnchorMaker(
            weights=self.weights,
            relay=self.relay,
            made=self.kept.append,
            offload=InlineOffload(work_s),
            journal=self.journal,
        )

    def ask(self, **changes) -> bytes:
        """A neighbour wants the anchor of version 5, or of what ``changes`` make of it."""
        header = msgspec.structs.replace(anchor_header(), **changes)
        signed = sign_record(KEYS.run_key, header)
        self.maker.asked(signed, header)
        return manifest_id(signed)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.maker.run)
            yield
            nursery.cancel_scope.cancel()


def anchor_header(payload: bytes = PAYLOAD) -> ManifestHeader:
    return build_header(
        content="model",
        run_id=RunId("run"),
        version=Version(5),
        chain_id="chain",
        step=Step(5),
        generation=0,
        base=None,
        result_digest=state_digest(LAYOUT, BITS),
        layout=LAYOUT,
        chunked=split(payload, 1024),
    )


async def test_the_very_chunks_are_made_and_served_and_kept(autojump_clock) -> None:
    subject = Subject()
    async with subject.running():
        identity = subject.ask()
        await trio.sleep(1.0)
        assert subject.relay.served == {identity: PAYLOAD}
        assert subject.kept == [identity]
        assert subject.journal.named("anchor.rebuilt")[0].fields["version"] == 5


async def test_it_is_made_once_however_often_it_is_asked_for(autojump_clock) -> None:
    subject = Subject(work_s=3.0)
    async with subject.running():
        for _ in range(20):
            subject.ask()
            await trio.sleep(0.5)
        await trio.sleep(100.0)
        assert len(subject.journal.named("anchor.rebuilt")) == 1
        subject.relay.served.clear()
        subject.ask()
        await trio.sleep(10.0)
        assert subject.relay.served == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 4},
        {"version": 6},
        {"base_version": 4, "base_digest": bytes(32)},
        {"result_digest": bytes(32)},
        {"layout_digest": bytes(32)},
    ],
)
async def test_another_version_costs_nothing(autojump_clock, changes) -> None:
    subject = Subject(work_s=1.0)
    async with subject.running():
        subject.ask(**changes)
        with trio.fail_after(0.5):
            await trio.testing.wait_all_tasks_blocked()
        assert subject.journal.entries == []
        subject.ask()
        await trio.sleep(5.0)
        assert len(subject.relay.served) == 1, "and keeps nobody from the right one"


async def test_weights_that_are_being_written_are_not_read(autojump_clock) -> None:
    subject = Subject()
    async with subject.running():
        async with subject.weights.lock:
            subject.ask()
            await trio.sleep(10.0)
            assert subject.relay.served == {}
            subject.weights.switch(Version(6), bytes(32))
        await trio.sleep(10.0)
        assert subject.relay.served == {}


async def test_what_is_followed_meanwhile_is_left_alone(autojump_clock) -> None:
    subject = Subject()
    async with subject.running():
        async with subject.weights.lock:
            subject.relay.followed.add(subject.ask())
        await trio.sleep(10.0)
        assert subject.relay.served == {}


async def test_bytes_of_another_release_are_not_served_and_not_tried_again(autojump_clock) -> None:
    subject = Subject()
    other = anchor_header(PAYLOAD[:-1] + bytes([PAYLOAD[-1] ^ 1]))
    async with subject.running():
        for _ in range(3):
            subject.ask(index_digest=other.index_digest)
            await trio.sleep(5.0)
        assert subject.relay.served == {}
        (event,) = subject.journal.named("anchor.dropped")
        assert event.fields["detail"] == "our bytes are others than the publisher's"


async def test_no_room_for_it_is_an_event(autojump_clock) -> None:
    subject = Subject(room=LAYOUT.total_bytes + 10)
    async with subject.running():
        subject.ask()
        await trio.sleep(5.0)
        assert subject.relay.served == {}
        assert len(subject.journal.named("anchor.dropped")) == 1


# --- in a run -----------------------------------------------------------------------------------

SETTINGS = Settings.model_validate(
    {
        "run": {"steps": 40, "seed": 3},
        "server": {"host": "coordinator"},
        "rollouts": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "staleness_budget": 3,
            "publication_period": 2,
            "tokens_max": 4,
            "lease_timeout_s": 30.0,
        },
        "weights": {"chunk_bytes_min": 1024},
    }
)


def anchors_sent(world: World) -> int:
    """Return the bytes of anchors that the source has sent."""
    assert world.app is not None
    sent = world.app._relay.statistics()
    return sent.relayed_bytes - sent.relayed_delta_bytes


@pytest.mark.slow
def test_a_joiner_takes_an_anchor_from_peers_that_never_received_it() -> None:
    world = World(
        WorldSpec(
            settings=SETTINGS,
            peers=(
                *(PeerSpec(name) for name in ("ann", "bob", "cem")),
                *(PeerSpec(name, joins_s=None) for name in ("dan", "eve")),
            ),
            learner_step_s=4.0,
            source_up_bytes_per_s=2e4,
        ),
        seed=1,
    )
    sizes: dict[str, int] = {}
    scope = trio.CancelScope()

    async def join(name: str) -> None:
        before = anchors_sent(world)
        world.start_peer(name)
        await world.wait_event("version.applied", node=name, anchor=True)
        sizes[name] = anchors_sent(world) - before

    async def nemesis(world: World) -> None:
        await trio.sleep(28.0)
        while "anchor" not in sizes:
            await world.wait_event("version.published")
            published = world.trace.named("version.published")[-1].fields
            if published["anchor_bytes"]:
                sizes["anchor"] = published["anchor_bytes"]
        await trio.sleep(1.0)
        await join("dan")
        await world.wait_event("version.published")
        await trio.sleep(1.0)
        await join("eve")
        scope.cancel()

    async def run() -> None:
        with scope:
            await world.run(nemesis)

    run_virtual(run, seed=1)
    assert scope.cancelled_caught
    rebuilt = world.trace.named("anchor.rebuilt")
    assert {entry.fields["node"] for entry in rebuilt} <= {"ann", "bob", "cem"}
    assert rebuilt
    assert sizes["dan"] <= 0.2 * sizes["anchor"]
    assert sizes["eve"] <= 0.2 * sizes["anchor"], "also when the version is no longer the newest"
    assert world.breaches == []
