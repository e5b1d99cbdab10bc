"""What can go wrong in the virtual world: the faults that a story may name, and their parameters.

A fault is data: when it strikes, whom, for how long, how hard. What it does is in
`scenarios.nemesis`. Every fault ends when its time is over or when the world heals, whichever is
sooner, except a departure, which is for good, and a lie, after which nobody believes that machine
any more (it is told no longer, but the checkers go on counting its machine as dishonest).
"""

from __future__ import annotations

import random
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from peer.config import Section, parse_bytes
from scenarios.false_uploads import UPLOAD_LIES
from scenarios.lies import RELAY_LIES


def as_range(value: object) -> object:
    """Let one number stand for a range of that number only, and amounts have units.

    Raises:
        ValueError: Not one or two numbers.
    """
    ends = value if isinstance(value, list | tuple) else (value, value)
    if len(ends) != 2:
        raise ValueError("write one number, or [lowest, highest]")
    low, high = (parse_bytes(end) for end in ends)
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        raise ValueError(f"[{low:g}, {high:g}] is upside down")
    return low, high


NotNegative = Annotated[float, Field(ge=0)]
Range = Annotated[tuple[NotNegative, NotNegative], BeforeValidator(as_range)]
"""A number, or [lowest, highest] from which the seed draws."""
Share = Annotated[float, Field(ge=0, le=1)]
ShareRange = Annotated[tuple[Share, Share], BeforeValidator(as_range)]


def drawn(ends: tuple[float, float], rng: random.Random) -> float:
    """Return a value of a range, all alike."""
    return ends[0] + (ends[1] - ends[0]) * rng.random()


class Fault(Section):
    """When, whom, how long. Exactly one of `at_s`, `every_s` and `per_minute`."""

    at_s: Range | None = None
    """Once, at this moment."""
    every_s: Range | None = None
    """Again and again, with pauses of this length."""
    per_minute: Annotated[float, Field(gt=0)] | None = None
    """At random, so often a minute, for each target by itself (a Poisson process in steps of a
    second)."""
    for_s: Range | None = None
    """How long; default: until the world heals."""

    @model_validator(mode="after")
    def _one_timing(self) -> Self:
        given = [self.at_s, self.every_s, self.per_minute]
        if sum(timing is not None for timing in given) != 1:
            raise ValueError("give exactly one of at_s, every_s and per_minute")
        return self


class PeerFault(Fault):
    """One that strikes peers."""

    on: str = "all"
    """A group of peers by its name, or ``all``."""
    count: Annotated[int, Field(gt=0)] | None = None
    """How many at once, drawn among those that are well; default: one."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Or this share of the group."""

    @model_validator(mode="after")
    def _one_number(self) -> Self:
        if self.count is not None and self.share is not None:
            raise ValueError("give count or share, not both")
        if self.per_minute is not None and (self.count or self.share):
            raise ValueError("per_minute is for each peer by itself: leave count and share out")
        return self


class Crash(PeerFault):
    """Kill -9 and power cut: what was not synced is lost. The peer is started again afterwards."""

    fault: Literal["crash"]
    with_disk: bool = True
    """False: it comes back with an empty disk and another identity."""


class Depart(PeerFault):
    """The machine is switched off for good."""

    fault: Literal["depart"]


class Arrive(PeerFault):
    """Machines that were off (``joins_s = "later"``) are switched on, within `within_s`."""

    fault: Literal["arrive"]
    within_s: NotNegative = 1.0


class Freeze(PeerFault):
    """The process stops (SIGSTOP): it neither hears nor speaks nor computes, but does not die.

    Its timers do not expire either, but all at once when it goes on.
    """

    fault: Literal["freeze"]


class SlowCpu(PeerFault):
    """Its engine takes so many times as long."""

    fault: Literal["slow-cpu"]
    factor: Range = (5.0, 5.0)


class SlowLink(PeerFault):
    """Its line keeps this share of its rates; a small one is a collapse of bandwidth."""

    fault: Literal["slow-link"]
    up: ShareRange = (0.1, 0.1)
    down: ShareRange = (0.1, 0.1)


class LossyLink(PeerFault):
    """Its line loses this share of its packets."""

    fault: Literal["lossy-link"]
    loss: Annotated[tuple[float, float], BeforeValidator(as_range)] = (0.05, 0.05)

    @model_validator(mode="after")
    def _bearable(self) -> Self:
        if not 0 <= self.loss[0] <= self.loss[1] <= 0.4:
            raise ValueError("loss must lie between 0 and 0.4")
        return self


class DistantLink(PeerFault):
    """Its line becomes so long, one way."""

    fault: Literal["distant-link"]
    latency_ms: Range = (300.0, 300.0)


class Flap(PeerFault):
    """Its line is cut and mended again and again."""

    fault: Literal["flap"]
    up_s: Range = (2.0, 5.0)
    down_s: Range = (0.5, 3.0)


class Isolate(PeerFault):
    """Nothing passes between it and anybody: silently, both ways or one way only."""

    fault: Literal["isolate"]
    way: Literal["both", "in", "out"] = "both"


class Lie(PeerFault):
    """It breaks the protocol, in these ways at once."""

    fault: Literal["lie"]
    lies: list[Literal[*RELAY_LIES, *UPLOAD_LIES]] = Field(min_length=1)  # type: ignore[valid-type]
    """Or ``pick`` of them, drawn for each liar."""
    pick: Annotated[int, Field(gt=0)] | None = None


class WrongClock(PeerFault):
    """Its clock is ahead, or behind if negative."""

    fault: Literal["wrong-clock"]
    ahead_s: float = 3600.0


class FullDisk(PeerFault):
    """Its disk takes no more."""

    fault: Literal["full-disk"]


class EngineCrash(PeerFault):
    """Its engine dies."""

    fault: Literal["engine-crash"]


class EngineHang(PeerFault):
    """Its engine's next batch never ends."""

    fault: Literal["engine-hang"]


class WrongWeights(PeerFault):
    """Its engine's next load has a wrong bit."""

    fault: Literal["wrong-weights"]


class Partition(Fault):
    """Some peers see each other, but neither the coordinator nor the other peers."""

    fault: Literal["partition"]
    share: Annotated[float, Field(gt=0, le=1)] = 0.5


class CoordinatorCrash(Fault):
    """Kill -9 of coordinator and learner; started again on the same disk."""

    fault: Literal["coordinator-crash"]


class CoordinatorDiskFull(Fault):
    """Its disk takes no more, so it ends; started again when there is room."""

    fault: Literal["coordinator-disk-full"]


class CoordinatorSlowLink(Fault):
    """Its uplink keeps this share of its rate."""

    fault: Literal["coordinator-slow-link"]
    up: ShareRange = (0.1, 0.1)


class LearnerCrash(Fault):
    """The learner dies; the coordinator starts another from the newest checkpoint."""

    fault: Literal["learner-crash"]


AnyFault = Annotated[
    Crash
    | Depart
    | Arrive
    | Freeze
    | SlowCpu
    | SlowLink
    | LossyLink
    | DistantLink
    | Flap
    | Isolate
    | Lie
    | WrongClock
    | FullDisk
    | EngineCrash
    | EngineHang
    | WrongWeights
    | Partition
    | CoordinatorCrash
    | CoordinatorDiskFull
    | CoordinatorSlowLink
    | LearnerCrash,
    Field(discriminator="fault"),
]
