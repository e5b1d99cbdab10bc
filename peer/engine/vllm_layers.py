"""Where vLLM's fused layers keep the tensors with Hugging Face names, and whether they use them.

vLLM stacks query, key and value into one matrix, gate and up projection into another, pads the
vocabulary and gives every rank of a tensor-parallel group its share. `pieces_of` says which part
of which live parameter is which part of which tensor. It is derived from the layers' own
dimensions and not from what the loader did, so that a loader which puts a tensor into another's
place is found out.

That a parameter holds the right bits is not enough: a backend may have packed a copy of it when
the model was built and go on computing with that (vLLM does so on CPUs, for the output layer even
beside a parameter that is kept). So `check_kernels` sends one-hot vectors through each matrix: what
comes out is the matrix's own column, exactly, in any float format, if the kernel uses this
parameter.

It refuses what it does not know (experts, latent attention, quantised layers): a tensor that cannot
be read back cannot be proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from echo2p2p.errors import ConfigError, EngineError

Layer: TypeAlias = Any
"""One of vLLM's, which has no types that we could know."""

PROBED_ELEMENTS: Final = 1 << 14
"""Elements of each matrix that one check sends through its kernel, at least; the columns rotate. A
stale copy is missed only if none of them differs: at a density of 0.1 % by a chance of e^-16."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that this rank holds.

    Attributes:
        live: View of the parameter that the kernels use.
        part: The same elements in the whole tensor, by dimension.
        owner: Whether this rank is the one to read it back; the others compare.
    """

    live: Tensor
    part: tuple[slice, ...]
    owner: bool


def pieces_of(model: nn.Module) -> Mapping[str, list[Piece]]:
    """Return what this rank holds of each tensor, by Hugging Face name.

    Raises:
        ConfigError: The model has a layer that cannot be read back.
    """
    found: dict[str, list[Piece]] = {}
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        _refuse_unknown(path, module)
        if isinstance(module, LinearBase | VocabParallelEmbedding):
            parts = _parts(path, module, fused)
        else:
            parts = _whole(path, module)
        for name, piece in parts:
            found.setdefault(name, []).append(piece)
    return found


def _refuse_unknown(path: str, module: nn.Module) -> None:
    """Refuse a layer that computes with something else than its parameters as they were loaded."""
    method = getattr(module, "quant_method", None)
    plain = method is None or type(method) in {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}
    derives = hasattr(module, "process_weights_after_loading") and type(module) is not Attention
    if derives or not plain:
        raise ConfigError(
            "engine.kind",
            f"weights in vLLM's {type(module).__name__} ({path or 'the model itself'}) cannot be "
            "read back, so they cannot be proved; use --engine transformers",
        )


def _parts(
    path: str,
    module: Layer,
    fused: Mapping[str, list[str]],
) -> Iterator[tuple[str, Piece]]:
    above, _, leaf = path.rpartition(".")
    names = [f"{above}.{each}" if above else each for each in fused.get(leaf, [leaf])]
    if isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices
        start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        rows = [(path, 0, start, end - start, True)]
    elif isinstance(module, QKVParallelLinear):
        rows = list(_qkv_rows(module, names))
    elif isinstance(module, MergedColumnParallelLinear):
        rows = list(_merged_rows(module, names))
    elif isinstance(module, ColumnParallelLinear):
        size = module.output_size_per_partition
        rows = [(path, 0, module.tp_rank * size, size, True)]
    elif isinstance(module, RowParallelLinear):
        yield from _row_parallel(path, module)
        return
    else:
        assert isinstance(module, ReplicatedLinear), type(module)
        rows = [(path, 0, 0, module.output_size, module.tp_rank == 0)]
    for kind, parameter in module.named_parameters(recurse=False):
        for name, at, start, size, owner in rows:
            live = parameter.detach()[at : at + size] if parameter.numel() else parameter.detach()
            yield f"{name}.{kind}", Piece(live, (slice(start, start + size),), owner)


def _qkv_rows(module: Layer, names: list[str]) -> Iterator[tuple[str, int, int, int, bool]]:
    replicas, rank = module.num_kv_head_replicas, module.tp_rank
    key, value = module.num_kv_heads * module.head_size, module.num_kv_heads * module.v_head_size
    query = module.num_heads * module.head_size
    owner = rank % replicas == 0
    yield names[0], 0, rank * query, query, True
    yield names[1], query, rank // replicas * key, key, owner
    yield names[2], query + key, rank // replicas * value, value, owner


