"""Choosing tokens: one distribution a row, one uniform number a token, by inversion.

Every sample draws its uniforms from its own seed, one 64-bit Philox word a token, so its tokens
depend on weights, prompt and seed and not on who else is in the batch (up to the float noise of
batched arithmetic). Log-probs are those of the distribution that was drawn from: after
temperature, top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2p2p.wire.messages import Sampling

_BLOCK: Final = 32
_SCALE: Final = 2.0**-53


class Uniforms:
    """Streams of numbers in [0, 1), one a seed.

    Args:
        seeds: One a row, 63 bits.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._streams = [np.random.Philox(key=seed) for seed in seeds]
        self._block: NDArray[np.float64] = np.zeros((len(seeds), 0), dtype=np.float64)
        self._next = 0

    def draw(self) -> NDArray[np.float64]:
        """Return the next number of each row, ``[rows] float64``."""
        if self._next == self._block.shape[1]:
            words = np.stack([stream.random_raw(_BLOCK) for stream in self._streams])
            self._block = (words >> np.uint64(11)).astype(np.float64) * _SCALE
            self._next = 0
        self._next += 1
        return self._block[:, self._next - 1]

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        self._streams = [self._streams[row] for row in rows]
        self._block = self._block[rows]


class Distributions:
    """What each row's logits become before a token is drawn.

    Args:
        settings: One a row.
        device: Where the logits are.
    """

    def __init__(self, settings: Sequence[Sampling], device: torch.device) -> None:
        self._temperature = torch.tensor(
            [each.temperature for each in settings], dtype=torch.float32, device=device
        )[:, None]
        self._top_p = torch.tensor(
            [each.top_p for each in settings], dtype=torch.float32, device=device
        )[:, None]
        self._top_k = torch.tensor([each.top_k for each in settings], device=device)[:, None]
        self._plain = all(each.top_p >= 1.0 and each.top_k == 0 for each in settings)

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        self._temperature = self._temperature[rows]
        self._top_p = self._top_p[rows]
        self._top_k = self._top_k[rows]

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return ``[rows, vocabulary] float32`` log-probs; minus infinity where cut off."""
        scaled = logits.float() / self._temperature
        return torch.log_softmax(scaled if self._plain else self._cut(scaled), dim=-1)

    def _cut(self, logits: Tensor) -> Tensor:
        """Keep the top-k, and of those the fewest whose probability reaches top-p."""
        ordered, order = logits.sort(dim=-1, descending=True)
        rank = torch.arange(ordered.shape[-1], device=logits.device)[None]
        inside = (rank < self._top_k) | (self._top_k == 0)
        ordered = ordered.masked_fill(~inside, -torch.inf)
        shares = ordered.softmax(dim=-1)
        before = shares.cumsum(dim=-1) - shares
        inside = inside & ((before < self._top_p) | (self._top_p >= 1.0) | (rank == 0))
        kept = torch.zeros_like(inside).scatter(-1, order, inside)
        return logits.masked_fill(~kept, -torch.inf)


def choose(logprobs: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """Return the token of each row, ``[rows] int64``, where the cumulative distribution passes u.

    Args:
        logprobs: ``[rows, vocabulary] float32``.
        uniforms: ``[rows] float64`` in [0, 1).
    """
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    u = torch.from_numpy(np.ascontiguousarray(uniforms)).to(logprobs.device)[:, None]
    # Below the total even where u * total rounds up to it: a token of probability 0 is never drawn.
    target = torch.minimum(u * total, total * (1.0 - 2.0**-50))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]
