"""The child process that runs a task: ``python -P -m coordinator.task_worker``."""

from __future__ import annotations

from pathlib import Path

from coordinator.model import FolderTokenizer
from coordinator.task_calls import (
    EpisodeCall,
    InfoReply,
    OpenedReply,
    ScoredReply,
    SetupCall,
    from_call,
    to_opened,
    to_scored,
)
from coordinator.task_desk import TaskDesk
from echo2p2p.errors import ConfigError, LocalProtocolError
from echo2p2p.net import child_worker
from echo2p2p.net.child_worker import Method, Report
from echo2p2p.tasks.registry import make_task


class Worker:
    """A `TaskDesk` behind the calls of a child process."""

    def __init__(self) -> None:
        self._desk: TaskDesk | None = None

    def start(self, call: SetupCall, _: Report) -> InfoReply:
        """Make task and tokenizer; a wrong setting is an answer, not a failure."""
        try:
            task = make_task(call.task, call.options)
            self._desk = TaskDesk(task, FolderTokenizer(Path(call.model_dir)))
        except ConfigError as error:
            return InfoReply(config_path=error.path, config_detail=error.detail)
        info = self._desk.info()
        return InfoReply(
            vocab_size=info.vocab_size,
            stop_ids=info.stop_ids,
            turns_max=info.turns_max,
            positions_max=info.positions_max,
        )

    def open(self, seeds: list[int], _: Report) -> list[OpenedReply]:
        """See `TaskDesk.open`."""
        return [to_opened(opening) for opening in self._started().open(seeds)]

    def score(self, episodes: list[EpisodeCall], _: Report) -> list[ScoredReply]:
        """See `TaskDesk.advance`."""
        desk = self._started()
        return [to_scored(desk.advance(*from_call(episode))) for episode in episodes]

    def _started(self) -> TaskDesk:
        if self._desk is None:
            raise LocalProtocolError("the task worker was not started")
        return self._desk


def main() -> None:
    """Serve until the coordinator closes the pipe."""
    channel = child_worker.connect()
    worker = Worker()
    child_worker.serve(
        channel,
        {
            "start": Method(SetupCall, worker.start),
            "open": Method(list[int], worker.open),
            "score": Method(list[EpisodeCall], worker.score),
        },
    )


if __name__ == "__main__":
    main()
