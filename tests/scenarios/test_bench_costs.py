import json
from functools import partial

import msgspec
import pytest
import trio

from echo2p2p.errors import ChildError
from scenarios import bench_costs, live_costs
from scenarios.command import main
from scenarios.costs import MEASURED
from scenarios.live_usage import Usage, used_between


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_cost_that_is_charged_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench_costs, "STARTS", 1)
    monkeypatch.setattr(bench_costs, "STOP_S", 8.0)
    monkeypatch.setattr(bench_costs, "BALLASTS", (0, 300_000))
    monkeypatch.setattr(bench_costs, "LIVE_S", 6.0)
    monkeypatch.setattr(live_costs, "WARM_S", 6.0)
    assert main(["bench", "costs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["work"]) == {*MEASURED.work, bench_costs.STEP}
    assert all(set(line) == {"ms", "ms_per_mb"} for line in found["work"].values())
    assert found["start_ms"] > 100, "an interpreter and its imports"
    each = ("exchange_ms", "piece_ms", "handshake_ms", "job_ms")
    assert min(found[key] for key in each) > 0
    assert found["piece_ms"] < found["exchange_ms"] < found["start_ms"]
    assert found["machine"]["cores"]
    assert found["versions"]["echo2p2p"]


def test_two_runs_tell_what_a_piece_and_an_exchange_cost():
    few = live_costs.Used(main_s=0.1 + 0.4, other_s=0.2, pieces=100, exchanges=200)
    many = live_costs.Used(main_s=10.0 + 0.2, other_s=0.1, pieces=10_000, exchanges=100)
    each = live_costs.solve(few, many)
    assert each.piece_s == pytest.approx(0.001)
    assert each.exchange_s == pytest.approx(0.002 + 0.001)


def test_what_was_used_between_two_moments_is_read_from_the_lines(tmp_path):
    lines = [Usage(at_s=at, main_s=at / 10, pieces=int(10 * at), all_s=at / 5) for at in range(6)]
    path = tmp_path / "usage"
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    used = used_between(path, 0.5, 4.5)
    assert used == Usage(at_s=3, main_s=pytest.approx(0.3), pieces=30, all_s=pytest.approx(0.6))


def test_a_process_that_dies_at_its_start_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(live_costs, "HERE", {"host": "not a host"})
    spec = bench_costs._spec(0)
    with pytest.raises(ChildError, match="host"):
        trio.run(partial(live_costs.measure, spec, step_s=0.0, seconds=1.0))


def test_a_process_that_does_not_come_up_in_time_is_told_from_one_that_died(tmp_path, monkeypatch):
    monkeypatch.setattr(live_costs, "OPEN_S", 0.2)
    with pytest.raises(ChildError, match="not up after"):
        trio.run(partial(live_costs.measure, bench_costs._spec(0), step_s=0.0, seconds=1.0))


def test_its_processes_end_with_it_however_it_ends(tmp_path, monkeypatch):
    spawned, spawn = [], live_costs._spawn

    def spy(*arguments):
        spawned.append(spawn(*arguments))
        return spawned[-1]

    monkeypatch.setattr(live_costs, "_spawn", spy)

    async def main():
        async with live_costs._running(bench_costs._spec(0), tmp_path):
            for process in spawned:
                process.stdin.close()  # as if whoever measures were killed
            codes = [
                await trio.to_thread.run_sync(partial(process.wait, timeout=20))
                for process in spawned
            ]
            assert codes == [1] * len(spawned)

    with pytest.RaisesGroup(ChildError, allow_unwrapped=True):
        trio.run(main)
    assert len(spawned) == 5
