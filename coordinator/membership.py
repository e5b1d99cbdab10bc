"""Who is a member, until when. A core: plain calls, `now` in the coordinator's monotonic seconds.

A member has a term that its heartbeats renew. When it ends the member is gone: nothing that it
holds is waited for any longer. States (DESIGN §6)::

    joining -> warming -> active <-> idle
       any of them -> draining -> gone      (it says that it leaves)
       any of them -> gone                  (its term ended)

*Joining* lasts until the first heartbeat, *warming* until the engine has proved a version, and
active or idle is the planner's choice.

The same identity can join again at any time, because a restarted machine does. While its old term
runs the newcomer is told to wait; if the old incarnation's heartbeats go on meanwhile, there are
two live copies, and the newcomer is refused for good. The first one lives on either way. A
newcomer that does not come back within two terms is forgotten: the beats that it missed must not
count against the first copy's own restart, days later.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Final

from echo2p2p.broadcast.relay_rates import RATE_ASSUMED_BYTES_PER_S
from echo2p2p.ids import Incarnation, PeerId, Version
from echo2p2p.net.shaping import DAY_S, RATE_BYTES_PER_S_MIN
from echo2p2p.wire.messages import Address, Caps, Heartbeat, JoinRequest, Measurements

MEMBERS_MAX: Final = 10_000
"""Live members; beyond it a join is told to come back."""
IDENTITIES_MAX: Final = 100_000
"""Identities in the life of a run; beyond it no new one is taken. Anybody with the token can make
as many as they like, and each is remembered: its incarnations, its row, its counts."""


class State(enum.StrEnum):
    """See the module's picture."""

    JOINING = "joining"
    WARMING = "warming"
    ACTIVE = "active"
    IDLE = "idle"
    DRAINING = "draining"
    GONE = "gone"


_NEXT: Final[dict[State, frozenset[State]]] = {
    State.JOINING: frozenset({State.WARMING, State.ACTIVE, State.IDLE, State.DRAINING, State.GONE}),
    State.WARMING: frozenset({State.ACTIVE, State.IDLE, State.DRAINING, State.GONE}),
    State.ACTIVE: frozenset({State.WARMING, State.IDLE, State.DRAINING, State.GONE}),
    State.IDLE: frozenset({State.WARMING, State.ACTIVE, State.DRAINING, State.GONE}),
    State.DRAINING: frozenset({State.GONE}),
    State.GONE: frozenset(),
}
"""Allowed changes; a member that is gone comes back as another incarnation."""

NO_MEASUREMENTS: Final = Measurements(
    relayed_bytes=0,
    received_bytes=0,
    duplicate_bytes=0,
    tokens_generated=0,
    engine_tokens_per_s=0.0,
    queue_leases=0,
)


@dataclass(frozen=True)
class Member:
    """One incarnation of one peer, as last heard of."""

    peer_id: PeerId
    incarnation: Incarnation
    name: str
    public_key: bytes
    credential: bytes
    """Digest of its credential."""
    relay: Address | None
    engine: str
    state: State
    term_end_s: float
    version: Version | None = None
    measurements: Measurements = NO_MEASUREMENTS
    price_usd_per_hour: float = 0.0
    available_s: float | None = None
    uplink_bytes_per_s: float = RATE_ASSUMED_BYTES_PER_S
    """See `uplink_of`."""
    relays: bool = True
    holdings: frozenset[bytes] = field(default_factory=frozenset)

    def moved(self, state: State) -> Member:
        """Return it in another state; an illegal change is a bug of ours."""
        if state is self.state:
            return self
        assert state in _NEXT[self.state], (self.state, state)
        return replace(self, state=state)


def uplink_of(caps: Caps) -> float:
    """Return what a peer may be expected to send, in bytes per second, from what it is allowed.

    A limit can only make it less: how fast its line is nobody knows yet. Of a day's bytes, both
    ways, half are counted on for sending.
    """
    allowed = [RATE_ASSUMED_BYTES_PER_S]
    if caps.upload_bytes_per_s is not None:
        allowed.append(caps.upload_bytes_per_s)
    if caps.bytes_per_day is not None:
        allowed.append(caps.bytes_per_day / 2 / DAY_S)
    if not all(map(isfinite, allowed)):
        return RATE_BYTES_PER_S_MIN  # a stranger's number
    return max(RATE_BYTES_PER_S_MIN, min(allowed))


@dataclass(frozen=True)
class Joined:
    """The newcomer is a member."""

    member: Member


@dataclass(frozen=True)
class Wait:
    """The old term still runs; try again after it."""

    retry_after_s: float


@dataclass(frozen=True)
class Duplicate:
    """Another copy of this identity is alive and answers."""


@dataclass(frozen=True)
class Full:
    """Too many members."""


@dataclass
class _Contender:
    """A second copy that knocked while the first one's term ran."""

    since_s: float
    beats_since: int = 0


