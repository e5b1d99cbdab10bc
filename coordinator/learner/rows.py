"""Trajectories as padded tensors: right-padded rows, and where in them the answers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coordinator.learner.base import TrainSample


@dataclass(frozen=True)
class PackedRows:
    """Rows of one micro-batch as tensors.

    The columns of ``behaviour`` and ``mask`` are the last ``width`` positions of ``ids``: from the
    shortest prompt's end on.
    """

    ids: Tensor
    """``[rows, length] int64``, right-padded with 0."""
    behaviour: Tensor
    """``[rows, width] float32``, 0 outside the mask."""
    mask: Tensor
    """``[rows, width] bool``: True where a generated token is."""
    advantages: Tensor
    """``[rows] float32``."""


def pack_rows(rows: Sequence[TrainSample]) -> PackedRows:
    """Return ``rows``, at least one, each with a prompt and an answer, right-padded."""
    length = max(row.prompt.size + row.tokens.size for row in rows)
    first = min(row.prompt.size for row in rows)
    assert first > 0, "a prompt needs at least one token: the first is never predicted"
    ids = np.zeros((len(rows), length), dtype=np.int64)
    behaviour = np.zeros((len(rows), length - first), dtype=np.float32)
    mask = np.zeros((len(rows), length - first), dtype=np.bool_)
    for index, row in enumerate(rows):
        start, end = row.prompt.size, row.prompt.size + row.tokens.size
        ids[index, :start] = row.prompt
        ids[index, start:end] = row.tokens
        behaviour[index, start - first : end - first] = row.logprobs
        mask[index, start - first : end - first] = True
    advantages = np.asarray([row.advantage for row in rows], dtype=np.float32)
    return PackedRows(
        ids=torch.from_numpy(ids),
        behaviour=torch.from_numpy(behaviour),
        mask=torch.from_numpy(mask),
        advantages=torch.from_numpy(advantages),
    )
