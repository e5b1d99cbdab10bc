"""Inside of the namespaces: builds the machines, lets each system broadcast, prints rows as JSON.

`scenarios.bench_broadcast` starts this under `scenarios.namespaces.WRAP` with a `Work` on the
command line. It is the first process of its namespace, so that the end of it, or of its standard
input, which its parent holds open, is the end of all machines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time  # noqa: TID251 - processes share no clock but the kernel's
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Final, TypeVar

import msgspec
import trio

from echo2p2p.errors import ChildError, EchoError
from echo2p2p.net.program import OK, run_program
from echo2p2p.testing.relays import RunKeys
from scenarios import broadcast_torrent, namespaces
from scenarios.broadcast_links import GOODPUT, Line, bound_of, plan_lines, plan_neighbours
from scenarios.broadcast_node import Finished, Ready, Report, Role, member_name
from scenarios.broadcast_rows import Case, Outcome, row_of

LEAD_S: Final = 0.2
LEAD_EACH_S: Final = 0.02
"""Until the clock starts, for the word to reach all processes."""
START_LIMIT_S: Final = 120.0
SPARE_S: Final = 60.0
"""Of a broadcast, beside four times what a single uplink would take for all copies."""
SCRATCH: Final = Path("/run/bench")
"""In memory, and gone at the end."""
MODULES: Final = {"libtorrent": "scenarios.broadcast_torrent"}
T = TypeVar("T", Ready, Finished, Report)


class Work(msgspec.Struct, frozen=True):
    """What to measure."""

    case: Case
    systems: list[tuple[str, str]]
    """With settings."""
    runs: int


class Machine:
    """One process of a system."""

    def __init__(self, process: trio.Process, name: str) -> None:
        self._process = process
        self._name = name
        self._waiting = b""

    async def ask(self, word: str, kind: type[T]) -> T:
        """Say a word; return the answer.

        Raises:
            ChildError: The process ended; its own words are on standard error.
        """
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(word.encode() + b"\n")
        except trio.BrokenResourceError as error:
            raise ChildError(self._name, "ended early; see above") from error
        return await self.hear(kind)

    async def hear(self, kind: type[T]) -> T:
        """Return the next answer.

        Raises:
            ChildError: As `ask`.
        """
        assert self._process.stdout is not None
        while b"\n" not in self._waiting:
            data = await self._process.stdout.receive_some()
            if not data:
                raise ChildError(self._name, "ended early; see above")
            self._waiting += data
        line, self._waiting = self._waiting.split(b"\n", 1)
        return msgspec.json.decode(line, type=kind)


class Bench:
    """The machines of one case."""

    def __init__(self, case: Case, lines: list[Line]) -> None:
        self._case = case
        self._lines = lines
        self._machines = namespaces.Machines(lines)
        self._count = 0

    async def build(self) -> None:
        """Make the machines.

        Raises:
            EchoError: That failed.
        """
        await self._machines.build()

    async def broadcast(self, system: str, settings: str, seed: int) -> Outcome:
        """Let one system do it once.

        Raises:
            EchoError: A process failed, or the last peer never had the payload.
        """
        case = self._case
        one_uplink_s = case.peers * case.payload_bytes / self._lines[0].up_bytes_per_s
        async with self._open(system, settings, seed) as machines:
            with _limit(START_LIMIT_S, f"{system}: not all machines were linked"):
                await _all([machine.hear(Ready) for machine in machines])
                await _all([machine.ask("link", Ready) for machine in machines])
            before = await self._machines.counters()
            start_s = time.monotonic() + LEAD_S + LEAD_EACH_S * len(machines)
            with _limit(4 * one_uplink_s + SPARE_S, f"{system}: not every peer had the payload"):
                word = f"go {start_s!r}"
                finished = await _all([machine.ask(word, Finished) for machine in machines])
            after = await self._machines.counters()
            reports = await _all([machine.ask("stop", Report) for machine in machines])
        late_s = reports[0].first_s
        ups = tuple(b.up_bytes - a.up_bytes for a, b in zip(before, after, strict=True))
        downs = tuple(b.down_bytes - a.down_bytes for a, b in zip(before, after, strict=True))
        received = sum(report.received_bytes for report in reports[1:])
        return Outcome(
            finished_s=tuple(one.seconds - late_s for one in finished[1:]),
            source_copies=ups[0] * GOODPUT / case.payload_bytes,
            duplicate_share=sum(r.duplicate_bytes for r in reports[1:]) / max(1, received),
            cpu_s=sum(report.cpu_s for report in reports),
            up_bytes=ups,
            down_bytes=downs,
            redealt=reports[0].redealt,
        )

    @asynccontextmanager
    async def _open(self, system: str, settings: str, seed: int) -> AsyncIterator[list[Machine]]:
        """Start a process a machine; they are killed at the end."""
        self._count += 1
        scratch = SCRATCH / str(self._count)
        scratch.mkdir(parents=True)
        module = MODULES.get(system, "scenarios.broadcast_node")
        processes: list[trio.Process] = []
        try:
            for role in self._roles(system, settings, seed):
                command = [sys.executable, "-P", "-m", module]
                command += [msgspec.json.encode(role).decode(), str(scratch)]
                processes.append(
                    await trio.lowlevel.open_process(
                        namespaces.inside(role.index, command),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                    )
                )
            yield [Machine(one, member_name(index)) for index, one in enumerate(processes)]
        finally:
            with trio.CancelScope(shield=True):
                for process in processes:
                    process.kill()
                for process in processes:
                    await process.wait()
            for path in scratch.rglob(broadcast_torrent.NAME):
                path.unlink()

    def _roles(self, system: str, settings: str, seed: int) -> list[Role]:
        keys = RunKeys(seed)
        ids = [keys.identity(member_name(index))[0] for index in range(1, len(self._lines))]
        places = {peer_id: index for index, peer_id in enumerate(ids, 1)}
        overlay = plan_neighbours(ids, self._lines, seed)
        linked = [list(places.values())]
        linked += [[places[other] for other in overlay[peer_id]] for peer_id in ids]
        return [
            Role(
                system=system,
                settings=settings,
                index=index,
                hosts=[namespaces.address_of(each) for each in range(len(self._lines))],
                reachable=[line.reachable for line in self._lines],
                neighbours=linked[index],
                payload_bytes=self._case.payload_bytes,
                seed=seed,
            )
            for index in range(len(self._lines))
        ]


@contextmanager
def _limit(seconds: float, what: str) -> Iterator[None]:
    """Turn a time-out into words."""
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError as error:
        raise EchoError(f"{what} within {seconds:.0f} s") from error


async def _all(questions: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all answers at the same time."""
    answers: dict[int, T] = {}

    async def take(place: int, question: Awaitable[T]) -> None:
        answers[place] = await question

    async with trio.open_nursery() as nursery:
        for place, question in enumerate(questions):
            nursery.start_soon(take, place, question)
    return [answers[place] for place in range(len(questions))]


