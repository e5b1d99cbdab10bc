"""Leases for tests of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.messages import Lease, Sampling


def make_lease(
    lease_id: str,
    prompt: Sequence[int],
    samples: int = 4,
    seed: int = 100,
    **changes: Any,  # noqa: ANN401 - whatever fields a lease has
) -> Lease:
    """Return a lease of ``samples`` with seeds from ``seed`` on, with ``changes`` to its fields."""
    plain: dict[str, Any] = {
        "lease_id": lease_id,
        "kind": "train",
        "prompt": from_tokens(list(prompt)),
        "samples": samples,
        "seeds": list(range(seed, seed + samples)),
        "sampling": Sampling(temperature=1.0, top_p=1.0, top_k=0),
        "tokens_max": 12,
        "stop_ids": [2],
        "forced": None,
        "version": 3,
        "deadline_s": 60.0,
        "affinity": None,
    }
    return Lease(**{**plain, **changes})
