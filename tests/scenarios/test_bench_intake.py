"""`echo2-scenario bench intake` in its smallest form: it runs, and what it says holds together."""

import json
import subprocess
import sys

import pytest

from scenarios import bench_report
from scenarios.bench_clients import shares
from scenarios.command import main

TINY = (
    *("--polls", "5", "--uploads", "20", "--uploaders", "2", "--processes", "3"),
    *("--heartbeats", "10", "--tokens", "50"),
)


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_tiny_benchmark_acknowledges_and_stores_everything(tmp_path, tls: bool) -> None:
    words = ["bench", "intake", "--json", *TINY, *(["--tls"] if tls else [])]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "scenarios", *words, "--folder", str(tmp_path / "disk")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    result = json.loads(ended.stdout)
    assert result["held"] is True
    assert result["checks"] == {"acknowledged": 20, "stored": 20, "recount_agrees": True}
    polls = result["long_polls"]
    assert (polls["waiting"], polls["alive"], polls["broken"]) == (5, 5, 0)
    assert 0 < result["commits_per_upload"] <= 1
    assert 8 * 8 * 50 < result["upload_bytes"] < 10_000
    assert result["rss_mib"]["start"] <= result["rss_mib"]["with_uploads"]
    for name in ("upload_ms", "heartbeat_ms", "request_ms", "fsync_ms"):
        assert 0 < result[name]["p50"] <= result[name]["p99"] <= result[name]["max"]
    for name in ("cpu_ms_per_upload", "uploads_per_s", "requests_per_s", "cpu_ms_per_request"):
        assert result[name] > 0
    assert result["parameters"]["processes"] == 2, "no process without an uploader"
    assert result["parameters"]["tls"] is tls
    assert {"processor", "cores", "memory_mib", "system"} == set(result["machine"])
    assert {"python", "sqlite", "aiohttp", "msgspec"} < set(result["versions"])
    assert list((tmp_path / "disk").iterdir()) == [], "it leaves nothing behind"


@pytest.mark.parametrize("word", ["0", "-3", "many"])
def test_a_number_that_makes_no_sense_is_one_line_and_code_2(word: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "intake", "--polls", word])
    assert ended.value.code == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(f"argument --polls: {word!r} is not a number above 0")
    )


def test_a_folder_that_cannot_be_written_is_one_line_and_code_2(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", "intake", "--folder", str(tmp_path / "file" / "x")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --folder: cannot write")


def test_shares_differ_by_one_at_most_and_lose_nothing() -> None:
    assert shares(10, 4) == [3, 3, 2, 2]
    assert shares(2, 4) == [1, 1, 0, 0]


def test_the_spread_of_durations_is_in_milliseconds() -> None:
    assert bench_report.spread_ms([0.001 * i for i in range(101)]) == pytest.approx(
        {"p50": 50.0, "p99": 99.0, "max": 100.0}
    )
    assert bench_report.spread_ms([]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}


def test_a_table_has_one_line_a_figure() -> None:
    text = bench_report.table({"a": 1, "spread": {"p50": 0.25, "p99": 2.0}})
    assert text.splitlines() == ["a           1", "spread.p50  0.250", "spread.p99  2.000"]
