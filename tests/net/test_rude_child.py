"""Children that end badly, say too much, or say it by half; and what they leave behind."""

import pytest
import trio

from echo2p2p.errors import ChildError
from echo2p2p.net.child import CLOSE_S, GOODBYE_S
from echo2p2p.testing.children import make_child, wait_gone

pytestmark = pytest.mark.slow


@pytest.fixture
async def child():
    subject = make_child()
    await subject.start()
    assert await subject.call("echo", b"x", bytes, timeout_s=20) == b"x"
    yield subject
    await subject.close()


async def test_a_death_is_seen_at_once_though_a_grandchild_holds_all_that_was_open(child):
    pids = []
    with trio.fail_after(10), pytest.raises(ChildError) as caught:
        await child.call(
            *("fork_and_leave", 3, int),
            timeout_s=None,
            progress=pids.append,
            progress_kind=int,
        )
    assert "died during 'fork_and_leave' with exit code 3" in str(caught.value)
    assert "last words" in caught.value.log_tail
    with trio.fail_after(CLOSE_S):
        await child.close()
    await wait_gone(pids[0])


async def test_a_grandchild_that_left_the_group_and_floods_the_output_goes_too(child):
    grandchild = await child.call("fork_away", None, int, timeout_s=20)
    assert await child.call("echo", b"y", bytes, timeout_s=20) == b"y"
    began_s = trio.current_time()
    await child.close()
    assert trio.current_time() - began_s < 3 * GOODBYE_S
    await wait_gone(grandchild)


async def test_a_child_that_never_ends_by_itself_is_ended_by_close(child):
    await child.call("linger", None, type(None), timeout_s=20)
    began_s, pid = trio.current_time(), child.pid
    await child.close()
    assert GOODBYE_S <= trio.current_time() - began_s < 3 * GOODBYE_S
    await wait_gone(pid)


@pytest.mark.parametrize("limit", ["timeout_s", "silence_s"])
async def test_half_a_message_is_no_answer(child, limit):
    limits = {"timeout_s": None, limit: 0.5}
    with trio.fail_after(10), pytest.raises(ChildError) as caught:
        await child.call("answer_by_half", 100_000, bytes, **limits)
    wanted = {
        "timeout_s": "did not finish 'answer_by_half' within 0.5 s",
        "silence_s": "gave no sign of life for 0.5 s during 'answer_by_half'",
    }
    assert wanted[limit] in str(caught.value)


async def test_a_child_that_floods_its_output_is_answered_and_others_go_on_meanwhile(tmp_path):
    subject = make_child(log_file=tmp_path / "log")
    await subject.start()
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await trio.sleep(0.01)
            ticks += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        written = await subject.call("flood", 1.0, int, timeout_s=20)
        nursery.cancel_scope.cancel()
    await subject.close()
    assert written > 1_000_000
    assert ticks > 20
    assert len(subject.log_tail) <= 4096


async def test_a_child_that_floods_between_calls_answers_the_next_and_can_be_closed(child):
    await child.call("flood_for_ever", None, type(None), timeout_s=20)
    await trio.sleep(0.2)
    assert await child.call("echo", b"y", bytes, timeout_s=20) == b"y"
    began_s = trio.current_time()
    await child.close()
    assert trio.current_time() - began_s < 3 * GOODBYE_S
