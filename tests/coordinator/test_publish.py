"""A publisher alone, on a simulated disk: what it makes, serves, keeps and takes up again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import trio
import trio.testing

from coordinator.book import Book
from coordinator.config import WeightsSection
from coordinator.membership import Member, Membership, State
from coordinator.merges import NO_SHORTER
from coordinator.payloads import blob_name
from coordinator.publish import RETURN_S, SPARE_ANCHORS, VERSIONS_KEPT, Publisher
from coordinator.run_state import RunState
from coordinator.schema import MIGRATIONS
from echo2p2p.ids import SOURCE, Generation, Incarnation, PeerId, Step, Version
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.trust import RunKeys
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.system import InlineOffload, SimEntropy
from echo2p2p.weights import kernels
from echo2p2p.weights.anchor import decode_anchor, encode_anchor
from echo2p2p.weights.delta import apply_delta
from echo2p2p.weights.kernels import Found
from echo2p2p.weights.layout import DTYPES, plan_layout
from echo2p2p.weights.manifest import manifest_id
from echo2p2p.weights.state import state_digest

LAYOUT = plan_layout([("w", "bf16", (64, 64), ())])
ANN = PeerId("ann")
KEYS = RunKeys.create(SimEntropy(0))


def walk(count: int, step: float = 3e-6) -> list[bytes]:
    """Return the states of a random walk of master weights, as bf16."""
    rng = np.random.default_rng(1)
    masters = rng.normal(0, 0.02, LAYOUT.total_bytes // 2).astype(np.float32)
    made = []
    for _ in range(count):
        made.append((masters.view("<u4") >> 16).astype("<u2").tobytes())
        masters = masters + rng.normal(0, step, masters.size).astype(np.float32)
    return made


STATES = walk(140)


def strangers(count: int) -> list[bytes]:
    """Return states of which each has nothing in common with the one before."""
    floats = np.random.default_rng(3).normal(0, 0.02, (count, LAYOUT.total_bytes // 2))
    return [(each.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes() for each in floats]


class Gate(InlineOffload):
    """Lets work through unless it is to be held; then only when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = False
        self.anchors_wait = False
        self.held = 0
        self.go = trio.Event()

    async def run(self, work):
        """See `InlineOffload`."""
        anchor = getattr(work, "func", None) is encode_anchor
        if self.holds or (self.anchors_wait and anchor):
            self.held += 1
            await self.go.wait()
        return await super().run(work)


@dataclass
class Desk:
    """A publisher and what it works on."""

    publisher: Publisher
    members: Membership
    journal: TraceJournal
    offload: Gate
    disk: SimDisk

    async def publish(self, count: int = 1, states: list[bytes] = STATES) -> None:
        """Publish the next states, and let what is to be done after each be done."""
        latest = self.publisher._state.latest
        first = 0 if latest is None else latest + 1
        for version in range(first, first + count):
            bits = bytearray(states[version])
            await self.publisher.publish(bits, Step(version), Generation(0))
            await trio.sleep(0.1)  # virtual: the disk takes its time too

    def links(self, *, merged: bool | None = None) -> set[tuple[int | None, int]]:
        """Return base and version of what is served: all, or only deltas of one kind."""
        return {
            (link.base_version, link.version)
            for link in self.publisher._catalogue.links
            if merged is None or (link.base_version is not None and link.is_step != merged)
        }

    async def follow(self, have: int | None, member: PeerId = ANN) -> tuple[list[int], int]:
        """Take a member's path and apply it; returns the versions on it, and its bytes."""
        path = await self.publisher.path(member, have, 0.0)
        bits = bytearray(LAYOUT.total_bytes if have is None else STATES[have])
        size, versions = 0, []
        for signed in path:
            header = self.publisher._catalogue.open(signed)
            payload = self.payload(signed)
            if header.base_version is None:
                decode_anchor(LAYOUT, payload, bits)
            else:
                assert header.base_digest == state_digest(LAYOUT, bits)
                apply_delta(LAYOUT, payload, bits)
            assert header.result_digest == state_digest(LAYOUT, bits)
            versions.append(header.version)
            size += header.payload_bytes + header.index_bytes
        return versions, size

    def payload(self, signed) -> bytes:
        """Return what the relay serves."""
        assembly = self.publisher._relay.assembly(manifest_id(signed))
        assert assembly is not None
        return bytes(assembly.payload())

    def beat(self, version: int | None, peer_id: PeerId = ANN) -> None:
        """Let a member be live, and hold a version."""
        self.members.restore(member(peer_id, version), trio.current_time())

    def told(self, name: str) -> list[tuple[int, int]]:
        """Return base and version of what events of this name are about."""
        found = self.journal.named(name)
        return [(entry.fields["base"], entry.fields["version"]) for entry in found]


