"""A learner in a child process: the real form of `coordinator.learner.base.Learner`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.learner.base import (
    Exported,
    LearnerReady,
    LearnerSetup,
    Progress,
    StepReport,
    TrainBatch,
)
from coordinator.learner.calls import (
    AnswerCall,
    ExportCall,
    ProgressReply,
    to_batch_call,
    to_setup_call,
)
from echo2p2p.errors import LocalProtocolError
from echo2p2p.ids import Step
from echo2p2p.net.child import ChildProcess
from echo2p2p.net.ports import SharedState
from echo2p2p.wire.arrays import from_tokens, to_tokens
from echo2p2p.wire.messages import Array


class TorchLearnerProcess:
    """See `coordinator.learner.base.Learner`.

    Args:
        start_silence_s: `start` has no deadline, but the process must work or read without a
            pause of this length.
        train_timeout_s: For one optimizer step.
        export_timeout_s: For one publish copy.
        save_timeout_s: For one checkpoint.
        log_file: What the learner prints is appended here.
    """

    def __init__(
        self,
        *,
        start_silence_s: float = 600.0,
        train_timeout_s: float = 3600.0,
        export_timeout_s: float = 600.0,
        save_timeout_s: float = 1800.0,
        log_file: Path | None = None,
    ) -> None:
        self.child = ChildProcess("learner", "coordinator.learner.worker", log_file=log_file)
        self._start_silence_s = start_silence_s
        self._train_timeout_s = train_timeout_s
        self._export_timeout_s = export_timeout_s
        self._save_timeout_s = save_timeout_s

    async def start(self, setup: LearnerSetup, progress: Progress) -> LearnerReady:
        """Spawn, build, resume or warm up; see the port."""
        await self.child.start()

        def show(reply: ProgressReply) -> None:
            progress(reply.phase, reply.figures)

        return await self.child.call(
            "start",
            to_setup_call(setup),
            LearnerReady,
            timeout_s=None,
            silence_s=self._start_silence_s,
            progress=show,
            progress_kind=ProgressReply,
        )

    async def train(self, batch: TrainBatch) -> StepReport:
        """Take one optimizer step; see the port."""
        return await self.child.call(
            "train", to_batch_call(batch), StepReport, timeout_s=self._train_timeout_s
        )

    async def answer(
        self, prompts: Sequence[NDArray[np.uint32]], *, tokens_max: int, stop_ids: Sequence[int]
    ) -> list[NDArray[np.uint32]]:
        """Answer prompts; see the port."""
        call = AnswerCall([from_tokens(prompt) for prompt in prompts], tokens_max, list(stop_ids))
        answers = await self.child.call(
            "answer", call, list[Array], timeout_s=self._train_timeout_s
        )
        return [to_tokens(answer) for answer in answers]

    async def export(self, state: SharedState, found: SharedState | None) -> Exported:
        """Write the publish copy; see the port."""
        if not state.path or (found is not None and not found.path):
            raise LocalProtocolError("a learner process needs a shared state in a file")
        call = ExportCall(state.path, "" if found is None else found.path)
        return await self.child.call("export", call, Exported, timeout_s=self._export_timeout_s)

    async def save(self, folder: Path) -> Step:
        """Write a checkpoint; see the port."""
        step = await self.child.call("save", str(folder), int, timeout_s=self._save_timeout_s)
        return Step(step)

    async def close(self) -> None:
        """End it; see the port."""
        await self.child.close()
