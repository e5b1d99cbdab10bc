"""How long things take on a machine whose pace changes meanwhile."""

import pytest
import trio
import trio.testing

from echo2p2p.errors import ChildError
from scenarios.parts import Life, Pace


@pytest.mark.parametrize(
    ("changes", "ends_s"),
    [
        ([], 10.0),
        ([(2.0, 4.0)], 2.0 + 8.0 * 4),
        ([(2.0, 4.0), (6.0, 1.0)], 2.0 + 4.0 + 7.0),
        ([(0.0, 0.5)], 5.0),
        ([(11.0, 100.0)], 10.0),
    ],
)
async def test_what_is_left_of_some_work_takes_as_long_as_the_new_pace(
    changes, ends_s, autojump_clock
):
    pace = Pace()
    life = Life("engine", pace)

    async def change():
        for at_s, factor in changes:
            await trio.sleep_until(start_s + at_s)
            pace.factor = factor

    start_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        await trio.testing.wait_all_tasks_blocked()
        await life.spend(10.0)
        assert trio.current_time() - start_s == pytest.approx(ends_s)


async def test_what_was_cut_off_knows_what_was_left(autojump_clock):
    pace = Pace()
    pace.factor = 5.0
    life = Life("engine", pace)
    with trio.move_on_after(20.0):
        await life.spend(10.0)
    assert life.left_s == pytest.approx(6.0)
    await life.spend(1.0)
    assert life.left_s == 0.0


async def test_what_ends_meanwhile_raises(autojump_clock):
    life = Life("engine")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_after, life, 3.0)
        with pytest.raises(ChildError, match="died"):
            await life.spend(10.0)
    assert life.left_s == pytest.approx(7.0)


async def end_after(life, seconds):
    await trio.sleep(seconds)
    life.end("died")