def member(peer_id: PeerId, version: int | None) -> Member:
    return Member(
        peer_id=peer_id,
        incarnation=Incarnation(1),
        name=peer_id,
        public_key=b"",
        credential=peer_id.encode(),
        relay=None,
        engine="none",
        state=State.ACTIVE,
        term_end_s=10.0,
        version=version,
    )


@asynccontextmanager
async def open_desk(disk: SimDisk, *, threads: int = 1, **weights) -> AsyncIterator[Desk]:
    """Open a publisher with what it finds on a disk."""
    journal, offload = TraceJournal(), Gate()
    network = SimNetwork()
    network.add_node("coordinator")
    relay = RelayNode(
        me=SOURCE,
        run_id="run",
        run_public_key=KEYS.public_key,
        sign=KEYS.sign,
        card=None,
        streams=network.streams("coordinator"),
        endpoint=Endpoint("coordinator", 7001),
        wants=lambda _: False,
        journal=journal,
        entropy=SimEntropy(3),
        rng=SimEntropy(3).rng("relay"),
    )
    members = Membership(term_s=10.0)
    settings = WeightsSection.model_validate({"chunk_bytes_min": 1024, **weights})
    async with disk.open_store("run", MIGRATIONS) as store:
        book = Book(store)
        await book.load()
        publisher = Publisher(
            book=book,
            blobs=disk.blobs(),
            offload=offload,
            relay=relay,
            key=KEYS.private,
            state=RunState(run_id="run", members=members, vocabulary=64),
            settings=settings,
            journal=journal,
            threads=threads,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.run)
            await publisher.load(LAYOUT)
            yield Desk(publisher, members, journal, offload, disk)
            nursery.cancel_scope.cancel()


# --- merged deltas --------------------------------------------------------------------------------


async def test_a_merged_delta_leads_to_every_fourth_and_every_sixteenth_version(
    autojump_clock,
) -> None:
    async with open_desk(SimDisk()) as desk:
        await desk.publish(17)
        merged = {(0, 4), (0, 16), (4, 8), (8, 12), (12, 16)}
        assert desk.links(merged=True) == merged
        assert set(desk.told("delta.merged")) == merged
        versions, size = await desk.follow(0)
        assert versions == [16]
        singles = sum(link.wire_bytes for link in desk.publisher._catalogue.links if link.is_step)
        assert size < singles / 3
        assert (await desk.follow(5))[0] == [6, 7, 8, 12, 16]


async def test_merged_deltas_are_in_no_figure_and_hasten_no_anchor(autojump_clock) -> None:
    async with open_desk(SimDisk()) as plain, open_desk(SimDisk(), skip_spans=[]) as without:
        for desk in (plain, without):
            await desk.publish(40, walk(40, 3e-7))
        assert without.links(merged=True) == set()
        assert plain.links(merged=True) != set()
        assert plain.publisher.statistics() == without.publisher.statistics()
        assert plain.publisher.statistics().deltas == 39

        def made(desk: Desk) -> list[tuple[object, ...]]:
            events = desk.journal.named("version.published")
            names = ("version", "anchor_bytes", "delta_bytes")
            return [tuple(event.fields[name] for name in names) for event in events]

        assert made(plain) == made(without)
        assert sum(anchor is not None for _, anchor, _ in made(plain)) > 2


