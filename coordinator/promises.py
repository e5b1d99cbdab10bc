"""What live members may be in the middle of fetching. A core.

The problem: a payload that is on nobody's cheapest path any more may still be on its way to a peer
on a slow link, and all that it has got would be lost with it. The idea: two witnesses. The relay
knows which neighbours follow what without having it whole; and whoever asked for a path was told
one, whatever links it has. Either counts only until the member says, by its heartbeat, that it
holds that version or a newer one: then it has got past it, this way or another. And it counts only
for hours: a member that never gets anywhere, out of malice or not, does not fill the disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from coordinator.membership import Member
from echo2p2p.ids import Incarnation, ManifestId, PeerId
from echo2p2p.weights.chain import Link

PATIENCE_S: Final = 6 * 3600.0
"""A member that has come to no newer version for so long holds nothing back any more. A link that
needs longer for an anchor is of no use to the run."""


class Promises:
    """The paths that members were told, until they ask anew."""

    def __init__(self) -> None:
        self._told: dict[PeerId, tuple[Link, ...]] = {}
        self._progress: dict[PeerId, tuple[Incarnation, int, float]] = {}
        """Incarnation, newest version it ever held (-1: none), and since when."""

    def told(self, peer_id: PeerId, path: tuple[Link, ...]) -> None:
        """Note what a member was told; whoever asks again is through with what it had."""
        if path:
            self._told[peer_id] = path
        else:
            self._told.pop(peer_id, None)

    def fetching(
        self,
        members: Iterable[Member],
        links: Iterable[Link],
        followed: Iterable[tuple[PeerId, ManifestId]],
        now: float,
    ) -> set[ManifestId]:
        """Return what must stay; forgets who is no member any more.

        Args:
            members: All that are live.
            links: All payloads that there are.
            followed: What neighbours follow and have not whole, by the relay's account.
            now: Seconds, monotonic.
        """
        live = {member.peer_id: member for member in members}
        self._told = {peer: path for peer, path in self._told.items() if peer in live}
        self._progress = {
            peer: _progress(self._progress.get(peer), member, now) for peer, member in live.items()
        }
        for peer, (_, _, since_s) in self._progress.items():
            if now - since_s > PATIENCE_S:
                del live[peer]
        of_id = {link.manifest_id: link for link in links}
        claims = [(peer, of_id[name]) for peer, name in followed if peer in live and name in of_id]
        told = [(peer, path) for peer, path in self._told.items() if peer in live]
        claims += [(peer, link) for peer, path in told for link in path]
        return {link.manifest_id for peer, link in claims if _lacks(live[peer], link)}


def _progress(
    before: tuple[Incarnation, int, float] | None, member: Member, now: float
) -> tuple[Incarnation, int, float]:
    version = -1 if member.version is None else member.version
    if before is None or before[0] != member.incarnation or version > before[1]:
        return member.incarnation, version, now
    return before


def _lacks(member: Member, link: Link) -> bool:
    return member.version is None or member.version < link.version
