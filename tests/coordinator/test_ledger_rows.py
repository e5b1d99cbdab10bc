"""What the rows say of peers, however many there have been."""

from dataclasses import replace

import pytest

from coordinator.book import Book
from coordinator.schema import MIGRATIONS, MemberRow
from echo2p2p.ids import Incarnation, LeaseId, PeerId
from echo2p2p.net.store import SqliteStore
from echo2p2p.testing.disk import SimDisk
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.messages import Lease, Sampling

ONE = Incarnation(1)


@pytest.fixture(params=["sqlite", "simulated"])
async def store(request, tmp_path):
    if request.param == "sqlite":
        opened = SqliteStore.open(tmp_path / "state.db", MIGRATIONS)
    else:
        opened = SimDisk().open_store("state", MIGRATIONS)
    async with opened as one:
        yield one


def member(name: str) -> MemberRow:
    return MemberRow(PeerId(name), ONE, f"box {name}", b"digest", b"body", live=True)


def lease(name: str, samples: int) -> Lease:
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


async def test_of_peers_that_are_gone_the_best_have_a_row_and_all_that_live(store) -> None:
    book = Book(store)
    for accepted, name in enumerate("dacbxy"):
        await book.put_member(member(name))
        if accepted:
            await book.issue(PeerId(name), ONE, [(lease(name, accepted), 0)])
            assert await book.accept(LeaseId(name), accepted, b"upload")
        if name in "abcd":
            await book.end_member(PeerId(name), ONE, 5)
    shown = await book.standings(2)
    assert [one.peer_id for one in shown] == ["b", "c", "x", "y"]
    assert [one.relayed_bytes for one in shown] == [5, 5, 0, 0]
    assert [one.peer_id for one in await book.standings(0)] == ["x", "y"]


async def test_of_a_peer_that_is_gone_no_request_is_kept(store) -> None:
    book = Book(store)
    await book.put_member(member("a"))
    await book.end_member(PeerId("a"), ONE, 0)
    assert await book.members() == [replace(member("a"), join_body=b"", live=False)]
    again = replace(member("a"), incarnation=Incarnation(2))
    await book.put_member(again)
    assert await book.members() == [again]


async def test_what_a_thousand_liars_say_does_not_overflow_their_sum(store) -> None:
    def lie(rows) -> None:
        for number in range(1025):
            rows.execute(
                "INSERT INTO members VALUES (?, 1, '', x'', x'', 0, ?)", (str(number), 2**53)
            )

    await store.transact(lie)
    assert await Book(store).relayed_bytes() == pytest.approx(1025 * 2**53)
