"""The source's decisions about one payload: to whom each chunk goes first, and what is repeated.

Each chunk is dealt to one relay, which passes it on; so the source uploads the payload about once.
Who gets the next chunk: the relay that would be through with it soonest, by what it still has to
pass on and by its measured rate; relays that are equal in that take turns in proportion to their
rates. It is waited for if its link is taking another chunk: otherwise whatever links have room
would be dealt to, which shares the source's uplink evenly among unequal relays. A relay is measured
by the announcements of others: whoever announces a chunk that was dealt to it got it, directly or
not, through its uplink. So a slow or congested relay loses share at once, and a silent one keeps
next to none.

A chunk that does not leave, or that no second peer announced in time, or whose relay left, is dealt
to another. When all relays are behind, the source makes copies in their stead, so that a fast
source helps slow relays as far as they need it. Requests are served when nobody else can, when the
relay in charge is behind, or when the requester insists. (The design's budget,
S* = u_s T* / F copies, is not used: it needs all uplinks, and a relay with little to do measures
slow.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from echo2p2p.broadcast.chunk_sets import ChunkSet
from echo2p2p.broadcast.relay_rates import RelayRates, mean_of
from echo2p2p.ids import PeerId

UNMEASURED_DEALS_MAX: Final = 16
"""Chunks dealt to a relay of which nothing is known yet."""

GATHER_S: Final = 0.05
"""For so long after the first relay of a payload, one of which nothing is known yet is dealt one
chunk while others that are linked have not said that they follow: the first few, which may be slow
ones, would get most of a small payload."""

DEALS_AT_WORK: Final = 2
"""A relay's oldest chunks, which it is passing on: the source never makes their copies."""

DEALS_ALLOWED: Final = 4
"""So many are never too many, whatever they take: where one chunk to everybody takes a relay most
of a second, what it still owes is mostly copies that have been made, and whose announcements are on
their way."""

REDEAL_MIN_S: Final = 1.0
STUCK: Final = 4.0
"""So many times the usual time a deal may take to leave; then it is dealt to another: the link's
receiver hardly takes anything, so it would pass nothing on either."""

POLL_S: Final = 0.25
EVEN_S: Final = 0.1
"""Relays whose work differs by less are as good as each other."""

WAIT_S: Final = 0.25
"""For a relay with less to do, whose link has no room yet. What takes longer is stuck."""

LOOK_AHEAD_CHUNKS: Final = 32
"""Of the chunks not yet dealt, how many are tried when the first suits none of the relays."""

PROMISE_S: Final = 3.0
"""For so long a chunk that somebody else asked for is taken to be on its way to them."""

REFUSALS_MAX: Final = 16_384
"""Refused requests that are remembered; beyond it everything is served."""


@dataclass(slots=True)
class _Deal:
    relay: PeerId
    owed: int
    """Copies that the relay still has to make."""
    copies: int
    """That it had to make."""
    expected_s: float
    """What these and those before them should take, as it seemed when it was dealt."""
    least_s: float
    """For so long nobody doubts it; less if the relay's last deal was in vain, as all others wait
    for a try."""
    dealt_s: float
    at_once: bool
    """Whether the relay had no other work, and makes a few copies only."""
    sent_s: float | None = None
    """When it left; ``None`` while it waits for the link."""
    spread: bool = False
    """Whether a second holder was seen, or is made."""
    second: int = 0
    """Copies for those that the relay has no links to, which others will make."""


@dataclass(slots=True)
class _Relay:
    owed: int = 0
    """Copies, of all its deals."""
    deals: dict[int, None] = field(default_factory=dict)
    """Not settled, oldest first."""
    dealt: int = 0
    """In all."""
    announced: ChunkSet = field(default_factory=lambda: ChunkSet(0))
    latest: int = 0
    """The chunk that it was dealt last, and when."""
    latest_s: float = -math.inf


