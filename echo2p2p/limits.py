"""Every bound of the protocol, with its reason; relations between them are asserted at import.

Bounds that a user may move are settings (``coordinator/config.py``, ``peer/config.py``); these
are what either side refuses whatever the settings say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Fill:
    """How full something is that has a bound.

    Attributes:
        what: In a few words.
        now: How much there is.
        limit: How much there may be.
    """

    what: str
    now: int
    limit: int


KIB: Final = 1024
MIB: Final = 1024 * KIB

PROTOCOL: Final = 0
"""Protocol version; stays 0 until the first release, golden bytes may change until then."""

CHUNK_BYTES_MIN: Final = 1 * KIB
CHUNK_BYTES_MAX: Final = 4 * MIB
"""Anchors use 1-4 MiB; a receiver holds at most a window of chunks that it cannot verify yet."""

CHUNKS_MAX: Final = 1 << 20
"""Chunks in one payload: 4 TiB at most, and an index of 32 MiB."""

FRAME_BYTES_MAX: Final = 1 * MIB
"""A control frame of a relay link; chunk payloads follow their frame and are bounded apart."""

MESSAGE_ITEMS_MAX: Final = 65_536
"""Longest MessagePack array or map; longer data travels as raw bytes."""

MESSAGE_STRING_BYTES_MAX: Final = 4 * MIB
"""Longest text in a message: a model's config.json or tokenizer.json fits."""

MESSAGE_BINARY_BYTES_MAX: Final = 64 * MIB
"""Longest byte string in a message: a group of 64 samples of 32k tokens takes 16 MiB."""

HTTP_BODY_BYTES_MAX: Final = 64 * MIB
"""Any HTTP body; routes set much smaller ones."""

HTTP_CONTROL_BYTES_MAX: Final = 1 * MIB
"""A join, heartbeat, lease request or leave."""

NEIGHBOURS_MAX: Final = 256
"""Links that one relay keeps; the overlay uses about 16."""

UNVERIFIED_CHUNKS_MAX: Final = 64
"""Chunks kept while chunk 0, which holds their digests, is still under way."""

MODEL_FILE_BYTES_MAX: Final = 32 * MIB
"""A file of the model's folder that is no weights; the largest tokenizers have about 20 MB."""

LEASES_PER_CALL_MAX: Final = 64
"""Leases handed out in one answer."""

SAMPLES_PER_LEASE_MAX: Final = 1024

TOKENS_PER_SAMPLE_MAX: Final = 1 << 20

LINK_SEND_TIMEOUT_S: Final = 30.0
"""A frame not taken by the remote within this time is a dead link."""

assert CHUNK_BYTES_MIN < CHUNK_BYTES_MAX
assert FRAME_BYTES_MAX <= MESSAGE_BINARY_BYTES_MAX <= HTTP_BODY_BYTES_MAX
