"""What a run writes down of each step: a line of metrics.jsonl, and TensorBoard's events.

Both are for people: a disk that refuses them must not stop the run. A file that cannot be written
is given up with one event; the steps themselves are safe in the store.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

from coordinator.report import step_line
from coordinator.tensorboard import EventFile
from coordinator.training import StepRecord
from echo2p2p.net.ports import Journal, WallClock

METRICS_FILE: Final = "metrics.jsonl"
EVENTS_FOLDER: Final = "tensorboard"
RECORD_FAILED: Final = "record.failed"


class Recorder:
    """The files of one life of a coordinator.

    Args:
        folder: Of the run.
        clock: Stamps TensorBoard's events.
        journal: Told of a file that is given up.
    """

    def __init__(self, folder: Path, clock: WallClock, journal: Journal) -> None:
        self._folder = folder
        self._clock = clock
        self._journal = journal
        self._metrics: TextIO | None = None
        self._events: EventFile | None = None
        self._newest: int | None = None
        self._gone: set[str] = set()

    def step(self, record: StepRecord, version: int | None) -> None:
        """Write one step down."""
        line = step_line(record, version)
        self._guarded(METRICS_FILE, lambda: self._add_line(json.dumps(line)))
        scalars = {
            name: float(value)
            for name, value in line.items()
            if isinstance(value, int | float) and name != "step"
        }
        self._guarded(EVENTS_FOLDER, lambda: self._add_event(record.step, scalars))
        self._newest = record.step

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._events):
            if file is not None:
                with contextlib.suppress(OSError):  # whatever it is, it was told when it began
                    file.close()

    def _add_line(self, line: str) -> None:
        if self._metrics is None:
            self._metrics = (self._folder / METRICS_FILE).open("a", encoding="utf-8")
        self._metrics.write(line + "\n")
        self._metrics.flush()

    def _add_event(self, step: int, scalars: dict[str, float]) -> None:
        if self._events is not None and self._newest is not None and step <= self._newest:
            self._events.close()  # a rollback: the lost steps must go from the charts
            self._events = None
        if self._events is None:
            self._events = EventFile(self._folder / EVENTS_FOLDER, self._clock, first_step=step)
        self._events.add(step, scalars)

    def _guarded(self, name: str, write: Callable[[], None]) -> None:
        if name in self._gone:
            return
        try:
            write()
        except OSError as error:
            self._gone.add(name)
            self._journal.event(RECORD_FAILED, file=name, cause=str(error))
