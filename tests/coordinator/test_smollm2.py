"""The shipped configuration on the real model: chat template, 49k vocabulary, tied head.

Needs what `echo2-coordinator fetch @smollm2` has made, and reasoning-gym.
"""

import importlib.util
import json
import os
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

from coordinator.command import PRESETS
from coordinator.config import Settings
from coordinator.fetched import cache_folder
from coordinator.learner.base import TrainBatch, TrainSample
from coordinator.learner.torch_learner import TorchLearner
from coordinator.task_desk import TaskDesk
from coordinator.task_port import Done, Opening, Turn
from coordinator.training import learner_setup
from echo2p2p.ids import Step
from echo2p2p.net.memory import FileMemory
from echo2p2p.net.tokenizer import FolderTokenizer
from echo2p2p.tasks.base import HELD_OUT_SEED, Message, Prompt
from echo2p2p.tasks.registry import make_task
from echo2p2p.testing.processes import Processes

FOLDER = cache_folder("@smollm2")
MUST_RUN = bool(os.environ.get("ECHO2P2P_TEST_REAL"))
"""Set where all of it has been installed and fetched: then nothing may be skipped."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not MUST_RUN and not (FOLDER / "config.json").is_file(),
        reason="run echo2-coordinator fetch @smollm2 first",
    ),
    pytest.mark.skipif(
        not MUST_RUN and importlib.util.find_spec("reasoning_gym") is None,
        reason="reasoning-gym is not installed",
    ),
]


def test_the_model_is_asked_scored_trained_and_published_sparsely(tmp_path):
    preset = PRESETS / "smollm2-chain-sum.toml"
    settings = Settings.model_validate(tomllib.loads(preset.read_text(encoding="utf-8")))
    tokenizer = FolderTokenizer(FOLDER)
    desk = TaskDesk(make_task(settings.task.name, settings.task.options), tokenizer)
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert (desk.info().vocab_size, config["tie_word_embeddings"]) == (49152, True)
    assert "quantization_config" not in config

    setup = replace(learner_setup(settings, FOLDER), warmup_steps=0, micro_batch=4)
    learner = TorchLearner(setup, lambda phase, figures: None)
    france = Prompt(messages=(Message("user", "What is the capital of France?"),))
    asked = [np.asarray(tokenizer.encode(france), np.uint32)]
    (said,) = learner.answer(asked, tokens_max=12, stop_ids=tokenizer.stop_ids)
    assert "Paris" in tokenizer.decode(said.tolist())

    opened = desk.open([HELD_OUT_SEED + number for number in range(8)])
    assert all(isinstance(each, Opening) for each in opened)
    answers = learner.answer(
        [each.prompt for each in opened], tokens_max=16, stop_ids=tokenizer.stop_ids
    )
    for each, answer in zip(opened, answers, strict=True):
        finish = "stop" if answer[-1] in tokenizer.stop_ids else "length"
        assert isinstance(desk.advance(each.seed, [Turn(answer, finish)]), Done)

    memory = FileMemory(tmp_path)
    size = learner.ready().layout.total_bytes
    assert size == 2 * 134_515_008
    states = [memory.allocate(name, size) for name in ("before", "after")]
    learner.export(states[0].path)
    rows = [
        TrainSample(each.prompt, answer, logprobs_of(learner, each.prompt, answer), value, Step(0))
        for each, answer, value in zip(opened[:2], answers[:2], (1.0, -1.0), strict=True)
    ]
    report = learner.train(TrainBatch(Step(0), tuple(rows), sum(len(row.tokens) for row in rows)))
    assert report.metrics["parity_max"] < 1e-4
    learner.export(states[1].path)
    before, after = (np.frombuffer(state.view, np.uint16) for state in states)
    changed = float(np.mean(before != after))
    assert 0 < changed < 0.02, "at 1e-6 most of the weights round to what they were"
    del before, after
    for state in states:
        state.close()


def logprobs_of(learner, prompt, answer):
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))[None]
    with torch.no_grad():
        found = learner.model(ids[:, :-1]).logits.log_softmax(-1)
    at = len(prompt) - 1
    return found[0, at:].gather(-1, ids[0, at + 1 :, None])[:, 0].numpy()


def test_the_shipped_configuration_trains_with_a_real_peer(tmp_path):
    """A few short steps of it: forty take most of an hour on two cores."""
    steps = 4
    with Processes(tmp_path) as processes:
        coordinator = processes.start(
            "coordinator",
            *("run", "--config", "@smollm2-chain-sum", "--run.folder", "run"),
            *("--run.steps", str(steps), "--held_out.items", "12"),
            log="coordinator.log",
        )
        access = processes.wait_access("run", 120)
        processes.start(
            "peer",
            *("join", access["url"], "--token", access["token"], "--folder", "peer"),
            *("--engine", "transformers"),
            log="peer.log",
        )
        processes.wait(lambda: coordinator.poll() is not None, 480, "the end of the run")
    log = (tmp_path / "coordinator.log").read_text()
    assert coordinator.returncode == 0, log[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    counts = summary["trajectories"]
    assert (counts["trained"], counts["balances"]) == (steps * 6 * 8, True)
    assert 0 <= summary["parity"]["max"] < 1e-4
    assert all(summary["held_out"][when] for when in ("before", "after"))
    assert summary["weights"]["ratio_mean"] > 50, "at 1e-6 hardly a weight changes"
    peer = (tmp_path / "peer.log").read_text()
    assert "ready  version 1 " in peer, "a delta was applied, loaded and proved"
    assert "Traceback" not in log + peer
