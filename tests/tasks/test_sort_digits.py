"""The sorting task, and tasks by name."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import ConfigError, LocalProtocolError
from echo2p2p.tasks.base import Episode, Prompt
from echo2p2p.tasks.registry import make_task
from echo2p2p.tasks.sort_digits import SortDigits

seeds = st.integers(0, 2**63 - 1)


def reward(task, item, *answers, truncated=False):
    episode = Episode(item=item, answers=answers, truncated=truncated)
    assert task.prompt(episode) is None
    return task.verdict(episode).rewards


@given(seeds, st.integers(1, 8))
def test_an_item_depends_on_its_seed_alone_and_its_prompt_shows_only_the_digits(seed, length):
    task = SortDigits(length=length)
    item = task.item(seed)
    assert item == SortDigits(length=length).item(seed)
    prompt = task.prompt(Episode(item=item))
    assert prompt == Prompt(text=item.data["digits"] + "=")
    assert len(item.data["digits"]) == length


def test_items_are_as_they_were():
    task = SortDigits()
    assert [task.item(seed).data["digits"] for seed in range(4)] == ["6604", "2914", "0115", "3982"]


@given(seeds)
def test_only_the_sorted_digits_are_rewarded(seed):
    task = SortDigits()
    item = task.item(seed)
    digits = item.data["digits"]
    right = "".join(sorted(digits))
    assert reward(task, item, right) == (1.0,)
    for wrong in {digits, right[::-1], "", right + "0", right[:-1], " " + right, right + "="}:
        assert reward(task, item, wrong) == ((1.0,) if wrong == right else (0.0,))


def test_an_answer_that_does_not_end_is_wrong_and_trained_on():
    task = SortDigits()
    item = task.item(3)
    verdict = task.verdict(Episode(item=item, answers=("3489",), truncated=True))
    assert (verdict.rewards, verdict.masked) == ((0.0,), False)


def test_an_open_episode_has_no_verdict():
    task = SortDigits()
    with pytest.raises(LocalProtocolError):
        task.verdict(Episode(item=task.item(0)))


def test_demonstrations_mix_three_behaviours_of_which_a_minority_is_rewarded():
    pairs = SortDigits(length=6).demonstrations(random.Random(5), 4000)
    kinds = Counter()
    for prompt, answer in pairs:
        digits = prompt.text[:-1]
        assert prompt.text[-1] == "="
        if answer == "".join(sorted(digits)):
            kinds["up"] += 1
        elif answer == "".join(sorted(digits, reverse=True)):
            kinds["down"] += 1
        else:
            assert answer == digits
            kinds["copy"] += 1
    assert kinds["up"] / 4000 == pytest.approx(0.4, abs=0.03)
    assert kinds["down"] / 4000 == pytest.approx(0.3, abs=0.03)
    assert pairs == SortDigits(length=6).demonstrations(random.Random(5), 4000)


def test_the_registry_makes_tasks_with_their_options():
    task = make_task("sort_digits", {"length": 7})
    assert (task.name, task.turns_max, len(task.item(1).data["digits"])) == ("sort_digits", 1, 7)
    assert len(make_task("sort_digits", {}).item(1).data["digits"]) == 4


@pytest.mark.parametrize(
    ("name", "options", "path"),
    [
        ("sort", {}, "task.name"),
        ("sort_digits", {"size": 4}, "task.options.size"),
        ("sort_digits", {"length": 0}, "task.options.length"),
        ("sort_digits", {"length": True}, "task.options.length"),
        ("sort_digits", {"length": "4"}, "task.options.length"),
        ("sort_digits", {"length": 33}, "task.options.length"),
    ],
)
def test_the_registry_names_the_setting_that_is_wrong(name, options, path):
    with pytest.raises(ConfigError) as caught:
        make_task(name, options)
    assert caught.value.path == path
