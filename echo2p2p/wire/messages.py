"""Every message of protocol 0: who sends it, when, and what the receiver must do.

All are frozen; unknown fields are refused. The MessagePack form is a map of field names with the
tag under ``t``. Times on the wire are durations in seconds, except where a field says otherwise:
only the coordinator's clock counts. PROTOCOL.md shows each with its golden bytes.

Three families:

* *records* that are signed and stored: `ManifestHeader`, `MemberCard`, inside `Signed`;
* *HTTP bodies*, one request and one reply a route: `JoinRequest` .. `Refusal`;
* *relay frames* between peers or with the source: `Hello` .. `Goodbye` (`RelayFrame`: all of them).
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of all messages; see `echo2p2p.wire.codec`."""


# --- values inside messages -------------------------------------------------------------------


class Array(Message, frozen=True, kw_only=True, tag="array"):
    """A one-dimensional array as raw little-endian bytes; see `echo2p2p.wire.arrays`."""

    dtype: Literal["u4", "f4"]
    length: int
    """Elements; ``len(data)`` must be four times this."""
    data: bytes


class Address(Message, frozen=True, kw_only=True, tag="address"):
    """Where a relay listens."""

    host: str
    """IPv4 or IPv6 literal (no brackets) or a name."""
    port: int


class Signed(Message, frozen=True, kw_only=True, tag="signed"):
    """A record and the run's signature over its exact bytes."""

    body: bytes
    """Encoding of a `ManifestHeader` or a `MemberCard`."""
    signature: bytes
    """64 bytes, Ed25519 by the run's key, over the record's domain prefix and ``body``."""


class TensorSpec(Message, frozen=True, kw_only=True, tag="tensor"):
    """One tensor of the flat state, under its Hugging Face name."""

    name: str
    dtype: str
    """``bf16``, ``f16``, ``f32``, or an integer type as ``i8`` .. ``i64``."""
    shape: list[int]
    offset: int
    """Bytes from the start of the flat state."""
    tied: list[str]
    """Other names that share this storage; sent once, updated together."""


class LayoutTable(Message, frozen=True, kw_only=True, tag="layout"):
    """The flat state: tensors in ascending offset, without gaps."""

    tensors: list[TensorSpec]
    total_bytes: int


# --- signed records ---------------------------------------------------------------------------


class ManifestHeader(Message, frozen=True, kw_only=True, tag="manifest"):
    """Table of contents of one payload: an anchor or a delta of one version.

    The publisher signs it; everybody verifies it before accepting a byte of the payload. Chunk 0
    holds the digests of all other chunks and travels like any chunk.
    """

    protocol: int
    content: Literal["model", "adapter"]
    run_id: str
    version: int
    chain_id: str
    """Changes only when the layout does; deltas never cross it."""
    step: int
    """Optimizer steps behind these weights."""
    generation: int
    """Learner restarts from a checkpoint before them."""
    base_version: int | None
    """``None`` for an anchor; otherwise the version that the delta must be applied to."""
    base_digest: bytes | None
    """State digest of the base, 32 bytes; ``None`` for an anchor."""
    result_digest: bytes
    """State digest after decoding, 32 bytes: a root over per-block digests."""
    layout_digest: bytes
    index_digest: bytes
    """BLAKE3-256 of chunk 0."""
    index_bytes: int
    """Length of chunk 0."""
    payload_bytes: int
    """Length of chunks 1.. in all; chunk i > 0 starts at ``(i - 1) * chunk_bytes``."""
    chunk_bytes: int
    expires_at_s: float
    """In the coordinator's clock, as learnt from heartbeats; 0 means never."""


class MemberCard(Message, frozen=True, kw_only=True, tag="card"):
    """Says that a key belongs to a live member; shown in the `Hello` of a relay link."""

    run_id: str
    peer_id: str
    incarnation: int
    public_key: bytes
    """Raw Ed25519 key, 32 bytes."""


# --- HTTP bodies ------------------------------------------------------------------------------


class CaReply(Message, frozen=True, kw_only=True, tag="ca"):
    """GET /ca, before the server is verified: compare the key's fingerprint with the token's."""

    run_public_key: bytes
    """Raw Ed25519 key, 32 bytes; also the key of the certificate authority."""
    certificate: bytes
    """The authority's certificate, PEM; empty when TLS is off."""


class Hardware(Message, frozen=True, kw_only=True, tag="hardware"):
    """What a peer says of its machine; used for planning, never for trust."""

    accelerator: str
    """``cpu``, or the GPU's name."""
    cores: int
    memory_bytes: int


class Caps(Message, frozen=True, kw_only=True, tag="caps"):
    """What the volunteer allows; ``None`` means no limit."""

    upload_bytes_per_s: float | None
    download_bytes_per_s: float | None
    bytes_per_day: int | None


