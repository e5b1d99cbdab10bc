"""What the benchmark and its plain vLLM (`peer.engine.vllm_plain`) say to each other."""

from __future__ import annotations

import msgspec

from peer.engine.base import EngineSetup


class PlainSetup(msgspec.Struct, frozen=True):
    """What it is made with."""

    folder: str
    """A Hugging Face folder with weights."""
    setup: EngineSetup


class PlainBatch(msgspec.Struct, frozen=True):
    """Prompts to be answered."""

    prompts: list[list[int]]
    samples: int
    tokens: int


class PlainReply(msgspec.Struct, frozen=True):
    """What came of it."""

    tokens: int
    seconds: float
