"""``echo2-scenario bench costs``: what work costs on this machine, in CPU time.

These are the figures of `scenarios.costs`, by which the virtual world charges for work where it is
compared with real processes. CPU time says the same on a busy machine, more or less. Work that is
offloaded is timed while two short runs are played in virtual time, one with a model of 0.1 MB and
one of 2.1 MB, of which a tenth changes in each step; a line through both gives the cost of a
megabyte. The same two are then played by real processes for what the rest costs
(`scenarios.live_costs`).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time  # noqa: TID251 - a benchmark reads CPU clocks
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
import trio

from coordinator.learner.base import LearnerSetup, TrainBatch
from echo2p2p.ids import Step
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.system import ThreadOffload
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.net.tls_streams import TlsStreams
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.relays import RunKeys
from echo2p2p.testing.system import SimEntropy
from scenarios import bench_report, live_costs
from scenarios.costs import MEASURED, Cores, Costs, PerMb, name_of
from scenarios.fake_learner import PARAMETERS, FakeLearner
from scenarios.machines import WorldSpec
from scenarios.story import load_story
from scenarios.world import World

T = TypeVar("T")
STORY: Final = "live/steady"
BALLASTS: Final = (0, 1_000_000)
STARTS: Final = 3
HANDSHAKES: Final = 30
JOBS: Final = 500
STEPS: Final = 10
STOP_S: Final = 40.0
LIVE_S: Final = 20.0
SEED: Final = 7
STEP: Final = "a learner's step"
HERE: Final = Endpoint("127.0.0.1", 0)

_Cost: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class _TimedCores(Cores):
    """Free cores that take down what each piece of work needs."""

    def __init__(self) -> None:
        super().__init__(None, 0.0)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    async def run(self, work: Callable[[], T]) -> T:
        """See `Offload`."""

        def timed() -> T:
            began_s = time.thread_time()
            result = work()
            self.seconds[name_of(work)].append(time.thread_time() - began_s)
            return result

        return await super().run(timed)


table = bench_report.table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands: there is nothing to choose."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure, as the command does."""
    del arguments
    return await measure()


async def measure() -> dict[str, object]:
    """Return what work costs, in a form that a file can hold; takes a minute or two."""
    works = [await trio.to_thread.run_sync(_work, ballast) for ballast in BALLASTS]
    few, many = [
        await live_costs.measure(_spec(ballast), step_s=work[STEP], seconds=LIVE_S)
        for ballast, work in zip(BALLASTS, works, strict=True)
    ]
    each = live_costs.solve(few, many)
    return {
        "start_ms": round(1000 * await trio.to_thread.run_sync(_start_s), 3),
        "exchange_ms": round(1000 * each.exchange_s, 3),
        "piece_ms": round(1000 * each.piece_s, 3),
        "handshake_ms": round(1000 * await _handshake_s(), 3),
        "job_ms": round(1000 * await _job_s(), 3),
        "work": _lines(*works),
        "held": True,
        "machine": bench_report.machine(),
        "versions": bench_report.versions(),
    }


class _PerMb(msgspec.Struct):
    """Of one kind of work, as `measure` says it."""

    ms: _Cost
    ms_per_mb: _Cost


class _Machine(msgspec.Struct):
    """Where it was measured."""

    cores: Annotated[int, msgspec.Meta(ge=1)]


class _Measured(msgspec.Struct):
    """What `measure` says, as far as it is charged."""

    start_ms: _Cost
    exchange_ms: _Cost
    piece_ms: _Cost
    handshake_ms: _Cost
    job_ms: _Cost
    work: dict[str, _PerMb]
    machine: _Machine