def _merged_rows(module: Layer, names: list[str]) -> Iterator[tuple[str, int, int, int, bool]]:
    at = 0
    for name, whole in zip(names, module.output_sizes, strict=True):
        size = whole // module.tp_size
        yield name, at, module.tp_rank * size, size, True
        at += size


def _row_parallel(path: str, module: Layer) -> Iterator[tuple[str, Piece]]:
    size = module.input_size_per_partition
    columns = slice(module.tp_rank * size, (module.tp_rank + 1) * size)
    for kind, parameter in module.named_parameters(recurse=False):
        if kind == "weight":
            yield f"{path}.{kind}", Piece(parameter.detach(), (slice(None), columns), owner=True)
        else:
            yield f"{path}.{kind}", Piece(parameter.detach(), (), module.tp_rank == 0)


def _whole(path: str, module: nn.Module) -> Iterator[tuple[str, Piece]]:
    from vllm.distributed import get_tensor_model_parallel_rank

    for kind, parameter in module.named_parameters(recurse=False):
        owner = get_tensor_model_parallel_rank() == 0
        yield (f"{path}.{kind}" if path else kind), Piece(parameter.detach(), (), owner)


def rows_in(
    piece: Piece, shape: Sequence[int], elements: slice
) -> tuple[Tensor, tuple[slice, ...]]:
    """Return what a piece holds of whole rows of its tensor, and where among them it belongs.

    Args:
        piece: Of the tensor.
        shape: Of all the tensor.
        elements: The rows, counted in elements.
    """
    if not shape:
        return piece.live, ()
    row = max(1, math.prod(shape[1:]))
    first, past = elements.start // row, elements.stop // row
    rows, *rest = piece.part or (slice(None),)
    start, stop, _ = rows.indices(shape[0])
    low = min(max(start, first), past)
    high = max(low, min(stop, past))
    return piece.live[low - start : high - start], (slice(low - first, high - first), *rest)


def elements_in(
    piece: Piece, shape: Sequence[int], elements: NDArray[np.int64]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return which of a tensor's elements a piece holds, and where in the piece these are.

    Returns:
        ``[elements] bool`` on the CPU, and one index a dimension on the piece's device.
    """
    held = np.ones(elements.size, dtype=np.bool_)
    local = []
    sizes = tuple(shape) or (1,)
    for axis, where in enumerate(np.unravel_index(elements, sizes)):
        bounds = piece.part[axis] if axis < len(piece.part) else slice(None)
        start, stop, _ = bounds.indices(sizes[axis])
        held &= (where >= start) & (where < stop)
        local.append(where - start)
    device = piece.live.device
    return torch.from_numpy(held), tuple(torch.from_numpy(at[held]).to(device) for at in local)


def check_kernels(
    model: nn.Module, turn: int, touched: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> None:
    """Compare columns of each matrix with what its kernel makes of one-hot vectors.

    Args:
        model: With its weights.
        turn: Counts the checks: the next one looks at the next columns.
        touched: By the address of a parameter's memory, columns in which something has changed:
            a kernel that computes with old weights differs there, so they and one other do.

    Raises:
        EngineError: A kernel computes with other weights than its parameter's.
    """
    with torch.inference_mode():
        for path, module in model.named_modules():
            if not isinstance(module, LinearBase | VocabParallelEmbedding):
                continue
            weight = module.weight
            if weight.ndim != 2 or 0 in weight.shape:  # packed, and the parameter dropped
                raise EngineError(f"the weights of {path} are {list(weight.shape)}: packed")
            rows, width = weight.shape
            changed = touched.get(weight.untyped_storage().data_ptr(), ())
            count = 1 if changed else min(width, -(-PROBED_ELEMENTS // rows))
            chosen = [place % width for place in range(turn * count, (turn + 1) * count)]
            chosen += changed
            count, columns = len(chosen), torch.tensor(chosen, device=weight.device)
            one_hot = torch.zeros(count, width, dtype=weight.dtype, device=weight.device)
            one_hot[torch.arange(count, device=weight.device), columns] = 1
            used = module.quant_method.apply(module, one_hot, None)
            if not torch.equal(used, weight[:, columns].T):
                raise EngineError(f"the kernel of {path} does not use the weights that were loaded")
