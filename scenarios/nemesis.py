"""Does the harm that a story orders, then heals, then waits for the world to converge.

Each fault has its own stream of randomness, so that adding one does not move the others. A machine
suffers one fault at a time: what strikes is drawn among those that are well. Healing ends whatever
lasts; from then on only the checkers are at work.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from scenarios import faults
from scenarios.faults import Fault, PeerFault, drawn
from scenarios.machines import Machine
from scenarios.story import Story
from scenarios.watch import CONVERGES
from scenarios.world import COORDINATOR, World

TICK_S: Final = 1.0
"""Of Poisson processes."""

Hold = Callable[[], Awaitable[None]]
"""Waits until this strike of a fault is over."""


class Nemesis:
    """What a story does to one world.

    Args:
        story: Whose faults and healing.
        rngs: One for each fault.
    """

    def __init__(self, story: Story, rngs: Sequence[random.Random]) -> None:
        assert len(rngs) == len(story.nemesis)
        self._story = story
        self._rngs = rngs
        self._healed = trio.Event()

    async def run(self, world: World) -> None:
        """Harm, heal, and see the world converge."""
        async with trio.open_nursery() as strikes:
            for fault, rng in zip(self._story.nemesis, self._rngs, strict=True):
                strikes.start_soon(self._schedule, world, fault, rng, strikes)
            await trio.sleep_until(self._story.world.healed_s)
            self._healed.set()
        world.journal.event("nemesis.healed")
        await self._see_converge(world)

    async def _schedule(
        self, world: World, fault: Fault, rng: random.Random, strikes: trio.Nursery
    ) -> None:
        """Strike in time, until all is healed."""
        with trio.CancelScope() as scope:
            strikes.start_soon(_cancel_when, self._healed, scope)
            if fault.at_s is not None:
                await trio.sleep_until(drawn(fault.at_s, rng))
                self._strike(world, fault, rng, strikes)
            while fault.every_s is not None:
                await trio.sleep(drawn(fault.every_s, rng))
                self._strike(world, fault, rng, strikes)
            while fault.per_minute is not None:
                await trio.sleep(TICK_S)
                chance = fault.per_minute * TICK_S / 60
                for machine in self._victims(world, fault):
                    if rng.random() < chance:
                        self._begin(world, fault, machine, rng, strikes)

    def _strike(
        self, world: World, fault: Fault, rng: random.Random, strikes: trio.Nursery
    ) -> None:
        if not isinstance(fault, PeerFault):
            self._begin(world, fault, None, rng, strikes)
            return
        victims = self._victims(world, fault)
        wanted = fault.count or 1
        if fault.share is not None:
            wanted = round(fault.share * len(self._group(world, fault)))
        for machine in rng.sample(victims, min(wanted, len(victims))):
            self._begin(world, fault, machine, rng, strikes)

    def _group(self, world: World, fault: PeerFault) -> list[Machine]:
        return [
            machine
            for name, machine in world.machines.items()
            if fault.on in {"all", name.rpartition("-")[0]}
        ]

    def _victims(self, world: World, fault: Fault) -> list[Machine]:
        if not isinstance(fault, PeerFault):
            return []
        group = self._group(world, fault)
        if isinstance(fault, faults.Arrive):
            return [m for m in group if m.spec.joins_s is None and not m.lives and not m.faults]
        return [machine for machine in group if machine.running and not machine.faults]

    def _begin(
        self,
        world: World,
        fault: Fault,
        machine: Machine | None,
        rng: random.Random,
        strikes: trio.Nursery,
    ) -> None:
        if self._healed.is_set():
            return
        for_s = None if fault.for_s is None else drawn(fault.for_s, rng)

        async def hold() -> None:
            with trio.move_on_after(math.inf if for_s is None else for_s):
                await self._healed.wait()

        if machine is None:
            strikes.start_soon(_strike_world, world, fault, rng, hold)
        else:
            machine.harm_begins()
            strikes.start_soon(_strike_peer, world, fault, machine, rng, hold)

    # --- afterwards ---------------------------------------------------------------------------

    async def _see_converge(self, world: World) -> None:
        """Wait until every live peer is as new as the newest version is when we begin."""
        target = -1
        with trio.move_on_after(self._story.checks.converge_s) as scope:
            while not world.is_open or world.watch.newest is None:
                await world.journal.happened.park()
            target = world.watch.newest
            while _behind(world, target):
                await world.journal.happened.park()
            world.watch.converged_s = trio.current_time()
            world.journal.event("nemesis.converged", version=target)
            return
        if scope.cancelled_caught:
            late = _behind(world, target)
            detail = f"version {target} is not at {', '.join(late[:5])} ({len(late)} in all)"
            world.watch.breach(CONVERGES, detail if target >= 0 else "no coordinator answers")


def _behind(world: World, target: int) -> list[str]:
    """Return the honest machines that should hold a version and do not."""
    return [
        name
        for name, machine in world.machines.items()
        if machine.honest
        and (machine.running or machine.expected)
        and world.watch.proved.get(name, -1) < target
    ]


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _name(fault: Fault) -> str:
    return str(fault.fault)  # type: ignore[attr-defined]  # each kind has it


# --- what each fault does -------------------------------------------------------------------------


async def _strike_peer(
    world: World, fault: Fault, machine: Machine, rng: random.Random, hold: Hold
) -> None:
    """Do one fault to one machine, whose harm has begun, and undo it."""
    name = machine.spec.name
    world.journal.event("nemesis.strikes", node=name, fault=_name(fault))
    async with _harm(world, machine):
        match fault:
            case faults.Crash(with_disk=with_disk):
                world.crash_peer(name)
                await hold()
                world.restart_peer(name, with_disk=with_disk)
            case faults.Depart():
                machine.expected = False
                world.crash_peer(name)
            case faults.Arrive(within_s=within_s):
                machine.expected = True
                await trio.sleep(within_s * rng.random())
                world.start_peer(name)
            case faults.Freeze():
                world.freeze_peer(name)
                try:
                    await hold()
                finally:  # else it could not even be cancelled
                    world.thaw_peer(name)
            case faults.SlowCpu(factor=factor):
                machine.pace.factor = drawn(factor, rng)
                await hold()
                machine.pace.factor = 1.0
            case faults.Lie(lies=lies, pick=pick):
                machine.honest = False
                told = lies if pick is None else rng.sample(lies, min(pick, len(lies)))
                world.journal.event("nemesis.lies", node=name, lies=sorted(told))
                machine.lies.told |= set(told)
                await hold()
                machine.lies.told.clear()
            case faults.WrongClock(ahead_s=ahead_s):
                machine.clock.skew_s += ahead_s
                await hold()
                machine.clock.skew_s -= ahead_s
            case faults.FullDisk():
                machine.disk.full = True
                await hold()
                machine.disk.full = False
            case faults.EngineCrash() | faults.EngineHang() | faults.WrongWeights():
                _break_engine(fault, machine)
                await hold()
            case _:
                await _strike_line(world, fault, machine, rng, hold)


@asynccontextmanager
async def _harm(world: World, machine: Machine) -> AsyncIterator[None]:
    try:
        yield
    finally:
        machine.harm_ends()
        world.journal.event("nemesis.ends", node=machine.spec.name)


def _break_engine(fault: Fault, machine: Machine) -> None:
    engine = machine.engine
    if engine is None:
        return
    match fault:
        case faults.EngineCrash():
            engine.kill()
        case faults.EngineHang():
            engine.hang()
        case _:
            engine.spoil()


async def _strike_line(
    world: World, fault: Fault, machine: Machine, rng: random.Random, hold: Hold
) -> None:
    """Do one fault to a machine's line."""
    spec, network, name = machine.spec, world.network, machine.spec.name
    match fault:
        case faults.SlowLink(up=up, down=down):
            network.set_rates(
                name,
                up_bytes_per_s=spec.up_bytes_per_s * drawn(up, rng),
                down_bytes_per_s=spec.down_bytes_per_s * drawn(down, rng),
            )
            await hold()
            network.set_rates(
                name,
                up_bytes_per_s=spec.up_bytes_per_s,
                down_bytes_per_s=spec.down_bytes_per_s,
            )
        case faults.LossyLink(loss=loss):
            network.set_quality(name, latency_s=spec.latency_s, loss=drawn(loss, rng))
            await hold()
            network.set_quality(name, latency_s=spec.latency_s, loss=spec.loss)
        case faults.DistantLink(latency_ms=latency_ms):
            network.set_quality(name, latency_s=drawn(latency_ms, rng) / 1000, loss=spec.loss)
            await hold()
            network.set_quality(name, latency_s=spec.latency_s, loss=spec.loss)
        case faults.Flap(up_s=up_s, down_s=down_s):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_flap, world, name, up_s, down_s, rng)
                    await hold()
                    scope.cancel()
        case faults.Isolate(way=way):
            others = [other for other in (COORDINATOR, *world.machines) if other != name]
            pairs = [(other, name) for other in others if way in {"both", "in"}]
            pairs += [(name, other) for other in others if way in {"both", "out"}]
            await _cut(world, pairs, hold)
        case _:
            raise AssertionError(fault)


