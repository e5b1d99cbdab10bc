"""Episodes from seeds and tokens: the desk alone, and behind a process."""

import dataclasses
import signal

import numpy as np
import pytest

from coordinator.model import TINY_QWEN3, prepare_model
from coordinator.task_client import TaskWorkerProcess
from coordinator.task_desk import TaskDesk
from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, TaskSetup, Turn
from echo2p2p.errors import ChildError, ConfigError, LocalProtocolError
from echo2p2p.tasks.base import Item, Prompt, Verdict
from echo2p2p.tasks.sort_digits import SortDigits
from scenarios.parts import CharacterTokenizer, InlineTaskWorker

TOKENIZER = CharacterTokenizer()
EOS = 2


def turn(text, finish="stop"):
    tokens = TOKENIZER.encode(Prompt(text=text))[1:] + ([EOS] if finish == "stop" else [])
    return Turn(np.asarray(tokens, dtype=np.uint32), finish)


class Guessing:
    """Three guesses at a number, two players in turn; options make it misbehave."""

    name = "guessing"
    turns_max = 3

    def __init__(self, *, verdict=None, error_in="", endless=False, text=None):
        self.seen = []
        self._verdict = verdict
        self._error_in = error_in
        self._endless = endless
        self._text = text

    def _trip(self, place):
        if self._error_in == place:
            raise ValueError(f"bad\n{place}")

    def item(self, seed):
        self._trip("item")
        return Item(item_id=str(seed), data={"number": str(seed % 10)})

    def prompt(self, episode):
        self._trip("prompt")
        over = len(episode.answers) == 3 or episode.item.data["number"] in episode.answers
        if over and not self._endless:
            return None
        said = "".join(f"{answer}," for answer in episode.answers)
        return Prompt(text=said + "?" if self._text is None else self._text,
                      player=len(episode.answers) % 2)  # fmt: skip

    def verdict(self, episode):
        self._trip("verdict")
        self.seen.append(episode)
        if self._verdict is not None:
            return self._verdict
        won = episode.item.data["number"] in episode.answers
        return Verdict(rewards=(float(won), -float(won)))


def test_an_episode_is_stepped_from_its_seed_and_its_answers_alone():
    task = Guessing()
    [opening] = TaskDesk(task, TOKENIZER).open([14])
    assert (opening.seed, opening.item_id, opening.player) == (14, "14", 0)
    assert TOKENIZER.decode(opening.prompt[1:]) == "?"
    following = TaskDesk(task, TOKENIZER).advance(14, [turn("1")])
    assert isinstance(following, Next)
    assert (TOKENIZER.decode(following.prompt[1:]), following.player) == ("1,?", 1)
    done = TaskDesk(task, TOKENIZER).advance(14, [turn("1"), turn("4")])
    assert done == Done(Verdict(rewards=(1.0, -1.0)))
    assert task.seen[-1].answers == ("1", "4")
    late = TaskDesk(task, TOKENIZER).advance(14, [turn("1"), turn("2"), turn("3", "length")])
    assert late == Done(Verdict(rewards=(0.0, -0.0)))
    assert task.seen[-1].truncated


def test_a_stop_token_belongs_to_the_answer_only_where_it_did_not_end_it():
    task = Guessing()
    desk = TaskDesk(task, TOKENIZER)
    four = TOKENIZER.encode(Prompt(text="4"))[1:]
    stopped = Turn(np.asarray([*four, EOS], dtype=np.uint32), "stop")
    twice = Turn(np.asarray([*four, EOS, EOS], dtype=np.uint32), "stop")
    assert isinstance(desk.advance(4, [stopped]), Done)
    assert isinstance(desk.advance(4, [twice]), Next)


@pytest.mark.parametrize("place", ["item", "prompt", "verdict"])
def test_exceptions_of_the_task_fail_the_episode_and_nothing_else(place, capsys):
    desk = TaskDesk(Guessing(error_in=place), TOKENIZER)
    assert desk.advance(4, [turn("4")]) == Failed(f"ValueError: bad {place}")
    assert "Traceback" in capsys.readouterr().err
    if place == "verdict":
        assert isinstance(desk.open([1])[0], Opening)
    else:
        assert desk.open([1, 2]) == [Failed(f"ValueError: bad {place}")] * 2


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(rewards=()),
        Verdict(rewards=(float("nan"),)),
        Verdict(rewards=(float("inf"), 0.0)),
        Verdict(rewards=("many",)),
        Verdict(rewards=(1.0,), credit=(1.0, 1.0)),
        Verdict(rewards=(1.0,), credit=(float("nan"),)),
        None,
    ],
)
def test_nonsense_instead_of_a_reward_fails_the_episode(verdict):
    task = Guessing(verdict=verdict)
    if verdict is None:
        task.verdict = lambda episode: None
    assert isinstance(TaskDesk(task, TOKENIZER).advance(4, [turn("4")]), Failed)


