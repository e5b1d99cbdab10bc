"""What a run says of itself: a line a step, a status at any time, a summary at the end.

Counts come from the ledger and the store, never from this file; a summary whose ledger does not
equal the recount is marked so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Final

from coordinator.publish import WeightBytes
from coordinator.training import StepRecord
from echo2p2p.rollouts.ledger import Balance

EDGE_STEPS: Final = 10
"""``reward_first`` and ``reward_last`` are means over this many steps."""


class Progress:
    """Figures of the steps in the surviving history.

    Args:
        began_s: When the run was made, by the coordinator's wall clock.
        records: Of the steps so far, when the run is taken up again.
    """

    def __init__(self, *, began_s: float, records: Iterable[StepRecord] = ()) -> None:
        self._began_s = began_s
        self._records = {int(record.step): record for record in records}

    def add(self, record: StepRecord) -> None:
        """Count one step; one taken again after a rollback replaces the lost one."""
        self._records[record.step] = record

    def roll_back(self, step: int) -> None:
        """Forget steps that never happened."""
        self._records = {at: record for at, record in self._records.items() if at <= step}

    @property
    def idle_share(self) -> float:
        """Share of the learner's time spent waiting for batches, the first batch aside.

        Waiting for the very first batch is start-up: peers are still joining.
        """
        later = [record for step, record in self._records.items() if step > 1]
        elapsed_s = sum(record.elapsed_s for record in later)
        return sum(record.idle_s for record in later) / elapsed_s if elapsed_s else 0.0

    def reward_recent(self) -> float | None:
        """Mean reward of the newest steps."""
        newest = sorted(self._records)[-EDGE_STEPS:]
        return fmean(self._records[step].reward for step in newest) if newest else None

    def summary(self, now_s: float) -> dict[str, object]:
        """Return the learning part of a summary; ``now_s`` is the wall clock."""
        records = [self._records[step] for step in sorted(self._records)]
        first = records[:EDGE_STEPS]
        total = sum(record.first_version_rewards[0] for record in records)
        count = sum(record.first_version_rewards[1] for record in records)
        return {
            "reward_version0": total / count if count else None,
            "reward_first": fmean(record.reward for record in first) if first else None,
            "reward_last": self.reward_recent(),
            "steps": len(records),
            "wall_s": now_s - self._began_s,
            "learner_idle_share": self.idle_share,
            "age_steps": {
                "mean": fmean(record.age_mean for record in records) if records else None,
                "max": max((record.age_max for record in records), default=0),
            },
        }


def trajectories(balance: Balance, recount: Balance) -> dict[str, object]:
    """Return the ledger part of a summary."""
    return asdict(balance) | {"balances": balance.balances, "recount_agrees": balance == recount}


def weights(
    sizes: WeightBytes, *, source_bytes: tuple[int, int], peer_bytes: int
) -> dict[str, object]:
    """Return the weights part of a summary; all in bytes of chunks on the wire.

    Args:
        sizes: Of what was published.
        source_bytes: Sent by the coordinator's relay: in all, and of deltas.
        peer_bytes: Sent by peers, by their own account.
    """
    delta_bytes = sum(sizes.delta_bytes)
    return {
        "state_bytes": sizes.state_bytes,
        "anchor_bytes": sizes.anchor_bytes,
        "delta_bytes_mean": sizes.delta_bytes_mean,
        "ratio_mean": sizes.ratio_mean,
        "source_bytes": source_bytes[0],
        "source_copies": source_bytes[1] / delta_bytes if delta_bytes else None,
        "peer_bytes": peer_bytes,
    }


def step_line(record: StepRecord, version: int | None) -> Mapping[str, object]:
    """Return one line of the metrics file."""
    line = asdict(record)
    line.pop("first_version_rewards")
    line.pop("version_steps")
    metrics = line.pop("metrics")
    return {**line, "version": version, **metrics}
