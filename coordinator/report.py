"""What a run says of itself: a line a step, a status at any time, a summary at the end.

Counts come from the ledger and the store, never from this file; a summary whose ledger does not
equal the recount is marked so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from coordinator.publish import WeightBytes
from coordinator.training import StepRecord
from echo2p2p.rollouts.ledger import Balance

EDGE_STEPS: Final = 10
"""``reward_first`` and ``reward_last`` are means over this many steps."""


class Progress:
    """Figures of the steps so far."""

    def __init__(self, *, began_s: float) -> None:
        self._began_s = began_s
        self._first_step_s: float | None = None
        self._last_step_s = began_s
        self._rewards: dict[int, float] = {}
        self._age_sum = 0.0
        self._age_max = 0
        self._ages = 0
        self._idle_s = 0.0
        self._untrained_sum = 0.0
        self._untrained_count = 0

    def add(self, record: StepRecord, now: float) -> None:
        """Count one step; after a rollback it replaces its like and all that came after it."""
        began_s = now - record.train_s - record.idle_s
        if self._first_step_s is None:
            # Waiting for the very first batch is start-up, not idling.
            self._first_step_s = now - record.train_s
        else:
            self._idle_s += record.idle_s
        assert began_s <= now
        self._last_step_s = now
        lost = [step for step in self._rewards if step > record.step]
        for step in lost:
            del self._rewards[step]
        self._rewards[record.step] = record.reward
        self._age_sum += record.age_mean
        self._ages += 1
        self._age_max = max(self._age_max, record.age_max)
        total, count = record.first_version_rewards
        self._untrained_sum += total
        self._untrained_count += count

    @property
    def idle_share(self) -> float:
        """Share of the learner's time, from the first step on, spent waiting for batches."""
        if self._first_step_s is None:
            return 0.0
        return self._idle_s / max(1e-9, self._last_step_s - self._first_step_s)

    def reward_recent(self) -> float | None:
        """Mean reward of the newest steps."""
        newest = [self._rewards[step] for step in sorted(self._rewards)[-EDGE_STEPS:]]
        return sum(newest) / len(newest) if newest else None

    def summary(self, now: float) -> dict[str, object]:
        """Return the learning part of a summary."""
        steps = sorted(self._rewards)
        first = [self._rewards[step] for step in steps[:EDGE_STEPS]]
        untrained = self._untrained_count
        return {
            "reward_version0": self._untrained_sum / untrained if untrained else None,
            "reward_first": sum(first) / len(first) if first else None,
            "reward_last": self.reward_recent(),
            "steps": max(steps, default=0),
            "wall_s": now - self._began_s,
            "learner_idle_share": self.idle_share,
            "age_steps": {
                "mean": self._age_sum / self._ages if self._ages else None,
                "max": self._age_max,
            },
        }


def trajectories(balance: Balance, recount: Balance) -> dict[str, object]:
    """Return the ledger part of a summary."""
    return asdict(balance) | {"balances": balance.balances, "recount_agrees": balance == recount}


def weights(sizes: WeightBytes, *, source_bytes: int, peer_bytes: int) -> dict[str, object]:
    """Return the weights part of a summary; all in bytes of chunks on the wire."""
    return {
        "state_bytes": sizes.state_bytes,
        "anchor_bytes": sizes.anchor_bytes,
        "delta_bytes_mean": sizes.delta_bytes_mean,
        "ratio_mean": sizes.ratio_mean,
        "source_bytes": source_bytes,
        "peer_bytes": peer_bytes,
    }


def step_line(record: StepRecord, version: int | None) -> Mapping[str, object]:
    """Return one line of the metrics file."""
    line = asdict(record)
    line.pop("first_version_rewards")
    line.pop("version_steps")
    metrics = line.pop("metrics")
    return {**line, "version": version, **metrics}
