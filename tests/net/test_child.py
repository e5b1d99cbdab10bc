"""Child processes: calls, every way to die, and that nobody is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from echo2p2p.errors import ChildError, ConfigError, LocalProtocolError
from echo2p2p.net import child as child_module
from echo2p2p.net import child_worker
from echo2p2p.net.child import ChildProcess, last_words_of
from echo2p2p.net.process_memory import Memory, tree_memory
from echo2p2p.testing.children import MODULE, make_child, wait_gone

pytestmark = pytest.mark.slow


@pytest.fixture
async def child():
    subject = make_child()
    await subject.start()
    yield subject
    await subject.close()


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
async def test_a_reply_is_what_the_child_returned(child, size):
    data = os.urandom(size)
    assert await child.call("echo", data, bytes, timeout_s=20) == data


async def test_progress_arrives_in_order_before_the_reply(child):
    seen = []
    result = await child.call(
        "count", 5, int, timeout_s=20, progress=seen.append, progress_kind=int
    )
    assert (seen, result) == ([0, 1, 2, 3, 4], 5)


async def test_an_exception_comes_back_in_one_line_and_the_child_lives_on(child):
    with pytest.raises(ChildError) as caught:
        await child.call("fail", "no\nsuch thing", type(None), timeout_s=20)
    assert str(caught.value) == "subject: RuntimeError: no such thing"
    assert await child.call("echo", b"x", bytes, timeout_s=20) == b"x"
    assert "Traceback" in child.log_tail


async def test_an_unknown_method_and_a_wrong_argument_are_failures_of_the_call(child):
    with pytest.raises(ChildError, match="KeyError"):
        await child.call("nonsense", None, type(None), timeout_s=20)
    with pytest.raises(ChildError, match="Expected `bytes`"):
        await child.call("echo", 7, bytes, timeout_s=20)


async def test_a_death_is_reported_with_its_code_and_last_words(child):
    with pytest.raises(ChildError, match="died during 'die' with exit code 7") as caught:
        await child.call("die", 7, type(None), timeout_s=20)
    assert caught.value.log_tail == "last words"
    with pytest.raises(ChildError, match="died"):
        await child.call("echo", b"", bytes, timeout_s=20)


async def test_a_kill_is_reported_with_its_signal(child):
    with pytest.raises(ChildError, match="of SIGKILL"):
        await child.call("kill", signal.SIGKILL, type(None), timeout_s=20)


async def test_a_module_that_cannot_be_loaded_dies_with_the_reason():
    subject = ChildProcess("subject", "echo2p2p.no_such_module")
    await subject.start()
    with pytest.raises(ChildError, match="No module named"):
        await subject.call("echo", b"", bytes, timeout_s=20)
    await subject.close()


async def test_a_late_or_silent_child_is_given_up_and_unusable(child):
    with pytest.raises(ChildError, match=r"did not finish 'hang' within 0\.05 s"):
        await child.call("hang", None, type(None), timeout_s=0.05)
    with pytest.raises(ChildError, match="did not finish"):
        await child.call("echo", b"", bytes, timeout_s=20)


async def test_silence_is_counted_from_the_last_sign_of_life(child):
    seen = []
    await child.call("echo", b"", bytes, timeout_s=20)
    with pytest.raises(ChildError, match=r"no sign of life for 0\.5 s"):
        await child.call(
            "burn", None, int, timeout_s=None, silence_s=0.5, progress=seen.append,
            progress_kind=int,
        )  # fmt: skip
    assert seen == [child.pid]


async def test_a_cancelled_call_leaves_the_child_unusable_and_close_kills_it(child):
    with trio.move_on_after(0.05):
        await child.call("burn", None, int, timeout_s=None)
    with pytest.raises(ChildError, match="cancelled"):
        await child.call("echo", b"", bytes, timeout_s=20)
    pid = child.pid
    await child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_two_calls_at_once_are_our_own_bug(child):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: child.call("count", 1, int, timeout_s=20))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(LocalProtocolError):
            await child.call("count", 1, int, timeout_s=20)


async def test_a_nudge_reaches_the_call_under_way_and_no_other(child):
    child.nudge()  # nobody is there to be nudged
    assert await child.call("wait_nudged", 0.1, bool, timeout_s=10) is False
    child.nudge()

    def nudge(_):
        child.nudge()
        child.nudge()

    options = {"timeout_s": 10, "progress": nudge, "progress_kind": int}
    assert await child.call("wait_nudged", 5.0, bool, **options) is True
    assert await child.call("wait_nudged", 0.1, bool, timeout_s=10) is False
    # One that comes too late for its call is not taken for the next call, nor does it reach it.
    assert await child.call("count", 3, int, **options) == 3
    assert await child.call("wait_nudged", 0.1, bool, timeout_s=10) is False


async def test_close_during_a_call_ends_the_call_too(child):
    errors = []

    async def call():
        try:
            await child.call("burn", None, int, timeout_s=None)
        except ChildError as error:
            errors.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        await child.close()
    assert errors == ["subject: it was closed"]


async def test_close_is_idempotent_even_when_never_started_or_already_dead(child):
    with pytest.raises(ChildError):
        await child.call("kill", signal.SIGKILL, type(None), timeout_s=20)
    await child.close()
    await child.close()
    unborn = make_child()
    await unborn.close()
    with pytest.raises(LocalProtocolError):
        await unborn.start()


async def test_close_finishes_although_its_caller_is_cancelled(child):
    with trio.CancelScope() as scope:
        scope.cancel()
        await child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_an_idle_child_is_let_go_politely(child):
    await child.call("echo", b"", bytes, timeout_s=20)
    await child.close()
    assert child._process.returncode == 0


async def test_all_of_the_output_goes_to_the_log_file_and_the_tail_is_bounded(tmp_path):
    log = tmp_path / "child.log"
    log.write_bytes(b"before\n")
    subject = make_child(log_file=log)
    await subject.start()
    assert await subject.call("write", 300_000, int, timeout_s=20) == 300_000
    await subject.close()
    assert log.read_bytes() == b"before\n" + b"x" * 300_000 + b" end\n"
    assert len(subject.log_tail) == child_module.LOG_TAIL_BYTES
    assert subject.log_tail.endswith("x end\n")


async def test_children_stay_offline_single_threaded_and_can_be_told_otherwise():
    subject = make_child(environment={"OMP_NUM_THREADS": "3"})
    await subject.start()
    try:
        values = [
            await subject.call("environment", name, str, timeout_s=20)
            for name in ("HF_HUB_OFFLINE", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
        ]
    finally:
        await subject.close()
    assert values == ["1", "PASSIVE", "3"]


def test_the_blocking_side_imports_neither_trio_nor_torch():
    code = "import sys, echo2p2p.net.child_worker, echo2p2p.net.memory; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert not {b"trio", b"torch", b"asyncio", b"numpy"} & set(done.stdout.split())


@pytest.mark.parametrize("method", ["burn", "fork_and_burn", "fork_away_and_burn"])
async def test_killing_the_parent_leaves_no_orphan_although_the_child_is_busy(method):
    parent = await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", MODULE, "parent", method], stdout=subprocess.PIPE
    )
    line = b""
    with trio.fail_after(20):
        while not line.endswith(b"\n"):
            line += await parent.stdout.receive_some()
    pids = [int(word) for word in line.split()]
    assert len(pids) == 2
    parent.kill()
    await parent.wait()
    await parent.stdout.aclose()
    for pid in pids:
        await wait_gone(pid)


async def test_close_takes_the_childs_own_children_along(child):
    pids = []
    await child.call("echo", b"", bytes, timeout_s=20)
    with pytest.raises(ChildError):
        await child.call(
            "fork_and_burn", None, int, timeout_s=None, silence_s=0.5, progress=pids.append,
            progress_kind=int,
        )  # fmt: skip
    await child.close()
    await wait_gone(pids[0])


# --- memory, pulse, and whose fault it is ---------------------------------------------------------


@pytest.mark.parametrize("method", ["eat", "fork_and_eat"])
async def test_a_child_that_eats_memory_is_killed_and_says_so_with_its_last_words(method):
    subject = make_child(memory_max_bytes=100_000_000)
    await subject.start()
    try:
        assert await subject.call("echo", b"x", bytes, timeout_s=20) == b"x"
        with pytest.raises(ChildError, match="more than the 100 MB of memory it may") as caught:
            await subject.call(method, None, type(None), timeout_s=60)
        assert "MiB" in caught.value.log_tail
        with pytest.raises(ChildError, match="100 MB"):
            await subject.call("echo", b"", bytes, timeout_s=20)
    finally:
        await subject.close()


async def test_memory_is_counted_without_mapped_files_and_with_descendants(child):
    await child.call("echo", b"", bytes, timeout_s=20)
    alone = tree_memory(child.pid)
    assert 1_000_000 < alone.private_bytes < alone.resident_bytes
    with trio.move_on_after(0.5):
        await child.call("fork_and_burn", None, int, timeout_s=None)
    assert tree_memory(child.pid).private_bytes > alone.private_bytes
    await child.close()
    assert tree_memory(child.pid) == Memory()


async def test_the_system_kills_a_child_before_its_parent(child):
    await child.call("echo", b"", bytes, timeout_s=20)
    score = Path(f"/proc/{child.pid}/oom_score_adj").read_text()
    assert int(score) == child_worker.OOM_SCORE


async def test_a_child_that_works_without_a_word_beats_and_one_that_waits_does_not(child):
    await child.call("echo", b"", bytes, timeout_s=20)
    worked = await child.call("work_beating", 3.0, float, timeout_s=None, silence_s=1.5)
    assert worked == 3.0, "it gave no sign of life but its pulse"
    with pytest.raises(ChildError, match=r"no sign of life for 0\.5 s"):
        await child.call("wait_beating", 30.0, type(None), timeout_s=None, silence_s=0.5)


async def test_what_a_child_has_started_beats_for_it_while_it_works(child):
    await child.call("echo", b"", bytes, timeout_s=20)
    worked = await child.call("work_below", 3.0, float, timeout_s=None, silence_s=1.5)
    assert worked == 3.0
    with pytest.raises(ChildError, match=r"no sign of life for 1\.5 s"):
        await child.call("wait_below", 30.0, type(None), timeout_s=None, silence_s=1.5)


async def test_a_wrong_setting_comes_back_as_what_it_is_and_other_errors_by_their_class(child):
    with pytest.raises(ConfigError) as caught:
        await child.call("misconfigured", "model.path", type(None), timeout_s=20)
    assert (caught.value.path, caught.value.detail) == ("model.path", "of no use")
    with pytest.raises(ChildError) as failed:
        await child.call("fail", "no", type(None), timeout_s=20)
    assert failed.value.raised == "RuntimeError"
    with pytest.raises(ChildError) as died:
        await child.call("die", 3, type(None), timeout_s=20)
    assert died.value.raised == ""


async def test_a_long_log_is_moved_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(child_module, "LOG_FILE_BYTES_MAX", 100_000)
    log = tmp_path / "child.log"
    subject = make_child(log_file=log)
    await subject.start()
    for _ in range(5):
        await subject.call("write", 120_000, int, timeout_s=20)
    await subject.close()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept in (["child.log", "child.log.1"], ["child.log.1"])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 200_000


async def test_a_question_that_is_too_long_is_not_asked_and_the_child_lives_on(child, monkeypatch):
    monkeypatch.setattr(child_worker, "FRAME_BYTES_MAX", 1000)
    with pytest.raises(ChildError, match="'echo' was not asked: a message of 1"):
        await child.call("echo", bytes(1000), bytes, timeout_s=20)
    assert await child.call("echo", b"x", bytes, timeout_s=20) == b"x"


def test_last_words_are_the_last_lines_in_one():
    assert last_words_of("secret\n\n one\ntwo  \n\nthree\n") == "one | two | three"
    assert last_words_of("") == ""
