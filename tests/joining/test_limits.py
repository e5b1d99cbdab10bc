"""What a volunteer allows: settings, what the coordinator hears of it, and that it is kept."""

import json
import sqlite3
import time

import pytest

from echo2p2p.cli import load_settings
from echo2p2p.errors import ConfigError
from echo2p2p.ids import PeerId
from echo2p2p.net.shaping import DAY_S, DayTraffic
from echo2p2p.testing.live import start_coordinator, start_peer, wait_steps
from echo2p2p.testing.processes import Processes
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Caps, JoinRequest
from peer.config import PeerSettings
from peer.machine import TrafficFile, free_memory_bytes

CAP = 100_000_000


def load(*words: str) -> PeerSettings:
    return load_settings(PeerSettings, words, program="echo2-peer join", presets={})


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("2MB", 2_000_000),
        ("2 MB/s", 2_000_000),
        ("20Mbit", 2_500_000),
        ("20mbit", 2_500_000),
        ("1.5MiB", 1_572_864),
        ("500kB", 500_000),
        ("1Gbit/s", 125_000_000),
        ("8000", 8000),
        ("8000B", 8000),
        ("64kbit", 8000),
    ],
)
def test_limits_are_given_in_the_units_that_people_use(text, bytes_per_s):
    assert load("--upload-limit", text).upload_limit == bytes_per_s
    assert load("--download_limit", text).download_limit == bytes_per_s


def test_a_cap_is_given_as_an_option_or_in_a_file(tmp_path):
    file = tmp_path / "peer.toml"
    file.write_text('upload_limit = "3MB"\ndata_cap_per_day = "1TB"\n')
    settings = load("--config", str(file), "--upload-limit", "4MB")
    assert (settings.upload_limit, settings.data_cap_per_day) == (4e6, 10**12)
    assert type(settings.data_cap_per_day) is int
    assert load().data_cap_per_day is load().upload_limit is load().download_limit is None


@pytest.mark.parametrize(
    ("option", "text", "mend"),
    [
        ("upload-limit", "2Mb", "'2Mb' may be bits or bytes; write MB or Mbit"),
        ("upload-limit", "2kb", "'2kb' may be bits or bytes; write kB or kbit"),
        ("download-limit", "fast", "'fast' is no amount of bytes; write 2MB, 500kB or 20Mbit"),
        ("download-limit", "2 parsec", "'2 parsec' has an unknown unit; write 2MB, 500kB or"),
        ("upload-limit", "0", "0 bytes a second keep no link alive; allow 8kB at least"),
        ("data-cap-per-day", "1MB", "take most of 1000000 bytes; allow 100MB at least"),
    ],
)
def test_an_amount_that_is_none_or_too_small_is_refused_with_the_mend(option, text, mend):
    with pytest.raises(ConfigError) as refused:
        load(f"--{option}", text)
    assert refused.value.path == option.replace("-", "_")
    assert mend in refused.value.detail


# --- the file -----------------------------------------------------------------------------------


def test_the_days_count_is_kept_in_a_file_that_nothing_can_spoil(tmp_path):
    file = TrafficFile(tmp_path / "traffic.json")
    assert file.load() is None
    file.save(DayTraffic(1e9, 12345))
    assert file.load() == DayTraffic(1e9, 12345)
    for damaged in ("", "[]", "null", '{"since_s": 1}', '{"since_s": "x", "used_bytes": 1}'):
        (tmp_path / "traffic.json").write_text(damaged)
        assert file.load() is None
    (tmp_path / "traffic.json").unlink()
    (tmp_path / "traffic.json").mkdir()
    with pytest.raises(ConfigError, match="mend that or remove it"):
        file.load()


# --- free memory --------------------------------------------------------------------------------