def test_numbers_of_other_kinds_become_floats():
    task = Guessing(verdict=Verdict(rewards=(np.float32(1), True), credit=(1,), masked=1))
    done = TaskDesk(task, TOKENIZER).advance(4, [turn("4")])
    assert done == Done(Verdict(rewards=(1.0, 1.0), credit=(1.0,), masked=True))
    assert [type(value) for value in done.verdict.rewards] == [float, float]


def test_an_episode_without_end_fails_at_its_last_turn():
    desk = TaskDesk(Guessing(endless=True), TOKENIZER)
    turns = [turn("1"), turn("2")]
    assert isinstance(desk.advance(4, turns), Next)
    assert desk.advance(4, [*turns, turn("3")]) == Failed("the task asks on after its 3 turns")


def test_aborted_answers_fail_the_episode():
    assert isinstance(TaskDesk(Guessing(), TOKENIZER).advance(4, [turn("4", "aborted")]), Failed)


def test_a_prompt_that_leaves_no_room_for_an_answer_fails():
    room = CharacterTokenizer.positions_max
    fits = TaskDesk(Guessing(text="1" * (room - 2)), TOKENIZER)
    assert isinstance(fits.open([1])[0], Opening)
    long = TaskDesk(Guessing(text="1" * (room - 1)), TOKENIZER)
    assert long.open([1]) == [Failed("a prompt of 128 tokens; the model takes 128 in all")]


def test_an_episode_without_a_turn_is_our_own_bug():
    with pytest.raises(LocalProtocolError):
        TaskDesk(SortDigits(), TOKENIZER).advance(1, [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    prepare_model(TINY_QWEN3, folder)
    return folder


@pytest.fixture(params=["inline", pytest.param("process", marks=pytest.mark.slow)])
async def worker(request):
    subject = InlineTaskWorker() if request.param == "inline" else TaskWorkerProcess()
    yield subject
    await subject.close()


def plain(results):
    """Return results as comparable values."""
    return [
        {name: value.tolist() if isinstance(value, np.ndarray) else value
         for name, value in dataclasses.asdict(result).items()}
        for result in results
    ]  # fmt: skip


async def test_every_worker_serves_the_same_task(worker, folder):
    info = await worker.start(TaskSetup(folder, "sort_digits", {"length": 3}))
    assert info == TaskInfo(vocab_size=64, stop_ids=(2,), turns_max=1, positions_max=128)
    desk = TaskDesk(SortDigits(length=3), TOKENIZER)
    seeds = [0, 5, 2**63 - 1]
    assert plain(await worker.open(seeds)) == plain(desk.open(seeds))
    digits = [SortDigits(length=3).item(seed).data["digits"] for seed in seeds]
    episodes = [(seeds[0], [turn("".join(sorted(digits[0])))]), (seeds[1], [turn("")])]
    scored = await worker.score(episodes)
    assert scored == [Done(Verdict(rewards=(1.0,))), Done(Verdict(rewards=(0.0,)))]
    assert await worker.open([]) == await worker.score([]) == []


async def test_every_worker_names_a_wrong_setting(worker, folder):
    with pytest.raises(ConfigError) as caught:
        await worker.start(TaskSetup(folder, "sort_digits", {"size": 3}))
    assert caught.value.path == "task.options.size"


@pytest.mark.slow
async def test_a_killed_worker_is_an_error_and_another_scores_the_same(folder):
    first, second = TaskWorkerProcess(), TaskWorkerProcess()
    setup = TaskSetup(folder, "sort_digits")
    episodes = [(3, [turn("2389")])]
    try:
        await first.start(setup)
        before = await first.score(episodes)
        first.child._process.send_signal(signal.SIGKILL)
        with pytest.raises(ChildError, match="task worker: died"):
            await first.score(episodes)
        await second.start(setup)
        assert await second.score(episodes) == before == [Done(Verdict(rewards=(1.0,)))]
    finally:
        await first.close()
        await second.close()
