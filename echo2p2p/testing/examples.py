"""One fixed example of each message of the protocol, all from one small made-up run.

The problem: golden bytes, the protocol's description and the tests all need messages to start
from, and an implementer wants examples that fit each other. The idea: one run with fixed keys, one
peer, one layer of four weights; whatever is a signature, a digest or a certificate is a right one.

It refuses randomness and the clock: the same sources give the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2p2p.ids import SOURCE, Generation, Incarnation, RunId, Step, Version
from echo2p2p.limits import CHUNK_BYTES_MIN, PROTOCOL
from echo2p2p.net.trust import (
    CREDENTIAL_PREFIX,
    NONCE_BYTES,
    SECRET_BYTES,
    CertificateAuthority,
    JoinToken,
    PeerIdentity,
    RunKeys,
    fingerprint,
    join_proof,
)
from echo2p2p.weights.anchor import encode_anchor
from echo2p2p.weights.chunks import Chunked, split
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import build_header, manifest_id
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.arrays import from_logprobs, from_tokens
from echo2p2p.wire.handshake import NONCE_BYTES as LINK_NONCE_BYTES
from echo2p2p.wire.handshake import Handshake, Self
from echo2p2p.wire.messages import (
    Address,
    Cancel,
    Caps,
    CaReply,
    Chunk,
    Goodbye,
    Hardware,
    Have,
    Heartbeat,
    HeartbeatReply,
    Hello,
    JoinReply,
    JoinRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
    Leave,
    Left,
    ManifestHeader,
    ManifestsReply,
    ManifestsRequest,
    Measurements,
    MemberCard,
    Message,
    Neighbour,
    Offer,
    Outcome,
    Ping,
    Plan,
    Pong,
    Proof,
    Refusal,
    Reject,
    Request,
    Sample,
    Sampling,
    Span,
    Upload,
    UploadReply,
    Want,
)
from echo2p2p.wire.signing import sign_record


class _FixedEntropy:
    """Counts upwards instead of drawing."""

    def __init__(self, first: int) -> None:
        self._first = first

    def secret(self, count: int) -> bytes:
        return bytes((self._first + place) % 256 for place in range(count))

    def rng(self, purpose: str) -> random.Random:
        del purpose
        return random.Random(self._first)  # noqa: S311 - an example keeps no secret


class _FixedClock:
    """2027-01-01 00:00 UTC."""

    def time(self) -> float:
        return 1_798_761_600.0


RUN_ID: Final = RunId("0011223344556677")
LEASE_ID: Final = "0123456789abcdef0123456789abcdef"
RUN_SEED: Final = bytes(range(32))
"""Private Ed25519 key of the run, raw."""
PEER_SEED: Final = bytes(range(32, 64))
"""Private Ed25519 identity key of the peer, raw."""

KEYS: Final = RunKeys(Ed25519PrivateKey.from_private_bytes(RUN_SEED))
PEER: Final = PeerIdentity(PEER_SEED)
TOKEN: Final = JoinToken(bytes(range(64, 64 + SECRET_BYTES)), fingerprint(KEYS.public_key))
JOIN_NONCE: Final = bytes(range(80, 80 + NONCE_BYTES))
PEER_LINK_NONCE: Final = bytes(range(96, 96 + LINK_NONCE_BYTES))
SOURCE_LINK_NONCE: Final = bytes(range(128, 128 + LINK_NONCE_BYTES))

LAYOUT: Final = plan_layout([("lm_head.weight", "bf16", (8, 16), ("model.embed_tokens.weight",))])
_ROW: Final = bytes.fromhex("803f 0040 0080 00be") * 4
BASE_STATE: Final = 8 * _ROW
"""1.0, 2.0, -0.0, -0.125 as bf16, over and over."""
RESULT_STATE: Final = bytes.fromhex("813f") + BASE_STATE[2:36] + bytes(2) + BASE_STATE[38:]
"""Element 0 is one unit in the last place up, element 18 has become +0.0."""

_AUTHORITY: Final = CertificateAuthority(KEYS, _FixedClock(), _FixedEntropy(160))
_CSR: Final = PEER.make_csr(_FixedEntropy(192))[0]


def payload(*, anchor: bool) -> Chunked:
    """Return version 1's anchor, or the delta that leads to it from version 0."""
    coded = (
        encode_anchor(LAYOUT, RESULT_STATE)
        if anchor
        else encode_delta(LAYOUT, BASE_STATE, RESULT_STATE)
    )
    return split(coded, CHUNK_BYTES_MIN)