def write(root, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_free_memory_is_what_linux_calls_available(tmp_path):
    assert free_memory_bytes(tmp_path) is None, "no such files: nothing is said"
    write(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:    2000 kB\n")
    assert free_memory_bytes(tmp_path) == 2_048_000


def test_a_control_group_may_leave_less(tmp_path):
    write(
        tmp_path,
        proc__meminfo="MemAvailable: 2000 kB\n",
        proc__self__cgroup="0::/pod/app\n",
        sys__fs__cgroup__pod__memoryDOTmax="1000000\n",
        sys__fs__cgroup__pod__memoryDOTcurrent="700000\n",
        sys__fs__cgroup__pod__memoryDOTstat="anon 5\ninactive_file 200000\n",
        sys__fs__cgroup__pod__app__memoryDOTmax="max\n",
    )
    assert free_memory_bytes(tmp_path) == 500_000


def test_this_machine_says_how_much_is_free():
    free = free_memory_bytes()
    assert free is not None
    assert free > 50_000_000


# --- whole processes ----------------------------------------------------------------------------


def caps_in_store(folder) -> Caps:
    with sqlite3.connect(f"file:{folder / 'run.sqlite'}?mode=ro", uri=True) as rows:
        (body,) = rows.execute("SELECT join_body FROM members").fetchone()
    rows.close()
    return codec.decode(body, JoinRequest).caps


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_limited_peer_works_and_tells_the_coordinator_its_limits(tmp_path):
    limits = ("--upload-limit", "2MB", "--download-limit", "8Mbit", "--data-cap-per-day", "1GB")
    with Processes(tmp_path) as processes:
        run = start_coordinator(processes)
        peer = start_peer(processes, run.url, run.token, *limits)
        wait_steps(processes, run, 3, peer)
        assert caps_in_store(run.folder) == Caps(
            upload_bytes_per_s=2e6, download_bytes_per_s=1e6, bytes_per_day=10**9
        )
        peer.process.terminate()
        assert peer.ended() == 130
        kept = json.loads((tmp_path / "peer" / "traffic.json").read_text())
        received = 98_000  # the anchor, before compression
        assert received / 2 < kept["used_bytes"] < 50 * received


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_peer_whose_cap_is_spent_leaves_says_so_once_and_comes_back_the_next_day(tmp_path):
    folder = tmp_path / "peer"
    folder.mkdir()
    began_s = time.time()
    day = {"since_s": began_s - DAY_S + 12, "used_bytes": CAP - 150_000}
    (folder / "traffic.json").write_text(json.dumps(day))
    with Processes(tmp_path) as processes:
        run = start_coordinator(processes)
        peer = start_peer(processes, run.url, run.token, "--data-cap-per-day", "100MB")
        processes.wait(lambda: bool(peer.events("data_cap.spent")), 20, "the end of the cap")
        processes.wait(lambda: bool(run.events("peer.left")), 5, "its goodbye")
        assert run.events("peer.left")[0]["reason"] == "its data cap is spent"
        kept = json.loads((folder / "traffic.json").read_text())
        assert CAP <= kept["used_bytes"] < CAP + 100_000
        assert peer.process.poll() is None, "it rests"
        processes.wait(lambda: len(peer.events("peer.joined")) == 2, 30, "the next day")
        assert time.time() >= began_s + 12
        wait_steps(processes, run, 2, peer)
    names = ("data_cap.near", "data_cap.spent", "data_cap.renewed")
    assert {name: len(peer.events(name)) for name in names} == dict.fromkeys(names, 1)
    spent = peer.events("data_cap.spent")[0]
    assert spent["cap_bytes"] == CAP <= spent["used_bytes"]
    assert 0 < spent["joins_again_in_s"] <= 12
    assert "data_cap.spent" in peer.text(), "on the terminal too"


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_peer_that_is_started_again_on_a_spent_day_does_not_even_join(tmp_path):
    folder = tmp_path / "peer"
    folder.mkdir()
    with Processes(tmp_path) as processes:
        run = start_coordinator(processes)
        # Long enough for the peer to come up, on a busy machine too.
        day = {"since_s": time.time() - DAY_S + 12, "used_bytes": CAP}
        (folder / "traffic.json").write_text(json.dumps(day))
        peer = start_peer(processes, run.url, run.token, "--data-cap-per-day", "100MB")
        processes.wait(lambda: bool(peer.events("data_cap.spent")), 20, "its line")
        assert not run.events("peer.joined")
        processes.wait(lambda: bool(peer.events("peer.joined")), 30, "the next day")
    joined = run.events("peer.joined")[0]
    assert PeerId(joined["peer"]).startswith(peer.events("peer.joined")[0]["peer"])
