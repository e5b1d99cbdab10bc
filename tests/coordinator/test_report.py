"""Figures of a run, against sums by hand."""

import json
from dataclasses import replace

import pytest

from coordinator import report
from coordinator.publish import WeightBytes
from coordinator.training import StepRecord
from echo2p2p.ids import Step
from echo2p2p.rollouts.ledger import Balance


def record(
    step: int,
    reward: float = 0.5,
    *,
    idle_s: float = 0.0,
    train_s: float = 1.0,
    elapsed_s: float = 1.0,
    ages: tuple[float, int] = (0.0, 0),
    untrained: tuple[float, int] = (0.0, 0),
) -> StepRecord:
    return StepRecord(
        step=Step(step),
        reward=reward,
        version_steps=(0, 1),
        age_mean=ages[0],
        age_max=ages[1],
        idle_s=idle_s,
        train_s=train_s,
        elapsed_s=elapsed_s,
        tokens=10,
        zero_advantage_groups=1,
        first_version_rewards=untrained,
        metrics={"loss": 0.25},
    )


def test_before_the_first_step_there_are_no_figures() -> None:
    progress = report.Progress(began_s=5.0)
    assert progress.idle_share == 0.0
    assert progress.reward_recent() is None
    assert progress.summary(7.0) == {
        "reward_version0": None,
        "reward_first": None,
        "reward_last": None,
        "steps": 0,
        "wall_s": 2.0,
        "learner_idle_share": 0.0,
        "age_steps": {"mean": None, "max": 0},
        "parity": None,
    }


def test_parity_is_a_mean_over_tokens_and_a_maximum_over_steps() -> None:
    progress = report.Progress(began_s=0.0)
    for step, figures in enumerate([(30, 0.01, 0.2, 1e-4), None, (10, 0.05, 0.1, 5e-4)], 1):
        names = ("parity_tokens", "parity_mean", "parity_max", "parity_kl")
        more = {} if figures is None else dict(zip(names, map(float, figures), strict=True))
        progress.add(replace(record(step), metrics={"loss": 0.25, **more}))
    assert progress.parity() == {
        "steps": 2,
        "tokens": 40,
        "mean": pytest.approx(0.02),
        "max": pytest.approx(0.2),
        "kl": pytest.approx(2e-4),
    }


def test_waiting_for_the_first_batch_is_start_up_and_later_waiting_is_idling() -> None:
    progress = report.Progress(began_s=0.0)
    progress.add(record(1, idle_s=50.0, elapsed_s=51.0))
    assert progress.idle_share == 0.0
    progress.add(record(2, idle_s=2.0, elapsed_s=4.0))
    progress.add(record(3, idle_s=0.0, elapsed_s=4.0))
    assert progress.idle_share == pytest.approx(2.0 / 8.0)


def test_rewards_at_the_edges_are_means_of_ten_steps_each() -> None:
    progress = report.Progress(began_s=0.0)
    for step in range(1, 26):
        progress.add(record(step, reward=float(step)))
    summary = progress.summary(30.0)
    assert summary["reward_first"] == pytest.approx(sum(range(1, 11)) / 10)
    assert summary["reward_last"] == progress.reward_recent() == pytest.approx(20.5)
    assert summary["steps"] == 25


def test_ages_and_the_untrained_reward_are_taken_over_all_steps() -> None:
    progress = report.Progress(began_s=0.0)
    progress.add(record(1, ages=(0.5, 1), untrained=(3.0, 8)))
    progress.add(record(2, ages=(1.5, 3), untrained=(1.0, 2)))
    progress.add(record(3, ages=(1.0, 2), untrained=(0.0, 0)))
    summary = progress.summary(4.0)
    assert summary["age_steps"] == {"mean": 1.0, "max": 3}
    assert summary["reward_version0"] == pytest.approx(0.4)


def test_after_a_rollback_the_lost_steps_do_not_count() -> None:
    progress = report.Progress(began_s=0.0)
    for step, reward in [(1, 0.1), (2, 0.2), (3, 0.9), (4, 0.9)]:
        progress.add(record(step, reward, untrained=(reward, 1)))
    progress.roll_back(2)
    assert progress.summary(5.0)["steps"] == 2
    assert progress.summary(5.0)["reward_version0"] == pytest.approx(0.15)
    progress.add(record(3, 0.3))
    assert progress.summary(6.0)["steps"] == 3
    assert progress.summary(6.0)["reward_last"] == pytest.approx(0.2)


