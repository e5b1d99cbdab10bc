"""A Hugging Face folder as a flat state, without torch."""

import contextlib
import json
import random
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from echo2p2p.errors import ConfigError
from echo2p2p.weights.layout import plan_layout
from peer.checkpoint import read_checkpoint

LAYOUT = plan_layout(
    [
        ("embed.weight", "bf16", (8, 4), ("lm_head.weight",)),
        ("norm.weight", "f32", (4,), ()),
        ("scalar", "f16", (), ()),
        ("empty", "bf16", (0, 3), ()),
    ]
)
BITS = random.Random(1).randbytes(LAYOUT.total_bytes)
NAMES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


def file_bytes(tensors) -> bytes:
    """Return a safetensors file of ``(name, dtype, shape, data)``, in that order."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, dtype, shape, content in tensors:
        span = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": span}
        data += content
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def tensors(*, rename=None, dtypes=None, shapes=None):
    """Return the layout's tensors with the bits of `BITS`, some of them altered."""
    return [
        (
            (rename or {}).get(spec.name, spec.name),
            (dtypes or {}).get(spec.name, NAMES[spec.dtype]),
            (shapes or {}).get(spec.name, spec.shape),
            BITS[entry.offset : entry.offset + entry.bytes],
        )
        for entry, spec in zip(LAYOUT.tensors, LAYOUT.table.tensors, strict=True)
    ]


def read(folder) -> bytes:
    target = bytearray(LAYOUT.total_bytes)
    read_checkpoint(folder, LAYOUT, memoryview(target))
    return bytes(target)


def test_tensors_are_found_in_whatever_order_and_file_they_lie(tmp_path):
    first, *others = reversed(tensors())
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(file_bytes([first]))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(file_bytes(others))
    (tmp_path / "config.json").write_text("{}")
    assert read(tmp_path) == BITS


def test_a_tied_tensor_may_have_any_of_its_names(tmp_path):
    renamed = tensors(rename={"embed.weight": "lm_head.weight"})
    (tmp_path / "model.safetensors").write_bytes(file_bytes(renamed))
    assert read(tmp_path) == BITS


def test_what_the_formats_own_library_writes_is_read(tmp_path):
    values = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(6, dtype=np.float16),
        "c": np.array([1, -2], dtype=np.int64),
    }
    save_file(values, tmp_path / "model.safetensors")
    dtypes = {"a": "f32", "b": "f16", "c": "i64"}
    layout = plan_layout([(name, dtypes[name], values[name].shape, ()) for name in values])
    target = bytearray(layout.total_bytes)
    read_checkpoint(tmp_path, layout, memoryview(target))
    assert bytes(target) == b"".join(value.tobytes() for value in values.values())


@pytest.mark.parametrize(
    ("altered", "why"),
    [
        ({"rename": {"norm.weight": "norm.bias"}}, "has no tensor norm.weight"),
        ({"dtypes": {"embed.weight": "F16"}}, "embed.weight is f16, the run's is bf16"),
        ({"dtypes": {"embed.weight": "F8_E4M3"}}, "embed.weight is F8_E4M3"),
        ({"shapes": {"embed.weight": [4, 8]}}, r"has the shape \[4, 8\], the run's \[8, 4\]"),
    ],
)
def test_a_folder_of_another_model_is_refused_with_the_tensor(tmp_path, altered, why):
    (tmp_path / "model.safetensors").write_bytes(file_bytes(tensors(**altered)))
    with pytest.raises(ConfigError, match=why):
        read(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x01\x02", id="no length"),
        pytest.param(struct.pack("<Q", 1 << 62) + b"{}", id="a length that lies"),
        pytest.param(struct.pack("<Q", 2) + b"[]", id="no table"),
        pytest.param(struct.pack("<Q", 9) + b'{"a": {}}', id="no entry"),
        pytest.param(
            file_bytes([("norm.weight", "F32", [4], bytes(8))]), id="fewer bytes than the shape"
        ),
        pytest.param(file_bytes(tensors())[:-1], id="cut short"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=100)
@given(place=st.floats(0, 1), value=st.integers(0, 255))
def test_a_damaged_file_gives_a_state_or_an_error_of_ours(tmp_path_factory, place, value):
    content = bytearray(file_bytes(tensors()))
    content[int(place * (len(content) - 1))] = value
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.safetensors").write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert len(read(folder)) == LAYOUT.total_bytes


def test_neither_torch_nor_safetensors_is_imported():
    code = "import sys, peer.checkpoint; print({'torch', 'safetensors'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
