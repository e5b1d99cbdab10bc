"""The lines of a broadcast benchmark, and the least time that any system can need on them.

The bound is the fluid one (Kumar and Ross 2006; DESIGN.md §5): a payload of F bytes takes at least
F over the source's uplink, F over the slowest downlink, and N F over all uplinks together. Peers
that nobody can dial get nothing from each other, so that all their copies must come through the
uplinks of the source and of the others. A link counts with `GOODPUT` of its nominal rate: what
TCP leaves of full Ethernet frames (1448 of 1514 bytes).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from echo2p2p.broadcast.overlay import Member, plan_overlay, plan_source_links
from echo2p2p.ids import SOURCE, PeerId

GOODPUT: Final = 0.956
RATE_MBIT: Final = 20.0
MIXED_UP_MBIT: Final = (10.0, 20.0, 40.0)
MIXED_DOWN_MBIT: Final = 40.0
BYTES_PER_MBIT: Final = 125_000.0
SATELLITE_UP_MBIT: Final = 1.0
SATELLITE_DOWN_MBIT: Final = 5.0
SATELLITE_RTT_MS: Final = 600.0
SATELLITE_LOSS: Final = 0.02
KINDS: Final = ("homogeneous", "mixed", "nat", "satellite")


@dataclass(frozen=True)
class Line:
    """One machine's line, at nominal rates."""

    up_mbit: float
    down_mbit: float
    reachable: bool = True
    """Whether others can dial it."""
    rtt_ms: float = 0.0
    """Round trip to the middle of the network."""
    loss: float = 0.0
    """Share of packets."""

    @property
    def up_bytes_per_s(self) -> float:
        """Payload that it can send."""
        return GOODPUT * self.up_mbit * BYTES_PER_MBIT

    @property
    def down_bytes_per_s(self) -> float:
        """Payload that it can take."""
        return GOODPUT * self.down_mbit * BYTES_PER_MBIT


@dataclass(frozen=True)
class Bound:
    """Seconds that a broadcast needs at least."""

    fluid_s: float
    """If everybody could send to everybody."""
    cut_s: float
    """Of the peers that nobody can dial; 0 if there are none."""

    @property
    def seconds(self) -> float:
        """The larger."""
        return max(self.fluid_s, self.cut_s)


def plan_lines(kind: str, peers: int, mbit: float = RATE_MBIT) -> list[Line]:
    """Return the source's line and the peers', in order; ``mbit`` stands for each 20 below.

    ``homogeneous``: 20 Mbit/s each way. ``mixed``: the source has 20 up, the peers 10, 20, 40 in
    turn, all 40 down. ``nat``: as homogeneous, and every second peer cannot be dialled.
    ``satellite``: as homogeneous, but all peers have 1 up and 5 down, 600 ms away, losing 2 %.
    """
    assert kind in KINDS, kind
    if kind == "mixed":
        each = mbit / RATE_MBIT
        ups = [each * MIXED_UP_MBIT[place % len(MIXED_UP_MBIT)] for place in range(peers)]
        return [Line(up, each * MIXED_DOWN_MBIT) for up in (mbit, *ups)]
    if kind == "satellite":
        far = Line(
            SATELLITE_UP_MBIT, SATELLITE_DOWN_MBIT, rtt_ms=SATELLITE_RTT_MS, loss=SATELLITE_LOSS
        )
        return [Line(mbit, mbit), *[far] * peers]
    hidden = kind == "nat"
    rest = [Line(mbit, mbit, not (hidden and place % 2)) for place in range(peers)]
    return [Line(mbit, mbit), *rest]


def bound_of(payload_bytes: int, lines: Sequence[Line]) -> Bound:
    """Return the least time for ``lines``, the source's first."""
    source, *peers = lines
    ups = source.up_bytes_per_s + sum(line.up_bytes_per_s for line in peers)
    fluid_s = max(
        payload_bytes / source.up_bytes_per_s,
        payload_bytes / min(line.down_bytes_per_s for line in peers),
        len(peers) * payload_bytes / ups,
    )
    hidden = [line for line in peers if not line.reachable]
    open_ups = ups - sum(line.up_bytes_per_s for line in hidden)
    return Bound(fluid_s, len(hidden) * payload_bytes / open_ups)


def plan_neighbours(
    ids: Sequence[PeerId], lines: Sequence[Line], seed: int
) -> dict[PeerId, tuple[PeerId, ...]]:
    """Return whom each peer is linked to, and the source, as a coordinator plans it."""
    members = [
        Member(peer_id, line.up_bytes_per_s, line.reachable)
        for peer_id, line in zip(ids, lines[1:], strict=True)
    ]
    overlay = plan_overlay(members, rng=random.Random(seed))  # noqa: S311 - to be repeatable
    return {**overlay, SOURCE: tuple(sorted(plan_source_links(members)))}
