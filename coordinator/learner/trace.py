"""Makes update traces for the delta benchmark: ``python -P -m coordinator.learner.trace``.

The problem: how small a delta can be depends on how AdamW moves weights between two roundings to
bf16, and no random numbers imitate that well. The idea: a real AdamW run on a small Qwen3 with
fp32 masters, a policy gradient on tokens with Zipf frequencies and random advantages, and the
publish copies of the last two steps, written as flat states.

Two starts: ``bf16``, masters that are exactly bf16 values, as when training begins at a published
checkpoint; ``long-trained``, masters anywhere in their rounding cells, as after many steps. Both
are driven by the gradients of the first, whose weights they have but for the rounding; every
learning rate has gradients of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from coordinator.learner.layout import layout_of
from echo2p2p.errors import LocalProtocolError
from echo2p2p.weights.layout import Layout

STARTS: Final = ("bf16", "long-trained")
STEPS: Final = 10
WARMUP_STEPS: Final = 4
"""Adam's first steps move every weight alike; what is measured is the ordinary step after them."""

_ROWS: Final = 4
_TOKENS: Final = 128
_HEAD: Final = 64


def make_config(parameters: int) -> Qwen3Config:
    """Return a Qwen3 of about ``parameters``: as deep and wide as a small one of its family."""
    best: tuple[int, Qwen3Config] | None = None
    for width in range(64, 1025, 64):
        layers = max(2, width // 64)
        heads = 2 * max(1, width // (2 * _HEAD))
        vocabulary = 64 * width
        attention = width * _HEAD * (2 * heads + heads)
        total = vocabulary * width + layers * (attention + 9 * width * width)
        config = Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=_HEAD,
            tie_word_embeddings=True,
            initializer_range=0.02,
        )
        if best is None or abs(total - parameters) < best[0]:
            best = (abs(total - parameters), config)
    assert best is not None
    return best[1]


class Trace:
    """AdamW at one learning rate, from each of `STARTS`."""

    def __init__(self, config: Qwen3Config, learning_rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self._model = Qwen3ForCausalLM(config).eval()
        self._learning_rate = learning_rate
        self._draws = torch.Generator().manual_seed(seed)
        self.layout, self._shown = layout_of(self._model)
        values = []
        for name, weight in self._model.named_parameters():
            if name.endswith("norm.weight"):
                noise = torch.randn(weight.shape, generator=self._draws)
                weight.data = torch.exp(0.3 * noise)
            values.append(weight.detach().to(torch.bfloat16).float())
        self._masters = {
            "bf16": [torch.nn.Parameter(each.clone()) for each in values],
            "long-trained": [
                torch.nn.Parameter(_anywhere_in_its_cell(each, self._draws)) for each in values
            ],
        }
        self._optimizers = [
            torch.optim.AdamW(masters, learning_rate, weight_decay=0.0)
            for masters in self._masters.values()
        ]

    def last_steps(self) -> dict[str, tuple[bytes, bytes]]:
        """Return by start the flat states before and after the last of `STEPS` steps."""
        vocabulary = self._model.config.vocab_size
        frequencies = 1.0 / torch.arange(1, vocabulary + 1).float() ** 0.8
        before: dict[str, bytes] = {}
        for step in range(1, STEPS + 1):
            if step == STEPS:
                before = {start: self._state(start) for start in STARTS}
            self._show("bf16")
            tokens = torch.multinomial(
                frequencies, _ROWS * _TOKENS, replacement=True, generator=self._draws
            ).view(_ROWS, _TOKENS)
            self._gradient(tokens)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self._learning_rate * min(1.0, step / WARMUP_STEPS)
                optimizer.step()
        return {start: (before[start], self._state(start)) for start in STARTS}

    def _show(self, start: str) -> None:
        """Give the model the bf16 publish copy: what the policy gradient is taken at."""
        with torch.no_grad():
            for shown, master in zip(self._model.parameters(), self._masters[start], strict=True):
                shown.copy_(master.to(torch.bfloat16))

    def _gradient(self, tokens: Tensor) -> None:
        advantages = torch.randn(_ROWS, generator=self._draws)
        advantages = (advantages - advantages.mean()) / advantages.std()
        self._model.zero_grad()
        logits = self._model(tokens[:, :-1]).logits
        chosen = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
        (-(advantages[:, None] * chosen).mean()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for masters in self._masters.values():
            for shown, master in zip(self._model.parameters(), masters, strict=True):
                master.grad = shown.grad

    def _state(self, start: str) -> bytes:
        self._show(start)
        flat = bytearray(self.layout.total_bytes)
        whole = torch.frombuffer(flat, dtype=torch.uint8)
        for entry in self.layout.tensors:
            bits = self._shown[entry.name].detach().reshape(-1).to(torch.bfloat16)
            whole[entry.offset : entry.offset + entry.bytes].copy_(bits.view(torch.uint8))
        return bytes(flat)


def _anywhere_in_its_cell(values: Tensor, draws: torch.Generator) -> Tensor:
    """Add a residual of up to half a unit in the last place of bf16 (8 significant bits)."""
    _, exponents = torch.frexp(values)
    ulp = torch.ldexp(torch.ones_like(values), exponents - 8)
    return values + (torch.rand(values.shape, generator=draws) - 0.5) * ulp


def write_traces(folder: Path, parameters: int, learning_rates: list[float], threads: int) -> None:
    """Write ``layout.json``, and for each run ``LR-START.old`` and ``.new``, into ``folder``."""
    torch.set_num_threads(threads)
    config = make_config(parameters)
    layout: Layout | None = None
    for learning_rate in learning_rates:
        trace = Trace(config, learning_rate, seed=1)
        layout = trace.layout
        for start, (old, new) in trace.last_steps().items():
            name = f"{learning_rate:g}-{start}"
            (folder / f"{name}.old").write_bytes(old)
            (folder / f"{name}.new").write_bytes(new)
            sys.stdout.write(json.dumps({"made": name, "bytes": len(new)}) + "\n")
            sys.stdout.flush()
    if layout is None:
        raise LocalProtocolError("a trace needs a learning rate")
    (folder / "layout.json").write_bytes(msgspec.json.encode(layout.table))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--lr", type=float, nargs="+", required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    write_traces(arguments.folder, arguments.params, arguments.lr, arguments.threads)


if __name__ == "__main__":
    main()
