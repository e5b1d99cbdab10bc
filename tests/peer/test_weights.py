"""A peer's way from version to version when payloads, memory or folders are not as they should."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from echo2p2p.errors import ConfigError, HttpError, RefusedError, StoreError
from echo2p2p.ids import ManifestId, PeerId, RunId, Step, Version
from echo2p2p.net.relay import RelayNode
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import RUN_ID, RelayNet, RunKeys
from echo2p2p.testing.states import trained_step
from echo2p2p.testing.system import InlineOffload, SimEntropy, SimSharedMemory
from echo2p2p.weights.anchor import encode_anchor
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.chunks import split
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import build_header, manifest_id
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import ManifestHeader, Signed
from echo2p2p.wire.signing import open_record, sign_record
from peer.engine.base import EngineSetup
from peer.keeper import EngineKeeper
from peer.local import ReadModel
from peer.state import Weights
from peer.weights import IN_MEMORY_BYTES, IN_MEMORY_SHARE, Follower
from scenarios.fake_engine import EngineFaults, FakeEngine

COUNT = 4096
LAYOUT = plan_layout([("w", "bf16", (COUNT,), ())])
KEYS = RunKeys()


def states(count: int) -> list[bytes]:
    """Return the bits of so many versions."""
    found = [trained_step(COUNT, deviation=0.02, step=0.0, seed=1)[0]]
    for number in range(1, count):
        bits = bytearray(found[-1])
        for at in range(number % 7, COUNT, 97):
            bits[2 * at] ^= 1
        found.append(bytes(bits))
    return found


class Run:
    """A coordinator as its client shows it: paths, and every chunk over HTTP."""

    def __init__(self, versions: int = 1, *, spoilt: frozenset[int] = frozenset()) -> None:
        self.states = states(12)
        self.spoilt = spoilt
        """Versions whose delta leads elsewhere than its manifest says."""
        self.latest = versions - 1
        self.asked: list[int | None] = []
        self.asked_s: list[float] = []
        """When."""
        self.chunks_gone = False
        """Whether no chunk is to be had."""
        self.chunks_wrong = False
        """Whether something on the way makes zeros of every chunk."""
        self.fetched_bytes = 0
        self.fails = 0
        self.news = trio.lowlevel.ParkingLot()
        self._payloads: dict[bytes, object] = {}

    def publish(self) -> None:
        self.latest += 1
        self.news.unpark_all()

    def signed(self, version: int, base: int | None) -> Signed:
        result = self.states[version]
        if base is None:
            payload = encode_anchor(LAYOUT, result)
        else:
            payload = encode_delta(LAYOUT, self.states[base], result)
        if version in self.spoilt and base is not None:
            result = bytes(len(result))
        chunked = split(payload, 1024)
        origin = None if base is None else (Version(base), state_digest(LAYOUT, self.states[base]))
        header = build_header(
            content="model",
            run_id=RunId(RUN_ID),
            version=Version(version),
            chain_id="chain",
            step=Step(version),
            generation=0,
            base=origin,
            result_digest=state_digest(LAYOUT, result),
            layout=LAYOUT,
            chunked=chunked,
        )
        signed = sign_record(KEYS.run_key, header)
        self._payloads[manifest_id(signed)] = chunked
        return signed

    async def manifests(self, have: int | None, wait_s: float) -> list[Signed]:
        self.asked.append(have)
        self.asked_s.append(trio.current_time())
        if self.fails:
            self.fails -= 1
            raise HttpError("it is away")
        with trio.move_on_after(wait_s):
            while have == self.latest or self.latest < 0:
                await self.news.park()
        if have is None:
            return [self.signed(self.latest, None)] if self.latest >= 0 else []
        return [self.signed(v, v - 1) for v in range(have + 1, self.latest + 1)]

    def whole(self, signed: Signed) -> Assembly:
        """Return the payload of a manifest of ours."""
        chunked = self._payloads[manifest_id(signed)]
        return Assembly.whole(header_of(signed), chunked.payload, chunked.index)

    async def chunk(self, identity: bytes, index: int) -> bytes:
        if self.chunks_gone:
            raise RefusedError("no_such_chunk", "it is not here")
        data = bytes(self._payloads[identity].chunk(index))
        if self.chunks_wrong:
            data = bytes(len(data))
        self.fetched_bytes += len(data)
        return data


def header_of(signed: Signed) -> ManifestHeader:
    return open_record(signed, KEYS.run_public_key, ManifestHeader)


class Subject:
    """A follower of a run, with or without an engine."""

    def __init__(
        self,
        run: Run,
        *,
        engines: bool = False,
        local: ReadModel | None = None,
        stall_timeout_s: float = 1.0,
    ) -> None:
        network, entropy = SimNetwork(), SimEntropy(1)
        self.network = network
        network.add_node("p", up_bytes_per_s=1e6)
        peer_id, key = KEYS.identity("p")
        self.journal = TraceJournal()
        self.weights = Weights(LAYOUT, SimSharedMemory())
        self.engines: list[FakeEngine] = []
        self.faults: EngineFaults | None = None
        """Of the first engine."""
        self.keeper = None
        if engines:
            self.keeper = EngineKeeper(
                make_engine=self.make_engine,
                setup=EngineSetup(layout=LAYOUT.table, model_config="{}"),
                restarts_max=5,
                journal=self.journal,
                offload=InlineOffload(),
            )
        relay = RelayNode(
            me=PeerId(peer_id),
            run_id=RUN_ID,
            run_public_key=KEYS.run_public_key,
            sign=key.sign,
            card=KEYS.card("p"),
            streams=network.streams("p"),
            endpoint=None,
            wants=lambda _: False,
            begin=lambda *what: self.follower.begin(*what),
            journal=self.journal,
            entropy=entropy,
            rng=entropy.rng("relay"),
        )
        self.relay = relay
        self.follower = Follower(
            client=run,
            relay=relay,
            weights=self.weights,
            keeper=self.keeper,
            run_public_key=KEYS.run_public_key,
            offload=InlineOffload(),
            journal=self.journal,
            stall_timeout_s=stall_timeout_s,
            local=local,
        )

    def make_engine(self) -> FakeEngine:
        self.engines.append(FakeEngine(load_s=5.0, faults=self.faults))
        self.faults = None
        return self.engines[-1]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.follower.run)
            if self.keeper is not None:
                nursery.start_soon(self.keeper.run)
            yield
            nursery.cancel_scope.cancel()

    async def reached(self, version: int) -> None:
        with trio.fail_after(300.0):
            while self.weights.version != version:
                await self.follower.applied.park()

    async def proved(self, version: int) -> None:
        assert self.keeper is not None
        with trio.fail_after(300.0):
            while self.keeper.version != version:
                await self.keeper.changed.park()

    def events(self, name: str) -> list[dict[str, object]]:
        return [entry.fields for entry in self.journal.named(name)]


async def test_a_joiner_takes_an_anchor_and_then_deltas(autojump_clock) -> None:
    run = Run(versions=3)
    subject = Subject(run)
    async with subject.running():
        await subject.reached(2)
        run.publish()
        await subject.reached(3)
        assert bytes(subject.weights.view) == run.states[3]
        applied = [(e["version"], e["anchor"]) for e in subject.events("version.applied")]
        assert applied == [(2, True), (3, False)]


async def test_a_version_that_is_not_what_its_manifest_says_is_refused_and_an_anchor_fetched(
    autojump_clock,
) -> None:
    run = Run(versions=1, spoilt=frozenset({1}))
    subject = Subject(run, engines=True)
    async with subject.running():
        await subject.proved(0)
        run.publish()
        await subject.proved(1)
        assert bytes(subject.weights.view) == run.states[1]
        (refused,) = subject.events("version.refused")
        assert (refused["version"], "does not match" in refused["detail"]) == (1, True)
        assert run.asked[:4] == [None, 0, None, 1]
        assert subject.events("engine.lost") == []
        assert subject.events("chunk.rejected") == [], "nobody is blamed"


async def test_memory_that_an_engine_finds_damaged_is_reported_and_fetched_again(
    autojump_clock,
) -> None:
    run = Run(versions=1)
    subject = Subject(run, engines=True)
    async with subject.running():
        await subject.reached(0)
        subject.weights.view[100] ^= 4  # while the engine loads, or before
        await subject.proved(0)
        assert bytes(subject.weights.view) == run.states[0]
        (damaged,) = subject.events("memory.corrupt")
        assert damaged["version"] == 0
        assert run.asked == [None, 0, None, 0]
        (lost,) = subject.events("engine.lost")
        assert "does not use the weights" in lost["detail"]


async def test_an_engine_that_reads_otherwise_than_the_memory_costs_no_download(
    autojump_clock,
) -> None:
    run = Run(versions=1)
    subject = Subject(run, engines=True)
    subject.faults = EngineFaults(wrong_weights_from_load=1)
    async with subject.running():
        await subject.proved(0)
        assert len(subject.events("engine.lost")) == 1
        assert subject.events("memory.corrupt") == []
        assert run.asked == [None, 0]


async def test_memory_that_is_damaged_between_versions_is_found_by_the_next_one(
    autojump_clock,
) -> None:
    run = Run(versions=1)
    subject = Subject(run)
    async with subject.running():
        await subject.reached(0)
        subject.weights.view[101] ^= 0x7F
        run.publish()
        await subject.reached(1)
        assert bytes(subject.weights.view) == run.states[1]
        assert len(subject.events("version.refused")) == 1
        assert run.asked[:4] == [None, 0, None, 1]


async def test_a_peer_that_catches_up_gives_its_engine_the_last_version_only(
    autojump_clock,
) -> None:
    run = Run(versions=1)
    subject = Subject(run, engines=True)
    async with subject.running():
        await subject.proved(0)
        run.fails = 1
        for _ in range(6):
            run.publish()
        for version in range(1, 7):  # they are all there before the path is known
            signed = run.signed(version, version - 1)
            subject.relay.follow(signed, push=True)
            for index in range(99):
                if subject.relay.assembly(manifest_id(signed)).complete:
                    break
                data = await run.chunk(manifest_id(signed), index)
                subject.relay.accept_chunk(manifest_id(signed), index, data, "p")
        await subject.proved(6)
        loaded = [event["version"] for event in subject.events("version.loaded")]
        assert loaded == [0, 6]


async def test_what_an_earlier_incarnation_holds_is_offered_to_the_engine(autojump_clock) -> None:
    run = Run(versions=1)
    subject = Subject(run, engines=True)
    subject.weights.view[:] = run.states[0]
    subject.weights.switch(Version(0), state_digest(LAYOUT, run.states[0]))
    async with subject.running():
        await subject.proved(0)
        assert run.fetched_bytes == 0


# --- the volunteer's folder -------------------------------------------------------------------


def folder(bits: bytes) -> ReadModel:
    """Return a reader of a folder with these bits."""

    def read(layout, target) -> None:
        assert layout is LAYOUT
        target[:] = bits

    return read


@pytest.mark.parametrize("latest", [0, 3])
async def test_weights_that_the_volunteer_has_are_not_downloaded(autojump_clock, latest) -> None:
    run = Run(versions=latest + 1)
    run.fails = 2
    subject = Subject(run, engines=True, local=folder(run.states[0]))
    async with subject.running():
        await subject.proved(latest)
        assert bytes(subject.weights.view) == run.states[latest]
        assert subject.events("local_weights.used") == [{"version": 0}]
        assert not any(event["anchor"] for event in subject.events("version.applied"))
        assert run.fetched_bytes < len(encode_anchor(LAYOUT, run.states[0])) / 4


async def test_a_folder_that_holds_the_version_of_an_anchor_stands_for_it(autojump_clock) -> None:
    run = Run(versions=4)
    subject = Subject(run, local=folder(run.states[3]))
    async with subject.running():
        await trio.sleep(60.0)
        assert subject.weights.version == 3
        assert run.fetched_bytes == 0


async def test_a_folder_is_waited_with_until_there_is_a_version(autojump_clock) -> None:
    run = Run(versions=0)
    subject = Subject(run, engines=True, local=folder(run.states[0]))
    async with subject.running():
        await trio.sleep(100.0)
        assert subject.weights.version is None
        run.publish()
        await subject.proved(0)
        assert run.fetched_bytes == 0


async def test_a_folder_with_other_weights_costs_a_line_and_the_anchor_is_fetched(
    autojump_clock,
) -> None:
    run = Run(versions=3)
    subject = Subject(run, engines=True, local=folder(bytes(2 * COUNT)))
    async with subject.running():
        await subject.proved(2)
        (unused,) = subject.events("local_weights.rejected")
        assert unused["detail"].endswith("they are downloaded")
        assert bytes(subject.weights.view) == run.states[2]


async def test_a_folder_that_cannot_be_read_costs_a_line_too(autojump_clock) -> None:
    def read(layout, target) -> None:
        target[:10] = bytes(10)
        raise ConfigError("model_dir", "m has no tensor w")

    run = Run(versions=1)
    subject = Subject(run, local=read)
    async with subject.running():
        await subject.reached(0)
        (unused,) = subject.events("local_weights.rejected")
        assert "m has no tensor w: they are downloaded" in unused["detail"]


# --- what the source has no more ----------------------------------------------------------------


STALL_S = 20.0


class Linked(Subject):
    """A follower whose relay has a link to a source's, which serves what it is given."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, stall_timeout_s=STALL_S)
        self.network.add_node("source", up_bytes_per_s=1e6, latency_s=0.02)
        self.run = run

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.network.run)
            relays = RelayNet(nursery, self.network.streams)
            self.source = (await relays.start("source")).node
            nursery.start_soon(self.relay.run)
            self.relay.set_neighbours([], relays.source.address, peers=1)
            await trio.sleep(1.0)
            assert self.relay.statistics().links
            self.began_s = trio.current_time()
            async with super().running():
                yield
            nursery.cancel_scope.cancel()

    def serve(self, version: int, base: int | None) -> bytes:
        signed = self.run.signed(version, base)
        return self.source.publish(signed, self.run.whole(signed), push=base is not None)

    def asked_s(self) -> list[float]:
        """When it asked for a path, since it began."""
        return [round(at - self.began_s, 2) for at in self.run.asked_s]


