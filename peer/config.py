"""Settings of a peer: TOML file, then ``--section.key value`` on top; unknown keys refused."""

from __future__ import annotations

import json
import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from echo2p2p.limits import MIB
from echo2p2p.net.shaping import CAP_BYTES_MIN, RATE_BYTES_PER_S_MIN

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]

_AMOUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)(?:/s)?")
_UNITS: Final = {
    "": 1.0,
    "b": 1.0,
    **{f"{prefix}b": 1000.0**n for n, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024.0**n for n, prefix in enumerate("kmgt", 1)},
    "bit": 1 / 8,
    **{f"{prefix}bit": 1000.0**n / 8 for n, prefix in enumerate("kmgt", 1)},
}
"""Bytes, by unit in lower case."""


def parse_bytes(text: object) -> object:
    """Return an amount such as ``2MB``, ``500 kB/s`` or ``20Mbit`` in bytes, numbers as they are.

    Raises:
        ValueError: With the mend. ``Mb`` is refused: half the world means bits by it.
    """
    if not isinstance(text, str):
        return text
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no amount of bytes; write 2MB, 500kB or 20Mbit")
    number, unit = found.groups()
    if re.fullmatch("[kKmMgGtT]?b", unit):
        prefix = unit[:-1].upper().replace("K", "k")
        raise ValueError(f"{text!r} may be bits or bytes; write {prefix}B or {prefix}bit")
    if unit.lower() not in _UNITS:
        raise ValueError(f"{text!r} has an unknown unit; write 2MB, 500kB or 20Mbit")
    return float(number) * _UNITS[unit.lower()]


def _whole(amount: object) -> object:
    return int(amount) if isinstance(amount, float) else amount


def _fast_enough(rate: float) -> float:
    if rate < RATE_BYTES_PER_S_MIN:
        least = f"{RATE_BYTES_PER_S_MIN / 1000:.0f}kB"
        raise ValueError(f"{rate:.0f} bytes a second keep no link alive; allow {least} at least")
    return rate


def _large_enough(cap: int) -> int:
    if cap < CAP_BYTES_MIN:
        least = f"{CAP_BYTES_MIN // 1_000_000}MB"
        raise ValueError(f"heartbeats alone would take most of {cap} bytes; allow {least} at least")
    return cap


Rate = Annotated[float, BeforeValidator(parse_bytes), AfterValidator(_fast_enough)]
"""Bytes a second."""
Amount = Annotated[int, BeforeValidator(_whole), BeforeValidator(parse_bytes), Field(gt=0)]
"""Bytes."""
Cap = Annotated[
    int, BeforeValidator(_whole), BeforeValidator(parse_bytes), AfterValidator(_large_enough)
]
"""Bytes a day."""


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _dashed(name: str) -> AliasChoices:
    """Let ``--upload-limit`` stand beside ``--upload_limit``."""
    return AliasChoices(name, name.replace("_", "-"))


class RelaySection(Section):
    """How other peers reach this one."""

    host: str = "0.0.0.0"  # noqa: S104 a relay is there to be reached
    """Address to bind."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one."""
    public_host: str | None = None
    """Name or address that others dial; default: ``host`` where that is a real address, else
    this peer accepts no connection and dials out only."""
    public_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port that others dial, where a router maps another one to ``port``; default: ``port``."""


def _kind(name: object) -> object:
    return "transformers" if name == "hf" else name


def _typed(options: object) -> object:
    """Read numbers and truth values out of words, as all are words on the command line."""
    if not isinstance(options, dict):
        return options
    return {name: _value(value) for name, value in options.items()}


def _value(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except ValueError:
        return value
    return read if isinstance(read, int | float) else value


class VllmSection(Section):
    """What only vLLM is told; its own documentation says more of each."""

    tensor_parallel_size: Positive = 1
    """GPUs that share the model."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory; what the model leaves of it caches keys and values."""
    max_model_len: Positive | None = None
    """Tokens of prompt and answer that are taken at most; fewer take less memory; default: as many
    as the model can. Longer work is refused and given to others."""
    cache_bytes: Amount | None = None
    """Memory for keys and values, such as 4GB; default: what the GPU has left, 512 MiB on a CPU."""
    options: Annotated[dict[str, int | float | str | bool], BeforeValidator(_typed)] = {}
    """Any other option of vLLM's engine: ``--engine.vllm.options max_num_seqs=64``. Those that
    would change what is sampled, or how weights get in, are refused."""


