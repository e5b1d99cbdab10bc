"""Tasks of reasoning-gym: what is refused without it, and with it the split and the scores."""

import importlib.util
import sys

import pytest

from echo2p2p.errors import ConfigError, LocalProtocolError
from echo2p2p.tasks.base import HELD_OUT_SEED, Episode, Message
from echo2p2p.tasks.reasoning import PACKAGE, ReasoningGym, is_held_out
from echo2p2p.tasks.registry import check_task, make_task

HERE = importlib.util.find_spec(PACKAGE) is not None
with_package = pytest.mark.skipif(not HERE, reason="reasoning-gym is not installed")
SUMS = {
    "dataset": "chain_sum",
    "system": "You are a calculator.",
    "answer": "number",
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "task.options.dataset"),
        ({"dataset": 3}, "task.options.dataset"),
        ({"dataset": "chain_sum", "system": 3}, "task.options.system"),
        ({"dataset": "chain_sum", "answer": "last"}, "task.options.answer"),
        ({"dataset": "chain_sum", "partial": "yes"}, "task.options.partial"),
    ],
)
def test_options_of_our_own_are_checked_without_the_package(options, path):
    with pytest.raises(ConfigError) as error:
        check_task("reasoning_gym", options)
    assert str(error.value).startswith(path)


def test_a_missing_package_is_named_with_its_mend(monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(ConfigError, match=r"echo2p2p\[reasoning\]"):
        make_task("reasoning_gym", SUMS)


@pytest.fixture(scope="module")
def sums():
    pytest.importorskip(PACKAGE, reason="reasoning-gym is not installed")
    return ReasoningGym(SUMS)


def asked(item):
    return item.data["entry"]["question"]


def reward(task, item, answer):
    return task.verdict(Episode(item=item, answers=(answer,))).rewards


@with_package
@pytest.mark.slow  # imports the package, a second
@pytest.mark.filterwarnings("ignore")
def test_held_out_questions_are_none_of_those_that_are_trained_on(sums):
    trained = {asked(sums.item(seed)) for seed in range(1500)}
    held_out = {asked(sums.item(HELD_OUT_SEED + seed)) for seed in range(300)}
    assert len(trained) > 150  # nearly all of the 200 that there are
    assert len(held_out) > 10
    assert not trained & held_out
    assert all(map(is_held_out, held_out))


@with_package
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_item_depends_on_its_seed_alone_and_is_asked_in_messages(sums):
    item = sums.item(7)
    assert item == ReasoningGym(SUMS).item(7)
    prompt = sums.prompt(Episode(item=item))
    assert prompt.messages == (
        Message("system", "You are a calculator."),
        Message("user", asked(item)),
    )
    assert sums.prompt(Episode(item=item, answers=("1",))) is None
    with pytest.raises(LocalProtocolError):
        sums.verdict(Episode(item=item))


@with_package
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_last_number_counts_and_a_part_of_the_answer_is_none(sums):
    item = sums.item(7)
    right = item.data["entry"]["answer"]
    assert reward(sums, item, f"1 and 2 make {right}.") == (1.0,)
    assert reward(sums, item, f"{right}, or 99") == (0.0,)
    assert reward(sums, item, "none") == (0.0,)
    whole = ReasoningGym({**SUMS, "answer": "whole"})
    assert reward(whole, item, f" {right} \n") == (1.0,)
    assert reward(whole, item, f"it is {right}") == (0.0,)
    (part,) = reward(ReasoningGym({**SUMS, "answer": "whole", "partial": True}), item, f"={right}=")
    assert 0.0 < part < 1.0
    tagged = ReasoningGym({**SUMS, "answer": "tag"})
    assert reward(tagged, item, f"so <answer>{right}</answer>") == (1.0,)
    assert reward(tagged, item, right) == (0.0,)


@with_package
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_the_package_refuses_is_one_line():
    for options in ({"dataset": "no_such"}, {**SUMS, "min_terms": 0}, {**SUMS, "colour": 1}):
        with pytest.raises(ConfigError, match=r"task\.options: reasoning_gym refuses"):
            ReasoningGym(options)