def costs_of(result: object) -> Costs:
    """Return what `measure` has found as what the virtual world charges.

    Raises:
        msgspec.ValidationError: It is something else, or a figure is missing or makes no sense.
    """
    found = msgspec.convert(result, _Measured)
    missing = {*MEASURED.work, STEP} - found.work.keys()
    if missing:
        raise msgspec.ValidationError(f"no costs of {', '.join(sorted(missing))}")
    work = {name: PerMb(each.ms / 1000, each.ms_per_mb / 1000) for name, each in found.work.items()}
    return Costs(
        cores=found.machine.cores,
        start_s=found.start_ms / 1000,
        exchange_s=found.exchange_ms / 1000,
        piece_s=found.piece_ms / 1000,
        handshake_s=found.handshake_ms / 1000,
        job_s=found.job_ms / 1000,
        step=work.pop(STEP),
        work=work,
    )


def _start_s() -> float:
    """Return what it takes until a process of a live story does something."""
    command = [sys.executable, "-P", "-c", "import scenarios.live_node"]
    found = []
    for _ in range(STARTS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True)  # noqa: S603 - our own words
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


async def _handshake_s() -> float:
    """Return what a relay link in TLS takes until both ends know each other."""
    keys = RunKeys()
    ours = TlsStreams(TcpStreams(), keys.leaf("bob"))
    theirs = TlsStreams(TcpStreams(), keys.leaf("ann"))
    done = trio.Event()

    async def accept(stream: trio.abc.Stream, host: str) -> None:
        del host
        assert isinstance(stream, trio.SSLStream)
        await stream.do_handshake()
        await done.wait()

    async with theirs.listen(HERE, accept) as at:
        streams = []
        began_s = time.process_time()
        for _ in range(HANDSHAKES):
            stream = await ours.dial(at, timeout_s=10.0)
            assert isinstance(stream, trio.SSLStream)
            await stream.do_handshake()
            streams.append(stream)
        seconds = (time.process_time() - began_s) / HANDSHAKES
        done.set()
        for stream in streams:
            await trio.aclose_forcefully(stream)
    return seconds


async def _job_s() -> float:
    """Return what it takes to do nothing in another thread."""
    offload = ThreadOffload(threads=1)
    began_s = time.process_time()
    for _ in range(JOBS):
        await offload.run(lambda: None)
    return (time.process_time() - began_s) / JOBS


def _spec(ballast: int) -> WorldSpec:
    """Return the story's world, with a model of so many more weights."""
    story = load_story(STORY)
    world = story.world.model_copy(update={"model_ballast": ballast})
    draws = SimEntropy(f"story {SEED}")
    return story.model_copy(update={"world": world}).draw(draws.rng("world"))


def _work(ballast: int) -> dict[str, float]:
    """Return what each kind of work takes with a model of so many more weights, in seconds."""
    spec = _spec(ballast)
    cores = _TimedCores()

    async def main() -> None:
        played = World(replace(spec, stop_s=STOP_S), seed=SEED)
        played._cores = cores  # noqa: SLF001 - only this benchmark changes a world's cores
        await played.run()

    async def step() -> float:
        learner = FakeLearner(ballast=ballast, changed_share=spec.learner_changed_share)
        await learner.start(LearnerSetup(model_dir=Path(), task=""), lambda *_: None)
        found = []
        for number in range(STEPS):
            began_s = time.thread_time()
            await learner.train(TrainBatch(Step(number), samples=(), tokens_total=1))
            found.append(time.thread_time() - began_s)
        return fmean(found)

    run_virtual(main, seed=SEED)
    found = {name: fmean(seconds) for name, seconds in cores.seconds.items()}
    return {**found, STEP: run_virtual(step, seed=SEED)}


def _lines(small: Mapping[str, float], large: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the cost of each kind that is charged, as a line over the model's size."""
    step_mb = 2 * (BALLASTS[1] - BALLASTS[0]) / 1e6
    first_mb = 2 * (PARAMETERS + BALLASTS[0]) / 1e6
    found = {}
    for name in (*MEASURED.work, STEP):
        slope = (large[name] - small[name]) / step_mb
        found[name] = {
            "ms": round(1000 * max(0.0, small[name] - slope * first_mb), 3),
            "ms_per_mb": round(1000 * slope, 3),
        }
    return found
