"""GRPO on one torch model: the learner's work, without processes or pipes.

fp32 master weights and AdamW on one device; each step consumes one batch in micro-batches of a
given number of rows, so that memory does not depend on the batch. Rows are right-padded: under a
causal mask padding cannot reach the tokens before it, so no attention mask is built. The model
runs in evaluation mode throughout: the policy that is trained must be the policy that was sampled,
and dropout would make it another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from coordinator.learner.answers import answer
from coordinator.learner.base import (
    Exported,
    LearnerReady,
    LearnerSetup,
    StepReport,
    TrainBatch,
    TrainSample,
    warmed_up,
)
from coordinator.learner.checkpoint import read_position, write_checkpoint
from coordinator.learner.export import Exporter
from coordinator.learner.layout import layout_of
from coordinator.learner.loss import LossSettings, LossSums, token_loss
from coordinator.learner.parity import Parity
from coordinator.learner.rows import pack_rows
from coordinator.learner.warm_start import warm_start
from echo2p2p.errors import ConfigError, LocalProtocolError, StoreError
from echo2p2p.ids import Step
from echo2p2p.net.child_worker import Stopwatch
from echo2p2p.net.memory import map_state
from echo2p2p.net.tokenizer import FolderTokenizer
from echo2p2p.tasks.registry import make_task

SPARE_SHARE: Final = 0.1
"""Of a GPU's memory, left alone: a later batch may be longer than those so far."""

ANSWER_ROWS: Final = 32
"""So many times a step's micro-batch is answered at once: such rows keep their keys and values,
about a fortieth of what a backward pass needs."""

Report = Callable[[str, Mapping[str, float]], None]


