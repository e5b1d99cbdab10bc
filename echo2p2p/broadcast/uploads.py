"""One uplink, many links: which chunk is sent next, and to how many at a time.

The fewer links are sent chunks at the same time, the sooner each chunk is whole at the other end
and can be passed on; and the shorter is the way of the announcements that stand behind them. So a
few links take turns, each with one chunk. A link that takes much longer over a chunk than the
uplink would need is held up by its receiver; it goes on beside the others and does not count. On a
thin uplink even a few chunks take long, so there are fewer of them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from echo2p2p.broadcast.outbox import Key, Outbox
from echo2p2p.broadcast.rates import BusyRate
from echo2p2p.broadcast.settings import SwarmSettings
from echo2p2p.ids import PeerId


class Uploads:
    """The outboxes of all links of a node."""

    def __init__(self, settings: SwarmSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._outboxes: OrderedDict[PeerId, Outbox] = OrderedDict()
        self._waiting: set[PeerId] = set()
        """Links that may have something in their outbox."""
        self._turns: dict[PeerId, float] = {}
        """Smaller for those that were sent nothing for longer; with a draw in it, or the same link
        would be the first to have each chunk, and the one that all others ask for it."""
        self._turn = itertools.count()
        self._begun: dict[tuple[PeerId, Key], tuple[float, int]] = {}
        self._rate = BusyRate()
        self.unblock_s = math.inf
        """When `may_start`, which has said no, may say yes though nothing was finished."""

    def open(self, link: PeerId) -> None:
        """A link is there."""
        settings = self._settings
        self._outboxes[link] = Outbox(settings.send_window_chunks, settings.queue_chunks_max)
        self._turns[link] = next(self._turn)

    def close(self, link: PeerId, now: float) -> None:
        """A link is gone, with all that waited for it."""
        del self._outboxes[link], self._turns[link]
        self._waiting.discard(link)
        for key in [key for key in self._begun if key[0] == link]:
            del self._begun[key]
        if not self._begun:
            self._rate.stop(now)

    def to(self, link: PeerId) -> Outbox:
        """Return a link's queue."""
        return self._outboxes[link]

    def queue(self, link: PeerId, key: Key, *, live: bool) -> bool:
        """Let a chunk wait for a link; return false if there is no room."""
        self._waiting.add(link)
        return self._outboxes[link].queue(key, live=live)

    def waiting(self) -> list[tuple[PeerId, Outbox]]:
        """Return the links that something waits for, in turn."""
        self._waiting = {link for link in self._waiting if self._outboxes[link].waits}
        in_turn = sorted(self._waiting, key=self._turns.__getitem__)
        return [(link, self._outboxes[link]) for link in in_turn]

    def quickest(
        self, links: Iterable[PeerId], rate_of: Callable[[PeerId], float | None]
    ) -> list[PeerId]:
        """Return the links, those first that would soon have a chunk, and pass it on.

        Args:
            links: Open ones.
            rate_of: How fast chunks come from one, bytes per second; ``None``: not known.
        """

        def key(link: PeerId) -> tuple[int, float]:
            return len(self._outboxes[link]), -(rate_of(link) or 0.0) * self._rng.uniform(0.5, 1.0)

        return sorted(links, key=key)

    @property
    def longest(self) -> int:
        """Chunks in the longest queue."""
        busy = self._waiting | {link for link, _ in self._begun}
        return max((len(self._outboxes[link]) for link in busy), default=0)

    def in_turn(self) -> Iterator[tuple[PeerId, Outbox]]:
        """Yield the links, those first that were sent nothing for longest."""
        yield from list(self._outboxes.items())

    def may_start(self, now: float) -> bool:
        """Return whether another chunk may be begun."""
        self.unblock_s = math.inf
        if not self._begun:
            return True
        settings, rate = self._settings, self._rate.bytes_per_s
        slots = max(settings.uploads_min, 3 * len(self._outboxes) // 4)
        slots = min(settings.uploads_max, slots)
        slow_s = settings.upload_slow_s
        if rate:
            longest = max(size for _, size in self._begun.values())
            enough = math.ceil(settings.uploads_s * rate / longest)
            slots = min(slots, max(settings.uploads_few, enough))
            slow_s = max(slow_s, 1.5 * slots * longest / rate)
        fresh = [begun_s for begun_s, _ in self._begun.values() if now < begun_s + slow_s]
        if len(fresh) < slots:
            return True
        self.unblock_s = min(fresh) + slow_s
        return False

    def started(self, link: PeerId, key: Key, size: int, now: float) -> None:
        """A chunk was taken from the link's queue and is being sent."""
        self._begun[link, key] = (now, size)
        self._outboxes.move_to_end(link)
        self._turns[link] = next(self._turn) + self._rng.random() * len(self._outboxes)
        self._rate.start(now)

    def finished(self, link: PeerId, key: Key, now: float, *, sent: bool) -> None:
        """The writer is through with a chunk."""
        self._outboxes[link].written(key, now)
        _, size = self._begun.pop((link, key), (now, 0))
        if sent:
            self._rate.add(size, now)
        if not self._begun:
            self._rate.stop(now)
