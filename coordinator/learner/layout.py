"""A torch model's publish layout: its state under Hugging Face names, floats as bf16 bits.

Tied tensors are one storage and one entry, named after the first of them in the state dict (the
embedding); the other names are listed as tied. Buffers that a checkpoint would not contain (rotary
frequencies) are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from echo2p2p.errors import ConfigError
from echo2p2p.net.memory import map_state
from echo2p2p.weights.layout import Layout, plan_layout

_WHOLE: Final = {torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}


def layout_of(model: nn.Module) -> tuple[Layout, Mapping[str, Tensor]]:
    """Return the layout and its tensors by name; the tensors are the model's own.

    Raises:
        ConfigError: The model has a tensor of a kind that cannot be published.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    layout = plan_layout(
        [
            (first, _dtype_name(first, tensors[key]), tuple(tensors[key].shape), tuple(others))
            for key, (first, *others) in names.items()
        ]
    )
    return layout, {names[key][0]: tensor for key, tensor in tensors.items()}


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "bf16"
    if tensor.dtype not in _WHOLE:
        raise ConfigError("model.path", f"tensor {name} of {tensor.dtype} cannot be published")
    return _WHOLE[tensor.dtype]


def write_state(layout: Layout, tensors: Mapping[str, Tensor], path: str) -> None:
    """Write the publish copy, rounded to nearest even, into the shared state at ``path``.

    Raises:
        StoreError: The shared state is missing or of another size.
    """
    mapped = map_state(path, layout.total_bytes, writable=True)
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    fill_state(layout, tensors, flat)
    del flat
    mapped.close()


def fill_state(layout: Layout, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
    """Fill ``flat``, ``[total_bytes] uint8`` on any device, with the publish copy."""
    for entry in layout.tensors:
        source = tensors[entry.name].detach().reshape(-1)
        if source.is_floating_point():
            source = source.to(torch.bfloat16)
        flat[entry.offset : entry.offset + entry.bytes].copy_(source.view(torch.uint8))
