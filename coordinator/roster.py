"""Membership with its consequences: keys, cards, rows on disk, leases of the gone, plans.

`coordinator.membership` decides; this shell performs. The overlay is re-planned when the set of
members has changed: at once as long as everybody is linked to everybody, in a large run a moment
later for all changes together. Until then a newcomer has half of its links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import trio

from coordinator.book import Book
from coordinator.config import MembershipSection
from coordinator.leases import LeaseDesk
from coordinator.membership import (
    Duplicate,
    Full,
    Joined,
    Member,
    Membership,
    State,
    Wait,
    uplink_of,
)
from coordinator.run_state import RunState
from coordinator.schema import MemberRow, stored
from echo2p2p.broadcast.overlay import (
    SOURCE_LINKS_MAX,
    Neighbours,
    link_newcomer,
    plan_overlay,
    plan_source_links,
    unlink,
)
from echo2p2p.broadcast.overlay import Member as OverlayMember
from echo2p2p.broadcast.settings import MESH_NODES_MAX
from echo2p2p.errors import EchoError
from echo2p2p.ids import SOURCE, Incarnation, PeerId
from echo2p2p.net.ports import Entropy, Journal, WallClock
from echo2p2p.net.trust import (
    CertificateAuthority,
    RunKeys,
    check_join_proof,
    credential_digest,
    draw_credential,
    fingerprint,
)
from echo2p2p.wire import codec
from echo2p2p.wire.messages import (
    Address,
    Heartbeat,
    JoinReply,
    JoinRequest,
    LayoutTable,
    MemberCard,
    Neighbour,
    Plan,
)
from echo2p2p.wire.signing import sign_record

PEER_JOINED: Final = "peer.joined"
PEER_READY: Final = "peer.ready"
PEER_EVICTED: Final = "peer.evicted"
PEER_LEFT: Final = "peer.left"
"""Event names."""

REPLAN_S: Final = 0.5
"""So long changes of membership wait for company; a plan of 1000 members takes 0.1 s. The peers
hear of it with their heartbeats, so it could not be noticed much sooner."""


@dataclass(frozen=True)
class Starting:
    """The learner is not up yet, so there is no layout to tell."""


class Roster:
    """All members, and what follows from their coming and going."""

    def __init__(
        self,
        *,
        members: Membership,
        settings: MembershipSection,
        book: Book,
        state: RunState,
        desk: LeaseDesk,
        keys: RunKeys,
        authority: CertificateAuthority | None,
        model_config: str,
        source: Address,
        clock: WallClock,
        entropy: Entropy,
        journal: Journal,
        on_uplinks: Callable[[Mapping[PeerId, float], frozenset[PeerId]], None],
    ) -> None:
        self._on_uplinks = on_uplinks
        self._members = members
        self._settings = settings
        self._book = book
        self._state = state
        self._desk = desk
        self._keys = keys
        self._authority = authority
        self._layout: LayoutTable | None = None
        self._model_config = model_config
        self._clock = clock
        self._entropy = entropy
        self._journal = journal
        self._overlay: Neighbours = {}
        self._at_source: frozenset[PeerId] = frozenset()
        """Who is to be linked to our own relay."""
        self._overlay_rng = entropy.rng("overlay")
        self._replan_s = math.inf
        self._woken = trio.lowlevel.ParkingLot()
        self._source = source

    @property
    def is_open(self) -> bool:
        """Whether members are known: false until the learner is up for the first time."""
        return self._layout is not None

    @property
    def term_s(self) -> float:
        """Seconds that a member lives without a heartbeat."""
        return self._settings.term_s

    def now_s(self) -> float:
        """Return the coordinator's clock, the only one that counts."""
        return self._clock.time()

    async def load(self, layout: LayoutTable) -> None:
        """Open for joins, and take up the members of our last life.

        Each of those has a whole term to be heard.
        """
        rows = await self._book.members()
        # Only now, and without another pause: who asked in between would be told that it is none.
        self._layout = layout
        for row in rows:
            self._members.remember(row.peer_id, row.incarnation)
            if row.live:
                request = stored(row.join_body, JoinRequest)
                member = Member(
                    peer_id=row.peer_id,
                    incarnation=row.incarnation,
                    name=row.name,
                    public_key=request.public_key,
                    credential=row.credential,
                    relay=request.relay,
                    engine=request.engine,
                    state=State.JOINING,
                    term_end_s=0.0,
                    uplink_bytes_per_s=uplink_of(request.caps),
                )
                self._members.restore(member, trio.current_time())
        self._replan()

    # --- coming and going ---------------------------------------------------------------------

    async def join(self, request: JoinRequest) -> JoinReply | Wait | Duplicate | Full | Starting:
        """Admit a peer that has shown the token.

        Raises:
            RemoteProtocolError: Its proof of the identity key is wrong.
            RefusedError: Its certificate request is not acceptable.
        """
        if self._layout is None:
            return Starting()
        peer_id = check_join_proof(request, fingerprint(self._keys.public_key))
        credential = draw_credential(self._entropy)
        digest = credential_digest(credential)
        outcome = self._members.join(peer_id, request, digest, trio.current_time())
        if not isinstance(outcome, Joined):
            return outcome
        member = outcome.member
        certificate = b""
        if self._authority is not None:
            try:
                certificate = self._authority.sign_peer(request.csr, peer_id, member.incarnation)
            except EchoError:
                self._members.leave(peer_id, member.incarnation)
                raise
        await self._book.put_member(
            MemberRow(
                peer_id=peer_id,
                incarnation=member.incarnation,
                name=member.name,
                credential=digest,
                join_body=codec.encode(request),
                live=True,
            )
        )
        self._journal.event(
            PEER_JOINED, peer=peer_id, who=member.name, incarnation=member.incarnation
        )
        self._take_in(member)
        card = MemberCard(
            run_id=self._state.run_id,
            peer_id=peer_id,
            incarnation=member.incarnation,
            public_key=request.public_key,
        )
        return JoinReply(
            run_id=self._state.run_id,
            peer_id=peer_id,
            incarnation=member.incarnation,
            credential=credential,
            card=sign_record(self._keys.private, card),
            certificate=certificate,
            term_s=self._settings.term_s,
            heartbeat_s=self._settings.heartbeat_s,
            now_s=self.now_s(),
            layout=self._layout,
            model_config=self._model_config,
            plan=self.plan_for(member),
        )

    def heartbeat(self, member: Member, beat: Heartbeat, now: float) -> Member | None:
        """Renew a term; wakes those who wait for this peer's state or version."""
        renewed = self._members.heartbeat(member.peer_id, beat, now)
        if renewed is None:
            return None
        if renewed.state is State.ACTIVE and member.state is not State.ACTIVE:
            self._journal.event(PEER_READY, peer=member.peer_id, version=beat.version)
        if renewed.relays != member.relays:
            self._tell_uplinks()
        if (renewed.state, renewed.version) != (member.state, member.version):
            self._state.notify_member(member.peer_id)  # its polls for work look again
        return renewed

    async def leave(self, peer_id: PeerId, incarnation: Incarnation, reason: str) -> None:
        """End a member at its own wish."""
        if (member := self._members.leave(peer_id, incarnation)) is not None:
            self._journal.event(PEER_LEFT, peer=peer_id, reason=reason[:200])
            await self._gone(member)

    async def run(self) -> None:
        """Evict members whose term is over; runs until cancelled."""
        while True:
            for member in self._members.on_time(trio.current_time()):
                self._journal.event(
                    PEER_EVICTED, peer=member.peer_id, incarnation=member.incarnation
                )
                await self._gone(member)
            deadline_s = self._members.next_deadline()
            with trio.move_on_after(
                self._settings.term_s
                if deadline_s is None
                else max(0.01, min(deadline_s, self._replan_s) - trio.current_time())
            ):
                await self._woken.park()
            if trio.current_time() >= self._replan_s:
                self._replan()

    async def _gone(self, member: Member) -> None:
        unlink(self._overlay, member.peer_id)
        self._plan_soon()
        with trio.CancelScope(shield=True):  # memory has forgotten it: so must the store
            await self._book.end_member(
                member.peer_id, member.incarnation, member.measurements.relayed_bytes
            )
            await self._desk.end_peer(member.peer_id, member.incarnation)
        self._state.notify()

    async def relayed_bytes(self) -> int:
        """Return the chunk bytes that all peers ever relayed, by their own account."""
        past = await self._book.relayed_bytes()
        return past + sum(member.measurements.relayed_bytes for member in self._members.live())

    # --- plans --------------------------------------------------------------------------------

    def plan_for(self, member: Member) -> Plan:
        """Return the current orders for one member."""
        activation: Literal["active", "idle", "drain"] = "active"
        if self._state.outcome != "running":
            activation = "drain"
        elif member.engine == "none":
            activation = "idle"
        at_source = member.peer_id in self._at_source
        return Plan(
            activation=activation,
            neighbours=[Neighbour(peer_id=SOURCE, address=self._source)] * at_source
            + [
                Neighbour(peer_id=other, address=self._address(other))
                for other in self._overlay.get(member.peer_id, ())
            ],
            peers=len(self._overlay),
            run_state=self._state.outcome,
        )

    def _address(self, peer_id: PeerId) -> Address | None:
        member = self._members.get(peer_id)
        return None if member is None else member.relay

    def _take_in(self, newcomer: Member) -> None:
        """Give a newcomer neighbours at once."""
        if len(self._at_source) < SOURCE_LINKS_MAX:
            self._at_source |= {newcomer.peer_id}
        if len(self._members) > MESH_NODES_MAX and newcomer.peer_id not in self._overlay:
            others = [
                member.peer_id
                for member in self._members.live()
                if member.peer_id in self._overlay and (member.relay or newcomer.relay)
            ]
            links = self._settings.degree // 2
            link_newcomer(
                self._overlay, newcomer.peer_id, others, links=links, rng=self._overlay_rng
            )
        self._plan_soon()

    def _plan_soon(self) -> None:
        if len(self._members) <= MESH_NODES_MAX:
            self._replan()
        else:
            self._replan_s = min(self._replan_s, trio.current_time() + REPLAN_S)
        self._woken.unpark_all()

    def _replan(self) -> None:
        """Plan the overlay anew from the links that there are."""
        self._replan_s = math.inf
        members = [
            OverlayMember(
                member.peer_id,
                capacity=member.uplink_bytes_per_s,
                dialable=member.relay is not None,
            )
            for member in self._members.live()
        ]
        self._overlay = plan_overlay(
            members,
            degree=self._settings.degree,
            rng=self._overlay_rng,
            keep={peer_id: set(others) for peer_id, others in self._overlay.items()},
        )
        self._at_source = plan_source_links(members, keep=self._at_source)
        self._tell_uplinks()

    def _tell_uplinks(self) -> None:
        """Say what the source may count on when it chooses who passes a chunk on."""
        live = self._members.live()
        uplinks = {one.peer_id: one.uplink_bytes_per_s if one.relays else 0.0 for one in live}
        self._on_uplinks(uplinks, frozenset(one.peer_id for one in live if one.relay is None))
