"""Lines between simulated machines: what rate, distance, loss, cuts and freezes do to bytes."""

import math
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from echo2p2p.errors import HttpError
from echo2p2p.net.ports import Endpoint, Response, Route
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.http import HEAD_BYTES, IDLE_S, SimHttp
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.links import (
    AT_ONCE_S,
    MATHIS,
    PACKET_BYTES,
    QUEUE_S,
    SEGMENT_BYTES,
    Framing,
    Lane,
    SimLinks,
)

RATE = 1e6


def links_of(seed: int = 1, **far: float) -> SimLinks:
    links = SimLinks(random.Random(seed))
    links.add_node("a", up_bytes_per_s=RATE, latency_s=0.01)
    links.add_node("b", latency_s=0.01, **far)
    return links


def play(links: SimLinks, main, *, tick_s: float = 0.0) -> None:
    async def whole() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(links.run)
            await main()
            nursery.cancel_scope.cancel()

    run_virtual(whole, seed=1, tick_s=tick_s)


async def seconds_for(links: SimLinks, size: int, sender: str = "a", receiver: str = "b") -> float:
    began = trio.current_time()
    await links.carry(links.lane(sender, receiver), size)
    return trio.current_time() - began


def test_bytes_take_their_time_on_the_slower_line_and_the_distance_once():
    links = links_of(down_bytes_per_s=RATE / 2)

    async def main() -> None:
        size = 20 * SEGMENT_BYTES
        # The last segment leaves after size / RATE; the downlink is then still busy with the rest.
        first = SEGMENT_BYTES / RATE
        expected = first + 0.02 + size / (RATE / 2)
        assert await seconds_for(links, size) == pytest.approx(expected)
        assert links.traffic("a").sent_bytes == links.traffic("b").received_bytes == size

    play(links, main)


def test_loss_repeats_its_share_of_the_bytes_and_limits_a_connection():
    links = links_of(loss=0.02)

    async def main() -> None:
        size = 400 * SEGMENT_BYTES
        took = await seconds_for(links, size)
        again = links.traffic("a").sent_bytes - size
        assert again == pytest.approx(0.02 * size, rel=0.3)
        limit = MATHIS * PACKET_BYTES / (0.04 * math.sqrt(0.02))
        assert took == pytest.approx(size / limit, rel=0.1)
        assert limit < RATE / 2

    play(links, main)


def test_what_follows_a_lost_packet_waits_for_it():
    links = links_of(loss=0.3)
    order = []

    async def main() -> None:
        lane = links.lane("a", "b")
        for number in range(50):
            links.travel(lane, PACKET_BYTES, lambda number=number: order.append(number))
        await trio.sleep(600)

    play(links, main)
    assert order == list(range(50))


def test_a_small_segment_does_not_overtake_a_large_one_that_is_almost_in():
    links = links_of(down_bytes_per_s=RATE)
    links.add_node("c", up_bytes_per_s=RATE, latency_s=0.01)
    order = []

    async def main() -> None:
        links.travel(links.lane("a", "b"), SEGMENT_BYTES, lambda: order.append("large"))
        # Once over the uplink and once over the downlink, less half of what is not waited for.
        await trio.sleep(2 * SEGMENT_BYTES / RATE - AT_ONCE_S / 2)
        links.travel(links.lane("c", "b"), 1, lambda: order.append("small"))
        await trio.sleep(1)

    play(links, main)
    assert order == ["large", "small"]


@pytest.mark.parametrize("tick_s", [0.0, 1 / 1024, 1 / 64])
def test_a_lane_keeps_its_order_whatever_the_sizes_and_however_coarse_the_clock(tick_s):
    links = links_of(down_bytes_per_s=RATE)
    order = []
    rng = random.Random(4)

    async def main() -> None:
        lane = links.lane("a", "b")
        for number in range(500):
            size = rng.choice([1, 100, SEGMENT_BYTES])
            links.travel(lane, size, lambda number=number: order.append(number))
            if rng.random() < 0.5:
                await trio.sleep(rng.random() * 0.02)
        await trio.sleep(60)

    play(links, main, tick_s=tick_s)
    assert order == list(range(500))


def test_the_same_seed_loses_the_same_packets_and_another_loses_others():
    def sent(seed: int) -> int:
        links = links_of(seed, loss=0.1)

        async def main() -> None:
            await seconds_for(links, 100 * SEGMENT_BYTES)

        play(links, main)
        return links.traffic("a").sent_bytes

    assert sent(1) == sent(1) != sent(2)