class JoinRequest(Message, frozen=True, kw_only=True, tag="join"):
    """POST /join with the token. Answer: `JoinReply`, or `Refusal` (409: identity still live)."""

    protocol: int
    name: str
    """For people; not unique."""
    public_key: bytes
    """Raw Ed25519 identity key; the peer id is derived from it."""
    proof: bytes
    """Signature by that key, see `echo2p2p.net.trust.join_proof`."""
    nonce: bytes
    """16 fresh random bytes, part of the proof."""
    csr: bytes
    """PEM request for the TLS leaf; empty when TLS is off."""
    relay: Address | None
    """Where this peer accepts relay links; ``None`` when it cannot be dialled."""
    engine: Literal["none", "hf", "vllm", "fake"]
    """``none``: relay only; never leased work."""
    hardware: Hardware
    caps: Caps


class Neighbour(Message, frozen=True, kw_only=True, tag="neighbour"):
    """One link of the overlay that the receiver should keep."""

    peer_id: str
    """``source`` is the coordinator's own relay."""
    address: Address | None
    """``None``: it cannot be dialled and will dial us."""


class Plan(Message, frozen=True, kw_only=True, tag="plan"):
    """Orders for one peer, replacing all before. Idle: follow and relay; peers: of the run."""

    activation: Literal["active", "idle", "drain"]
    neighbours: list[Neighbour]
    peers: int
    run_state: Literal["running", "finished", "failed"]


class JoinReply(Message, frozen=True, kw_only=True, tag="joined"):
    """The peer is a member until its term ends; it must send heartbeats before that."""

    run_id: str
    peer_id: str
    incarnation: int
    credential: str
    """Secret of this incarnation: ``Authorization: Bearer`` of every later request."""
    card: Signed
    certificate: bytes
    """TLS leaf for the request's CSR, PEM; empty when TLS is off."""
    term_s: float
    heartbeat_s: float
    now_s: float
    """The coordinator's clock."""
    layout: LayoutTable
    model_config: str
    """The model's Hugging Face ``config.json``."""
    plan: Plan


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """Body of any 4xx or 5xx answer."""

    reason: str
    detail: str
    """One line for a person: cause and mend."""
    retry_after_s: float | None
    """Seconds after which asking again makes sense; ``None``: never."""


class Measurements(Message, frozen=True, kw_only=True, tag="measurements"):
    """Counters since the join, and rates measured by the peer."""

    relayed_bytes: int
    """Chunk payload sent to others."""
    received_bytes: int
    duplicate_bytes: int
    """Chunk payload received twice."""
    tokens_generated: int
    engine_tokens_per_s: float
    """Moving estimate while generating."""
    queue_leases: int
    """Leases held."""


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """POST /heartbeat, every `JoinReply.heartbeat_s`. Renews the term."""

    incarnation: int
    state: Literal["warming", "ready", "draining"]
    """``warming``: no proved version yet."""
    version: int | None
    """Version that the engine (or, without one, the relay) has proved."""
    holdings: list[bytes]
    """Manifest ids of payloads held whole."""
    relays: bool
    """False: most of its day's bytes are spent, and it sends nobody chunks until that is over."""
    measurements: Measurements
    price_usd_per_hour: float
    available_s: float | None
    """How long the owner expects to stay; ``None``: unknown."""


class Outcome(Message, frozen=True, kw_only=True, tag="outcome"):
    """What became of one upload."""

    lease_id: str
    accepted: bool
    reason: str | None
    """Set if and only if not accepted."""


class HeartbeatReply(Message, frozen=True, kw_only=True, tag="beat"):
    """Answer to `Heartbeat`."""

    term_s: float
    now_s: float
    latest_version: int | None
    outcomes: list[Outcome]
    """Of uploads decided since the last heartbeat, at most 256; older ones are not repeated."""
    plan: Plan


class ManifestsRequest(Message, frozen=True, kw_only=True, tag="want_manifests"):
    """POST /manifests: what leads from what I have to the newest version? Long-polled."""

    incarnation: int
    have_version: int | None
    wait_s: float


class ManifestsReply(Message, frozen=True, kw_only=True, tag="manifests"):
    """The cheapest path in bytes, in order of application; empty when nothing is newer."""

    path: list[Signed]


class Sampling(Message, frozen=True, kw_only=True, tag="sampling"):
    """The distribution that is sampled from; log-probs are of this distribution."""

    temperature: float
    """> 0; 1.0 leaves the logits alone."""
    top_p: float
    """In (0, 1]; 1.0 keeps all."""
    top_k: int
    """0 keeps all."""