async def test_a_joiner_whose_anchor_is_gone_takes_another_after_a_second(autojump_clock) -> None:
    run = Run(versions=1)
    subject = Linked(run)
    async with subject.running():
        await trio.sleep(0.1)
        run.latest = 3
        subject.serve(3, None)
        await subject.reached(3)
        assert trio.current_time() - subject.began_s < 1.3
        assert run.asked == [None, None, None, 3]
        assert subject.asked_s()[:3] == [0, 1, 1]
        assert run.fetched_bytes == 0, "nothing over HTTP"


async def test_a_joiner_whose_anchor_is_forgotten_on_the_way_is_told_and_asks_at_once(
    autojump_clock,
) -> None:
    run = Run(versions=1)
    subject = Linked(run)
    async with subject.running():
        subject.source.relaying = False  # busy, whoever asks
        old = subject.serve(0, None)
        await trio.sleep(4.5)
        assert (run.asked, subject.relay.refused(old)) == ([None], False)
        run.latest = 3
        subject.serve(3, None)
        subject.source.relaying = True
        subject.source.forget(old)
        await subject.reached(3)
        assert subject.asked_s()[:3] == [0, 4.52, 4.52], "it takes the news 20 ms"
        assert run.asked[:3] == [None, None, None]
        assert subject.relay.assembly(old) is None
        assert run.fetched_bytes == 0


