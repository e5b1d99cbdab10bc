"""Which forms a publisher permits, and which of them a link calls for.

The problem: bytes saved are worth their encoder's time on a slow link and not on a fast one; only
the machine at hand knows its link and its speed. The idea: compare the seconds that a publication
takes with each policy, encoding and sending, both from measurements; say which won, and by what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo2p2p.weights.forms import Form

BLOCK_BYTES: Final = 80 * 1024
"""Coded bytes of a block, aimed at: TIGHT's tables are 1.3 KiB of them."""

BLOCKS_WANTED: Final = 64
"""From so many on, blocks grow instead of becoming more."""

BLOCK_BYTES_MAX: Final = 256 * 1024

SWITCH_SHARE: Final = 0.9
"""A policy is left only for one that takes this share of its seconds: rates are noisy."""


@dataclass(frozen=True)
class FormPolicy:
    """What an encoder may do.

    Attributes:
        name: For logs.
        forms: Permitted forms. RAW always is: nothing may grow without bound.
        whole: Whether each sequence is one block, as far as the format lets it. Smallest, but
            neither two threads nor an early receiver have anything to work on; for comparison.
    """

    name: str
    forms: frozenset[Form]
    whole: bool = False


SMALLEST: Final = FormPolicy("smallest", frozenset(Form))
"""The default: every form, whichever is shortest."""

QUICKEST: Final = FormPolicy("quickest", frozenset(Form) - {Form.TIGHT})
"""For links faster than TIGHT's encoder."""


@dataclass(frozen=True)
class Experience:
    """What encoding with a policy last took.

    Attributes:
        raw_bytes: Of the state.
        coded_bytes: Of the payload.
        encode_s: Seconds of it.
    """

    raw_bytes: int
    coded_bytes: int
    encode_s: float


UNTRIED: Final = {
    SMALLEST.name: Experience(raw_bytes=1_200_000_000, coded_bytes=8_000_000, encode_s=1.0),
    QUICKEST.name: Experience(raw_bytes=5_000_000_000, coded_bytes=50_000_000, encode_s=1.0),
}
"""Stands in for a policy that was not tried yet: one core of 2024, 1 % changed."""


@dataclass(frozen=True)
class Choice:
    """The outcome: a policy, and one line for a log."""

    policy: FormPolicy
    why: str


def choose_policy(
    raw_bytes: int,
    bytes_per_s: float,
    experience: dict[str, Experience],
    *,
    last: FormPolicy = SMALLEST,
) -> Choice:
    """Return the policy with which the next publication is soonest with its first receiver.

    Args:
        raw_bytes: Of the state.
        bytes_per_s: Measured rate of the publisher's uplink; 0: not known, then bytes count.
        experience: By name of the policy; those missing are guessed.
        last: The policy of the last publication.
    """
    if bytes_per_s <= 0:
        return Choice(SMALLEST, f"{SMALLEST.name}: the link's rate is not known yet")
    seconds: dict[str, tuple[float, float]] = {}
    for policy in (SMALLEST, QUICKEST):
        known = experience.get(policy.name, UNTRIED[policy.name])
        share = raw_bytes / max(1, known.raw_bytes)
        seconds[policy.name] = (known.encode_s * share, known.coded_bytes * share / bytes_per_s)
    other = QUICKEST if last.name == SMALLEST.name else SMALLEST
    mine, its = (sum(seconds[policy.name]) for policy in (last, other))
    chosen = other if its < SWITCH_SHARE * mine else last
    told = ", ".join(
        f"{name} {encode:.3g} s encoding + {send:.3g} s sending"
        for name, (encode, send) in seconds.items()
    )
    return Choice(chosen, f"{chosen.name} at {bytes_per_s:.3g} B/s: {told}")


class PolicyChooser:
    """Chooses a policy for each publication, and learns from each.

    Attributes:
        choice: The newest.
    """

    def __init__(self) -> None:
        self.choice = Choice(SMALLEST, f"{SMALLEST.name}: nothing was published yet")
        self._experience: dict[str, Experience] = {}

    def choose(self, raw_bytes: int, bytes_per_s: float | None) -> Choice:
        """Return the policy of the next delta; see `choose_policy`."""
        self.choice = choose_policy(
            raw_bytes, bytes_per_s or 0.0, self._experience, last=self.choice.policy
        )
        return self.choice

    def learn(self, *, raw_bytes: int, coded_bytes: int, encode_s: float) -> None:
        """Take note of how the policy that was chosen last has done."""
        self._experience[self.choice.policy.name] = Experience(raw_bytes, coded_bytes, encode_s)
