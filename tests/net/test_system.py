"""Clock, randomness and offload, in their real and their simulated forms."""

import random
import threading
import time

import numpy as np
import pytest
import trio

from echo2p2p.errors import LocalProtocolError, StoreError
from echo2p2p.net.ports import Entropy, Offload
from echo2p2p.net.system import SystemClock, SystemEntropy, ThreadOffload
from echo2p2p.testing.system import InlineOffload, SimEntropy, SimSharedMemory


def test_the_system_clock_tells_the_time_of_day() -> None:
    before = time.time()
    assert before - 0.01 <= SystemClock().time() <= time.time() + 0.01


@pytest.mark.parametrize("entropy", [SystemEntropy(), SimEntropy(1)], ids=["system", "simulated"])
def test_secrets_and_generators_never_repeat(entropy: Entropy) -> None:
    secrets = {entropy.secret(32) for _ in range(50)}
    assert len(secrets) == 50
    assert {len(secret) for secret in secrets} == {32}
    assert len(entropy.secret(1000)) == 1000
    drawn = {entropy.rng(purpose).getrandbits(64) for purpose in ("a", "a", "b")}
    assert len(drawn) == 3
    assert isinstance(entropy.rng("a"), random.Random)


def test_simulated_entropy_is_a_function_of_seed_fork_and_order() -> None:
    def draw(entropy: SimEntropy) -> tuple[object, ...]:
        return entropy.secret(8), entropy.rng("x").random(), entropy.rng("x").random()

    assert draw(SimEntropy(7)) == draw(SimEntropy(7)) != draw(SimEntropy(8))
    root = SimEntropy(7)
    root.secret(1)
    assert draw(root.fork("peer 1")) == draw(SimEntropy(7).fork("peer 1"))
    assert draw(root.fork("peer 1")) != draw(root.fork("peer 2"))


def test_draws_for_one_purpose_do_not_move_another() -> None:
    quiet, busy = SimEntropy(7), SimEntropy(7)
    busy.rng("new feature").random()
    busy.secret(5)
    assert quiet.rng("old").random() == busy.rng("old").random()


@pytest.mark.parametrize("offload", [ThreadOffload, InlineOffload], ids=["thread", "inline"])
async def test_work_returns_its_value_or_raises_its_error(offload: type[Offload]) -> None:
    port = offload()
    assert await port.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await port.run(lambda: 1 // 0)


@pytest.mark.parametrize("offload", [ThreadOffload, InlineOffload], ids=["thread", "inline"])
async def test_work_cancelled_beforehand_never_starts(offload: type[Offload]) -> None:
    ran = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await offload().run(lambda: ran.append(1))
    assert scope.cancelled_caught
    assert not ran


async def test_cancelling_waits_for_the_thread_and_then_raises() -> None:
    begun, release = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    steps = []

    def work() -> None:
        token.run_sync_soon(begun.set)
        release.wait(10)
        steps.append("work")

    async def ask() -> None:
        try:
            await ThreadOffload().run(work)
        finally:
            steps.append("asker")
        steps.append("not reached")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await begun.wait()
        nursery.cancel_scope.cancel()
        release.set()
    assert steps == ["work", "asker"]


async def test_no_more_threads_work_at_once_than_allowed() -> None:
    lock, running, most = threading.Lock(), 0, 0
    both = threading.Barrier(2, timeout=10)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait()
        with lock:
            running -= 1

    offload = ThreadOffload(threads=2)
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(offload.run, work)
    assert most == 2


async def test_inline_work_takes_virtual_time(autojump_clock: trio.testing.MockClock) -> None:
    await InlineOffload(work_s=0.5).run(lambda: None)
    assert trio.current_time() == 0.5


def test_shared_memory_is_zeroed_writable_and_replaced_by_name() -> None:
    memory = SimSharedMemory(bytes_max=100)
    state = memory.allocate("weights", 60)
    assert state.path == ""
    array = np.frombuffer(state.view, dtype=np.uint8)
    array[:] = 7
    assert bytes(state.view) == b"\x07" * 60
    with pytest.raises(StoreError, match="no room"):
        memory.allocate("more", 60)
    again = memory.allocate("weights", 80)
    assert bytes(again.view) == bytes(80)
    with pytest.raises(LocalProtocolError):
        _ = state.view
    assert array[0] == 7  # an array that is still looked at keeps its memory
    again.close()
    again.close()
