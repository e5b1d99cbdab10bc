"""Payloads on a damaged disk: found, mended from others, or dropped; never kept as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from coordinator.book import Book
from coordinator.payloads import PayloadStore, blob_name
from coordinator.schema import MIGRATIONS, PayloadRow, VersionRow
from echo2p2p.ids import Digest, Generation, ManifestId, RunId, Step, Version
from echo2p2p.net.trust import RunKeys
from echo2p2p.testing.disk import SimBlobs, SimDisk
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import InlineOffload, SimEntropy
from echo2p2p.weights import anchor, chunks, delta
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import build_header, manifest_id
from echo2p2p.weights.policy import QUICKEST, SMALLEST, FormPolicy
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import ManifestHeader, Signed
from echo2p2p.wire.signing import open_record, sign_record

LAYOUT = plan_layout([("weight", "bf16", (64, 64), ())])
KEYS = RunKeys.create(SimEntropy(1))


def states(count: int) -> list[bytearray]:
    """Return the states of so many versions, each near the one before."""
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 2**15, LAYOUT.total_bytes // 2, dtype=np.uint16)
    made = []
    for _ in range(count):
        bits = bits.copy()
        bits[rng.integers(0, bits.size, 40)] ^= 1
        made.append(bytearray(bits.tobytes()))
    return made


STATES = states(5)


class Shelf:
    """A book and blobs with published payloads."""

    def __init__(self, book: Book, blobs: SimBlobs) -> None:
        self.book = book
        self.blobs = blobs
        self.journal = TraceJournal()
        self.store = PayloadStore(
            book=book,
            blobs=blobs,
            offload=InlineOffload(),
            layout=LAYOUT,
            open_manifest=self.open,
            journal=self.journal,
        )
        self.names: dict[str, ManifestId] = {}

    def open(self, signed: Signed) -> ManifestHeader:
        return open_record(signed, KEYS.public_key, ManifestHeader)

    async def publish(
        self, name: str, *, forms: FormPolicy = SMALLEST, wrong: bool = False
    ) -> None:
        """Publish ``a3``, the anchor of version 3, or ``d3``, the delta that leads to it.

        Args:
            name: See above.
            forms: Of a delta.
            wrong: Whether a delta is from another base than it says.
        """
        version = Version(int(name[1:]))
        state = STATES[version]
        base = None
        if name[0] == "a":
            payload = anchor.encode_anchor(LAYOUT, state)
        else:
            before = STATES[version - 1]
            truly = STATES[0] if wrong else before
            payload = delta.encode_delta(LAYOUT, truly, state, policy=forms)
            base = (Version(version - 1), Digest(state_digest(LAYOUT, before)))
        header = build_header(
            content="model",
            run_id=RunId("run"),
            version=version,
            chain_id="chain",
            step=Step(version),
            generation=Generation(0),
            base=base,
            result_digest=state_digest(LAYOUT, state),
            layout=LAYOUT,
            chunked=chunks.split(payload, 1024),
        )
        signed = sign_record(KEYS.private, header)
        identity = manifest_id(signed)
        await self.blobs.put(blob_name(identity), payload)
        size = header.index_bytes + header.payload_bytes
        row = PayloadRow(identity, version, None if base is None else base[0], signed, size)
        await self.book.add_payload(row)
        self.names[name] = identity

    async def damage(self, name: str, how: str) -> None:
        blob = blob_name(self.names[name])
        content = bytearray(await self.blobs.get(blob))
        match how:
            case "flipped":
                content[len(content) // 2] ^= 1
            case "cut":
                del content[-1:]
            case "empty":
                content.clear()
            case "longer":
                content += b"\0"
        if how == "missing":
            await self.blobs.delete(blob)
        else:
            await self.blobs.put(blob, content)

    async def load(self) -> list[str]:
        """Load; return what there is then, and check that disk and rows agree with it."""
        kept = await self.store.load()
        by_id = {identity: name for name, identity in self.names.items()}
        names = [by_id[item.link.manifest_id] for item in kept]
        rows = {ManifestId(row.manifest_id) for row in await self.book.payloads()}
        assert rows == {self.names[name] for name in names}
        assert await self.blobs.names() == sorted(blob_name(identity) for identity in rows)
        assert all(item.assembly.complete for item in kept)
        for item in kept:
            on_disk = await self.blobs.get(blob_name(item.link.manifest_id))
            assert on_disk == bytes(item.assembly.payload())
        return names

    def told(self, event: str) -> list[object]:
        return [entry.fields["version"] for entry in self.journal.named(event)]


@asynccontextmanager
async def open_shelf(*names: str) -> AsyncIterator[Shelf]:
    disk = SimDisk()
    async with disk.open_store("run", MIGRATIONS) as store:
        book = Book(store)
        await book.load()
        for version in range(5):
            row = VersionRow(Version(version), Step(version), Generation(0), dead=False)
            await book.add_version(row, [])
        shelf = Shelf(book, disk.blobs())
        for name in names:
            await shelf.publish(name)
        yield shelf


ALL = ["a0", "d1", "d2", "a3", "d3", "d4"]


async def test_what_is_whole_is_kept_in_order_of_version(autojump_clock) -> None:
    async with open_shelf("d4", "d3", "a3", "a0", "d2", "d1") as shelf:
        assert await shelf.load() == ["a0", "d1", "d2", "a3", "d3", "d4"]
        assert shelf.journal.entries == []
        kept = await shelf.store.load()
        for version, state in enumerate(STATES):
            assert await shelf.store.state(kept, Version(version)) == state


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "longer", "missing"])
@pytest.mark.parametrize("name", ["a3", "d3"])
async def test_a_payload_whose_ends_can_be_had_from_others_is_made_again(
    autojump_clock, name: str, how: str
) -> None:
    async with open_shelf(*ALL) as shelf:
        await shelf.damage(name, how)
        assert await shelf.load() == ALL
        assert shelf.told("payload.corrupt") == shelf.told("payload.mended") == [3]
        shelf.journal.entries.clear()
        assert await shelf.load() == ALL, "it is on disk"
        assert shelf.journal.entries == []


@pytest.mark.parametrize(
    ("name", "left", "reachable"),
    [
        ("a0", ["d1", "d2", "a3", "d3", "d4"], [3, 4]),
        ("d1", ["a0", "d2", "a3", "d3", "d4"], [0, 3, 4]),
        ("d4", ["a0", "d1", "d2", "a3", "d3"], [0, 1, 2, 3]),
    ],
)
async def test_a_payload_that_nothing_replaces_is_dropped(
    autojump_clock, name: str, left: list[str], reachable: list[int]
) -> None:
    async with open_shelf(*ALL) as shelf:
        await shelf.damage(name, "flipped")
        assert await shelf.load() == left
        assert shelf.told("payload.dropped") == [int(name[1:])]
        kept = await shelf.store.load()
        got = [v for v in range(5) if await shelf.store.state(kept, Version(v)) is not None]
        assert got == reachable


async def test_a_delta_of_the_quick_forms_is_made_again_in_those(autojump_clock) -> None:
    async with open_shelf("a0", "a3") as shelf:
        before, after = STATES[3], bytearray(STATES[4])
        assert delta.encode_delta(LAYOUT, before, after) != delta.encode_delta(
            LAYOUT, before, after, policy=QUICKEST
        )
        await shelf.publish("a4")
        await shelf.publish("d4", forms=QUICKEST)
        await shelf.damage("d4", "flipped")
        assert await shelf.load() == ["a0", "a3", "a4", "d4"]
        assert shelf.told("payload.mended") == [4]


async def test_a_delta_from_another_base_than_it_says_leads_nowhere(autojump_clock) -> None:
    async with open_shelf("a0", "d1", "d2") as shelf:
        await shelf.publish("d3", wrong=True)
        await shelf.publish("d4")
        assert await shelf.load() == ["a0", "d1", "d2", "d3", "d4"], "its bytes are as signed"
        kept = await shelf.store.load()
        for version in (3, 4):
            assert await shelf.store.state(kept, Version(version)) is None, "found by its digest"
        assert await shelf.store.state(kept, Version(2)) == STATES[2]


async def test_a_gap_leads_nowhere(autojump_clock) -> None:
    async with open_shelf("a0", "d1", "d3", "d4") as shelf:
        kept = await shelf.store.load()
        assert [await shelf.store.state(kept, Version(v)) is None for v in range(5)] == [
            False,
            False,
            True,
            True,
            True,
        ]


async def test_two_damaged_payloads_do_not_mend_each_other(autojump_clock) -> None:
    async with open_shelf(*ALL) as shelf:
        await shelf.damage("a3", "flipped")
        await shelf.damage("d3", "flipped")
        assert await shelf.load() == ["a0", "d1", "d2", "d4"]


async def test_blobs_that_no_row_speaks_of_are_deleted_and_others_are_left(autojump_clock) -> None:
    async with open_shelf("a0") as shelf:
        await shelf.blobs.put(blob_name(ManifestId(bytes(16))), b"left by a crash")
        assert await shelf.load() == ["a0"]
        await shelf.blobs.put("something-else", b"not ours")
        await shelf.store.load()
        assert "something-else" in await shelf.blobs.names()


async def test_a_manifest_that_is_damaged_itself_cannot_be_mended(autojump_clock) -> None:
    async with open_shelf(*ALL) as shelf:
        other = RunKeys.create(SimEntropy(2))
        shelf.store._open_manifest = lambda signed: open_record(
            signed,
            other.public_key if manifest_id(signed) == shelf.names["a3"] else KEYS.public_key,
            ManifestHeader,
        )
        assert await shelf.load() == ["a0", "d1", "d2", "d3", "d4"]