async def _flap(
    world: World,
    name: str,
    up_s: tuple[float, float],
    down_s: tuple[float, float],
    rng: random.Random,
) -> None:
    while True:
        world.network.freeze(name)
        try:
            await trio.sleep(drawn(down_s, rng))
        finally:
            world.network.thaw(name)
        await trio.sleep(drawn(up_s, rng))


async def _cut(world: World, pairs: list[tuple[str, str]], hold: Hold) -> None:
    for sender, receiver in pairs:
        world.network.cut(sender, receiver)
    await hold()
    for sender, receiver in pairs:
        world.network.heal(sender, receiver)


async def _strike_world(world: World, fault: Fault, rng: random.Random, hold: Hold) -> None:
    """Do one fault to the coordinator's side, or to many machines at once, and undo it."""
    world.journal.event("nemesis.strikes", node=COORDINATOR, fault=_name(fault))
    match fault:
        case faults.Partition(share=share):
            names = list(world.machines)
            apart = set(rng.sample(names, round(share * len(names))))
            rest = [name for name in (COORDINATOR, *names) if name not in apart]
            pairs = [(one, other) for one in names if one in apart for other in rest]
            world.journal.event("nemesis.partition", nodes=sorted(apart))
            victims = [world.machines[name] for name in names]
            for machine in victims:
                machine.harm_begins()
            await _cut(world, [*pairs, *((other, one) for one, other in pairs)], hold)
            for machine in victims:
                machine.harm_ends()
        case faults.CoordinatorSlowLink(up=up):
            share = drawn(up, rng)
            world.squeeze_coordinator(share)
            await hold()
            world.widen_coordinator(share)
        case faults.LearnerCrash():
            if world.learner is not None:
                world.learner.kill()
        case faults.CoordinatorCrash() | faults.CoordinatorDiskFull():
            if not world.is_open:
                return
            full = isinstance(fault, faults.CoordinatorDiskFull)
            if full:
                world.fill_disk()
            else:
                world.crash_coordinator()
            await hold()
            world.restart_coordinator(room=full)
        case _:
            raise AssertionError(fault)
