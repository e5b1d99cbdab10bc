"""What lies between simulated machines: uplinks, downlinks, distance, loss and silence.

Each machine has an uplink and a downlink, both first-in first-out at a rate, a distance to the
middle of the network and a share of packets that its line loses. A line may be a token bucket,
which has saved up something for a burst when it was idle, and packets may have heads and be
acknowledged (`Framing`), as on the test-bed of `scenarios.namespaces`; by default bytes are
payload, on a line that is as fast as what payload can have of it. Bytes travel in segments on a
`Lane`, one direction of one connection, which keeps them in order. A lost packet is sent again a
round trip later, costs its bytes twice and holds up what comes after it on its lane; and no lane is
faster than loss allows (Mathis et al., 1997: 1.22 MSS / (RTT sqrt(p))). Queues have
no end, so congestion shows as delay and not as loss; but who has much to send waits while the
queue of either line is `QUEUE_S` long, as congestion control would make it. Those who wait for the
same line go on in turn, as fast as it takes segments.

Machines can be cut from each other, one way or both, or frozen; what is on its way is held back
and goes on afterwards, on each lane when its sender tries again: its timer doubles each time (RFC
6298), so after a cut of 3 s that may take 3 s more. Without loss everything follows from the calls
made; loss draws from the given generator. No function decides anything whose last bit differs
between machines: IEEE 754 fixes sums, products, quotients and square roots.

`SimLinks.run` must run in the background; it carries the segments.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import trio

from echo2p2p.testing import clock

SEGMENT_BYTES: Final = 16 * 1024
PACKET_BYTES: Final = 1460
"""Payload of an Ethernet packet with TCP (MSS)."""
LOSS_MAX: Final = 0.5
MATHIS: Final = 1.22
FAST_RETRANSMIT_PACKETS: Final = 4
"""So many packets behind a lost one tell at once that it is missing; else a timer must."""
AT_ONCE_S: Final = 1e-4
"""What ends within so short a time is not waited for: it would only cost events. Rates are kept, as
a line's next bytes still start where these end."""
QUEUE_S: Final = 1.0
"""Of a line: as long as routers of homes let it become."""
TURN_S: Final = 1 / 1024
"""Who was let on a line has sent by then."""
TIMER_MIN_S: Final = 0.2
"""Least retransmission timeout, as in Linux: beside the round trip, where that hardly varies."""
WINDOW_FIRST_BYTES: Final = 10 * PACKET_BYTES
"""What a connection sends in the round trip after a pause (RFC 6928); twice that in the next."""
OPENING_TIMER_S: Final = 1.0
"""Of a connection that is not there yet."""
TIMER_MAX_S: Final = 120.0


