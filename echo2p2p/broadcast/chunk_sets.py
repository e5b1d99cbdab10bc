"""Sets of chunk indices: one byte a chunk, because a source keeps one for each of 1000 links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class ChunkSet:
    """A set of indices below ``count``."""

    __slots__ = ("_flags", "_size")

    def __init__(self, count: int, indices: Iterable[int] = ()) -> None:
        self._flags = bytearray(count)
        self._size = 0
        for index in indices:
            self.add(index)

    @classmethod
    def full(cls, count: int) -> ChunkSet:
        """Return the set of all indices."""
        chunks = cls(count)
        chunks._flags = bytearray(b"\x01") * count
        chunks._size = count
        return chunks

    @property
    def complete(self) -> bool:
        """Whether no index is missing."""
        return self._size == len(self._flags)

    def add(self, index: int) -> bool:
        """Add; return whether it is new."""
        new = not self._flags[index]
        if new:
            self._flags[index] = 1
            self._size += 1
        return new

    def discard(self, index: int) -> bool:
        """Remove; return whether it was there."""
        was = bool(self._flags[index])
        if was:
            self._flags[index] = 0
            self._size -= 1
        return was

    def __contains__(self, index: int) -> bool:
        return bool(self._flags[index])

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        at = self._flags.find(1)
        while at >= 0:
            yield at
            at = self._flags.find(1, at + 1)


class ChunkPool:
    """A set of indices that can be walked from anywhere; adding and removing take no time."""

    __slots__ = ("_order", "_place")

    def __init__(self) -> None:
        self._order: list[int] = []
        self._place: dict[int, int] = {}

    def add(self, index: int) -> bool:
        """Add; return whether it is new."""
        if index in self._place:
            return False
        self._place[index] = len(self._order)
        self._order.append(index)
        return True

    def discard(self, index: int) -> bool:
        """Remove; return whether it was there."""
        place = self._place.pop(index, None)
        if place is None:
            return False
        last = self._order.pop()
        if last != index:
            self._order[place] = last
            self._place[last] = place
        return True

    def walk(self, start: int) -> Iterator[int]:
        """Yield all, from position ``start`` around; the pool must not change meanwhile."""
        yield from self._order[start:]
        yield from self._order[:start]

    def __contains__(self, index: int) -> bool:
        return index in self._place

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
