"""Plays a story with a seed in virtual time, and says what came out.

Everything is drawn from the seed, by purpose: the machines, the nemesis's choices, the run itself.
The result is plain data; the same seed gives the same result, byte for byte.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import trio

from echo2p2p.errors import EchoError
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.system import SimEntropy
from scenarios import story_report
from scenarios.costs import Costs
from scenarios.nemesis import Nemesis
from scenarios.story import Story
from scenarios.watch import ENDS_WELL, NO_IDLING, STATED_RATE, idle_share
from scenarios.world import World

TICK_S: Final = 1 / 1024
"""How late a timer may be. In a large world much is due in each such moment; seen to one by one, it
would cost twice as much."""
COLLECT: Final = (200_000, 20, 100)
"""Thresholds of the garbage collector."""


@dataclass(frozen=True)
class Played:
    """One story that was played.

    Attributes:
        world: As it was left.
        problems: What the checkers found, and what ended it.
        until_s: Where it was cut off; ``None``: it was played to its end.
    """

    name: str
    seed: int
    world: World
    problems: list[str]
    until_s: float | None

    @property
    def held(self) -> bool:
        """Whether every checker held."""
        return not self.problems

    def result(self) -> dict[str, Any]:
        """Return everything worth telling as plain data."""
        return {
            "story": self.name,
            "seed": self.seed,
            "held": self.held,
            "problems": self.problems,
            "replay": f"echo2-scenario run {self.name} --seed {self.seed}",
            "trace": self.world.trace.digest().hex(),
            **story_report.figures(self.world),
        }


def play(
    name: str,
    story: Story,
    seed: int,
    *,
    until_s: float | None = None,
    costs: Costs | None = None,
) -> Played:
    """Play a story to its end, or until a moment, after which nothing is checked any more.

    With ``costs`` work takes time, as it does with real processes.
    """
    worlds: list[World] = []

    async def main() -> None:
        draws = SimEntropy(f"story {seed}")
        world = World(replace(story.draw(draws.rng("world")), costs=costs), seed=seed)
        worlds.append(world)
        rngs = [draws.rng(f"nemesis {fault.fault}") for fault in story.nemesis]
        with trio.move_on_at(float("inf") if until_s is None else until_s) as scope:
            await world.run(Nemesis(story, rngs).run)
        if not scope.cancelled_caught:
            check_promises(world, story)

    problem: list[str] = []
    try:
        with _rare_collections():
            run_virtual(main, seed=seed, tick_s=0.0 if costs else TICK_S)
    except (EchoError, BaseExceptionGroup) as error:
        problem.append(f"{ENDS_WELL}: {told(error)}")
    world = worlds[0]
    if until_s is not None:  # what is shielded ends after it
        entries = world.trace.entries
        entries[:] = [entry for entry in entries if entry.at_s <= until_s]
    more = [f"and {world.watch.breaches_more} more"] if world.watch.breaches_more else []
    return Played(name, seed, world, [*world.breaches, *more, *problem], until_s)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the collector of cycles run less often: of what a world keeps nearly nothing is garbage.

    With Python's own thresholds it takes a third of the time of a large world.
    """
    before = gc.get_threshold()
    gc.set_threshold(*COLLECT)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def told(error: BaseException) -> str:
    """Return the first error inside a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def check_promises(world: World, story: Story) -> None:
    """Compare with what this story promises beyond what always holds."""
    checks, summary = story.checks, world.summary
    if summary is None:
        return
    share = idle_share(summary)
    if share > checks.idle_share_max:
        detail = f"it idled {share:.3f} of the time, at most {checks.idle_share_max:g}"
        world.watch.breach(NO_IDLING, detail)
    steps = summary["steps"]
    if steps < checks.steps_min:
        world.watch.breach(STATED_RATE, f"{steps} steps, at least {checks.steps_min}")
    began = world.watch.converged_s
    if began is None:
        return
    done = [entry.at_s for entry in world.trace.named("step.done") if entry.at_s >= began]
    rate = len(done) / (story.world.stop_s - began)
    if rate < checks.steps_per_s_min:
        detail = f"{rate:.3f} steps a second after healing, at least {checks.steps_per_s_min:g}"
        world.watch.breach(STATED_RATE, detail)
