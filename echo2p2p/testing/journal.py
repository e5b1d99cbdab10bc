"""A journal that remembers: what a scenario asserts on, and the digest that proves a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from echo2p2p.ids import Digest, digest_of
from echo2p2p.log import plain_fields


class Entry(NamedTuple):
    """One event."""

    at_s: float
    """Virtual time."""
    name: str
    fields: Mapping[str, object]
    """With the bound ones; secrets masked, as in production."""


@dataclass(frozen=True)
class TraceJournal:
    """`Journal` into a list, which bound journals share."""

    entries: list[Entry] = field(default_factory=list)
    bound: Mapping[str, object] = field(default_factory=dict)

    def event(self, name: str, /, **fields: object) -> None:
        """Append the event, with the time of the trio run that this is called in."""
        merged = plain_fields({**self.bound, **fields})
        self.entries.append(Entry(trio.current_time(), name, merged))

    def bind(self, **fields: object) -> TraceJournal:
        """Return a journal that appends to the same list."""
        return TraceJournal(self.entries, {**self.bound, **fields})

    def named(self, name: str) -> list[Entry]:
        """Return the events of this name, in order."""
        return [entry for entry in self.entries if entry.name == name]

    def digest(self) -> Digest:
        """Return one number for all that happened: two runs of one seed must agree on it."""
        lines = (
            f"{entry.at_s!r} {entry.name} {sorted(entry.fields.items())!r}\n"
            for entry in self.entries
        )
        return digest_of("".join(lines).encode())
