"""The book over both stores: fates, counters against recounts, races, crashes."""

import sqlite3
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import book as book_module
from coordinator.book import Book
from coordinator.schema import MIGRATIONS, MemberRow, PayloadRow, VersionRow
from echo2p2p.errors import StoreError
from echo2p2p.ids import Generation, Incarnation, LeaseId, PeerId, Step, Version
from echo2p2p.net.ports import Store
from echo2p2p.net.store import SqliteStore
from echo2p2p.rollouts.ledger import Balance, Place
from echo2p2p.rollouts.trajectory import Reason
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.disk import SimDisk
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.messages import Lease, Sampling, Signed, Upload

Open = Callable[[], AbstractAsyncContextManager[Store]]
Story = Callable[[Open], Awaitable[None]]

A, B = PeerId("a"), PeerId("b")
ONE = Incarnation(1)


def on_sqlite(story: Story) -> None:
    """Run a story with a function that opens the same file again and again."""

    async def main(folder: str) -> None:
        with trio.fail_after(30):
            await story(lambda: SqliteStore.open(Path(folder) / "state.db", MIGRATIONS))

    with tempfile.TemporaryDirectory() as folder:
        trio.run(main, folder)


def on_simulation(story: Story) -> None:
    """Run a story in virtual time, with the same disk again and again."""

    async def main() -> None:
        disk = SimDisk()
        await story(lambda: disk.open_store("state", MIGRATIONS))

    run_virtual(main, seed=1)


FORMS = {"sqlite": on_sqlite, "simulated": on_simulation}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[[Story], None]:
    return FORMS[request.param]


def lease(name: str, samples: int = 2) -> Lease:
    return Lease(
        lease_id=name,
        kind="train",
        prompt=from_tokens([1, 5]),
        samples=samples,
        seeds=[3] * samples,
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0),
        tokens_max=8,
        stop_ids=[2],
        forced=None,
        version=0,
        deadline_s=60.0,
        affinity=None,
    )


def upload(name: str) -> bytes:
    return codec.encode(Upload(incarnation=1, lease_id=name, samples=[], seconds=1.0))


def named(*names: str, samples: int = 2) -> list[tuple[LeaseId, int]]:
    return [(LeaseId(name), samples) for name in names]


async def issued(store: Store, *names: str) -> Book:
    """Return a book with these leases of A in flight."""
    book = Book(store)
    await book.load()
    await book.issue(A, ONE, [(lease(name), seed) for seed, name in enumerate(names)])
    return book


async def agreed(book: Book) -> Balance:
    """Return the balance, once memory, events and rows agree on it."""
    now = book.ledger.statistics()
    assert now.balances
    assert await book.recount() == now
    fresh = Book(book._store)
    await fresh.load()
    assert fresh.ledger.statistics() == now
    return now


async def by_peers(book: Book) -> dict[PeerId, tuple[dict[str, int], dict[str, int]]]:
    """Return fates and reasons by peer."""
    return {one.peer_id: (one.fates, one.reasons) for one in await book.standings(99)}


# --- the run, members, versions ---------------------------------------------------------------


def test_values_of_the_run_are_replaced_and_survive(form: Callable[[Story], None]) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = Book(store)
            assert await book.get("key") is None
            await book.put("key", b"one")
            await book.put("key", b"two")
        async with open_store() as store:
            assert await Book(store).get("key") == b"two"

    form(story)


def member(incarnation: int, *, live: bool = True) -> MemberRow:
    return MemberRow(A, Incarnation(incarnation), f"box {incarnation}", b"digest", b"body", live)


def test_a_member_keeps_what_it_relayed_in_all_its_lives(form: Callable[[Story], None]) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = Book(store)
            await book.put_member(member(1))
            assert await book.members() == [member(1)]
            await book.end_member(A, ONE, 70)
            await book.end_member(A, ONE, 70)  # is gone already
            await book.put_member(member(2))
            await book.end_member(A, ONE, 7)  # of the last life
            (row,) = await book.members()
            assert (row.incarnation, row.live, row.relayed_bytes) == (2, True, 70)
            await book.end_member(A, Incarnation(2), 5)
            (row,) = await book.members()
            assert (row.name, row.live, row.relayed_bytes) == ("box 2", False, 75)

    form(story)


