"""One node of the broadcast: frames and stored chunks in, effects out. Sans-IO.

Deal, push, pull (DESIGN.md §5). The source deals each chunk to one relay (`deal`); a relay pushes
what it was dealt to its neighbours, everybody in a full mesh, a few otherwise; whatever does not
come by itself is announced (HAVE) and pulled (`picker`). A chunk that came from a peer is not
pushed on in a mesh, because its relay pushes it to everybody. Anchors are pulled only.

Only verified chunks are announced or sent. An offer precedes the first chunk of a payload on each
link, and nobody is sent chunks of a payload without having said WANT of it or of the delta before
it, lest the source deal to those whose WANT is back first. All queues have bounds. No tit-for-tat:
all peers serve one run. The shell removes peers that lie, this core only links that do not deliver.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence

from echo2p2p.broadcast.chunk_sets import ChunkSet
from echo2p2p.broadcast.deal import Dealer
from echo2p2p.broadcast.effects import (
    CloseLink,
    Effect,
    SendCancel,
    SendChunk,
    SendReject,
    SendRequest,
    SwarmStatistics,
)
from echo2p2p.broadcast.news import NewsTimer
from echo2p2p.broadcast.outbox import CROSSING_S, Key
from echo2p2p.broadcast.picker import Pick, Picker
from echo2p2p.broadcast.reach import Reach
from echo2p2p.broadcast.relay_rates import RelayRates
from echo2p2p.broadcast.settings import MESH_NODES_MAX, SwarmSettings
from echo2p2p.broadcast.transfer import LinkState, Origin, Transfer, recall, remember, wanting
from echo2p2p.broadcast.uploads import Uploads
from echo2p2p.ids import ManifestId, PeerId


class Swarm:
    """Of one node.

    Args:
        is_source: Whether this is the coordinator's own relay.
        rng: Decides among equals.
        settings: Tuning.

    Every call returns the effects that are due, in order. ``now`` is seconds, monotonic. A call
    about a link that is not open is our own bug; one about an unknown payload is not.
    """

    def __init__(
        self, *, is_source: bool, rng: random.Random, settings: SwarmSettings | None = None
    ) -> None:
        self._is_source = is_source
        self._rng = rng
        self._settings = settings or SwarmSettings()
        self.reach = Reach()
        """Who can be linked to whom, as far as we were told."""
        self._links: dict[PeerId, LinkState] = {}
        self._nodes = int(not is_source)
        """Peers among us and those linked to us."""
        self._transfers: dict[ManifestId, Transfer] = {}
        self._picker = Picker(rng, self._settings)
        self.rates = RelayRates(self.reach)
        """Of the relays that our chunks were dealt to."""
        self._uploads = Uploads(self._settings, rng)
        self._news = NewsTimer(self._settings)
        self._effects: list[Effect] = []
        self._duplicate_bytes = self._unknown_bytes = 0
        self._pushed = self._requested = 0

    # --- links --------------------------------------------------------------------------------

    @property
    def _peers(self) -> int:
        """How many there are, as far as this node can tell."""
        return self._nodes if self.reach.peers is None else self.reach.peers

    @property
    def _mesh(self) -> bool:
        """Whether everybody is linked to everybody who can be."""
        return self._peers <= MESH_NODES_MAX

    def link_opened(
        self, link: PeerId, *, is_source: bool, rtt_s: float, now: float
    ) -> list[Effect]:
        """An authenticated link is there."""
        del now
        self._links[link] = LinkState(is_source)
        self._nodes += not is_source
        self._uploads.open(link)
        self._picker.link_opened(link, is_source=is_source, rtt_s=rtt_s)
        for transfer in self._transfers.values():
            self._effects += transfer.introduce(link, is_source=self._is_source)
        return self._take()

    def link_closed(self, link: PeerId, now: float) -> list[Effect]:
        """The link is gone; what was on its way either way is lost."""
        self._nodes -= not self._links.pop(link).is_source
        self._uploads.close(link, now)
        self._picker.link_closed(link)
        for transfer in self._transfers.values():
            transfer.forget(link, now)
        self.rates.forget(link)
        self._plan(now)
        self._pump(now)
        return self._take()

    # --- payloads -----------------------------------------------------------------------------

    def add_transfer(
        self,
        manifest_id: ManifestId,
        *,
        count: int,
        chunk_bytes: int,
        held: Collection[int],
        push: bool,
        after: ManifestId | None = None,
        now: float,
    ) -> list[Effect]:
        """Hold, or follow, a payload. Adding it again changes nothing.

        Args:
            manifest_id: Its name.
            count: Chunks, chunk 0 included.
            chunk_bytes: Of a whole chunk.
            held: Verified chunks; the rest is wanted. The source deals only what it holds whole.
            push: Deal it and push it on (deltas); otherwise it is pulled only (anchors).
            after: The delta before it: who wanted that is taken to want this.
            now: Seconds.
        """
        if manifest_id in self._transfers:
            return []
        chunks = ChunkSet(count, held)
        dealer, late_s = None, self._settings.backlog_max_s
        if self._is_source and chunks.complete:
            dealer = Dealer(count, chunk_bytes, self.rates, push=push, backlog_max_s=late_s)
        dealing = push and dealer is not None
        transfer = self._transfers[manifest_id] = Transfer(
            manifest_id, count, chunk_bytes, push, chunks, dealer, dealing
        )
        if not chunks.complete:
            missing = ChunkSet(count, (index for index in range(count) if index not in chunks))
            self._picker.follow(manifest_id, missing=missing, chunk_bytes=chunk_bytes, live=push)
        stands = wanting(self._transfers.get(after)) if after and push else set()
        for link, state in self._links.items():
            view = transfer.view(link)
            view.offered = recall(state.offers_early, manifest_id)
            view.wants = recall(state.wants_early, manifest_id)
            self._effects += transfer.introduce(link, is_source=self._is_source)
            if view.wants or link in stands:
                self._follower(transfer, link, now)
        self._pump(now)
        return self._take()

    def drop_transfer(self, manifest_id: ManifestId, now: float) -> list[Effect]:
        """Forget a payload; what is asked of us about it, or was and is not sent, is rejected."""
        transfer = self._transfers.pop(manifest_id, None)
        if transfer is not None:
            self._effects += [SendReject(x, manifest_id, 0, "unknown") for x in transfer.fetching()]
            self._cancel(self._picker.drop(manifest_id, now))
            for _, outbox in self._uploads.in_turn():
                outbox.drop(manifest_id)
        return self._take()

    # --- frames -------------------------------------------------------------------------------

    def receive_offer(self, link: PeerId, manifest_id: ManifestId) -> None:
        """The other side has shown a manifest: of a payload of ours, or of one to come."""
        transfer = self._transfers.get(manifest_id)
        if transfer is not None:
            transfer.view(link).offered = True
        else:
            remember(self._links[link].offers_early, manifest_id)

    def receive_want(self, link: PeerId, manifest_id: ManifestId, now: float) -> list[Effect]:
        """The other side follows a payload."""
        transfer = self._transfers.get(manifest_id)
        if transfer is None:
            remember(self._links[link].wants_early, manifest_id)
            if self._is_source:  # a peer may yet come to follow it; we made all that there are
                self._effects.append(SendReject(link, manifest_id, 0, "unknown"))
            return self._take()
        self._effects += transfer.wanted(link, now, is_source=self._is_source)
        if link not in transfer.followers:
            self._follower(transfer, link, now)
            self._pump(now)
        return self._take()

    def receive_have(
        self,
        link: PeerId,
        manifest_id: ManifestId,
        indices: Sequence[int],
        now: float,
        *,
        ask: bool = False,
    ) -> list[Effect]:
        """The other side holds chunks; ``ask``: that nobody pushes to us.

        Raises:
            RemoteProtocolError: Not ascending, or no such chunk.
        """
        transfer = self._transfers.get(manifest_id)
        if transfer is None:
            return []
        transfer.check_announced(indices)
        view, outbox = transfer.view(link), self._uploads.to(link)
        for index in indices:
            view.add(index)
            outbox.cancel((manifest_id, index))
            if transfer.dealer:
                transfer.dealer.announced(link, index, now)
        if self._from_source(link) and self._mesh and transfer.lacks_index and 0 in indices:
            transfer.late = True  # or it would send us chunk 0 itself
            self._picker.hurry(manifest_id, now + self._settings.late_grace_s)
        pushed = transfer.push and self._mesh and not ask
        grace_s = self._settings.grace_s(late=transfer.late) if pushed else 0.0
        self._picker.offered(link, manifest_id, indices, now, grace_s=grace_s)
        self._plan(now, [link])
        self._pump(now)
        return self._take()

    def receive_request(
        self, link: PeerId, manifest_id: ManifestId, index: int, now: float
    ) -> list[Effect]:
        """The other side asks for a chunk.

        Raises:
            RemoteProtocolError: No such chunk.
        """
        transfer = self._transfers.get(manifest_id)
        if transfer is None:
            self._effects.append(SendReject(link, manifest_id, index, "unknown"))
            return self._take()
        transfer.check_index(index)
        outbox, key = self._uploads.to(link), (manifest_id, index)
        if not outbox.holds(key) and not outbox.sent_since(key, now - CROSSING_S):
            refusal = transfer.refusal(link, index, now)
            if refusal is None and self._uploads.queue(link, key, live=transfer.push):
                self._pump(now)
            else:
                self._effects.append(SendReject(link, manifest_id, index, refusal or "busy"))
        return self._take()

    def receive_reject(
        self, link: PeerId, manifest_id: ManifestId, index: int, reason: str, now: float
    ) -> list[Effect]:
        """The other side will not send a chunk.

        Raises:
            RemoteProtocolError: No such chunk.
        """
        transfer = self._transfers.get(manifest_id)
        if transfer is not None:
            transfer.check_index(index)
            self._picker.rejected(link, manifest_id, index, reason, now)
            if index == 0 and reason == "unknown":
                transfer.unfollow(link, now)
                self._uploads.to(link).drop(manifest_id)
                self._pump(now)
            self._plan(now)
        return self._take()

    def receive_cancel(self, link: PeerId, manifest_id: ManifestId, index: int) -> None:
        """The other side no longer needs a chunk."""
        self._uploads.to(link).cancel((manifest_id, index))

    # --- chunks -------------------------------------------------------------------------------

    def chunk_arrived(
        self, link: PeerId, manifest_id: ManifestId, index: int, size: int, now: float
    ) -> list[Effect]:
        """A chunk came in and is not verified yet; `chunks_stored` or `chunk_lost` must follow.

        Raises:
            RemoteProtocolError: No such chunk.
        """
        transfer = self._transfers.get(manifest_id)
        if transfer is None:
            self._unknown_bytes += size
            return []
        transfer.check_index(index)
        if index in transfer.held or index in transfer.origins:
            self._duplicate_bytes += size
        asked, cancels = self._picker.arrived(link, manifest_id, index, size, now)
        view = transfer.view(link)
        if index not in transfer.held:
            transfer.origins.setdefault(index, Origin(link, asked, index in view.held))
        view.exchanged(index, theirs=True)
        self._uploads.to(link).cancel((manifest_id, index))
        self._cancel(cancels)
        self._plan(now, [link, *(pick.link for pick in cancels)])
        return self._take()

    def chunks_stored(
        self, manifest_id: ManifestId, indices: Iterable[int], now: float
    ) -> list[Effect]:
        """Chunks are verified and held, wherever they came from."""
        transfer = self._transfers.get(manifest_id)
        if transfer is None:
            return []
        new = [index for index in indices if transfer.held.add(index)]
        for index in new:
            self._cancel(self._picker.stored(manifest_id, index, now))
            self._push_on(transfer, index, transfer.origins.pop(index, None), now)
        if new:
            transfer.fresh += new
            self._news.stored(now, mesh=self._mesh, links=len(self._links))
        if 0 in new:
            for index in list(transfer.origins):  # what had waited for the index and was wrong
                self._lose(transfer, index, now)
            self._plan(now)
        self._pump(now)
        return self._take()

    def chunk_lost(self, manifest_id: ManifestId, index: int, now: float) -> list[Effect]:
        """A chunk that arrived was wrong, or could not be kept."""
        transfer = self._transfers.get(manifest_id)
        if transfer is not None and index not in transfer.held:
            self._lose(transfer, index, now)
            self._plan(now)
        return self._take()

    def chunk_sent(
        self, link: PeerId, manifest_id: ManifestId, index: int, now: float, *, sent: bool = True
    ) -> list[Effect]:
        """The writer is through with a `SendChunk`; ``sent`` is false if it had to skip it."""
        self._uploads.finished(link, (manifest_id, index), now, sent=sent)
        transfer = self._transfers.get(manifest_id)
        if transfer is not None:
            if sent:
                transfer.view(link).exchanged(index, theirs=False)
            if transfer.dealer and sent:
                transfer.dealer.sent(link, index, now)
            elif transfer.dealer:
                transfer.dealer.not_sent(link, index)
        self._pump(now)
        return self._take()

    # --- time ---------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """Return when `on_time` must be called; infinity if nothing is due."""
        dealers = (each.dealer.next_deadline() for each in self._transfers.values() if each.dealer)
        own_s = min(self._news.next_deadline(), self._uploads.unblock_s)
        return min(own_s, self._picker.next_deadline(), *dealers)

    def on_time(self, now: float) -> list[Effect]:
        """Announce, ask, and take back what is due."""
        if now >= self._news.next_deadline():
            self._flush(now)
        overdue = self._picker.on_time(now)
        self._cancel(overdue.cancels)
        for link in overdue.hopeless:
            self._effects.append(CloseLink(link, "promised chunks and sent none"))
        for transfer in self._transfers.values():
            if transfer.dealer:
                transfer.dealer.on_time(now)
        self._plan(now)
        self._pump(now)
        return self._take()

    def fetching(self) -> list[tuple[PeerId, ManifestId]]:
        """Return which links follow which of our payloads without having them whole."""
        return [(link, key) for key, each in self._transfers.items() for link in each.fetching()]

    def statistics(self) -> SwarmStatistics:
        """Return the counters."""
        waste, longest = (self._duplicate_bytes, self._unknown_bytes), self._uploads.longest
        return SwarmStatistics(*waste, self._pushed, self._requested, self.rates.redealt, longest)

    # --- inside -------------------------------------------------------------------------------

    def _take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _follower(self, transfer: Transfer, link: PeerId, now: float) -> None:
        """``link`` wants the payload: count it in, and tell it what there is."""
        view = transfer.view(link)
        transfer.followers[link] = view.known
        if transfer.dealer:
            transfer.dealer.relay_joined(link, view.held, now)
        grace_s = self._settings.pull_grace_max_s
        pushed = transfer.dealing or now < transfer.dealt_s + grace_s
        first = pushed and 0 not in view.known and len(transfer.followers) <= MESH_NODES_MAX
        if first and self._uploads.queue(link, (transfer.manifest_id, 0), live=True):
            view.aware.add(0)  # announced to those only to whom nothing is pushed any more
        if not transfer.dealing:
            self._announce(transfer, link, transfer.held)
        if self._mesh and not self._from_source(link):
            for index in transfer.ours_since(now - grace_s):  # it came a moment too late for them
                self._push(transfer, index, link)

    def _push(self, transfer: Transfer, index: int, link: PeerId) -> None:
        key, outbox = (transfer.manifest_id, index), self._uploads.to(link)
        fresh = index not in transfer.view(link).known and not outbox.holds(key)
        self._pushed += fresh and self._uploads.queue(link, key, live=True)

    def _announce(self, transfer: Transfer, link: PeerId, indices: Iterable[int]) -> None:
        to_source, undialable = self._from_source(link), link in self.reach.undialable
        self._effects += transfer.news(link, indices, to_source=to_source, undialable=undialable)

    def _flush(self, now: float) -> None:
        mesh = self._mesh
        all_due = self._news.take(now, mesh=mesh)
        for transfer in self._transfers.values():
            if not transfer.fresh:
                continue
            fresh, everybody = sorted(transfer.fresh), all_due or transfer.held.complete
            for link in transfer.followers:
                waits = self._from_source(link) or link in self.reach.undialable
                if waits or (everybody and (mesh or transfer.is_news(link, fresh))):
                    self._announce(transfer, link, fresh)
            if everybody:
                transfer.fresh = []

    def _lose(self, transfer: Transfer, index: int, now: float) -> None:
        """Want a chunk again that had come; its sender, if it is still linked, does hold it."""
        origin = transfer.origins.pop(index, None)
        self._picker.lost(transfer.manifest_id, index)
        if origin is not None and origin.link in self._links:
            self._picker.offered(origin.link, transfer.manifest_id, [index], now, grace_s=0.0)

    def _push_on(self, transfer: Transfer, index: int, origin: Origin | None, now: float) -> None:
        """Queue a chunk that came unasked for the neighbours who should get it from us."""
        if origin is None or origin.asked or not transfer.push:
            return
        if self._mesh and origin.link in self.reach.undialable:
            transfer.half_pushed.add(index)
        is_deal = self._from_source(origin.link) and not origin.announced
        if not is_deal or (self._mesh and index == 0):
            return  # in a mesh everybody gets it first-hand; elsewhere pulls take over
        if transfer.held_beside(index, origin.link):
            return  # another relay has it already, perhaps from an earlier deal
        targets = [link for link in transfer.lacking(index) if not self._from_source(link)]
        transfer.note_ours(index, now)
        if not self._mesh:
            quickest = self._uploads.quickest(targets, self._picker.rate_of)
            targets = quickest[: self._settings.fanout(self._peers)]
        for link in targets:
            self._push(transfer, index, link)

    def _from_source(self, link: PeerId) -> bool:
        return link in self._links and self._links[link].is_source

    def _plan(self, now: float, links: Iterable[PeerId] | None = None) -> None:
        for pick in self._picker.plan(now, links):
            self._requested += 1
            self._effects.append(SendRequest(pick.link, pick.manifest_id, pick.index))

    def _cancel(self, picks: Iterable[Pick]) -> None:
        self._effects += [SendCancel(pick.link, pick.manifest_id, pick.index) for pick in picks]

    def _pump(self, now: float) -> None:
        """Hand chunks to the writers that have room: live ones, then new deals, then bulk."""
        self._uploads.unblock_s = math.inf
        for live in (True, False):
            for link, outbox in self._uploads.waiting():
                if not self._uploads.may_start(now):
                    return
                key = outbox.next(live=live)
                if key is not None:
                    self._send(link, key, now)
            if live and self._is_source:
                for transfer in self._transfers.values():
                    self._deal(transfer, now)

    def _deal(self, transfer: Transfer, now: float) -> None:
        dealer, known = transfer.dealer, transfer.followers
        if dealer is None or not known or not (transfer.dealing or dealer.busy):
            return
        fanout = None if self._mesh else self._settings.fanout(self._peers)
        while self._uploads.may_start(now):
            free = [link for link, box in self._uploads.in_turn() if link in known and box.has_room]
            choice = dealer.deal(free, known, fanout, now, linked=self._nodes)
            if choice is None:
                choice = dealer.help(free, known)
                if choice is None:
                    break
                dealer.helped(choice[1], now)
                self._announce(transfer, choice[0], [choice[1]])  # or it would push it on
            link, index = choice
            known[link].add(index)
            key = (transfer.manifest_id, index)
            self._uploads.to(link).write(key)
            self._send(link, key, now)
        if transfer.dealing and dealer.finished:
            transfer.dealing, transfer.dealt_s = False, now
            for link in known:
                self._announce(transfer, link, transfer.held)

    def _send(self, link: PeerId, key: Key, now: float) -> None:
        self._uploads.started(link, key, self._transfers[key[0]].chunk_bytes, now)
        self._effects.append(SendChunk(link, *key))