@dataclass(frozen=True)
class Framing:
    """What a line carries beside payload, and how much of it at once."""

    burst_bytes: Callable[[float], float]
    """What a bucket of a rate holds, in bytes; the rate is in bytes a second."""
    head_bytes: int
    """Of each packet, whatever is in it."""
    acknowledgement_bytes: int
    """For every second packet, the other way."""

    def bytes_of(self, size: int, *, packed: bool) -> int:
        """Return what ``size`` bytes of payload are on the line; ``packed``: others share packets.

        While a line is busy, what is written to a connection waits, and leaves in full packets.
        """
        packets = size / PACKET_BYTES if packed else max(1, -(-size // PACKET_BYTES))
        return size + int(self.head_bytes * packets)

    def acknowledged(self, size: int) -> int:
        """Return what their receiver sends back."""
        return int(self.acknowledgement_bytes * size / (2 * PACKET_BYTES))


@dataclass(frozen=True)
class Traffic:
    """Bytes of one machine since the start."""

    sent_bytes: int
    """Put on its uplink, repetitions included."""
    received_bytes: int
    """Off its downlink."""


Admit = Callable[[], bool]
"""Lets a writer go on; returns whether it was still waiting."""


@dataclass(eq=False)
class Node:
    """One machine's line."""

    name: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    loss: float
    up_burst_s: float = 0.0
    down_burst_s: float = 0.0
    """For so long it has saved up, when it was idle."""
    up_free_s: float = -math.inf
    down_free_s: float = -math.inf
    sent_bytes: int = 0
    received_bytes: int = 0
    up_waiting: deque[Admit] = field(default_factory=deque)
    down_waiting: deque[Admit] = field(default_factory=deque)
    """Writers, here and elsewhere, for whom either queue is too long; no one twice."""


@dataclass(eq=False)
class Lane:
    """One direction of one connection; what is put on it arrives in order."""

    sender: Node
    receiver: Node
    free_s: float = 0.0
    """When the next segment may leave, as far as loss limits the rate."""
    reached_s: float = 0.0
    """When the last segment reaches the receiver's line."""
    is_under_way: bool = False
    """The distance is behind it already: what follows a head without waiting for an answer."""
    is_opening: bool = False
    """Its connection is not there yet."""
    lost_s: float = math.inf
    """When the first segment was held back of those that have not come through since."""
    window_bytes: int = WINDOW_FIRST_BYTES
    round_s: float = -math.inf
    """When the present round trip began, with the first of its bytes."""
    round_bytes: int = 0
    """That have left in it."""
    again_s: float = -math.inf
    """When it is sent again, now that nothing holds it back; later ones come after it."""

    def leaves_s(self, left_s: float, size: int) -> float:
        """Return when a segment leaves that the line would take at ``left_s``: slow start.

        After a pause of a retransmission timeout a connection begins again, as Linux has it.
        """
        round_s = self.round_trip_s()
        while True:
            if left_s >= self.round_s + round_s:
                is_used = self.round_bytes >= self.window_bytes
                idle = left_s - self.round_s > TIMER_MIN_S + 2 * round_s
                self.window_bytes <<= is_used
                if idle:
                    self.window_bytes = WINDOW_FIRST_BYTES
                self.round_s, self.round_bytes = left_s, 0
            if self.round_bytes < self.window_bytes:
                self.round_bytes += size
                return left_s
            left_s = self.round_s + round_s

    def round_trip_s(self) -> float:
        """Return what the way there and back takes."""
        return 2 * (self.sender.latency_s + self.receiver.latency_s)

    def retry_s(self, now: float) -> float:
        """Return when what was lost is sent again after ``now``."""
        timer_s = OPENING_TIMER_S if self.is_opening else TIMER_MIN_S + self.round_trip_s()
        again_s = self.lost_s + timer_s
        while again_s < now:
            timer_s = min(2 * timer_s, TIMER_MAX_S)
            again_s += timer_s
        return again_s


class SimLinks:
    """The machines' lines and what is on the way between them.

    Args:
        rng: Decides which packets are lost; needed only where one can be.
        framing: ``None``: payload is all there is.
    """

    def __init__(self, rng: random.Random | None = None, *, framing: Framing | None = None) -> None:
        self._rng = rng
        self._framing = framing
        self._nodes: dict[str, Node] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.wake = trio.CancelScope()
        """Of whoever waits for what is due next."""
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._frozen: Counter[str] = Counter()
        """How often each is cut or frozen: what overlaps has to end as often as it began."""
        self._held: list[tuple[Lane, Callable[[], None]]] = []
        self._at_s = -math.inf
        """When the event that runs now was due."""

    # --- what a scenario does -----------------------------------------------------------------

    def add_node(
        self,
        name: str,
        *,
        up_bytes_per_s: float = math.inf,
        down_bytes_per_s: float = math.inf,
        latency_s: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        """Add a machine; ``latency_s`` is one way, to the middle of the network."""
        assert name not in self._nodes, name
        assert 0 <= loss <= LOSS_MAX, loss
        self._nodes[name] = Node(name, up_bytes_per_s, down_bytes_per_s, latency_s, loss)
        self._save_up(self._nodes[name])

    def set_rates(self, name: str, *, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Change a machine's rates for the segments that come from now on."""
        node = self._nodes[name]
        node.up_bytes_per_s, node.down_bytes_per_s = up_bytes_per_s, down_bytes_per_s
        self._save_up(node)

    def set_quality(self, name: str, *, latency_s: float, loss: float) -> None:
        """Change a machine's distance and loss for the segments that come from now on."""
        assert 0 <= loss <= LOSS_MAX, loss
        node = self._nodes[name]
        node.latency_s, node.loss = latency_s, loss

    def cut(self, sender: str, receiver: str) -> None:
        """Hold back all that ``sender`` sends to ``receiver``; one way, silent."""
        self._cuts[sender, receiver] += 1

    def heal(self, sender: str, receiver: str) -> None:
        """End one cut; after the last of them what was held back is sent again, in order."""
        assert self._cuts[sender, receiver], f"{sender} and {receiver} are not cut"
        self._cuts[sender, receiver] -= 1
        self._release()

    def freeze(self, name: str) -> None:
        """Let nothing out of a machine and nothing into it, as if it were stopped."""
        self._frozen[name] += 1

    def thaw(self, name: str) -> None:
        """End one freeze; after the last of them what was held back is sent again, in order."""
        assert self._frozen[name], f"{name} is not frozen"
        self._frozen[name] -= 1
        self._release()

    def node(self, name: str) -> Node | None:
        """Return a machine's line."""
        return self._nodes.get(name)

    def traffic(self, name: str) -> Traffic:
        """Return the machine's counters."""
        node = self._nodes[name]
        return Traffic(node.sent_bytes, node.received_bytes)

    async def run(self) -> None:
        """Carry segments until cancelled."""
        await clock.run_due(self)

    def next_due_s(self) -> float:
        """Return when something is to happen next."""
        return self._events[0][0] if self._events else math.inf

    def run_due(self, now: float) -> None:
        """Let happen what is due."""
        while self._events and self._events[0][0] <= now:
            self._at_s, _, action = heapq.heappop(self._events)
            action()
        self._at_s = -math.inf

    # --- what connections do ------------------------------------------------------------------

    def lane(self, sender: str, receiver: str, *, is_under_way: bool = False) -> Lane:
        """Return a new direction of a connection."""
        return Lane(self._nodes[sender], self._nodes[receiver], is_under_way=is_under_way)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``delay_s`` seconds."""
        when = self._now() + delay_s
        if when < self.wake.deadline:
            self.wake.deadline = when
        heapq.heappush(self._events, (when, next(self._order), action))

    def travel(self, lane: Lane, size: int, deliver: Callable[[], None]) -> float:
        """Bring ``size`` bytes over; ``deliver`` runs when the last of them is there.

        Returns:
            Seconds until they have left; 0 if that is within `AT_ONCE_S`.
        """
        now, sender, receiver = self._now(), lane.sender, lane.receiver
        again_bytes, late_s = self._losses(lane, size)
        framed, out = size, size + again_bytes
        if self._framing is not None:
            packed = sender.up_free_s > now
            framed = self._framing.bytes_of(size, packed=packed)
            out = framed + (self._framing.bytes_of(again_bytes, packed=False) if again_bytes else 0)
            self._acknowledge(receiver, self._framing.acknowledged(size), now)
        sender.sent_bytes += out
        free_s = max(now - sender.up_burst_s, sender.up_free_s) + out / sender.up_bytes_per_s
        sender.up_free_s = free_s
        left_s = max(now, free_s)
        if self._framing is not None:
            left_s = lane.leaves_s(left_s, size)
        if late_s or lane.free_s:
            lane.free_s = max(now, lane.free_s) + size / self._lossy_rate(lane)
            left_s = max(left_s, lane.free_s)

        way_s = 0.0 if lane.is_under_way else sender.latency_s + receiver.latency_s
        lane.reached_s = max(lane.reached_s, left_s + way_s + late_s)
        self.after(lane.reached_s - now, _Segment(self, lane, framed, deliver).arrive)
        return 0.0 if left_s - now < AT_ONCE_S else left_s - now

    def full_for(self, lane: Lane) -> float:
        """Return the seconds until both lines' queues are short enough to be sent more."""
        free_s = max(lane.sender.up_free_s, lane.receiver.down_free_s)
        return max(0.0, free_s - trio.current_time() - QUEUE_S)

    def is_free(self, lane: Lane) -> bool:
        """Return whether both queues are short enough, and nobody waits who came before."""
        waits = lane.sender.up_waiting or lane.receiver.down_waiting
        return not waits and not self.full_for(lane)

    def when_free(self, lane: Lane, admit: Admit) -> None:
        """Call ``admit`` when the longer of both lines' queues is short enough, and it is its turn.

        Were all called at once, a thousand would look for each segment that one of them can send.
        """
        is_up = lane.sender.up_free_s >= lane.receiver.down_free_s
        node = lane.sender if is_up else lane.receiver
        waiting = node.up_waiting if is_up else node.down_waiting
        waiting.append(admit)
        if len(waiting) == 1:
            self.after(self.full_for(lane), partial(self._turn, node, is_up))

    async def open(self, out: Lane, back: Lane) -> None:
        """Open a connection; returns when its other end has said yes."""
        out.is_opening = back.is_opening = True
        await self.carry(out, 0)
        await self.carry(back, 0)
        out.is_opening = back.is_opening = False

    async def carry(self, lane: Lane, size: int) -> None:
        """Bring ``size`` bytes over, segment by segment; returns when the last is there."""
        arrived = trio.Event()
        while size > SEGMENT_BYTES:
            await trio.sleep(self.travel(lane, SEGMENT_BYTES, _nothing))
            size -= SEGMENT_BYTES
        self.travel(lane, size, arrived.set)
        await arrived.wait()

    # --- inside -------------------------------------------------------------------------------

    def arrived(self, lane: Lane, size: int, deliver: Callable[[], None]) -> None:
        """A segment has reached its receiver's line."""
        receiver, now = lane.receiver, self._now()
        is_idle = receiver.down_free_s < now  # nothing before it is still to be delivered
        free_s = max(now - receiver.down_burst_s, receiver.down_free_s)
        receiver.down_free_s = free_s + size / receiver.down_bytes_per_s
        receiver.received_bytes += size
        if is_idle and receiver.down_free_s - now < AT_ONCE_S:
            deliver()
        else:
            self.after(receiver.down_free_s - now, deliver)

    def hold(self, lane: Lane, arrive: Callable[[], None]) -> bool:
        """Keep a segment's arrival for later if nothing gets through now."""
        now = self._now()
        if self._is_held(lane):
            lane.lost_s = min(lane.lost_s, now)
            self._held.append((lane, arrive))
            return True
        if lane.again_s > now:
            self.after(lane.again_s - now, arrive)
            return True
        lane.lost_s = math.inf
        return False

    def _turn(self, node: Node, is_up: bool) -> None:
        """Let the first go on that waits for a line, if it may; then the next has its turn."""
        if is_up:
            waiting, free_s, bytes_per_s = node.up_waiting, node.up_free_s, node.up_bytes_per_s
        else:
            waiting, free_s, bytes_per_s = (
                node.down_waiting,
                node.down_free_s,
                node.down_bytes_per_s,
            )
        next_s = free_s - self._now() - QUEUE_S
        if next_s <= 0:
            while waiting and not waiting.popleft()():
                pass
            next_s = min(TURN_S, SEGMENT_BYTES / bytes_per_s)
        if waiting:
            self.after(next_s, partial(self._turn, node, is_up))

    def _save_up(self, node: Node) -> None:
        """Work out what the lines of a machine have when they were idle."""
        if self._framing is not None:
            saved = self._framing.burst_bytes
            node.up_burst_s = saved(node.up_bytes_per_s) / node.up_bytes_per_s
            node.down_burst_s = saved(node.down_bytes_per_s) / node.down_bytes_per_s

    def _acknowledge(self, node: Node, size: int, now: float) -> None:
        """Put what tells of packets on the receiver's uplink; nobody waits for it."""
        node.sent_bytes += size
        node.up_free_s = max(now - node.up_burst_s, node.up_free_s) + size / node.up_bytes_per_s

    def _now(self) -> float:
        """Return the time; while events are worked through, when the present one was due.

        Where the clock has ticks they are worked through late, several at once, and what was due
        first must not see what has happened since.
        """
        return trio.current_time() if self._at_s == -math.inf else self._at_s

    def _is_held(self, lane: Lane) -> bool:
        sender, receiver = lane.sender.name, lane.receiver.name
        frozen = self._frozen[sender] or self._frozen[receiver]
        return bool(frozen or self._cuts[sender, receiver])

    def _release(self) -> None:
        now = self._now()
        held, self._held = self._held, []
        for lane, arrive in held:
            if self._is_held(lane):
                self._held.append((lane, arrive))
            else:
                lane.again_s = lane.retry_s(now)
                self.after(lane.again_s - now, arrive)

    def _losses(self, lane: Lane, size: int) -> tuple[int, float]:
        """Draw what is lost of a segment; return bytes sent again and the seconds that cost."""
        share = lane.sender.loss + lane.receiver.loss - lane.sender.loss * lane.receiver.loss
        if not share or not size:
            return 0, 0.0
        assert self._rng is not None, "loss needs a generator"
        round_s = lane.round_trip_s()
        missing, again, late_s = -(-size // PACKET_BYTES), 0, 0.0
        while missing:
            quick = missing >= FAST_RETRANSMIT_PACKETS
            missing = sum(self._rng.random() < share for _ in range(missing))
            again += missing
            if missing:
                late_s += round_s if quick else max(TIMER_MIN_S, 2 * round_s)
        return again * PACKET_BYTES, late_s

    def _lossy_rate(self, lane: Lane) -> float:
        """Return the bytes a second that loss leaves to one connection."""
        share = lane.sender.loss + lane.receiver.loss - lane.sender.loss * lane.receiver.loss
        round_s = lane.round_trip_s()
        if not share or not round_s:
            return math.inf
        return MATHIS * PACKET_BYTES / (round_s * math.sqrt(share))


@dataclass(eq=False, slots=True)
class _Segment:
    """Bytes on their way.

    An object and not a closure, which would hold itself: such garbage in cycles took a sixth of the
    time of a large world.
    """

    links: SimLinks
    lane: Lane
    size: int
    deliver: Callable[[], None]

    def arrive(self) -> None:
        """It has come to the receiver's line."""
        if not self.links.hold(self.lane, self.arrive):
            self.links.arrived(self.lane, self.size, self.deliver)


def _nothing() -> None:
    """Nobody waits for this segment."""
