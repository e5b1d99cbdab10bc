"""Watching a real run: the status command over TLS, the flags of both programs, the dashboard.

Coordinator and peers are real processes with fake models (`scenarios.live_fakes`), the browser is
Chromium.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import urllib.request

import pytest

from coordinator.command import main
from echo2p2p.testing.browser import find_chromium, open_page
from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CHROMIUM = find_chromium()
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)
SHOWN = 'document.documentElement.dataset.state == "shown"'
TRAINS = 'parseInt(document.getElementById("steps").textContent.split(" ")[1]) >= 12'


class Run:
    """A coordinator and a peer."""

    def __init__(self, processes, folder):
        self.processes = processes
        self.folder = folder
        self.access = json.loads((folder / "join.json").read_text())
        self.url = self.access["url"]


def start(processes, name, *words, peers=("ann",)):
    processes.start("scenarios.live_fakes", "run", "--run.folder", name, *words, log=f"{name}.log")
    folder = processes.folder / name
    processes.wait((folder / "join.json").exists, 30, "the coordinator listening")
    run = Run(processes, folder)
    for peer in peers:
        processes.start(
            *("scenarios.live_fakes", "join", run.url, "--token", run.access["token"]),
            *("--folder", f"{name}-{peer}", "--name", peer, "--metrics.port", "0"),
            log=f"{name}-{peer}.log",
        )
    return run


@pytest.fixture
def asked(tls_run, monkeypatch, capsys):
    """Ask for the status in this process; returns exit code, standard output, standard error."""
    monkeypatch.chdir(tls_run.folder)

    def ask(*words):
        code = main(["status", *words])
        return code, *capsys.readouterr()

    return ask


@pytest.fixture(scope="module")
def tls_run(tmp_path_factory):
    with Processes(tmp_path_factory.mktemp("tls")) as processes:
        run = start(processes, "run", "--server.tls", "on")

        def trained():
            metrics = run.folder / "metrics.jsonl"
            return metrics.exists() and len(metrics.read_text().splitlines()) >= 12

        processes.wait(trained, 60, "twelve steps")
        yield run


# --- status -------------------------------------------------------------------------------------


def test_status_of_a_run_folder_over_tls_tells_all_as_json(asked):
    code, out, err = asked(".", "--json")
    assert (code, err) == (0, "")
    status = json.loads(out)
    (peer,) = status["peers"]
    assert (peer["name"], peer["state"]) == ("ann", "active")
    assert peer["tokens_per_s"] > 0
    assert peer["received_bytes"] > 0
    assert peer["accepted"] >= 40
    assert set(peer) >= {"version", "rejected_by_reason", "relayed_bytes", "heard_s"}
    assert status["trajectories"]["balances"]
    assert status["trajectories"]["recount_agrees"]
    assert len(status["curve"]["reward"]) == len(status["curve"]["step"]) >= 12
    assert any(row["after_s"] for row in status["versions"])
    assert {"queue", "age_steps", "learner_idle_share"} <= set(status)


def test_status_for_people_is_text_where_there_is_no_terminal(asked):
    code, out, err = asked("join.json")
    assert (code, err) == (0, "")
    assert re.match(r"run \w+: training, step \d+/1000000", out)
    assert "balances" in out
    assert "\x1b" not in out
    assert any(line.startswith("ann ") for line in out.splitlines())


def test_status_of_a_url_believes_the_join_token(tls_run, asked):
    code, out, _ = asked(tls_run.url, "--token", tls_run.access["token"], "--json")
    assert code == 0
    assert json.loads(out)["peers"]


OTHER_TOKEN = "e2p-ibaueq2eivdeoscjjjfuytkoj4rjw27wrwg4ge6a6sia76oapnmrvqvnpcyjsewe"


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["URL"], 2, "uses TLS: give the run's join token with --token"),
        (["URL", "--token", OTHER_TOKEN], 1, "belongs to another run than the token"),
        (["URL", "--token", "e2p-x"], 2, "token"),
        (["nowhere"], 2, "cannot read nowhere (No such file or directory); give a URL"),
        (["http://127.0.0.1:9"], 1, "nothing listens there"),
        (["http://HOST"], 1, "if it uses TLS, write https://"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_an_exit_code(tls_run, asked, words, code, line):
    host = tls_run.url.removeprefix("https://")
    words = [word.replace("URL", tls_run.url).replace("HOST", host) for word in words]
    got, out, err = asked(*words)
    assert (got, out) == (code, ""), err
    assert err.startswith("error: ")
    assert line in err
    assert err.count("\n") == 1


def test_watching_goes_on_until_it_is_interrupted(tls_run):
    watch = tls_run.processes.start(
        *("coordinator", "status", str(tls_run.folder), "--watch"), log="watch.log"
    )
    log = tls_run.processes.folder / "watch.log"
    tls_run.processes.wait(lambda: log.read_text().count("ledger") >= 2, 30, "two statuses")
    watch.send_signal(signal.SIGINT)
    assert watch.wait(timeout=5) == 130


def test_a_peer_serves_metrics_and_health_on_loopback(tls_run):
    log = (tls_run.processes.folder / "run-ann.log").read_text()
    url = re.search(r"metrics\.served .*url=(http://127\.0\.0\.1:\d+)/metrics", log)[1]
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    trained = re.search(r"^echo2_peer_groups_trained_total (\S+)$", text, re.MULTILINE)
    assert float(trained[1]) > 5
    with urllib.request.urlopen(f"{url}/healthz", timeout=10) as answer:
        assert answer.read() == b"ready"


# --- what the terminal shows --------------------------------------------------------------------


def short_run(folder, *flags):
    """Run six steps with these flags at both programs; return what each has said."""
    with Processes(folder) as processes:
        coordinator = processes.start(
            *("scenarios.live_fakes", "run", "--run.steps", "6", *flags), log="coordinator.log"
        )
        access = processes.wait_access("run", 30)
        peer = processes.start(
            *("scenarios.live_fakes", "join", access["url"], "--token", access["token"]),
            *("--folder", "peer", *flags),
            log="peer.log",
        )
        assert coordinator.wait(60) == 0, (folder / "coordinator.log").read_text()
        assert peer.wait(20) == 0, (folder / "peer.log").read_text()
    return (folder / "coordinator.log").read_text(), (folder / "peer.log").read_text()


def test_by_default_there_are_progress_lines_and_what_is_worth_knowing(tmp_path):
    coordinator, peer = short_run(tmp_path)
    assert re.search(r"^step +6/6  reward", coordinator, re.MULTILINE)
    assert "dashboard at http://127.0.0.1:" in coordinator
    assert "peer.joined" in coordinator
    assert "upload.accepted" not in coordinator
    assert re.search(r"^the run has finished: \d+ groups accepted, \d+ trained", peer, re.MULTILINE)
    assert "\x1b" not in coordinator + peer
    folder = tmp_path / "run"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert "upload.accepted" in (folder / "logs" / "events.jsonl").read_text()
    if importlib.util.find_spec("matplotlib"):
        assert (folder / "reward.png").stat().st_size > 1000


def test_quiet_programs_say_nothing_when_all_is_well(tmp_path):
    coordinator, peer = short_run(tmp_path, "--quiet")
    shown = [line for line in (coordinator + peer).splitlines() if "[warning" not in line]
    assert shown == []


def test_with_json_logs_every_line_of_both_programs_is_an_object(tmp_path):
    for text in short_run(tmp_path, "--log-json"):
        events = [json.loads(line) for line in text.splitlines()]
        assert events
        assert all({"timestamp", "level", "event"} <= set(event) for event in events)
        assert "e2p-" not in text.replace("e2p-***", "")


def test_on_a_terminal_the_run_is_drawn_in_place_and_ctrl_c_leaves_the_terminal_usable(tmp_path):
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "scenarios.live_fakes", "run"],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    raw = b""
    try:
        while b"ledger" not in raw or b"learner.ready" not in raw:
            assert process.poll() is None, raw.decode(errors="replace")
            raw += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other side is closed
            while more := os.read(ours, 65536):
                raw += more
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    text = raw.decode()
    assert "echo2-peer join http://" in text
    assert text.index("echo2-peer join") < text.index("ledger"), "lines are above the view"
    assert "\x1b[1A" in text, "it is drawn in place"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible"
    assert "Traceback" not in text


# --- the dashboard ------------------------------------------------------------------------------


@needs_chromium
def test_the_dashboard_shows_the_run_and_talks_to_nobody_else(tls_run, tmp_path):
    with open_page(CHROMIUM, any_certificate=True) as page:
        page.open(f"{tls_run.url}/dashboard")
        page.wait(f"{SHOWN} && {TRAINS}")
        text = page.value("document.body.innerText")
        steps = page.value('document.getElementById("steps").textContent')
        page.wait(f'document.getElementById("steps").textContent != "{steps}"')
        charts = page.value(
            "Object.fromEntries([...document.querySelectorAll('.chart')].map("
            "box => [box.id, box.querySelectorAll('path, circle').length]))"
        )
        page.screenshot(tmp_path / "dashboard.png")
        assert page.complaints == []
        assert {
            url.partition("/dashboard")[0].removesuffix("/status") for url in page.requests
        } == {tls_run.url}
    for wanted in ("training", "ann", "active", "balances", "every trajectory is accounted for"):
        assert wanted in text
    assert set(charts) == {
        *("chart-reward", "chart-versions", "chart-delay", "chart-age", "chart-time")
    }
    assert charts["chart-reward"] == 2
    assert charts["chart-delay"] >= 3, "dots"
    assert (tmp_path / "dashboard.png").stat().st_size > 20_000


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@needs_chromium
def test_where_others_can_reach_it_the_dashboard_asks_for_the_admin_token(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    port = url.rpartition(":")[2]
    with Processes(tmp_path) as processes, open_page(CHROMIUM) as page:
        words = ("--server.port", port, "--server.public_url", url)
        run = start(processes, "run", *words, peers=())
        page.open(f"{url}/dashboard")
        page.wait('document.documentElement.dataset.state == "login"')
        assert page.value("document.getElementById('page').hidden")

        def enter(token):
            page.value("document.getElementById('token').focus()")
            page.type(token)
            page.value("document.querySelector('#login button').click()")

        enter("e2a-wrong")
        page.wait("document.getElementById('login-error').textContent.includes('is not the run')")
        assert page.value("sessionStorage.length") == 0
        enter(run.access["admin_token"])
        page.wait(SHOWN)
        assert "training" in page.value("document.body.innerText")
        assert page.value("Object.values(sessionStorage)") == [run.access["admin_token"]]
        assert page.value("location.href + document.cookie") == f"{url}/dashboard"
        assert not [asked for asked in page.requests if "e2a-" in asked]
        page.open(f"{url}/dashboard")
        page.wait(SHOWN)  # the tab remembers
        os.kill(processes.alive("live_fakes run")[0], signal.SIGKILL)
        page.wait('document.documentElement.dataset.state == "lost"')
        text = page.value("document.getElementById('lost').innerText")
        assert re.match(r"The coordinator has not answered for \d:\d\d; these are its last", text)
