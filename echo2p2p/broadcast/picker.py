"""The receiver's decisions: which missing chunk to ask of whom, and when to ask somebody else.

Rarest first among what a link offers (of a random sample, when it offers much), live deltas before
anchors, the index (chunk 0) before anything, because nothing can be verified without it. Each link
has a window of requests, its rate times its round trip; each chunk has one requester, and a
deadline by the link's own rate. A missed deadline frees the chunk for another holder, two in a row
mean no requests for a while, and more cost the link. In the endgame, when a link has nothing else
to offer, one second holder may be asked for a chunk that is late.

Nothing is asked for until a grace after its first announcement: in a mesh the relay that was dealt
the chunk is already pushing it. The source is asked last, except for what only it holds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from echo2p2p.broadcast.chunk_sets import ChunkPool, ChunkSet
from echo2p2p.broadcast.rates import BusyRate
from echo2p2p.broadcast.settings import SwarmSettings
from echo2p2p.ids import ManifestId, PeerId

SAMPLE_CHUNKS: Final = 64
"""Candidates among which the rarest is taken."""

RATE_ASSUMED_BYTES_PER_S: Final = 512.0 * 1024.0
"""Of a link, before it was measured."""

INDEX_GRACE_S: Final = 0.1

TICK_S: Final = 0.0625
"""Ends of graces are seen to so often; a binary fraction, so that ticks are exact."""

DELAY_WEIGHT: Final = 0.1
"""Of the newest push in the mean time from announcement to arrival."""

FAR: Final = 3.0
"""Round trips for which a pushed chunk may be on its way behind its announcement."""

FEW_LINKS: Final = 4
"""Up to so many that offer a payload, each has a request more than it seems to need."""

REASON: Final = 3
"""Deadlines that a link gains by bringing other chunks."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Ask ``link`` for this chunk, or take such a request back."""

    link: PeerId
    manifest_id: ManifestId
    index: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """What `Picker.on_time` found."""

    cancels: tuple[Pick, ...]
    hopeless: tuple[PeerId, ...]
    """Links that only ever miss."""


@dataclass(slots=True)
class _Request:
    asked_s: float
    patience_s: float
    """When a second holder may be asked."""
    deadline_s: float


@dataclass(slots=True)
class _Link:
    is_source: bool
    rtt_s: float
    rate: BusyRate = field(default_factory=BusyRate)
    requests: dict[tuple[ManifestId, int], _Request] = field(default_factory=dict)
    requested_bytes: int = 0
    heard_s: float = -math.inf
    """When the last chunk came, asked for or not."""
    misses: int = 0
    snubbed_until_s: float = -math.inf


@dataclass(slots=True)
class _Goal:
    chunk_bytes: int
    live: bool
    missing: ChunkSet
    """Not verified."""
    parked: set[int] = field(default_factory=set)
    """Arrived, but not verified yet."""
    heard_s: dict[int, float] = field(default_factory=dict)
    """When a missing chunk was first announced."""
    holders: dict[int, int] = field(default_factory=dict)
    """Of a missing chunk: how many links offer it."""
    ready_s: dict[int, float] = field(default_factory=dict)
    asked: dict[int, list[PeerId]] = field(default_factory=dict)
    offers: dict[PeerId, ChunkPool] = field(default_factory=dict)
    """What each link holds that is missing here."""
    avoid: dict[tuple[PeerId, int], float] = field(default_factory=dict)
    """Until when a link is not asked for a chunk again."""