def header(*, anchor: bool) -> ManifestHeader:
    """Return the header of `payload`."""
    return build_header(
        content="model",
        run_id=RUN_ID,
        version=Version(1),
        chain_id=LAYOUT.digest.hex()[:16],
        step=Step(2),
        generation=Generation(0),
        base=None if anchor else (Version(0), state_digest(LAYOUT, BASE_STATE)),
        result_digest=state_digest(LAYOUT, RESULT_STATE),
        layout=LAYOUT,
        chunked=payload(anchor=anchor),
    )


_CARD: Final = MemberCard(
    run_id=RUN_ID, peer_id=PEER.peer_id, incarnation=1, public_key=PEER.public_key
)
_SIGNED_CARD: Final = sign_record(KEYS.private, _CARD)
_SIGNED_HEADER: Final = sign_record(KEYS.private, header(anchor=False))
_MANIFEST_ID: Final = manifest_id(_SIGNED_HEADER)
_ADDRESS: Final = Address(host="192.0.2.7", port=7071)
_OUTCOME: Final = Outcome(lease_id=LEASE_ID, accepted=False, reason="stale")
_NEIGHBOUR: Final = Neighbour(peer_id=SOURCE, address=Address(host="2001:db8::1", port=7072))
_PLAN: Final = Plan(
    activation="active",
    neighbours=[
        _NEIGHBOUR,
        Neighbour(peer_id="0123456789abcdef0123456789abcdef", address=None),
    ],
    peers=2,
    run_state="running",
)
_HARDWARE: Final = Hardware(accelerator="cpu", cores=4, memory_bytes=17_179_869_184)
_CAPS: Final = Caps(
    upload_bytes_per_s=1_250_000.0, download_bytes_per_s=None, bytes_per_day=50_000_000_000
)
_MEASUREMENTS: Final = Measurements(
    relayed_bytes=1_048_576,
    received_bytes=524_288,
    duplicate_bytes=0,
    tokens_generated=4096,
    engine_tokens_per_s=87.5,
    queue_leases=2,
)
_SAMPLING: Final = Sampling(temperature=1.0, top_p=1.0, top_k=0)
_LEASE: Final = Lease(
    lease_id=LEASE_ID,
    kind="train",
    prompt=from_tokens([1, 17, 42]),
    samples=2,
    seeds=[7, (1 << 63) - 1],
    sampling=_SAMPLING,
    tokens_max=8,
    stop_ids=[2],
    forced=None,
    version=1,
    deadline_s=300.0,
    affinity=None,
)
_SAMPLE: Final = Sample(
    tokens=from_tokens([5, 9, 2]),
    logprobs=from_logprobs([-0.5, -1.25, -0.0625]),
    spans=[Span(version=1, start=0, end=1), Span(version=2, start=1, end=3)],
    finish="stop",
)


def link_proofs() -> tuple[Hello, Proof, Hello, Proof]:
    """Return the first frames of a link: hello and proof of the peer, then of the source."""
    peer = Handshake(
        Self(PEER.peer_id, RUN_ID, KEYS.public_key, _SIGNED_CARD, PEER.sign),
        nonce=PEER_LINK_NONCE,
        expected=SOURCE,
    )
    source = Handshake(
        Self(SOURCE, RUN_ID, KEYS.public_key, None, KEYS.sign), nonce=SOURCE_LINK_NONCE
    )
    hellos = peer.start(), source.start()
    proofs = peer.receive(hellos[1]), source.receive(hellos[0])
    assert isinstance(proofs[0], Proof)
    assert isinstance(proofs[1], Proof)
    return hellos[0], proofs[0], hellos[1], proofs[1]


