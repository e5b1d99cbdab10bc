"""A model's folder without torch: where it is, what must be in it, and the built-in tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from coordinator.fetched import MODELS, cache_folder
from echo2p2p.errors import ConfigError
from echo2p2p.net.disk_errors import guard_disk

TINY_QWEN3: Final = "@tiny-qwen3"
"""Name of the built-in model: 0.6 million parameters, characters as tokens, no weights."""

CHARACTERS: Final = "0123456789+-*=?,.:;()[]<>|# abcdefghijklmnopqrstuvwxyz\n"
PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
SPECIAL: Final = ("<PAD>", "<BOS>", "<EOS>", "<UNK>")
"""Upper case: no text of `CHARACTERS` spells one of them."""

_TINY_CONFIG: Final[Mapping[str, object]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

_TINY_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}\n{% endfor %}"
)


def model_folder(spec: str, run_folder: Path) -> Path:
    """Return where the model is that ``model.path`` names.

    Args:
        spec: The setting.
        run_folder: Of the run, which keeps the model that is made on the spot.
    """
    if spec in MODELS:
        return cache_folder(spec)
    return run_folder / "model" if spec.startswith("@") else Path(spec).expanduser()


def prepare_model(spec: str, folder: Path) -> None:
    """Make sure that ``folder`` is a Hugging Face folder as ``spec`` says.

    Args:
        spec: `TINY_QWEN3`, written into ``folder`` (without weights) if it is not there yet; or
            anything else, which must already be there.
        folder: Where the model is, as `model_folder` says.

    Raises:
        ConfigError: No such preset, or the folder is not a model's.
        StoreError: The disk refused.
    """
    if spec == TINY_QWEN3:
        with guard_disk(f"write {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "config.json").exists():
                _write_tiny(folder)
    elif spec in MODELS:
        if not (folder / "config.json").is_file():
            mend = f"run: echo2-coordinator fetch {spec}"
            raise ConfigError("model.path", f"{spec} is not in {folder} yet; {mend}")
    elif spec.startswith("@"):
        known = ", ".join([TINY_QWEN3, *MODELS])
        raise ConfigError("model.path", f"no built-in model {spec!r}; there is: {known}")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError("model.path", f"{folder} has no {name}; give a Hugging Face folder")


def _write_tiny(folder: Path) -> None:
    """Write tokenizer and configuration, the latter last: it marks the folder complete."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIAL[PAD],
            "bos_token": SPECIAL[BOS],
            "eos_token": SPECIAL[EOS],
            "unk_token": SPECIAL[UNKNOWN],
            "clean_up_tokenization_spaces": False,
            "model_max_length": _TINY_CONFIG["max_position_embeddings"],
            "chat_template": _TINY_TEMPLATE,
        },
    )
    _write_json(folder / "config.json", _TINY_CONFIG)


def _write_json(file: Path, value: object) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    fresh.replace(file)