async def test_who_is_told_the_same_path_again_asks_ever_more_rarely_and_then_fetches_over_http(
    autojump_clock,
) -> None:
    run = Run(versions=1)
    subject = Linked(run)
    async with subject.running():
        await subject.reached(0)
        assert trio.current_time() - subject.began_s == pytest.approx(STALL_S, abs=0.05)
        await trio.sleep(0.1)
        assert run.asked == [None] * 6 + [0]
        assert subject.asked_s() == [0, 1, 2, 4, 8, 16, STALL_S]


async def test_a_chunk_that_is_wrong_over_http_costs_no_weights(autojump_clock) -> None:
    run = Run(versions=1)
    subject = Subject(run)
    async with subject.running():
        await subject.reached(0)
        run.chunks_wrong = True
        run.publish()
        await trio.sleep(10.0)
        refused = subject.journal.named("chunk.refused")
        assert refused
        assert subject.weights.version == 0
        assert subject.journal.named("version.refused") == []
        run.chunks_wrong = False
        await subject.reached(1)
        assert run.asked.count(None) == 1, "no anchor was asked for again"


async def test_who_is_told_of_what_is_nowhere_does_not_turn_in_circles(autojump_clock) -> None:
    run = Run(versions=1)
    run.chunks_gone = True
    subject = Linked(run)
    async with subject.running():
        await trio.sleep(10 * STALL_S)
        assert len(run.asked) == pytest.approx(60, abs=2), "six each time"
        run.chunks_gone = False
        subject.serve(0, None)
        await subject.reached(0)