def test_a_run_taken_up_again_goes_on_with_the_figures_that_it_had() -> None:
    whole, first = report.Progress(began_s=3.0), report.Progress(began_s=3.0)
    records = [record(step, step / 10, idle_s=0.5, ages=(1.0, step)) for step in range(1, 16)]
    for item in records:
        whole.add(item)
    for item in records[:7]:
        first.add(item)
    later = report.Progress(began_s=3.0, records=records[:7])
    assert later.summary(9.0) == first.summary(9.0)
    for item in records[7:]:
        later.add(item)
    assert later.summary(20.0) == whole.summary(20.0)
    assert later.idle_share == whole.idle_share > 0


def test_the_ledger_part_says_whether_it_can_be_trusted() -> None:
    good = Balance(issued=6, trained=1, queued=2, in_flight=0, rejected={"stale": 3})
    part = report.trajectories(good, good)
    assert part["balances"] is True
    assert part["recount_agrees"] is True
    assert (part["issued"], part["rejected"]) == (6, {"stale": 3})
    other = Balance(issued=6, trained=2, queued=2, in_flight=0, rejected={"stale": 3})
    assert report.trajectories(good, other)["recount_agrees"] is False
    assert report.trajectories(other, other)["balances"] is False


def sizes_of(*deltas: int) -> WeightBytes:
    inverses = sum(1 / size for size in deltas)
    return WeightBytes(800, len(deltas), sum(deltas), inverses, state_bytes=1200)


def test_the_weights_part_has_bytes_and_ratios() -> None:
    sizes = sizes_of(10, 30)
    assert report.weights(sizes, source_bytes=(50, 20), peer_bytes=7) == {
        "state_bytes": 1200,
        "anchor_bytes": 800,
        "delta_bytes_mean": 20.0,
        "ratio_mean": pytest.approx((120 + 40) / 2),
        "source_bytes": 50,
        "source_copies": 0.5,
        "peer_bytes": 7,
    }
    first = sizes_of()
    part = report.weights(first, source_bytes=(50, 0), peer_bytes=0)
    assert (part["delta_bytes_mean"], part["ratio_mean"], part["source_copies"]) == (0.0, 0.0, None)


def test_a_metrics_line_is_flat_and_json() -> None:
    line = report.step_line(record(3, untrained=(1.0, 2)), version=1)
    assert json.loads(json.dumps(line)) == {
        "step": 3,
        "reward": 0.5,
        "age_mean": 0.0,
        "age_max": 0,
        "idle_s": 0.0,
        "train_s": 1.0,
        "elapsed_s": 1.0,
        "tokens": 10,
        "zero_advantage_groups": 1,
        "version": 1,
        "loss": 0.25,
    }


def test_the_curve_of_a_short_run_has_every_step() -> None:
    progress = report.Progress(began_s=0.0)
    for step in (2, 1, 3):
        progress.add(record(step, reward=step / 10, ages=(float(step), step)))
    curve = progress.curve()
    assert curve["step"] == [1, 2, 3]
    assert curve["reward"] == [0.1, 0.2, 0.3]
    assert curve["age_max"] == [1.0, 2.0, 3.0]
    assert {len(values) for values in curve.values()} == {3}


def test_the_curve_of_a_long_run_is_told_in_means_and_largest_ages() -> None:
    progress = report.Progress(began_s=0.0)
    for step in range(1, 8):
        progress.add(record(step, reward=float(step), ages=(1.0, step % 4)))
    curve = progress.curve(points_max=3)
    assert curve["step"] == [3, 6, 7]
    assert curve["reward"] == [2.0, 5.0, 7.0]
    assert curve["age_max"] == [3.0, 2.0, 3.0]


def test_speed_and_age_are_those_of_the_newest_steps_without_start_up() -> None:
    progress = report.Progress(began_s=0.0)
    assert progress.steps_per_s() is progress.age_recent() is None
    progress.add(record(1, elapsed_s=60.0, ages=(0.0, 0)))
    assert progress.steps_per_s() is None
    for step in range(2, 6):
        progress.add(record(step, elapsed_s=0.5, ages=(2.0, 2)))
    assert progress.steps_per_s() == pytest.approx(2.0)
    assert progress.age_recent() == pytest.approx(8.0 / 5.0)
