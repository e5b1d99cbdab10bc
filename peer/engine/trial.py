"""A short batch in an engine's start: what it can do a second, and whether it can do anything.

With weights of no meaning, but a token costs the same with any. The first batch brings up what is
compiled or allocated when it is first needed, so that the first real one is not taken for a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from echo2p2p.ids import Version
from echo2p2p.net.child_worker import Stopwatch
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.messages import Lease, Sampling
from peer.engine.base import Generated

SEQUENCES: Final = 8
TOKENS: Final = 16
VERSION: Final = Version(0)
"""Of the weights of no meaning, while the trial lasts."""


def measure_tokens_per_s(generate: Callable[[Sequence[Lease]], list[Generated]]) -> float:
    """Return how many tokens a second an engine makes of a small batch; the first is not timed."""
    lease = Lease(
        lease_id="trial",
        kind="eval",
        prompt=from_tokens([0]),
        samples=SEQUENCES,
        seeds=list(range(SEQUENCES)),
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0),
        tokens_max=TOKENS,
        stop_ids=[],
        forced=None,
        version=VERSION,
        deadline_s=0.0,
        affinity=None,
    )
    generate([lease])
    watch = Stopwatch()
    [answer] = generate([lease])
    tokens = sum(sample.tokens.length for sample in answer.samples)
    return tokens / max(1e-6, watch.seconds())
