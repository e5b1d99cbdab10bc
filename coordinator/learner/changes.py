"""Finds what changed between two flat states where they are, on a GPU as on a CPU.

A learner on a GPU has old and new weights in its memory; only what changed need come over the
bus. `TorchFinder` is a `Finder` for `encode_delta`: the same changes, so the same bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from echo2p2p.weights.kernels import Found
from echo2p2p.weights.layout import DTYPES, Dtype, Extent, Layout, Sequence

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchFinder:
    """Callable as `echo2p2p.weights.cuts.Finder`; for one pair of states.

    Args:
        layout: Of both.
        base: ``[total_bytes] uint8``, on any device.
        result: The same, on the same device.
    """

    def __init__(self, layout: Layout, base: Tensor, result: Tensor) -> None:
        for state in (base, result):
            if state.dtype != torch.uint8 or tuple(state.shape) != (layout.total_bytes,):
                raise ValueError(f"a state of {state.dtype} {tuple(state.shape)}")
        self._base = base
        self._result = result

    def __call__(self, sequence: Sequence, first: int, count: int) -> Found:
        """Return the changes among ``count`` elements of a sequence from ``first`` on."""
        dtype = DTYPES[sequence.dtype]
        old = _elements(self._base, sequence.extents, dtype, first, count)
        new = _elements(self._result, sequence.extents, dtype, first, count)
        where = torch.nonzero(old != new)[:, 0]
        before, after = _unsigned(old[where], dtype), _unsigned(new[where], dtype)
        exponent = before >> dtype.exponent_shift & dtype.exponent_mask
        zigzag = _zigzag(before, after, dtype)
        width = np.dtype(f"<u{dtype.item_bytes}")
        return Found(
            where.cpu().numpy().astype(np.uint32),
            zigzag.cpu().numpy().astype(np.int64).view(np.uint64).astype(width),
            exponent.cpu().numpy().astype(np.uint8),
        )


def _elements(
    state: Tensor, extents: tuple[Extent, ...], dtype: Dtype, first: int, count: int
) -> Tensor:
    """Return elements as signed integers, ``[count]``."""
    parts = []
    for extent in extents:
        lo = max(first, extent.first)
        past = min(first + count, extent.first + extent.elements)
        if lo < past:
            start = extent.offset + (lo - extent.first) * dtype.item_bytes
            part = state[start : start + (past - lo) * dtype.item_bytes]
            if part.storage_offset() % dtype.item_bytes:
                part = part.clone()  # torch views bytes as wider integers only where aligned
            parts.append(part.view(_INTEGERS[dtype.item_bytes]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unsigned(elements: Tensor, dtype: Dtype) -> Tensor:
    """Return the bits as int64; those of eight bytes keep their sign."""
    wide = elements.to(torch.int64)
    return wide if dtype.item_bytes == 8 else wide & ((1 << 8 * dtype.item_bytes) - 1)


def _zigzag(old: Tensor, new: Tensor, dtype: Dtype) -> Tensor:
    """See `echo2p2p.weights.ordered.differences`; int64 arithmetic wraps, as wanted."""
    width = 8 * dtype.item_bytes
    half = 1 << (width - 1)
    if dtype.is_float:
        old, new = (torch.where(bits >= half, bits ^ (half - 1), bits) for bits in (old, new))
    step = new - old
    if width < 64:
        step = ((step + half) & (2 * half - 1)) - half
    zigzag = (step << 1) ^ (step >> 63)
    return zigzag if width == 64 else zigzag & (2 * half - 1)
