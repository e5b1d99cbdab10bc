import argparse
import json
import struct

import numpy as np
import pytest

from coordinator.learner.trace import STARTS, write_traces
from echo2p2p.errors import ConfigError
from echo2p2p.testing.states import trained_step
from echo2p2p.weights.layout import plan_layout
from scenarios import bench_delta
from scenarios.bench_delta import Pair, measure
from scenarios.checkpoints import read_pair
from scenarios.delta_bounds import bounds_of
from scenarios.delta_rivals import rivals

# zipnn imports torch.jit in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

KEYS = [
    "lr",
    "start",
    "scheme",
    "ratio",
    "bound_ratio",
    "bytes",
    "encode_gb_per_s",
    "decode_gb_per_s",
    "exact",
]


def arguments(*words):
    parser = argparse.ArgumentParser()
    bench_delta.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.slow
async def test_the_benchmark_makes_its_traces_and_every_scheme_is_exact(tmp_path):
    write_traces(tmp_path, 200_000, [1e-4, 1e-5], threads=1)
    rows = await bench_delta.run(
        arguments("--traces", str(tmp_path), "--lr", "1e-4,1e-5", "--dump", str(tmp_path / "out"))
    )
    assert json.loads(json.dumps(rows)) == rows
    assert {tuple(row) for row in rows} == {tuple(KEYS)}
    schemes = {"auto", "tight", "fast", *(rival.name for rival in rivals())}
    assert {(row["lr"], row["start"], row["scheme"]) for row in rows} == {
        (lr, start, scheme) for lr in (1e-4, 1e-5) for start in STARTS for scheme in schemes
    }
    assert all(row["exact"] for row in rows)
    for row in rows:
        name = f"{row['lr']:g}-{row['start']}"
        wire = (tmp_path / "out" / f"{name}.{row['scheme']}.wire").stat().st_size
        raw = (tmp_path / "out" / f"{name}.new").stat().st_size
        assert row["bytes"] == wire
        assert row["ratio"] == round(raw / wire, 3)
    assert "start long-trained: bound" in bench_delta.table(rows)


def test_our_forms_beat_the_public_one_threefold():
    old, new = trained_step(1 << 20, deviation=0.02, step=1e-6, seed=3)
    layout = plan_layout([("w", "bf16", (1 << 20,), ())])
    rows = {row.scheme: row for row in measure(Pair(1e-6, "bf16", layout, old, new), repeat=1)}
    assert rows["index+value+zstd1"].bytes > 3 * rows["auto"].bytes
    assert rows["tight"].bytes * rows["tight"].bound_ratio < 1.1 * (1 << 21)


def test_the_bounds_of_a_known_case():
    """Of 1024 equal elements 512 go up by one: a bit each, and no more for how."""
    layout = plan_layout([("w", "bf16", (1024,), ())])
    old = np.full(1024, 0x3F80, dtype="<u2")
    new = old + np.arange(1024, dtype="<u2") % 2
    bounds = bounds_of(layout, old.tobytes(), new.tobytes())
    assert (bounds.changed, bounds.elements) == (512, 1024)
    assert bounds.independent == bounds.exponent == 128
    old[1::2] = 0x4080  # now the exponent says which
    new = old + np.arange(1024, dtype="<u2") % 2
    bounds = bounds_of(layout, old.tobytes(), new.tobytes())
    assert (bounds.independent, bounds.exponent) == (128, 0)
    new[1::2] = old[1::2] + 40  # a jump: a symbol for 32 to 63, and five bits
    bounds = bounds_of(layout, old.tobytes(), new.tobytes())
    assert bounds.exponent == 512 * 5 / 8


def safetensors(path, dtype, values):
    header = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": dtype, "shape": [len(values)], "data_offsets": [0, values.nbytes]},
    }
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + values.tobytes())


def test_two_folders_of_safetensors_are_a_pair(tmp_path):
    old, new = np.arange(40, dtype="<u2"), np.arange(1, 41, dtype="<u2")
    safetensors(tmp_path / "old", "BF16", old)
    safetensors(tmp_path / "new", "BF16", new)
    layout, before, after = read_pair(tmp_path / "old", tmp_path / "new")
    assert (before, after) == (old.tobytes(), new.tobytes())
    assert [(tensor.name, tensor.dtype) for tensor in layout.tensors] == [("w", "bf16")]
    safetensors(tmp_path / "other", "F16", new)
    with pytest.raises(ConfigError, match="other tensors"):
        read_pair(tmp_path / "old", tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        read_pair(tmp_path / "old", tmp_path / "empty")


@pytest.mark.parametrize(
    ("text", "count"), [("50M", 50_000_000), ("1.5B", 1_500_000_000), ("200000", 200_000)]
)
def test_numbers_of_parameters_are_read(text, count):
    assert arguments("--params", text).params == count


@pytest.mark.parametrize("words", [("--params", "many"), ("--params", "3"), ("--lr", "fast")])
def test_nonsense_is_refused(words):
    with pytest.raises(SystemExit):
        arguments(*words)