async def test_a_version_is_out_before_its_merged_delta_is_begun_and_the_next_does_not_wait(
    autojump_clock,
) -> None:
    async with open_desk(SimDisk()) as desk:
        await desk.publish(4)
        await desk.publisher.publish(bytearray(STATES[4]), Step(4), Generation(0))
        assert (await desk.follow(3))[0] == [4]
        assert desk.links(merged=True) == set()
        desk.offload.holds = True
        await trio.testing.wait_all_tasks_blocked()
        assert desk.offload.held == 1, "the merged delta is being encoded"
        desk.offload.holds = False
        await desk.publish(5)
        assert (await desk.follow(4))[0] == [5, 6, 7, 8, 9]
        assert desk.links(merged=True) == set(), "one at a time"
        assert desk.told("delta.merge_skipped") == [(4, 8)], "nobody had time for it before 9"
        desk.offload.go.set()
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(1.0)
        assert desk.links(merged=True) == {(0, 4)}


async def test_a_publication_that_follows_at_once_is_made_instead_of_merged_deltas(
    autojump_clock,
) -> None:
    async with open_desk(SimDisk()) as desk:
        await desk.publish(16)
        for version in (16, 17):
            await desk.publisher.publish(bytearray(STATES[version]), Step(version), Generation(0))
        assert desk.told("delta.merge_skipped") == [(12, 16), (0, 16)]
        await desk.publish(3)
        assert (16, 20) in desk.links(merged=True)


async def test_a_merged_delta_that_is_no_shorter_than_what_leads_there_is_not_kept(
    autojump_clock,
) -> None:
    async with open_desk(SimDisk()) as desk:
        await desk.publish(5, strangers(5))
        (skipped,) = desk.journal.named("delta.merge_skipped")
        assert (skipped.fields["base"], skipped.fields["version"]) == (0, 4)
        assert skipped.fields["detail"] == NO_SHORTER
        assert desk.links(merged=True) == set()
        assert len(await desk.disk.blobs().names()) == len(desk.links())


# --- anchors --------------------------------------------------------------------------------------


async def test_where_everything_has_changed_the_anchor_takes_the_deltas_place(
    autojump_clock,
) -> None:
    states = strangers(3)
    near = bytearray(states[2])
    near[0] ^= 1
    states.append(bytes(near))
    async with open_desk(SimDisk(), skip_spans=[]) as desk:
        await desk.publish(4, states)
        made = [
            (entry.fields["delta_bytes"] is None, entry.fields["anchor_bytes"] is None)
            for entry in desk.journal.named("version.published")
        ]
        assert made == [(True, False), (True, False), (True, False), (False, True)]
        assert desk.publisher.statistics().deltas == 1
        path = await desk.publisher.path(ANN, Version(0), 0.0)
        headers = [desk.publisher._catalogue.open(signed) for signed in path]
        assert [(h.base_version, h.version) for h in headers] == [(None, 2), (2, 3)]


async def test_nobody_waits_for_an_anchor_that_joiners_will_need(autojump_clock) -> None:
    async with open_desk(SimDisk(), skip_spans=[]) as desk, trio.open_nursery() as nursery:
        while len([base for base, _ in desk.links() if base is None]) < 2:
            await desk.publish()
        due = desk.publisher._state.latest
        assert due is not None
    async with open_desk(SimDisk(), skip_spans=[]) as desk, trio.open_nursery() as nursery:
        await desk.publish(due)
        desk.offload.anchors_wait = True
        nursery.start_soon(desk.publish)
        await trio.sleep(1.0)
        assert (await desk.follow(due - 1))[0] == [due], "the delta is out"
        assert (None, due) not in desk.links()
        desk.offload.go.set()
        await trio.sleep(1.0)
        assert (None, due) in desk.links()
        (entry,) = desk.journal.named("version.published")[-1:]
        assert entry.fields["anchor_bytes"] is not None


