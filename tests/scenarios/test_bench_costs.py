import json

import pytest

from scenarios import bench_costs
from scenarios.command import main
from scenarios.costs import MEASURED


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_cost_that_is_charged_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench_costs, "STARTS", 1)
    monkeypatch.setattr(bench_costs, "STOP_S", 8.0)
    monkeypatch.setattr(bench_costs, "BALLASTS", (0, 100_000))
    assert main(["bench", "costs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["work"]) == {*MEASURED.work, bench_costs.STEP}
    assert all(set(line) == {"ms", "ms_per_mb"} for line in found["work"].values())
    assert found["start_ms"] > 100, "an interpreter and its imports"
    assert min(found[key] for key in ("exchange_ms", "handshake_ms", "job_ms")) > 0
    assert found["machine"]["cores"]
    assert found["versions"]["echo2p2p"]
