import json
import os
import subprocess
import sys
import time

import pytest
import trio

from echo2p2p.testing.processes import processes_with
from scenarios import reproduce_faults
from scenarios.command import main
from scenarios.reproduce_faults import (
    HEADROOM,
    PER_STEP,
    STEP_S,
    WARM_STEPS,
    Case,
    figures,
    rows_of,
)


def cell(share, seed, **more):
    return {
        "share": share,
        "seed": seed,
        "steps_per_s": 1.0 - share / 200,
        "trajectories_per_s": 256.0,
        "idle_share": share / 100,
        "reward_before": 0.3,
        "reward_last": 0.9 + seed / 100,
        "steps": 80,
        "wall_s": 100.0,
        "issued": 1000,
        "rejected": {"peer_gone": share},
        "balances": True,
        "failed": list(range(share // 10)),
        "kills": share // 10,
        **more,
    }


@pytest.mark.parametrize(("share", "count"), [(0, 0), (10, 1), (30, 3), (50, 5)])
def test_a_share_of_the_peers_fails_in_the_middle_of_the_run(share, count):
    case = Case(share, 1, "dead")
    plan = case.plan()
    assert len(plan) == count
    assert all(0.2 * case.steps <= step <= 0.6 * case.steps for step in plan.values())
    assert case.plan() == plan
    if count:
        assert plan not in (Case(share, 2, "dead").plan(), {})


def test_the_fleet_makes_so_much_more_than_the_learner_needs():
    for peers in (4, 10):
        case = Case(0, 1, "dead", peers=peers)
        fleet_per_s = peers / case.sample_s
        assert fleet_per_s == pytest.approx(HEADROOM * PER_STEP / STEP_S)


def test_throughput_and_idle_time_are_counted_once_engines_are_up():
    steps = [{"elapsed_s": 9.0, "idle_s": 8.0}] * WARM_STEPS
    steps += [{"elapsed_s": 2.0, "idle_s": 0.5}] * 10
    ledger = {"issued": 9, "rejected": {}, "balances": True, "recount_agrees": True}
    summary = {
        "trajectories": ledger,
        "reward_version0": 0.3,
        "reward_last": 0.9,
        "steps": len(steps),
        "wall_s": 120.0,
    }
    found = figures(summary, steps)
    assert found["steps_per_s"] == 0.5
    assert found["trajectories_per_s"] == PER_STEP / 2
    assert found["idle_share"] == 0.25


def test_a_row_has_the_middle_seed_and_the_spread():
    cells = [cell(share, seed) for seed in (1, 2, 3) for share in (0, 50)]
    none, half = rows_of(cells)
    assert none["throughput"] == 1.0
    assert half["throughput"] == 0.75
    assert half["reward_last"] == [0.91, 0.92, 0.93]
    assert half["rejected_share"] == 0.05
    assert (half["failed"], half["kills"], half["seeds"]) == (5, 15, 3)


def test_it_goes_on_where_it_ended_and_states_how(tmp_path, monkeypatch, capsys):
    ran = []

    async def measure(case, folder):
        await trio.lowlevel.checkpoint()
        ran.append(case.name)
        return cell(case.share, case.seed)

    monkeypatch.setattr(reproduce_faults, "_measure", measure)
    words = ["reproduce", "faults", "--folder", str(tmp_path), "--shares", "0", "30"]
    assert main([*words, "--seeds", "1"]) == 0
    assert ran == ["0-percent-seed-1", "30-percent-seed-1"]
    assert main([*words, "--seeds", "1", "2", "--json"]) == 0
    assert ran[2:] == ["0-percent-seed-2", "30-percent-seed-2"]
    out = capsys.readouterr().out
    result = json.loads(out[out.index("{\n") :])
    assert result["settings"]["fate"] == "dead"
    assert result["machine"]["cores"]
    assert result["versions"]["echo2p2p"]
    assert [one["seed"] for one in result["cells"]] == [1, 1, 2, 2]
    pytest.importorskip("matplotlib")
    target = tmp_path / "faults.png"
    assert main([*words, "--seeds", "1", "2", "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "kill -9" in text
    assert "seeds 1, 2" in text
    assert main([*words, "--steps", "40"]) == 2
    assert "measured with steps 80, not 40" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--shares", "100"], ["--peers", "1"], ["--steps", "10"]])
def test_what_says_nothing_is_refused(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "faults", *words])
    assert end.value.code == 2


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_run_loses_a_peer_again_and_again_and_learns_on(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(reproduce_faults, "STEP_S", 0.2)
    monkeypatch.setattr(reproduce_faults, "AWAY_S", (0.5, 1.0))
    case = Case(50, 1, "return", peers=2, steps=14)
    found = trio.run(reproduce_faults.Run(case, tmp_path / "now").measure)
    assert found["kills"] >= 1
    assert len(found["failed"]) == 1
    assert found["steps"] == 14
    assert found["balances"]
    assert found["reward_last"] > 0.3
    assert not (tmp_path / "now").exists()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_kill_9_leaves_nothing_behind(tmp_path):
    folder = tmp_path / f"kept-{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-P", "-m", "scenarios", "reproduce", "faults"]
    process = subprocess.Popen(
        [*command, "--folder", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )

    def ours():
        return set(processes_with(folder.name)) & set(processes_with("scenarios.paced"))

    try:
        deadline = time.monotonic() + 60
        while not ours():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, "no run has begun"
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 30
    while ours():
        assert time.monotonic() < deadline, "a process outlived whoever measures"
        time.sleep(0.05)
