import argparse

import pytest

from scenarios.arguments import between, whole


def test_whole_numbers_between_two_ends():
    assert [whole(0, 3)(text) for text in ("0", "3")] == [0, 3]
    assert whole(1, 4096)("4096") == 4096


@pytest.mark.parametrize("text", ["0", "101", "-1", "1.5", "ten", "", "nan"])
def test_others_are_refused_with_both_ends(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a number from 1 to 100$"):
        whole(1, 100)(text)


def test_numbers_between_two_ends():
    assert [between(0.1, 250)(text) for text in ("0.1", "2.5", "250")] == [0.1, 2.5, 250]


@pytest.mark.parametrize("text", ["-1", "10001", "nan", "inf"])
def test_numbers_outside_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not between 0 and 10,000$"):
        between(0, 10_000)(text)


def test_what_is_no_number_is_said_so():
    with pytest.raises(argparse.ArgumentTypeError, match=r"'much' is no number$"):
        between(0, 1)("much")
