"""A task of the user's own, in real worker processes: one that works, and every way not to."""

import textwrap

import numpy as np
import pytest

from coordinator.model import TINY_QWEN3, prepare_model
from coordinator.task_client import TaskWorkerProcess
from coordinator.task_keeper import TaskKeeper
from coordinator.task_port import Done, Failed, Opening, TaskSetup, Turn
from echo2p2p.errors import ChildError, ConfigError
from echo2p2p.tasks.base import Verdict
from echo2p2p.tasks.registry import check_task, make_task
from echo2p2p.testing.journal import TraceJournal

pytestmark = pytest.mark.slow

NAME = "trouble:Trouble"
TASK = textwrap.dedent(
    """
    import os
    import time

    from echo2p2p.tasks.base import Item, Prompt, Verdict

    class Trouble:
        name = "trouble"
        turns_max = 1

        def __init__(self, *, bad=(), how="raise", slow_s=0.0):
            if how == "refuse":
                raise ValueError("how can it refuse?")
            self.bad, self.how, self.slow_s = bad, how, slow_s

        def item(self, seed):
            return Item(item_id=str(seed), data={"seed": seed})

        def prompt(self, episode):
            return None if episode.answers else Prompt(text="7=")

        def verdict(self, episode):
            time.sleep(self.slow_s)
            if episode.item.data["seed"] not in {666}:
                return Verdict(rewards=(1.0,))
            print("meeting 666", flush=True)
            match self.how:
                case "raise":
                    raise ValueError("666 is odd")
                case "nan":
                    return Verdict(rewards=(float("nan"),))
                case "hang":
                    while True:
                        pass
                case "sleep":
                    time.sleep(1000)
                case "exit":
                    os._exit(9)
                case "eat":
                    eaten = []
                    while True:
                        eaten.append(bytes(1) * (8 << 20))
                        time.sleep(0.01)

        def demonstrations(self, rng, count):
            return []
    """
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model, and a task of ours where only children look."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "trouble.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"))
    prepare_model(TINY_QWEN3, tmp_path / "model")
    return tmp_path / "model"


def episodes(*seeds):
    return [(seed, [Turn(np.asarray([11, 2], dtype=np.uint32), "stop")]) for seed in seeds]


class Slot:
    """A keeper of real workers, and what it wrote down."""

    def __init__(self, folder, *, item_timeout_s=60.0, **options):
        self.item_timeout_s = item_timeout_s
        self.journal = TraceJournal()
        self.made = []
        self.keeper = TaskKeeper(
            make_worker=self.make, setup=TaskSetup(folder, NAME, options), journal=self.journal
        )

    def make(self):
        worker = TaskWorkerProcess(item_timeout_s=self.item_timeout_s, memory_max_bytes=300_000_000)
        self.made.append(worker)
        return worker

    def lost(self):
        return [str(entry.fields["detail"]) for entry in self.journal.named("task_worker.lost")]


@pytest.fixture
async def slots():
    kept = []
    yield kept
    for slot in kept:
        await slot.keeper.close()


@pytest.mark.parametrize(
    ("how", "says", "workers"),
    [
        ("raise", "ValueError: 666 is odd", 1),
        ("nan", "rewards are (nan,)", 1),
        ("hang", "gave no sign of life for 1.5 s during 'score'; its last words: meeting 666", 3),
        ("sleep", "gave no sign of life for 1.5 s during 'score'; its last words: meeting 666", 3),
        ("exit", "died during 'score' with exit code 9; its last words: meeting 666", 3),
        ("eat", "more than the 300 MB of memory it may; its last words: meeting 666", 3),
    ],
)
async def test_whatever_a_task_does_to_one_item_costs_that_item_alone(
    folder, slots, how, says, workers
):
    patience_s = 1.5 if how in {"hang", "sleep"} else 60.0  # nobody else feels a busy machine
    slot = Slot(folder, how=how, item_timeout_s=patience_s)
    slots.append(slot)
    info = await slot.keeper.start()
    assert info.turns_max == 1
    assert [type(item) for item in await slot.keeper.open([1, 666])] == [Opening, Opening]
    scored = await slot.keeper.score(episodes(1, 666, 2))
    assert [type(answer) for answer in scored] == [Done, Failed, Done]
    assert says in scored[1].detail
    assert "\n" not in scored[1].detail
    assert len(slot.made) == workers
    assert all(says in line for line in slot.lost())
    assert len(slot.lost()) == workers - 1
    assert await slot.keeper.score(episodes(3)) == [Done(Verdict(rewards=(1.0,)))]


async def test_many_slow_items_are_no_hang(folder, slots):
    slot = Slot(folder, slow_s=0.3, item_timeout_s=1.5)
    slots.append(slot)
    await slot.keeper.start()
    scored = await slot.keeper.score(episodes(*range(8)))
    assert [type(answer) for answer in scored] == [Done] * 8, "2.4 s in all, 1.5 s are allowed each"
    assert len(slot.made) == 1


@pytest.mark.parametrize(
    ("name", "options", "path", "says"),
    [
        ("trouble:Nothing", {}, "task.name", "trouble has no class Nothing"),
        ("no.such.module:Task", {}, "task.name", "cannot import no.such.module"),
        (NAME, {"how": "refuse"}, "task.options", "how can it refuse?"),
        (NAME, {"size": 3}, "task.options", "given: size"),
        ("trouble:Item", {"item_id": "1", "data": 1}, "task.name", "is no task: it has no name"),
        ("echo2p2p.tasks.base:Task.", {}, "task.name", "is not package.module:ClassName"),
    ],
)
async def test_a_task_that_cannot_be_made_is_a_wrong_setting(
    folder, slots, name, options, path, says
):
    worker = TaskWorkerProcess()
    try:
        with pytest.raises(ConfigError) as caught:
            await worker.start(TaskSetup(folder, name, options))
    finally:
        await worker.close()
    assert caught.value.path == path
    assert says in caught.value.detail


async def test_a_task_whose_module_breaks_says_how(folder, tmp_path):
    (tmp_path / "theirs" / "trouble.py").write_text("1 / 0\n")
    worker = TaskWorkerProcess()
    try:
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            await worker.start(TaskSetup(folder, NAME))
    finally:
        await worker.close()


async def test_a_worker_without_its_tokenizer_is_a_wrong_setting(folder):
    (folder / "tokenizer.json").write_text("{}")
    worker = TaskWorkerProcess()
    try:
        with pytest.raises(ConfigError, match="is no tokenizer"):
            await worker.start(TaskSetup(folder, "sort_digits"))
    finally:
        await worker.close()


def test_looking_at_a_name_imports_nothing():
    check_task("trouble:Trouble", {"how": "raise"})
    with pytest.raises(ConfigError, match="cannot import trouble"):
        make_task("trouble:Trouble", {})
    with pytest.raises(ConfigError, match="no task 'trouble'"):
        check_task("trouble", {})


async def test_a_worker_that_dies_of_a_question_says_its_last_words(folder):
    worker = TaskWorkerProcess(item_timeout_s=5.0)
    try:
        await worker.start(TaskSetup(folder, NAME, {"how": "exit"}))
        with pytest.raises(ChildError) as caught:
            await worker.score(episodes(666))
    finally:
        await worker.close()
    assert caught.value.log_tail == "meeting 666"
