"""The soak's judgement on made-up figures, and one short soak of real processes."""

import json
import random

import pytest
import trio

from echo2p2p.net.process_memory import Memory
from scenarios import soak as soak_module
from scenarios.soak import Series, Soak, slope_per_hour, table


def series(*private_mb: float, every_s: float = 5.0) -> Series:
    made = Series("coordinator", 1)
    for place, size in enumerate(private_mb):
        made.at_s.append(place * every_s)
        made.memory.append(Memory(int(2e6 * size), int(1e6 * size)))
    return made


def test_a_slope_is_per_hour_and_does_not_see_saw_teeth() -> None:
    times = [float(second) for second in range(0, 600, 5)]
    rng = random.Random(1)
    assert slope_per_hour(times, [10.0] * len(times)) == 0.0
    assert slope_per_hour(times, [at / 60 for at in times]) == pytest.approx(60.0)
    teeth = [50.0 + place % 7 + rng.random() for place in range(len(times))]
    assert abs(slope_per_hour(times, teeth)) < 3.0
    spikes = [50.0 + (100.0 if place % 10 == 0 else 0.0) for place in range(len(times))]
    assert abs(slope_per_hour(times, spikes)) < 1.0
    assert slope_per_hour([1.0], [5.0]) == 0.0


def judged(tmp_path, *processes: Series, minutes: float = 10.0) -> dict:
    subject = Soak(tmp_path, minutes, real=False, slope_mb_per_hour_max=20.0)
    subject.series = {(each.name, each.pid): each for each in processes}
    return subject._result()


def test_a_process_that_grows_after_the_warm_up_fails_the_soak(tmp_path) -> None:
    flat = series(*(60.0 + 20.0 * min(1.0, place / 30) for place in range(120)))
    leaky = Series("ann", 2, flat.at_s, [Memory(0, 50_000_000 + 50_000 * n) for n in range(120)])
    result = judged(tmp_path, flat, leaky)
    assert [row["process"] for row in result["processes"]] == ["coordinator", "ann"]
    assert [row["slope_mb_per_hour"] for row in result["processes"]] == [0.0, 36.0]
    assert result["problems"] == ["ann grows by 36.0 MB an hour"]
    assert not result["held"]
    text = table(result)
    assert "FAILED: ann grows by 36.0 MB an hour" in text
    assert judged(tmp_path, flat)["held"]
    assert "flat: no process grows by more than 20 MB" in table(judged(tmp_path, flat))


def test_a_process_that_lived_too_short_is_not_judged(tmp_path) -> None:
    short = series(*(50.0 + place for place in range(45)))  # nine samples after the warm-up
    assert judged(tmp_path, short)["processes"] == []


@pytest.mark.slow
async def test_a_short_soak_of_real_processes_has_figures_of_all_that_live_on(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(soak_module, "SAMPLE_S", 0.3)
    monkeypatch.setattr(soak_module, "KILL_EVERY_S", 1.5)
    monkeypatch.setattr(soak_module, "STRANGER_EVERY_S", 2.0)
    subject = Soak(tmp_path, 0.3, real=False, slope_mb_per_hour_max=1e6)
    with trio.fail_after(100):
        result = await subject.run()
    assert result["problems"] == []
    rows = {row["process"]: row for row in result["processes"]}
    assert rows.keys() == {"coordinator", *soak_module.STEADY}
    assert all(20 < row["end_mb"] < 500 for row in rows.values())
    assert result["kills"] > 0
    assert result["strangers"] > 0
    assert result["steps"] > 0
    assert json.loads(json.dumps(result)) == result
