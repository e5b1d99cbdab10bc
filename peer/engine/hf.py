"""Inference with transformers: one batched loop, weights changed in place and read back.

For machines where vLLM cannot run, for tests, and as the plain statement of what an engine must
do. The model is built from the configuration that the coordinator sent, with everything refused in
it that would load code or files. Weights are copied from the shared state into the live
parameters, and `HfEngine.prove` reads the same parameters back, so that a tensor which the kernels
do not use cannot pass for one that they do.

Prompts of different lengths are padded on the left; a lease's prompt is computed once and its
cache repeated for its samples; rows that have ended leave the batch when half of it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from echo2p2p.errors import ConfigError, EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.net.child_worker import Stopwatch, resident_bytes
from echo2p2p.net.memory import map_state
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.touched import Part, selection_bytes, touched_parts
from echo2p2p.wire.arrays import from_logprobs, from_tokens, to_tokens
from echo2p2p.wire.messages import Lease, Sample
from peer.engine import trial
from peer.engine.base import EngineInfo, EngineSetup, Generated, Grown, LoadReport
from peer.engine.batches import Answering, Labels, finish
from peer.engine.calls import EVERYTHING, ProveCall, TouchedFile, parts_of, proof_of
from peer.engine.hf_batch import Batch
from peer.engine.model_config import plain_config, unusable
from peer.engine.refusal import refusal_of
from peer.engine.sampling import Distributions, Uniforms, choose
from peer.engine.state_dtypes import STATE_DTYPES

ROWS_MAX: Final = 1024
"""Rows of one batch; more are done in several batches, to bound the cache."""

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class _Row:
    """One sample under way."""

    lease: Lease
    place: int
    """Of its lease in the call."""
    seed: int
    number: int
    """Of the sample in its lease."""
    open: bool = True
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: Labels = field(default_factory=Labels)

    def take(self, token: int, logprob: float) -> None:
        """Add a token, which may be the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.open = token not in self.lease.stop_ids and len(self.tokens) < self.lease.tokens_max

    def newest(self, version: Version) -> Grown:
        """Return its last token."""
        return Grown(self.place, self.number, version, self.tokens[-1:], self.logprobs[-1:])

    def held(self, prompt: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return prompt and tokens."""
        return np.concatenate([prompt, np.array(self.tokens, dtype=np.uint32)])


class HfEngine:
    """See `peer.engine.base.Engine`; the methods are its calls, blocking.

    Args:
        setup: As in the port.

    Raises:
        ConfigError: No such dtype.
        EngineError: The configuration makes no causal language model, or the layout is not its.
    """

    def __init__(self, setup: EngineSetup) -> None:
        torch.set_num_threads(setup.threads)
        self._dtype = "float32" if setup.dtype == "auto" else setup.dtype
        if self._dtype not in DTYPES:
            raise ConfigError("engine.dtype", f"{setup.dtype!r} is none of {', '.join(DTYPES)}")
        self._setup = setup
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = _build(setup.model_config, DTYPES[self._dtype]).to(self._device).eval()
        self._layout = Layout.from_table(setup.layout)
        self._names = self._model.state_dict(keep_vars=True)
        self._check_layout()
        config = self._model.config.get_text_config()
        self._vocabulary = int(config.vocab_size)
        self._positions: int = getattr(config, "max_position_embeddings", None) or 1 << 62
        self._loads = 0
        self._version: Version | None = trial.VERSION
        self._tokens_per_s = trial.measure_tokens_per_s(self.generate)
        self._version = None

    def info(self) -> EngineInfo:
        """Return what the engine says of itself."""
        return EngineInfo(
            kind="hf",
            device=str(self._device),
            dtype=self._dtype,
            memory_bytes=resident_bytes(),
            model=type(self._model).__name__,
            tokens_per_s=self._tokens_per_s,
        )

    def _check_layout(self) -> None:
        """Refuse a layout that does not name every tensor of the model, each once."""
        specs = {name: s for s in self._setup.layout.tensors for name in (s.name, *s.tied)}
        if specs.keys() != self._names.keys():
            odd = min(specs.keys() ^ self._names.keys())
            raise EngineError(f"the layout is not this model's: {odd} is only in one of them")
        for spec in self._setup.layout.tensors:
            for name in (spec.name, *spec.tied):
                if list(self._names[name].shape) != spec.shape:
                    raise EngineError(
                        f"the layout is not this model's: {name} has shape "
                        f"{list(self._names[name].shape)}, not {spec.shape}"
                    )
                if self._names[name] is not self._names[spec.name]:
                    raise EngineError(f"the model does not tie {name} to {spec.name}")

    # --- weights ------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, version: Version, path: str, touched: TouchedFile | None = None) -> LoadReport:
        """Copy the shared state, or what was touched of it, into the live parameters."""
        watch = Stopwatch()
        sparse = touched is not None and touched.base == self._version
        self._version = None
        mapped = map_state(path, self._layout.total_bytes, writable=False)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        if sparse and touched is not None:
            for part in touched_parts(self._layout, touched.places()):
                self._write(flat, part)
        else:
            for number, entry in enumerate(self._layout.tensors):
                self._write(flat, Part(number, slice(0, entry.elements)))
        del flat
        mapped.close()
        self._version = version
        self._loads += 1
        return LoadReport(version=version, seconds=watch.seconds(), sparse=sparse)

    def _write(self, flat: Tensor, part: Part) -> None:
        """Copy some elements of a tensor from a flat state."""
        entry, spec = self._layout.tensors[part.tensor], self._setup.layout.tensors[part.tensor]
        raw = flat[entry.offset : entry.offset + entry.bytes]
        if entry.offset % entry.item_bytes:
            raw = raw.clone()
        source, live = raw.view(STATE_DTYPES[spec.dtype]), self._names[spec.name]
        if isinstance(part.elements, slice):
            live.copy_(source.view(spec.shape))
        else:
            where = torch.from_numpy(part.elements)
            live.view(-1)[where.to(live.device)] = source[where].to(live.device, live.dtype)

    @torch.no_grad()
    def prove(self, call: ProveCall = EVERYTHING) -> Digest:
        """Return the digest of the parameters as they are, or of what is selected of them."""
        self._label()
        parts = parts_of(self._layout, call)
        bits = bytearray(selection_bytes(self._layout, parts))
        out, at = torch.frombuffer(bits, dtype=torch.uint8) if bits else torch.empty(0), 0
        live = self._model.state_dict(keep_vars=True)
        for part in parts:
            spec = self._setup.layout.tensors[part.tensor]
            tensor = live[spec.name].detach()
            if any(live[name].data_ptr() != tensor.data_ptr() for name in spec.tied):
                raise EngineError(f"{spec.name} is no longer tied to {', '.join(spec.tied)}")
            chosen: slice | Tensor
            if isinstance(part.elements, slice):
                chosen = part.elements
            else:
                chosen = torch.from_numpy(part.elements).to(tensor.device)
            read = tensor.reshape(-1)[chosen].to("cpu", STATE_DTYPES[spec.dtype]).view(torch.uint8)
            out[at : at + read.numel()].copy_(read)
            at += read.numel()
        del out
        return proof_of(self._layout, call, bits)

    def _label(self) -> Version:
        if self._version is None:
            raise EngineError("the engine has no weights")
        return self._version

    # --- generation ---------------------------------------------------------------------------

    def generate(self, leases: Sequence[Lease]) -> list[Generated]:
        """Answer all leases as one batch, in their order; see the port.

        Raises:
            EngineError: There are no weights.
        """
        return finish(self.begin(leases))

    def begin(self, leases: Sequence[Lease], *, heard: bool = False) -> Answering:
        """Answer leases, token by token.

        Raises:
            EngineError: There are no weights.
        """
        watch = Stopwatch()
        self._label()
        prompts = [to_tokens(lease.prompt) for lease in leases]
        refusals = [
            refusal_of(lease, prompt, self._positions, self._vocabulary)
            for lease, prompt in zip(leases, prompts, strict=True)
        ]
        good = [place for place, refusal in enumerate(refusals) if not refusal]
        rows = [
            _Row(leases[place], place, seed, number)
            for place in good
            if leases[place].forced is None
            for number, seed in enumerate(leases[place].seeds)
        ]
        for start in range(0, len(rows), ROWS_MAX):
            yield from self._sample(rows[start : start + ROWS_MAX], prompts, heard=heard)
        for place in good:
            if leases[place].forced is not None:
                rows += self._score(leases[place], place, prompts[place])
        total = max(1, sum(len(row.tokens) for row in rows))
        seconds = watch.seconds()
        answers: list[list[_Row]] = [[] for _ in leases]
        for row in rows:
            answers[row.place].append(row)
        return [
            Generated(
                lease_id=lease.lease_id,
                samples=tuple(map(_to_sample, answer)),
                seconds=seconds * sum(len(row.tokens) for row in answer) / total,
                refused=refusal,
            )
            for lease, answer, refusal in zip(leases, answers, refusals, strict=True)
        ]

    def _sample(
        self, rows: Sequence[_Row], prompts: Sequence[NDArray[np.uint32]], *, heard: bool
    ) -> Iterator[list[Grown]]:
        """Fill the rows' tokens and log-probs: one token of each a turn, until all have ended.

        With other weights than in the turn before, all that the rows hold is computed anew.
        """
        used = sorted({row.place for row in rows})
        version, loads = self._label(), self._loads
        with torch.inference_mode():
            batch = self._batch([prompts[place] for place in used])
            batch.select([used.index(row.place) for row in rows])
        uniforms = Uniforms([row.seed for row in rows])
        shape = Distributions([row.lease.sampling for row in rows], self._device)
        active = rows  # aligned with the batch, the uniforms and the distributions
        while True:
            growing = [row for row in active if row.open] if heard else []
            with torch.inference_mode():
                tokens = self._turn(batch, shape, uniforms, active, version)
            yield [row.newest(version) for row in growing]
            going = [place for place, row in enumerate(active) if row.open]
            if not going:
                return
            with torch.inference_mode():
                same = loads == self._loads
                version, loads = self._label(), self._loads
                if 2 * len(going) <= len(active) or not same:
                    batch.select(going)
                    shape.keep(going)
                    uniforms.keep(going)
                    tokens = tokens[going]
                    active = [active[place] for place in going]
                if same:
                    batch.step(tokens)
                else:
                    held = [row.held(prompts[row.place]) for row in active]
                    batch = self._batch(held)

    def _batch(self, prompts: Sequence[NDArray[np.uint32]]) -> Batch:
        return Batch(self._model, prompts, self._device, positions_max=self._positions)

    def _turn(
        self,
        batch: Batch,
        shape: Distributions,
        uniforms: Uniforms,
        active: Sequence[_Row],
        version: Version,
    ) -> Tensor:
        """Add a token to each row that is open; return the tokens."""
        logprobs = shape.log_softmax(batch.logits)
        tokens = choose(logprobs, uniforms.draw())
        values = logprobs.gather(-1, tokens[:, None])[:, 0]
        for row, token, value in zip(active, tokens.tolist(), values.tolist(), strict=True):
            if row.open:
                row.labels.note(version, len(row.tokens))
                row.take(token, value)
        return tokens

    @torch.inference_mode()
    def _score(self, lease: Lease, place: int, prompt: NDArray[np.uint32]) -> list[_Row]:
        """Return the log-probs of given tokens, the same for each seed."""
        assert lease.forced is not None
        forced = to_tokens(lease.forced)
        tokens = torch.from_numpy(np.concatenate([prompt, forced]).astype(np.int64))
        logits = self._model(
            input_ids=tokens[None, :-1].to(self._device),
            logits_to_keep=int(forced.size),
            use_cache=False,
        ).logits[0]
        logprobs = Distributions([lease.sampling], self._device).log_softmax(logits)
        wanted = tokens[prompt.size :, None].to(self._device)
        values = logprobs.gather(-1, wanted)[:, 0].tolist()
        rows = [
            _Row(lease, place, seed, number, tokens=forced.tolist(), logprobs=values)
            for number, seed in enumerate(lease.seeds)
        ]
        for row in rows:
            row.labels.note(self._label(), 0)
        return rows


def _to_sample(row: _Row) -> Sample:
    finish: Literal["stop", "length"] = "stop" if row.tokens[-1] in row.lease.stop_ids else "length"
    return Sample(
        tokens=from_tokens(row.tokens),
        logprobs=from_logprobs(row.logprobs),
        spans=row.labels.spans(len(row.tokens)),
        finish=finish,
    )


def _build(model_config: str, dtype: torch.dtype) -> Any:  # noqa: ANN401 - transformers has no types
    """Return a model with weights of no meaning."""
    plain = plain_config(model_config)
    try:
        config = AutoConfig.for_model(plain.pop("model_type"), **plain)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise unusable(error) from error
