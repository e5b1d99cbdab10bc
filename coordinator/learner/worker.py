"""The learner's child process: ``python -P -m coordinator.learner.worker``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.learner.base import Exported, LearnerReady, StepReport
from coordinator.learner.calls import (
    AnswerCall,
    BatchCall,
    ExportCall,
    ProgressReply,
    from_batch_call,
    from_setup_call,
)
from echo2p2p.errors import LocalProtocolError
from echo2p2p.net import child_worker
from echo2p2p.net.child_worker import Method, Report
from echo2p2p.wire.arrays import from_tokens, to_tokens
from echo2p2p.wire.messages import Array

if TYPE_CHECKING:
    from coordinator.learner.torch_learner import TorchLearner


class Worker:
    """A `TorchLearner` behind the calls of a child process."""

    def __init__(self) -> None:
        self._learner: TorchLearner | None = None

    def start(self, plain: dict[str, Any], report: Report) -> LearnerReady:
        """Build the learner; torch is imported only now, under the watchdog's eyes."""

        def progress(phase: str, figures: Mapping[str, float]) -> None:
            report(ProgressReply(phase, dict(figures)))

        progress("importing", {})
        from coordinator.learner.torch_learner import TorchLearner

        progress("building", {})
        self._learner = TorchLearner(from_setup_call(plain), progress)
        return self._learner.ready()

    def train(self, call: BatchCall, _: Report) -> StepReport:
        """See `TorchLearner.train`."""
        return self._started().train(from_batch_call(call))

    def answer(self, call: AnswerCall, _: Report) -> list[Array]:
        """See `TorchLearner.answer`."""
        prompts = [to_tokens(prompt) for prompt in call.prompts]
        answers = self._started().answer(
            prompts, tokens_max=call.tokens_max, stop_ids=call.stop_ids
        )
        return [from_tokens(answer) for answer in answers]

    def export(self, call: ExportCall, _: Report) -> Exported:
        """See `TorchLearner.export`."""
        return self._started().export(call.path, call.found_path)

    def save(self, folder: str, _: Report) -> int:
        """See `TorchLearner.save`."""
        return self._started().save(Path(folder))

    def _started(self) -> TorchLearner:
        if self._learner is None:
            raise LocalProtocolError("the learner was not started")
        return self._learner


def main() -> None:
    """Serve until the coordinator closes the pipe."""
    channel = child_worker.connect()
    worker = Worker()
    child_worker.serve(
        channel,
        {
            "start": Method(dict[str, Any], worker.start, beats=True),
            "train": Method(BatchCall, worker.train),
            "answer": Method(AnswerCall, worker.answer),
            "export": Method(ExportCall, worker.export),
            "save": Method(str, worker.save),
        },
    )


if __name__ == "__main__":
    main()
