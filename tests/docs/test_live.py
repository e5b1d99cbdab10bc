"""The commands of the user pages, run as they stand there in a folder of their own.

One coordinator with the lab page's own settings (and fake models) serves all pages; the peers of
the volunteer page join it with the real program, as relays.
"""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from echo2p2p.net.trust import SERVER_NAME
from echo2p2p.testing.pages import blocks, commands, quoted, words_of
from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
LAB = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
VOLUNTEER = (ROOT / "docs" / "volunteer.md").read_text(encoding="utf-8")
RUN_TOML = tomllib.loads(blocks(LAB, "toml")[0])
SCRAPE = dict(re.findall(r"^[ -]*(\w+): (.+)$", blocks(LAB, "yaml")[0], re.MULTILINE))
FOLDER = RUN_TOML["run"]["folder"]
URL = RUN_TOML["server"]["public_url"]
BIN = Path(sys.executable).parent
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Lab:
    """A coordinator with the page's settings, and how the pages' words read here."""

    def __init__(self, processes):
        self.processes = processes
        self.here = processes.folder
        self.port = free_port()
        self.metrics_port = free_port()
        self.names = {
            FOLDER: str(self.here / "first"),
            "/var/lib/echo2": str(self.here),
            "/var/backups": str(self.here),
            "/etc/echo2": str(self.here),
            URL: f"https://127.0.0.1:{self.port}",
            "--relay.port 7072": "--relay.port 0",
            "9101": str(self.metrics_port),
        }
        (self.here / "run.toml").write_text(self.local(blocks(LAB, "toml")[0]))
        self.coordinator = processes.start(
            *("scenarios.live_fakes", "run", "--config", str(self.here / "run.toml")),
            *("--server.port", str(self.port), "--server.relay_port", "0", "--run.steps", "100000"),
            *("--rollouts.tokens_max", "8", "--rollouts.prompts_per_step", "2"),
            log="coordinator.log",
        )
        join = self.here / "first" / "join.json"
        processes.wait(join.exists, 40, "the coordinator listening")
        access = json.loads(join.read_text())
        self.names |= {"e2p-...": access["token"], "e2a-...": access["admin_token"]}
        (self.here / "peer.toml").write_text(self.local(blocks(VOLUNTEER, "toml")[0]))
        self.worker = processes.start(
            *("scenarios.live_fakes", "join", access["url"], "--token", access["token"]),
            *("--folder", str(self.here / "worker")),
            log="worker.log",
        )

    def local(self, text):
        """Return a text of the pages with this run in place of theirs."""
        for theirs, ours in self.names.items():
            text = text.replace(theirs, ours)
        return text

    def begin(self, command, home="home"):
        """Start a command line of the pages as it stands there."""
        folder = self.here / home
        folder.mkdir(exist_ok=True)
        line = re.sub(r"^sudo (?:-u \w+ )?", "", self.local(command))
        return subprocess.Popen(
            ["bash", "-c", f"exec {line}" if ">" not in line else line],
            cwd=self.here,
            env={**os.environ, "HOME": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command):
        """Run one to its end, and return what it has printed."""
        process = self.begin(command)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, (command, out, err)
        return out


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with Processes(tmp_path_factory.mktemp("lab")) as processes:
        yield Lab(processes)


def lab_commands(*start):
    found = [command for command in commands(LAB) if words_of(command)[: len(start)] == [*start]]
    assert found
    return found


def test_volunteers_join_with_the_commands_of_their_page(lab):
    joins = [command for command in commands(VOLUNTEER) if "--help" not in command]
    joins = [command for command in joins if command.startswith("echo2-peer join")]
    joins = [command for command in joins if "--serve" not in command]  # wants a real engine
    assert len(joins) >= 6
    asked = [command for command in commands(VOLUNTEER) if command.startswith("curl")]
    asked = [command for command in asked if "/v1/" not in command]  # tests/scenarios/test_serving
    for number, command in enumerate(joins):
        relay = command if "--engine" in command else f"{command} --engine.kind none"
        process = lab.begin(relay, home=f"home{number}")
        try:
            for line in process.stderr:
                assert not line.startswith("error"), (command, line)
                if "peer.joined" in line:
                    break
            else:
                pytest.fail(f"{command} did not join")
            if "--metrics.port" in command and shutil.which("curl"):
                for ask in asked:
                    ask_when_ready(lab, ask)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130, command
        finally:
            process.kill()
            process.communicate()
    assert (lab.here / "home0" / ".echo2-peer" / "identity").stat().st_size == 32
    assert (lab.here / "home1" / ".echo2-attic" / "events.jsonl").exists()


def ask_when_ready(lab, command):
    """Run a command that fails until the peer has its first version."""

    def answered():
        process = lab.begin(command)
        out, _ = process.communicate(timeout=20)
        return process.returncode == 0 and ("echo2_peer_version" in out or out == "ready")

    lab.processes.wait(answered, 30, command)


def trained(lab):
    metrics = lab.here / "first" / "metrics.jsonl"
    return metrics.exists() and len(metrics.read_text().splitlines()) >= 3


def test_status_says_what_the_page_promises(lab):
    lab.processes.wait(lambda: trained(lab), 40, "three steps")
    for command in lab_commands("echo2-coordinator", "status"):
        if "--watch" in command:
            process = lab.begin(command)
            try:
                assert any("balances" in line for line in process.stdout)
                process.send_signal(signal.SIGINT)
                assert process.wait(20) == 130
            finally:
                process.kill()
                process.communicate()
            continue
        said_now = lab.run(command)
        if "--json" in command:
            status = json.loads(said_now)
            assert {"peers", "versions", "queue", "trajectories"} <= set(status)
            assert status["peers"][0]["rejected_by_reason"] is not None
        else:
            assert "balances" in said_now


def test_the_commands_print_and_check_their_settings(lab):
    printed = [lab.run(command) for command in lab_commands("echo2-coordinator", "check")]
    assert "--rollouts.staleness_budget" in lab.run(
        *lab_commands("echo2-coordinator", "run", "--help")
    )
    assert all("publication_period = " in text for text in printed)
    assert "staleness_budget = 2\n" in printed[1]
    assert "--upload_limit" in lab.run("echo2-peer join --help")


@needs_curl
def test_prometheus_health_and_dashboard_answer_as_the_page_says(lab):
    for command in lab_commands("python3", "-c"):
        lab.run(command)
    (health,) = [command for command in lab_commands("curl") if "-X" not in command]
    assert lab.run(health) == "running"
    assert SCRAPE["server_name"] == SERVER_NAME
    context = ssl.create_default_context(cafile=lab.here / SCRAPE["ca_file"])
    request = (
        f"GET {SCRAPE['metrics_path']} HTTP/1.0\r\n"
        f"Authorization: Bearer {lab.local(SCRAPE['credentials'])}\r\n\r\n"
    )
    with (
        socket.create_connection(("127.0.0.1", lab.port), 10) as plain,
        context.wrap_socket(plain, server_hostname=SCRAPE["server_name"]) as stream,
    ):
        stream.sendall(request.encode())
        answer = b"".join(iter(lambda: stream.recv(65536), b"")).decode()
    assert " 200 " in answer.splitlines()[0]
    for metric in (word for word in quoted(LAB) if word.startswith("echo2_")):
        assert re.search(rf"^{metric}[ {{]", answer, re.MULTILINE), metric
    dashboard = lab.run(
        f"curl --fail --silent --cacert echo2-ca.pem https://localhost:{lab.port}/dashboard"
    )
    assert "<html" in dashboard


@needs_curl
def test_the_stop_command_ends_the_run_and_leaves_the_files_of_the_page(lab):
    lab.processes.wait(lambda: trained(lab), 40, "three steps")
    for command in lab_commands("python3", "-c"):
        lab.run(command)
    (stop,) = [command for command in lab_commands("curl") if "-X" in command]
    assert lab.run(stop) == "stopping"
    assert lab.coordinator.wait(60) == 0, (lab.here / "coordinator.log").read_text()[-2000:]
    assert lab.worker.wait(20) == 0, (lab.here / "worker.log").read_text()[-2000:]
    table = LAB.partition("**Files**")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    fakes = {"logs/learner.log", "logs/task_worker.log"}
    missing = {name for name in named - fakes if not (lab.here / "first" / name).exists()}
    assert len(named) > 9
    assert missing <= {"reward.png"}
    for command in lab_commands("tar", "--create"):
        lab.run(command)
        archive = lab.local(words_of(command)[words_of(command).index("--file") + 1])
        kept = subprocess.run(["tar", "tf", archive], capture_output=True, text=True, check=True)
        assert "first/run.sqlite" in kept.stdout.splitlines()
        assert "first/memory" not in kept.stdout
