"""A GGUF file as a Hugging Face folder: ``python -P -m coordinator.learner.gguf FILE FOLDER``.

transformers reads the quantised weights and makes float32 of them, but its model remembers that it
was quantised and refuses to be cast or saved; so the tensors go into a fresh model of the same
configuration. bf16, which is what versions are published in: the first version is then exactly
this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

FORGOTTEN = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "model_type")


def convert(file: Path, folder: Path) -> None:
    """Write weights, configuration, tokenizer and chat template into ``folder``."""
    where = {"gguf_file": file.name, "local_files_only": True}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    plain = read.config.to_dict()
    kind = plain["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in plain.items() if k not in FORGOTTEN})
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(
        {name: tensor.detach().to(torch.bfloat16) for name, tensor in read.state_dict().items()}
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    fresh.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Convert; what goes wrong is the last line of standard error."""
    logging.disable_progress_bar()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
