"""Token ids and log-probs as raw little-endian bytes: `Array` to numpy and back, checked."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.wire.messages import Array

ITEM_BYTES: Final = 4


def from_tokens(tokens: NDArray[np.uint32] | list[int]) -> Array:
    """Return token ids, ``[n]``, each below 2**32, as a wire array."""
    data = np.asarray(tokens, dtype="<u4")
    return Array(dtype="u4", length=int(data.size), data=data.tobytes())


def from_logprobs(logprobs: NDArray[np.float32] | list[float]) -> Array:
    """Return float32 log-probs, ``[n]``, as a wire array."""
    data = np.asarray(logprobs, dtype="<f4")
    return Array(dtype="f4", length=int(data.size), data=data.tobytes())


def _checked(array: Array, dtype: Literal["u4", "f4"]) -> bytes:
    if array.dtype != dtype or len(array.data) != ITEM_BYTES * array.length:
        raise RemoteProtocolError(
            Violation.MALFORMED,
            f"array of {array.length} {array.dtype} in {len(array.data)} bytes, wanted {dtype}",
        )
    return array.data


def to_tokens(array: Array) -> NDArray[np.uint32]:
    """Return ``[n] uint32``, read-only, sharing the message's memory.

    Raises:
        RemoteProtocolError: Another dtype, or a length that does not fit the bytes.
    """
    return np.frombuffer(_checked(array, "u4"), dtype="<u4")


def to_logprobs(array: Array) -> NDArray[np.float32]:
    """Return ``[n] float32``, read-only; may hold NaN or infinities, which the caller checks.

    Raises:
        RemoteProtocolError: Another dtype, or a length that does not fit the bytes.
    """
    return np.frombuffer(_checked(array, "f4"), dtype="<f4")
