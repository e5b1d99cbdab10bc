import math
import random

import pytest

from echo2p2p.broadcast.outbox import Outbox
from echo2p2p.broadcast.settings import SwarmSettings
from echo2p2p.broadcast.uploads import Uploads
from echo2p2p.ids import ManifestId, PeerId

ID = ManifestId(bytes(16))
OTHER = ManifestId(bytes(15) + b"x")


def keys(*indices):
    return [(ID, index) for index in indices]


def test_live_chunks_go_before_bulk_each_in_order():
    outbox = Outbox(window=9, capacity=9)
    for index, live in [(1, False), (2, True), (3, False), (4, True)]:
        assert outbox.queue((ID, index), live=live)
    assert [outbox.next(live=True) for _ in range(3)] == [*keys(2, 4), None]
    assert [outbox.next(live=False) for _ in range(3)] == [*keys(1, 3), None]


def test_the_window_and_the_capacity_are_kept():
    outbox = Outbox(window=1, capacity=2)
    assert [outbox.queue(key, live=True) for key in keys(1, 2, 3)] == [True, True, False]
    assert outbox.next(live=True) == (ID, 1)
    assert outbox.next(live=True) is None
    outbox.written((ID, 1), 5.0)
    assert outbox.next(live=True) == (ID, 2)


def test_what_waits_can_be_cancelled_and_what_is_written_is_remembered_for_a_while():
    outbox = Outbox(window=1, capacity=9)
    for key in keys(1, 2):
        outbox.queue(key, live=True)
    outbox.queue((OTHER, 3), live=False)
    outbox.next(live=True)
    outbox.cancel((ID, 1))
    assert outbox.holds((ID, 1)), "it is with the writer already"
    outbox.cancel((ID, 2))
    assert not outbox.holds((ID, 2))
    outbox.drop(OTHER)
    assert len(outbox) == 1
    outbox.written((ID, 1), 5.0)
    assert outbox.sent_since((ID, 1), 4.0)
    assert not outbox.sent_since((ID, 1), 5.5)
    assert not outbox.sent_since((ID, 2), 0.0)


def test_a_few_links_are_sent_chunks_at_a_time_in_turn():
    uploads = Uploads(SwarmSettings(uploads_max=2), random.Random(0))
    links = [PeerId(name) for name in "abc"]
    for link in links:
        uploads.open(link)
        uploads.to(link).queue((ID, 1), live=True)
    sent = []
    for _ in range(2):
        link, outbox = next(
            (link, box) for link, box in uploads.in_turn() if not box.holds((ID, 9)) and box.waits
        )
        assert uploads.may_start(0.0)
        uploads.started(link, outbox.next(live=True), 1000, 0.0)
        sent.append(link)
    assert sent == ["a", "b"]
    assert not uploads.may_start(0.1)
    uploads.finished(PeerId("a"), (ID, 1), 0.1, sent=True)
    assert uploads.may_start(0.1)
    assert [link for link, _ in uploads.in_turn()] == ["c", "a", "b"]


def test_a_slow_receiver_does_not_block_the_others():
    settings = SwarmSettings(uploads_max=1, upload_slow_s=0.25)
    uploads = Uploads(settings, random.Random(0))
    for link in (PeerId("slow"), PeerId("fast")):
        uploads.open(link)
        uploads.to(link).queue((ID, 1), live=True)
    uploads.started(PeerId("slow"), uploads.to(PeerId("slow")).next(live=True), 1000, 10.0)
    assert not uploads.may_start(10.1)
    assert uploads.unblock_s == 10.25
    assert uploads.may_start(uploads.unblock_s)
    assert uploads.unblock_s == math.inf


def most_at_once(rate, size):
    """Chunks of a size that an uplink, of which so much is known, begins at the same time."""
    uploads, links = Uploads(SwarmSettings(), random.Random(0)), [PeerId(c) for c in "abcdefgh"]
    for link in links:
        uploads.open(link)
    now, begun = 0.0, 0
    while now < 1.0:  # one after another, until the rate is known
        uploads.started(links[0], (ID, 1), size, now)
        now += size / rate
        uploads.finished(links[0], (ID, 1), now, sent=True)
    for link in links:
        if uploads.may_start(now):
            uploads.started(link, (ID, 9), size, now)
            begun += 1
    return begun


@pytest.mark.parametrize(
    ("mbit", "kib", "expected"), [(20, 64, 6), (3, 16, 4), (3, 64, 2), (1, 16, 2), (100, 1024, 2)]
)
def test_a_thin_uplink_sends_fewer_chunks_at_the_same_time(mbit, kib, expected):
    # 8 links: six for three of four; no more than leave in 0.15 s, but two
    assert most_at_once(mbit * 125_000, kib * 1024) == expected


def test_a_closed_link_gives_its_turn_back():
    uploads = Uploads(SwarmSettings(uploads_max=1), random.Random(0))
    uploads.open(PeerId("a"))
    uploads.to(PeerId("a")).queue((ID, 1), live=True)
    uploads.started(PeerId("a"), uploads.to(PeerId("a")).next(live=True), 1000, 0.0)
    uploads.close(PeerId("a"), 0.1)
    assert uploads.may_start(0.1)
    assert list(uploads.in_turn()) == []


def test_the_quickest_come_first_among_those_with_nothing_to_wait_for():
    uploads = Uploads(SwarmSettings(), random.Random(0))
    for link in "abcd":
        uploads.open(PeerId(link))
    rates = {"a": 1e5, "b": 1e6, "c": None, "d": 1e7}
    uploads.queue(PeerId("d"), (ID, 1), live=True)
    assert uploads.quickest([*map(PeerId, "abcd")], rates.get) == ["b", "a", "c", "d"]