class TorchLearner:
    """See `coordinator.learner.base.Learner`; the methods are its calls, blocking.

    Args:
        setup: As in the port.
        report: Signs of life while the model is built and warmed up.

    Raises:
        ConfigError: The model's folder, or the task of the warm start, is of no use.
        StoreError: The checkpoint is.
    """

    def __init__(self, setup: LearnerSetup, report: Report) -> None:
        logging.disable_progress_bar()
        torch.set_num_threads(setup.threads)
        torch.manual_seed(setup.seed)
        self._setup = setup
        self._loss = LossSettings(
            setup.clip_low, setup.clip_high, setup.correction, setup.correction_cap
        )
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = _build(setup).to(self._device).eval()
        report("built", {"parameters": float(self.model.num_parameters())})
        self._layout, tensors = layout_of(self.model)
        self._exporter = Exporter(self._layout, tensors, has_room=self._has_room)
        self._parity = Parity(
            self.model,
            self._layout,
            copies_max=setup.parity_copies,
            rows_max=setup.parity_rows,
        )
        if setup.checkpoint is None and setup.warm_start.steps:
            warm_start(
                self.model,
                make_task(setup.task, setup.task_options),
                FolderTokenizer(setup.model_dir),
                setup.warm_start,
                seed=setup.seed,
                report=report,
            )
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            setup.learning_rate,
            betas=setup.betas,
            weight_decay=setup.weight_decay,
        )
        self._step = self._steps_here = 0
        if setup.checkpoint is not None:
            position = read_position(setup.checkpoint)
            self._optimizer.load_state_dict(position.optimizer)
            self._step = position.step

    def ready(self) -> LearnerReady:
        """Return what the coordinator must know of the model."""
        return LearnerReady(
            step=Step(self._step),
            layout=self._layout.table,
            parameters=int(self.model.num_parameters()),
            device=str(self._device),
        )

    def train(self, batch: TrainBatch) -> StepReport:
        """Take one optimizer step.

        A batch without samples (all advantages were zero) counts as a step and changes nothing:
        there is no gradient, and momentum alone must not move the weights.

        Raises:
            LocalProtocolError: The batch is for another step.
            ArithmeticError: The gradient is not finite; no step was taken.
        """
        if batch.step != self._step:
            raise LocalProtocolError(f"a batch for step {batch.step} at step {self._step}")
        watch = Stopwatch()
        parts: list[LossSums] = []
        norm = 0.0
        rate = self._setup.learning_rate * warmed_up(self._step, self._setup.warmup_steps)
        parity = self._parity.measure(batch.samples)
        if batch.samples:
            self._optimizer.zero_grad()
            rows = sorted(batch.samples, key=lambda sample: sample.prompt.size + sample.tokens.size)
            for start in range(0, len(rows), self._setup.micro_batch):
                part = self._forward(
                    rows[start : start + self._setup.micro_batch], batch.tokens_total
                )
                part.loss.backward()  # type: ignore[no-untyped-call]
                parts.append(part)
            norm = self._apply(rate)
            self._steps_here += 1
        self._step += 1
        return StepReport(
            step=Step(self._step),
            seconds=watch.seconds(),
            metrics={**_metrics(parts), **parity, "gradient_norm": norm, "learning_rate": rate},
        )

    def _forward(self, rows: Sequence[TrainSample], tokens_total: int) -> LossSums:
        packed = pack_rows(rows)
        ids = packed.ids.to(self._device)
        width = packed.mask.shape[1]
        logits = self.model(
            input_ids=ids[:, :-1], logits_to_keep=width, use_cache=False
        ).logits  # fmt: skip
        logprobs = -functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, -width:].flatten(), reduction="none"
        ).view(ids.shape[0], width)
        return token_loss(
            logprobs,
            packed.behaviour.to(self._device),
            packed.advantages.to(self._device),
            packed.mask.to(self._device),
            tokens_total=tokens_total,
            settings=self._loss,
        )

    def answer(
        self, prompts: Sequence[NDArray[np.uint32]], *, tokens_max: int, stop_ids: Sequence[int]
    ) -> list[NDArray[np.uint32]]:
        """Answer prompts greedily; see `coordinator.learner.answers`."""
        return answer(
            self.model,
            prompts,
            tokens_max=tokens_max,
            stop_ids=stop_ids,
            rows_max=ANSWER_ROWS * self._setup.micro_batch,
        )

    def _apply(self, rate: float) -> float:
        """Clip the gradient, step the optimizer, return the norm before the clip."""
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._setup.gradient_norm_max)
        )
        if not isfinite(norm):
            self._optimizer.zero_grad()
            raise ArithmeticError(f"the gradient's norm is {norm}; the step was not taken")
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return norm

    def export(self, path: str, found_path: str = "") -> Exported:
        """Write the bf16 publish copy, and perhaps what changed; see `Exporter.write`."""
        found_bytes = self._exporter.write(path, found_path)
        mapped = map_state(path, self._layout.total_bytes, writable=False)
        self._parity.keep(self._step, torch.frombuffer(mapped, dtype=torch.uint8))
        mapped.close()
        return Exported(Step(self._step), found_bytes)

    def _has_room(self) -> bool:
        """Whether the device has memory for two publish copies that no step will miss.

        What a step takes is known only after one: nothing is taken before.
        """
        if self._device.type != "cuda" or not self._steps_here:
            return False
        total = torch.cuda.get_device_properties(self._device).total_memory
        left = total - torch.cuda.max_memory_reserved(self._device)
        return left > 2 * self._layout.total_bytes + SPARE_SHARE * total

    def save(self, folder: Path) -> Step:
        """Write a checkpoint; see `coordinator.learner.checkpoint`."""
        write_checkpoint(
            folder,
            self.model,
            self._optimizer,
            step=self._step,
            tokenizer_dir=self._setup.model_dir,
        )
        return Step(self._step)


def _build(setup: LearnerSetup) -> Any:  # noqa: ANN401 - transformers has no types here
    """Return the model in float32: its folder's weights, or fresh ones if it has none.

    Raises:
        ConfigError: The model's folder holds no causal language model.
        StoreError: The checkpoint does not.
    """
    folder = setup.checkpoint or setup.model_dir
    try:
        return _load(folder)
    except (torch.OutOfMemoryError, MemoryError):
        raise  # another time there may be room
    except Exception as error:  # transformers and safetensors raise whatever they stumbled on
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if setup.checkpoint is not None:
            raise StoreError(
                f"checkpoint {folder} cannot be loaded ({cause}): move it away to go on from the "
                "one before"
            ) from error
        raise ConfigError(
            "model.path", f"{folder} holds no causal language model ({cause})"
        ) from error


def _load(folder: Path) -> Any:  # noqa: ANN401 - transformers has no types here
    if any(folder.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _metrics(parts: Sequence[LossSums]) -> dict[str, float]:
    tokens = max(1.0, sum(part.tokens for part in parts))
    return {
        "loss": sum(part.loss.item() for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "ratio_mean": sum(part.ratio for part in parts) / tokens if parts else 1.0,
        "clipped_share": sum(part.bounded for part in parts) / tokens,
        "kl_behaviour": sum(part.kl for part in parts) / tokens,
    }