@pytest.mark.parametrize("lie", [2**53, 2**63, 2**64 - 1])
def test_no_account_of_relayed_bytes_overflows_a_row(
    form: Callable[[Story], None], lie: int
) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = Book(store)
            for incarnation in (1, 2, 3):
                await book.put_member(member(incarnation))
                await book.end_member(A, Incarnation(incarnation), lie)
            (row,) = await book.members()
            assert row.relayed_bytes == 2**53
            await book.put_member(member(4))
            await book.end_member(A, Incarnation(4), -5)
            (row,) = await book.members()
            assert row.relayed_bytes == 2**53

    form(story)


def payload(name: bytes, version: int, base: int | None) -> PayloadRow:
    base_version = None if base is None else Version(base)
    return PayloadRow(name, Version(version), base_version, Signed(body=name, signature=b"s"), 10)


def test_versions_and_their_payloads_are_kept_until_they_are_forgotten(
    form: Callable[[Story], None],
) -> None:
    async def story(open_store: Open) -> None:
        zero = VersionRow(Version(0), Step(0), Generation(0), dead=False)
        one = VersionRow(Version(1), Step(2), Generation(0), dead=False)
        async with open_store() as store:
            book = Book(store)
            await book.add_version(zero, [payload(b"a0", 0, None)])
            await book.add_version(one, [payload(b"d1", 1, 0)])
            await book.add_payload(payload(b"a1", 1, None))
        async with open_store() as store:
            book = Book(store)
            assert await book.versions() == [zero, one]
            assert await book.payloads() == [
                payload(b"a0", 0, None),
                payload(b"a1", 1, None),
                payload(b"d1", 1, 0),
            ]
            await book.forget_payloads([b"a0", b"no such"])
            assert [row.manifest_id for row in await book.payloads()] == [b"a1", b"d1"]
            assert await book.versions() == [zero, one]

    form(story)


def test_a_versions_number_is_never_used_twice_and_nothing_of_the_second_is_kept(
    form: Callable[[Story], None],
) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = Book(store)
            row = VersionRow(Version(0), Step(0), Generation(0), dead=False)
            await book.add_version(row, [])
            with pytest.raises(sqlite3.IntegrityError):
                await book.add_version(row, [payload(b"x", 0, None)])
            assert await book.payloads() == []

    form(story)


# --- fates ------------------------------------------------------------------------------------


def test_a_lease_walks_from_issue_to_training_and_its_body_goes_with_the_checkpoint(
    form: Callable[[Story], None],
) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = await issued(store, "x", "y")
            opened = await book.open_leases()
            assert [item.lease for item in opened] == [lease("x"), lease("y")]
            assert (opened[1].peer_id, opened[1].incarnation, opened[1].seed) == (A, 1, 1)
            assert await book.fate(LeaseId("x")) == (Place.IN_FLIGHT, None, A)
            assert await book.accept(LeaseId("x"), 2, upload("x"))
            assert await book.fate(LeaseId("x")) == (Place.QUEUED, None, A)
            (queued,) = await book.queued()
            assert (queued.lease, queued.peer_id, queued.seed) == (lease("x"), A, 0)
            assert codec.encode(queued.upload) == upload("x")
            assert await book.train(named("x"), Step(1), b"first") == ["x"]
            assert await book.fate(LeaseId("x")) == (Place.TRAINED, None, A)
            assert await book.queued() == []
            assert await bodies(store) == {"x": True, "y": True}
            await book.checkpointed(Step(0))
            assert await bodies(store) == {"x": True, "y": True}
            await book.checkpointed(Step(1))
            assert await bodies(store) == {"x": False, "y": True}
            assert await book.get("checkpoint_step") == b"1"
            assert await agreed(book) == Balance(issued=4, trained=2, queued=0, in_flight=2)

    form(story)


async def bodies(store: Store) -> dict[str, bool]:
    """Return for each lease whether its prompt is still kept."""
    rows = await store.transact(
        lambda rows: rows.execute("SELECT lease_id, length(lease) > 0 FROM leases").fetchall()
    )
    return {str(name): bool(kept) for name, kept in rows}


def test_a_rejected_upload_is_forgotten_but_its_fate_is_not(form: Callable[[Story], None]) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = await issued(store, "x", "y")
            await book.accept(LeaseId("x"), 2, upload("x"))
            assert await book.reject(named("x"), Place.QUEUED, Reason.STALE) == ["x"]
            assert await book.reject(named("y"), Place.IN_FLIGHT, Reason.PEER_GONE) == ["y"]
            assert await book.fate(LeaseId("x")) == (Place.REJECTED, Reason.STALE, A)
            assert await book.fate(LeaseId("z")) is None
            held = await store.transact(
                lambda rows: rows.execute("SELECT count(upload) FROM leases").fetchone()
            )
            assert held == (0,)
            balance = await agreed(book)
            assert balance.rejected == {"peer_gone": 2, "stale": 2}

    form(story)


