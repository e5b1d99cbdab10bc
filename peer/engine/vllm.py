"""Inference with vLLM: its scheduler, its kernels, and weights that change under it.

vLLM gets no checkpoint: it is built from the configuration that the coordinator sent, with weights
of no meaning, and each version is copied from the shared state into its live, fused parameters
(`peer.engine.vllm_worker`). `VllmEngine.prove` reads these back under their Hugging Face names.

vLLM runs inside this process, which is a child already; only under tensor parallelism does it make
processes of its own. Each sample is a request with its own seed. The samples of a lease share the
blocks of their prompt through vLLM's prefix cache, which is emptied at each load, so that versions
never mix in it: requests that run then compute their keys and values anew, and vLLM says which
version each of their tokens was sampled with.

Log-probs are of the distribution that was drawn from, after temperature, top-k and top-p. Given
tokens are scored by one request a token that asks for this token's log-prob, because vLLM scores
prompts before the sampling settings are applied.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch

from echo2p2p.errors import ConfigError, EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.net.child_worker import Stopwatch, one_line
from echo2p2p.net.memory import map_state
from echo2p2p.net.process_memory import tree_memory
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.touched import selection_bytes
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_logprobs, from_tokens, to_tokens
from echo2p2p.wire.messages import Lease, Sample, Span
from peer.engine import trial
from peer.engine.base import (
    CACHE_BYTES_CPU,
    EngineInfo,
    EngineSetup,
    Generated,
    Grown,
    LoadReport,
    Option,
)
from peer.engine.batches import Answering, Labels, finish
from peer.engine.calls import EVERYTHING, ProveCall, TouchedFile, parts_of, proof_of
from peer.engine.model_config import plain_config
from peer.engine.refusal import refusal_of

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set before vLLM is imported: in this process, nothing told to its makers, no address looked up
outside, and no core taken for itself alone."""

OURS: Final[dict[str, Option]] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "trust_remote_code": False,
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "worker_extension_cls": "peer.engine.vllm_worker.WeightsExtension",
    "seed": 0,
}
"""What makes samples honest and weights changeable; the owner of the machine has no say in it."""

REFUSED_OPTIONS: Final = frozenset(
    {*OURS, "model", "tokenizer", "dtype", "quantization", "speculative_config", "hf_overrides"}
    | {"hf_config_path", "config_format", "model_impl", "enable_lora", "pipeline_parallel_size"}
    | {"data_parallel_size", "weight_transfer_config", "logits_processors", "cpu_offload_gb"}
    | {"enable_sleep_mode", "runner", "convert", "override_generation_config"}
    | {"kv_offloading_size", "kv_offloading_backend", "kv_transfer_config"}
    | {"spec_method", "spec_model", "spec_tokens"}
)

ENDS: Final = frozenset({"stop", "length"})
DTYPES: Final = frozenset({"auto", "float32", "bfloat16", "float16"})
BLOCK_TOKENS_CPU: Final = 32
"""A prefix is shared in whole blocks: the least that vLLM takes on CPUs; its default is 128."""
TEMPERATURE_MIN: Final = 0.01
"""Below it vLLM samples at this temperature instead."""


