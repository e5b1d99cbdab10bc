"""What is seen of a machine from outside."""

import subprocess
import sys

import pytest

from echo2p2p.limits import Fill
from peer.figures import PeerFigures
from peer.metrics import exposition
from scenarios import live_eyes, namespaces
from scenarios.live_load import Load

WHY = namespaces.why_impossible()

LOOK = """
import socket, subprocess, sys, time
from scenarios import live_eyes, namespaces
subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
subprocess.run(["ip", "netns", "add", "n0"], check=True)
subprocess.run(["ip", "-n", "n0", "link", "set", "lo", "up"], check=True)
namespaces.RUN.joinpath("word").write_text("hello")
command = namespaces.inside(0, [sys.executable, "-m", "http.server", "8123", "--bind", "127.0.0.1"])
server = subprocess.Popen(command, stdout=-3, stderr=-3, cwd="/run")
url = "http://127.0.0.1:8123"
for _ in range(200):
    try:
        body = live_eyes.Machine(0).ask(url, "/word")
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
assert body == b"hello", body
try:
    live_eyes.Machine(0).ask(url, "/no-such")
except OSError as error:
    assert "status 404" in str(error), error
else:
    raise AssertionError("an answer")
try:
    live_eyes.Machine(1).ask(url, "/")
except FileNotFoundError:
    pass
try:
    socket.create_connection(("127.0.0.1", 8123), timeout=2)
except OSError:
    print("and home again")
"""


def test_a_peers_metrics_say_how_full_everything_is():
    fills = [Fill("links", 3, 256), Fill("leases", 0, 64)]
    body, _ = exposition(PeerFigures(), fills)
    assert live_eyes.read_fills(body.decode()) == fills


def test_a_coordinators_status_says_so_too():
    status = {"bounds": [{"what": "members", "now": 3, "limit": 10}]}
    assert live_eyes.fills_of(status) == [Fill("members", 3, 10)]


@pytest.mark.slow
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
def test_a_question_is_asked_on_the_machine_and_the_thread_comes_home():
    done = subprocess.run(
        [*namespaces.WRAP, sys.executable, "-c", LOOK], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "and home again\n"


def test_what_others_use_is_what_is_left_of_all():
    load = Load()
    sum(range(10**6))
    figures = load.figures(1.0)
    assert figures["cores"] >= 1
    assert figures["cpu_s"] == {}
    assert figures["others_cores"] >= 0
    load.look("nobody", 2**22 + 1)
    assert load.figures(1.0)["cpu_s"] == {}
