"""Layouts and flat states for tests: every dtype, every awkward size, every awkward bit pattern.

Not realistic weights, except for `trained_step`: the codecs promise exactness for *bits*, so that
is what these are made of. All chance comes from the caller's generator.
"""

from __future__ import annotations

import random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights.layout import DTYPES, Layout, elements_of, plan_layout

AWKWARD_BF16: Final = (
    0x0000,  # 0.0
    0x8000,  # -0.0
    0x0001,  # smallest subnormal
    0x807F,  # largest subnormal, negative
    0x7F7F,  # largest finite
    0x7F80,  # infinity
    0xFF80,  # -infinity
    0x7F81,  # signalling NaN
    0x7FC0,  # NaN
    0xFFFF,  # NaN with every bit set
    0x7FFF,
)
"""Also awkward as f16 (all but the infinities), and as the upper half of an f32."""


def random_layout(rng: random.Random) -> Layout:
    """Return a small layout with any dtypes, scalars, empty and tied tensors, and odd offsets."""
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 0), (7,), (5, 11), (300,), (40, 60))
    entries: list[tuple[str, str, tuple[int, ...], tuple[str, ...]]] = []
    for index in range(rng.randrange(6)):
        tied: tuple[str, ...] = (f"tied.{index}",) if rng.random() < 0.3 else ()
        entries.append((f"tensor.{index}", rng.choice(list(DTYPES)), rng.choice(shapes), tied))
    return plan_layout(entries)


def random_state(layout: Layout, rng: random.Random) -> bytes:
    """Return a state of noise, small weights, one value all over, or awkward bits, per tensor."""
    state = np.zeros(layout.total_bytes, dtype=np.uint8)
    for tensor in layout.tensors:
        kind = rng.choice(("noise", "weights", "same", "awkward"))
        _fill(elements_of(state, tensor), tensor.dtype, kind, rng)
    return state.tobytes()


def changed_state(layout: Layout, state: bytes, density: float, rng: random.Random) -> bytes:
    """Return ``state`` with about ``density`` of its elements replaced; neighbours or any bits."""
    result = np.frombuffer(state, dtype=np.uint8).copy()
    draws = np.random.default_rng(rng.getrandbits(64))
    for tensor in layout.tensors:
        bits = elements_of(result, tensor)
        where = np.flatnonzero(draws.random(bits.size) < density)
        if rng.random() < 0.5:
            bits[where] += draws.integers(1, 4, where.size).astype(bits.dtype)
        else:
            fresh = draws.integers(0, 256, where.size * tensor.item_bytes, dtype=np.uint8)
            bits[where] = fresh.view(bits.dtype)
    return result.tobytes()


def trained_step(elements: int, *, deviation: float, step: float, seed: int) -> tuple[bytes, bytes]:
    """Return bf16 weights with this standard deviation, and the same after normal updates.

    Args:
        elements: How many.
        deviation: Of the weights.
        step: Standard deviation of one update; Adam makes about its learning rate of it.
        seed: Of both draws.
    """
    draws = np.random.default_rng(seed)
    weights = (draws.standard_normal(elements) * deviation).astype(np.float32)
    moved = weights + (draws.standard_normal(elements) * step).astype(np.float32)
    return _rounded(weights), _rounded(moved.astype(np.float32))


def _rounded(values: NDArray[np.float32]) -> bytes:
    """Return finite float32 values as bf16, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def _fill(bits: NDArray[np.unsignedinteger], dtype: str, kind: str, rng: random.Random) -> None:
    item_bytes = bits.itemsize
    raw = np.frombuffer(rng.randbytes(bits.nbytes), dtype=np.uint8).view(bits.dtype)
    if kind == "noise":
        bits[:] = raw
    elif kind == "same":
        bits[:] = raw[:1] if bits.size else 0
    elif kind == "weights" and dtype == "bf16":
        weights, _ = trained_step(bits.size, deviation=0.02, step=0.0, seed=rng.getrandbits(32))
        bits[:] = np.frombuffer(weights, dtype="<u2")
    else:
        words = [rng.choice(AWKWARD_BF16) << max(0, 8 * item_bytes - 16) for _ in range(bits.size)]
        bits[:] = np.array(words, dtype=np.uint64).astype(bits.dtype)