def test_a_move_from_the_wrong_place_moves_nothing(form: Callable[[Story], None]) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = await issued(store, "x", "y", "z")
            await book.accept(LeaseId("x"), 2, upload("x"))
            before = await agreed(book)
            assert not await book.accept(LeaseId("x"), 2, upload("y"))
            assert not await book.accept(LeaseId("nobody"), 2, upload("y"))
            assert await book.reject(named("x"), Place.IN_FLIGHT, Reason.LEASE_EXPIRED) == []
            assert await book.train(named("y"), Step(1), b"") == []
            assert await agreed(book) == before
            mixed = named("x", "y", "y", "nobody", "z")
            assert await book.reject(mixed, Place.IN_FLIGHT, Reason.UNUSED) == ["y", "z"]
            assert (await agreed(book)).rejected == {"unused": 4}
            (queued,) = await book.queued()
            assert codec.encode(queued.upload) == upload("x")

    form(story)


def test_the_same_upload_ten_times_at_once_is_accepted_once(form: Callable[[Story], None]) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = await issued(store, "x")
            won: list[bool] = []

            async def send() -> None:
                won.append(await book.accept(LeaseId("x"), 2, upload("x")))

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(send)
            assert sorted(won) == [False] * 9 + [True]
            assert await agreed(book) == Balance(issued=2, trained=0, queued=2, in_flight=0)

    form(story)


def test_an_upload_and_the_end_of_its_lease_at_once_have_one_winner(
    form: Callable[[Story], None],
) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            names = [f"l{number}" for number in range(20)]
            book = await issued(store, *names)
            won: dict[str, list[str]] = {name: [] for name in names}

            async def send(name: str) -> None:
                if await book.accept(LeaseId(name), 2, upload(name)):
                    won[name].append("accepted")

            async def end(name: str) -> None:
                if await book.reject(named(name), Place.IN_FLIGHT, Reason.LEASE_EXPIRED):
                    won[name].append("ended")

            async with trio.open_nursery() as nursery:
                for number, name in enumerate(names):
                    first, second = (send, end) if number % 2 else (end, send)
                    nursery.start_soon(first, name)
                    nursery.start_soon(second, name)
            assert all(len(winners) == 1 for winners in won.values())
            accepted = sum(winners == ["accepted"] for winners in won.values())
            assert (await agreed(book)).queued == 2 * accepted

    form(story)


def test_a_call_that_is_cancelled_moves_disk_and_counters_together(
    form: Callable[[Story], None],
) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = await issued(store, "x", "y")
            calls = [
                lambda: book.issue(A, ONE, [(lease("n"), 9)]),
                lambda: book.accept(LeaseId("x"), 2, upload("x")),
                lambda: book.reject(named("y"), Place.IN_FLIGHT, Reason.ABORTED),
                lambda: book.train(named("x"), Step(1), b"r"),
                lambda: book.roll_back(Step(0)),
            ]
            for call in calls:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await call()
                await agreed(book)
            assert (await agreed(book)).rejected == {"aborted": 2, "dead_generation": 2}

    form(story)


# --- checkpoints and rollbacks ----------------------------------------------------------------


def test_a_rollback_rejects_what_lost_steps_consumed_and_kills_their_versions(
    form: Callable[[Story], None],
) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = await issued(store, "a", "b", "c", "d")
            for version, step in enumerate([0, 1, 2, 3]):
                row = VersionRow(Version(version), Step(step), Generation(0), dead=False)
                await book.add_version(row, [])
            for step, name in enumerate("abc"):
                await book.accept(LeaseId(name), 2, upload(name))
                await book.train(named(name), Step(step + 1), name.encode())
            await book.accept(LeaseId("d"), 2, upload("d"))
            assert await book.steps() == [b"a", b"b", b"c"]
            assert await book.roll_back(Step(1)) == 4
            assert await book.steps() == [b"a"]
            assert [row.dead for row in await book.versions()] == [False, False, True, True]
            assert await book.fate(LeaseId("a")) == (Place.TRAINED, None, A)
            for name in "bc":
                dead = (Place.REJECTED, Reason.DEAD_GENERATION, A)
                assert await book.fate(LeaseId(name)) == dead
            assert [row.lease.lease_id for row in await book.queued()] == ["d"]
            balance = await agreed(book)
            assert (balance.trained, balance.queued) == (2, 2)
            assert balance.rejected == {"dead_generation": 4}
            assert await book.roll_back(Step(1)) == 0
            assert await agreed(book) == balance

    form(story)


