"""``echo2-scenario bench intake``: what does one upload cost a coordinator whom many wait for?

The coordinator is the real one in this process: HTTP in its thread, routes, membership, leases,
intake, SQLite with ``synchronous=FULL`` on the disk under ``--folder``, journal in a file. Members
are real sockets in other processes (`scenarios.bench_clients`). All work that there is has been
leased to the uploaders, so that every other member's long poll waits, as in a run whose volunteers
are faster than its learner. Not there: a learner (one more group is leased than ever comes, so no
batch is complete) and a task's code (its worker answers at once), which are other processes.

``cpu_ms_per_upload`` is the CPU time of this whole process, kernel and all threads, while uploads
come one after the other on each uploader's connection, divided by their number. The journal, the
long polls and the heartbeats that go on beside them are in it, the clients are not.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, cast

import msgspec
import numpy as np
import trio

from coordinator.app import CoordinatorApp, CoordinatorPorts, Opened
from coordinator.book import Book
from coordinator.config import (
    MembershipSection,
    RolloutsSection,
    RunSection,
    ServerSection,
    Settings,
)
from coordinator.machine import open_machine
from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, TaskSetup, Turn
from echo2p2p.errors import ChildError, ConfigError
from echo2p2p.log import open_journal
from echo2p2p.net.ports import Endpoint, HttpServer, Request, Response, Route, Rows
from echo2p2p.net.store import SqliteStore
from echo2p2p.net.system import SystemClock
from echo2p2p.tasks.base import Verdict
from scenarios import bench_report
from scenarios.arguments import positive
from scenarios.bench_clients import (
    Answer,
    AnyCommand,
    Beat,
    Join,
    Look,
    Poll,
    TakeLeases,
    UploadAll,
    read_lines,
    shares,
)
from scenarios.fake_learner import FakeLearner

TERM_S: Final = 3600.0
"""Of members and leases: nobody is evicted, though most send one heartbeat only."""
QUEUE_BYTES_MAX: Final = 1 << 50
"""All groups stay in memory, for want of a learner."""
LONG_POLLS: Final = frozenset({"/lease", "/manifests"})
BEAT_EVERY_S: Final = 0.05
PROMPT_TOKENS: Final = 256
VOCABULARY: Final = 151_936
STOP_ID: Final = 2
FSYNCS: Final = 20


@dataclass(frozen=True)
class Plan:
    """Parameters of one benchmark."""

    polls: int = 1000
    """Members with one long poll each; every second one for work, the others for versions."""
    uploaders: int = 8
    """Members that upload, each one group after the other."""
    uploads: int = 2000
    """Groups in all. One more is leased, to a member that waits for work, and never comes: so no
    batch is complete."""
    heartbeats: int = 2000
    """Small requests, back to back, for a rate of their own."""
    processes: int = 4
    """Of clients."""
    samples: int = 8
    """In a group."""
    tokens: int = 1560
    """In a sample; 8 bytes each."""
    wait_s: float = 25.0
    """Of a long poll; then it is asked anew, as peers do."""
    tls: bool = False


class QuickTaskWorker:
    """A `TaskWorker` whose task costs nothing: a fixed prompt, and a reward for any answer."""

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """See `TaskWorker`."""
        del setup
        await trio.lowlevel.checkpoint()
        return TaskInfo(VOCABULARY, (STOP_ID,), turns_max=1, positions_max=None)

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """See `TaskWorker`."""
        await trio.lowlevel.checkpoint()
        prompt = np.arange(PROMPT_TOKENS, dtype=np.uint32)
        return [Opening(seed, f"item {seed}", prompt, player=0) for seed in seeds]

    async def score(
        self, episodes: Sequence[tuple[int, Sequence[Turn]]]
    ) -> list[Next | Done | Failed]:
        """See `TaskWorker`."""
        await trio.lowlevel.checkpoint()
        return [Done(Verdict((0.0,))) for _ in episodes]

    async def close(self) -> None:
        """See `TaskWorker`."""
        await trio.lowlevel.checkpoint()


class _ClientProcess:
    """One process of clients, told what to do one command at a time."""

    def __init__(self, process: trio.Process, answers: AsyncIterator[bytes]) -> None:
        self._process = process
        self._answers = answers

    async def ask(self, command: AnyCommand) -> Answer:
        """Return its answer.

        Raises:
            ChildError: It died; its own words are on standard error.
        """
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(msgspec.json.encode(command) + b"\n")
            return msgspec.json.decode(await anext(self._answers), type=Answer)
        except (trio.BrokenResourceError, StopAsyncIteration) as error:
            raise ChildError("client process", "ended early; see above") from error


@asynccontextmanager
async def _open_clients(count: int) -> AsyncIterator[list[_ClientProcess]]:
    command = [sys.executable, "-P", "-m", "scenarios.bench_clients"]
    clients: list[_ClientProcess] = []
    async with AsyncExitStack() as stack:
        for _ in range(count):
            process = await trio.lowlevel.open_process(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.push_async_callback(_end, process)
            assert process.stdout is not None
            answers = await stack.enter_async_context(aclosing(read_lines(process.stdout)))
            clients.append(_ClientProcess(process, answers))
        yield clients


async def _end(process: trio.Process) -> None:
    """Close its input, which ends it; kill it if it lingers."""
    with trio.CancelScope(shield=True):
        assert process.stdin is not None
        await process.stdin.aclose()
        with trio.move_on_after(5.0):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


class _PollCounter:
    """Long polls that wait at the coordinator."""

    def __init__(self) -> None:
        self.waiting = 0
        self._came = trio.lowlevel.ParkingLot()

    def counted(self, route: Route) -> Route:
        """Return the route; if it is one of a long poll, it is counted while it waits."""

        async def handle(request: Request) -> Response:
            self.waiting += 1
            self._came.unpark_all()
            try:
                return await route.handler(request)
            finally:
                self.waiting -= 1

        return replace(route, handler=handle) if route.path in LONG_POLLS else route

    async def wait_for(self, count: int) -> None:
        """Wait until so many wait; endless."""
        while self.waiting < count:
            await self._came.park()


@dataclass(frozen=True)
class _CountedServer:
    """An `HttpServer` whose long polls are counted."""

    inner: HttpServer
    polls: _PollCounter

    def serve(
        self, routes: tuple[Route, ...], endpoint: Endpoint
    ) -> AbstractAsyncContextManager[Endpoint]:
        """See `HttpServer`."""
        return self.inner.serve(tuple(map(self.polls.counted, routes)), endpoint)


class _Meter:
    """What this process has used since the last look."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._at = self._now()

    def _now(self) -> tuple[float, float, int]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return trio.current_time(), used.ru_utime + used.ru_stime, self._store.commits

    def lap(self) -> tuple[float, float, int]:
        """Return seconds, CPU seconds and commits since the last lap."""
        before, self._at = self._at, self._now()
        return (
            self._at[0] - before[0],
            self._at[1] - before[1],
            self._at[2] - before[2],
        )