async def test_a_source_that_has_it_a_moment_later_is_asked_for_nothing(autojump_clock) -> None:
    run = Run(versions=1)
    subject = Linked(run)
    async with subject.running():
        await trio.sleep(0.7)
        subject.serve(0, None)
        await subject.reached(0)
        assert trio.current_time() - subject.began_s < 1.0
        assert run.asked == [None, 0]


async def test_a_coordinator_that_cannot_be_asked_does_not_end_the_waiting(autojump_clock) -> None:
    run = Run(versions=1)
    subject = Linked(run)
    async with subject.running():
        await trio.sleep(0.5)
        run.fails = 2
        await trio.sleep(2.0)
        assert run.fails == 0
        subject.serve(0, None)
        await subject.reached(0)
        assert subject.asked_s()[:3] == [0, 1, 2]
        assert run.asked[3:] == [0]


# --- memory -----------------------------------------------------------------------------------


async def test_long_payloads_lie_in_files_and_short_ones_in_memory() -> None:
    subject = Subject(Run())
    header = KEYS.payload(1, 1000).assembly.header
    long = KEYS.payload(2, IN_MEMORY_BYTES + 1).assembly.header
    assert subject.follower.begin(ManifestId(b"short"), header)[1] is None
    assembly, memory = subject.follower.begin(ManifestId(b"long"), long)
    assert len(memory.view) == IN_MEMORY_BYTES + 1 + long.index_bytes
    assert len(assembly.memory) == IN_MEMORY_BYTES + 1
    assert 16 * IN_MEMORY_SHARE <= 0.1


async def test_a_payload_that_finds_no_room_in_a_file_is_put_together_in_memory() -> None:
    subject = Subject(Run())
    subject.weights._memory = SimSharedMemory(bytes_max=1)
    header = KEYS.payload(1, IN_MEMORY_BYTES + 1).assembly.header
    with pytest.raises(StoreError):
        subject.weights.scratch(header.payload_bytes)
    assert subject.follower.begin(ManifestId(b"long"), header)[1] is None
    assert len(subject.events("payload.file_refused")) == 1