# --- what is kept ---------------------------------------------------------------------------------


async def test_what_a_slow_member_was_told_stays_until_it_says_that_it_got_there(
    autojump_clock,
) -> None:
    async with open_desk(SimDisk(), spare_bytes=0) as desk:
        await desk.publish(3)
        desk.beat(None)
        path = await desk.publisher.path(ANN, None, 0.0)
        for _ in range(20):
            await desk.publish(3)
            desk.beat(None)
        assert {(None, 0), (0, 1), (1, 2)} <= desk.links()
        for signed in path:
            assert desk.payload(signed)
        desk.beat(1)
        await desk.publish()
        assert (None, 0) not in desk.links()
        assert (1, 2) in desk.links()
        desk.beat(62)
        await desk.publish()
        assert min(version for _, version in desk.links()) > 40, "nobody needs the past"


async def test_what_a_member_leaves_behind_is_forgotten_with_it(autojump_clock) -> None:
    async with open_desk(SimDisk(), spare_bytes=0) as desk:
        await desk.publish(3)
        desk.beat(None)
        await desk.publisher.path(ANN, None, 0.0)
        desk.members.on_time(trio.current_time() + 100.0)
        await desk.publish(60)
        assert (None, 0) not in desk.links()


@pytest.mark.parametrize(("spare_bytes", "anchors_held"), [(0, 3), (None, 3 + SPARE_ANCHORS)])
async def test_what_stays_for_those_who_are_away_is_a_matter_of_bytes(
    autojump_clock, spare_bytes, anchors_held
) -> None:
    async with open_desk(SimDisk(), spare_bytes=spare_bytes) as desk:
        await desk.publish(100)
        joiner = (await desk.follow(None))[1]
        versions, size = await desk.follow(60)
        assert versions[-1] == 99
        if spare_bytes == 0:
            assert size == joiner
        else:
            assert size < joiner / 2
        held = sum(link.wire_bytes for link in desk.publisher._catalogue.links)
        anchor_bytes = desk.publisher.statistics().anchor_bytes
        assert held < anchors_held * anchor_bytes
        assert len(await desk.disk.blobs().names()) == len(desk.publisher._catalogue.links)


# --- the next life --------------------------------------------------------------------------------


async def test_after_a_restart_merged_deltas_are_served_again_and_made_from_the_next_bases(
    autojump_clock,
) -> None:
    disk = SimDisk()
    async with open_desk(disk) as desk:
        await desk.publish(10)
        before, figures = desk.links(), desk.publisher.statistics()
    async with open_desk(disk) as desk:
        assert desk.links() == before
        assert (4, 8) in before
        assert desk.publisher.statistics() == figures
        assert (await desk.follow(0))[0] == [4, 8, 9]
        await desk.publish(11)
        merged = desk.links(merged=True) - set(before)
        assert merged == {(12, 16), (16, 20)}, "of 8 and 0 the bits were lost with the memory"


async def test_a_restart_at_a_base_holds_its_bits_again(autojump_clock) -> None:
    disk = SimDisk()
    async with open_desk(disk) as desk:
        await desk.publish(17)
    async with open_desk(disk) as desk:
        await desk.publish(16)
        assert {(16, 20), (16, 32)} <= desk.links(merged=True)


@pytest.mark.parametrize("stops", [1, 6, 17, 31])
async def test_a_restart_changes_nothing_about_when_anchors_are_made(
    autojump_clock, stops: int
) -> None:
    made: list[list[int]] = []
    for cut in ([40], [stops, 40 - stops]):
        disk, anchors = SimDisk(), []
        for count in cut:
            async with open_desk(disk) as desk:
                await desk.publish(count)
                anchors += [
                    entry.fields["version"]
                    for entry in desk.journal.named("version.published")
                    if entry.fields["anchor_bytes"] is not None
                ]
        made.append(anchors)
    assert made[0] == made[1]
    assert len(made[0]) > 2


