"""The token-level GRPO loss, as a pure function of tensors.

GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3) with the token-level mean and the asymmetric clip
of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 8), no KL term. Rollouts come from older weights and
from another implementation of the model, so the ratio is taken to the *behaviour* log-probs that
the engine reported:

* ``none``: the clipped surrogate on pi/mu itself. A token that has drifted out of the interval in
  the advantage's direction has no gradient; one that drifted against it is weighted by all of
  pi/mu, which nothing bounds when the advantage is negative.
* ``tis``: the same, and that weight is truncated at a cap (truncated importance sampling).

The form that takes the current policy as proximal, with min(pi/mu, cap) as the only correction, is
not offered: at one optimizer step a batch its clip never binds, and three steps of staleness then
cost the demo recipe its last tenth of reward (0.86 against 0.92 after 100 steps).

Both are the plain policy gradient when mu is pi. Log-probs are those of the distribution that was
sampled from; the learner computes its own at temperature 1 without top-p or top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from echo2p2p.errors import ConfigError

CORRECTIONS: Final = ("none", "tis")

GAP_MAX: Final = 20.0
"""Largest log pi/mu that is told from larger ones. Behaviour log-probs are what strangers say, and
beyond 88 the ratio is no float any more: one token would end the step."""


@dataclass(frozen=True)
class LossSettings:
    """How the policy ratio is bounded."""

    clip_low: float
    clip_high: float
    correction: str
    correction_cap: float

    def __post_init__(self) -> None:
        if self.correction not in CORRECTIONS:
            raise ConfigError(
                "learner.correction", f"{self.correction!r} is none of {', '.join(CORRECTIONS)}"
            )


@dataclass(frozen=True)
class LossSums:
    """One micro-batch's part of the loss and of the metrics; sums, to be added up."""

    loss: Tensor
    """Scalar, differentiable, already divided by the whole batch's tokens."""
    tokens: float
    """Tokens under the mask."""
    ratio: float
    """Sum of pi/mu."""
    bounded: float
    """Tokens whose ratio was clipped or truncated."""
    kl: float
    """Sum of the estimate r - 1 - log r of KL(mu, pi), r = pi/mu (Schulman's k3)."""


def token_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tokens_total: int,
    settings: LossSettings,
) -> LossSums:
    """Return the loss of one micro-batch.

    Args:
        logprobs: ``[rows, n] float32``, of the current weights, differentiable.
        behaviour: ``[rows, n] float32``, of the weights that sampled; anything where masked.
        advantages: ``[rows] float32``.
        mask: ``[rows, n] bool``; False: padding.
        tokens_total: Denominator: tokens of the whole batch, rows of zero advantage included.
        settings: See `LossSettings`.
    """
    gap = torch.where(mask, logprobs - behaviour, 0.0)
    ratio = gap.clamp(max=GAP_MAX).exp()
    fixed = ratio.detach()
    weight = advantages[:, None]
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    if settings.correction == "tis":
        own = (gap - gap.detach()).exp()  # 1 in value, with the policy's gradient
        ratio = fixed.clamp(max=settings.correction_cap) * own
    surrogate = torch.minimum(ratio * weight, clipped * weight)
    bounded = surrogate.detach() != fixed * weight
    loss = -torch.where(mask, surrogate, 0.0).sum() / tokens_total
    return LossSums(
        loss=loss,
        tokens=float(mask.sum()),
        ratio=float(fixed[mask].sum()),
        bounded=float((bounded & mask).sum()),
        kl=float((fixed - 1.0 - gap.detach())[mask].sum()),
    )
