"""How sure a mean of few scores is. Pure.

Scores of held-out items lie between 0 and 1 and are few, and often all right or all wrong, where
the usual mean ± 1.96 s/√n would claim to be certain. So: Wilson's score interval (Wilson 1927;
Brown, Cai and DasGupta 2001, "Interval estimation for a binomial proportion"), with the mean in
the place of the proportion. For scores that are not just 0 or 1 that is wider than it need be, as
their variance is at most that of a coin with the same mean.

A difference of two means gets Newcombe's square-and-add interval (Newcombe 1998, "Interval
estimation for the difference between independent proportions", method 10), as if the two were
independent. They are of the same items and go together, which makes it wider than it need be, too.

Rejected: the bootstrap, which says [0, 0] where all answers are wrong, and draws chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

CONFIDENCE: Final = 0.95
Z: Final = 1.959963984540054
"""The normal distribution has `CONFIDENCE` of its mass between -Z and Z."""


@dataclass(frozen=True)
class Interval:
    """A value, and between which it probably lies."""

    value: float
    low: float
    high: float


def mean_interval(scores: Sequence[float]) -> Interval:
    """Return the mean of ``scores``, at least one, each from 0 to 1, with Wilson's interval."""
    count = len(scores)
    assert count, "no score has no mean"
    assert all(0.0 <= score <= 1.0 for score in scores), "these have another interval"
    mean = sum(scores) / count
    spread = Z * sqrt(mean * (1.0 - mean) / count + Z * Z / (4 * count * count))
    centre, scale = mean + Z * Z / (2 * count), 1.0 + Z * Z / count
    # Rounding must not push a mean of 0 or 1 out of its own interval.
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return Interval(mean, min(mean, max(0.0, low)), max(mean, min(1.0, high)))


def difference_interval(before: Interval, after: Interval) -> Interval:
    """Return ``after`` less ``before``, with Newcombe's interval."""
    value = after.value - before.value
    down = sqrt((after.value - after.low) ** 2 + (before.high - before.value) ** 2)
    up = sqrt((after.high - after.value) ** 2 + (before.value - before.low) ** 2)
    return Interval(value, value - down, value + up)
