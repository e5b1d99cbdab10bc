import json
import os

import pytest

from scenarios import bench_broadcast, reproduce_broadcast
from scenarios.broadcast_links import Line, bound_of, plan_lines
from scenarios.broadcast_rows import Case
from scenarios.command import main
from scenarios.reproduce_broadcast import LIVE, OURS, VIRTUAL, is_busy

SMALL = ("--virtual", "--payload-mb", "0.2", "--mbit", "2", "--virtual-peers", "1", "3")


def asked(monkeypatch, *words):
    """Return what would be measured, as lists of network, system, settings, peers, Mbit/s."""
    seen = []

    async def measure(network, system, how, case, runs):
        seen.append((network, system, how, case.peers, case.mbit))
        assert runs == 1
        return {
            "network": network,
            "system": system,
            "settings": how,
            "peers": case.peers,
            "mbit": case.mbit,
            "payload_bytes": case.payload_bytes,
            "bound_s": 1.0,
            "last_s": 2.0,
            "multiple": 2.0,
            "cpu_s": 3.9,
        }

    monkeypatch.setattr(reproduce_broadcast, "_measure", measure)
    monkeypatch.setattr(bench_broadcast, "check", lambda cases: None)
    monkeypatch.setattr(
        bench_broadcast,
        "systems_of",
        lambda wanted: [(one, "default" if one == "libtorrent" else "") for one in wanted],
    )
    assert main(["reproduce", "broadcast", *words]) == 0
    return seen


def test_rates_are_times_those_of_the_benchmark():
    assert plan_lines("homogeneous", 1, 5) == [Line(5, 5)] * 2
    assert [line.up_mbit for line in plan_lines("mixed", 3, 10)] == [10, 5, 10, 20]
    slow, fast = (bound_of(10**6, plan_lines("nat", 4, mbit)).seconds for mbit in (5, 10))
    assert slow == pytest.approx(2 * fast)
    assert Case(1, "homogeneous", 0, 1).mbit == 20


def test_all_systems_are_measured_as_far_as_one_machine_carries(monkeypatch, tmp_path, capsys):
    words = ["--folder", str(tmp_path), "--peers", "4", "64", "--virtual-peers", "64", "1000"]
    seen = asked(monkeypatch, *words, "--mbit", "10", "100")
    live = [one for one in seen if one[0] == LIVE]
    systems = [(OURS, ""), ("libtorrent", "default"), ("one-to-many", "")]
    assert sorted(live) == sorted(
        (LIVE, *system, peers, mbit)
        for system in systems
        for peers, mbit in ((4, 10.0), (64, 10.0), (4, 100.0))
    )
    virtual = [one for one in seen if one[0] == VIRTUAL]
    assert len(virtual) == 2 * 2 * 2
    assert {one[1] for one in virtual} == {OURS, "one-to-many"}
    out = capsys.readouterr().out
    assert "namespaces, 100 Mbit/s" in out
    assert "libtorrent" in out
    assert "seed 0" in out


@pytest.mark.slow
def test_it_measures_once_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder, target = tmp_path / "cells", tmp_path / "time.png"
    words = ["reproduce", "broadcast", "--folder", str(folder), *SMALL]
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert [(row["system"], row["peers"]) for row in result["rows"]] == [
        ("one-to-many", 1),
        (OURS, 1),
        ("one-to-many", 3),
        (OURS, 3),
    ]
    assert result["machine"]["cores"]
    assert result["versions"]["echo2p2p"]
    many, ours = result["rows"][2:]
    assert many["last_s"] > 2 * ours["last_s"]
    assert len(list(folder.glob("*.json"))) == 4
    assert main([*words, "--plot", str(target)]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("(kept)") == 4
    assert "virtual, 2 Mbit/s" in printed.out
    assert target.read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--seed", "1"]) == 2
    assert "measured with seed 0, not 1" in capsys.readouterr().err


def test_a_cell_that_kept_the_cores_busy_says_so():
    row = {"network": LIVE, "cpu_s": 9.0, "last_s": 5.0}
    assert is_busy(row, cores=2)
    assert not is_busy(row, cores=4)
    assert not is_busy(row | {"network": VIRTUAL}, cores=1)


def test_without_root_one_line_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["reproduce", "broadcast", "--folder", str(tmp_path)]) == 1
    assert "--virtual" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "words", [["--peers", "1001"], ["--mbit", "0"], ["--runs", "0"], ["--payload-mb", "x"]]
)
def test_what_cannot_be_measured_is_refused(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "broadcast", *words])
    assert end.value.code == 2


def test_nothing_to_measure_is_an_error(tmp_path, capsys):
    words = ["--virtual", "--virtual-peers", "0", "--folder", str(tmp_path)]
    assert main(["reproduce", "broadcast", *words]) == 2
    assert "nothing to measure" in capsys.readouterr().err
