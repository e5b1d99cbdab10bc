"""A Hugging Face folder's safetensors as a flat state, read without torch.

The format is read here: eight bytes of header length, a JSON header, the tensors' bytes. Its own
library has no bf16 in numpy. Nothing is converted: the run's bits are wanted or none, and a digest
tells whether these are they, so all that is checked is that they fit the layout.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from echo2p2p.errors import ConfigError
from echo2p2p.weights.layout import Layout
from echo2p2p.wire.messages import TensorSpec

_DTYPES: Final = {
    "BF16": "bf16",
    "F16": "f16",
    "F32": "f32",
    "I8": "i8",
    "I16": "i16",
    "I32": "i32",
    "I64": "i64",
}
_LENGTH: Final = struct.Struct("<Q")
_HEADER_BYTES_MAX: Final = 100_000_000
"""As the format's own library has it."""


class _Entry(msgspec.Struct):
    """One tensor in a file's header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class _Found:
    """One tensor and where it lies."""

    file: Path
    entry: _Entry
    data: memoryview


def read_checkpoint(folder: Path, layout: Layout, target: memoryview) -> None:
    """Fill ``target`` with the folder's tensors in the order of ``layout``.

    Files are mapped, not read, so it takes no memory beside the target's.

    Raises:
        ConfigError: The folder has not these tensors, or cannot be read; says which. The target
            may be changed in part.
    """
    found = dict(_tensors(folder))
    if not found:
        raise _unfit(f"{folder} holds no .safetensors file")
    for tensor, spec in zip(layout.tensors, layout.table.tensors, strict=True):
        names = (spec.name, *spec.tied)
        held = next((found[name] for name in names if name in found), None)
        if held is None:
            raise _unfit(f"{folder} has no tensor {spec.name}")
        _check_fits(held, spec)
        if len(held.data) != tensor.bytes:
            raise _unfit(f"{held.file}: tensor {spec.name} has {len(held.data)} bytes")
        target[tensor.offset : tensor.offset + tensor.bytes] = held.data


def _check_fits(held: _Found, spec: TensorSpec) -> None:
    dtype = _DTYPES.get(held.entry.dtype, held.entry.dtype)
    if dtype != spec.dtype:
        raise _unfit(f"{held.file}: tensor {spec.name} is {dtype}, the run's is {spec.dtype}")
    if held.entry.shape != spec.shape:
        shapes = f"{held.entry.shape}, the run's {spec.shape}"
        raise _unfit(f"{held.file}: tensor {spec.name} has the shape {shapes}")


def _tensors(folder: Path) -> Iterator[tuple[str, _Found]]:
    try:
        for file in sorted(folder.glob("*.safetensors")):
            yield from _in_file(file)
    except OSError as error:
        raise _unfit(f"cannot read {folder}: {error.strerror}") from error


def _in_file(file: Path) -> Iterator[tuple[str, _Found]]:
    with file.open("rb") as opened:
        try:
            view = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            (length,) = _LENGTH.unpack_from(view)
            start = _LENGTH.size + length
            header = bytes(view[_LENGTH.size : start]) if length <= _HEADER_BYTES_MAX else b""
            raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(each, type=_Entry) for name, each in raw.items()}
        except (ValueError, struct.error, msgspec.MsgspecError) as error:
            raise _unfit(f"{file} is no readable safetensors file: {error}") from error
    for name, entry in entries.items():
        first, past = entry.data_offsets
        if not 0 <= first <= past <= len(view) - start:
            raise _unfit(f"{file} is cut short: tensor {name} lies outside of it")
        yield name, _Found(file, entry, view[start + first : start + past])


def _unfit(detail: str) -> ConfigError:
    return ConfigError("model_dir", detail)
