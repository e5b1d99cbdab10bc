"""The learner's own answers, for measuring: greedy, with transformers' loop.

Measured by the learner and not by peers: a score that decides about a run must not come from
strangers, and it must be of these weights and no others. It is slow beside an engine, and asked
for twice in a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig


@torch.inference_mode()
def answer(
    model: Any,  # noqa: ANN401 - transformers has no types here
    prompts: Sequence[NDArray[np.uint32]],
    *,
    tokens_max: int,
    stop_ids: Sequence[int],
    rows_max: int,
) -> list[NDArray[np.uint32]]:
    """Return the likeliest answer to each prompt, in their order.

    Args:
        model: A causal language model, in evaluation mode.
        prompts: ``[n] uint32`` each, not empty.
        tokens_max: Of an answer.
        stop_ids: Any of these ends an answer, and is its last token.
        rows_max: Prompts of one batch; bounds memory.
    """
    order = sorted(range(len(prompts)), key=lambda place: prompts[place].size)
    answers: dict[int, NDArray[np.uint32]] = {}
    for start in range(0, len(order), rows_max):
        places = order[start : start + rows_max]
        rows = _greedy(model, [prompts[place] for place in places], tokens_max, stop_ids)
        answers.update(zip(places, rows, strict=True))
    return [answers[place] for place in range(len(prompts))]


def _greedy(
    model: Any,  # noqa: ANN401 - as above
    prompts: Sequence[NDArray[np.uint32]],
    tokens_max: int,
    stop_ids: Sequence[int],
) -> list[NDArray[np.uint32]]:
    width = max(prompt.size for prompt in prompts)
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.size :] = prompt
        mask[row, width - prompt.size :] = 1
    wanted = GenerationConfig(
        do_sample=False,
        max_new_tokens=tokens_max,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
    )
    found = model.generate(
        input_ids=torch.from_numpy(ids).to(model.device),
        attention_mask=torch.from_numpy(mask).to(model.device),
        generation_config=wanted,
    )
    rows = found[:, width:].cpu().numpy().astype(np.uint32)
    return [_to_first_stop(row, stop_ids) for row in rows]


def _to_first_stop(row: NDArray[np.uint32], stop_ids: Sequence[int]) -> NDArray[np.uint32]:
    """Return the row without what was padded behind its end."""
    (ends,) = np.nonzero(np.isin(row, stop_ids))
    return row[: int(ends[0]) + 1] if ends.size else row
