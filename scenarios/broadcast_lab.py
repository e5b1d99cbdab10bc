"""Inside of the namespaces: builds the machines, lets each system broadcast, prints rows as JSON.

`scenarios.bench_broadcast` starts this under `scenarios.namespaces.WRAP` with a `Work` on the
command line. It is the first process of its namespace, so that the end of it, or of its standard
input, which its parent holds open, is the end of all machines.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time  # noqa: TID251 - processes share no clock but the kernel's
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import trio

from echo2p2p.errors import ChildError, EchoError
from echo2p2p.net.program import OK, run_program
from echo2p2p.testing.relays import RunKeys
from scenarios import broadcast_torrent, namespaces
from scenarios.broadcast_faults import BEGINS, FAULTS, Fault, Scene, lie_of
from scenarios.broadcast_links import GOODPUT, Line, bound_of, plan_lines, plan_neighbours
from scenarios.broadcast_node import Finished, Ready, Report, Role, member_name
from scenarios.broadcast_rows import Case, Outcome, Row, row_of

LEAD_S: Final = 0.2
LEAD_EACH_S: Final = 0.02
"""Until the clock starts, for the word to reach all processes."""
MS: Final = 1e-3
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

    async def tell(self, word: str) -> None:
        """Say a word that no answer is waited for."""
        assert self._process.stdin is not None
        with suppress(trio.BrokenResourceError):
            await self._process.stdin.send_all(word.encode() + b"\n")

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


class Team:
    """The processes of one system, one a machine, for one broadcast.

    Args:
        roles: By machine.
        command: What each runs, before its role.
        scratch: A folder for all of them.
        start_s: When the clock starts; set before anybody is told to go.
    """

    def __init__(self, roles: Sequence[Role], command: Sequence[str], scratch: Path) -> None:
        self._roles = roles
        self._command = command
        self._scratch = scratch
        self._processes: list[trio.Process] = []
        self.machines: list[Machine] = []
        self.start_s = 0.0

    async def start(self) -> None:
        """Start all."""
        for role in self._roles:
            process = await self._spawn(role)
            self._processes.append(process)
            self.machines.append(Machine(process, member_name(role.index)))

    async def _spawn(self, role: Role) -> trio.Process:
        command = [*self._command, msgspec.json.encode(role).decode(), str(self._scratch)]
        return await trio.lowlevel.open_process(
            namespaces.inside(role.index, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def kill(self, index: int, number: signal.Signals) -> None:
        """Send one a signal."""
        self._processes[index].send_signal(number)

    async def replace(self, index: int) -> None:
        """Kill one and start another in its place, which joins in.

        Raises:
            ChildError: It does not come up.
        """
        self.kill(index, signal.SIGKILL)
        await self._processes[index].wait()
        process = await self._spawn(self._roles[index])
        self._processes[index] = process
        self.machines[index] = machine = Machine(process, member_name(index))
        await machine.hear(Ready)
        await machine.ask("link", Ready)
        await machine.ask(self.word, Finished)

    @property
    def word(self) -> str:
        """What begins the broadcast."""
        return f"go {self.start_s!r}"

    async def end(self) -> None:
        """Kill all."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            await process.wait()


