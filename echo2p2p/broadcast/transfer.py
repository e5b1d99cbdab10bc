"""What one node knows of one payload: what it holds, and what each neighbour knows and holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from echo2p2p.broadcast.chunk_sets import ChunkSet
from echo2p2p.broadcast.deal import Dealer
from echo2p2p.broadcast.effects import Effect, SendHave, SendOffer, SendWant
from echo2p2p.broadcast.settings import HAVE_INDICES_MAX
from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.ids import ManifestId, PeerId

EARLY_MAX: Final = 128
"""Payloads that one link named and we do not know yet; the oldest is forgotten for another."""


@dataclass(slots=True)
class LinkState:
    """What we know of a link, whatever the payload."""

    is_source: bool
    offers_early: dict[ManifestId, None] = field(default_factory=dict)
    """Shown to us, not added yet."""
    wants_early: dict[ManifestId, None] = field(default_factory=dict)
    """Asked of us, not added yet."""


def remember(early: dict[ManifestId, None], manifest_id: ManifestId) -> None:
    """Add to a `LinkState`'s names of unknown payloads."""
    early[manifest_id] = None
    if len(early) > EARLY_MAX:
        del early[next(iter(early))]


def recall(early: dict[ManifestId, None], manifest_id: ManifestId) -> bool:
    """Return whether it is among them, and take it out."""
    known = manifest_id in early
    early.pop(manifest_id, None)
    return known


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
    """It has said WANT; if it says so again, what it was told and sent before is gone."""
    offered: bool = False
    """The manifest has crossed the link, either way."""
    asked: bool = False
    """We have said WANT."""

    def add(self, index: int) -> None:
        """It holds the chunk."""
        self.held.add(index)
        self.known.add(index)

    def exchanged(self, index: int, *, theirs: bool) -> None:
        """The chunk has crossed the link; ``theirs``: they sent it."""
        if theirs:
            self.held.add(index)
        self.known.add(index)
        self.aware.add(index)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a chunk came from that is not verified yet."""

    link: PeerId
    asked: bool
    """We had asked for it."""
    announced: bool
    """By its sender. A chunk of the source that is neither is ours to push on."""


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
    dealt_s: float = -math.inf
    """When we, the source, had dealt all of it."""
    late: bool = False
    """Not the source, and all was dealt before we came to follow it: nobody pushes it to us."""
    ours: list[int] = field(default_factory=list)
    """Chunks that were dealt to us: in a mesh nobody else pushes them to those who come now."""
    ours_s: float = -math.inf
    """When the last of them came."""
    views: dict[PeerId, View] = field(default_factory=dict)
    followers: dict[PeerId, ChunkSet] = field(default_factory=dict)
    """`View.known` of those that said WANT, or of whom an earlier one stands (`wanting`)."""
    half_pushed: set[int] = field(default_factory=set)
    """Chunks that a peer pushed to us which cannot push them to everybody (`Reach`)."""
    fresh: list[int] = field(default_factory=list)
    """Stored since the last announcement."""
    origins: dict[int, Origin] = field(default_factory=dict)

    @property
    def lacks_index(self) -> bool:
        """Whether chunk 0 has not come."""
        return 0 not in self.held and 0 not in self.origins

    def view(self, link: PeerId) -> View:
        """Return the view of a link, empty at first."""
        view = self.views.get(link)
        if view is None:
            sets = (ChunkSet(self.count), ChunkSet(self.count), ChunkSet(self.count))
            view = self.views[link] = View(*sets)
        return view

    def introduce(self, link: PeerId, *, is_source: bool) -> Iterator[Effect]:
        """Make the payload known on a link, and ask to be told of it."""
        view = self.view(link)
        if not view.offered:
            view.offered = True
            yield SendOffer(link, self.manifest_id)
        if not view.asked and (is_source or not self.held.complete):
            view.asked = True
            yield SendWant(link, self.manifest_id)

    def wanted(self, link: PeerId, now: float, *, is_source: bool) -> Iterator[Effect]:
        """The other side says WANT; again, if it dropped or forgot all that we sent and told it."""
        if self.view(link).wants:
            self.forget(link, now)
            self.view(link).offered = True
            yield from self.introduce(link, is_source=is_source)
        self.view(link).wants = True

    def unfollow(self, link: PeerId, now: float) -> None:
        """The other side has none of the payload and drops what it is sent; it may say WANT yet."""
        self.view(link).wants = True  # then it begins from nothing, whatever is on its way now
        self.followers.pop(link, None)
        if self.dealer:
            self.dealer.relay_left(link, now)

    def forget(self, link: PeerId, now: float) -> None:
        """The link is gone."""
        self.unfollow(link, now)
        del self.views[link]

    def news(
        self, link: PeerId, indices: Iterable[int], *, to_source: bool, undialable: bool
    ) -> Iterator[SendHave]:
        """Yield those of ``indices``, ascending, of which a follower is not aware; it is then.

        Also what it holds itself, lest it push that to us; but a peer that holds all of a payload
        that is never pushed has no use for it. The source has: it counts holders.
        """
        view = self.view(link)
        if view.held.complete and not self.push and not to_source:
            return
        new = [index for index in indices if view.aware.add(index)]
        ask = [index for index in new if undialable and index in self.half_pushed]
        wait = [index for index in new if index not in self.half_pushed] if ask else new
        for asked, part in ((True, ask), (False, wait)):
            for start in range(0, len(part), HAVE_INDICES_MAX):
                some = tuple(part[start : start + HAVE_INDICES_MAX])
                yield SendHave(link, self.manifest_id, some, asked)

    def is_news(self, link: PeerId, indices: Iterable[int]) -> bool:
        """Return whether the other side lacks any of these, as far as we know."""
        held = self.view(link).held
        return any(index not in held for index in indices)

    def refusal(self, link: PeerId, index: int, now: float) -> Literal["not_held", "busy"] | None:
        """Return why a request of a follower is refused, if it is."""
        if index not in self.held:
            return "not_held"
        if self.dealer and not self.dealer.may_serve(link, index, now):
            return "busy"
        return None

    def held_beside(self, index: int, link: PeerId) -> bool:
        """Return whether anybody but ``link`` has announced the chunk to us."""
        return any(index in view.held for other, view in self.views.items() if other != link)

    def lacking(self, index: int) -> list[PeerId]:
        """Return the followers that neither announced the chunk nor were sent it."""
        return [link for link, known in self.followers.items() if index not in known]

    def fetching(self) -> list[PeerId]:
        """Return the followers that neither announced nor were sent all of it."""
        return [link for link, known in self.followers.items() if not known.complete]

    def note_ours(self, index: int, now: float) -> None:
        """A chunk was dealt to us, and we push it on."""
        self.ours.append(index)
        self.ours_s = now

    def ours_since(self, since_s: float) -> list[int]:
        """Return what we were dealt, if the last of it came after ``since_s``; else forget it."""
        if self.ours_s <= since_s:
            self.ours = []
        return self.ours

    def check_announced(self, indices: Sequence[int]) -> None:
        """Check an announcement from the wire.

        Raises:
            RemoteProtocolError: Not ascending, or there is no such chunk.
        """
        if any(after <= before for before, after in itertools.pairwise(indices)):
            raise RemoteProtocolError(Violation.MALFORMED, "announcement is not ascending")
        if indices:
            self.check_index(indices[-1])

    def check_index(self, index: int) -> None:
        """Check a chunk's number from the wire, not negative.

        Raises:
            RemoteProtocolError: There is no such chunk.
        """
        if index >= self.count:
            raise RemoteProtocolError(Violation.MALFORMED, f"chunk {index} of {self.count}")


def wanting(before: Transfer | None) -> set[PeerId]:
    """Return who said WANT of this very delta and still follows it: it stands for the next one."""
    if before is None:
        return set()
    return {link for link in before.followers if before.views[link].wants}