@pytest.mark.parametrize("also_its_end", [False, True])
async def test_a_damaged_merged_delta_is_made_again_or_dropped_as_any_other(
    autojump_clock, also_its_end: bool
) -> None:
    disk = SimDisk()
    async with open_desk(disk) as desk:
        await desk.publish(10)
        names = {
            (link.base_version, link.version): blob_name(link.manifest_id)
            for link in desk.publisher._catalogue.links
        }
    spoilt = [(4, 8)]
    if also_its_end:  # then nothing but the damaged ones led to version 8
        spoilt += [link for link in names if link[1] == 8 and link != (4, 8)]
    whole = dict(disk._blobs)
    for link in spoilt:
        content = bytearray(disk._blobs[names[link]])
        content[-1] ^= 1
        disk._blobs[names[link]] = bytes(content)
    async with open_desk(disk) as desk:
        corrupt = desk.journal.named("payload.corrupt")
        assert len(corrupt) == len(spoilt)
        if not also_its_end:
            assert len(desk.journal.named("payload.mended")) == 1
            assert disk._blobs[names[4, 8]] == whole[names[4, 8]]
            assert (await desk.follow(4))[0] == [8, 9]
        else:
            assert (4, 8) not in desk.links()
            assert desk.journal.named("payload.dropped")
            await desk.publish()
            versions, _ = await desk.follow(4)
            assert versions[-1] == 10


async def test_nothing_is_forgotten_before_the_members_of_the_last_life_can_be_heard(
    autojump_clock,
) -> None:
    disk = SimDisk()
    async with open_desk(disk, spare_bytes=0) as desk:
        await desk.publish(2)
        desk.beat(1)
        await desk.publish(10)
        assert (1, 2) in desk.links(merged=False)
    async with open_desk(disk, spare_bytes=0) as desk:
        await desk.publish(10)
        assert (1, 2) in desk.links(merged=False), "who held 1 was not heard yet"
        await trio.sleep(RETURN_S)
        await desk.publish()
        assert (1, 2) not in desk.links(merged=False)
        assert len(desk.links(merged=False)) >= VERSIONS_KEPT


# --- bytes ----------------------------------------------------------------------------------------


async def test_threads_change_no_byte(autojump_clock) -> None:
    blobs = []
    for threads in (1, 3):
        disk = SimDisk()
        async with open_desk(disk, threads=threads) as desk:
            await desk.publish(9)
        blobs.append(disk._blobs)
    assert blobs[0] == blobs[1]


async def test_only_the_newest_state_itself_is_what_was_published(autojump_clock) -> None:
    async with open_desk(SimDisk()) as desk:
        publisher = desk.publisher
        assert not publisher.has_published(None)
        made = [bytearray(state) for state in STATES[:2]]
        for version, bits in enumerate(made):
            await publisher.publish(bits, Step(version), Generation(0))
            assert publisher.has_published(bits)
        assert not publisher.has_published(made[0])
        assert not publisher.has_published(bytearray(made[1]))


async def test_changes_that_somebody_has_found_are_used_and_change_no_byte(autojump_clock) -> None:
    asked: list[int] = []

    def find(sequence, first: int, count: int) -> Found:
        asked.append(count)
        old, new = (np.frombuffer(state, "<u2") for state in STATES[:2])
        return kernels.find(DTYPES["bf16"], old[first : first + count], new[first : first + count])

    blobs = []
    for finder in (None, find):
        disk = SimDisk()
        async with open_desk(disk) as desk:
            await desk.publish()
            await desk.publisher.publish(bytearray(STATES[1]), Step(1), Generation(0), finder)
        blobs.append(disk._blobs)
    assert blobs[0] == blobs[1]
    assert asked == [LAYOUT.total_bytes // 2]
