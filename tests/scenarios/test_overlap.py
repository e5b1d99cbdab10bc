import json
from dataclasses import replace

import pytest

from scenarios.command import main
from scenarios.overlap import (
    GROUPS,
    SAMPLES,
    STEP_S,
    Run,
    draw,
    measure,
    ours_feasible,
    paper_feasible,
    play,
    row_of,
    table,
)

PER_STEP = GROUPS * SAMPLES
GOOD = Run(
    staleness_budget=3,
    kappa=2,
    broadcast_s=0.5,
    generation_s=1.0,
    fleet_per_s=2 * PER_STEP / STEP_S,
    idle_share=0.01,
    delta_bytes=1000.0,
)


def test_the_papers_rule_knows_neither_the_budget_nor_generation():
    assert paper_feasible(GOOD)
    assert paper_feasible(replace(GOOD, staleness_budget=0, generation_s=100.0))
    # kappa R / mu = T, so that B may take another T.
    assert paper_feasible(replace(GOOD, broadcast_s=STEP_S))
    assert not paper_feasible(replace(GOOD, broadcast_s=STEP_S + 0.1))


def test_ours_wants_slack_for_a_broadcast_and_a_generation():
    assert ours_feasible(GOOD)
    most_s = (GOOD.staleness_budget - GOOD.kappa + 1) * STEP_S
    assert not ours_feasible(replace(GOOD, broadcast_s=most_s - GOOD.generation_s))
    synchronous = replace(GOOD, staleness_budget=0, kappa=1, broadcast_s=1.5)
    assert not ours_feasible(synchronous)
    assert not ours_feasible(replace(GOOD, fleet_per_s=0.9 * PER_STEP / STEP_S))
    # j = 1: R / (2 T - 1.5) is more than R / T.
    needed = PER_STEP / (2 * STEP_S - 1.5)
    assert ours_feasible(replace(GOOD, fleet_per_s=max(needed, PER_STEP / STEP_S) + 0.01))
    slow = replace(GOOD, broadcast_s=1.9)
    needed = PER_STEP / (2 * STEP_S - 2.9)
    assert needed > PER_STEP / STEP_S
    assert ours_feasible(replace(slow, fleet_per_s=needed + 0.01))
    assert not ours_feasible(replace(slow, fleet_per_s=needed - 0.01))


def test_a_rule_is_right_if_it_calls_feasible_what_did_not_idle(tmp_path):
    rows = [row_of(GOOD), row_of(replace(GOOD, idle_share=0.2))]
    assert [row["ours_right"] for row in rows] == [True, False]
    text = table({"rows": rows, "seed": 1, "versions": {"echo2p2p": "0"}})
    assert text.count("feasible WRONG") == 2
    assert "ours: right in 1 of 2" in text
    pytest.importorskip("matplotlib")
    draw(rows, 1, tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_slow_broadcast_makes_a_learner_without_a_budget_idle(monkeypatch, capsys):
    monkeypatch.setattr("scenarios.overlap.BALLAST", 200_000)
    monkeypatch.setattr("scenarios.overlap.PEERS", 4)
    (row,) = measure([0], [4.0], seed=1, steps=6)
    assert row["broadcast_s"] > 2
    assert row["idle_share"] > 0.4
    assert not row["ours_feasible"]
    quick = play(3, 2.5e7, 1, 6)
    assert quick.broadcast_s < 0.5
    assert quick.idle_share < row["idle_share"]
    assert json.loads(json.dumps(row)) == row


def test_the_command_is_there(capsys):
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "overlap", "--help"])
    assert end.value.code == 0
    assert "which rule foresees it" in capsys.readouterr().out
