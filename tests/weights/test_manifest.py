import math

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import LocalProtocolError, RemoteProtocolError, Violation
from echo2p2p.limits import CHUNK_BYTES_MAX, CHUNKS_MAX, MIB
from echo2p2p.weights.chunks import split
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import (
    build_header,
    check_header,
    chunk_count,
    chunk_length,
    is_step,
    manifest_id,
)
from echo2p2p.wire.messages import Signed
from echo2p2p.wire.signing import sign_record

LAYOUT = plan_layout([("w", "bf16", (4,), ())])
RESULT = b"r" * 32


def header(length=3000, base=(4, b"b" * 32), **changes):
    built = build_header(
        content="model",
        run_id="run",
        version=5,
        chain_id="chain",
        step=10,
        generation=0,
        base=base,
        result_digest=RESULT,
        layout=LAYOUT,
        chunked=split(bytes(length), 1024),
    )
    return msgspec.structs.replace(built, **changes)


def test_a_header_says_what_was_split():
    made = header()
    assert (made.payload_bytes, made.chunk_bytes, made.index_bytes) == (3000, 1024, 96)
    assert (made.base_version, made.base_digest) == (4, b"b" * 32)
    assert made.layout_digest == LAYOUT.digest
    assert made.index_digest == split(bytes(3000), 1024).index_digest


def test_an_anchor_has_no_base():
    made = header(base=None)
    assert (made.base_version, made.base_digest) == (None, None)


def test_a_step_leads_from_the_version_before():
    assert is_step(header())
    assert not is_step(header(base=(1, b"b" * 32)))
    assert not is_step(header(base=None))


@given(st.integers(1, 9000))
def test_counts_and_lengths_are_those_of_the_chunks(payload_bytes):
    chunked = split(bytes(payload_bytes), 1024)
    made = header(payload_bytes)
    assert chunk_count(made) == chunked.count
    assert [chunk_length(made, i) for i in range(chunked.count)] == [
        len(chunked.chunk(i)) for i in range(chunked.count)
    ]


@pytest.mark.parametrize("index", [-1, 4])
def test_other_chunks_have_no_length(index):
    with pytest.raises(LocalProtocolError):
        chunk_length(header(), index)


def test_the_largest_payload_passes():
    largest = header(
        chunk_bytes=CHUNK_BYTES_MAX,
        payload_bytes=CHUNKS_MAX * CHUNK_BYTES_MAX,
        index_bytes=32 * MIB,
    )
    check_header(largest)
    assert chunk_count(largest) == CHUNKS_MAX + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": ""},
        {"run_id": "x" * 129},
        {"chain_id": ""},
        {"version": -1},
        {"version": 1 << 63},
        {"step": -1},
        {"generation": -1},
        {"expires_at_s": -1.0},
        {"expires_at_s": math.nan},
        {"expires_at_s": math.inf},
        {"base_version": None},
        {"base_digest": None},
        {"base_version": 5},
        {"base_version": 6},
        {"base_version": -1},
        {"base_digest": b"b" * 31},
        {"result_digest": b""},
        {"layout_digest": b"l" * 33},
        {"index_digest": b"i" * 16},
        {"chunk_bytes": 0},
        {"chunk_bytes": -1024},
        {"chunk_bytes": 1023},
        {"chunk_bytes": CHUNK_BYTES_MAX + 1},
        {"payload_bytes": 0, "index_bytes": 0},
        {"payload_bytes": -3000, "index_bytes": -64},
        {"payload_bytes": 3073},
        {"payload_bytes": 1 << 60, "index_bytes": 32 * (1 << 50)},
        {"index_bytes": 64},
        {"index_bytes": 97},
    ],
)
def test_nonsense_is_refused(changes):
    with pytest.raises(RemoteProtocolError) as caught:
        check_header(header(**changes))
    assert caught.value.violation is Violation.MALFORMED


def test_another_protocol_is_refused_as_such():
    with pytest.raises(RemoteProtocolError) as caught:
        check_header(header(protocol=1))
    assert caught.value.violation is Violation.WRONG_PROTOCOL


def test_contradictory_parts_of_our_own_are_our_own_bug():
    with pytest.raises(LocalProtocolError, match="base 5"):
        header(base=(5, b"b" * 32))


def test_a_manifest_is_named_by_its_body_alone():
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    signed = sign_record(key, header())
    assert len(manifest_id(signed)) == 16
    assert manifest_id(signed) == manifest_id(Signed(body=signed.body, signature=bytes(64)))
    assert manifest_id(signed) != manifest_id(sign_record(key, header(step=11)))
