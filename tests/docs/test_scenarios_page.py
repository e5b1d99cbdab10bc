"""docs/scenarios.md: its story runs, and it names every fault, lie and checker that there is."""

import json
import random
import re
import subprocess
import sys
import textwrap
import typing
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from echo2p2p.errors import ConfigError
from echo2p2p.testing import checkers
from echo2p2p.testing.pages import blocks
from scenarios import agree, faults, namespaces, nemesis
from scenarios.false_uploads import UPLOAD_LIES
from scenarios.lies import RELAY_LIES
from scenarios.play import play
from scenarios.story import read_story
from scenarios.watch import EVENT_CHECKERS, LOOKS, NO_IDLING, STATED_RATE
from scenarios.world import World

PAGE = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text(encoding="utf-8")
(CAMPUS,) = blocks(PAGE, "toml")
CAMPUS_FILE = Path(__file__).parents[2] / "docs" / "stories" / "campus.toml"
FAULT, STRIKE, CHECKER = blocks(PAGE, "python")
WHY = namespaces.why_impossible() or namespaces.why_no_packets_held()


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


def test_the_story_of_the_page_is_the_file_beside_it():
    assert CAMPUS_FILE.read_text(encoding="utf-8") == CAMPUS


@pytest.mark.slow
def test_the_story_of_the_page_holds():
    story = read_story(CAMPUS, "campus")
    played = play("campus", story, 7)
    assert played.problems == []
    assert played.result()["strikes"]["depart"] >= 3
    assert played.result()["strikes"]["slow-link"] >= 2


@pytest.mark.slow
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
def test_the_story_of_the_page_holds_with_real_processes():
    command = (sys.executable, "-P", "-m", "scenarios", "run", str(CAMPUS_FILE), "--live", "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert result["problems"] == []
    assert result["strikes"] == {"depart": result["strikes"]["depart"], "slow-link": 2}
    seen = {key.partition(":")[0] for key in result["fullest"]}
    assert seen == {"coordinator", "peer"}, "queues are looked at"


def namespace_of(module, code):
    names = dict(vars(module)) | {"Mapping": Mapping}
    exec(compile(code, "docs/scenarios.md", "exec"), names)
    return names


def test_the_fault_of_the_page_is_one():
    hiccup = namespace_of(faults, FAULT)["Hiccup"]
    assert hiccup.model_validate({"fault": "hiccup", "at_s": 3, "on": "dorm"}).depth_s == 1.0
    body = textwrap.indent(textwrap.dedent(STRIKE), "        ")
    source = f"async def strike(fault, machine, hold):\n    match fault:\n{body}"
    strike = namespace_of(nemesis, source)["strike"]
    done = []
    machine = SimpleNamespace(
        pace=SimpleNamespace(stop=lambda: done.append("stop"), go_on=lambda: done.append("go on"))
    )

    async def hold():
        done.append("hold")

    fault = hiccup(fault="hiccup", at_s=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "Hiccup", hiccup, raising=False)
        trio.run(strike, fault, machine, hold)
    assert done == ["stop", "hold", "go on"]


def test_the_checker_of_the_page_sees():
    checker = namespace_of(checkers, CHECKER)["OneVersionAtATime"]()
    events = [("version.published", 0), ("version.loaded", 0), ("version.published", 1)]
    assert [checker.see(name, {"version": version}) for name, version in events] == [None] * 3
    assert checker.see("version.published", {"version": 2}) == "version 2, and nobody has 1"


def test_the_tolerances_of_the_page_are_those_that_count():
    rows = dict(
        re.findall(r"^\| (.+?) \| (.*) \|$", section("Do virtual and real agree?"), re.MULTILINE)
    )
    assert rows["version in half of the engines"] == "25 % | 0.05 s"
    said = {
        "in half of the engines, s": "version in half of the engines",
        "in 95 % of the engines, s": "version in 95 % of the engines",
        "in all engines, middle version, s": "version in all engines, middle version",
        "steps": "steps; versions",
        "versions": "steps; versions",
        "coordinator sent, MB": "bytes sent by the coordinator, by all peers",
        "peers sent, MB": "bytes sent by the coordinator, by all peers",
    }
    for name, row in said.items():
        share, amount = rows[row].split(" | ")
        tolerance = agree.TOLERANCES[name]
        assert tolerance.share == int(share.removesuffix(" %")) / 100, name
        assert tolerance.least == float(amount.split()[0]), name
    rest = set(agree.TOLERANCES) - set(said)
    assert rest == {"idle share", "trained share", "rejected share"}
    assert {agree.TOLERANCES[name] for name in rest} == {agree.EACH_REASON}
    share, least = agree.EACH_REASON.share, agree.EACH_REASON.least
    assert (share, least) == (0.0, 0.05)