def test_a_one_way_cut_holds_back_one_way():
    links = links_of()

    async def main() -> None:
        links.cut("a", "b")
        assert await seconds_for(links, 10, "b", "a") == pytest.approx(0.02)
        with trio.move_on_after(50) as scope:
            await seconds_for(links, 10)
        assert scope.cancelled_caught
        links.heal("a", "b")
        assert await seconds_for(links, 10) == pytest.approx(0.02, abs=1e-4)

    play(links, main)


def test_a_frozen_machine_neither_hears_nor_speaks_until_it_thaws():
    links = links_of()
    heard: list[tuple[str, float]] = []

    async def main() -> None:
        links.freeze("b")
        links.travel(links.lane("a", "b"), 0, lambda: heard.append(("b", trio.current_time())))
        links.travel(links.lane("b", "a"), 0, lambda: heard.append(("a", trio.current_time())))
        await trio.sleep(30)
        assert heard == []
        links.thaw("b")
        await trio.sleep(1)
        # After 20 ms on the way, with a timer of 240 ms that has doubled six times.
        assert heard == [("b", pytest.approx(0.02 + 0.24 * 127)), ("a", pytest.approx(30.5))]

    play(links, main)


def framed(**changes: Any) -> SimLinks:
    framing = replace(Framing(lambda rate: 0.0, 0, 0), **changes)
    links = SimLinks(framing=framing)
    links.add_node("a", up_bytes_per_s=RATE, latency_s=0.05)
    links.add_node("b", up_bytes_per_s=RATE, latency_s=0.05)
    return links