class Dealer:
    """Of one payload, all of which the source holds.

    Args:
        count: Chunks, chunk 0 included. Chunk 0 is not dealt: everybody needs it first.
        chunk_bytes: Of a whole chunk.
        rates: Shared by all payloads.
        push: Whether to deal at all; if not, requests are served only.
        backlog_max_s: A relay with more than so much to pass on is dealt nothing while another
            has less.
    """

    def __init__(
        self, count: int, chunk_bytes: int, rates: RelayRates, *, push: bool, backlog_max_s: float
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._count = count
        self._rates = rates
        self._backlog_max_s = backlog_max_s
        self._undealt = deque(range(1, count) if push else ())
        self._deals: dict[int, _Deal] = {}
        self._relays: dict[PeerId, _Relay] = {}
        self._tried: dict[int, set[PeerId]] = {}
        self._announced = [0] * count
        self._second = 0
        """Copies of all deals."""
        self._promised: dict[int, tuple[PeerId, float]] = {}
        self._refused: set[tuple[PeerId, int]] = set()
        self._spreading_s = math.inf
        """From when a deal has left until a second holder announces it, on average: on far or lossy
        lines, longer than on others."""
        self._next_check_s = float("inf")
        self._gather_until_s = math.inf
        self.redealt = 0

    # --- relays come and go -------------------------------------------------------------------

    def relay_joined(self, relay: PeerId, held: Iterable[int] = (), now: float = 0.0) -> None:
        """``relay`` follows the payload, and has announced ``held`` before."""
        self._gather_until_s = min(self._gather_until_s, now + GATHER_S)
        self._relays.setdefault(relay, _Relay(announced=ChunkSet(self._count)))
        for index in held:
            self.announced(relay, index, now)

    def relay_left(self, relay: PeerId, now: float) -> None:
        """Its link is gone: what only it held is dealt again."""
        gone = self._relays.pop(relay, None)
        if gone is None:
            return
        for index in gone.announced:
            self._announced[index] -= 1
        for index, deal in list(self._deals.items()):
            if deal.relay == relay:
                del self._deals[index]
                self._second -= deal.second
                if not self._announced[index]:
                    self._deal_again(index)
            elif deal.owed > self._lacking(index, deal):
                self._paid(index, deal, now)

    def _lacking(self, index: int, deal: _Deal) -> int:
        """Return how many relays could still be given a copy."""
        return sum(
            index not in state.announced
            for relay, state in self._relays.items()
            if relay != deal.relay and self._rates.reach.links(deal.relay, relay)
        )

    # --- dealing ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is a chunk to deal, or a relay that may need help."""
        return bool(self._undealt or self._deals)

    @property
    def finished(self) -> bool:
        """Whether every chunk has left once."""
        return not self._undealt and all(d.sent_s is not None for d in self._deals.values())

    def deal(
        self,
        candidates: Sequence[PeerId],
        known: Mapping[PeerId, ChunkSet],
        fanout: int | None,
        now: float,
        *,
        linked: int = 0,
    ) -> tuple[PeerId, int] | None:
        """Choose the next chunk and its relay.

        Args:
            candidates: Relays whose links have room.
            known: What each follower holds or was sent.
            fanout: Copies that a relay makes unasked; ``None``: one for everybody.
            now: Seconds.
            linked: Peers that may come to follow the payload, those that do among them.

        Returns:
            What to send now, recorded as dealt; ``None`` if there is nothing to deal, or nobody
            to whom it should go yet: a relay that is about to have room would be through with it
            much sooner.
        """
        gathering = now < self._gather_until_s and len(self._relays) < linked
        if gathering:
            self._next_check_s = min(self._next_check_s, self._gather_until_s)
        first = 1 if gathering else UNMEASURED_DEALS_MAX
        ready = [relay for relay in candidates if not self._is_full(relay, first)]
        if not ready:
            return None
        for _ in range(min(len(self._undealt), LOOK_AHEAD_CHUNKS)):
            index = self._undealt[0]
            tried = self._tried.get(index, set())
            lacking = [r for r in self._relays if r not in tried and index not in known[r]]
            if self._announced[index] or not lacking:
                self._undealt.popleft()
                continue
            # To one that passes nothing on only if there is nobody else: the others would wait.
            willing = {relay for relay in lacking if self._rates.relays(relay)} or {*lacking}
            # One whose last deal was in vain gets no more than its tries.
            trusted = {r for r in willing if not self._rates.has_failed(r)} or willing
            tries = ready if fanout is None or self._rates.may_try else []
            due = [relay for relay in tries if relay in willing and self._is_to_try(relay, now)]
            options = due or [relay for relay in ready if relay in trusted]
            if not options:
                self._undealt.rotate(-1)
                continue
            copies = self._copies(lacking, fanout)
            relay = min(options, key=lambda relay: self._expected(relay, copies(relay)))
            if not due and self._is_worth_waiting(relay, copies, trusted, now):
                return None
            owed = copies(relay) if self._rates.relays(relay) else 0
            self._undealt.popleft()
            state = self._relays[relay]
            at_once = state.owed == 0 and fanout is not None
            state.owed += owed
            state.deals[index] = None
            state.dealt += 1
            state.latest, state.latest_s = index, now
            self._rates.dealt(relay, now, is_try=bool(due))
            expected_s = state.owed * self._chunk_bytes / self._rates.patient(relay)
            least_s = POLL_S if self._rates.has_failed(relay) else REDEAL_MIN_S
            deal = self._deals[index] = _Deal(relay, owed, owed, expected_s, least_s, now, at_once)
            self._next_check_s = min(self._next_check_s, now + least_s)
            if fanout is None and owed:
                deal.second = len(lacking) - 1 - owed
                self._second += deal.second
            return relay, index
        return None

    def _copies(self, lacking: Sequence[PeerId], fanout: int | None) -> Callable[[PeerId], int]:
        """Return how many copies each relay would make unasked: no more than it has links for."""
        undialable = self._rates.reach.undialable
        dialable = sum(relay not in undialable for relay in lacking)
        most = len(lacking) if fanout is None else fanout
        all_but_one = min(len(lacking) - 1, most)
        return lambda relay: min(dialable, most) if relay in undialable else all_but_one

    def _is_to_try(self, relay: PeerId, now: float) -> bool:
        """Return whether it should get a chunk, however slow it seems.

        It may have recovered, and is measured only by what it is dealt. But not in the last
        quarter, lest the others wait for its copies in the end.
        """
        state = self._relays[relay]
        if state.owed or 4 * len(self._undealt) < self._count:
            return False
        return self._rates.is_to_try(relay, now)

    def _is_worth_waiting(
        self,
        relay: PeerId,
        copies: Callable[[PeerId], int],
        others: Collection[PeerId],
        now: float,
    ) -> bool:
        """Return whether another relay, whose link is taking a deal, would be quicker than this.

        Or the source's uplink, divided among the links, would do the dealing: evenly.
        """
        limit_s = self._expected(relay, copies(relay))[0] - EVEN_S
        for other in others:
            state = self._relays[other]
            deal = self._deals.get(state.latest)
            if deal is None or deal.relay != other or deal.sent_s is not None:
                continue
            until_s = state.latest_s + WAIT_S
            if now < until_s and self._expected(other, copies(other))[0] < limit_s:
                self._next_check_s = min(self._next_check_s, until_s)
                return True
        return False

    def help(
        self, candidates: Sequence[PeerId], known: Mapping[PeerId, ChunkSet]
    ) -> tuple[PeerId, int] | None:
        """Choose a copy that the source should make in a relay's stead.

        Only when all relays are behind or nothing is left to deal, and from the end of a late
        relay's queue, from which it takes what others announce. Arguments and result are as those
        of `deal`; the receiver must be told that it is no deal.
        """
        behind = [relay for relay in self._relays if self._is_late(relay)]
        if self._undealt and len(behind) < len(self._relays):
            return None
        for relay in sorted(behind, key=self._backlog_s, reverse=True):
            for index in list(self._relays[relay].deals)[: DEALS_AT_WORK - 1 : -1]:
                if self._deals[index].sent_s is None:
                    continue
                for peer in candidates:
                    if peer != relay and index not in known[peer]:
                        return peer, index
        return None

    def helped(self, index: int, now: float) -> None:
        """What `help` returned is on its way."""
        deal = self._deals[index]
        deal.spread = True
        deal.copies -= 1
        self._paid(index, deal, now)

    def _is_late(self, relay: PeerId) -> bool:
        """Return whether the relay is measured, and known to have too much to do."""
        measured = self._rates.of(relay).bytes_per_s is not None
        return measured and self._has_too_much(relay)

    def _is_full(self, relay: PeerId, first: int) -> bool:
        """Return whether the relay should be dealt nothing now; ``first``: of one not measured."""
        if self._rates.of(relay).bytes_per_s is None:
            return len(self._relays[relay].deals) >= first
        return self._has_too_much(relay)

    def _has_too_much(self, relay: PeerId) -> bool:
        many = len(self._relays[relay].deals) > DEALS_ALLOWED
        return many and self._backlog_s(relay) > self._backlog_max_s

    def _backlog_s(self, relay: PeerId) -> float:
        return self._relays[relay].owed * self._chunk_bytes / self._rates.estimate(relay)

    def _expected(self, relay: PeerId, copies: int) -> tuple[float, float]:
        rate = self._rates.estimate(relay)
        state = self._relays[relay]
        undialable = self._rates.reach.undialable
        work: float = state.owed + copies
        if self._second and relay not in undialable:
            work += self._second / max(1, len(self._relays) - len(undialable))
        return work * self._chunk_bytes / rate, state.dealt / rate

    # --- what became of it --------------------------------------------------------------------

    def sent(self, relay: PeerId, index: int, now: float) -> None:
        """A copy has left, dealt or asked for."""
        if index in self._promised:
            self._promised[index] = (relay, now)
        deal = self._deals.get(index)
        if deal is None or deal.relay != relay or deal.sent_s is not None:
            return
        deal.sent_s = now
        self._rates.left(now - deal.dealt_s, self._chunk_bytes)
        if deal.owed <= 0:
            self._settle(index, deal)
            return
        self._next_check_s = min(self._next_check_s, now + deal.least_s)

    def not_sent(self, relay: PeerId, index: int) -> None:
        """What was dealt never left."""
        deal = self._deals.get(index)
        if deal is not None and deal.relay == relay:
            self._settle(index, deal)
            self._undealt.appendleft(index)

    def announced(self, peer: PeerId, index: int, now: float) -> None:
        """``peer`` says that it holds the chunk."""
        state = self._relays.get(peer)
        if state is None or not state.announced.add(index):
            return
        self._announced[index] += 1
        deal = self._deals.get(index)
        if deal is not None and deal.relay != peer:
            if deal.sent_s is not None and not deal.spread:
                self._spreading_s = mean_of(self._spreading_s, now - deal.sent_s)
            deal.spread = True
            self._rates.passed_on(deal.relay)
            if not self._rates.reach.links(deal.relay, peer):
                deal.second -= 1  # it has it of another
                self._second -= 1
                return
            rate = self._rates.of(deal.relay)
            rate.add(self._chunk_bytes, now)
            rate.start(now)  # with the first, so that the way there and back does not count
            self._paid(index, deal, now)
            if deal.owed <= 0 and deal.sent_s is not None and now > deal.sent_s:
                count = deal.copies * self._chunk_bytes
                rate.at_least(count / (now - deal.sent_s))
                if deal.at_once:
                    self._rates.copied(deal.relay, now - deal.sent_s, count)

    def _paid(self, index: int, deal: _Deal, now: float) -> None:
        deal.owed -= 1
        relay = self._relays[deal.relay]
        relay.owed -= 1
        if deal.owed <= 0 and deal.sent_s is not None:
            self._settle(index, deal)
        if relay.owed <= 0:
            self._rates.of(deal.relay).stop(now)

    def _settle(self, index: int, deal: _Deal) -> None:
        del self._deals[index]
        self._second -= deal.second
        relay = self._relays[deal.relay]
        relay.owed -= deal.owed
        del relay.deals[index]

    def next_deadline(self) -> float:
        """Return when `on_time` should be called."""
        return self._next_check_s

    def on_time(self, now: float) -> None:
        """Take back what relays did not take, or did not pass on, in time."""
        if now < self._next_check_s:
            return
        for relay in self._relays:
            self._rates.of(relay).tick(now)
        for index, deal in list(self._deals.items()):
            if self._is_due(deal, deal.least_s, now):
                self._give_up(index, deal, now)
        self._next_check_s = now + POLL_S if self._deals else float("inf")

    def _is_due(self, deal: _Deal, least_s: float, now: float) -> bool:
        """Return whether it should have left, or have come to a second peer."""
        leaving_s = self._rates.leaving_s(self._chunk_bytes)
        if deal.sent_s is None:
            return now - deal.dealt_s > max(least_s, STUCK * leaving_s)
        usual_s = STUCK * (self._spreading_s if self._spreading_s < math.inf else leaving_s)
        return now - deal.sent_s > max(least_s, 2 * deal.expected_s, usual_s)

    def _give_up(self, index: int, deal: _Deal, now: float) -> None:
        """Wait for it no more; deal it to another, unless somebody else has it."""
        self._settle(index, deal)
        self._tried.setdefault(index, set()).add(deal.relay)
        if not deal.spread:
            self._rates.in_vain(deal.relay, deal.dealt_s, now)
            self._rates.of(deal.relay).penalise(self._rates.estimate(deal.relay))
            self._deal_again(index)

    def _deal_again(self, index: int) -> None:
        self._undealt.appendleft(index)
        self.redealt += 1
        self._rates.redealt += 1

    # --- requests -----------------------------------------------------------------------------

    def may_serve(self, peer: PeerId, index: int, now: float) -> bool:
        """Decide on a request; remembers a refusal, so that an insisting peer is served.

        Refused is what the peer can, or will soon be able to, have from another, unless the relay
        that was dealt it is behind. A relay that took longer than is usual before anybody else has
        it is not waited for once somebody asks: else whoever is served by us would seem to have it
        from the relay, which may pass on nothing.
        """
        if not any(self._rates.relays(relay) for relay in self._relays if relay != peer):
            return True
        state = self._relays.get(peer)
        own = 1 if state and index in state.announced else 0
        deal = self._deals.get(index)
        if deal is not None and deal.relay != peer and not deal.spread:
            knows = deal.sent_s is not None and self._spreading_s < math.inf
            if knows and self._is_due(deal, POLL_S, now):
                self._give_up(index, deal, now)
                deal = None
        promised_to, promised_s = self._promised.get(index, (peer, now))
        promised = promised_to != peer and now - promised_s < PROMISE_S
        dealt = deal is not None and deal.relay != peer
        elsewhere = self._announced[index] > own or dealt or promised
        late = deal is not None and self._is_late(deal.relay)
        insists = (peer, index) in self._refused and not promised
        if not elsewhere or late or insists or len(self._refused) >= REFUSALS_MAX:
            self._refused.discard((peer, index))
            self._promised[index] = (peer, now)
            return True
        self._refused.add((peer, index))
        return False
