"""The model's configuration, as the coordinator sent it, without what would load code or files."""

from __future__ import annotations

import json
from typing import Any, Final

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from echo2p2p.errors import EngineError

DROPPED_KEYS: Final = (
    "auto_map",
    "quantization_config",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_name_or_path",
)
"""Keys that make an engine load code, kernels or files by name."""


def plain_config(model_config: str) -> dict[str, Any]:
    """Return the configuration as a mapping; its ``architectures`` are the model type's own.

    Args:
        model_config: Hugging Face ``config.json``.

    Raises:
        EngineError: It is none, or of no causal language model that is known here.
    """
    try:
        plain = json.loads(model_config)
        kind = plain["model_type"]
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    except (ValueError, KeyError, TypeError) as error:
        raise unusable(error) from error
    for key in DROPPED_KEYS:
        plain.pop(key, None)
    return {**plain, "architectures": [architecture]}


def unusable(error: Exception) -> EngineError:
    """Return the error for a configuration that makes no model."""
    return EngineError(f"the model configuration cannot be used: {error}")
