"""Damaged disks: noticed at the start, told in one line, mended where that can be."""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from coordinator.book import Book
from coordinator.config import Settings
from coordinator.schema import MIGRATIONS, DamagedRow, OpenLease, QueuedRow
from echo2p2p.errors import StoreError
from echo2p2p.ids import Incarnation, LeaseId, PeerId
from echo2p2p.net.store import PAGE_BYTES, SqliteStore
from echo2p2p.rollouts.ledger import Place
from echo2p2p.rollouts.trajectory import Reason
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.examples import EXAMPLES
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Lease, Upload
from scenarios.middle import open_bench, right_answers
from scenarios.world import COORDINATOR, PeerSpec, World, WorldSpec

LEASE = next(example for example in EXAMPLES if isinstance(example, Lease))
UPLOAD = next(example for example in EXAMPLES if isinstance(example, Upload))
PEER = PeerId("p")


def lease(name: str) -> Lease:
    return Lease(
        **{field: getattr(LEASE, field) for field in Lease.__struct_fields__} | {"lease_id": name}
    )


# --- the database -----------------------------------------------------------------------------


async def fill(path: Path, count: int, look: Callable[[str], None] = lambda _: None) -> None:
    """Issue and accept so many leases, one after the other; ``look`` sees each acknowledgement."""
    async with SqliteStore.open(path, MIGRATIONS) as store:
        book = Book(store)
        await book.load()
        for number in range(count):
            name = f"lease-{number:04d}"
            await book.issue(PEER, Incarnation(1), [(lease(name), number)])
            assert await book.accept(LeaseId(name), LEASE.samples, codec.encode(UPLOAD))
            look(name)


async def opened(path: Path) -> Book:
    async with SqliteStore.open(path, MIGRATIONS) as store:
        book = Book(store)
        await book.load()
        await book.queued()
        return book


async def refused(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        await opened(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value) or "database" in str(caught.value)
    return str(caught.value)


async def test_a_damaged_page_is_found_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    await fill(path, 240)
    whole = path.read_bytes()
    rng = random.Random(3)
    pages = len(whole) // PAGE_BYTES
    assert pages > 10
    found = 0
    for page in range(pages):
        damaged = bytearray(whole)
        damaged[page * PAGE_BYTES : page * PAGE_BYTES + 64] = rng.randbytes(64)
        path.write_bytes(damaged)
        detail = await refused(path)
        assert "put a copy" in detail
        found += 1
    assert found == pages
    path.write_bytes(whole)
    assert (await opened(path)).ledger.statistics().queued == 240 * LEASE.samples


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.99])
async def test_a_database_that_was_cut_short_is_found_at_the_start(
    tmp_path: Path, cut: float
) -> None:
    path = tmp_path / "run.sqlite"
    await fill(path, 240)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * cut)])
    assert "damaged" in await refused(path)


def change(path: Path, assignment: str) -> None:
    """Change the second lease's row behind the coordinator's back."""
    rows = sqlite3.connect(path)
    with rows:
        rows.execute(f"UPDATE leases SET {assignment} WHERE rowid = 2")
    rows.close()


BEHEADED = "upload = CAST(x'81' || substr(upload, 2) AS BLOB)"


async def test_a_wrong_byte_in_a_message_without_a_digest_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    await fill(path, 3)
    change(path, f"{BEHEADED}, upload_digest = NULL")
    assert "damaged Upload" in await refused(path)


def one_byte(column: str, before: bytes, after: bytes) -> str:
    """Return what replaces some bytes of a column by as many others; the message stays whole."""
    assert len(before) == len(after)
    found = f"instr({column}, x'{before.hex()}')"
    rest = f"substr({column}, {found} + {len(before)})"
    return (
        f"{column} = CAST(substr({column}, 1, {found} - 1) || x'{after.hex()}' || {rest} AS BLOB)"
    )


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


TOKENS, PROMPT = UPLOAD.samples[0].tokens.data, LEASE.prompt.data
WHOLE_BUT_WRONG = {
    "a token": one_byte("upload", TOKENS, flipped(TOKENS)),
    "the prompt": one_byte("lease", PROMPT, flipped(PROMPT)),
    "the item's seed": "seed = seed + 1",
    "the message": BEHEADED,
}


