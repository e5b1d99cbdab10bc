"""One incarnation of a peer: heartbeats, versions, work, until the membership ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Literal

import trio

from echo2p2p.errors import LinkError, RefusedError
from echo2p2p.ids import SOURCE, Incarnation, ManifestId, PeerId
from echo2p2p.limits import Fill
from echo2p2p.net.connections import ConnectionSettings
from echo2p2p.net.link import LinkSettings
from echo2p2p.net.payloads import RelaySettings, in_memory
from echo2p2p.net.ports import Blobs, Entropy, HttpClient, Journal, Offload, SharedState, Streams
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.shaping import Shaper, Stage
from echo2p2p.weights.assembly import Assembly
from echo2p2p.wire.messages import (
    Heartbeat,
    JoinReply,
    ManifestHeader,
    Measurements,
    Plan,
    Signed,
)
from peer.anchors import AnchorMaker
from peer.config import PeerSettings
from peer.coordinator_client import NOT_A_MEMBER, BusyError, CoordinatorClient
from peer.figures import PeerFigures, Tally
from peer.keeper import EngineKeeper
from peer.local import ReadModel
from peer.rollouts import Rollouts
from peer.state import Weights
from peer.weights import Follower

WORK_DECIDED: Final = "work.decided"
HEARTBEAT_FAILED: Final = "heartbeat.retried"
GOODBYE_S: Final = 1.5
"""How long a leave message may take."""

DATA_CAP_NEAR: Final = "data_cap.near"

Outcome = Literal["finished", "failed", "evicted", "resting"]
"""``resting``: the day's bytes are spent."""


