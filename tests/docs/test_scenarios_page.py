"""docs/scenarios.md: its story runs, and it names every fault, lie and checker that there is."""

import random
import re
import typing
from pathlib import Path

import pytest

from echo2p2p.errors import ConfigError
from echo2p2p.testing.pages import blocks
from scenarios import faults
from scenarios.false_uploads import UPLOAD_LIES
from scenarios.lies import RELAY_LIES
from scenarios.play import play
from scenarios.story import read_story
from scenarios.watch import EVENT_CHECKERS, LOOKS, NO_IDLING, STATED_RATE
from scenarios.world import World

PAGE = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text(encoding="utf-8")
(CAMPUS,) = blocks(PAGE, "toml")


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(title):
    return re.findall(r"^\| (?!-)(.+?) \|", section(title), re.MULTILINE)[1:]


def test_every_fault_and_lie_is_in_its_list():
    kinds = typing.get_args(typing.get_args(faults.AnyFault)[0])
    known = {typing.get_args(kind.model_fields["fault"].annotation)[0] for kind in kinds}
    named = {name for cell in first_cells("Faults") for name in re.findall(r"`([a-z-]+)`", cell)}
    assert named == known
    lies = section("Faults").partition("Lies on relay links")[2]
    assert set(re.findall(r"`([a-z-]+)`", lies)) == {*RELAY_LIES, *UPLOAD_LIES}


def test_every_checker_is_in_the_table():
    world = World(read_story(CAMPUS, "campus").draw(random.Random(1)), seed=1)
    assert [checker.name for checker in world.watch.checkers] == list(EVENT_CHECKERS)
    known = {*EVENT_CHECKERS, *LOOKS}
    assert set(first_cells("What always holds")) == known - {NO_IDLING, STATED_RATE}


def test_the_error_that_it_quotes_is_the_real_one():
    quoted = re.search(r"`error: campus\.toml: (.+?)`", PAGE)[1]
    wrong = CAMPUS.replace('["5Mbit", "20Mbit"]', '"20Mb"')
    with pytest.raises(ConfigError, match=re.escape(quoted)):
        read_story(wrong, "campus.toml")


@pytest.mark.slow
def test_the_story_of_the_page_holds():
    story = read_story(CAMPUS, "campus")
    played = play("campus", story, 7)
    assert played.problems == []
    assert played.result()["strikes"]["depart"] >= 3
    assert played.result()["strikes"]["slow-link"] >= 2
