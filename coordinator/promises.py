"""What live members may be in the middle of fetching. A core.

The problem: a payload that is on nobody's cheapest path any more may still be on its way to a peer
on a slow link, and all that it has got would be lost with it. The idea: two witnesses. The relay
knows which neighbours follow what without having it whole; and whoever asked for a path was told
one, whatever links it has. Either counts only until the member says, by its heartbeat, that it
holds that version or a newer one: then it has got past it, this way or another.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.membership import Member
from echo2p2p.ids import ManifestId, PeerId
from echo2p2p.weights.chain import Link


class Promises:
    """The paths that members were told, until they ask anew."""

    def __init__(self) -> None:
        self._told: dict[PeerId, tuple[Link, ...]] = {}

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
    ) -> set[ManifestId]:
        """Return what must stay; forgets who is no member any more.

        Args:
            members: All that are live.
            links: All payloads that there are.
            followed: What neighbours follow and have not whole, by the relay's account.
        """
        live = {member.peer_id: member for member in members}
        self._told = {peer: path for peer, path in self._told.items() if peer in live}
        of_id = {link.manifest_id: link for link in links}
        claims = [(peer, of_id[name]) for peer, name in followed if peer in live and name in of_id]
        claims += [(peer, link) for peer, path in self._told.items() for link in path]
        return {link.manifest_id for peer, link in claims if _lacks(live[peer], link)}


def _lacks(member: Member, link: Link) -> bool:
    return member.version is None or member.version < link.version