class Bench:
    """The machines of one case."""

    def __init__(self, case: Case, lines: list[Line]) -> None:
        self._case = case
        self._lines = lines
        self._bound_s = bound_of(case.payload_bytes, lines).seconds
        self._machines = namespaces.Machines(lines)
        self._count = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Make the machines, as far from each other as the case says.

        Raises:
            EchoError: That failed.
        """
        await self._machines.build()
        async with AsyncExitStack() as stack:
            each_s = [(self._case.rtt_ms / 2 + line.rtt_ms) * MS for line in self._lines]
            if any(each_s):
                await stack.enter_async_context(self._machines.distant(each_s))
            for index, line in enumerate(self._lines):
                if line.loss:
                    await self._machines.lose(index, line.loss)
            yield

    async def broadcast(self, system: str, settings: str, seed: int, fault_name: str) -> Outcome:
        """Let one system do it once, with a fault if its name is not empty.

        Raises:
            EchoError: A process failed, or the last peer never had the payload.
        """
        case = self._case
        fault = FAULTS.get(fault_name)
        hit = () if fault is None else fault.hits(case.peers)
        lost = () if fault is None or fault.recovers else hit
        one_uplink_s = case.peers * case.payload_bytes / self._lines[0].up_bytes_per_s
        roles = self._roles(system, settings, seed, {i: lie_of(fault_name) for i in hit})
        async with self._open(system, roles) as team:
            machines = team.machines
            with _limit(START_LIMIT_S, f"{system}: not all machines were linked"):
                await _all([machine.hear(Ready) for machine in machines])
                await _all([machine.ask("link", Ready) for machine in machines])
            before = await self._machines.counters()
            team.start_s = time.monotonic() + LEAD_S + LEAD_EACH_S * len(machines)
            with _limit(4 * one_uplink_s + SPARE_S, f"{system}: not every peer had the payload"):
                async with self._play(fault, team, hit):
                    there = [index for index in range(len(machines)) if index not in lost]
                    for index in lost:
                        await machines[index].tell(team.word)
                    finished = dict(
                        zip(
                            there,
                            await _all([machines[i].ask(team.word, Finished) for i in there]),
                            strict=True,
                        )
                    )
            after = await self._machines.counters()
            reports = dict(
                zip(
                    there, await _all([machines[i].ask("stop", Report) for i in there]), strict=True
                )
            )
        late_s = reports[0].first_s
        received = sum(report.received_bytes for index, report in reports.items() if index)
        doubled = sum(report.duplicate_bytes for index, report in reports.items() if index)
        ups = tuple(b.up_bytes - a.up_bytes for a, b in zip(before, after, strict=True))
        downs = tuple(b.down_bytes - a.down_bytes for a, b in zip(before, after, strict=True))
        took_s = {index: one.seconds - late_s for index, one in finished.items() if index}
        return Outcome(
            finished_s=tuple(took_s[index] for index in took_s if index not in hit),
            hit_finished_s=tuple(took_s[index] for index in took_s if index in hit),
            source_copies=ups[0] * GOODPUT / case.payload_bytes,
            duplicate_share=doubled / max(1, received),
            cpu_s=sum(report.cpu_s for report in reports.values()),
            up_bytes=ups,
            down_bytes=downs,
            redealt=reports[0].redealt,
        )

    @asynccontextmanager
    async def _play(
        self, fault: Fault | None, team: Team, hit: tuple[int, ...]
    ) -> AsyncIterator[None]:
        """Let a fault begin in its time while the context is open; its end mends the lines."""

        async def play() -> None:
            assert fault is not None
            await trio.sleep(max(0.0, team.start_s + BEGINS * self._bound_s - time.monotonic()))
            await fault.play(Scene(team, self._machines, self._lines, hit, self._bound_s))

        async with trio.open_nursery() as nursery:
            if fault is not None:
                nursery.start_soon(play)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    for index in hit:
                        await self._machines.heal(index)

    @asynccontextmanager
    async def _open(self, system: str, roles: Sequence[Role]) -> AsyncIterator[Team]:
        """Start a process a machine; they are killed at the end."""
        self._count += 1
        scratch = SCRATCH / str(self._count)
        scratch.mkdir(parents=True)
        module = MODULES.get(system, "scenarios.broadcast_node")
        team = Team(roles, [sys.executable, "-P", "-m", module], scratch)
        try:
            await team.start()
            yield team
        finally:
            with trio.CancelScope(shield=True):
                await team.end()
            for path in scratch.rglob(broadcast_torrent.NAME):
                path.unlink()

    def _roles(self, system: str, settings: str, seed: int, lies: Mapping[int, str]) -> list[Role]:
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
                tls=self._case.tls,
                lie=lies.get(index, ""),
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


async def measure(work: Work) -> int:
    """Print a row for each system, and tell of each run on standard error."""
    case = work.case
    lines = plan_lines(case.links, case.peers, case.mbit)
    bound = bound_of(case.payload_bytes, lines)
    faults = ["", case.fault] if case.fault else [""]
    outcomes: dict[tuple[str, str, str], list[Outcome]] = {
        (*which, fault): [] for which in work.systems for fault in faults
    }
    bench = Bench(case, lines)
    async with bench.open():
        for run in range(work.runs):
            for (system, settings, fault), found in outcomes.items():
                outcome = await bench.broadcast(system, settings, case.seed + run, fault)
                found.append(outcome)
                print(
                    f"{case.peers} peers, run {run + 1} of {work.runs},"
                    f" {' '.join(filter(None, (system, settings, fault)))}:"
                    f" {outcome.last_s:.2f} s, {outcome.last_s / bound.seconds:.3f} x the bound",
                    file=sys.stderr,
                    flush=True,
                )
    faultless: dict[tuple[str, str], Row] = {}
    for (system, settings, fault), found in outcomes.items():
        tls = case.tls and system == "echo2p2p"
        played = replace(case, fault=fault, tls=tls)
        row = row_of(system, settings, "namespaces", played, bound, found)
        if fault:
            ratio = row.last_s / faultless[system, settings].last_s
            row = replace(row, times_faultless=round(ratio, 4))
        else:
            faultless[system, settings] = row
        print(msgspec.json.encode(asdict(row)).decode(), flush=True)
    return OK


if __name__ == "__main__":
    namespaces.end_with_parent()
    sys.exit(run_program(partial(measure, msgspec.json.decode(sys.argv[1], type=Work))))
