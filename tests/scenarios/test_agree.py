"""`echo2-scenario agree`: two backends, figure beside figure."""

import copy
import json

import pytest
import trio

from echo2p2p.errors import ConfigError, EchoError
from scenarios import agree, bench_costs, namespaces
from scenarios.agree import STORIES, TOLERANCES, Tolerance, rows_of
from scenarios.command import main
from scenarios.costs import MEASURED
from scenarios.play import play
from scenarios.story import load_story, read_story

COSTS = {
    f"{name}_ms": 1000 * getattr(MEASURED, f"{name}_s")
    for name in ("start", "exchange", "piece", "handshake", "job")
} | {
    "work": {
        name: {"ms": 1000 * each.s, "ms_per_mb": 1000 * each.s_per_mb}
        for name, each in {**MEASURED.work, bench_costs.STEP: MEASURED.step}.items()
    },
    "machine": {"cores": MEASURED.cores},
}

STORY = """
[world]
stop_s = 14
heal_s = 5
learner_step_s = 0.5
learner_start_s = 0.5
[[peers]]
count = 2
engine_start_s = 0.5
seconds_per_token = 0.01
[checks]
converge_s = 4
"""


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    path = tmp_path_factory.mktemp("story") / "two.toml"
    path.write_text(STORY, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def virtual():
    return play("two", read_story(STORY, "two"), 7, costs=MEASURED).result()


def live_as(virtual, *, others_cores=0.0, **more):
    return copy.deepcopy(virtual) | {"load": {"cores": 2, "others_cores": others_cores}} | more


def of(rows, name):
    (row,) = [row for row in rows if row["figure"] == name]
    return row


def test_a_share_of_the_larger_or_an_amount_whichever_is_more():
    near = Tolerance(0.25, 0.05)
    assert near.holds(1.0, 0.75)
    assert near.holds(0.75, 1.0)
    assert not near.holds(1.0, 0.74)
    assert near.holds(0.01, 0.06)
    assert not near.holds(0.01, 0.07)


def test_what_is_alike_agrees_and_what_is_not_is_named(virtual):
    assert all(row["agrees"] is not False for row in rows_of([virtual], [live_as(virtual)]))
    slow = copy.deepcopy(virtual["versions"])
    slow["reached_s"]["0.5"] = 2 * slow["reached_s"]["0.5"] + 0.1
    rows = rows_of([virtual], [live_as(virtual, versions=slow, idle_share=None)])
    wrong = {row["figure"] for row in rows if row["agrees"] is False}
    assert wrong == {"in half of the engines, s", "idle share"}
    assert of(rows, "converged, s")["agrees"] is None


def test_a_reason_that_never_came_up_on_one_backend_counts_as_none(virtual):
    counts = copy.deepcopy(virtual["trajectories"])
    counts["rejected"] = {"damaged": int(0.02 * counts["issued"])}
    assert of(
        rows_of([virtual], [live_as(virtual, trajectories=counts)]), "rejected(damaged) share"
    )["agrees"]
    counts["rejected"] = {"damaged": int(0.06 * counts["issued"])}
    row = of(rows_of([virtual], [live_as(virtual, trajectories=counts)]), "rejected(damaged) share")
    assert row["virtual"] == 0.0
    assert row["agrees"] is False


def test_means_over_the_seeds_are_compared(virtual):
    counts = copy.deepcopy(virtual["trajectories"])
    counts["rejected"] = {"damaged": int(0.08 * counts["issued"])}
    many, few = virtual["steps"] + 20, virtual["steps"] - 20
    lives = [live_as(virtual, steps=many, trajectories=counts), live_as(virtual, steps=few)]
    rows = rows_of([virtual, virtual], lives)
    assert of(rows, "steps")["live"] == virtual["steps"]
    assert of(rows, "steps")["agrees"]
    assert of(rows, "rejected(damaged) share")["live"] == pytest.approx(0.04, abs=0.002)
    assert of(rows_of([virtual] * 2, [lives[0]] * 2), "steps")["agrees"] is False
    lives[0]["idle_share"] = None
    assert of(rows_of([virtual] * 2, lives), "idle share")["agrees"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others_cores", "changes", "code"),
    [(0.0, {}, 0), (0.0, {"steps": 1000}, 1), (1.0, {}, 0), (0.0, {"held": False}, 1)],
)
def test_the_exit_code_says_whether_they_agree(
    others_cores, changes, code, story, virtual, monkeypatch, capsys, tmp_path
):
    async def play_live(name, story, seed):
        await trio.lowlevel.checkpoint()
        return live_as(virtual, others_cores=others_cores, **changes), []

    async def measure():
        await trio.lowlevel.checkpoint()
        return COSTS

    monkeypatch.setattr(agree, "play_live", play_live)
    monkeypatch.setattr(agree, "check_possible", lambda: None)
    monkeypatch.setattr(bench_costs, "measure", measure)
    assert main(["agree", str(story)]) == code
    text = capsys.readouterr().out
    assert ("OUTSIDE" in text) == ("steps" in changes)
    assert ("idle machine" in text) == (others_cores > 0)
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS), encoding="utf-8")
    monkeypatch.delattr(bench_costs, "measure")
    words = ["agree", str(story), "--costs", str(costs), "--seeds", "2", "--json"]
    assert main(words) == code
    result = json.loads(capsys.readouterr().out)
    assert result["stories"][0]["seeds"] == [7, 8]
    assert result["agree"] == (code == 0)
    assert set(TOLERANCES) < set(result["tolerances"])
    assert result["machine"]["cores"]
    assert result["versions"]["echo2p2p"]
    assert result["costs"]["start_s"] == pytest.approx(MEASURED.start_s)


def test_costs_are_read_as_they_were_written(tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS), encoding="utf-8")
    found = agree.read_costs(costs)
    assert found.cores == MEASURED.cores
    for name in ("start_s", "exchange_s", "piece_s", "handshake_s", "job_s"):
        assert getattr(found, name) == pytest.approx(getattr(MEASURED, name)), name
    assert found.work.keys() == MEASURED.work.keys()
    for mine, theirs in [
        (found.step, MEASURED.step),
        *((found.work[name], MEASURED.work[name]) for name in MEASURED.work),
    ]:
        assert (mine.s, mine.s_per_mb) == pytest.approx((theirs.s, theirs.s_per_mb))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"work": {}}', "\xff"),
        json.dumps(COSTS | {"machine": {"cores": 0}}),
        json.dumps(COSTS | {"piece_ms": -1}),
        json.dumps(COSTS | {"work": {}}),
    ],
)
def test_a_file_that_holds_no_costs_is_named_in_one_line(text, tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        agree.read_costs(tmp_path)
    costs = tmp_path / "costs.json"
    costs.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="bench costs --json"):
        agree.read_costs(costs)


def test_without_root_one_line_says_so(story, monkeypatch, capsys):
    def never(*_):
        raise EchoError("network namespaces need root")

    monkeypatch.setattr(namespaces, "why_impossible", never)
    assert main(["agree", "live/no-such"]) == 2
    assert "no such story" in capsys.readouterr().err


def test_its_stories_are_short_and_small():
    for name in STORIES:
        story = load_story(f"live/{name}")
        assert story.world.stop_s <= 60
        assert sum(group.count for group in story.peers) <= 4
