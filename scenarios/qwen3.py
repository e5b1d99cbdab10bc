"""Models of the Qwen3 family of any size, without torch: configuration, layout and random weights.

For benchmarks and tests of real engines. The weights mean nothing; they are large enough for every
token to be likely, and the same from the same seed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import numpy as np

from echo2p2p.ids import Digest
from echo2p2p.weights.layout import Layout, plan_layout
from echo2p2p.weights.state import state_digest

DEVIATION: Final = 0.1


@dataclass(frozen=True)
class Qwen3:
    """Dimensions; by default those of the built-in tiny model."""

    layers: int = 3
    hidden: int = 128
    intermediate: int = 384
    heads: int = 4
    key_heads: int = 2
    head: int = 32
    vocabulary: int = 64
    positions: int = 128
    tied: bool = True

    def config(self) -> str:
        """Return ``config.json``."""
        return json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "vocab_size": self.vocabulary,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.key_heads,
                "head_dim": self.head,
                "max_position_embeddings": self.positions,
                "tie_word_embeddings": self.tied,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
        )

    def layout(self) -> Layout:
        """Return the layout of the published state."""
        embedding = (self.vocabulary, self.hidden)
        tied = ("lm_head.weight",) if self.tied else ()
        entries: list[tuple[str, str, tuple[int, ...], tuple[str, ...]]]
        entries = [("model.embed_tokens.weight", "bf16", embedding, tied)]
        query, key = self.heads * self.head, self.key_heads * self.head
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (key, self.hidden),
            "self_attn.v_proj": (key, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "self_attn.q_norm": (self.head,),
            "self_attn.k_norm": (self.head,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        for layer in range(self.layers):
            entries += [
                (f"model.layers.{layer}.{name}.weight", "bf16", shape, ())
                for name, shape in shapes.items()
            ]
        entries.append(("model.norm.weight", "bf16", (self.hidden,), ()))
        if not self.tied:
            entries.append(("lm_head.weight", "bf16", embedding, ()))
        return plan_layout(entries)


def write_weights(view: memoryview, seed: int) -> None:
    """Fill a state of bf16 with normals."""
    values = np.random.default_rng(seed).normal(0, DEVIATION, len(view) // 2)
    view[:] = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def change_weights(layout: Layout, view: memoryview, density: float, seed: int) -> Digest:
    """Move a share of the elements, at least one a tensor, by one unit in the last place.

    Returns the new state's digest.
    """
    bits = np.frombuffer(view, dtype="<u2")
    for number, tensor in enumerate(layout.tensors):
        rng = np.random.default_rng([seed, number])
        count = max(1, round(density * tensor.elements))
        chosen = rng.choice(tensor.elements, count, replace=False)
        bits[tensor.offset // 2 + chosen] ^= 1
    return state_digest(layout, view)