def test_old_ended_leases_are_archived_and_still_counted(
    form: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book_module, "LEASE_ROWS_KEPT", 2)

    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book = await issued(store, "a", "b", "c", "d", "e", "f")
            await book.put_member(member(1))
            await book.put_member(replace(member(1), peer_id=B))
            await book.issue(B, ONE, [(lease("g", samples=3), 0)])
            for name in "acf":
                await book.accept(LeaseId(name), 2, upload(name))
            await book.train(named("a"), Step(1), b"")
            await book.train(named("c"), Step(2), b"")
            await book.train(named("f"), Step(2), b"")
            await book.reject(named("b"), Place.IN_FLIGHT, Reason.STALE)
            before, by_peer = await agreed(book), await by_peers(book)
            await book.checkpointed(Step(1))
            # `d` and `e` still fly, `c` may still be rolled back, and the two newest rows stay.
            assert sorted(await bodies(store)) == list("cdefg")
            assert await book.fate(LeaseId("a")) is None
            assert await agreed(book) == before
            assert await by_peers(book) == by_peer
            await book.checkpointed(Step(2))
            assert sorted(await bodies(store)) == list("defg")
            await book.reject(named("d"), Place.IN_FLIGHT, Reason.STALE)
            await book.checkpointed(Step(2))
            assert sorted(await bodies(store)) == list("efg")
            assert (await agreed(book)).rejected == {"stale": 4}
            assert await by_peers(book) == {
                A: ({"trained": 6, "rejected": 4, "in_flight": 2}, {"stale": 4}),
                B: ({"in_flight": 3}, {}),
            }

    form(story)


# --- any sequence -----------------------------------------------------------------------------


@dataclass
class Model:
    """What the book should know, kept in the plainest way."""

    fates: dict[str, tuple[PeerId, int, str]] = field(default_factory=dict)
    """Owner, samples, and place or reason."""
    steps: dict[str, int] = field(default_factory=dict)
    """Step that consumed a trained lease."""
    step: int = 0
    checkpoint: int = 0

    def at(self, place: str) -> list[str]:
        return [name for name, (_, _, fate) in self.fates.items() if fate == place]

    def move(self, names: list[str], source: str, target: str) -> list[str]:
        moved = [name for name in dict.fromkeys(names) if self.fates[name][2] == source]
        for name in moved:
            owner, samples, _ = self.fates[name]
            self.fates[name] = (owner, samples, target)
        return moved

    def pairs(self, names: list[str]) -> list[tuple[LeaseId, int]]:
        return [(LeaseId(name), self.fates[name][1]) for name in names]

    def balance(self) -> Balance:
        count = dict[str, int]()
        for _, samples, fate in self.fates.values():
            count[fate] = count.get(fate, 0) + samples
        return Balance(
            issued=sum(count.values()),
            trained=count.pop("trained", 0),
            queued=count.pop("queued", 0),
            in_flight=count.pop("in_flight", 0),
            rejected=count,
        )


@contextmanager
def rows_kept(count: int):
    before = book_module.LEASE_ROWS_KEPT
    book_module.LEASE_ROWS_KEPT = count
    try:
        yield
    finally:
        book_module.LEASE_ROWS_KEPT = before


OPERATIONS = ["issue", "accept", "end", "drop", "train", "roll_back", "checkpoint", "restart"]


