"""What the clients of a coordinator know for certain: kept where no fault reaches it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from echo2p2p.wire.messages import ManifestHeader, UploadReply

NOT_ITS_FATE: Final = frozenset({"not_yours", "unknown_lease"})
"""Refusals that say nothing about the lease: it may be somebody else's, or nobody's."""


def sample_name(logprobs: bytes) -> str:
    """Return what tells a sample from all others: its log-probs, drawn from its own seed."""
    return blake3(logprobs).hexdigest()[:16]


@dataclass
class Record:
    """What all clients know for certain."""

    acknowledged: dict[str, int] = field(default_factory=dict)
    """Leases whose upload was accepted, with their number of samples."""
    refused: dict[str, str] = field(default_factory=dict)
    """Leases whose upload was not, and why."""
    samples: dict[str, str] = field(default_factory=dict)
    """The lease of each sample ever uploaded, by its name in the learner's log."""
    reasons: set[str] = field(default_factory=set)
    """All reasons for which an upload was ever refused."""
    duplicates: int = 0
    """Uploads that were told to have come before."""
    versions: dict[int, bytes] = field(default_factory=dict)
    """Result digest of each version that anybody was shown."""
    problems: list[str] = field(default_factory=list)

    def decided(self, lease_id: str, samples: int, reply: UploadReply) -> None:
        """Note an answer; a later one must not contradict it."""
        outcome = reply.outcome
        self.told(
            lease_id,
            samples,
            accepted=outcome.accepted,
            reason=outcome.reason or "",
            duplicate=reply.duplicate,
        )

    def told(
        self, lease_id: str, samples: int, *, accepted: bool, reason: str, duplicate: bool
    ) -> None:
        """Note what an answer said."""
        self.duplicates += duplicate
        if not accepted:
            self.reasons.add(reason)
        if accepted:
            self.acknowledged.setdefault(lease_id, samples)
            if lease_id in self.refused:
                self.problems.append(f"lease {lease_id[:8]} was refused and then accepted")
        elif lease_id not in self.acknowledged and reason not in NOT_ITS_FATE:
            self.refused[lease_id] = reason

    def shown(self, header: ManifestHeader) -> None:
        """Note a version; its number must never stand for anything else."""
        known = self.versions.setdefault(header.version, header.result_digest)
        if known != header.result_digest:
            self.problems.append(f"version {header.version} was published twice, differently")
