"""Settings of a peer: TOML file, then ``--section.key value`` on top; unknown keys refused."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RelaySection(Section):
    """How other peers reach this one."""

    host: str = "0.0.0.0"  # noqa: S104 a relay is there to be reached
    """Address to bind."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one."""
    public_host: str | None = None
    """Name or address that others dial; default: ``host`` where that is a real address, else
    this peer accepts no connection and dials out only."""


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
    """A call that takes longer is a hung engine."""


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
    relay: RelaySection = RelaySection()
    """How other peers reach this one."""
    engine: EngineSection = EngineSection()
    """How this peer generates."""
