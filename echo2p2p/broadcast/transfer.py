"""What one node knows of one payload: what it holds, and what each neighbour knows and holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2p2p.broadcast.chunk_sets import ChunkSet
from echo2p2p.broadcast.deal import Dealer
from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.ids import ManifestId, PeerId


@dataclass(slots=True)
class View:
    """One payload at the other end of one link."""

    held: ChunkSet
    """Announced by it."""
    known: ChunkSet
    """Announced by it, or sent to it."""
    aware: ChunkSet
    """Of which it knows that we hold them: exchanged with it, or announced to it."""
    wants: bool = False
    offered: bool = False
    """The manifest has crossed the link, either way."""
    asked: bool = False
    """We have said WANT."""

    def add(self, index: int) -> None:
        """It holds the chunk."""
        self.held.add(index)
        self.known.add(index)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a chunk came from that is not verified yet."""

    link: PeerId
    unasked: bool


@dataclass(slots=True)
class Transfer:
    """One payload."""

    manifest_id: ManifestId
    count: int
    """Chunks, chunk 0 included."""
    chunk_bytes: int
    push: bool
    held: ChunkSet
    """Verified."""
    dealer: Dealer | None
    """Only at the source."""
    dealing: bool
    """The source has not announced what it holds yet."""
    views: dict[PeerId, View] = field(default_factory=dict)
    followers: dict[PeerId, ChunkSet] = field(default_factory=dict)
    """`View.known` of those that said WANT."""
    fresh: list[int] = field(default_factory=list)
    """Stored since the last announcement."""
    origins: dict[int, Origin] = field(default_factory=dict)

    def view(self, link: PeerId) -> View:
        """Return the view of a link, empty at first."""
        view = self.views.get(link)
        if view is None:
            sets = (ChunkSet(self.count), ChunkSet(self.count), ChunkSet(self.count))
            view = self.views[link] = View(*sets)
        return view

    def forget(self, link: PeerId, now: float) -> None:
        """The link is gone."""
        self.views.pop(link, None)
        self.followers.pop(link, None)
        if self.dealer:
            self.dealer.relay_left(link, now)

    def held_beside(self, index: int, link: PeerId) -> bool:
        """Return whether anybody but ``link`` has announced the chunk to us."""
        return any(index in view.held for other, view in self.views.items() if other != link)

    def lacking(self, index: int) -> list[PeerId]:
        """Return the followers that neither announced the chunk nor were sent it."""
        return [link for link, known in self.followers.items() if index not in known]

    def check_index(self, index: int) -> None:
        """Check a chunk's number from the wire, not negative.

        Raises:
            RemoteProtocolError: There is no such chunk.
        """
        if index >= self.count:
            raise RemoteProtocolError(Violation.MALFORMED, f"chunk {index} of {self.count}")