def resident_mib() -> float:
    """Return the memory that this process occupies."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / bench_report.MIB


def fsync_ms(folder: Path) -> Mapping[str, float]:
    """Return what one write with fsync costs on this disk."""
    seconds: list[float] = []
    with (folder / "fsync").open("wb", buffering=0) as file:
        for _ in range(FSYNCS):
            began_s = trio.current_time()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            seconds.append(trio.current_time() - began_s)
    return bench_report.spread_ms(seconds)


async def measure(plan: Plan, folder: Path) -> dict[str, object]:
    """Run the benchmark in an empty folder; returns its result.

    Raises:
        EchoError: The coordinator or a client failed.
    """
    settings = _settings(plan, folder)
    events = folder / "events.jsonl"
    with open_journal(sys.stderr, SystemClock(), lowest="error", file=events) as journal:
        async with open_machine(settings, journal) as real:
            polls = _PollCounter()
            ports = replace(
                real,
                make_learner=FakeLearner,
                make_task_worker=QuickTaskWorker,
                make_http_server=lambda tls: _CountedServer(real.make_http_server(tls), polls),
            )
            async with trio.open_nursery() as nursery:
                opened = await nursery.start(_run_coordinator, settings, ports, plan.tls)
                async with _open_clients(plan.processes) as clients:
                    result = await _Benchmark(plan, ports, opened, clients, polls).run()
                nursery.cancel_scope.cancel()
    return {
        **result,
        "fsync_ms": fsync_ms(folder),
        "parameters": asdict(plan),
        "machine": bench_report.machine(),
        "versions": bench_report.versions(),
    }


def _settings(plan: Plan, folder: Path) -> Settings:
    return Settings(
        run=RunSection(folder=str(folder / "run")),
        server=ServerSection(port=0, tls="on" if plan.tls else "off"),
        rollouts=RolloutsSection(
            prompts_per_step=plan.uploads + 1,
            samples_per_prompt=plan.samples,
            staleness_budget=0,
            tokens_max=plan.tokens,
            lease_timeout_s=TERM_S,
            queue_bytes_max=QUEUE_BYTES_MAX,
        ),
        membership=MembershipSection(term_s=TERM_S),
    )


async def _run_coordinator(
    settings: Settings,
    ports: CoordinatorPorts,
    tls: bool,
    task_status: trio.TaskStatus[Opened] = trio.TASK_STATUS_IGNORED,
) -> None:
    await CoordinatorApp(settings, ports, tls=tls, on_opened=task_status.started).run()


class _Benchmark:
    """The phases, one after the other."""

    def __init__(
        self,
        plan: Plan,
        ports: CoordinatorPorts,
        opened: Opened,
        clients: list[_ClientProcess],
        polls: _PollCounter,
    ) -> None:
        self._plan = plan
        self._opened = opened
        self._clients = clients
        self._polls = polls
        assert isinstance(ports.store, SqliteStore)
        self._store = ports.store

    async def run(self) -> dict[str, object]:
        """Return the figures."""
        plan, rss_mib = self._plan, {"start": resident_mib()}
        await self._all(self._joins())
        await self._all([TakeLeases(share) for share in self._shares(plan.uploads)])
        await self._all([Poll(plan.wait_s)] * plan.processes)
        await self._polls.wait_for(plan.polls)
        rss_mib["with_long_polls"] = resident_mib()
        meter = _Meter(self._store)
        beats = await self._all([Beat(share) for share in self._shares(plan.heartbeats)])
        beats_s, beats_cpu_s, _ = meter.lap()
        answers = await self._all(
            [UploadAll(None if number else BEAT_EVERY_S) for number in range(plan.processes)]
        )
        uploads_s, uploads_cpu_s, commits = meter.lap()
        rss_mib["with_uploads"] = resident_mib()
        waiting = self._polls.waiting
        polls = await self._all([Look()] * plan.processes)
        by_events, by_rows = await Book(self._store).audit()
        acknowledged = sum(answer.count for answer in answers)
        assert acknowledged, "the clients upload all that they were leased, or fail"
        stored = await self._store.transact(_stored)
        return {
            "held": acknowledged == stored == plan.uploads and by_events == by_rows,
            "cpu_ms_per_upload": 1000 * uploads_cpu_s / acknowledged,
            "uploads_per_s": acknowledged / uploads_s,
            "upload_bytes": max(answer.body_bytes for answer in answers),
            "upload_ms": bench_report.spread_ms([s for a in answers for s in a.seconds]),
            "heartbeat_ms": bench_report.spread_ms([s for a in answers for s in a.beat_seconds]),
            "put_off": sum(answer.put_off for answer in answers),
            "commits_per_upload": commits / acknowledged,
            "cpu_share": uploads_cpu_s / uploads_s,
            "requests_per_s": plan.heartbeats / beats_s,
            "cpu_ms_per_request": 1000 * beats_cpu_s / plan.heartbeats,
            "request_ms": bench_report.spread_ms([s for a in beats for s in a.seconds]),
            "long_polls": {
                "waiting": waiting,
                "alive": sum(answer.count for answer in polls),
                "renewed": sum(answer.polls_renewed for answer in polls),
                "broken": sum(answer.polls_broken for answer in polls),
            },
            "rss_mib": rss_mib,
            "checks": {
                "acknowledged": acknowledged,
                "stored": stored,
                "recount_agrees": by_events == by_rows,
            },
        }

    def _joins(self) -> list[AnyCommand]:
        plan, opened = self._plan, self._opened
        pollers, uploaders = self._shares(plan.polls), self._shares(plan.uploaders)
        return [
            Join(opened.url, opened.token, opened.authority, pollers[seed], uploaders[seed], seed)
            for seed in range(plan.processes)
        ]

    def _shares(self, count: int) -> list[int]:
        return shares(count, self._plan.processes)

    async def _all(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """Give each process its command; return the answers when all have one."""
        answers: dict[int, Answer] = {}

        async def ask(number: int, command: AnyCommand) -> None:
            answers[number] = await self._clients[number].ask(command)

        async with trio.open_nursery() as nursery:
            for number, command in enumerate(commands):
                nursery.start_soon(ask, number, command)
        return [answers[number] for number in range(len(commands))]


def _stored(rows: Rows) -> int:
    """Count whole uploads."""
    row = rows.execute(
        "SELECT count(*) FROM leases WHERE fate = 'queued' AND length(upload) > 0"
    ).fetchone()
    assert row is not None
    return cast("int", row[0])


# --- the command ------------------------------------------------------------------------------


table = bench_report.table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen on the command line."""
    plan = Plan()
    for name, meaning in _ARGUMENTS.items():
        default = getattr(plan, name)
        parser.add_argument(
            f"--{name}", type=positive, default=default, help=f"{meaning} (default: {default})"
        )
    parser.add_argument("--tls", action="store_true", help="HTTPS with a certificate a member")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs"),
        help="a folder on the disk to be measured; what is written there is removed at the end",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


_ARGUMENTS: Final = {
    "polls": "members that wait, with a connection each",
    "uploaders": "members that upload, each one group after the other",
    "uploads": "groups in all",
    "heartbeats": "small requests, for a rate of their own",
    "processes": "client processes",
    "samples": "samples in a group",
    "tokens": "tokens in a sample, 8 bytes each",
}


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Run the benchmark as the command line says.

    Raises:
        EchoError: The folder cannot be written, or something failed.
    """
    chosen = {name: getattr(arguments, name) for name in _ARGUMENTS}
    chosen["processes"] = min(chosen["processes"], chosen["uploaders"])
    plan = Plan(**chosen, tls=arguments.tls)
    folder: Path = arguments.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        home = tempfile.TemporaryDirectory(prefix="bench-intake-", dir=folder)
    except OSError as error:
        raise ConfigError("--folder", f"cannot write {folder}: {error.strerror}") from error
    with home as name:
        return await measure(plan, Path(name))