def test_packets_have_heads_and_are_acknowledged():
    links = framed(head_bytes=100, acknowledgement_bytes=50)

    async def main() -> None:
        assert await seconds_for(links, 10) == pytest.approx(0.1 + 110 / RATE)
        # Behind others a small write has no packet of its own.
        first, second = links.lane("a", "b"), links.lane("a", "b")
        links.travel(first, PACKET_BYTES, lambda: None)
        links.travel(second, PACKET_BYTES // 10, lambda: None)
        await trio.sleep(1)

    play(links, main)
    assert links.traffic("a").sent_bytes == 110 + (PACKET_BYTES + 100) + (PACKET_BYTES // 10 + 10)
    assert links.traffic("b").sent_bytes == 25 + 2  # one for two packets
    assert links.traffic("b").received_bytes == links.traffic("a").sent_bytes


def test_a_bucket_has_saved_something_up_when_it_was_idle():
    links = framed(burst_bytes=lambda rate: 4000.0)

    async def main() -> None:
        lane = links.lane("a", "b")
        assert links.travel(lane, 4000, lambda: None) == 0.0
        assert links.travel(lane, 2000, lambda: None) == pytest.approx(2000 / RATE)
        await trio.sleep(0.003)  # a thousand more has come than has gone
        assert links.travel(lane, 1000, lambda: None) == 0.0
        links.set_rates("a", up_bytes_per_s=RATE / 10, down_bytes_per_s=RATE)
        await trio.sleep(1)
        assert links.travel(lane, 5000, lambda: None) == pytest.approx(1000 / (RATE / 10))

    play(links, main)


def test_a_connection_starts_slowly_and_again_after_a_pause():
    links = framed()

    async def seconds(lane: Lane, packets: int) -> float:
        """Send packet by packet; return when the last is there."""
        began, done = trio.current_time(), trio.Event()
        for number in range(packets):
            last = number == packets - 1
            links.travel(lane, PACKET_BYTES, done.set if last else lambda: None)
        await done.wait()
        return trio.current_time() - began

    async def main() -> None:
        links.set_rates("a", up_bytes_per_s=1e9, down_bytes_per_s=1e9)
        lane = links.lane("a", "b")
        way_s, round_s = 0.1, 0.2
        # 10 packets, then 20, then 40.
        assert await seconds(lane, 10) == pytest.approx(way_s, abs=1e-3)
        await trio.sleep(round_s)
        assert await seconds(lane, 20) == pytest.approx(way_s, abs=1e-3)
        await trio.sleep(round_s)
        assert await seconds(lane, 41) == pytest.approx(way_s + round_s, abs=1e-3)
        await trio.sleep(1)
        assert await seconds(lane, 11) == pytest.approx(way_s + round_s, abs=1e-3)

    play(links, main)


def test_what_a_cut_has_held_back_is_sent_again_when_its_timer_says():
    links = links_of()
    heard: dict[str, float] = {}

    def put(lane: Lane, what: str) -> None:
        links.travel(lane, 1, lambda: heard.setdefault(what, trio.current_time()))

    async def main() -> None:
        links.cut("a", "b")
        early, late, opening = (links.lane("a", "b") for _ in range(3))
        opening.is_opening = True
        put(early, "early")
        put(opening, "opening")
        await trio.sleep(2.4)
        put(late, "late")
        await trio.sleep(0.1)
        links.heal("a", "b")
        put(early, "after it")
        put(links.lane("a", "b"), "another")
        await trio.sleep(5)

    play(links, main)
    assert heard["another"] == pytest.approx(2.52)
    assert heard["late"] == pytest.approx(2.42 + 0.24, abs=1e-5)
    # 0.24 s after it was lost, 0.48 s after that, and 0.96, and 1.92.
    assert heard["early"] == pytest.approx(0.02 + 0.24 * 15)
    assert heard["after it"] == heard["early"], "bytes of one connection come in order"
    # 1 s, and 2 s after that.
    assert heard["opening"] == pytest.approx(0.02 + 3)
    assert list(heard).index("after it") > list(heard).index("early")


def test_a_cut_that_comes_before_the_next_try_lets_the_timer_go_on():
    links = links_of()
    heard: list[float] = []

    async def main() -> None:
        lane = links.lane("a", "b")
        for at_s, order in ((0, "cut"), (1.0, "heal"), (1.5, "cut"), (2.0, "heal")):
            await trio.sleep_until(at_s)
            getattr(links, order)("a", "b")
            if not at_s:
                links.travel(lane, 1, lambda: heard.append(trio.current_time()))
        await trio.sleep(9)
        links.travel(lane, 1, lambda: heard.append(trio.current_time()))
        await trio.sleep(1)

    play(links, main)
    # At 0.26, 0.74 and 1.70 s in vain.
    assert heard == [pytest.approx(0.02 + 0.24 * 15), pytest.approx(11.02)]


def test_who_has_much_to_send_waits_while_either_line_has_a_queue():
    links = links_of(down_bytes_per_s=RATE)

    async def main() -> None:
        lane = links.lane("a", "b")
        assert links.full_for(lane) == 0.0
        links.travel(lane, int(1.5 * QUEUE_S * RATE), lambda: None)
        # It stands at the uplink, and once it is through that, nothing does.
        assert links.full_for(lane) == pytest.approx(0.5 * QUEUE_S)
        assert links.full_for(links.lane("b", "a")) == 0.0
        await trio.sleep(0.7 * QUEUE_S)
        assert links.full_for(lane) == 0.0
        await trio.sleep(3 * QUEUE_S)
        links.set_rates("b", up_bytes_per_s=RATE, down_bytes_per_s=RATE / 2)
        links.travel(lane, int(QUEUE_S * RATE), lambda: None)
        await trio.sleep(1.1 * QUEUE_S)
        assert links.full_for(lane) > 0.5 * QUEUE_S, "two seconds of it stand at the downlink"

    play(links, main)


@asynccontextmanager
async def asked(links: SimLinks):
    """Yield what asks ``b`` from ``a`` with a body and returns the seconds until the answer."""
    http = SimHttp(links=links)

    async def echo(request) -> Response:
        return Response(200)

    route = Route("POST", "/x", echo, 10**6)
    async with (
        http.server("b", TraceJournal()).serve((route,), Endpoint("b", 0)) as at,
        http.clients("a").connect(f"http://b:{at.port}", None) as client,
    ):

        async def ask(size: int = 0, *, timeout_s: float = 9.0) -> float:
            began = trio.current_time()
            await client.request("POST", "/x", body=bytes(size), timeout_s=timeout_s)
            return trio.current_time() - began

        yield ask


def test_http_shares_the_line_with_everything_else():
    links = links_of()

    async def main() -> None:
        size = 100_000
        async with asked(links) as ask:
            await ask()
            alone = await ask(size)
            assert alone == pytest.approx((size + HEAD_BYTES) / RATE + 0.04)
            links.travel(links.lane("a", "b"), 500_000, lambda: None)
            assert await ask(size) == pytest.approx(alone + 0.5)

    play(links, main)


def test_an_http_connection_is_opened_and_kept_until_it_fails_or_is_idle_for_long():
    links = links_of()

    async def main() -> None:
        async with asked(links) as ask:
            first = await ask()
            kept = await ask()
            assert first == pytest.approx(kept + 0.04)
            await trio.sleep(IDLE_S + 1)
            assert await ask() == pytest.approx(first)

            links.cut("a", "b")
            with pytest.raises(HttpError):
                await ask(timeout_s=2.0)
            healed_s = trio.current_time() + 2.0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)  # opens another, as that one has not answered
                await trio.sleep_until(healed_s)
                links.heal("a", "b")
            # Tried after 1 s in vain and 2 s later.
            assert trio.current_time() == pytest.approx(healed_s - 2.0 + 0.02 + 3.0 + 0.02 + kept)

    play(links, main)