class VllmEngine:
    """See `peer.engine.base.Engine`; the methods are its calls, blocking.

    Args:
        setup: As in the port.
        phase: Told what the start is at.

    Raises:
        ConfigError: vLLM is not there, or cannot be used with these settings.
        EngineError: The configuration makes no causal language model, or the layout is not its.
    """

    def __init__(self, setup: EngineSetup, phase: Callable[[str], None]) -> None:
        if setup.dtype not in DTYPES:
            raise ConfigError(
                "engine.dtype", f"{setup.dtype!r} is none of {', '.join(sorted(DTYPES))}"
            )
        self._setup = setup
        self._layout = Layout.from_table(setup.layout)
        plain = plain_config(setup.model_config)
        os.environ.update(ENVIRONMENT)
        os.environ["OMP_NUM_THREADS"] = str(setup.threads)  # of ranks in processes of their own
        torch.set_num_threads(setup.threads)
        vllm = import_vllm()
        self._sampling_params: Callable[..., Any] = vllm.SamplingParams
        self._output_kinds = vllm.sampling_params.RequestOutputKind
        self._gpu = not vllm.platforms.current_platform.is_cpu()
        self._dtype = setup.dtype if setup.dtype != "auto" else _usual_dtype(gpu=self._gpu)
        phase("building the model; on a GPU compiling and capturing graphs may take minutes")
        with tempfile.TemporaryDirectory(prefix="echo2p2p-vllm-") as folder:
            Path(folder, "config.json").write_text(json.dumps(plain), encoding="utf-8")
            self._llm = _build(vllm, self._arguments(folder))
        config = self._llm.llm_engine.vllm_config
        self._positions = int(config.model_config.max_model_len)
        self._vocabulary = int(config.model_config.hf_text_config.vocab_size)
        self._ranks = int(config.parallel_config.tensor_parallel_size)
        self._model = str(plain["architectures"][0])
        self._check_layout()
        phase("generating for a trial")
        self._loads = 0
        self._version: Version | None = None
        self._set_label(trial.VERSION)
        self._tokens_per_s = trial.measure_tokens_per_s(self.generate)
        self._version = None

    def _arguments(self, folder: str) -> dict[str, Any]:
        """Return what vLLM's engine is made with.

        Raises:
            ConfigError: An option that is not the owner's to choose.
        """
        chosen = self._setup.vllm
        refused = REFUSED_OPTIONS | ({"async_scheduling"} if self._setup.in_flight else set())
        if ours := refused & chosen.options.keys():
            raise ConfigError(
                f"engine.vllm.options.{min(ours)}", "is not to be chosen: leave it out"
            )
        usual: dict[str, Any] = {
            "tensor_parallel_size": chosen.tensor_parallel_size,
            "gpu_memory_utilization": chosen.gpu_memory_utilization,
            "max_model_len": chosen.max_model_len,
            "kv_cache_memory_bytes": chosen.cache_bytes,
        }
        if not self._gpu:
            usual |= {"enforce_eager": True, "block_size": BLOCK_TOKENS_CPU}
            usual["kv_cache_memory_bytes"] = chosen.cache_bytes or CACHE_BYTES_CPU
        if self._setup.in_flight:
            usual["async_scheduling"] = False  # or a step would be under way between two steps
        return {**usual, **chosen.options, **OURS, "model": folder, "dtype": self._dtype}

    def _check_layout(self) -> None:
        """Refuse a layout that does not name every tensor of the model."""
        [first, *_] = self._llm.collective_rpc(
            "echo_open", args=(codec.encode(self._setup.layout),)
        )
        held = {name: tuple(shape) for name, shape in first}
        wanted = {name: s for s in self._setup.layout.tensors for name in (s.name, *s.tied)}
        if odd := held.keys() ^ wanted.keys():
            raise EngineError(f"the layout is not this model's: {min(odd)} is only in one of them")
        for name, spec in wanted.items():
            if self._ranks == 1 and held[name] != tuple(spec.shape):
                raise EngineError(
                    f"the layout is not this model's: {name} has shape {list(held[name])}, "
                    f"not {spec.shape}"
                )

    def info(self) -> EngineInfo:
        """Return what the engine says of itself."""
        on_gpu = sum(self._llm.collective_rpc("echo_memory_bytes"))
        return EngineInfo(
            kind="vllm",
            device="cuda" if self._gpu else "cpu",
            dtype=self._dtype,
            memory_bytes=on_gpu or tree_memory(os.getpid()).resident_bytes,
            model=self._model,
            tokens_per_s=self._tokens_per_s,
        )

    # --- weights ------------------------------------------------------------------------------

    def load(self, version: Version, path: str, touched: TouchedFile | None = None) -> LoadReport:
        """Copy the shared state, or what was touched of it, into the live parameters."""
        watch = Stopwatch()
        sparse = touched is not None and touched.base == self._version
        self._version = None
        if sparse:
            arguments = (path, msgspec.msgpack.encode(touched))
            self._llm.collective_rpc("echo_load_touched", args=arguments)
        else:
            self._llm.collective_rpc("echo_load", args=(path,))
        # Running requests compute their keys and values anew, from what is loaded now.
        if not self._llm.reset_prefix_cache(
            reset_running_requests=self._setup.in_flight, reset_connector=True
        ):
            raise EngineError("vLLM keeps prompts of the last version: a request still runs")
        self._set_label(version)
        self._loads += 1
        return LoadReport(version=version, seconds=watch.seconds(), sparse=sparse)

    def prove(self, call: ProveCall = EVERYTHING) -> Digest:
        """Return the digest of what the kernels use, read back from every rank."""
        self._label()
        size = selection_bytes(self._layout, parts_of(self._layout, call))
        descriptor = os.memfd_create("read-back")
        try:
            os.ftruncate(descriptor, size)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            for rank in range(self._ranks):
                arguments = (path, rank, msgspec.msgpack.encode(call))
                self._llm.collective_rpc("echo_read_back", args=arguments)
            bits = map_state(path, size, writable=False)
            digest = proof_of(self._layout, call, memoryview(bits))
            bits.close()
        finally:
            os.close(descriptor)
        return digest

    def _set_label(self, version: Version) -> None:
        """Label what is loaded, and let vLLM label each token."""
        self._llm.llm_engine.set_weight_version(str(version))
        self._version = version

    def _label(self) -> Version:
        if self._version is None:
            raise EngineError("the engine has no weights")
        return self._version

    # --- generation ---------------------------------------------------------------------------

    def generate(self, leases: Sequence[Lease]) -> list[Generated]:
        """Answer all leases as one batch, in their order; see the port.

        Raises:
            EngineError: There are no weights, or vLLM gave a request up.
        """
        return finish(self.begin(leases))

    def begin(self, leases: Sequence[Lease], *, heard: bool = False) -> Answering:
        """Answer leases, one of vLLM's steps after the other.

        Raises:
            EngineError: There are no weights, or vLLM gave a request up.
        """
        watch = Stopwatch()
        self._label()
        refusals = [self._refusal(lease) for lease in leases]
        answers: list[tuple[Sample, ...]] = [()] * len(leases)
        drawn = [
            (place, number)
            for place, lease in enumerate(leases)
            if not refusals[place] and lease.forced is None
            for number in range(len(lease.seeds))
        ]
        outputs = yield from self._ask(
            [_drawing(leases[place], leases[place].seeds[number]) for place, number in drawn],
            drawn if heard else None,
        )
        for (place, _), output in zip(drawn, outputs, strict=True):
            answers[place] += (_to_sample(leases[place], output),)
        for place, lease in enumerate(leases):
            if not refusals[place] and lease.forced is not None:
                sample = yield from self._score(lease)
                answers[place] = (sample,) * lease.samples
        total = max(1, sum(s.tokens.length for answer in answers for s in answer))
        seconds = watch.seconds()
        return [
            Generated(
                lease_id=lease.lease_id,
                samples=answer,
                seconds=seconds * sum(s.tokens.length for s in answer) / total,
                refused=refusal,
            )
            for lease, answer, refusal in zip(leases, answers, refusals, strict=True)
        ]

    def _refusal(self, lease: Lease) -> str:
        """Return why the lease cannot be answered, empty if it can."""
        if 0 < lease.sampling.temperature < TEMPERATURE_MIN:
            return f"has temperature {lease.sampling.temperature}; vLLM's least is 0.01"
        return refusal_of(lease, to_tokens(lease.prompt), self._positions, self._vocabulary)

    def _ask(
        self,
        requests: Sequence[tuple[list[int], dict[str, Any]]],
        places: Sequence[tuple[int, int]] | None = None,
    ) -> Generator[Sequence[Grown], None, list[Any]]:
        """Return vLLM's outputs, one a request, in order; each turn is one of vLLM's steps.

        ``places``: each request's lease and sample, to be told how they grow.

        Raises:
            EngineError: vLLM gave one up.
        """
        engine, done = self._llm.llm_engine, {}
        kinds = self._output_kinds
        usual: dict[str, Any] = {
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": kinds.CUMULATIVE if places else kinds.FINAL_ONLY,
        }
        for number, (prompt, settings) in enumerate(requests):
            params = self._sampling_params(**{**usual, **settings})
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        told = [0] * len(requests)
        while engine.has_unfinished_requests():
            grown: list[Grown] = []
            for answer in engine.step():
                output, number = answer.outputs[0], int(answer.request_id)
                if answer.finished:
                    done[answer.request_id] = output
                if places is not None and len(output.token_ids) > told[number]:
                    grown.append(self._grown(places[number], output, told[number]))
                    told[number] = len(output.token_ids)
            yield grown
        outputs = [done.get(str(number)) for number in range(len(requests))]
        for output in outputs:
            if output is None or output.finish_reason not in ENDS or not output.token_ids:
                raise EngineError(f"vLLM gave a request up: {getattr(output, 'finish_reason', '')}")
        return outputs

    def _grown(self, place: tuple[int, int], output: Any, told: int) -> Grown:  # noqa: ANN401
        tokens, logprobs = _sampled(output, told)
        return Grown(*place, self._label(), tokens, logprobs)

    def _score(self, lease: Lease) -> Generator[Sequence[Grown], None, Sample]:
        """Return given tokens with their log-probs; scored again if the weights change meanwhile.

        Raises:
            EngineError: As `_ask`.
        """
        assert lease.forced is not None
        prompt, forced = to_tokens(lease.prompt).tolist(), to_tokens(lease.forced).tolist()
        settings = _settings(lease) | {"max_tokens": 1, "seed": 0, "logprobs": 1}
        requests = [
            (prompt + forced[:place], {**settings, "logprob_token_ids": [token]})
            for place, token in enumerate(forced)
        ]
        loads = -1
        while loads != self._loads:
            loads = self._loads
            outputs = yield from self._ask(requests)
        values = [
            output.logprobs[0][token].logprob for token, output in zip(forced, outputs, strict=True)
        ]
        labels = Labels()
        labels.note(self._label(), 0)
        return _sample(lease, forced, values, labels.spans(len(forced)))


