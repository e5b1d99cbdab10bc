"""What goes wrong in the middle of a broadcast on namespaces, and who suffers it.

A fault begins when `BEGINS` of the least possible time has passed. It hits a fifth of the peers (at
least one, the last ones), or one peer, or the source. The time that counts is that of the peers
which were not hit; those that can still get the payload must get it too, in their own time.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from scenarios import lies, namespaces
from scenarios.broadcast_links import Line

BEGINS: Final = 0.4
HIT_SHARE: Final = 0.2
SLOWED_BY: Final = 20.0
FLAP_EVERY_S: Final = 4.0
FLAP_FOR_S: Final = 0.3
PARTITION: Final = 0.5
"""Of the least possible time."""
LIE: Final = "lie:"


class Processes(Protocol):
    """What a fault can do to the processes of a benchmark; 0 is the source's."""

    def kill(self, index: int, number: signal.Signals) -> None:
        """Send one a signal."""
        ...

    async def replace(self, index: int) -> None:
        """Kill one and start another in its place, which joins in."""
        ...


@dataclass(frozen=True)
class Scene:
    """Where a fault plays."""

    processes: Processes
    net: namespaces.Machines
    lines: list[Line]
    hit: tuple[int, ...]
    bound_s: float


Play = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """One kind of bad luck."""

    play: Play
    hits: Callable[[int], tuple[int, ...]]
    """Machines that are hit, of so many peers."""
    recovers: bool = False
    """Whether those that are hit must get the payload in the end."""


def _some(peers: int) -> tuple[int, ...]:
    count = max(1, round(HIT_SHARE * peers))
    return tuple(range(peers + 1 - count, peers + 1))


def _last(peers: int) -> tuple[int, ...]:
    return (peers,)


def _half(peers: int) -> tuple[int, ...]:
    return tuple(range(peers // 2 + 1, peers + 1))


def _nobody(_: int) -> tuple[int, ...]:
    return ()


async def _kill(scene: Scene) -> None:
    for index in scene.hit:
        scene.processes.kill(index, signal.SIGKILL)
    await trio.lowlevel.checkpoint()


async def _freeze(scene: Scene) -> None:
    for index in scene.hit:
        scene.processes.kill(index, signal.SIGSTOP)
    await trio.lowlevel.checkpoint()


async def _cut(scene: Scene) -> None:
    for index in scene.hit:
        await scene.net.cut(index)


async def _partition(scene: Scene) -> None:
    for index in scene.hit:
        await scene.net.cut(index, aside=True)
    await trio.sleep(PARTITION * scene.bound_s)
    for index in scene.hit:
        await scene.net.heal(index)


async def _throttle(scene: Scene) -> None:
    for index in scene.hit:
        line = scene.lines[index]
        slow = Line(line.up_mbit / SLOWED_BY, line.down_mbit / SLOWED_BY)
        await scene.net.reshape(index, slow)


async def _recover(scene: Scene) -> None:
    await _throttle(scene)
    await trio.sleep(scene.bound_s / 4)
    for index in scene.hit:
        await scene.net.heal(index)


async def _flap(scene: Scene) -> None:
    while True:
        for index in scene.hit:
            await scene.net.reset_connections(index, for_s=FLAP_FOR_S)
        await trio.sleep(FLAP_EVERY_S - FLAP_FOR_S)


async def _source_restart(scene: Scene) -> None:
    await scene.processes.replace(0)


async def _nothing(_: Scene) -> None:
    await trio.lowlevel.checkpoint()


FAULTS: Final[dict[str, Fault]] = {
    "kill": Fault(_kill, _some),
    "cut": Fault(_cut, _some),
    "freeze": Fault(_freeze, _some),
    "throttle": Fault(_throttle, _last),
    "recover": Fault(_recover, _last, recovers=True),
    "flap": Fault(_flap, _last, recovers=True),
    "partition": Fault(_partition, _half, recovers=True),
    "source-restart": Fault(_source_restart, _nobody, recovers=True),
    **{LIE + lie: Fault(_nothing, _some) for lie in lies.RELAY_LIES},
}
"""By the name on the command line. Liars lie from the start, on links without TLS: the twisting
happens between the relay and its stream."""


def lie_of(fault: str) -> str:
    """Return what those that are hit lie about; empty: nothing."""
    return fault.removeprefix(LIE) if fault.startswith(LIE) else ""
