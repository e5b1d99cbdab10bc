"""Coordinators and peers without models as real processes, for tests: `scenarios.live_fakes`.

Everything is fast here (terms of two seconds, steps of a tenth of one), so that a whole run, from
the first process to the last one's exit code, takes about three seconds.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo2p2p.testing.processes import Processes

MODULE: Final = "scenarios.live_fakes"
START_S: Final = 30.0
QUICK: Final = (
    *("--membership.term_s", "2", "--membership.heartbeat_s", "0.3"),
    *("--run.exit_grace_s", "2"),
)


@dataclass(frozen=True)
class Live:
    """One process and what it has said."""

    process: subprocess.Popen[bytes]
    log: Path
    folder: Path

    def text(self) -> str:
        """Return all that it has written to its terminal."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def errors(self) -> list[str]:
        """Return the lines that a user takes for the cause of the end."""
        return [line for line in self.text().splitlines() if line.startswith("error: ")]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the journal's entries of this name."""
        files = sorted(self.folder.glob("**/events.jsonl"))
        lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
        entries: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
        return [entry for entry in entries if entry["event"] == name]

    def ended(self, timeout_s: float = 20.0) -> int:
        """Wait for the end; return the exit code.

        Raises:
            TimeoutError: With what it has written.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"still runs: {self.text()[-2000:]}") from error


@dataclass(frozen=True)
class LiveCoordinator(Live):
    """A coordinator that listens."""

    url: str
    token: str
    admin_token: str

    @property
    def port(self) -> int:
        """The real one."""
        return int(self.url.rpartition(":")[2])

    def steps(self) -> int:
        """Return how many steps were trained."""
        found = re.findall(r"^step +(\d+)/", self.text(), re.MULTILINE)
        return int(found[-1]) if found else 0


def start_coordinator(
    processes: Processes,
    *arguments: str,
    name: str = "run",
    environment: Mapping[str, str] | None = None,
) -> LiveCoordinator:
    """Start a coordinator with its folder called ``name`` and wait until it listens."""
    begun = begin_coordinator(processes, *arguments, name=name, environment=environment)
    join = begun.folder / "join.json"

    def listens() -> bool:
        assert begun.process.poll() is None, begun.text()[-3000:]
        return join.exists() and f"coordinator at {json.loads(join.read_bytes())['url']}" in (
            begun.text()
        )

    processes.wait(listens, START_S, "the coordinator listening")
    said = json.loads(join.read_bytes())
    return LiveCoordinator(
        begun.process, begun.log, begun.folder, said["url"], said["token"], said["admin_token"]
    )


def begin_coordinator(
    processes: Processes,
    *arguments: str,
    name: str = "run",
    environment: Mapping[str, str] | None = None,
) -> Live:
    """Start a coordinator that may fail."""
    log = f"{name}.log"
    words = ("run", "--run.folder", name, *QUICK, *arguments)
    process = processes.start(MODULE, *words, log=log, environment=environment)
    return Live(process, processes.folder / log, processes.folder / name)


def start_peer(
    processes: Processes,
    url: str,
    token: str,
    *arguments: str,
    name: str = "peer",
    environment: Mapping[str, str] | None = None,
) -> Live:
    """Start a peer with its folder called ``name``; nothing is waited for."""
    log = f"{name}.log"
    words = ["join", url, "--folder", name, "--name", name, *arguments]
    if token:
        words += ["--token", token]
    process = processes.start(MODULE, *words, log=log, environment=environment)
    return Live(process, processes.folder / log, processes.folder / name)


def wait_steps(processes: Processes, run: LiveCoordinator, steps: int, *alive: Live) -> None:
    """Wait until ``steps`` more steps are trained, while the coordinator and all of these live.

    Raises:
        AssertionError: One of them ended.
        TimeoutError: It took too long.
    """
    goal = run.steps() + steps

    def done() -> bool:
        for each in (run, *alive):
            assert each.process.poll() is None, each.text()[-3000:]
        return run.steps() >= goal

    processes.wait(done, START_S, f"{steps} more steps")