class Membership:
    """From the join's answer to the end."""

    def __init__(
        self,
        *,
        settings: PeerSettings,
        streams: Streams,
        entropy: Entropy,
        offload: Offload,
        sign: Callable[[bytes], bytes],
        dialable: bool,
        reply: JoinReply,
        run_public_key: bytes,
        http: HttpClient,
        shaper: Shaper | None,
        outbox: Blobs | None,
        local: ReadModel | None,
        journal: Journal,
    ) -> None:
        self._settings = settings
        self._shaper = shaper
        self._outbox = outbox
        self._local = local
        self._offload = offload
        self._reply = reply
        self._run_public_key = run_public_key
        self._journal = journal
        self._heard_s = trio.current_time()
        self._plan = reply.plan
        self.client = self._client = CoordinatorClient(
            http, reply.credential, Incarnation(reply.incarnation), self._heard
        )
        self._follower: Follower | None = None
        self._maker: AnchorMaker | None = None
        self._work: Rollouts | None = None
        self._parts: tuple[Weights, EngineKeeper | None] | None = None
        self._latest: int | None = None
        self._decided = Tally()
        self._outcome: Outcome | None = None
        self._failure: RefusedError | LinkError | None = None
        self._scope = trio.CancelScope()
        self.relay = RelayNode(
            me=PeerId(reply.peer_id),
            run_id=reply.run_id,
            run_public_key=run_public_key,
            sign=sign,
            card=reply.card,
            streams=streams,
            endpoint=None,
            dialable=dialable,
            wants=lambda header: self._follower is not None and self._follower.wants(header),
            asked=self._asked,
            begin=self._begin,
            journal=journal,
            entropy=entropy,
            rng=entropy.rng("relay"),
            settings=RelaySettings(
                connections=ConnectionSettings(link=LinkSettings(shaper=shaper))
            ),
        )

    def _asked(self, signed: Signed, header: ManifestHeader) -> None:
        if self._maker is not None:
            self._maker.asked(signed, header)

    def _begin(
        self, manifest_id: ManifestId, header: ManifestHeader
    ) -> tuple[Assembly, SharedState | None]:
        return (self._follower.begin if self._follower else in_memory)(manifest_id, header)

    def _heard(self) -> None:
        self._heard_s = trio.current_time()

    def fills(self) -> Iterator[Fill]:
        """Yield how full everything is that has a bound; of many alike, the fullest."""
        yield from self.relay.fills()
        if self._work is not None:
            yield from self._work.fills()

    # --- running ------------------------------------------------------------------------------

    async def run(self, weights: Weights, keeper: EngineKeeper | None) -> Outcome:
        """Work until the run ends or we are no member any more.

        Raises:
            RefusedError: The coordinator does not take us.
            LinkError: It has not answered for ``join_timeout_s``.
        """
        self._follower = Follower(
            client=self._client,
            relay=self.relay,
            weights=weights,
            keeper=keeper,
            run_public_key=self._run_public_key,
            offload=self._offload,
            journal=self._journal,
            stall_timeout_s=self._settings.stall_timeout_s,
            local=self._local,
        )
        self._maker = AnchorMaker(
            weights=weights,
            relay=self.relay,
            made=self._follower.keep_anchor,
            offload=self._offload,
            journal=self._journal,
        )
        self._parts = weights, keeper
        work = None
        if keeper is not None:
            self._work = work = Rollouts(
                client=self._client,
                incarnation=Incarnation(self._reply.incarnation),
                keeper=keeper,
                leases_at_once=self._settings.engine.leases_at_once,
                journal=self._journal,
                outbox=self._outbox,
                outbox_bytes_max=self._settings.outbox_bytes_max,
            )
        with self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.relay.run)
                self._obey(self._plan)
                nursery.start_soon(self._guarded, self._follower.run)
                nursery.start_soon(self._maker.run)
                nursery.start_soon(self._guarded, self._beats, weights, keeper, work)
                if work is not None:
                    nursery.start_soon(self._guarded, work.run)
                if self._shaper is not None:
                    nursery.start_soon(self._heed_cap, self._shaper)
        if self._failure is not None:
            raise self._failure
        assert self._outcome is not None, "only an end cancels the scope"
        return self._outcome

    async def _guarded(self, part: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a part; its expected ends become the membership's end, not a nursery's error."""
        try:
            await part(*args)
        except* RefusedError as group:
            error = _first(group)
            if error.reason == NOT_A_MEMBER:
                self._finish("evicted")
            else:
                self._failure = error
                self._scope.cancel()

    def _finish(self, outcome: Outcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
        self._scope.cancel()

    async def _heed_cap(self, shaper: Shaper) -> None:
        """Relay only while much of the day's bytes is left; end when all are spent."""
        while (stage := shaper.stage()) is not Stage.SPENT:
            if self.relay.relaying and stage is Stage.THRIFTY:
                self._journal.event(
                    DATA_CAP_NEAR,
                    detail="relays nothing until the day is over",
                    used_bytes=shaper.day().used_bytes,
                    cap_bytes=shaper.limits.bytes_per_day,
                )
            self.relay.relaying = stage is Stage.OPEN
            with trio.move_on_after(shaper.renews_in_s() + 1.0):
                await shaper.changed.park()
        self._finish("resting")

    # --- heartbeats ---------------------------------------------------------------------------

    async def _beats(
        self, weights: Weights, keeper: EngineKeeper | None, work: Rollouts | None
    ) -> None:
        """Renew the term; sooner whenever the proved version changes."""
        while True:
            beat = self._beat(weights, keeper, work)
            try:
                reply = await self._client.heartbeat(beat)
            except BusyError as busy:
                await trio.sleep(busy.retry_after_s)
                continue
            except LinkError as error:
                self._journal.event(HEARTBEAT_FAILED, detail=str(error))
                if trio.current_time() - self._heard_s > self._settings.join_timeout_s:
                    self._failure = error
                    self._scope.cancel()
                await trio.sleep(min(1.0, self._reply.heartbeat_s))
                continue
            self._latest = reply.latest_version
            self._decided.note(reply.outcomes)
            rejected = [outcome.reason for outcome in reply.outcomes if not outcome.accepted]
            if reply.outcomes:
                self._journal.event(
                    WORK_DECIDED,
                    trained=len(reply.outcomes) - len(rejected),
                    rejected=sorted({reason or "" for reason in rejected}),
                )
            if reply.plan != self._plan:
                self._obey(reply.plan)
            if self._beat(weights, keeper, work).version == beat.version:
                with trio.move_on_after(self._reply.heartbeat_s):
                    await self._changed(keeper).park()

    def _changed(self, keeper: EngineKeeper | None) -> trio.lowlevel.ParkingLot:
        assert self._follower is not None
        return self._follower.applied if keeper is None else keeper.changed

    def _beat(
        self, weights: Weights, keeper: EngineKeeper | None, work: Rollouts | None
    ) -> Heartbeat:
        version = weights.version if keeper is None else keeper.version
        traffic = self.relay.statistics()
        return Heartbeat(
            incarnation=self._reply.incarnation,
            state="warming" if version is None else "ready",
            version=version,
            holdings=list(self.relay.holds()),
            relays=self.relay.relaying,
            measurements=Measurements(
                relayed_bytes=traffic.relayed_bytes,
                received_bytes=traffic.received_bytes,
                duplicate_bytes=traffic.duplicate_bytes,
                tokens_generated=0 if keeper is None else keeper.tokens_generated,
                engine_tokens_per_s=0.0 if keeper is None else keeper.tokens_per_s,
                queue_leases=0 if work is None else work.held,
            ),
            price_usd_per_hour=self._settings.price_usd_per_hour,
            available_s=None,
        )

    def tally(self) -> Tally:
        """Return what this incarnation did and what became of it."""
        traffic, work = self.relay.statistics(), self._work
        decided = self._decided
        if work is not None:
            decided = decided.with_uploads(work.accepted, work.rejected)
        moved = Tally(relayed_bytes=traffic.relayed_bytes, received_bytes=traffic.received_bytes)
        return decided.plus(moved)

    def figures(self, past: Tally) -> PeerFigures:
        """Return how this peer stands; ``past`` is the tally of earlier incarnations."""
        weights, keeper = self._parts or (None, None)
        version = None if weights is None else weights.version
        if keeper is not None:
            version = keeper.version
        return PeerFigures(
            state="warming" if version is None else "ready",
            incarnation=self._reply.incarnation,
            version=version,
            latest_version=self._latest,
            tokens_per_s=0.0 if keeper is None else keeper.tokens_per_s,
            tokens_generated=0 if keeper is None else keeper.tokens_generated,
            leases_held=0 if self._work is None else self._work.held,
            links=len(self.relay.statistics().links),
            silent_s=trio.current_time() - self._heard_s,
            tally=past.plus(self.tally()),
        )

    def _obey(self, plan: Plan) -> None:
        self._plan = plan
        source = next((n.address for n in plan.neighbours if n.peer_id == SOURCE), None)
        others = [n for n in plan.neighbours if n.peer_id != SOURCE]
        self.relay.set_neighbours(others, source, peers=plan.peers)
        if plan.run_state == "finished":
            self._finish("finished")
        elif plan.run_state == "failed":
            self._finish("failed")

    async def leave(self) -> None:
        """Say goodbye if we still are a member; bounded, never fails."""
        if self._outcome == "evicted":
            return
        with trio.move_on_after(GOODBYE_S, shield=True):
            try:
                await self._client.leave(self._farewell())
            except (LinkError, RefusedError):
                return

    def _farewell(self) -> str:
        """Return why we leave, for the coordinator's log."""
        if self._outcome == "resting":
            return "its data cap is spent"
        _, keeper = self._parts or (None, None)
        if keeper is not None and keeper.failure is not None:
            return f"its engine cannot be kept alive: {keeper.failure}"
        return "the peer stops"


def _first(group: BaseExceptionGroup[RefusedError]) -> RefusedError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RefusedError)
    return error
