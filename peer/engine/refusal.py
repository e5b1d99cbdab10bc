"""Leases that a model cannot answer, told before any work is done."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echo2p2p.wire.arrays import to_tokens
from echo2p2p.wire.messages import Lease


def refusal_of(lease: Lease, prompt: NDArray[np.uint32], positions: int, vocabulary: int) -> str:
    """Return why the lease cannot be answered, empty if it can.

    Args:
        lease: As asked.
        prompt: Its prompt, ``[n] uint32``.
        positions: Tokens that the engine takes in all, prompt and answer.
        vocabulary: Token ids are below this.
    """
    forced = None if lease.forced is None else to_tokens(lease.forced)
    answer = lease.tokens_max if forced is None else int(forced.size)
    if lease.samples != len(lease.seeds) or answer < 1:
        return "asks for nothing"
    if lease.sampling.temperature <= 0 or lease.sampling.top_p <= 0:
        return f"has temperature {lease.sampling.temperature}, top-p {lease.sampling.top_p}"
    if prompt.size == 0 or prompt.size + answer > positions:
        return (
            f"has a prompt of {prompt.size} tokens and wants {answer} more; "
            f"the model takes {positions} in all"
        )
    if max(prompt.max(), 0 if forced is None else forced.max()) >= vocabulary:
        return f"has tokens beyond the vocabulary of {vocabulary}"
    return ""
