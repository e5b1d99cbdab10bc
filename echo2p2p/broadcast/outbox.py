"""What waits to be sent on one link, chunks only: live deltas before anchors, each in order.

The link's writer is handed a few chunks at a time; all others wait here, where they can be
cancelled. A chunk stands in it once, whether it is pushed, requested, or both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from echo2p2p.ids import ManifestId

RECENT_MAX: Final = 512

CROSSING_S: Final = 1.0
"""A request for a chunk that left us so recently has crossed it on the way."""

Key = tuple[ManifestId, int]


@dataclass(slots=True)
class Outbox:
    """The queue of one link.

    Args:
        window: Chunks that may be with the writer.
        capacity: Chunks that may wait.
    """

    window: int
    capacity: int
    _live: dict[Key, None] = field(default_factory=dict)
    _bulk: dict[Key, None] = field(default_factory=dict)
    _writing: set[Key] = field(default_factory=set)
    _recent: dict[Key, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return how many chunks wait or are with the writer."""
        return len(self._live) + len(self._bulk) + len(self._writing)

    @property
    def has_room(self) -> bool:
        """Whether the writer can be given another chunk."""
        return len(self._writing) < self.window

    @property
    def waits(self) -> bool:
        """Whether a chunk waits for the writer."""
        return bool(self._live or self._bulk)

    def holds(self, key: Key) -> bool:
        """Whether the chunk waits or is with the writer."""
        return key in self._live or key in self._bulk or key in self._writing

    def sent_since(self, key: Key, since_s: float) -> bool:
        """Whether the chunk left after ``since_s``: a request for it has crossed it."""
        return self._recent.get(key, since_s) > since_s

    def queue(self, key: Key, *, live: bool) -> bool:
        """Let a chunk wait; return false if there is no room."""
        if len(self._live) + len(self._bulk) >= self.capacity:
            return False
        (self._live if live else self._bulk)[key] = None
        return True

    def write(self, key: Key) -> None:
        """Give a chunk to the writer, past the queue."""
        self._writing.add(key)

    def next(self, *, live: bool) -> Key | None:
        """Take the next chunk for the writer, or ``None``: nothing waits, or no room."""
        waiting = self._live if live else self._bulk
        if not waiting or not self.has_room:
            return None
        key = next(iter(waiting))
        del waiting[key]
        self._writing.add(key)
        return key

    def cancel(self, key: Key) -> None:
        """Drop a chunk that still waits."""
        self._live.pop(key, None)
        self._bulk.pop(key, None)

    def drop(self, manifest_id: ManifestId) -> None:
        """Drop all that waits of a payload."""
        for waiting in (self._live, self._bulk):
            for key in [key for key in waiting if key[0] == manifest_id]:
                del waiting[key]

    def written(self, key: Key, now: float) -> None:
        """The writer is through with a chunk."""
        self._writing.discard(key)
        self._recent.pop(key, None)
        self._recent[key] = now
        if len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]
