"""The child process that runs a task: ``python -P -m coordinator.task_worker``.

After each item it says that it lives, at most ten times a second: so the coordinator can bound the
time of one item, however many are in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from coordinator.task_calls import (
    EpisodeCall,
    OpenedReply,
    ScoredReply,
    SetupCall,
    from_call,
    to_opened,
    to_scored,
)
from coordinator.task_desk import TaskDesk
from coordinator.task_port import TaskInfo
from echo2p2p.errors import LocalProtocolError
from echo2p2p.net import child_worker
from echo2p2p.net.child_worker import Method, Report, Stopwatch
from echo2p2p.net.tokenizer import FolderTokenizer
from echo2p2p.tasks.registry import make_task

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")
LIFE_S: Final = 0.1
"""Signs of life come at most so often."""


class Worker:
    """A `TaskDesk` behind the calls of a child process."""

    def __init__(self) -> None:
        self._desk: TaskDesk | None = None

    def start(self, call: SetupCall, _: Report) -> TaskInfo:
        """Make task and tokenizer."""
        task = make_task(call.task, call.options)
        self._desk = TaskDesk(task, FolderTokenizer(Path(call.model_dir)))
        return self._desk.info()

    def open(self, seeds: list[int], report: Report) -> list[OpenedReply]:
        """See `TaskDesk.open`."""
        desk = self._started()
        return _each(lambda seed: to_opened(desk.open([seed])[0]), seeds, report)

    def score(self, episodes: list[EpisodeCall], report: Report) -> list[ScoredReply]:
        """See `TaskDesk.advance`."""
        desk = self._started()
        return _each(lambda call: to_scored(desk.advance(*from_call(call))), episodes, report)

    def _started(self) -> TaskDesk:
        if self._desk is None:
            raise LocalProtocolError("the task worker was not started")
        return self._desk


def _each(
    work: Callable[[ArgumentT], ResultT], items: Iterable[ArgumentT], report: Report
) -> list[ResultT]:
    """Return ``work`` of each item, with signs of life in between."""
    results: list[ResultT] = []
    watch = Stopwatch()
    for item in items:
        results.append(work(item))
        if watch.seconds() > LIFE_S:
            report(len(results))
            watch = Stopwatch()
    return results


def main() -> None:
    """Serve until the coordinator closes the pipe."""
    channel = child_worker.connect()
    worker = Worker()
    child_worker.serve(
        channel,
        {
            "start": Method(SetupCall, worker.start, beats=True),
            "open": Method(list[int], worker.open),
            "score": Method(list[EpisodeCall], worker.score),
        },
    )


if __name__ == "__main__":
    main()
