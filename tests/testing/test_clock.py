"""Virtual time jumps, and the same seed interleaves alike. Guards trio's private switches."""

import random

import pytest
import trio
from trio._core import _run as trio_internals

from echo2p2p.testing.clock import EPOCH_S, SimClock, run_virtual


async def interleaving(tasks: int, rounds: int) -> list[int]:
    order = []

    async def work(number: int) -> None:
        for _ in range(rounds):
            order.append(number)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for number in range(tasks):
            nursery.start_soon(work, number)
    return order


def test_one_seed_gives_one_order_and_two_seeds_two() -> None:
    first = run_virtual(interleaving, 8, 20, seed=1)
    assert first == run_virtual(interleaving, 8, 20, seed=1)
    assert first != run_virtual(interleaving, 8, 20, seed=2)
    assert sorted(first) == sorted(list(range(8)) * 20)


def test_the_order_depends_on_nothing_that_ran_before() -> None:
    first = run_virtual(interleaving, 8, 20, seed=1)
    random.seed(99)
    trio.run(interleaving, 3, 3)
    assert run_virtual(interleaving, 8, 20, seed=1) == first


def test_a_week_takes_no_time() -> None:
    async def sleep() -> tuple[float, float]:
        clock = SimClock(skew_s=10)
        start = trio.current_time()
        await trio.sleep(7 * 86400)
        return start, clock.time()

    assert run_virtual(sleep, seed=1) == (0.0, EPOCH_S + 10 + 7 * 86400)


def test_the_switch_is_put_back_even_after_an_error() -> None:
    before = trio_internals._ALLOW_DETERMINISTIC_SCHEDULING

    async def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        run_virtual(fail, seed=1)
    assert before == trio_internals._ALLOW_DETERMINISTIC_SCHEDULING


def test_ticks_make_timers_late_by_less_than_one_and_let_them_go_together() -> None:
    async def main() -> list[float]:
        woken: list[float] = []

        async def sleep(seconds: float) -> None:
            await trio.sleep(seconds)
            woken.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(sleep, number / 1000)
        return woken

    woken = sorted(run_virtual(main, seed=1, tick_s=1 / 64))
    assert all(0 <= at - number / 1000 < 1 / 64 for number, at in enumerate(woken))
    assert set(woken) == {number / 64 for number in range(8)}
    assert len(set(run_virtual(main, seed=1))) == 100
