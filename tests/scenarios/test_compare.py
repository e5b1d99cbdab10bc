import json

import pytest

from scenarios.command import main
from scenarios.compare import beside, figures


def result(**more):
    return {
        "virtual_s": 50.0,
        "steps": 40,
        "idle_share": 0.1,
        "trajectories": {"issued": 200, "trained": 150, "rejected": {"stale": 10, "unused": 40}},
        "versions": {
            "published": 20,
            "reached_s": {"0.5": 0.1, "0.95": 1.0, "1": 2.0},
            "last_peer_median_s": 1.5,
        },
        "bytes": {
            "coordinator": {"sent": 2_000_000, "received": 1},
            "a": {"sent": 500_000, "received": 1},
            "b": {"sent": 1_500_000, "received": 1},
        },
        "converged_s": None,
        **more,
    }


def test_figures_are_shares_and_megabytes():
    found = figures(result())
    assert found["trained share"] == 0.75
    assert found["rejected share"] == 0.25
    assert found["rejected(stale) share"] == 0.05
    assert (found["coordinator sent, MB"], found["peers sent, MB"]) == (2.0, 2.0)
    assert figures(result(trajectories=None))["trained share"] is None


def test_what_only_one_of_them_has_stands_alone():
    other = result(trajectories={"issued": 100, "trained": 100, "rejected": {"damaged": 1}})
    rows = beside(result(), other)
    assert rows["rejected(stale) share"] == [0.05, None]
    assert rows["rejected(damaged) share"] == [None, 0.01]
    assert rows["trained share"] == [0.75, 1.0]


def test_two_files_are_laid_beside_each_other(tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(result()))
    b.write_text(json.dumps(result(steps=60)))
    assert main(["compare", str(a), str(b)]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("steps")]
    assert line.split() == ["steps", "40", "60", "1.50"]
    assert main(["compare", str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [40, 60]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bytes": {}}'])
def test_what_is_no_result_is_refused_in_one_line(tmp_path, capsys, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["compare", str(path), str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "x.json" in line
    assert main(["compare", str(tmp_path / "none"), str(path)]) == 2
