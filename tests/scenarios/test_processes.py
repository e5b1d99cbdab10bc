"""Real processes, real torch, real TLS: the demo with kills, and a run over TLS with Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SHORT = (
    *("--learner.warm_start.steps", "20"),
    *("--rollouts.prompts_per_step", "16"),
    *("--learner.checkpoint_every_steps", "10"),
)
STEPS = 36


def steps_done(log) -> int:
    found = re.findall(r"^step +(\d+)/", log.read_text() if log.exists() else "", re.MULTILINE)
    return int(found[-1]) if found else 0


def load_from_outside(folder) -> str:
    """Load the trained model with nothing but transformers, and let it answer."""
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = tokenizer('4132=', return_tensors='pt')['input_ids']\n"
        "answer = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1]:]\n"
        "print('ANSWER', tokenizer.decode(answer, skip_special_tokens=True))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return re.search(r"^ANSWER (.*)$", done.stdout, re.MULTILINE)[1]


def test_the_demo_ends_well_though_peer_engine_learner_and_coordinator_are_killed(tmp_path):
    with Processes(tmp_path) as processes:
        demo = processes.start(
            "scenarios", "run", "demo", *SHORT, "--run.steps", str(STEPS), log="demo.log"
        )
        log = tmp_path / "demo.log"

        def kill_at(step: int, *words: str) -> None:
            processes.wait(
                lambda: steps_done(log) >= step or demo.poll() is not None, 120, f"step {step}"
            )
            assert demo.poll() is None, log.read_text()[-2000:]
            processes.wait(lambda: bool(processes.alive(*words)), 60, f"{words} being there")
            os.kill(processes.alive(*words)[0], signal.SIGKILL)

        kill_at(4, "peer join", "--name bob")
        kill_at(9, "peer.engine.worker")
        kill_at(14, "coordinator.learner.worker")
        kill_at(22, "coordinator run")
        processes.wait(lambda: demo.poll() is not None, 120, "the end")
        text = log.read_text()
        assert demo.returncode == 0, text[-3000:]
        processes.wait(lambda: processes.alive() == [], 5, "the end of every process")
        run = tmp_path / "runs" / "demo"
        summary = json.loads((run / "summary.json").read_text())
        counts = summary["trajectories"]
        assert counts["balances"]
        assert counts["recount_agrees"]
        assert counts["trained"] == STEPS * 16 * 8, "every step consumed one whole batch, once"
        assert summary["outcome"] == "finished"
        assert summary["generation"] == 2, "the learner started three times"
        assert summary["age_steps"]["max"] <= 3
        assert summary["reward_version0"] is not None, "figures survive a coordinator's restart"
        assert summary["weights"]["ratio_mean"] >= 3.3
        assert {peer["name"] for peer in summary["peers"]} == {"ann", "bob", "cem"}
        assert "Traceback" not in text
        answer = load_from_outside(run / "trained")
        assert set(answer) <= set("0123456789")


def test_a_run_over_tls_trains_and_ctrl_c_ends_everything_within_five_seconds(tmp_path):
    with Processes(tmp_path) as processes:
        coordinator = processes.start(
            "coordinator",
            *("run", "--config", "@demo", "--run.folder", "run", "--server.tls", "on"),
            *SHORT,
            log="coordinator.log",
        )
        access = processes.wait_access("run")
        assert access["url"].startswith("https://")
        peer = processes.start(
            "peer",
            *("join", access["url"], "--token", access["token"], "--folder", "peer"),
            *("--relay.host", "127.0.0.1"),
            log="peer.log",
        )
        log = tmp_path / "coordinator.log"
        processes.wait(lambda: steps_done(log) >= 3, 120, "step 3")
        for process in (peer, coordinator):
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            process.wait(timeout=5)
            assert time.monotonic() - began < 5
            assert process.returncode == 130
        processes.wait(lambda: processes.alive() == [], 2, "the end of every child")
        assert "Traceback" not in log.read_text() + (tmp_path / "peer.log").read_text()
        assert "peer.left" in log.read_text(), "the peer has said goodbye"
