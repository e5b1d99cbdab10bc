"""Elements as integers in numeric order, and the classes that their exponents fall into.

A delta codes differences between *ordered integers*: the bits of a float, with the lower ones of
a negative number turned over, so that neighbours on the number line differ by one. The difference
modulo 2**bits, zigzagged, is exact for every bit pattern, NaN and -0.0 included. Integer tensors
are ordered as they are.

Whether an element changes depends on the learning rate over its unit in the last place, and so on
its *old* exponent, which both sides know. Class 0 is exponent 0: zeros, which change often,
subnormals, and all integers. Classes 1 to 15 are the exponents from ``low`` on, one each; what is
smaller falls into class 1, what is larger into class 15.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights.layout import Dtype

CLASSES: Final = 16
"""Part of the format; as many counters as a decoder can keep in registers."""

LOW_MAX: Final = 255


def ordered(dtype: Dtype, bits: NDArray[Any]) -> NDArray[Any]:
    """Map bits to integers in numeric order, or back: it is its own inverse. Keeps the dtype."""
    if not dtype.is_float:
        return bits
    width = 8 * dtype.item_bytes
    sign = bits.view(dtype.signed) >> (width - 1)
    turned: NDArray[Any] = bits ^ (sign.view(dtype.bits) >> 1)
    return turned


def differences(dtype: Dtype, old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    """Return the zigzagged differences: 0, -1, 1, -2 .. as 0, 1, 2, 3 .., unsigned."""
    step: NDArray[Any] = (ordered(dtype, new) - ordered(dtype, old)).view(dtype.signed)
    zigzag: NDArray[Any] = (step << 1) ^ (step >> (8 * dtype.item_bytes - 1))
    return zigzag.view(dtype.bits)


def moved(dtype: Dtype, old: NDArray[Any], zigzag: NDArray[Any]) -> NDArray[Any]:
    """Undo `differences`."""
    odd = -(zigzag & 1).view(dtype.signed)
    step = (zigzag >> 1) ^ odd.view(dtype.bits)
    return ordered(dtype, ordered(dtype, old) + step)


def exponents(dtype: Dtype, bits: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the biased exponent of each element; 0 for integers."""
    return (bits >> dtype.exponent_shift & dtype.exponent_mask).astype(np.uint8)


def class_table(low: int) -> NDArray[np.uint8]:
    """Return ``[256]``: the class of each exponent."""
    table = np.clip(np.arange(256) - low, 0, CLASSES - 2) + 1
    table[0] = 0
    return table.astype(np.uint8)


def plan_low(changes: NDArray[np.int64]) -> int:
    """Return the ``low`` that suits changes of these exponents.

    The class above the largest exponent that still changes is for all that does not: to throw it
    together with one that does would hide where the changes are.

    Args:
        changes: ``[256]``, changed elements with each exponent.
    """
    frequent = np.flatnonzero(changes[1:] * 1000 >= max(1, int(changes.sum())))
    highest = int(frequent[-1]) + 1 if frequent.size else 1
    return max(1, min(highest + 1, LOW_MAX) - (CLASSES - 2))
