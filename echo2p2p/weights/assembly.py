"""One payload being put together from chunks that arrive in any order, from anybody.

The problem: chunks come from strangers, and nothing may be kept, served or decoded that was not
verified; but the digests come in chunk 0, which may be late. The idea: one buffer of the payload's
length, given by the signed header; a chunk is copied into its place only when its digest agrees.
Chunks before chunk 0 wait aside, a bounded number of them, each with the name of its sender, so
that a liar is known once chunk 0 is there; and as the same chunk may wait from several senders, a
lie does not keep the truth out.

It refuses to guess: what does not fit the header is an error, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from echo2p2p.errors import IntegrityError, LocalProtocolError
from echo2p2p.ids import DIGEST_BYTES, digest_of
from echo2p2p.limits import UNVERIFIED_CHUNKS_MAX
from echo2p2p.weights.manifest import check_header, chunk_count, chunk_length
from echo2p2p.wire.messages import ManifestHeader


@dataclass(frozen=True)
class Added:
    """Chunks that are now held, verified.

    Attributes:
        indices: Ascending; more than one when chunk 0 let waiting chunks be verified.
        bad_sources: Who had sent waiting chunks that turned out wrong; sorted, each once.
    """

    indices: tuple[int, ...]
    bad_sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Duplicate:
    """The chunk was held already, or the same bytes wait already; these were not kept."""


@dataclass(frozen=True)
class Early:
    """The chunk cannot be verified before chunk 0 is there.

    Attributes:
        kept: False if `UNVERIFIED_CHUNKS_MAX` wait already, or its sender has sent other bytes
            for it before: it must be fetched again.
    """

    kept: bool


@dataclass
class _Waiting:
    """Unverified chunks in order of arrival."""

    chunks: list[tuple[int, bytes, str]] = field(default_factory=list)

    def holds(self, index: int, data: memoryview) -> bool:
        return any(index == at and data == kept for at, kept, _ in self.chunks)

    def has_room(self, index: int, source: str) -> bool:
        if len(self.chunks) >= UNVERIFIED_CHUNKS_MAX:
            return False
        return all((at, sender) != (index, source) for at, _, sender in self.chunks)


class StoredBytes(Protocol):
    """A payload that stays where it is; `echo2p2p.net.ports.StoredBytes` is one."""

    @property
    def length(self) -> int:
        """In bytes."""
        ...

    def read(self, start: int, length: int) -> bytes:
        """Return a part; what it raises is the caller's business."""
        ...


