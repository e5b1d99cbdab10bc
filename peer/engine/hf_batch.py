"""A batch of sequences under way in a transformers model: cache, padding and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache


class Batch:
    """Sequences that grow by one token a step, all at once.

    Args:
        model: A causal language model, in evaluation mode.
        prompts: ``[n] uint32`` each, not empty; padded on the left to the longest.
        device: The model's.
        positions_max: Tokens that the model takes in all.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - transformers has no types
        prompts: Sequence[NDArray[np.uint32]],
        device: torch.device,
        *,
        positions_max: int,
    ) -> None:
        self._model = model
        self._last = positions_max - 1
        self._cache = DynamicCache(config=model.config)
        lengths = [int(prompt.size) for prompt in prompts]
        width = max(lengths)
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - prompt.size :] = prompt
            mask[row, width - prompt.size :] = 1
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
        # Without padding no mask is needed, and attention takes its fast path.
        self._mask = torch.from_numpy(mask).to(device) if min(lengths) < width else None
        self._positions = torch.tensor(lengths, device=device)[:, None]
        self.logits = self._forward(
            torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device)
        )
        """``[rows, vocabulary]``: of each row's next token."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows; one may be taken several times."""
        chosen = torch.tensor(rows, device=self.logits.device)
        self._cache.batch_select_indices(chosen)
        self._positions = self._positions[chosen]
        self.logits = self.logits[chosen]
        if self._mask is not None:
            self._mask = self._mask[chosen]

    def step(self, tokens: Tensor) -> None:
        """Append one token to each row.

        Args:
            tokens: ``[rows] int64``.
        """
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self.logits = self._forward(tokens[:, None], self._positions)
        # Rows that have ended go on until they are left out, but not beyond the last position.
        self._positions = (self._positions + 1).clamp(max=self._last)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits
