"""What the peer and its engine process say to each other, beyond the port's own values."""

from __future__ import annotations

import msgspec


class LoadCall(msgspec.Struct, frozen=True):
    """`Engine.load`."""

    version: int
    path: str
    """The shared state's file."""


class PhaseReply(msgspec.Struct, frozen=True):
    """A sign of life while the engine starts."""

    phase: str