def _values() -> Iterator[Message]:
    yield from_tokens([1, 17, 42])
    yield _ADDRESS
    yield _SIGNED_CARD
    yield LAYOUT.table.tensors[0]
    yield LAYOUT.table
    yield _HARDWARE
    yield _CAPS
    yield _NEIGHBOUR
    yield _PLAN
    yield _MEASUREMENTS
    yield _OUTCOME
    yield _SAMPLING
    yield _LEASE
    yield _SAMPLE.spans[0]
    yield _SAMPLE


def _joining() -> Iterator[Message]:
    yield CaReply(run_public_key=KEYS.public_key, certificate=_AUTHORITY.certificate)
    name = "attic"
    yield JoinRequest(
        protocol=PROTOCOL,
        name=name,
        public_key=PEER.public_key,
        proof=join_proof(PEER, TOKEN.fingerprint, JOIN_NONCE, _CSR, name),
        nonce=JOIN_NONCE,
        csr=_CSR,
        relay=_ADDRESS,
        engine="hf",
        hardware=_HARDWARE,
        caps=_CAPS,
    )
    yield JoinReply(
        run_id=RUN_ID,
        peer_id=PEER.peer_id,
        incarnation=1,
        credential=CREDENTIAL_PREFIX + "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8",
        card=_SIGNED_CARD,
        certificate=_AUTHORITY.sign_peer(_CSR, PEER.peer_id, Incarnation(1)),
        term_s=10.0,
        heartbeat_s=2.0,
        now_s=1_798_761_600.0,
        layout=LAYOUT.table,
        model_config='{"model_type":"qwen3"}',
        plan=_PLAN,
    )
    yield Refusal(reason="identity_live", detail="the last term still runs", retry_after_s=7.5)


def _member_bodies() -> Iterator[Message]:
    yield Heartbeat(
        incarnation=1,
        state="ready",
        version=1,
        holdings=[_MANIFEST_ID],
        relays=True,
        measurements=_MEASUREMENTS,
        price_usd_per_hour=0.25,
        available_s=None,
    )
    yield HeartbeatReply(
        term_s=10.0, now_s=1_798_761_602.5, latest_version=1, outcomes=[_OUTCOME], plan=_PLAN
    )
    yield ManifestsRequest(incarnation=1, have_version=None, wait_s=25.0)
    yield ManifestsReply(path=[_SIGNED_HEADER])
    yield LeaseRequest(incarnation=1, version=1, leases_max=4, wait_s=25.0)
    yield LeaseReply(leases=[_LEASE])
    yield Upload(incarnation=1, lease_id=LEASE_ID, samples=[_SAMPLE, _SAMPLE], seconds=1.5)
    accepted = Outcome(lease_id=LEASE_ID, accepted=True, reason=None)
    yield UploadReply(outcome=accepted, duplicate=False)
    yield Leave(incarnation=1, reason="the peer stops")
    yield Left()


def _frames() -> Iterator[Message]:
    hello, proof, _, _ = link_proofs()
    yield hello
    yield proof
    yield Offer(manifest=_SIGNED_HEADER)
    yield Want(manifest_id=_MANIFEST_ID)
    yield Have(manifest_id=_MANIFEST_ID, indices=from_tokens([0, 1]), ask=False)
    yield Request(manifest_id=_MANIFEST_ID, index=1)
    size = len(payload(anchor=False).chunk(1))
    yield Chunk(manifest_id=_MANIFEST_ID, index=1, payload_bytes=size)
    yield Reject(manifest_id=_MANIFEST_ID, index=1, reason="not_held")
    yield Cancel(manifest_id=_MANIFEST_ID, index=1)
    yield Ping(nonce=7)
    yield Pong(nonce=7)
    yield Goodbye(reason="bad_signature")


EXAMPLES: Final[tuple[Message, ...]] = (
    *_values(),
    header(anchor=False),
    _CARD,
    *_joining(),
    *_member_bodies(),
    *_frames(),
)
"""One of each class, in the order of PROTOCOL.md."""
