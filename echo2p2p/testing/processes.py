"""Real processes in tests: start them under a mark, find all that carry it, leave none behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time  # noqa: TID251 real processes need real time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

MARK: Final = "ECHO2_TEST_MARK"
POLL_S: Final = 0.1


def processes_with(word: str) -> list[int]:
    """Return the ids of all processes that have ``word`` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


class Processes:
    """All processes of one test, children of children included, known by their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()

    def start(
        self, module: str, *arguments: str, log: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start ``python -P -m module`` in the folder; its output goes to file ``log``."""
        with (self.folder / log).open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 our own modules
                [sys.executable, "-P", "-m", module, *arguments],
                cwd=self.folder,
                env={**os.environ, **(environment or {}), MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def alive(self, *words: str) -> list[int]:
        """Return the ids of living marked processes whose command line has all ``words``."""
        return sorted(self._find(words))

    def _find(self, words: tuple[str, ...]) -> Iterator[int]:
        mark = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                marked = mark in (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it ended while we looked, or is not ours
                continue
            if marked and line and all(word in line for word in words):
                yield int(entry.name)

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until ``condition()``.

        Raises:
            TimeoutError: With the end of each log.
        """
        end_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end_s:
                tails = {p.name: p.read_text(errors="replace")[-1500:] for p in self._logs()}
                raise TimeoutError(f"{what} did not happen within {timeout_s} s: {tails}")
            time.sleep(POLL_S)

    def wait_access(self, run: str, timeout_s: float = 60) -> dict[str, str]:
        """Wait until the coordinator of the run in this folder listens; return its ``join.json``.

        Raises:
            TimeoutError: As `wait`.
        """
        join = self.folder / run / "join.json"
        self.wait(join.exists, timeout_s, "the coordinator listening")
        access: dict[str, str] = json.loads(join.read_bytes())
        return access

    def _logs(self) -> list[Path]:
        return sorted(self.folder.glob("**/*.log"))
