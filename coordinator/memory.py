"""What a model takes of memory, from its configuration: arithmetic, before anything is started.

The learner keeps float32 weights, their gradients and AdamW's two moments, so 16 bytes a parameter;
activations of one micro-batch, which nothing recomputes; and its logits, three times (the logits,
their log-softmax, its gradient), as those of a large vocabulary outweigh a layer. A peer keeps
bf16 weights and the keys and values of the tokens under way.

Only for models like Llama and Qwen3 (grouped attention, gated feed-forward, one head): of others
nothing is said rather than something wrong. Activations are counted tensor by tensor as autograd
keeps them in transformers' code, and a test compares with what it does keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

KNOWN: Final = frozenset({"llama", "qwen2", "qwen3", "mistral"})
PROMPT_TOKENS: Final = 256
"""What is reckoned for a prompt, as nobody knows before."""
MASTER_BYTES: Final = 16
"""A parameter: weight, gradient, and two moments, float32 each."""
FLOAT_BYTES: Final = 4
BF16_BYTES: Final = 2
LOGIT_COPIES: Final = 3
SLACK: Final = 1.1
"""For what an allocator wastes and a framework takes."""


@dataclass(frozen=True)
class Shape:
    """What of a configuration says how large a model is."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    tied: bool
    normed_heads: bool
    """Queries and keys are normed, as in Qwen3."""

    @property
    def parameters(self) -> int:
        """All of them."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head if self.normed_heads else 0)
        layer = attention + 3 * self.hidden * self.inner + norms
        embedding = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embedding + self.layers * layer + self.hidden

    @property
    def activation_bytes(self) -> int:
        """Of one token, as kept for the backward pass; logits aside."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        # Two norms keep input, normalised input and their output; the projections share theirs.
        kept = 6 * self.hidden
        # Queries and keys before and after rotation, values, and what attention gives.
        kept += 3 * queries + 3 * keys
        if self.normed_heads:
            kept += 2 * (queries + keys)
        # Gate, its activation, up, and their product.
        kept += 4 * self.inner
        return FLOAT_BYTES * (self.layers * kept + 3 * self.hidden)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token, in bf16."""
        return 2 * self.layers * self.kv_heads * self.head * BF16_BYTES


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """Return the shape that a ``config.json`` says; ``None`` if it is of no kind that we know."""
    if config.get("model_type") not in KNOWN:
        return None
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    return Shape(
        vocabulary=int(config["vocab_size"]),
        hidden=hidden,
        inner=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head=int(config.get("head_dim") or hidden // heads),
        tied=bool(config.get("tie_word_embeddings", False)),
        normed_heads=config["model_type"] == "qwen3",
    )


def learner_bytes(shape: Shape, *, rows: int, tokens: int) -> int:
    """Return what the learner needs where its model is.

    Args:
        shape: Of the model.
        rows: ``learner.micro_batch``.
        tokens: Of prompt and answer.
    """
    logits = LOGIT_COPIES * FLOAT_BYTES * shape.vocabulary
    batch = rows * tokens * (shape.activation_bytes + logits)
    return int(SLACK * (MASTER_BYTES * shape.parameters + batch))


def peer_bytes(shape: Shape, *, sequences: int, tokens: int) -> int:
    """Return what an engine needs in bf16 for so many sequences under way."""
    weights = BF16_BYTES * shape.parameters
    return int(SLACK * (weights + sequences * tokens * shape.cache_bytes))


def memory_lines(
    config: Mapping[str, Any], *, micro_batch: int, tokens_max: int, samples: int
) -> list[str]:
    """Return what there is to say, a line each; nothing of a model that we do not know."""
    shape = shape_of(config)
    if shape is None:
        return []
    tokens = PROMPT_TOKENS + tokens_max
    learner = learner_bytes(shape, rows=micro_batch, tokens=tokens)
    peer = peer_bytes(shape, sequences=8 * samples, tokens=tokens)
    about = f"of {PROMPT_TOKENS} + {tokens_max} tokens"
    return [
        f"memory: {shape.parameters / 1e9:.2f} G parameters",
        f"memory: learner {_giga(learner)} with {micro_batch} rows {about}",
        f"memory: a peer in bf16 {_giga(peer)} with 8 leases of {samples} samples {about}",
    ]


def _giga(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