class Lease(Message, frozen=True, kw_only=True, tag="lease"):
    """One generation call, promised to one peer until its deadline."""

    lease_id: str
    kind: Literal["train", "eval", "audit"]
    prompt: Array
    """Token ids, ``[n_prompt] u4``."""
    samples: int
    seeds: list[int]
    """One a sample, 63 bits: the same version, prompt and seed give the same tokens."""
    sampling: Sampling
    tokens_max: int
    stop_ids: list[int]
    """Any of these ends a sample; it is part of the sample."""
    forced: Array | None
    """Audit: tokens to be scored instead of sampled."""
    version: int
    """Generate with this version or a newer one."""
    deadline_s: float
    """Seconds from the answer."""
    affinity: str | None
    """Same value, same prefix cache: a hint."""


class LeaseRequest(Message, frozen=True, kw_only=True, tag="want_leases"):
    """POST /lease: long-polled until there is work or ``wait_s`` is over."""

    incarnation: int
    version: int
    """The version that the engine would generate with."""
    leases_max: int
    wait_s: float


class LeaseReply(Message, frozen=True, kw_only=True, tag="leases"):
    """May be empty: ask again."""

    leases: list[Lease]


class Span(Message, frozen=True, kw_only=True, tag="span"):
    """Tokens ``start <= i < end`` of a sample were generated with this version."""

    version: int
    start: int
    end: int


class Sample(Message, frozen=True, kw_only=True, tag="sample"):
    """One answer to a lease's prompt."""

    tokens: Array
    """``[n] u4``, the stop token included if there was one."""
    logprobs: Array
    """``[n] f4``: natural logarithm of each token's probability when it was drawn."""
    spans: list[Span]
    """Cover ``[0, n)`` in order, without gaps; versions never go down."""
    finish: Literal["stop", "length", "aborted"]


class Upload(Message, frozen=True, kw_only=True, tag="upload"):
    """POST /upload: all samples of one lease. Idempotent by lease id."""

    incarnation: int
    lease_id: str
    samples: list[Sample]
    """Empty: the peer gives the lease back, its engine failed."""
    seconds: float
    """Engine time spent on it."""


class UploadReply(Message, frozen=True, kw_only=True, tag="uploaded"):
    """Accepted means safe on the coordinator's disk: the peer may forget the samples."""

    outcome: Outcome
    duplicate: bool
    """An earlier upload of this lease had been accepted; this one was not looked at."""


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """POST /leave: the peer goes; its leases are re-issued at once."""

    incarnation: int
    reason: str


class Left(Message, frozen=True, kw_only=True, tag="left"):
    """Answer to `Leave`."""


# --- relay frames -----------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First frame of either side of a relay link."""

    protocol: int
    run_id: str
    card: Signed | None
    """``None`` only from the coordinator's own relay, which proves the run's key instead."""
    nonce: bytes
    """32 fresh random bytes."""


class Proof(Message, frozen=True, kw_only=True, tag="proof"):
    """Second frame: a signature over both nonces, see `echo2p2p.wire.handshake`."""

    signature: bytes


class Offer(Message, frozen=True, kw_only=True, tag="offer"):
    """Here is a manifest. Always sent on a link before any chunk of it."""

    manifest: Signed


class Want(Message, frozen=True, kw_only=True, tag="want"):
    """I follow this payload: tell me what you hold, now and later."""

    manifest_id: bytes


class Have(Message, frozen=True, kw_only=True, tag="have"):
    """I hold these chunks, verified."""

    manifest_id: bytes
    indices: Array
    """``[n] u4``, ascending."""
    ask: bool
    """Nobody pushes them to you: who was dealt them cannot be dialled, nor can you."""


class Request(Message, frozen=True, kw_only=True, tag="request"):
    """Send me this chunk. Answer: `Chunk` or `Reject`."""

    manifest_id: bytes
    index: int


class Chunk(Message, frozen=True, kw_only=True, tag="chunk"):
    """``payload_bytes`` of raw chunk follow this frame on the stream."""

    manifest_id: bytes
    index: int
    payload_bytes: int


class Reject(Message, frozen=True, kw_only=True, tag="reject"):
    """I will not send this chunk: ask another."""

    manifest_id: bytes
    index: int
    reason: Literal["not_held", "busy", "unknown"]


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """I no longer need this chunk; drop it if it is still queued."""

    manifest_id: bytes
    index: int


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Sent on an idle link; the answer is a `Pong` with the same nonce."""

    nonce: int


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """Answer to `Ping`."""

    nonce: int


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The sender closes the link, and why."""

    reason: str


RelayFrame = (
    Hello | Proof | Offer | Want | Have | Request | Chunk | Reject | Cancel | Ping | Pong | Goodbye
)

HTTP_MESSAGES: tuple[type[Message], ...] = (
    CaReply,
    JoinRequest,
    JoinReply,
    Refusal,
    Heartbeat,
    HeartbeatReply,
    ManifestsRequest,
    ManifestsReply,
    LeaseRequest,
    LeaseReply,
    Upload,
    UploadReply,
    Leave,
    Left,
)
"""Every body of an HTTP route, for the golden bytes and the property tests."""