class Membership:
    """All live members, and the last incarnation of those that are gone.

    Args:
        term_s: Seconds that a member lives without a heartbeat.
    """

    def __init__(self, *, term_s: float) -> None:
        assert term_s > 0
        self._term_s = term_s
        self._live: dict[PeerId, Member] = {}
        self._incarnations: dict[PeerId, Incarnation] = {}
        self._contenders: dict[PeerId, _Contender] = {}
        self._by_credential: dict[bytes, PeerId] = {}

    def restore(self, member: Member, now: float) -> None:
        """Put back a member after our own restart; it has a whole term to be heard."""
        self._live[member.peer_id] = replace(member, term_end_s=now + self._term_s)
        self._by_credential[member.credential] = member.peer_id
        self.remember(member.peer_id, member.incarnation)

    def remember(self, peer_id: PeerId, incarnation: Incarnation) -> None:
        """Note that this incarnation has been used."""
        last = self._incarnations.get(peer_id, Incarnation(0))
        self._incarnations[peer_id] = max(last, incarnation)

    def join(
        self, peer_id: PeerId, request: JoinRequest, credential: bytes, now: float
    ) -> Joined | Wait | Duplicate | Full:
        """Admit a peer whose token and key have been checked."""
        current = self._live.get(peer_id)
        if current is not None:
            contender = self._contenders.get(peer_id)
            if contender is None or now - contender.since_s > 2 * self._term_s:
                contender = self._contenders[peer_id] = _Contender(now)
            if contender.beats_since > 1:  # one beat may have crossed the old copy's death
                del self._contenders[peer_id]
                return Duplicate()
            return Wait(max(0.1, current.term_end_s - now))
        known = peer_id in self._incarnations
        if len(self._live) >= MEMBERS_MAX or (
            not known and len(self._incarnations) >= IDENTITIES_MAX
        ):
            return Full()
        incarnation = Incarnation(self._incarnations.get(peer_id, 0) + 1)
        member = Member(
            peer_id=peer_id,
            incarnation=incarnation,
            name=request.name,
            public_key=request.public_key,
            credential=credential,
            relay=request.relay,
            engine=request.engine,
            state=State.JOINING,
            term_end_s=now + self._term_s,
            uplink_bytes_per_s=uplink_of(request.caps),
        )
        self._live[peer_id] = member
        self._by_credential[credential] = peer_id
        self._incarnations[peer_id] = incarnation
        return Joined(member)

    def heartbeat(self, peer_id: PeerId, beat: Heartbeat, now: float) -> Member | None:
        """Renew a term; ``None``: no such live incarnation, it must join again."""
        member = self.find(peer_id, Incarnation(beat.incarnation))
        if member is None:
            return None
        if (contender := self._contenders.get(peer_id)) is not None:
            contender.beats_since += 1
        state = member.state
        if state is not State.DRAINING:
            if beat.state == "draining":
                state = State.DRAINING
            elif beat.state == "warming":
                state = State.WARMING
            elif state in {State.JOINING, State.WARMING}:
                state = State.ACTIVE if member.engine != "none" else State.IDLE
        member = replace(
            member.moved(state),
            term_end_s=now + self._term_s,
            version=None if beat.version is None else Version(beat.version),
            measurements=beat.measurements,
            price_usd_per_hour=beat.price_usd_per_hour,
            available_s=beat.available_s,
            relays=beat.relays,
            holdings=frozenset(beat.holdings),
        )
        self._live[peer_id] = member
        return member

    def leave(self, peer_id: PeerId, incarnation: Incarnation) -> Member | None:
        """End a member at its own wish; returns it, or ``None`` if it was gone already."""
        return None if self.find(peer_id, incarnation) is None else self._drop(peer_id)

    def on_time(self, now: float) -> list[Member]:
        """Evict and return the members whose term is over, in order of their ids."""
        gone = sorted(p for p, member in self._live.items() if member.term_end_s <= now)
        return [self._drop(peer_id) for peer_id in gone]

    def next_deadline(self) -> float | None:
        """Return when `on_time` should next be called."""
        return min((member.term_end_s for member in self._live.values()), default=None)

    def overdue(self, before_s: float) -> int:
        """Return how many terms should have ended before this moment, and have not."""
        return sum(member.term_end_s < before_s for member in self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def is_live(self, peer_id: PeerId) -> bool:
        """Whether any incarnation of this peer is a member now."""
        return peer_id in self._live

    def find(self, peer_id: PeerId, incarnation: Incarnation) -> Member | None:
        """Return a live member of exactly this incarnation."""
        member = self._live.get(peer_id)
        return member if member is not None and member.incarnation == incarnation else None

    def get(self, peer_id: PeerId) -> Member | None:
        """Return the live member with this identity, whichever its incarnation."""
        return self._live.get(peer_id)

    def by_credential(self, credential: bytes) -> Member | None:
        """Return the live member with this credential digest. Other threads may ask too."""
        peer_id = self._by_credential.get(credential)
        return None if peer_id is None else self._live.get(peer_id)

    def live(self) -> list[Member]:
        """Return all live members in order of their ids."""
        return [self._live[peer_id] for peer_id in sorted(self._live)]

    def _drop(self, peer_id: PeerId) -> Member:
        self._contenders.pop(peer_id, None)
        member = self._live.pop(peer_id)
        del self._by_credential[member.credential]
        return member.moved(State.GONE)