def _drawing(lease: Lease, seed: int) -> tuple[list[int], dict[str, Any]]:
    settings = _settings(lease) | {"max_tokens": lease.tokens_max, "seed": seed}
    return to_tokens(lease.prompt).tolist(), settings | {"flat_logprobs": True}


def _settings(lease: Lease) -> dict[str, Any]:
    return {
        "temperature": lease.sampling.temperature,
        "top_p": min(1.0, lease.sampling.top_p),
        "top_k": lease.sampling.top_k,
        "stop_token_ids": list(lease.stop_ids),
    }


def _to_sample(lease: Lease, output: Any) -> Sample:  # noqa: ANN401 - vLLM's own
    tokens, logprobs = _sampled(output)
    labels = Labels()
    for span in output.weight_versions or ():
        labels.note(Version(int(span.version)), span.start)
    return _sample(lease, tokens, logprobs, labels.spans(len(tokens)))


def _sampled(output: Any, start: int = 0) -> tuple[list[int], list[float]]:  # noqa: ANN401 - vLLM's own
    """Return tokens from ``start`` on and their log-probs.

    Raises:
        EngineError: They are not of each other.
    """
    tokens = list(output.token_ids[start:])
    flat = output.logprobs
    # The sampled token's comes first of those at its position.
    starts = flat.start_indices[start:]
    if len(starts) != len(tokens) or [flat.token_ids[at] for at in starts] != tokens:
        raise EngineError("vLLM's log-probs are of other tokens than it sampled")
    return tokens, [flat.logprobs[at] for at in starts]