def end_with_parent() -> None:
    """End this process, and with it every machine, when standard input ends."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    Thread(target=watch, daemon=True).start()


async def measure(work: Work) -> int:
    """Print a row for each system, and tell of each run on standard error."""
    case = work.case
    lines = plan_lines(case.links, case.peers)
    bound = bound_of(case.payload_bytes, lines)
    bench = Bench(case, lines)
    await bench.build()
    outcomes: dict[tuple[str, str], list[Outcome]] = {which: [] for which in work.systems}
    for run in range(work.runs):
        for system, settings in work.systems:
            outcome = await bench.broadcast(system, settings, case.seed + run)
            outcomes[system, settings].append(outcome)
            print(
                f"{case.peers} peers, run {run + 1} of {work.runs}, {system} {settings}:"
                f" {outcome.last_s:.2f} s, {outcome.last_s / bound.seconds:.3f} x the bound",
                file=sys.stderr,
                flush=True,
            )
    for (system, settings), found in outcomes.items():
        row = row_of(system, settings, "namespaces", case, bound, found)
        print(msgspec.json.encode(asdict(row)).decode(), flush=True)
    return OK


if __name__ == "__main__":
    end_with_parent()
    sys.exit(run_program(partial(measure, msgspec.json.decode(sys.argv[1], type=Work))))