class EngineSection(Section):
    """How this peer generates."""

    kind: Annotated[Literal["auto", "vllm", "transformers", "none"], BeforeValidator(_kind)] = (
        "auto"
    )
    """``auto``: vLLM where it is installed and there is a GPU, else transformers where that is;
    ``none``: relay only. ``--engine`` is short for it, ``hf`` another name of transformers."""
    threads: Positive = 1
    """Torch threads; more than one fights with other processes on a small machine."""
    dtype: str = "auto"
    """What the engine computes in: float32, bfloat16 or float16; ``auto`` is bfloat16 for vLLM on a
    GPU, else float32."""
    leases_at_once: Positive = 8
    """Leases generated as one batch."""
    switch: Literal["finish", "in-flight"] = "finish"
    """What becomes of answers that are not through when a new version comes: ``finish`` them with
    the old one, or go on with the new one, ``in-flight``."""
    restarts_max: Annotated[int, Field(ge=0)] = 5
    """Engine restarts without a proved version in between, after which the peer gives up."""
    generate_timeout_s: PositiveFloat = 300.0
    """A batch that takes longer is a hung engine; once the engine's pace is known, less will do."""
    memory_max_bytes: Amount | None = None
    """Memory that the engine's process may use, such as 12GB; default: nine tenths of what is free
    when it starts."""
    vllm: VllmSection = VllmSection()
    """What only vLLM is told."""


class MetricsSection(Section):
    """What this peer tells its owner's monitoring."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on 127.0.0.1 for /metrics (Prometheus) and /healthz; 0 takes a free one; default:
    none."""


class ServeSection(Section):
    """Letting programs talk to the model in training, by OpenAI's interface."""

    address: str | None = None
    """HOST:PORT for /v1/chat/completions and /v1/completions; ``--serve`` is short for
    127.0.0.1:8000, ``--serve HOST:PORT`` for this. Default: not served."""
    key: str | None = None
    """What clients must send as their API key; needed where others can reach the address."""
    tokens_max: Positive = 1024
    """Longest answer, in tokens; what asks for more gets so many. It shares the engine with the
    run's work."""
    tokenizer: str | None = None
    """Hugging Face folder with the model's tokenizer.json, chat template and config.json;
    default: `model_dir`, or else what the run gives."""


class PeerSettings(Section):
    """All settings of a peer."""

    url: str = ""
    """The coordinator: ``https://host:port``."""
    token: str = ""
    """The run's join token."""
    name: str = "peer"
    """For people; need not be unique."""
    folder: str = "~/.echo2-peer"
    """Identity key and working files; one peer a folder."""
    price_usd_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """What this machine costs its owner."""
    join_timeout_s: PositiveFloat = 600.0
    """How long to try to reach the coordinator, at the start and after it was lost."""
    stall_timeout_s: PositiveFloat = 20.0
    """A payload without progress for this long is completed over HTTP."""
    outbox_bytes_max: Annotated[
        int, BeforeValidator(_whole), BeforeValidator(parse_bytes), Field(gt=0)
    ] = 256 * MIB
    """Finished work that waits in the folder while the coordinator cannot be reached, such as
    256MB; beyond it the oldest is dropped."""
    upload_limit: Rate | None = Field(None, validation_alias=_dashed("upload_limit"))
    """Bytes a second that this peer sends at most, such as 2MB or 20Mbit; default: no limit."""
    download_limit: Rate | None = Field(None, validation_alias=_dashed("download_limit"))
    """Bytes a second that this peer receives at most; default: no limit."""
    data_cap_per_day: Cap | None = Field(None, validation_alias=_dashed("data_cap_per_day"))
    """Bytes a day, both ways, such as 20GB. From 80 % of it on this peer relays nothing; when all
    of it is spent it leaves the run and comes back after the day. Default: no cap."""
    relay: RelaySection = RelaySection()
    """How other peers reach this one."""
    model_dir: str | None = Field(None, validation_alias=_dashed("model_dir"))
    """Hugging Face folder with the model that the run started from: if its safetensors are the
    very bits that the run names, they are not downloaded. Default: none."""
    engine: EngineSection = EngineSection()
    """How this peer generates."""
    metrics: MetricsSection = MetricsSection()
    """What this peer tells its owner's monitoring."""
    serve: ServeSection = ServeSection()
    """Letting programs talk to the model in training, by OpenAI's interface."""
