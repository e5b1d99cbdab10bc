"""`echo2-scenario list | run | new | swarm`, as a person uses them."""

import json
import subprocess
import sys

import pytest

from scenarios.command import main
from scenarios.story import shipped, shipped_apart

TINY = """
about = "Two peers"
[world]
stop_s = 25
heal_s = 5
[[peers]]
count = 2
seconds_per_token = 0.02
[checks]
converge_s = 10
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    return path


def test_list_names_every_story_in_a_line(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["demo", *sorted(shipped()), *sorted(shipped_apart()), "swarm"]
    assert all(len(line) <= 120 for line in lines)


def test_new_writes_a_commented_story_that_holds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    assert "echo2-scenario run mine.toml --seed 7" in capsys.readouterr().out
    assert main(["run", "mine.toml", "--seed", "7", "--until", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peers"] == 8
    assert main(["new", "mine"]) == 2
    assert "mine.toml exists" in capsys.readouterr().err


@pytest.mark.slow
def test_the_template_holds_to_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["new", "mine"])
    assert main(["run", "mine.toml", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "every checker held" in out
    assert "crash: " in out
    assert "slow-link: " in out


def test_run_prints_a_table_or_json_and_writes_the_trace(tiny, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    assert main(["run", str(tiny), "--seed", "4", "--trace", str(trace), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["held"] is True
    assert result["steps"] > 5
    assert result["trajectories"]["balances"]
    assert result["bytes"]["coordinator"]["sent"] > 0
    assert result["versions"]["published"] > 3
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(events) == result["events"]
    assert events[-1]["t"] <= result["virtual_s"]
    assert main(["run", str(tiny), "--seed", "4"]) == 0
    table = capsys.readouterr().out
    assert result["trace"] in table
    assert "every checker held" in table


def test_until_stops_there_and_checks_no_end(tiny, capsys):
    assert main(["run", str(tiny), "--until", "6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["virtual_s"] <= 6.0
    assert result["steps"] is None


def test_a_broken_promise_fails_and_prints_the_command_that_replays_it(tiny, capsys):
    tiny.write_text(TINY + "steps_min = 500\n", encoding="utf-8")
    assert main(["run", str(tiny), "--seed", "4"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN  the run goes on at the stated rate" in out
    assert f"replay: echo2-scenario run {tiny} --seed 4" in out


def test_a_wrong_story_is_one_line_and_exit_code_2(tiny, tmp_path, capsys):
    tiny.write_text("[world]\nstopp_s = 1", encoding="utf-8")
    for words in (["run", str(tiny)], ["run", "no-such"], ["swarm", "--story", "no-such"]):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
    tiny.write_text(TINY, encoding="utf-8")
    assert main(["run", str(tiny), "--until", "3", "--trace", str(tmp_path / "no" / "x")]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["run", "steady", "--until", "-5"],
        ["run", "steady", "--until", "nan"],
        ["swarm", "--seeds", "0"],
        ["swarm", "--jobs", "-1"],
        ["swarm", "--step", "0"],
        ["torture", "--kills", "0"],
        ["soak", "--minutes", "0"],
        ["bench", "delta", "--repeat", "0"],
    ],
    ids=" ".join,
)
def test_nothing_is_done_zero_times_and_called_well(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_swarm_plays_seeds_in_processes_and_reports(tiny):
    command = [sys.executable, "-m", "scenarios", "swarm", "--story", str(tiny)]
    words = ["--seeds", "5", "--first", "10", "--jobs", "2", "--json"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["seeds"], result["failed"]) == (5, {})
    tiny.write_text(TINY + "steps_min = 500\n", encoding="utf-8")
    done = subprocess.run([*command, *words[:-1]], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "5 failed" in done.stdout
    assert f"echo2-scenario run {tiny} --seed 14" in done.stdout
