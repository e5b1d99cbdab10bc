"""The knobs of the broadcast core, with the reasons for their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MESH_NODES_MAX: Final = 16
"""Up to so many peers everybody is linked to everybody."""

HAVE_INDICES_MAX: Final = 16_384
"""Indices in one `Have`: 64 KiB, so that announcements of a big anchor leave room for others."""


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    """Tuning; the same for all nodes of a run, though nothing breaks when it is not."""

    push_share: float = 0.1
    push_fanout_min: int = 2
    push_fanout_max: int = 6
    """Neighbours to whom a chunk is pushed on, outside a full mesh: a share of all peers, between
    these bounds. Each spares the way there and back of an announcement and a request, at the
    second step of about four; but what another has sent meanwhile comes twice."""

    have_batch_s: float = 0.02
    """Announcements wait so long for company: to the source, which measures relays by them, and to
    those to whom nobody pushes."""

    have_mesh_s: float = 0.03
    """In a full mesh they wait so long for each link of the node, to all others: about thirty leave
    it in a second. There they matter only where a push fails, and were most of the frames. Sooner,
    they also have chunks asked for that are being pushed: at 20 MB and 16 mixed peers 1.6 % of
    the bytes came twice with 0.01, 0.6 % now."""

    overlay_have_batch_s: float = 0.05
    """The same outside a full mesh, where each chunk makes as many of them as there are links: they
    are most of what a peer does there."""

    pull_grace_s: float = 0.5
    """In a full mesh: from the first announcement of a chunk until it is asked for. The relay that
    was dealt it is pushing it to us already; asking another would double it. Outside a mesh most
    chunks must be pulled, and there is no grace."""

    late_grace_s: float = 0.05
    """The grace of a peer of a mesh that came to follow the payload later: for other holders than
    the source."""

    pull_grace_max_s: float = 3.0
    """The grace grows to twice the time that pushed chunks were seen to take, up to this. So long
    after its last deal the source takes it that what it dealt is still being pushed."""

    source_grace_s: float = 1.0
    """So much longer before the source is asked for what another peer holds too."""

    deadline_min_s: float = 1.0
    """Shortest time for a requested chunk to come."""

    patience_min_s: float = 0.5
    """Shortest time before, in the endgame, a second holder is asked."""

    snub_s: float = 5.0
    """No requests to a link that missed two deadlines in a row."""

    misses_max: int = 5
    """Deadlines missed in a row before a link is given up."""

    retry_s: float = 1.0
    """Before a link that was busy with a chunk is asked for it again."""

    window_first_bytes: int = 256 * 1024
    """Requested of a link before its rate is known."""

    window_chunks_max: int = 64

    slack_s: float = 0.1
    """Added to the round trip when a window is sized: the sender's queue must not run dry."""

    send_window_chunks: int = 2
    """Chunks handed to a link's writer: one that is leaving, and one behind it. More would only
    wait where nobody can cancel them."""

    uploads_min: int = 4
    uploads_max: int = 6
    """Chunks sent at the same time, three for four links and between these bounds. All of them
    share one uplink: the fewer, the sooner each chunk is whole at the other end, and the shorter
    the way of announcements; but each waits for its receiver's downlink, and the uplink should not
    wait with it. Measured at 20 Mbit/s: four chunks among eight links leave a tenth of it idle, six
    among four delay a slow peer's acknowledgements by a second."""

    uploads_few: int = 2
    uploads_s: float = 0.15
    """A thin uplink sends fewer at the same time, down to `uploads_few`: as many as it is busy with
    for so long. The last chunks of a payload wait for each other there, at each step of their
    way: with 16 mixed peers at 3 Mbit/s 1.14 times the bound without it, 1.12 with it."""

    upload_slow_s: float = 0.25
    """A link that takes longer over a chunk does not count: its receiver is slow, not we."""

    queue_chunks_max: int = 256
    """Chunks that wait for one link; what does not fit is announced instead of pushed, and a
    request is rejected as busy."""

    backlog_max_s: float = 1.5
    """A relay that needs longer than this to pass on what it was dealt is dealt nothing more."""

    def batch_s(self, *, mesh: bool) -> float:
        """Return for how long announcements wait that others wait for."""
        return self.have_batch_s if mesh else self.overlay_have_batch_s

    def mesh_batch_s(self, links: int) -> float:
        """Return for how long those wait that nobody waits for."""
        return max(self.have_batch_s, self.have_mesh_s * links)

    def grace_s(self, *, late: bool) -> float:
        """Return the grace of what is pushed, in a full mesh."""
        return self.late_grace_s if late else self.pull_grace_s

    def fanout(self, peers: int) -> int:
        """Return to how many neighbours a chunk is pushed on, of so many peers that are no mesh."""
        return min(self.push_fanout_max, max(self.push_fanout_min, round(self.push_share * peers)))
