"""vLLM as it is, for the benchmark: from a folder with weights, without anything of ours in it.

``python -P -m peer.engine.vllm_plain`` is a child process beside the real engine's. Its samples
have no seeds of their own and its log-probs are the raw ones, which is what vLLM does by itself.
"""

from __future__ import annotations

import os
from typing import Any

from echo2p2p.errors import EngineError
from echo2p2p.net import child_worker
from echo2p2p.net.child_worker import Method, Report, Stopwatch
from peer.engine.base import CACHE_BYTES_CPU
from peer.engine.plain import PlainBatch, PlainReply, PlainSetup
from peer.engine.vllm import ENVIRONMENT, import_vllm


class Worker:
    """Stock vLLM behind the calls of a child process."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._params: Any = None

    def start(self, call: PlainSetup, _: Report) -> None:
        """Build it."""
        os.environ.update(ENVIRONMENT)
        vllm = import_vllm()
        on_cpu = vllm.platforms.current_platform.is_cpu()
        chosen = call.setup.vllm
        usual: dict[str, Any] = {"kv_cache_memory_bytes": chosen.cache_bytes}
        if on_cpu:
            usual = {"enforce_eager": True}
            usual["kv_cache_memory_bytes"] = chosen.cache_bytes or CACHE_BYTES_CPU
        dtype = call.setup.dtype
        self._llm = vllm.LLM(
            **usual,
            model=call.folder,
            dtype=("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype,
            gpu_memory_utilization=chosen.gpu_memory_utilization,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._params = vllm.SamplingParams

    def generate(self, call: PlainBatch, _: Report) -> PlainReply:
        """Answer the prompts, ``samples`` times each, all of ``tokens`` tokens."""
        if self._llm is None:
            raise EngineError("the engine was not started")
        params = self._params(
            n=call.samples,
            temperature=1.0,
            max_tokens=call.tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        watch = Stopwatch()
        prompts = [{"prompt_token_ids": prompt} for prompt in call.prompts]
        answers = self._llm.generate(prompts, params, use_tqdm=False)
        tokens = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
        return PlainReply(tokens, watch.seconds())


def main() -> None:
    """Serve until the benchmark closes the pipe."""
    channel = child_worker.connect()
    worker = Worker()
    child_worker.serve(
        channel,
        {
            "start": Method(PlainSetup, worker.start, beats=True),
            "generate": Method(PlainBatch, worker.generate),
        },
    )


if __name__ == "__main__":
    main()
