"""Memory by arithmetic, against what torch and transformers really make."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coordinator.command import main
from coordinator.fetched import QWEN3_4B, cache_folder
from coordinator.memory import learner_bytes, peer_bytes, shape_of

SMALL = {
    "vocab_size": 640,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def built(kind, *, tied):
    config = AutoConfig.for_model(kind, **SMALL, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(kind, tied):
    config = {"model_type": kind, **SMALL, "tie_word_embeddings": tied}
    assert shape_of(config).parameters == built(kind, tied=tied).num_parameters()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_activations_are_what_autograd_keeps_within_a_fifth(kind):
    model, rows, length = built(kind, tied=True), 2, 40
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address recurs
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(input_ids=torch.ones(rows, length, dtype=torch.int64), use_cache=False)
    found = sum(count for count, _ in kept.values())
    del hidden
    counted = rows * length * shape_of({"model_type": kind, **SMALL}).activation_bytes
    assert counted == pytest.approx(found, rel=0.2)


def test_qwen3_4b_fits_a_learner_of_96_gb_and_peers_of_24():
    shape = shape_of(QWEN3_4B)
    assert shape.parameters == 4_022_468_096  # as its own page says
    assert shape.cache_bytes == 147_456
    assert 64e9 < learner_bytes(shape, rows=1, tokens=768) < 90e9
    assert learner_bytes(shape, rows=8, tokens=768) > 140e9
    assert 8e9 < peer_bytes(shape, sequences=64, tokens=768) < 24e9


def test_check_tells_it_for_a_model_that_is_not_fetched_and_for_one_that_is(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["check", "--config", "@qwen3-4b-math"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("# model.path: @qwen3-4b is not in ")
    assert told[1] == "# memory: 4.02 G parameters"
    assert told[2].startswith("# memory: learner ")
    folder = cache_folder("@smollm2")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    (folder / "tokenizer.json").write_text("{}")
    assert main(["check", "--config", "@smollm2-chain-sum"]) == 0
    assert capsys.readouterr().out.startswith("# memory: 0.00 G parameters\n# memory: learner ")
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert main(["check", "--config", "@smollm2-chain-sum"]) == 0
    assert "memory:" not in capsys.readouterr().out
