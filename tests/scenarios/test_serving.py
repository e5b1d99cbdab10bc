"""A real run, and a real client of the model in training while its version changes under it."""

import json
import socket
import urllib.request

import pytest

from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SHORT = (
    *("--config", "@demo", "--run.folder", "run", "--run.steps", "12", "--held_out.items", "20"),
    *("--learner.warm_start.steps", "40", "--rollouts.prompts_per_step", "8"),
)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def ask(port):
    body = {"prompt": "4132=", "max_tokens": 5, "n": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.headers["X-Echo2-Version"]), json.load(answer)


def test_a_client_talks_to_versions_as_they_come_and_the_summary_has_scores_and_parity(tmp_path):
    port, versions = free_port(), []
    with Processes(tmp_path) as processes:
        run = processes.start("coordinator", "run", *SHORT, log="run.log")
        access = processes.wait_access("run")
        peer = (access["url"], "--token", access["token"], "--relay.host", "127.0.0.1")
        processes.start(
            *("peer", "join", *peer, "--folder", "peer", "--serve", f"127.0.0.1:{port}"),
            log="peer.log",
        )

        def answered():
            try:
                version, found = ask(port)
            except OSError:  # not there yet, or has no version
                return run.poll() is not None
            assert [choice["index"] for choice in found["choices"]] == [0, 1]
            versions.append(version)
            return len(set(versions)) >= 2 or run.poll() is not None

        processes.wait(answered, 120, "answers of two versions")
        assert len(set(versions)) >= 2
        assert versions == sorted(versions)
        processes.wait(lambda: run.poll() is not None, 120, "the end")
        assert run.returncode == 0, (tmp_path / "run.log").read_text()[-2000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = summary["held_out"]
    assert (found["before"]["step"], found["after"]["step"]) == (0, 12)
    for side in ("before", "after"):
        assert found[side]["items"] == 20
        assert found[side]["low"] <= found[side]["score"] <= found[side]["high"]
    assert found["gain"]["low"] < found["gain"]["value"] < found["gain"]["high"]
    assert summary["parity"]["tokens"] > 0
    assert summary["parity"]["max"] < 0.2, "the engine computes with the same weights, rounded"
    assert summary["trajectories"]["balances"]
