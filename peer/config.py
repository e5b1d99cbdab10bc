"""Settings of a peer: TOML file, then ``--section.key value`` on top; unknown keys refused."""

from __future__ import annotations

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


class EngineSection(Section):
    """How this peer generates."""

    kind: Literal["auto", "hf", "none"] = "auto"
    """``auto``: transformers where it is installed; ``none``: relay only."""
    threads: Positive = 1
    """Torch threads; more than one fights with other processes on a small machine."""
    dtype: str = "float32"
    """What the engine computes in."""
    leases_at_once: Positive = 8
    """Leases generated as one batch."""
    restarts_max: Annotated[int, Field(ge=0)] = 5
    """Engine restarts without a proved version in between, after which the peer gives up."""
    generate_timeout_s: PositiveFloat = 300.0
    """A batch that takes longer is a hung engine; once the engine's pace is known, less will do."""
    memory_max_bytes: Amount | None = None
    """Memory that the engine's process may use, such as 12GB; default: nine tenths of what is free
    when it starts."""


class MetricsSection(Section):
    """What this peer tells its owner's monitoring."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on 127.0.0.1 for /metrics (Prometheus) and /healthz; 0 takes a free one; default:
    none."""


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
