"""The port of an inference engine. Real engines run in a child process; the fake runs inline.

The caller owns the flat state (a `SharedState`) and must not change it while `load` runs. Calls
are made one at a time, except `close` and `interrupt`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from echo2p2p.ids import Digest, Version
from echo2p2p.net.ports import SharedState
from echo2p2p.weights.touched import Window
from echo2p2p.wire.messages import LayoutTable, Lease, Sample
from peer.touched import Touched

GENERATE_TIMEOUT_S: Final = 1800.0
"""For whoever knows no better."""


CACHE_BYTES_CPU: Final = 512 << 20
"""For vLLM's keys and values on a CPU, where it would take nine tenths of the machine."""

Between = Callable[[], Awaitable[None]]
"""What is done while a batch stands still."""
Option = bool | int | float | str


@dataclass(frozen=True)
class VllmSetup:
    """What only vLLM is told; the names are vLLM's own."""

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    cache_bytes: int | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    """Any other argument of its engine, by name."""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine needs once, before any weights."""

    layout: LayoutTable
    model_config: str
    """Hugging Face ``config.json``."""
    threads: int = 1
    dtype: str = "float32"
    """What the engine computes in; weights travel as they are in the layout. ``auto``: bfloat16
    for vLLM on a GPU, else float32."""
    vllm: VllmSetup = VllmSetup()
    in_flight: bool = False
    """A version that comes while a batch runs is loaded between two of its tokens, not after it."""


@dataclass(frozen=True)
class EngineInfo:
    """What a started engine says of itself."""

    kind: str
    device: str
    dtype: str
    memory_bytes: int
    """Of the process; on a GPU, of the GPU."""
    model: str = ""
    """The model's class."""
    tokens_per_s: float = 0.0
    """Measured in the start, with weights of no meaning; 0: not measured."""


@dataclass(frozen=True)
class LoadReport:
    """Weights are in place, and not proved yet."""

    version: Version
    seconds: float
    sparse: bool = False
    """Only what was touched was written; the rest is what it was before."""


@dataclass(frozen=True)
class Selection:
    """What a proof looks at after a sparse load."""

    touched: Touched
    window: Window


@dataclass(frozen=True)
class Generated:
    """Answers to one lease, aligned with the lease's seeds."""

    lease_id: str
    samples: tuple[Sample, ...]
    """Version labels are what the engine itself reports, at start and at end."""
    seconds: float
    """This lease's share of the engine's time."""
    refused: str = ""
    """Why this engine cannot answer this lease, in one line; there are no samples then."""


@dataclass(frozen=True)
class Grown:
    """What a sample has grown by since the engine last told; put together it is the sample."""

    lease: int
    """Its lease's place in the call."""
    sample: int
    """Its place in the lease."""
    version: Version
    tokens: list[int]
    logprobs: list[float]


Heard = Callable[[Sequence[Grown]], None]
"""Told how samples grow while a batch runs; returns at once."""


class Engine(Protocol):
    """One model that generates; its weights change under it."""

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Bring the engine up; may take minutes.

        Raises:
            EngineError: It did not come up; the message ends with the child's last words.
            ConfigError: It cannot come up with these settings, however often it is tried.
        """
        ...

    async def load(
        self, version: Version, state: SharedState, touched: Touched | None = None
    ) -> LoadReport:
        """Read the flat state into the engine and label it ``version``.

        Args:
            version: The state's.
            state: All of it.
            touched: Elements that differ from a base. An engine that has loaded this base writes
                only these; any other loads everything. The report says which it was.

        Raises:
            EngineError: The engine is gone or refused the weights.
        """
        ...

    async def prove(self, selection: Selection | None = None) -> Digest:
        """Return the digest of the tensors that the kernels really use, read back.

        Of all of them it is the state digest, which the caller compares with the manifest's
        ``result_digest``. After a sparse load the caller may ask for a selection, and compares with
        what it makes of its own state (`digest_selected`). No work may be taken for a version
        before they are equal.

        Raises:
            EngineError: The engine is gone.
        """
        ...

    async def generate(
        self,
        leases: list[Lease],
        *,
        timeout_s: float = GENERATE_TIMEOUT_S,
        between: Between | None = None,
        heard: Heard | None = None,
    ) -> list[Generated]:
        """Answer all leases as one batch, in their order.

        ``heard`` is told of what is sampled, every few tokens; not of given tokens that are scored.

        When it is interrupted it stops after a token of each sample and awaits ``between``, which
        may `load` and `prove`, and goes on with what is loaded then: what came before a token was
        computed anew with the weights that this token is sampled with, and its log-prob is theirs.

        A lease that this model cannot answer (a prompt longer than its context, tokens that it
        does not have) is refused by itself; the others are answered.

        Raises:
            EngineError: The engine is gone or took longer than ``timeout_s``; the leases are lost.
        """
        ...

    def interrupt(self) -> None:
        """Let a batch that is generating stop for its ``between``; returns at once.

        A batch that is through before that need not stop; without one this does nothing.
        """
        ...

    async def close(self) -> None:
        """End it, within seconds, whatever it is doing. Idempotent."""
        ...