@pytest.mark.parametrize("what", WHOLE_BUT_WRONG)
async def test_an_upload_that_the_disk_has_changed_is_told_from_those_that_are_sound(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "run.sqlite"
    await fill(path, 3)
    change(path, WHOLE_BUT_WRONG[what])
    async with SqliteStore.open(path, MIGRATIONS) as store:
        first, second, third = await Book(store).queued()
    assert (first.lease.lease_id, third.upload) == ("lease-0000", UPLOAD)
    assert isinstance(second, DamagedRow)
    assert (second.lease_id, second.peer_id) == ("lease-0001", PEER)
    assert second.samples == LEASE.samples


async def test_what_the_disk_has_changed_is_counted_and_its_prompt_is_handed_out_again(
    autojump_clock: object,
) -> None:
    disk = SimDisk()
    async with open_bench(disk) as bench:
        member = await bench.ready("p")
        leases = await bench.lease(member, count=3)
        for answered in leases[:2]:
            await bench.upload(member, right_answers(answered, member.incarnation))
        for place, column in ((0, "upload"), (2, "lease")):
            await bench.book._store.transact(
                lambda rows, place=place, column=column: (
                    rows.execute(
                        f"UPDATE leases SET {column}_digest = x'00' WHERE lease_id = ?",
                        (leases[place].lease_id,),
                    ).rowcount
                )
            )
    async with open_bench(disk, seed=1) as bench:
        damaged = bench.journal.named("lease.damaged")
        assert {(entry.fields["lease"], entry.fields["was"]) for entry in damaged} == {
            (leases[0].lease_id, "queued"),
            (leases[2].lease_id, "in_flight"),
        }
        balance = bench.book.ledger.statistics()
        assert (balance.queued, balance.in_flight, balance.rejected) == (2, 0, {"damaged": 4})
        assert balance == await bench.book.recount()
        again = await bench.lease(await bench.ready("q"), count=2)
        assert sorted(bytes(one.prompt.data) for one in again) == sorted(
            bytes(leases[place].prompt.data) for place in (0, 2)
        )


async def test_so_is_a_lease_that_its_peer_has_not_answered_yet(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    async with SqliteStore.open(path, MIGRATIONS) as store:
        leases = [(lease(f"lease-{number}"), number) for number in range(3)]
        await Book(store).issue(PEER, Incarnation(1), leases)
    change(path, WHOLE_BUT_WRONG["the prompt"])
    async with SqliteStore.open(path, MIGRATIONS) as store:
        found = await Book(store).open_leases()
    assert [type(row) for row in found] == [OpenLease, DamagedRow, OpenLease]


async def test_a_folder_of_a_coordinator_without_digests_opens(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    async with SqliteStore.open(path, MIGRATIONS[:1]) as store:
        data = codec.encode(LEASE), codec.encode(UPLOAD)
        insert = "INSERT INTO leases VALUES ('x', 'p', 1, 7, 2, ?, 'queued', NULL, NULL, ?)"
        await store.transact(lambda rows: rows.execute(insert, data).rowcount)
    async with SqliteStore.open(path, MIGRATIONS) as store:
        assert await Book(store).queued() == [QueuedRow(LEASE, PEER, 7, UPLOAD)]


def torn(path: Path, to: Path, cut_bytes: int, flip: int | None = None) -> None:
    """Copy a database as a power cut may leave it: the end of its log is missing or wrong."""
    shutil.copyfile(path, to)
    log = bytearray(path.with_name(f"{path.name}-wal").read_bytes()[:cut_bytes])
    if flip is not None and flip < len(log):
        log[flip] ^= 1
    to.with_name(f"{to.name}-wal").write_bytes(log)


async def test_a_log_cut_anywhere_leaves_whole_transactions_and_a_ledger_that_balances(
    tmp_path: Path,
) -> None:
    path, log = tmp_path / "run.sqlite", tmp_path / "run.sqlite-wal"
    copies = tmp_path / "copies"
    copies.mkdir()
    sizes: list[tuple[str, int]] = []
    rng = random.Random(8)

    async with SqliteStore.open(path, MIGRATIONS) as keeper:
        # A reader keeps the log from being folded into the database when the writer closes.
        reader = sqlite3.connect(path)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM run").fetchall()
        book = Book(keeper)
        await book.load()
        for number in range(40):
            name = f"lease-{number:04d}"
            await book.issue(PEER, Incarnation(1), [(lease(name), number)])
            if number % 3 == 0:
                await book.reject([(LeaseId(name), LEASE.samples)], Place.IN_FLIGHT, Reason.STALE)
            else:
                assert await book.accept(LeaseId(name), LEASE.samples, codec.encode(UPLOAD))
            sizes.append((name, log.stat().st_size))
        cuts = [0, 31, 32, log.stat().st_size, *(rng.randrange(sizes[-1][1]) for _ in range(40))]
        for number, cut in enumerate(cuts):
            flip = rng.randrange(sizes[-1][1]) if number % 2 else None
            torn(path, copies / f"{number}.sqlite", cut, flip)
        reader.close()

    for number, cut in enumerate(cuts):
        async with SqliteStore.open(copies / f"{number}.sqlite", MIGRATIONS) as store:
            found = Book(store)
            await found.load()
            balance = found.ledger.statistics()
            assert balance.balances
            assert balance == await found.recount()
            there = {row.lease.lease_id for row in await found.queued()}
        names = sorted(there)
        accepted = [name for position, (name, _) in enumerate(sizes) if position % 3]
        assert names == accepted[: len(names)], "a beginning of the history, without gaps"
        if number % 2 == 0:
            safe = {name for name, size in sizes if size <= cut}
            assert safe & set(accepted) <= there


# --- payloads ---------------------------------------------------------------------------------

STEPS = 8
SETTINGS = Settings.model_validate(
    {
        "run": {"steps": STEPS, "seed": 3},
        "server": {"host": COORDINATOR},
        "rollouts": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "staleness_budget": 1,
            "tokens_max": 8,
        },
        "learner": {"checkpoint_every_steps": 2},
        "weights": {"chunk_bytes_min": 1024},
    }
)


def play(harm: Callable[[World], None], *, at_version: int) -> World:
    """Let a run lose power when a version is out, do harm to its disk, and let it go on."""
    peers = (PeerSpec("ann", seconds_per_token=0.02), PeerSpec("bob", seconds_per_token=0.02))
    spec = WorldSpec(settings=SETTINGS, peers=peers, learner_start_s=1.0, learner_step_s=0.5)
    made: list[World] = []

    async def story() -> None:
        world = World(spec, seed=11)
        made.append(world)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.network.run)
            for name in ("ann", "bob"):
                nursery.start_soon(world.run_peer, name)
            with trio.CancelScope() as scope, trio.fail_after(100.0):
                async with trio.open_nursery() as first:
                    first.start_soon(world.run_coordinator)
                    await world.wait_event("version.applied", version=at_version)
                    scope.cancel()
            world.disk.crash()
            harm(world)
            with trio.fail_after(200.0):
                await world.run_coordinator()
            nursery.cancel_scope.cancel()

    run_virtual(story, seed=2)
    (world,) = made
    assert world.breaches == []
    assert world.summary["outcome"] == "finished"
    counts = world.summary["trajectories"]
    assert (counts["balances"], counts["recount_agrees"]) == (True, True)
    assert counts["trained"] == STEPS * SETTINGS.rollouts.batch
    assert world.trace.named("version.refused") == [], "nothing wrong was ever served"
    return world


def flip(world: World, blob: str) -> None:
    content = bytearray(world.disk._blobs[blob])
    content[len(content) // 2] ^= 1
    world.disk._blobs[blob] = bytes(content)


def largest(world: World) -> str:
    return max(world.disk._blobs, key=lambda name: len(world.disk._blobs[name]))


def published(world: World) -> list[tuple[int, bool]]:
    """Return version and whether an anchor was made, in order."""
    return [
        (entry.fields["version"], entry.fields["anchor_bytes"] is not None)
        for entry in world.trace.named("version.published")
    ]


@pytest.mark.parametrize("which", ["anchor", "newest delta", "all"])
def test_without_a_way_to_the_newest_state_the_chain_goes_on_with_an_anchor(which: str) -> None:
    def harm(world: World) -> None:
        match which:
            case "anchor":
                flip(world, largest(world))
            case "newest delta":
                flip(world, list(world.disk._blobs)[-1])
            case "all":
                world.disk._blobs.clear()

    world = play(harm, at_version=3)
    assert world.trace.named("payload.corrupt")
    (lost,) = world.trace.named("chain.lost")
    numbers = published(world)
    assert [version for version, _ in numbers] == list(range(len(numbers))), "no number twice"
    assert numbers[lost.fields["version"] + 1] == (lost.fields["version"] + 1, True)
    after = [entry for entry in world.trace.named("version.applied") if entry.at_s > lost.at_s]
    assert {entry.fields["node"] for entry in after} == {"ann", "bob"}
    assert after[0].fields["anchor"], "whoever follows takes the anchor, once"
    assert sum(entry.fields["anchor"] for entry in after) == 2
    assert [entry.fields["detail"] for entry in world.trace.named("membership.lost")] == []


def test_a_whole_disk_needs_no_new_anchor() -> None:
    world = play(lambda _: None, at_version=3)
    assert world.trace.named("chain.lost") == []
    assert [anchor for _, anchor in published(world)].count(True) == 1
    assert re.fullmatch("payload-[0-9a-f]{32}", largest(world))
