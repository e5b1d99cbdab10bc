"""A checkpoint folder: a plain Hugging Face model, and what is needed to go on exactly.

``model.safetensors`` holds the fp32 master weights; ``optimizer.pt`` the optimizer and torch's
random state (plain tensors, read back with ``weights_only``); ``position.json`` the step. The
folder is written beside its name, synced file by file, and renamed: it exists whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from echo2p2p.errors import StoreError
from echo2p2p.net.disk_errors import disk_error

FORMAT: Final = 1
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Position:
    """What a checkpoint holds beside the weights."""

    step: int
    optimizer: dict[str, Any]


def write_checkpoint(
    folder: Path,
    model: Any,  # noqa: ANN401 - transformers.PreTrainedModel, which has no types here
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    tokenizer_dir: Path,
) -> None:
    """Write ``folder``; it is durable on return.

    Raises:
        StoreError: It exists already, or the disk refused; there is no half of it then.
    """
    if folder.exists():
        raise StoreError(f"{folder} exists; checkpoints are never overwritten")
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        for name in TOKENIZER_FILES:
            if (tokenizer_dir / name).is_file():
                shutil.copyfile(tokenizer_dir / name, partial / name)
        state = {"optimizer": optimizer.state_dict(), "torch_random": torch.get_rng_state()}
        torch.save(state, partial / "optimizer.pt")
        position = {"format": FORMAT, "step": step}
        (partial / "position.json").write_text(json.dumps(position) + "\n", encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise disk_error(f"write the checkpoint {folder}", error) from error
    except (RuntimeError, SafetensorError) as error:  # their writers' own words for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        cause = " ".join(str(error).split())[:100]
        detail = f"cannot write the checkpoint {folder}: {cause}: free some space"
        raise StoreError(detail) from error


def read_position(folder: Path) -> Position:
    """Return what ``folder`` holds beside the weights, and set torch's random state.

    Raises:
        StoreError: It is no checkpoint of ours, or cannot be read.
    """
    try:
        position = json.loads((folder / "position.json").read_text(encoding="utf-8"))
        if position["format"] == FORMAT:
            state = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
            torch.set_rng_state(state["torch_random"])
            return Position(step=int(position["step"]), optimizer=state["optimizer"])
    except Exception as error:  # torch raises whatever it stumbled on
        raise StoreError(f"{folder} is no checkpoint that can be resumed: {error}") from error
    raise StoreError(f"checkpoint {folder} has the unknown format {position['format']}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
