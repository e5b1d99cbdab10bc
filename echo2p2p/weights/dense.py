"""DENSE: a difference for every element, sorted by the class of the old one. For many changes.

Where a third and more of the elements change, gaps say no more than the zeros between them would,
and a loop over everything is quicker. What goes where is known from the old elements alone.

Body: number ``low``; a number, the mask of classes that start a new group; for each group the
packed differences, class after class.
"""

from __future__ import annotations

import numpy as np

from echo2p2p.weights import kernels
from echo2p2p.weights.kernels import Ranks
from echo2p2p.weights.layout import Dtype
from echo2p2p.weights.streams import StreamReader, StreamWriter
from echo2p2p.weights.stretch import (
    Segments,
    Stretch,
    group_slices,
    plan_groups,
    population,
    take_groups,
    take_low,
    value_dtype,
)


def put_dense(out: StreamWriter, stretch: Stretch) -> None:
    """Append the body of a stretch."""
    counts = population(stretch.dtype, stretch.old, stretch.low)
    ranks = Ranks.start(stretch.low, counts)
    values = np.empty(stretch.count, dtype=value_dtype(stretch.dtype))
    for old, new in zip(stretch.old, stretch.new, strict=True):
        kernels.put_dense(stretch.dtype, old, new, ranks, values)
    groups = plan_groups(counts)
    out.number(stretch.low)
    out.number(groups)
    for part in group_slices(groups, counts):
        out.packed(values[part])


def take_dense(body: StreamReader, dtype: Dtype, target: Segments) -> None:
    """Change ``target`` in place."""
    low = take_low(body)
    groups = take_groups(body)
    counts = population(dtype, target, low)
    values = np.empty(int(counts.sum()), dtype=value_dtype(dtype))
    for part in group_slices(groups, counts):
        body.packed(values[part])
    values = values.astype(dtype.bits, copy=False)
    ranks = Ranks.start(low, counts)
    for segment in target:
        kernels.take_dense(dtype, segment, ranks, values)
