"""Plays a story with real processes on real lines: ``echo2-scenario run STORY --live``.

`play_live` starts this module under `namespaces.WRAP`, as the first process of its namespaces; it
builds the machines, plays the story in a `LiveWorld`, and prints the result as one line of JSON.
All that it makes lies in namespaces and in memory, and is gone with it.
"""

from __future__ import annotations

import json
import sys
import time  # noqa: TID251 - real processes keep real time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import trio

from echo2p2p.errors import ConfigError, EchoError
from echo2p2p.net.program import FAILED, OK
from echo2p2p.testing.system import SimEntropy
from scenarios import faults, lies, namespaces, story_report
from scenarios.live_network import LiveNetwork, arrival_s
from scenarios.live_world import LiveWorld, lines_of
from scenarios.nemesis import Nemesis
from scenarios.play import check_promises, told
from scenarios.story import Story
from scenarios.watch import ENDS_WELL
from scenarios.world import COORDINATOR

FOLDER: Final = namespaces.RUN / "story"
UPLINKS_MBIT_MAX: Final = namespaces.TOTAL_MBIT_MAX
LOG_LINES: Final = 5
PEERS_MAX: Final = 40
"""A process each, of 60 MB."""


class Work(msgspec.Struct, frozen=True):
    """What to play."""

    name: str
    story: Any
    """`scenarios.story.Story`, as JSON has it."""
    seed: int


class SinceStart(trio.abc.Clock):
    """A clock that begins at 0, as a story's does."""

    def start_clock(self) -> None:
        """Begin."""
        self._start_s = time.monotonic()

    def current_time(self) -> float:
        """Return seconds."""
        return time.monotonic() - self._start_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return how long it is until then."""
        return deadline - self.current_time()


def check_possible() -> None:
    """Check that this machine can play anything for real.

    Raises:
        EchoError: It has no namespaces, or may not make them.
    """
    why = namespaces.why_impossible() or namespaces.why_no_packets_held()
    if why is not None:
        raise EchoError(why.replace("--virtual", "without --live"))


async def play_live(name: str, story: Story, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Play a story for real; return its result as `Played.result` does, and its trace.

    Raises:
        ConfigError: It is too large for one machine.
        EchoError: This machine has no namespaces, or the test-bed failed.
    """
    check_possible()
    spec = story.draw(SimEntropy(f"story {seed}").rng("world"))
    uplinks_mbit = sum(line.up_mbit for line in lines_of(spec))
    if uplinks_mbit > UPLINKS_MBIT_MAX or len(spec.peers) > PEERS_MAX:
        raise ConfigError(
            name,
            f"{len(spec.peers)} peers with {uplinks_mbit:.0f} Mbit/s are too many for one machine "
            f"({PEERS_MAX} and {UPLINKS_MBIT_MAX:.0f}): play it without --live",
        )
    given = story.model_dump(mode="json", exclude_unset=True)
    work = Work(name, given, seed)
    printed = await namespaces.run_inside("scenarios.live_lab", msgspec.json.encode(work).decode())
    *trace, result = printed.decode().splitlines()
    return json.loads(result), trace


async def play(work: Work) -> dict[str, Any]:
    """Play a story; return its result."""
    story = Story.model_validate(work.story)
    draws = SimEntropy(f"story {work.seed}")
    spec = story.draw(draws.rng("world"))
    rngs = [draws.rng(f"nemesis {fault.fault}") for fault in story.nemesis]
    lines = lines_of(spec)
    machines = namespaces.Machines(lines)
    await machines.build()
    latencies_s = [spec.source_latency_s, *(peer.latency_s for peer in spec.peers)]
    problems: list[str] = []
    async with machines.distant(list(map(arrival_s, latencies_s))) as distance:
        names = (COORDINATOR, *(peer.name for peer in spec.peers))
        network = LiveNetwork(names, lines, distance)
        for peer in spec.peers:
            if peer.loss:
                network.set_quality(peer.name, latency_s=peer.latency_s, loss=peer.loss)
        world = LiveWorld(
            spec, seed=work.seed, folder=FOLDER, network=network, tls=not relays_lie(story)
        )
        try:
            await world.run(Nemesis(story, rngs).run)
            check_promises(world, story)
        except (EchoError, BaseExceptionGroup) as error:
            problems.append(f"{ENDS_WELL}: {told(error)}")
        figures = {**story_report.figures(world), "load": world.load()}
    for line in world.trace_lines():
        print(line)
    problems[:0] = world.breaches
    if problems:
        _show_logs()
    return {
        "story": work.name,
        "seed": work.seed,
        "held": not problems,
        "problems": problems,
        "replay": f"echo2-scenario run {work.name} --seed {work.seed} --live",
        "trace": "",
        **figures,
    }


def _show_logs() -> None:
    """Print how each process's log ends; they are gone with this process."""
    for path in sorted(FOLDER.glob("*.log")):
        for line in path.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:]:
            print(f"{path.stem}: {line}", file=sys.stderr)


def relays_lie(story: Story) -> bool:
    """Return whether frames must be twisted, for which links have to be without TLS."""
    told_of = [fault for fault in story.nemesis if isinstance(fault, faults.Lie)]
    return any(set(fault.lies) & set(lies.RELAY_LIES) for fault in told_of)


def main(words: Sequence[str]) -> int:
    """Play what the command line says, inside; returns the exit code."""
    namespaces.end_with_parent()
    work = msgspec.json.decode(words[0], type=Work)
    try:
        result = trio.run(play, work, clock=SinceStart())
    except EchoError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    print(json.dumps(result), flush=True)
    return OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