def _sample(lease: Lease, tokens: list[int], logprobs: list[float], spans: list[Span]) -> Sample:
    finish: Literal["stop", "length"] = "stop" if tokens[-1] in lease.stop_ids else "length"
    return Sample(
        tokens=from_tokens(tokens),
        logprobs=from_logprobs(logprobs),
        spans=spans,
        finish=finish,
    )


def _usual_dtype(*, gpu: bool) -> str:
    return "bfloat16" if gpu else "float32"


def import_vllm() -> Any:  # noqa: ANN401 - vLLM has no types that we could know
    """Return the package.

    Raises:
        ConfigError: It is not there, or cannot be loaded.
    """
    try:
        import vllm
        import vllm.platforms
    except ImportError as error:
        raise ConfigError(
            "engine.kind",
            f"vLLM cannot be imported ({one_line(error)}); install it into an environment of its "
            "own, pip install 'echo2p2p[vllm]', or use --engine transformers",
        ) from error
    return vllm


def _build(vllm: Any, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - as above
    """Return vLLM's engine.

    Raises:
        ConfigError: vLLM does not take these settings.
    """
    try:
        return vllm.LLM(**arguments)
    except (TypeError, ValueError) as error:  # pydantic's errors are values, too
        raise ConfigError("engine.vllm", f"vLLM refuses: {one_line(error)}") from error