class Picker:
    """Of one node, for all payloads that it follows."""

    def __init__(self, rng: random.Random, settings: SwarmSettings) -> None:
        self._rng = rng
        self._settings = settings
        self._links: dict[PeerId, _Link] = {}
        self._goals: dict[ManifestId, _Goal] = {}
        self._order: list[ManifestId] = []
        self._ticks: list[int] = []
        """Heap of the ticks by which a grace ends, each once."""
        self._sweep_s = math.inf
        self._push_delay_s = 0.0

    # --- links and goals ----------------------------------------------------------------------

    def link_opened(self, link: PeerId, *, is_source: bool, rtt_s: float) -> None:
        """A link is there; it offers nothing yet."""
        self._links[link] = _Link(is_source, rtt_s)

    def link_closed(self, link: PeerId) -> None:
        """A link is gone, with what it offered and what was asked of it."""
        gone = self._links.pop(link)
        for manifest_id, index in gone.requests:
            self._unask(self._goals[manifest_id], link, index)
        for goal in self._goals.values():
            self._withdraw(goal, link)

    def follow(
        self, manifest_id: ManifestId, *, missing: ChunkSet, chunk_bytes: int, live: bool
    ) -> None:
        """A payload is wanted; ``missing`` is kept up to date by `stored`."""
        self._goals[manifest_id] = _Goal(chunk_bytes, live, missing)
        self._order = sorted(self._goals, key=lambda each: not self._goals[each].live)

    def drop(self, manifest_id: ManifestId, now: float) -> list[Pick]:
        """A payload is no longer wanted; returns the requests to take back."""
        goal = self._goals.pop(manifest_id, None)
        if goal is None:
            return []
        self._order.remove(manifest_id)
        cancels = [Pick(link, manifest_id, i) for i, links in goal.asked.items() for link in links]
        for pick in cancels:
            self._forget_request(pick.link, manifest_id, pick.index, goal, now)
        return cancels

    # --- what happens -------------------------------------------------------------------------

    def offered(
        self,
        link: PeerId,
        manifest_id: ManifestId,
        indices: Iterable[int],
        now: float,
        *,
        grace_s: float,
    ) -> None:
        """``link`` holds these chunks; those that are missing may be asked for after the grace.

        A grace, if there is one, grows with the time that pushed chunks take; without one, those
        that others announced are not waited for either.
        """
        goal = self._goals.get(manifest_id)
        if goal is None:
            return
        if grace_s:
            pushed = grace_s >= self._settings.pull_grace_s
            far_s = FAR * self._links[link].rtt_s if pushed else 0.0
            most_s = max(grace_s, self._settings.pull_grace_max_s, far_s)
            grace_s = min(max(grace_s, 2 * self._push_delay_s, far_s), most_s)
            self._wake_at(now + grace_s)
        if self._links[link].is_source:
            self._wake_at(now + grace_s + self._settings.source_grace_s)
        pool = goal.offers.setdefault(link, ChunkPool())
        for index in indices:
            if index not in goal.missing or not pool.add(index):
                continue
            goal.holders[index] = goal.holders.get(index, 0) + 1
            if index not in goal.ready_s:
                wait_s = grace_s if index else min(grace_s, INDEX_GRACE_S)
                goal.heard_s[index] = now
                goal.ready_s[index] = now + wait_s
                if index == 0 and wait_s:
                    self._wake_at(now + wait_s)
            elif not grace_s:
                goal.ready_s[index] = min(goal.ready_s[index], now)

    def hurry(self, manifest_id: ManifestId, ready_s: float) -> None:
        """End the graces of what was announced before by ``ready_s``: no push is on its way."""
        goal = self._goals.get(manifest_id)
        if goal is not None:
            goal.ready_s = {index: min(at_s, ready_s) for index, at_s in goal.ready_s.items()}
            self._wake_at(ready_s)

    def arrived(
        self, link: PeerId, manifest_id: ManifestId, index: int, count: int, now: float
    ) -> tuple[bool, list[Pick]]:
        """A chunk came in, not verified yet.

        Returns:
            Whether it had been asked of this link, and the other links' requests to take back.
        """
        state = self._links[link]
        state.rate.add(count, now)
        state.misses = 0
        state.heard_s = now
        goal = self._goals.get(manifest_id)
        if goal is None:
            return False, []
        asked = link in goal.asked.get(index, ())
        if asked:
            self._forget_request(link, manifest_id, index, goal, now)
        elif index in goal.heard_s and index not in goal.asked:
            delay_s = now - goal.heard_s[index]
            self._push_delay_s += DELAY_WEIGHT * (delay_s - self._push_delay_s)
        if index in goal.missing:
            goal.parked.add(index)
        return asked, self._cancel_all(goal, manifest_id, index, now)

    def stored(self, manifest_id: ManifestId, index: int, now: float) -> list[Pick]:
        """A chunk is verified; returns the requests to take back."""
        goal = self._goals.get(manifest_id)
        if goal is None or not goal.missing.discard(index):
            return []
        cancels = self._cancel_all(goal, manifest_id, index, now)
        goal.parked.discard(index)
        goal.heard_s.pop(index, None)
        goal.ready_s.pop(index, None)
        goal.holders.pop(index, None)
        for pool in goal.offers.values():
            pool.discard(index)
        if not goal.missing:
            self.drop(manifest_id, now)
        return cancels

    def lost(self, manifest_id: ManifestId, index: int) -> None:
        """What had arrived was wrong, or could not be kept: the chunk is missing as before."""
        goal = self._goals.get(manifest_id)
        if goal is not None:
            goal.parked.discard(index)

    def rejected(
        self, link: PeerId, manifest_id: ManifestId, index: int, reason: str, now: float
    ) -> None:
        """``link`` will not send the chunk; if the payload is unknown to it, none of it."""
        goal = self._goals.get(manifest_id)
        if goal is None:
            return
        refused = list(goal.asked) if reason == "unknown" else [index]
        for each in refused:
            if link in goal.asked.get(each, ()):
                self._forget_request(link, manifest_id, each, goal, now)
        if reason == "unknown":
            self._withdraw(goal, link)
        elif reason == "not_held":
            if link in goal.offers and goal.offers[link].discard(index):
                goal.holders[index] -= 1
        else:
            self._avoid(goal, link, index, now + self._settings.retry_s)

    def rate_of(self, link: PeerId) -> float | None:
        """Return how fast chunks come from a link, bytes per second; ``None``: not known yet."""
        return self._links[link].rate.bytes_per_s

    # --- decisions ----------------------------------------------------------------------------

    def plan(self, now: float, links: Iterable[PeerId] | None = None) -> list[Pick]:
        """Return what to ask of these links (all by default), recorded as asked."""
        picks = []
        hungry = list(self._links if links is None else links)
        if not self._goals:
            return []
        while hungry:
            for link in list(hungry):
                pick = self._pick(link, now)
                if pick is None:
                    hungry.remove(link)
                else:
                    picks.append(pick)
        return picks

    def _pick(self, link: PeerId, now: float) -> Pick | None:
        state = self._links[link]
        if now < state.snubbed_until_s:
            return None
        for endgame in (False, True):
            for manifest_id in self._order:
                goal = self._goals[manifest_id]
                pool = goal.offers.get(link)
                if not pool or len(state.requests) >= self._window(state, goal):
                    continue
                choose = self._late if endgame else self._rarest
                index = choose(link, state, manifest_id, goal, pool, now)
                if index is not None:
                    self._ask(link, state, manifest_id, index, now)
                    return Pick(link, manifest_id, index)
        return None

    def _window(self, state: _Link, goal: _Goal) -> int:
        """Return how many requests a link may have; a slow one of many, one: others are sooner."""
        if state.misses > 1:
            return 1
        rate, spare = state.rate.bytes_per_s, int(len(goal.offers) <= FEW_LINKS)
        if rate is None:
            return min(16, max(2, self._settings.window_first_bytes // goal.chunk_bytes))
        way_s = state.rtt_s + self._settings.slack_s
        chunks = math.ceil(1.5 * rate * way_s / goal.chunk_bytes) + spare
        return min(self._settings.window_chunks_max, max(1 + spare, chunks))

    def _rarest(
        self,
        link: PeerId,
        state: _Link,
        manifest_id: ManifestId,
        goal: _Goal,
        pool: ChunkPool,
        now: float,
    ) -> int | None:
        """Return the rarest chunk that ``link`` offers and nobody was asked for."""
        del manifest_id
        if 0 in goal.missing and 0 not in goal.parked:
            free = 0 in pool and 0 not in goal.asked and self._ready_at(goal, state, 0) <= now
            return 0 if free and goal.avoid.get((link, 0), now) <= now else None
        best, best_holders, seen = None, 0, 0
        for index in pool.walk(self._rng.randrange(len(pool))):
            if index in goal.asked or index in goal.parked:
                continue
            if self._ready_at(goal, state, index) > now or goal.avoid.get((link, index), now) > now:
                continue
            if best is None or goal.holders[index] < best_holders:
                best, best_holders = index, goal.holders[index]
            seen += 1
            if seen == SAMPLE_CHUNKS:
                break
        return best

    def _ready_at(self, goal: _Goal, state: _Link, index: int) -> float:
        only_the_source = goal.holders[index] == 1
        extra_s = self._settings.source_grace_s if state.is_source and not only_the_source else 0.0
        return goal.ready_s[index] + extra_s

    def _late(
        self,
        link: PeerId,
        state: _Link,
        manifest_id: ManifestId,
        goal: _Goal,
        pool: ChunkPool,
        now: float,
    ) -> int | None:
        """Return a chunk that one other link was asked for and has not sent in good time.

        Only when nothing is left that nobody was asked for.
        """
        if len(goal.asked) + len(goal.parked) < len(goal.missing):
            return None
        for index, links in goal.asked.items():
            if len(links) > 1 or link in links or index not in pool:
                continue
            if goal.avoid.get((link, index), now) > now:
                continue
            first = self._links[links[0]]
            request = first.requests[manifest_id, index]
            if now - first.heard_s < self._settings.patience_min_s:
                continue
            wait_s = request.patience_s - request.asked_s
            if state.is_source and goal.holders[index] > 1:
                wait_s += self._settings.source_grace_s
            if now - request.asked_s >= wait_s:
                return index
        return None

    def _ask(
        self, link: PeerId, state: _Link, manifest_id: ManifestId, index: int, now: float
    ) -> None:
        goal = self._goals[manifest_id]
        state.rate.start(now)
        state.requested_bytes += goal.chunk_bytes
        rate = state.rate.bytes_per_s or RATE_ASSUMED_BYTES_PER_S
        queue_s = state.requested_bytes / max(rate, 1.0)
        settings = self._settings
        patience_s = now + max(settings.patience_min_s, 2 * state.rtt_s + 1.5 * queue_s)
        deadline_s = now + max(settings.deadline_min_s, 3 * state.rtt_s + 3 * queue_s)
        state.requests[manifest_id, index] = _Request(now, patience_s, deadline_s)
        goal.asked.setdefault(index, []).append(link)
        self._sweep_s = min(self._sweep_s, patience_s)

    # --- time ---------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """Return when `on_time`, and then `plan`, should be called."""
        return min(self._sweep_s, self._ticks[0] * TICK_S if self._ticks else math.inf)

    def on_time(self, now: float) -> Overdue:
        """Free the chunks that did not come in time."""
        while self._ticks and self._ticks[0] * TICK_S <= now:
            heapq.heappop(self._ticks)
        if now < self._sweep_s:
            return Overdue((), ())
        cancels, hopeless = [], []
        next_s = math.inf
        for link, state in self._links.items():
            late = [key for key in state.requests if self._due_s(state, key) <= now]
            for manifest_id, index in late:
                goal = self._goals[manifest_id]
                self._forget_request(link, manifest_id, index, goal, now)
                self._avoid(goal, link, index, now + self._settings.snub_s)
                cancels.append(Pick(link, manifest_id, index))
            if late:
                hopeless += [link] if self._missed(state, now) else []
            for key, request in state.requests.items():
                patient = request.patience_s > now
                next_s = min(next_s, request.patience_s if patient else self._due_s(state, key))
            if state.snubbed_until_s > now:
                next_s = min(next_s, state.snubbed_until_s)
        for goal in self._goals.values():
            goal.avoid = {key: until for key, until in goal.avoid.items() if until > now}
            next_s = min(next_s, min(goal.avoid.values(), default=math.inf))
        self._sweep_s = next_s
        return Overdue(tuple(cancels), tuple(hopeless))

    def _due_s(self, state: _Link, key: tuple[ManifestId, int]) -> float:
        """Return when a request has failed.

        A link that goes on bringing chunks, one by one in the order of the requests, is slower
        than it was, but not stuck; within reason.
        """
        request = state.requests[key]
        rate = max(state.rate.bytes_per_s or RATE_ASSUMED_BYTES_PER_S, 1.0)
        stall_s = 3 * state.rtt_s + 3 * self._goals[key[0]].chunk_bytes / rate
        alive_s = state.heard_s + max(self._settings.deadline_min_s, stall_s)
        latest_s = request.deadline_s + REASON * (request.deadline_s - request.asked_s)
        return min(max(request.deadline_s, alive_s), latest_s)

    def _missed(self, state: _Link, now: float) -> bool:
        """Count a miss; return whether the link should be given up."""
        state.misses += 1
        state.rate.penalise(RATE_ASSUMED_BYTES_PER_S)
        if state.misses > 1:
            state.snubbed_until_s = now + self._settings.snub_s
        return state.misses >= self._settings.misses_max and not state.is_source

    def _wake_at(self, when_s: float) -> None:
        tick = math.ceil(when_s / TICK_S)
        if tick not in self._ticks:
            heapq.heappush(self._ticks, tick)

    # --- inside -------------------------------------------------------------------------------

    def _avoid(self, goal: _Goal, link: PeerId, index: int, until_s: float) -> None:
        goal.avoid[link, index] = until_s
        self._sweep_s = min(self._sweep_s, until_s)

    def _cancel_all(
        self, goal: _Goal, manifest_id: ManifestId, index: int, now: float
    ) -> list[Pick]:
        cancels = [Pick(link, manifest_id, index) for link in goal.asked.get(index, ())]
        for pick in cancels:
            self._forget_request(pick.link, manifest_id, index, goal, now)
        return cancels

    def _forget_request(
        self,
        link: PeerId,
        manifest_id: ManifestId,
        index: int,
        goal: _Goal,
        now: float,
    ) -> None:
        state = self._links[link]
        del state.requests[manifest_id, index]
        state.requested_bytes -= goal.chunk_bytes
        if not state.requests:
            state.rate.stop(now)
        self._unask(goal, link, index)

    @staticmethod
    def _unask(goal: _Goal, link: PeerId, index: int) -> None:
        goal.asked[index].remove(link)
        if not goal.asked[index]:
            del goal.asked[index]

    @staticmethod
    def _withdraw(goal: _Goal, link: PeerId) -> None:
        for index in goal.offers.pop(link, ()):
            goal.holders[index] -= 1