class Assembly:
    """The chunks of one manifest. Needs the payload, the index and 64 chunks of memory at most."""

    _tail: memoryview | None
    """Where the index is kept beside the payload."""

    def __init__(self, header: ManifestHeader, memory: memoryview | None = None) -> None:
        """Start with nothing.

        Args:
            header: Of the manifest.
            memory: Where the payload is put together, at least as long; default: our own. If the
                index fits behind it, it is kept there too, for `take_up`.

        Raises:
            RemoteProtocolError: The header makes no sense, see `check_header`.
        """
        self._prepare(header)
        if memory is None:
            memory = memoryview(bytearray(header.payload_bytes))
        self._payload = memory[: header.payload_bytes]
        whole = header.payload_bytes + header.index_bytes
        if len(memory) >= whole:
            self._tail = memory[header.payload_bytes : whole]

    def _prepare(self, header: ManifestHeader) -> None:
        check_header(header)
        self.header = header
        self.count = chunk_count(header)
        """Chunks in all, chunk 0 included."""
        self._index: bytes | None = None
        self._is_held = bytearray(self.count)
        self._missing = self.count
        self._ready = 1
        self._waiting = _Waiting()
        self._stored: StoredBytes | None = None
        self._tail = None

    def take_up(self) -> int:
        """Look for what an earlier life has left in our memory; call it before anything else.

        Whatever lies there is believed only if its digest agrees.

        Returns:
            How many chunks are held now.
        """
        if self._tail is None or digest_of(self._tail) != self.header.index_digest:
            return 0
        self._index = bytes(self._tail)
        self._mark(0)
        for at in range(1, self.count):
            wanted = self._index[(at - 1) * DIGEST_BYTES : at * DIGEST_BYTES]
            if digest_of(self._place(at)) == wanted:
                self._mark(at)
        return self.count - self._missing

    @classmethod
    def stored(cls, header: ManifestHeader, stored: StoredBytes) -> Assembly:
        """Return the complete assembly of a payload of which nothing but the index is kept.

        Everything is verified now; what is read later is not.

        Raises:
            IntegrityError: The bytes are not those of the header; blames ``"local"``.
            RemoteProtocolError: The header makes no sense.
        """
        self = cls.__new__(cls)
        self._prepare(header)
        self._payload, self._stored = memoryview(b""), stored
        if stored.length != header.payload_bytes:
            raise IntegrityError(f"payload of {stored.length} bytes instead of the header's")
        digests = (digest_of(self._read(at)) for at in range(1, self.count))
        self._accept_index(memoryview(b"".join(digests)), "local")
        for at in range(1, self.count):
            self._mark(at)
        return self

    @classmethod
    def whole(
        cls,
        header: ManifestHeader,
        payload: bytes | bytearray | memoryview,
        index: bytes | bytearray | memoryview,
    ) -> Assembly:
        """Return the complete assembly of a payload that is at hand; shares its memory.

        Everything is verified, as it may come from a disk.

        Raises:
            IntegrityError: The bytes are not those of the header; blames ``"local"``.
            RemoteProtocolError: The header makes no sense.
        """
        self = cls.__new__(cls)
        self._prepare(header)
        self._payload = memoryview(payload).cast("B")
        if len(self._payload) != header.payload_bytes:
            raise IntegrityError(f"payload of {len(self._payload)} bytes instead of the header's")
        self._accept_index(memoryview(index).cast("B"), "local")
        for at in range(1, self.count):
            self._verify(at, self._place(at), "local")
            self._mark(at)
        return self

    def add(
        self, index: int, data: bytes | bytearray | memoryview, *, source: str
    ) -> Added | Duplicate | Early:
        """Take chunk ``index``; ``data`` is copied if it is kept.

        Raises:
            IntegrityError: No such chunk, a wrong length, or wrong bytes; nothing was changed.
                Blames ``source``.
        """
        view = memoryview(data).cast("B")
        if not 0 <= index < self.count:
            raise IntegrityError(f"chunk {index} of {self.count}", source=source)
        if len(view) != chunk_length(self.header, index):
            raise IntegrityError(f"chunk {index} has {len(view)} bytes", source=source)
        if self._is_held[index]:
            return Duplicate()
        if index == 0:
            self._accept_index(view, source)
            return self._review()
        if self._index is None:
            return self._keep_aside(index, view, source)
        self._verify(index, view, source)
        self._place(index)[:] = view
        self._mark(index)
        return Added((index,))

    def chunk(self, index: int) -> memoryview | None:
        """Return verified chunk ``index``, read-only; ``None`` if not held.

        It shares the payload's memory, or is read where that is stored.
        """
        if not (0 <= index < self.count and self._is_held[index]):
            return None
        if index == 0:
            assert self._index is not None
            return memoryview(self._index)
        if self._stored is not None:
            return memoryview(self._read(index))
        return self._place(index).toreadonly()

    def held(self) -> list[int]:
        """Return the verified chunks, ascending."""
        return [index for index, flag in enumerate(self._is_held) if flag]

    def missing(self) -> list[int]:
        """Return the chunks that are not verified, ascending; waiting ones are among them."""
        return [index for index, flag in enumerate(self._is_held) if not flag]

    @property
    def unverified(self) -> int:
        """Chunks that wait for chunk 0."""
        return len(self._waiting.chunks)

    @property
    def ready_bytes(self) -> int:
        """How many bytes of the payload are verified without a gap, from its start."""
        while self._ready < self.count and self._is_held[self._ready]:
            self._ready += 1
        return min((self._ready - 1) * self.header.chunk_bytes, self.header.payload_bytes)

    @property
    def memory(self) -> memoryview:
        """The payload's memory, read-only; only its first `ready_bytes` are certain."""
        return self._payload.toreadonly()

    @property
    def complete(self) -> bool:
        """Whether every chunk is held."""
        return self._missing == 0

    def payload(self) -> memoryview:
        """Return the whole payload, read-only; sharing memory, or read where it is stored.

        Raises:
            LocalProtocolError: Not complete.
        """
        if not self.complete:
            raise LocalProtocolError(f"{self._missing} of {self.count} chunks are missing")
        if self._stored is not None:
            return memoryview(self._stored.read(0, self._stored.length))
        return self._payload.toreadonly()

    def _read(self, index: int) -> bytes:
        assert self._stored is not None
        start = (index - 1) * self.header.chunk_bytes
        return self._stored.read(start, chunk_length(self.header, index))

    def _place(self, index: int) -> memoryview:
        start = (index - 1) * self.header.chunk_bytes
        return self._payload[start : start + chunk_length(self.header, index)]

    def _mark(self, index: int) -> None:
        self._is_held[index] = 1
        self._missing -= 1

    def _accept_index(self, view: memoryview, source: str) -> None:
        if digest_of(view) != self.header.index_digest:
            raise IntegrityError("chunk 0 is not the manifest's", source=source)
        self._index = bytes(view)
        if self._tail is not None:
            self._tail[:] = view
        self._mark(0)

    def _verify(self, index: int, view: memoryview, source: str) -> None:
        assert self._index is not None
        if digest_of(view) != self._index[(index - 1) * DIGEST_BYTES : index * DIGEST_BYTES]:
            raise IntegrityError(f"chunk {index} is not the manifest's", source=source)

    def _keep_aside(self, index: int, view: memoryview, source: str) -> Duplicate | Early:
        if self._waiting.holds(index, view):
            return Duplicate()
        if not self._waiting.has_room(index, source):
            return Early(kept=False)
        self._waiting.chunks.append((index, bytes(view), source))
        return Early(kept=True)

    def _review(self) -> Added:
        """Verify what waited for chunk 0, and forget it; no two good ones are of one chunk."""
        indices, bad_sources = {0}, set()
        for index, data, source in self._waiting.chunks:
            try:
                self._verify(index, memoryview(data), source)
            except IntegrityError:
                bad_sources.add(source)
                continue
            self._place(index)[:] = data
            self._mark(index)
            indices.add(index)
        self._waiting = _Waiting()
        return Added(tuple(sorted(indices)), tuple(sorted(bad_sources)))
