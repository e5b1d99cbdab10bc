"""Two folders of safetensors as two flat states of one layout.

The format is read here, without its library, which has no bf16 in numpy: eight bytes of header
length, a JSON header, and the tensors' bytes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

from echo2p2p.errors import ConfigError
from echo2p2p.weights.layout import Layout, plan_layout

_DTYPES: Final = {
    "BF16": "bf16",
    "F16": "f16",
    "F32": "f32",
    "I8": "i8",
    "I16": "i16",
    "I32": "i32",
    "I64": "i64",
}


def read_pair(old: Path, new: Path) -> tuple[Layout, bytes, bytes]:
    """Return the layout of two folders that hold the same tensors, and both states.

    Raises:
        ConfigError: A folder is not what it should be, or they differ.
    """
    tensors, before = read_folder(old)
    others, after = read_folder(new)
    if tensors != others:
        raise ConfigError(str(new), f"holds other tensors than {old}")
    layout = plan_layout([(name, dtype, shape, ()) for name, (dtype, shape) in tensors.items()])
    return layout, before, after


def read_folder(folder: Path) -> tuple[dict[str, tuple[str, tuple[int, ...]]], bytes]:
    """Return dtype and shape by name, and the tensors' bytes in order of name.

    Raises:
        ConfigError: No safetensors there, or a broken one.
    """
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(str(folder), "holds no .safetensors file")
    for file in files:
        try:
            found.update(_read(file))
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise ConfigError(str(file), f"is no readable safetensors file: {error!r}") from error
    names = sorted(found)
    return {name: found[name][:2] for name in names}, b"".join(found[name][2] for name in names)


def _read(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, dict[str, Any]] = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, past = entry["data_offsets"]
            content = data[8 + length + first : 8 + length + past]
            tensors[name] = (_DTYPES[entry["dtype"]], tuple(entry["shape"]), content)
    return tensors
