"""How small a delta could be: entropies of what changed, with the change's own counts.

Both bounds take each element by itself: ``independent`` knows nothing of it, ``exponent`` knows
the exponent of its old value, which a receiver knows too. They charge where changes are, and by
how much: differences below 16 units in the last place as symbols, larger ones as their power of
two and the bits below it. A real coder also pays for saying what the distributions are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights import kernels
from echo2p2p.weights.layout import DTYPES, Layout, flat_bytes, segments_of
from echo2p2p.weights.ordered import exponents

_JUMP: int = 16


@dataclass(frozen=True)
class Bounds:
    """Bytes below which no coder of its kind comes."""

    changed: int
    elements: int
    independent: float
    exponent: float


def bounds_of(layout: Layout, old: bytes, new: bytes) -> Bounds:
    """Return the bounds of the delta from ``old`` to ``new``."""
    before, after = flat_bytes(layout, old), flat_bytes(layout, new)
    changed = elements = 0
    bits = np.zeros(2)
    for sequence in layout.sequences:
        dtype = DTYPES[sequence.dtype]
        held = segments_of(before, sequence, 0, sequence.elements)
        found = kernels.find_in(dtype, held, segments_of(after, sequence, 0, sequence.elements))
        population = np.zeros(256, dtype=np.int64)
        for segment in held:
            population += np.bincount(exponents(dtype, segment), minlength=256)
        symbols, below = _symbols(found.zigzag)
        changed += symbols.size
        elements += sequence.elements
        bits += below + np.array(
            [
                _coded(
                    np.array([population.sum()]), symbols, np.zeros(symbols.size, dtype=np.uint8)
                ),
                _coded(population, symbols, found.exponent),
            ]
        )
    return Bounds(changed, elements, float(bits[0]) / 8, float(bits[1]) / 8)


def _symbols(zigzag: NDArray[np.unsignedinteger]) -> tuple[NDArray[np.int64], float]:
    """Return a symbol for each difference, and how many bits the symbols leave open in all."""
    wide = zigzag.astype(np.uint64)
    size = (wide + np.uint64(1)) >> np.uint64(1)
    power = np.floor(np.log2(np.maximum(size, 1).astype(np.float64))).astype(np.int64)
    is_jump = size >= _JUMP
    symbols = np.where(is_jump, 64 + 2 * power + (wide & np.uint64(1)).astype(np.int64), wide)
    return symbols.astype(np.int64), float(power[is_jump].sum())


def _coded(
    population: NDArray[np.int64], symbols: NDArray[np.int64], context: NDArray[np.uint8]
) -> float:
    """Return the bits of all positions and symbols, each context with its own distribution."""
    bits = 0.0
    changes = np.bincount(context, minlength=population.size)
    for kind in np.flatnonzero(changes).tolist():
        counts = np.bincount(symbols[context == kind])
        unchanged = population[kind] - changes[kind]
        outcomes = np.append(counts[counts > 0], unchanged or []).astype(np.float64)
        bits += float((outcomes * np.log2(outcomes.sum() / outcomes)).sum())
    return bits
