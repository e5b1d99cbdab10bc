"""Who keeps a link with whom: everybody in a small run, about sixteen each in a large one.

Half of the links are drawn by capacity, so that chunks reach good uplinks early; half uniformly,
so that the graph has no thin waist. The result is connected as far as it can be: two peers that
cannot be dialled can never be linked. It is planned anew when membership has changed, but from the
old links, which are kept: a link that exists costs nothing, a new one a handshake and an empty
window. A newcomer to a large run does not wait for that (`link_newcomer`). In a very large one not
all are linked to the source (`plan_source_links`); the rest have everything from their neighbours.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from echo2p2p.broadcast.settings import MESH_NODES_MAX
from echo2p2p.ids import PeerId

DEGREE: Final = 16

SOURCE_LINKS_MAX: Final = 128
"""Peers that the source is linked to: it gives each chunk to one of them, and what a link costs it
should not grow with the run."""

STAYS: Final = 2.0
"""So many times the uplink of one that is linked to the source another must have to replace it."""

_ATTEMPTS: Final = 64
"""Draws for one link before it is left out; unlucky draws hit old links or undialable pairs."""


@dataclass(frozen=True, slots=True)
class Member:
    """A peer, as the planner sees it."""

    peer_id: PeerId
    capacity: float
    """Uplink in bytes per second, or any measure in proportion to it; not negative."""
    dialable: bool = True
    """Whether others can open a connection to it."""


Neighbours = dict[PeerId, tuple[PeerId, ...]]


def plan_overlay(
    members: Sequence[Member],
    *,
    degree: int = DEGREE,
    rng: random.Random,
    keep: Mapping[PeerId, AbstractSet[PeerId]] | None = None,
) -> Neighbours:
    """Return each member's neighbours, in ascending order; symmetric.

    Args:
        members: Distinct.
        degree: Links that each should have at least; about so many are the rule.
        rng: Decides the draws.
        keep: Links of the plan before; kept unless a member has twice its share.
    """
    graph = _Graph(members)
    if len(members) <= MESH_NODES_MAX:
        for place, one in enumerate(members):
            for other in members[place + 1 :]:
                graph.link(one, other)
        return graph.neighbours()
    for one in members if keep else ():
        for other_id in sorted((keep or {}).get(one.peer_id, ())):
            kept = graph.members.get(other_id)
            if kept is not None and max(graph.degree(one), graph.degree(kept)) < 2 * degree:
                graph.link(one, kept)
    _draw(graph, members, degree, rng)
    _connect(graph, members, rng)
    return graph.neighbours()


def link_newcomer(
    plan: Neighbours,
    newcomer: PeerId,
    others: Sequence[PeerId],
    *,
    links: int,
    rng: random.Random,
) -> None:
    """Give a newcomer its first links, in place, until everything is planned anew.

    Args:
        plan: Of all others.
        newcomer: Not in it yet.
        others: Those that it can be linked to.
        links: How many it gets, as far as there are others.
        rng: Decides the draws; of two, the one with fewer links is taken.
    """
    chosen: set[PeerId] = set()
    while len(chosen) < min(links, len(others)):
        pair = [other for other in rng.sample(others, min(2, len(others))) if other not in chosen]
        if pair:
            chosen.add(min(pair, key=lambda other: len(plan[other])))
    plan[newcomer] = tuple(sorted(chosen))
    for other in plan[newcomer]:
        plan[other] = tuple(sorted((*plan[other], newcomer)))


def unlink(plan: Neighbours, gone: PeerId) -> None:
    """Take a peer out of a plan, in place."""
    for other in plan.pop(gone, ()):
        plan[other] = tuple(peer_id for peer_id in plan[other] if peer_id != gone)


def plan_source_links(
    members: Sequence[Member],
    *,
    most: int = SOURCE_LINKS_MAX,
    keep: AbstractSet[PeerId] = frozenset(),
) -> frozenset[PeerId]:
    """Return who is linked to the source: all, or of many those with the widest uplinks.

    Args:
        members: Distinct.
        most: Links that it may have.
        keep: Who was linked before; they stay if they can.
    """

    def rank(member: Member) -> tuple[float, PeerId]:
        return -member.capacity * (STAYS if member.peer_id in keep else 1.0), member.peer_id

    return frozenset(member.peer_id for member in sorted(members, key=rank)[:most])


class _Graph:
    def __init__(self, members: Sequence[Member]) -> None:
        self.members = {member.peer_id: member for member in members}
        self._links: dict[PeerId, set[PeerId]] = {member.peer_id: set() for member in members}

    def degree(self, member: Member) -> int:
        return len(self._links[member.peer_id])

    def link(self, one: Member, other: Member) -> bool:
        """Link the two if that is possible and new."""
        if one.peer_id == other.peer_id or not (one.dialable or other.dialable):
            return False
        if other.peer_id in self._links[one.peer_id]:
            return False
        self._links[one.peer_id].add(other.peer_id)
        self._links[other.peer_id].add(one.peer_id)
        return True

    def parts(self) -> list[set[PeerId]]:
        """Return the connected components."""
        parts, seen = [], set[PeerId]()
        for start in self._links:
            if start in seen:
                continue
            part, front = {start}, [start]
            while front:
                for neighbour in sorted(self._links[front.pop()] - part):
                    part.add(neighbour)
                    front.append(neighbour)
            seen |= part
            parts.append(part)
        return parts

    def neighbours(self) -> Neighbours:
        return {peer_id: tuple(sorted(links)) for peer_id, links in self._links.items()}


def _draw(graph: _Graph, members: Sequence[Member], degree: int, rng: random.Random) -> None:
    """Give every member its share: alternately by capacity and uniformly among the short ones."""
    everybody = _Pool(members)
    dialable = _Pool([member for member in members if member.dialable])
    for member in rng.sample(list(members), len(members)):
        pool = everybody if member.dialable else dialable
        if not pool.members:
            continue
        for attempt in range(_ATTEMPTS * degree):
            if graph.degree(member) >= degree:
                break
            if attempt % 2 == 0:
                other = pool.by_capacity(rng)
                if graph.degree(other) >= 2 * degree:
                    continue
            else:
                pair = rng.choice(pool.members), rng.choice(pool.members)
                other = min(pair, key=graph.degree)
            graph.link(member, other)


class _Pool:
    """Members that one can be linked to, with their capacities added up once."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        heavy = [max(member.capacity, 0.0) for member in members]
        self._sums = list(itertools.accumulate(heavy if sum(heavy) > 0 else [1.0] * len(heavy)))

    def by_capacity(self, rng: random.Random) -> Member:
        """Return one, drawn by its capacity."""
        return rng.choices(self.members, cum_weights=self._sums)[0]


def _connect(graph: _Graph, members: Sequence[Member], rng: random.Random) -> None:
    """Join parts that the draws left apart, as far as a dialable member allows."""
    dialable = {member.peer_id for member in members if member.dialable}
    main, *others = sorted(graph.parts(), key=dialable.isdisjoint)
    for part in others:
        ones = [member for member in members if member.peer_id in part]
        ends = [member for member in members if member.peer_id in main]
        one = rng.choice([member for member in ones if member.dialable] or ones)
        if not one.dialable:
            ends = [member for member in ends if member.dialable]
        if ends and graph.link(one, rng.choice(ends)):
            main |= part
