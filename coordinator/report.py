"""What a run says of itself: a line a step, a status at any time, a summary at the end.

Counts come from the ledger and the store, never from this file; a summary whose ledger does not
equal the recount is marked so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.publish import WeightBytes
from coordinator.training import StepRecord
from echo2p2p.rollouts.ledger import Balance

EDGE_STEPS: Final = 10
"""``reward_first`` and ``reward_last`` are means over this many steps."""
CURVE_POINTS: Final = 240
"""Points of a curve: about what a chart has pixels for."""
CURVE_FIGURES: Final = ("reward", "age_mean", "age_max", "idle_s", "train_s", "elapsed_s")


PARITY_FIGURES: Final = ("parity_tokens", "parity_mean", "parity_max", "parity_kl")
"""Of the learner's metrics; not every step has them."""

_ROW: Final = np.dtype(
    [
        ("step", "i8"),
        *((name, "f8") for name in CURVE_FIGURES),
        *((name, "f8") for name in PARITY_FIGURES),
        ("first_version_sum", "f8"),
        ("first_version_count", "f8"),
    ]
)
"""What is kept of one step in memory: 104 bytes. The store has the whole record."""

_Rows = NDArray[np.void]


class Progress:
    """Figures of the steps in the surviving history.

    Args:
        began_s: When the run was made, by the coordinator's wall clock.
        records: Of the steps so far, when the run is taken up again.
    """

    def __init__(self, *, began_s: float, records: Iterable[StepRecord] = ()) -> None:
        self._began_s = began_s
        self._rows: _Rows = np.zeros(1024, dtype=_ROW)  # step k in row k - 1; step 0: none there
        self._end = 0
        for record in records:
            self.add(record)

    def add(self, record: StepRecord) -> None:
        """Count one step; one taken again after a rollback replaces the lost one."""
        if record.step > len(self._rows):
            more = np.zeros(max(record.step, 2 * len(self._rows)), dtype=_ROW)
            more[: len(self._rows)] = self._rows
            self._rows = more
        figures = (getattr(record, name) for name in CURVE_FIGURES)
        parity = (record.metrics.get(name, 0.0) for name in PARITY_FIGURES)
        row = (record.step, *figures, *parity, *record.first_version_rewards)
        self._rows[record.step - 1] = row
        self._end = max(self._end, record.step)

    def roll_back(self, step: int) -> None:
        """Forget steps that never happened."""
        self._rows[step:] = 0
        self._end = min(self._end, step)

    @property
    def step(self) -> int:
        """The newest step; 0 before the first."""
        return self._end

    def _kept(self) -> _Rows:
        """Return the rows of the steps that there are, in order."""
        rows = self._rows[: self._end]
        return rows if rows["step"].all() else rows[rows["step"] > 0]

    @property
    def idle_share(self) -> float:
        """Share of the learner's time spent waiting for batches, the first batch aside.

        Waiting for the very first batch is start-up: peers are still joining.
        """
        later = self._rows[1 : self._end]
        elapsed_s = float(later["elapsed_s"].sum())
        return float(later["idle_s"].sum()) / elapsed_s if elapsed_s else 0.0

    def reward_recent(self) -> float | None:
        """Mean reward of the newest steps."""
        return _mean(self._kept()["reward"][-EDGE_STEPS:])

    def age_recent(self) -> float | None:
        """Mean age, in steps, of what the newest steps consumed."""
        return _mean(self._kept()["age_mean"][-EDGE_STEPS:])

    def steps_per_s(self) -> float | None:
        """Speed of the newest steps, waiting included; the very first step is start-up."""
        newest = self._kept()[-EDGE_STEPS:]
        newest = newest[newest["step"] > 1]
        elapsed_s = float(newest["elapsed_s"].sum())
        return len(newest) / elapsed_s if elapsed_s else None

    def parity(self) -> dict[str, float] | None:
        """Return how far apart engines and learner were on the same weights, over the run.

        Over the tokens that the learner has computed again; ``None``: there were none.
        """
        rows = self._kept()
        rows = rows[rows["parity_tokens"] > 0]
        if not len(rows):
            return None
        weights = rows["parity_tokens"]
        return {
            "steps": len(rows),
            "tokens": int(weights.sum()),
            "mean": float(np.average(rows["parity_mean"], weights=weights)),
            "max": float(rows["parity_max"].max()),
            "kl": float(np.average(rows["parity_kl"], weights=weights)),
        }

    def curve(self, points_max: int = CURVE_POINTS) -> dict[str, list[float]]:
        """Return the course of the run: ``step`` and each of `CURVE_FIGURES`, aligned.

        Long runs are told in at most ``points_max`` means over neighbouring steps, each at its
        last step; of the largest age it is the largest.
        """
        rows = self._kept()
        width = max(1, -(-len(rows) // points_max))
        parts = [rows[at : at + width] for at in range(0, len(rows), width)]
        result: dict[str, list[float]] = {"step": [int(part["step"][-1]) for part in parts]}
        for name in CURVE_FIGURES:
            merge = np.max if name == "age_max" else np.mean
            result[name] = [round(float(merge(part[name])), 5) for part in parts]
        return result

    def summary(self, now_s: float) -> dict[str, object]:
        """Return the learning part of a summary; ``now_s`` is the wall clock."""
        rows = self._kept()
        count = float(rows["first_version_count"].sum())
        total = float(rows["first_version_sum"].sum())
        return {
            "reward_version0": total / count if count else None,
            "reward_first": _mean(rows["reward"][:EDGE_STEPS]),
            "reward_last": self.reward_recent(),
            "steps": len(rows),
            "wall_s": now_s - self._began_s,
            "learner_idle_share": self.idle_share,
            "age_steps": {
                "mean": _mean(rows["age_mean"]),
                "max": int(rows["age_max"].max()) if len(rows) else 0,
            },
            "parity": self.parity(),
        }


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if values.size else None


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
    return {
        "state_bytes": sizes.state_bytes,
        "anchor_bytes": sizes.anchor_bytes,
        "delta_bytes_mean": sizes.delta_bytes_mean,
        "ratio_mean": sizes.ratio_mean,
        "source_bytes": source_bytes[0],
        "source_copies": source_bytes[1] / sizes.delta_bytes if sizes.delta_bytes else None,
        "peer_bytes": peer_bytes,
    }


def step_line(record: StepRecord, version: int | None) -> Mapping[str, object]:
    """Return one line of the metrics file."""
    line = asdict(record)
    line.pop("first_version_rewards")
    line.pop("version_steps")
    metrics = line.pop("metrics")
    return {**line, "version": version, **metrics}
