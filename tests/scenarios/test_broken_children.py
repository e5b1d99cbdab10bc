"""Commands whose children cannot work: one line with cause and mend, and the right exit code."""

import json

import pytest

from coordinator.model import TINY_QWEN3, prepare_model
from echo2p2p.net.program import FAILED, USAGE
from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def ended(processes, tmp_path, *words) -> tuple[int, list[str]]:
    """Run a coordinator to its end; return its code and its error lines."""
    run = processes.start("coordinator", "run", "--server.port", "0", *words, log="out.log")
    processes.wait(lambda: run.poll() is not None, 120, "the end of the coordinator")
    processes.wait(lambda: processes.alive() == [], 5, "the end of its children")
    text = (tmp_path / "out.log").read_text()
    assert "Traceback" not in text
    return run.returncode, [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('{"model_type": "qwen9", "eos_token_id": 2}', "holds no causal language model"),
        ('{"model_type": "qwen3", "hidden_size": "big", "eos_token_id": 2}', "hidden_size"),
    ],
)
def test_a_folder_that_is_no_model_ends_the_coordinator_at_once_as_a_wrong_setting(
    tmp_path, config, says
):
    prepare_model(TINY_QWEN3, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(config)
    with Processes(tmp_path) as processes:
        code, lines = ended(processes, tmp_path, "--model.path", "model", "--run.folder", "run")
    assert code == USAGE
    assert len(lines) == 1
    assert lines[0].startswith("error: model.path: model holds no causal language model")
    assert says in lines[0]
    assert "learner.lost" not in (tmp_path / "out.log").read_text(), "no restart"


def test_a_model_whose_weights_are_damaged_is_a_wrong_setting_too(tmp_path):
    prepare_model(TINY_QWEN3, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x08" + bytes(40))
    with Processes(tmp_path) as processes:
        code, lines = ended(processes, tmp_path, "--model.path", "model", "--run.folder", "run")
    assert (code, len(lines)) == (USAGE, 1)
    assert "Safetensor" in lines[0]


def test_a_damaged_checkpoint_is_named_and_ends_the_run_without_restarts(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000010"
    prepare_model(TINY_QWEN3, checkpoint)
    (checkpoint / "position.json").write_text(json.dumps({"format": 1, "step": 10}))
    (checkpoint / "model.safetensors").write_bytes(b"\x08" + bytes(40))
    with Processes(tmp_path) as processes:
        code, lines = ended(processes, tmp_path, "--run.folder", "run")
    assert (code, len(lines)) == (FAILED, 1)
    assert (
        "learner: StoreError: checkpoint run/checkpoints/step-000010 cannot be loaded" in lines[0]
    )
    text = (tmp_path / "out.log").read_text()
    assert text.count("learner.lost") == 1


def test_a_task_of_ones_own_that_is_not_there_is_a_wrong_setting(tmp_path):
    with Processes(tmp_path) as processes:
        code, lines = ended(
            processes, tmp_path, "--run.folder", "run", "--task.name", "my.task:Mine"
        )
    assert (code, len(lines)) == (USAGE, 1)
    assert lines[0].startswith("error: task.name: cannot import my.task (ModuleNotFoundError")