async def operate(book: Book, model: Model, operation: str, data: st.DataObject) -> Book:
    """Do one drawn operation to the book and to its model; what they answer must agree."""
    reason = data.draw(st.sampled_from([Reason.STALE, Reason.PEER_GONE, Reason.ABORTED]))
    known = list(model.fates)
    some = data.draw(st.lists(st.sampled_from(known), max_size=4)) if known else []
    if operation == "issue":
        owner = data.draw(st.sampled_from([A, B]))
        names = [f"l{len(known) + extra}" for extra in range(data.draw(st.integers(1, 3)))]
        samples = data.draw(st.integers(1, 3))
        await book.issue(owner, ONE, [(lease(name, samples), 0) for name in names])
        model.fates |= dict.fromkeys(names, (owner, samples, "in_flight"))
    elif operation == "accept":
        for name in some:
            won = await book.accept(LeaseId(name), model.fates[name][1], upload(name))
            assert won == bool(model.move([name], "in_flight", "queued"))
    elif operation in {"end", "drop"}:
        source = Place.IN_FLIGHT if operation == "end" else Place.QUEUED
        ended = await book.reject(model.pairs(some), source, reason)
        assert ended == model.move(some, source.value, reason.value)
    elif operation == "train":
        model.step += 1
        names = some + model.at("queued")[:2]
        trained = await book.train(model.pairs(names), Step(model.step), b"")
        assert trained == model.move(names, "queued", "trained")
        model.steps |= dict.fromkeys(trained, model.step)
    elif operation == "roll_back":
        model.step = data.draw(st.integers(model.checkpoint, model.step))
        lost = [name for name in model.at("trained") if model.steps[name] > model.step]
        count = await book.roll_back(Step(model.step))
        assert count == sum(model.fates[name][1] for name in lost)
        model.move(lost, "trained", "dead_generation")
    elif operation == "checkpoint":
        model.checkpoint = model.step
        await book.checkpointed(Step(model.step))
    else:
        book = Book(book._store)
        await book.load()
    return book


def any_sequence(form: Callable[[Story], None], data: st.DataObject) -> None:
    async def story(open_store: Open) -> None:
        async with open_store() as store:
            book, model = Book(store), Model()
            await book.load()
            for _ in range(data.draw(st.integers(0, 14))):
                operation = data.draw(st.sampled_from(OPERATIONS))
                book = await operate(book, model, operation, data)
                assert await agreed(book) == model.balance()
            held = [row.lease.lease_id for row in await book.queued()]
            assert held == model.at("queued")
            flying = [row.lease.lease_id for row in await book.open_leases()]
            assert flying == model.at("in_flight")

    with rows_kept(2):
        form(story)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_counters_and_rows_agree_after_any_sequence_of_operations(data: st.DataObject) -> None:
    any_sequence(on_simulation, data)


@settings(deadline=None, max_examples=6)
@given(st.data())
def test_counters_and_rows_agree_on_a_real_file_too(data: st.DataObject) -> None:
    any_sequence(on_sqlite, data)


# --- crashes ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(crash_at_s=st.floats(0.0, 0.045), workers=st.integers(1, 4))
def test_what_was_acknowledged_survives_a_crash_and_counters_and_rows_still_agree(
    crash_at_s: float, workers: int
) -> None:
    acknowledged: dict[str, Place] = {}

    async def work(book: Book, worker: int) -> None:
        for number in range(10):
            name = f"w{worker} l{number}"
            try:
                await book.issue(A, ONE, [(lease(name), number)])
                acknowledged[name] = Place.IN_FLIGHT
                assert await book.accept(LeaseId(name), 2, upload(name))
                acknowledged[name] = Place.QUEUED
                await book.train(named(name), Step(number + 1), b"")
                acknowledged[name] = Place.TRAINED
            except StoreError:
                return

    async def main() -> None:
        disk = SimDisk(sync_s=0.004)
        async with disk.open_store("state", MIGRATIONS) as store:
            book = Book(store)
            async with trio.open_nursery() as nursery:
                for worker in range(workers):
                    nursery.start_soon(work, book, worker)
                await trio.sleep(crash_at_s)
                disk.crash()
        async with disk.open_store("state", MIGRATIONS) as store:
            again = Book(store)
            await again.load()
            for name, place in acknowledged.items():
                fate = await again.fate(LeaseId(name))
                assert fate is not None
                assert fate[0] is place
            # The dead process's counters had counted what was acknowledged, and nothing else.
            assert await agreed(again) == book.ledger.statistics()

    run_virtual(main, seed=1)


def test_a_full_disk_refuses_and_changes_nothing() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with disk.open_store("state", MIGRATIONS) as store:
            book = await issued(store, "x")
            disk.full = True
            for call in (
                lambda: book.accept(LeaseId("x"), 2, upload("x")),
                lambda: book.reject(named("x"), Place.IN_FLIGHT, Reason.ABORTED),
                lambda: book.issue(A, ONE, [(lease("y"), 0)]),
            ):
                with pytest.raises(StoreError, match="full"):
                    await call()
            disk.full = False
            assert await agreed(book) == Balance(issued=2, trained=0, queued=0, in_flight=2)

    run_virtual(main, seed=1)
