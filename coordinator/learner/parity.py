"""How far the engines' log-probs are from the learner's own on the very same weights.

The problem: a rollout is trained on some steps after it was sampled, so what the learner computes
for it differs for two reasons, and only one of them is a fault: staleness, and another
implementation of the model. The idea: the learner keeps its publish copies, as many as a batch can
be old, and computes a few rows of each batch again with the copy that sampled them. What is left is
the engine's: its kernels, its dtype, or a bug.

Refused: telling it from rollouts of age 0 alone. There is one such batch at the start of a run
whose peers are quick, and then none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from coordinator.learner.base import TrainSample
from coordinator.learner.rows import pack_rows
from echo2p2p.weights.layout import Layout

DTYPES = {
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
}


class Parity:
    """The newest publish copies of one model, and rows computed with them.

    Args:
        model: A causal language model.
        layout: Of a copy.
        copies_max: So many are kept, the oldest goes first.
        rows_max: So many rows of a batch are computed again; 0: none, and no copy is kept.
    """

    def __init__(self, model: Any, layout: Layout, *, copies_max: int, rows_max: int) -> None:  # noqa: ANN401
        self._model = model
        self._layout = layout
        self._copies_max = copies_max
        self._rows_max = rows_max
        self._copies: dict[int, Tensor] = {}
        """By step, ``[total_bytes] uint8`` in main memory."""

    def keep(self, step: int, copy: Tensor) -> None:
        """Remember the publish copy of this step, ``[total_bytes] uint8``; it is copied."""
        if not self._rows_max:
            return
        self._copies.pop(step, None)
        self._copies[step] = copy.clone()
        while len(self._copies) > self._copies_max:
            del self._copies[next(iter(self._copies))]

    @torch.no_grad()
    def measure(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Return ``parity_*`` of some rows, at even distances; nothing if no copy fits any.

        ``parity_kl`` is the mean of r - 1 - log r, r = pi/mu, over the tokens: the k3 estimator of
        KL(mu, pi), unbiased and never negative (Schulman 2020, "Approximating KL divergence").
        """
        known = [sample for sample in samples if sample.step in self._copies]
        chosen = known[:: max(1, len(known) // max(1, self._rows_max))][: self._rows_max]
        gaps = [
            self._gaps([sample for sample in chosen if sample.step == step], step)
            for step in sorted({sample.step for sample in chosen if sample.step is not None})
        ]
        if not gaps:
            return {}
        gap = torch.cat(gaps).double()
        return {
            "parity_tokens": float(gap.numel()),
            "parity_mean": float(gap.abs().mean()),
            "parity_max": float(gap.abs().max()),
            "parity_kl": float((gap.expm1() - gap).mean()),
        }

    def _gaps(self, rows: Sequence[TrainSample], step: int) -> Tensor:
        """Return log pi - log mu of all tokens of ``rows``, which one copy has sampled."""
        packed = pack_rows(rows)
        device = self._model.device
        ids, mask = packed.ids.to(device), packed.mask.to(device)
        width = mask.shape[1]
        logits = functional_call(
            self._model,
            self._state(self._copies[step], device),
            kwargs={"input_ids": ids[:, :-1], "logits_to_keep": width, "use_cache": False},
        ).logits
        logprobs = -functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, -width:].flatten(), reduction="none"
        ).view(ids.shape[0], width)
        return (logprobs - packed.behaviour.to(device))[mask].cpu()

    def _state(self, copy: Tensor, device: torch.device) -> dict[str, Tensor]:
        state = {}
        for entry, spec in zip(self._layout.tensors, self._layout.table.tensors, strict=True):
            raw = copy[entry.offset : entry.offset + entry.bytes].clone()
            tensor = raw.view(DTYPES[entry.dtype]).view(spec.shape).to(device)
            state[entry.name] = tensor.float() if tensor.is_floating_point() else tensor
        return state
