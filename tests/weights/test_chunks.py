import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import LocalProtocolError
from echo2p2p.ids import digest_of
from echo2p2p.limits import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, CHUNKS_MAX, KIB, MIB
from echo2p2p.weights.chunks import chunk_bytes_for, split


@pytest.mark.parametrize(
    ("payload_bytes", "expected"),
    [
        (0, 64 * KIB),
        (1, 64 * KIB),
        (400 * 64 * KIB, 64 * KIB),
        (400 * 64 * KIB + 1, 64 * KIB + 1),
        (100 * MIB, 256 * KIB),
        (10_000 * MIB, 1 * MIB),
    ],
)
def test_a_chunk_is_a_four_hundredth_of_the_payload_between_its_bounds(payload_bytes, expected):
    got = chunk_bytes_for(payload_bytes, chunk_bytes_min=64 * KIB, chunk_bytes_max=MIB)
    assert got == expected


def test_a_huge_payload_gets_longer_chunks_than_the_user_wanted():
    payload_bytes = 2 * CHUNKS_MAX * KIB
    assert chunk_bytes_for(payload_bytes, chunk_bytes_min=KIB, chunk_bytes_max=KIB) == 2 * KIB


def test_what_no_manifest_can_describe_is_our_own_bug():
    with pytest.raises(LocalProtocolError, match="fits no manifest"):
        chunk_bytes_for(
            CHUNKS_MAX * CHUNK_BYTES_MAX + 1,
            chunk_bytes_min=CHUNK_BYTES_MIN,
            chunk_bytes_max=CHUNK_BYTES_MAX,
        )
    for low, high in ((CHUNK_BYTES_MIN - 1, KIB), (2 * KIB, KIB), (KIB, CHUNK_BYTES_MAX + 1)):
        with pytest.raises(LocalProtocolError, match="chunk lengths"):
            chunk_bytes_for(1, chunk_bytes_min=low, chunk_bytes_max=high)


@given(st.integers(1, 5000), st.integers(KIB, 2 * KIB))
def test_chunks_join_to_the_payload_and_the_index_lists_their_digests(payload_bytes, chunk_bytes):
    payload = bytes(i * 31 % 251 for i in range(payload_bytes))
    chunked = split(payload, chunk_bytes)
    parts = [chunked.chunk(i) for i in range(1, chunked.count)]
    assert b"".join(parts) == payload
    assert all(len(part) == chunk_bytes for part in parts[:-1])
    assert 0 < len(parts[-1]) <= chunk_bytes
    assert chunked.chunk(0) == b"".join(digest_of(part) for part in parts)
    assert chunked.index_digest == digest_of(chunked.chunk(0))


def test_no_other_chunks_exist():
    chunked = split(bytes(3000), 1024)
    assert chunked.count == 4
    for index in (-1, 4):
        with pytest.raises(LocalProtocolError):
            chunked.chunk(index)


def test_a_chunk_cannot_be_written_to():
    chunk = split(bytearray(10), 1024).chunk(1)
    with pytest.raises(TypeError):
        chunk[0] = 1


@pytest.mark.parametrize(("payload_bytes", "chunk_bytes"), [(0, 1024), (5, 1023), (5, 4 * MIB + 1)])
def test_an_impossible_split_is_our_own_bug(payload_bytes, chunk_bytes):
    with pytest.raises(LocalProtocolError):
        split(bytes(payload_bytes), chunk_bytes)
