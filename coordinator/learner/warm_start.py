"""Supervised steps on a task's demonstrations: gives a model without weights something to explore.

Reinforcement learns nothing from a model that never succeeds by chance. A warm start brings it to
where it succeeds sometimes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from coordinator.learner.base import WarmStart, warmed_up
from echo2p2p.errors import ConfigError
from echo2p2p.net.tokenizer import FolderTokenizer
from echo2p2p.tasks.base import Prompt, Task

REPORT_STEPS: Final = 5
_IGNORED: Final = -100


def warm_start(
    model: nn.Module,
    task: Task,
    tokenizer: FolderTokenizer,
    settings: WarmStart,
    *,
    seed: int,
    report: Callable[[str, Mapping[str, float]], None],
) -> None:
    """Train ``model`` in place; the optimizer's state is thrown away.

    Args:
        model: A causal language model in float32.
        task: Must have demonstrations.
        tokenizer: The model's.
        settings: Steps, batch, learning rate.
        seed: Of the demonstrations.
        report: Called with ``"warm_start"``, the step and the loss, every few steps.

    Raises:
        ConfigError: The task has no demonstrations.
    """
    rng = random.Random(seed)  # noqa: S311 - demonstrations, not secrets
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=0.0)
    for step in range(settings.steps):
        pairs = task.demonstrations(rng, settings.batch)
        if not pairs:
            raise ConfigError("learner.warm_start.steps", f"{task.name} has no demonstrations")
        ids, labels = (part.to(device) for part in _tensors(pairs, tokenizer))
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(
            logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
        )
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * warmed_up(step, settings.warmup_steps)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % REPORT_STEPS == 0 or step + 1 == settings.steps:
            report("warm_start", {"step": float(step + 1), "loss": loss.item()})
    optimizer.zero_grad()


def _tensors(
    pairs: Sequence[tuple[Prompt, str]], tokenizer: FolderTokenizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, ``[rows, n] int64`` both, right-padded; prompts are not learnt."""
    rows = []
    for prompt, answer in pairs:
        asked = tokenizer.encode(prompt)
        said = [*tokenizer.encode_answer(answer), tokenizer.stop_ids[0]]
        rows.append((asked, said))
    width = max(len(asked) + len(said) for asked, said in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full_like(ids, _IGNORED)
    for row, (asked, said) in enumerate(rows):
        end = len(asked) + len(said)
        ids[row, :end] = torch.tensor(asked + said)
        labels[row, len(asked) : end] = torch.tensor(said)
    return ids, labels
