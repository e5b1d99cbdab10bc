"""``kill -9`` of a coordinator at random moments under load, again and again, on one run's folder.

The coordinator is a real process with real sockets, SQLite and files; only its learner and its
task worker are fakes (`scenarios.live_fakes`). A few clients here upload as fast as they may. Each
time it has been killed, its disk is compared with what the clients were told
(`scenarios.torture_audit`); then it is started again on the same folder and port. At the end it is
told to stop, and must say goodbye.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time  # noqa: TID251 real processes need real time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio

from echo2p2p.errors import HttpError, StoreError
from echo2p2p.net.aio import AioHttpClients, open_aio
from echo2p2p.net.ports import Entropy, HttpClient
from echo2p2p.net.program import FAILED, OK, run_program
from echo2p2p.net.system import SystemEntropy
from echo2p2p.net.trust import JoinToken, run_key_from
from echo2p2p.testing.system import SimEntropy
from peer.coordinator_client import fetch_ca
from scenarios.arguments import positive
from scenarios.audit import Findings, Look
from scenarios.record import Record
from scenarios.torture_audit import audit
from scenarios.torture_clients import Client

T = TypeVar("T")

CLIENTS: Final = 3
GROUPS: Final = 4
"""Of a batch."""
EARLY_SHARE: Final = 0.25
"""Of the kills, those that come at any moment of the start."""
START_S: Final = 1.0
"""About how long a start takes."""
LIFE_S: Final = 0.8
"""Longest time from the first answer to the kill, for the others."""
PATIENCE_S: Final = 60.0
"""A coordinator that does nothing for so long has failed."""
PROBLEMS_SHOWN: Final = 20
SETTINGS: Final = (
    *("--rollouts.prompts_per_step", str(GROUPS), "--rollouts.samples_per_prompt", "4"),
    *("--rollouts.tokens_max", "8", "--rollouts.lease_timeout_s", "3"),
    *("--learner.checkpoint_every_steps", "5", "--run.exit_grace_s", "0.2"),
    *("--membership.term_s", "8", "--membership.heartbeat_s", "1", "--fake-step-s", "0.01"),
)


@dataclass
class Result:
    """What came out."""

    kills: int
    seed: int
    lives: int = 0
    early_kills: int = 0
    """Of them, those before the life had answered anything."""
    acknowledged_leases: int = 0
    acknowledged_trajectories: int = 0
    duplicates: int = 0
    steps: int = 0
    trained: int = 0
    versions: int = 0
    generation: int = 0
    lost: int = 0
    trained_twice: int = 0
    unbalanced: int = 0
    problems: list[str] = field(default_factory=list)
    wall_s: float = 0.0


class Torture:
    """One run and its tormentor.

    Args:
        folder: Of the run; must be empty.
        kills: How often.
        seed: Of the moments.
        tell: Called with a line after each kill.
    """

    def __init__(
        self, folder: Path, *, kills: int, seed: int, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._run = folder / "run"
        self._scratch = folder / "scratch"
        self._log = folder / "coordinator.log"
        self._kills = kills
        self._tell = tell
        self._entropy: Entropy = SimEntropy(seed)
        self._rng = self._entropy.rng("moments")
        self._record = Record()
        self._port = 0
        self._result = Result(kills, seed)
        self._findings = Findings()

    async def run(self) -> Result:
        """Kill, look, start again; then stop it well."""
        began_s = time.monotonic()
        async with open_aio() as aio:
            process = self._start()
            try:
                access = await self._access(process)
                async with AioHttpClients(aio).connect(access["url"], None) as http:
                    process = await self._torment(process, http, access)
                    await self._stop(process, http, access["admin_token"])
            finally:
                process.kill()
                process.wait()
        self._result.wall_s = round(time.monotonic() - began_s, 1)
        return self._result

    async def _torment(
        self, process: subprocess.Popen[bytes], http: HttpClient, access: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        token = JoinToken.parse(access["token"])
        run_key = run_key_from(await self._patiently(lambda: fetch_ca(http)), token)
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                client = Client(f"client-{number}", http, token, SystemEntropy(), self._record)
                client.learn_key(run_key)
                nursery.start_soon(client.run)
            for number in range(1, self._kills + 1):
                await self._wait_moment(process)
                process.kill()
                process.wait()
                look = self._look()
                self._tell(
                    f"kill {number}/{self._kills}: {len(self._record.acknowledged)} acknowledged, "
                    f"step {look.steps}, {len(self._findings.problems)} problems"
                )
                process = self._start()
            await self._wait_work(process)  # after the last kill it must work too
            await self._wait_work(process)
            nursery.cancel_scope.cancel()
        return process

    # --- the coordinator ----------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        self._result.lives += 1
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "scenarios.live_fakes", "run", *SETTINGS]
        command += ["--run.folder", str(self._run), "--server.port", str(self._port)]
        command += ["--fake-train-log", str(self._run / "train.jsonl")]
        with self._log.open("ab") as output:
            return subprocess.Popen(  # noqa: S603 our own module
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    async def _access(self, process: subprocess.Popen[bytes]) -> dict[str, str]:
        """Wait for the first life to listen; its port is kept for all others."""
        path = self._run / "join.json"
        await self._wait(process, path.exists, "listening")
        access: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        self._port = int(access["url"].rpartition(":")[2])
        return access

    async def _wait_moment(self, process: subprocess.Popen[bytes]) -> None:
        """Sleep until the next kill is due."""
        if self._result.lives > 1 and self._rng.random() < EARLY_SHARE:
            self._result.early_kills += 1
            await trio.sleep(self._rng.uniform(0.0, START_S))
            return
        await self._wait_work(process)
        await trio.sleep(self._rng.uniform(0.0, LIFE_S))

    async def _wait_work(self, process: subprocess.Popen[bytes]) -> None:
        before = len(self._record.acknowledged)
        await self._wait(process, lambda: len(self._record.acknowledged) > before, "taking work")

    async def _wait(
        self, process: subprocess.Popen[bytes], condition: Callable[[], bool], what: str
    ) -> None:
        """Wait until ``condition()``.

        Raises:
            StoreError: It does not come about, or the coordinator has ended by itself.
        """
        with trio.move_on_after(PATIENCE_S):
            while process.poll() is None:
                if condition():
                    return
                await trio.sleep(0.01)
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-1500:]
        raise StoreError(f"the coordinator is not {what} (exit code {process.poll()}): {tail}")

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await ask()
            except HttpError:
                await trio.sleep(0.02)

    async def _stop(self, process: subprocess.Popen[bytes], http: HttpClient, admin: str) -> None:
        """Tell it to end; look once more, and at what it says itself."""
        headers = {"authorization": f"Bearer {admin}"}
        await self._patiently(
            lambda: http.request("POST", "/control/stop", headers=headers, timeout_s=10.0)
        )
        with trio.move_on_after(PATIENCE_S):
            await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        result, record = self._result, self._record
        if process.poll() != 0:
            result.problems.append(f"told to stop, it ended with {process.poll()}")
        look = self._look()
        summary = json.loads((self._run / "summary.json").read_text(encoding="utf-8"))
        counts = summary["trajectories"]
        if not (counts["balances"] and counts["recount_agrees"]):
            result.problems.append(f"its summary does not balance: {counts}")
        result.acknowledged_leases = len(record.acknowledged)
        result.acknowledged_trajectories = sum(record.acknowledged.values())
        result.duplicates = record.duplicates
        result.steps, result.trained = look.steps, look.trained
        result.versions, result.generation = len(record.versions), summary["generation"]
        found = self._findings
        result.lost, result.trained_twice = len(found.lost), len(found.twice)
        result.unbalanced = len(found.unbalanced)
        problems = [*result.problems, *record.problems, *found.problems]
        result.problems = problems[:PROBLEMS_SHOWN]

    def _look(self) -> Look:
        look = audit(self._run, self._scratch, self._record, groups_per_step=GROUPS)
        for name in ("lost", "twice", "unbalanced", "other"):
            known, found = getattr(self._findings, name), getattr(look.findings, name)
            known.extend(line for line in dict.fromkeys(found) if line not in known)
        return look


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command line takes."""
    parser.add_argument("--kills", type=positive, default=100, help="how often (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    parser.add_argument("--folder", type=Path, help="of the run (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    return run_program(partial(_torture, arguments))


async def _torture(arguments: argparse.Namespace) -> int:
    """Kill and look; the folder is kept if something was found."""
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="echo2-torture-"))
    tell = (lambda _: None) if arguments.json else print
    tormentor = Torture(folder, kills=arguments.kills, seed=arguments.seed, tell=tell)
    result = await tormentor.run()
    if arguments.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        for name, value in asdict(result).items():
            print(f"{name.replace('_', ' '):<26} {value}")
    if result.problems:
        print(f"the run's folder is kept: {folder}", file=sys.stderr)
        return FAILED
    if arguments.folder is None:
        shutil.rmtree(folder)
    return OK
