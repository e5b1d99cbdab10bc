"""Which payloads lead from one version to another, and which may be forgotten.

The problem: a joiner, a straggler and a peer one version behind each need another path, and the
publisher can keep only so much. The idea: a payload is an edge, from its base (or from nothing,
for an anchor) to its version, that costs its bytes on the wire; the rest is the shortest path.
Versions only grow along an edge, so one pass in order of version finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from echo2p2p.errors import LocalProtocolError
from echo2p2p.ids import Digest, ManifestId, Version
from echo2p2p.limits import MIB

ANCHOR_SHARE: Final = 0.25
"""An anchor is due when the deltas since the last one take this share of its bytes."""

SKIP_SPANS: Final = (4, 16)
"""Versions that a merged delta spans: one of 8 steps is half of what the 8 are (measured)."""

SKIP_STATE_BYTES_MAX: Final = 2 * 1024 * MIB
"""Largest state for which merged deltas are made unasked. Each span holds one state more: 4 GiB in
all is little beside a learner of a billion parameters, the 16 GB of one of four are not. What they
save is never more than an anchor and its tail for a peer that comes back."""


@dataclass(frozen=True)
class Link:
    """One published payload.

    Attributes:
        manifest_id: Its name.
        version: What it leads to.
        base_version: What it must be applied to; ``None``: an anchor, from anything.
        wire_bytes: Payload and index.
    """

    manifest_id: ManifestId
    version: Version
    base_version: Version | None
    wire_bytes: int

    @property
    def is_step(self) -> bool:
        """Whether it is a delta from the version before: neither an anchor nor merged."""
        return self.base_version == self.version - 1


@dataclass(frozen=True)
class Tail:
    """The newest anchor and the single deltas after it.

    Attributes:
        anchor_bytes: Of the anchor; 0 if there is none.
        deltas: How many there are; all of them without an anchor.
        delta_bytes: Of them all.
    """

    anchor_bytes: int
    deltas: int
    delta_bytes: int


def tail_of(links: Iterable[Link]) -> Tail:
    """Return what a joiner of the newest version is sent at most; merged deltas do not count."""
    ordered = _in_order(links)
    anchors = [link for link in ordered if link.base_version is None]
    start = anchors[-1].version if anchors else -1
    steps = [link.wire_bytes for link in ordered if link.is_step and link.version > start]
    return Tail(anchors[-1].wire_bytes if anchors else 0, len(steps), sum(steps))


def plan_path(
    links: Iterable[Link], have: Version | None, target: Version
) -> tuple[Link, ...] | None:
    """Return the cheapest path in bytes from ``have`` (``None``: nothing) to ``target``.

    Among paths of equal cost the one with fewer links wins, then the smaller manifest id, from
    the end. An anchor may be used whatever is held. The path is empty if ``have`` is ``target``.

    Returns:
        The links in order of application; ``None`` if nothing leads there.

    Raises:
        LocalProtocolError: A link whose base is not older than its version, or of negative cost.
    """
    return _plan(_in_order(links), have, target)


def _plan(ordered: list[Link], have: Version | None, target: Version) -> tuple[Link, ...] | None:
    if have == target:
        return ()
    costs: dict[Version | None, tuple[int, int]] = {None: (0, 0)}
    if have is not None:
        costs[have] = (0, 0)
    last: dict[Version | None, Link] = {}
    for link in ordered:
        before = costs.get(link.base_version)
        if before is None:
            continue
        cost = (before[0] + link.wire_bytes, before[1] + 1)
        if link.version not in costs or cost < costs[link.version]:
            costs[link.version] = cost
            last[link.version] = link
    if target not in last:
        return None
    path = [last[target]]
    while path[-1].base_version in last:
        path.append(last[path[-1].base_version])
    return tuple(reversed(path))


def anchor_due(chain_bytes_since_anchor: int, anchor_bytes: int) -> bool:
    """Say whether the deltas since the last anchor have grown to `ANCHOR_SHARE` of it."""
    return chain_bytes_since_anchor >= ANCHOR_SHARE * anchor_bytes


def spans_for(state_bytes: int) -> tuple[int, ...]:
    """Return the spans of merged deltas for states of this size, if nobody has said otherwise."""
    return SKIP_SPANS if state_bytes <= SKIP_STATE_BYTES_MAX else ()


def skip_bases(version: Version, spans: tuple[int, ...] = SKIP_SPANS) -> tuple[Version, ...]:
    """Return the older versions that a merged delta to ``version`` starts from, nearest first.

    Spans start at multiples of themselves, so that a long way is a few long spans and a tail; a
    publisher needs to hold the bits of one version a span.
    """
    return tuple(
        Version(version - span) for span in spans if version >= span and version % span == 0
    )


class SkipBases:
    """The states that merged deltas start from: the last multiple of each span.

    Holds references, not copies: each costs a state of memory once the publisher has moved on.
    After a restart it is empty, and merged deltas start again at the next multiples.
    """

    def __init__(self, spans: tuple[int, ...] = SKIP_SPANS) -> None:
        self._spans = spans
        self._held: dict[int, tuple[Version, Digest, bytearray]] = {}

    def due(self, version: Version) -> list[tuple[Version, Digest, bytearray]]:
        """Return base, its digest and its bits of each merged delta to ``version``."""
        wanted = skip_bases(version, self._spans)
        held = {base: (base, digest, bits) for base, digest, bits in self._held.values()}
        return [held[base] for base in wanted if base in held]

    def published(self, version: Version, digest: Digest, bits: bytearray) -> None:
        """Take note of a version; ``bits`` must not change from here on."""
        for span in self._spans:
            if version % span == 0:
                self._held[span] = (version, digest, bits)


def retained(
    links: Iterable[Link],
    needed_from: AbstractSet[Version | None],
    *,
    fetching: AbstractSet[ManifestId] = frozenset(),
    spare_bytes: int = 0,
) -> tuple[Link, ...]:
    """Return the links that must be kept, in order of version.

    They are the newest anchor, every delta between it and the newest version, the cheapest
    path to the newest version from each of ``needed_from``, and what somebody is in the middle of.
    A holder that nothing leads on from needs nothing of us.

    Args:
        links: All.
        needed_from: What live peers have acknowledged to hold (``None``: a joiner, who holds
            nothing).
        fetching: Payloads that a live peer is fetching, whatever path it is on.
        spare_bytes: How many bytes of further deltas may stay for peers that are away and may
            come back: those on the cheapest paths from where they may be, newest first, as long as
            a joiner's path will not be as cheap.
    """
    ordered = _in_order(links)
    if not ordered:
        return ()
    newest = ordered[-1].version
    keep = {link for link in ordered if link.manifest_id in fetching}
    anchors = [link for link in ordered if link.base_version is None]
    if anchors:
        start = anchors[-1].version
        keep.add(next(link for link in anchors if link.version == start))
        keep.update(
            link for link in ordered if link.base_version is not None and link.base_version >= start
        )
    for have in needed_from:
        keep.update(_plan(ordered, have, newest) or ())
    for link in _ways_back(ordered):
        if link not in keep:
            spare_bytes -= link.wire_bytes
            if spare_bytes < 0:
                break
            keep.add(link)
    return tuple(link for link in ordered if link in keep)


def _ways_back(ordered: list[Link]) -> list[Link]:
    """Return the first delta on the cheapest path from each version, newest base first.

    Versions from which a joiner's path will be as cheap are left out: so every rest of a path
    comes before it. A joiner's path may yet grow, by a tail, faster than theirs do.
    """
    newest, limit = ordered[-1].version, None
    if joiners := _plan(ordered, None, newest):
        sizes = [link.wire_bytes for link in joiners]
        limit = sum(sizes) + ANCHOR_SHARE * sizes[0]
    costs, first = {newest: 0}, dict[Version, Link]()
    deltas = [(link.base_version, link) for link in ordered if link.base_version is not None]
    for base, link in sorted(deltas, key=lambda each: each[0], reverse=True):
        if link.version in costs:
            cost = link.wire_bytes + costs[link.version]
            if (limit is None or cost < limit) and cost < costs.get(base, cost + 1):
                costs[base], first[base] = cost, link
    return list(first.values())


def _in_order(links: Iterable[Link]) -> list[Link]:
    """Return ``links`` by version, ties by manifest id, checked."""
    ordered = sorted(links, key=lambda link: (link.version, link.manifest_id))
    for link in ordered:
        if link.base_version is not None and link.base_version >= link.version:
            raise LocalProtocolError(f"version {link.version} on base {link.base_version}")
        if link.wire_bytes < 0:
            raise LocalProtocolError(f"version {link.version} of {link.wire_bytes} bytes")
    return ordered
