"""A coordinator that is not there yet is waited for, a line a try, and not for ever."""

import socket
import time

import pytest

from echo2p2p.net.trust import JoinToken
from echo2p2p.testing.live import start_coordinator, start_peer
from echo2p2p.testing.processes import Processes
from echo2p2p.testing.system import SimEntropy
from scenarios.live_fakes import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

TOKEN = JoinToken.create(SimEntropy(0), b"k" * 32).encode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        (f"http://127.0.0.1:{free_port()}", "refused: nothing listens there; check the port, or"),
        (f"https://127.0.0.1:{free_port()}", "refused: nothing listens there; check the port, or"),
        (f"https://[::1]:{free_port()}", "refused: nothing listens there; check the port, or"),
        ("https://no-such-host.invalid:7070", "no such host name: check the URL and the network"),
    ],
)
def test_nobody_there_is_one_line_a_try_and_then_exit_code_1(tmp_path, capsys, url, cause):
    words = ("join", url, "--token", TOKEN, "--folder", str(tmp_path), "--join_timeout_s", "2")
    began = time.monotonic()
    assert main(list(words)) == 1
    assert time.monotonic() - began < 5
    said = capsys.readouterr().err.splitlines()
    tries = [line for line in said if "join.waits" in line]
    assert len(tries) == 2, "after 0 and 0.5 s; the third, after 1.5 s, is the last"
    assert all(cause in line for line in tries)
    assert said[-1].startswith(f"error: {url}: {cause}")
    assert said[-1].endswith("(gave up after 2 s)")
    assert len(said) == len(tries) + 1


def test_a_peer_that_comes_before_its_coordinator_gets_in_when_that_is_up(tmp_path):
    port = free_port()
    where = ("--server.tls", "on", "--server.port", str(port))
    with Processes(tmp_path) as processes:
        first = start_coordinator(processes, *where)
        token = first.token
        first.process.kill()
        first.process.wait()
        peer = start_peer(processes, first.url, token)
        processes.wait(lambda: len(peer.events("join.waits")) > 1, 20, "two tries")
        again = start_coordinator(processes, *where, "--run.steps", "5")
        assert again.token == token
        assert again.ended(30) == 0, again.text()
        assert peer.ended() == 0, peer.text()
    waits = [entry["detail"] for entry in peer.events("join.waits")]
    assert "refused" in waits[0]
