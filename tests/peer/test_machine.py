"""What a peer finds on its machine: which engine generates, and what it is told."""

import pytest

from coordinator.machine import model_files
from coordinator.model import TINY_QWEN3, prepare_model
from echo2p2p.cli import load_settings
from echo2p2p.errors import ConfigError
from echo2p2p.tasks.base import Prompt
from peer.command import full_words, main
from peer.config import EngineSection, PeerSettings, ServeSection
from peer.machine import engine_kind, gpu_name, tokenizer_opener

ALL = {"torch", "transformers", "vllm"}
GPU = "NVIDIA H200"


def kind(asked, gpu, installed):
    settings = PeerSettings(engine=EngineSection(kind=asked))
    return engine_kind(settings, gpu, installed.__contains__)


@pytest.mark.parametrize(
    ("asked", "gpu", "installed", "used"),
    [
        ("auto", GPU, ALL, "vllm"),
        ("auto", None, ALL, "hf"),
        ("auto", GPU, ALL - {"vllm"}, "hf"),
        ("auto", GPU, set(), "none"),
        ("auto", GPU, {"torch"}, "none"),
        ("vllm", None, ALL, "vllm"),
        ("transformers", GPU, ALL, "hf"),
        ("hf", GPU, ALL, "hf"),
        ("none", GPU, ALL, "none"),
    ],
)
def test_vllm_is_used_with_a_gpu_or_when_asked_for(asked, gpu, installed, used):
    assert kind(asked, gpu, installed) == used


@pytest.mark.parametrize(
    ("asked", "installed", "says"),
    [
        ("vllm", ALL - {"vllm"}, r"engine\.kind: vLLM is missing; pip install 'echo2p2p\[vllm\]'"),
        ("transformers", {"torch"}, r"engine\.kind: torch and transformers are missing; pip inst"),
    ],
)
def test_an_engine_that_is_asked_for_and_missing_is_an_error_with_the_mend(asked, installed, says):
    with pytest.raises(ConfigError, match=says):
        kind(asked, GPU, installed)


def test_the_gpu_is_named_by_its_driver(tmp_path):
    assert gpu_name(tmp_path) is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert gpu_name(tmp_path) == "AMD GPU"
    about = tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0/information"
    about.parent.mkdir(parents=True)
    about.write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 42\n")
    assert gpu_name(tmp_path) == "NVIDIA H200"
    about.write_text("IRQ: 42\n")
    assert gpu_name(tmp_path) == "NVIDIA GPU"


@pytest.mark.parametrize("words", [("--engine", "steam"), ("--engine=steam",)])
def test_engine_is_short_for_its_kind(capsys, words):
    assert main(["join", "http://127.0.0.1:1", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: engine.kind: Input should be 'auto', 'vllm', 'transformers'")


def test_options_of_vllm_come_from_the_command_line_and_from_a_file(tmp_path):
    file = tmp_path / "peer.toml"
    file.write_text(
        "[engine.vllm]\ntensor_parallel_size = 2\n[engine.vllm.options]\nenforce_eager = true\n"
    )
    words = [
        "--config",
        str(file),
        "--engine.vllm.options",
        "max_num_seqs=64,attention_backend=FLASH",
    ]
    words += ["--engine.vllm.cache_bytes", "4GB"]
    settings = load_settings(PeerSettings, words, program="echo2-peer", presets={})
    chosen = settings.engine.vllm
    assert (chosen.tensor_parallel_size, chosen.cache_bytes) == (2, 4_000_000_000)
    assert chosen.options == {
        "enforce_eager": True,
        "max_num_seqs": 64,
        "attention_backend": "FLASH",
    }


def test_the_tokenizer_is_the_run_s_files_or_the_volunteer_s_folder(tmp_path):
    source, peer = tmp_path / "model", tmp_path / "peer"
    prepare_model(TINY_QWEN3, source)
    (source / "weights.txt").write_text("none of a tokenizer's")
    files = model_files(source)
    assert set(files) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    peer.mkdir()
    given = tokenizer_opener(PeerSettings(folder=str(peer)))(files | {"../escaped": b""})
    own = tokenizer_opener(
        PeerSettings(folder=str(peer), serve=ServeSection(tokenizer=str(source)))
    )(None)
    for tokenizer in (given, own):
        assert tokenizer.encode(Prompt(text="4132=")) == [1, 8, 5, 7, 6, 17]
    assert not (peer / "escaped").exists()
    with pytest.raises(ConfigError, match=r"serve\.tokenizer: .* has no tokenizer\.json"):
        tokenizer_opener(PeerSettings(folder=str(peer)))({})


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--serve"], "127.0.0.1:8000"),
        (["--serve", "--name", "x"], "127.0.0.1:8000"),
        (["--serve", "127.0.0.1:9"], "127.0.0.1:9"),
        (["--serve=127.0.0.1:9"], "127.0.0.1:9"),
        ([], None),
    ],
)
def test_serve_is_short_for_its_address(words, address):
    found = load_settings(PeerSettings, full_words(words), program="test", presets={})
    assert found.serve.address == address
