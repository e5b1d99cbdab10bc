"""`echo2-scenario bench engine` in its smallest form; and where vLLM is missing."""

import importlib.util
import json
import struct
import subprocess
import sys

import pytest

from scenarios.bench_engine import write_folder
from scenarios.command import main
from scenarios.qwen3 import Qwen3, write_weights

TINY = (
    *("--prompts", "2", "--samples", "2", "--tokens", "8", "--rounds", "2"),
    *("--layers", "1", "--hidden", "64", "--vocabulary", "64", "--dtype", "float32"),
)
MISSING = importlib.util.find_spec("vllm") is None


def bench(*words):
    return subprocess.run(
        [sys.executable, "-P", "-m", "scenarios", "bench", "engine", *words],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    MISSING, reason="vLLM is not installed here; make test-vllm installs it and runs this"
)
def test_a_tiny_benchmark_proves_its_versions_and_finds_the_same_logprobs():
    ended = bench("--json", *TINY)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["held"] is True
    assert result["engine"]["kind"] == "vllm"
    for side in ("plain", "ours"):
        assert all(rate > 0 for rate in result[side].values())
    assert result["parity"]["tokens"] == 3 * 2 * 8
    assert 0 <= result["parity"]["mean"] <= result["parity"]["max"] <= 1e-4
    assert 0 <= result["parity"]["kl"] < 1e-6
    for kind in ("sparse", "full", "in_flight"):
        assert 0 < result["pause_ms"][kind]["p50"] <= result["pause_ms"][kind]["max"]
    assert {"torch", "transformers", "python"} < set(result["versions"])


@pytest.mark.slow
@pytest.mark.skipif(not MISSING, reason="vLLM is installed here")
def test_without_vllm_it_says_so_in_a_line():
    ended = bench(*TINY)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: engine.kind: vLLM cannot be imported (ModuleNotFound")
    assert ended.stderr.count("\n") == 1


def test_a_width_that_makes_no_heads_is_one_line_and_code_2(capsys):
    assert main(["bench", "engine", "--hidden", "100"]) == 2
    assert capsys.readouterr().err == "error: --hidden: 100 is no multiple of 64\n"


def test_a_flat_state_is_what_safetensors_hold(tmp_path):
    model = Qwen3(tied=False)
    layout = model.layout()
    state = bytearray(layout.total_bytes)
    write_weights(memoryview(state), seed=1)
    write_folder(tmp_path / "model", model, layout, memoryview(state))
    data = (tmp_path / "model/model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])["lm_head.weight"]
    start, end = entry["data_offsets"]
    assert (entry["dtype"], entry["shape"], end - start) == ("BF16", [64, 128], 64 * 128 * 2)
    assert data[8 + length :] == state
