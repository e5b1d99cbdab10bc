"""What one block changes, worked out and not yet written.

The problem: a block can be decoded as soon as it is there, but a version must appear whole, so
nothing may be written before the last block has come. The idea: keep places and differences, six
bytes a change of a bf16, and write them when all are there. Decoding is where blocks fail and what
takes time; of writing nothing remains but to move some elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights import kernels
from echo2p2p.weights.layout import Dtype
from echo2p2p.weights.stretch import Segments, walk


@dataclass(frozen=True)
class Changes:
    """Of one block.

    Attributes:
        where: ``[m] uint32``, ascending, from the block's first element.
        zigzag: ``[m]``, differences as of `echo2p2p.weights.ordered`, as wide as the elements.
    """

    where: NDArray[np.uint32]
    zigzag: NDArray[Any]

    @property
    def bytes(self) -> int:
        """Memory that they take."""
        return int(self.where.nbytes + self.zigzag.nbytes)

    def move(self, dtype: Dtype, target: Segments) -> None:
        """Write them into ``target``, the block's old elements."""
        for number, origin, part in walk(target, self.where):
            kernels.move(dtype, target[number], self.where[part], origin, self.zigzag[part])


def pieces_of(segments: Segments) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield parts of a block that fit a core's cache, each with its first element's place."""
    origin = 0
    for segment in segments:
        for start in range(0, segment.size, kernels.PIECE_ELEMENTS):
            yield origin + start, segment[start : start + kernels.PIECE_ELEMENTS]
        origin += segment.size


def joined(parts: list[Changes]) -> Changes:
    """Return the changes of parts that follow each other; at least one."""
    if len(parts) == 1:
        return parts[0]
    return Changes(
        np.concatenate([part.where for part in parts]),
        np.concatenate([part.zigzag for part in parts]),
    )
