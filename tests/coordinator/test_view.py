"""A status as lines and as a drawn view."""

import copy
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import view

STATUS = {
    "run": "r1",
    "outcome": "running",
    "phase": {"name": "training"},
    "step": 40,
    "steps_target": 200,
    "wall_s": 75.0,
    "generation": 0,
    "reward_version0": 0.25,
    "reward_recent": 0.75,
    "age_recent": 2.0,
    "age_steps": {"mean": 1.5, "max": 3},
    "staleness_budget": 3,
    "batch_groups": 32,
    "queue": {"groups": 8, "unscored": 1},
    "learner_idle_share": 0.125,
    "steps_per_s": 2.0,
    "versions_published": 21,
    "versions": [{"version": 20, "last_after_s": 0.5}, {"version": 21, "last_after_s": None}],
    "weights": {
        "delta_bytes_mean": 200_000.0,
        "ratio_mean": 6.1,
        "source_bytes": 4_100_000,
        "peer_bytes": 0,
    },
    "trajectories": {
        "issued": 20,
        "trained": 10,
        "queued": 4,
        "in_flight": 3,
        "rejected": {"not_finite": 1, "stale": 2},
        "balances": True,
        "recount_agrees": True,
    },
    "curve": {"reward": [0.25, 0.5, 0.75]},
    "peers": [
        {"name": "old", "state": "gone", "version": None, "accepted": 9, "rejected": 0,
         "rejected_by_reason": {}, "relayed_bytes": 0},
        {"name": "ann", "state": "active", "version": 20, "behind": 1, "tokens_per_s": 512.4,
         "accepted": 7, "rejected": 3, "rejected_by_reason": {"not_finite": 1, "stale": 2},
         "relayed_bytes": 1_234_567, "received_bytes": 999},
    ],
}  # fmt: skip


def drawn(status, width=120):
    rich = pytest.importorskip("rich.console")
    out = io.StringIO()
    console = rich.Console(file=out, width=width, force_terminal=True, color_system=None)
    console.print(view.RunView(status, "echo2p2p", ["a note"]))
    return out.getvalue()


def test_lines_say_what_a_person_asks_for():
    text = "\n".join(view.status_lines(STATUS))
    assert "run r1: training, step 40/200, 1:15, generation 0" in text
    assert "0.250 before, 0.750 now" in text
    assert "2.00 steps now, 1.50 in the mean, 3 at most (budget 3)" in text
    assert "8 groups of 32 a step, 1 waiting for scores" in text
    assert "idle 12 % of the time, 2.00 steps/s" in text
    assert "a delta is 200 kB, 1/6.1 of the model" in text
    assert "the last peer has one 0.50 s after its publication" in text
    assert (
        "20 issued = 10 trained + 4 queued + 3 in flight + 3 rejected (stale 2, not_finite 1); "
        "balances"
    ) in text


def test_the_table_has_living_peers_first_and_why_work_was_rejected():
    *_, head, ann, old = view.status_lines(STATUS)
    assert head.split()[:4] == ["peer", "state", "version", "tokens/s"]
    assert ann.startswith("ann   active  20 (-1)")
    assert ann.endswith("stale 2, not_finite 1")
    assert "1.2 MB" in ann
    assert "999 B" in ann
    assert old.split()[:3] == ["old", "gone", "-"]


def test_before_the_first_step_there_are_dashes_and_no_errors():
    empty = STATUS | {
        "outcome": "running",
        "phase": {"name": "warm_start", "step": 20.0, "loss": 1.25},
        "reward_version0": None,
        "reward_recent": None,
        "age_recent": None,
        "age_steps": {"mean": None, "max": 0},
        "steps_per_s": None,
        "versions": [],
        "weights": STATUS["weights"] | {"ratio_mean": 0.0, "delta_bytes_mean": 0.0},
        "curve": {"reward": []},
        "peers": [],
    }
    text = "\n".join(view.status_lines(empty))
    assert "warm start, step 20, loss 1.250" in text
    assert "reward   - before, - now" in text
    assert "a delta" not in text
    assert "warm start" in drawn(empty)


def test_a_broken_ledger_is_shouted():
    broken = copy.deepcopy(STATUS)
    broken["trajectories"]["recount_agrees"] = False
    assert "DOES NOT BALANCE" in "\n".join(view.status_lines(broken))
    assert "DOES NOT BALANCE" in drawn(broken)


def test_the_drawn_view_has_title_progress_chart_figures_peers_and_notes():
    text = drawn(STATUS)
    for wanted in ("echo2p2p", "run r1", "40/200", "▅", "█", "ledger", "ann", "a note"):
        assert wanted in text


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_the_drawn_view_fits_any_terminal(width):
    assert all(len(line) <= width for line in drawn(STATUS, width).splitlines())


def test_a_crowd_is_cut_to_the_busiest():
    crowd = [
        STATUS["peers"][1] | {"name": f"p{number:03}", "accepted": number} for number in range(90)
    ]
    text = drawn(STATUS | {"peers": crowd})
    assert "p089" in text
    assert "p000" not in text
    assert f"and {90 - view.PEERS_SHOWN} more" in text


def test_names_of_peers_are_shown_as_they_are_and_not_read_as_markup():
    odd = STATUS["peers"][1] | {"name": "[red]x[/red]"}
    assert "[red]x[/red]" in drawn(STATUS | {"peers": [odd]})


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_499, "999 kB"), (2.5e6, "2.5 MB"),
     (123e9, "123 GB"), (4e15, "4000.0 TB")],
)  # fmt: skip
def test_bytes_are_told_in_three_digits(count, text):
    assert view.bytes_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(7.9, "0:07"), (754, "12:34"), (11045, "3:04:05")])
def test_durations_read_like_a_clock(seconds, text):
    assert view.duration_text(seconds) == text


def test_bars_grow_from_the_bottom():
    assert view.bars([0.0, 0.5, 1.0], 10, 2) == ["  █", " ██"]
    assert view.bars([1.0], 10, 1) == ["█"]
    assert view.bars([-1.0, 0.0, 1.0], 10, 2) == ["  █", " ██"]
    assert view.bars([], 10, 3) == ["", "", ""]


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 90), st.integers(1, 6)
)
def test_bars_fit_whatever_the_values(values, width, rows):
    lines = view.bars(values, width, rows)
    assert len(lines) == rows
    assert all(len(line) <= width for line in lines)
