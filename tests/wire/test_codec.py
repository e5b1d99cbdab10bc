"""Whatever comes in becomes a message of the wanted kind or a `RemoteProtocolError`."""

import contextlib
import struct
import tracemalloc

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.limits import MESSAGE_BINARY_BYTES_MAX, MESSAGE_ITEMS_MAX, MESSAGE_STRING_BYTES_MAX
from echo2p2p.testing.examples import EXAMPLES
from echo2p2p.testing.strategies import all_messages, any_message
from echo2p2p.wire import codec
from echo2p2p.wire.messages import (
    Goodbye,
    Lease,
    Offer,
    Ping,
    Proof,
    Refusal,
    RelayFrame,
    Upload,
)

LEASE = next(example for example in EXAMPLES if isinstance(example, Lease))
PING = codec.encode(Ping(nonce=7))
kinds = st.sampled_from([*all_messages(), RelayFrame])
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["t", "nonce", "reason", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def refused(data, kind=RelayFrame):
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(data, kind)
    assert caught.value.violation is Violation.MALFORMED
    return caught.value.detail


@given(any_message())
def test_the_bytes_are_those_that_the_parser_s_own_writer_makes(message):
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert codec.encode(message) == msgpack.packb(plain, use_bin_type=True)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x80")
@example(b"\xc1")
@example(b"\xd6\xff\x00\x00\x00\x00")  # a timestamp
@example(b"\xc7\x00\xff")  # one of no bytes
@example(b"\xc7\x00\x05")  # an extension of no bytes
@example(b"\xa1\xff")  # not UTF-8
def test_garbage_is_refused(data):
    refused(data)


@given(plain_values, kinds)
def test_wellformed_msgpack_of_another_shape_is_parsed_or_refused_and_nothing_else(value, kind):
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(codec.decode(msgpack.packb(value), kind), kind)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_flipped_byte_gives_a_message_or_a_refusal_and_nothing_else(message, data):
    raw = bytearray(codec.encode(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(codec.decode(raw, type(message)), type(message))


@given(st.sampled_from(EXAMPLES), st.data())
def test_every_cut_and_every_tail_is_refused(message, data):
    raw = codec.encode(message)
    refused(raw[: data.draw(st.integers(0, len(raw) - 1))], type(message))
    refused(raw + data.draw(st.binary(min_size=1, max_size=3)), type(message))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x", b"\x82\xa1t\xa4ping\xa1x"])
def test_nesting_without_end_is_refused(opening):
    refused(opening * 100_000 + b"\xc0" * 100_000)


def test_nesting_that_the_parser_takes_is_refused_by_the_type():
    refused(b"\x82\xa1t\xa4ping\xa5nonce" + b"\x91" * 200 + b"\x01")


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"\xdb" + struct.pack(">I", 2**32 - 1), id="text"),
        pytest.param(b"\xc6" + struct.pack(">I", 2**32 - 1), id="bytes"),
        pytest.param(b"\xdd" + struct.pack(">I", 2**32 - 1), id="array"),
        pytest.param(b"\xdf" + struct.pack(">I", 2**32 - 1), id="map"),
        pytest.param(b"\xc9" + struct.pack(">I", 2**32 - 1) + b"\x01", id="extension"),
    ],
)
def test_a_huge_length_is_refused_before_anything_is_allocated(head):
    tracemalloc.start()
    try:
        refused(b"\x82\xa1t\xa4ping\xa5nonce" + head)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_the_limits_are_limits():
    longest = codec.encode(Goodbye(reason="x" * MESSAGE_STRING_BYTES_MAX))
    assert len(codec.decode(longest, Goodbye).reason) == MESSAGE_STRING_BYTES_MAX
    assert "exceeds" in refused(codec.encode(Goodbye(reason="x" * (MESSAGE_STRING_BYTES_MAX + 1))))
    assert "exceeds" in refused(
        codec.encode(Proof(signature=bytes(MESSAGE_BINARY_BYTES_MAX + 1))), Proof
    )
    seeds = [0] * (MESSAGE_ITEMS_MAX + 1)
    lease = msgspec.structs.replace(LEASE, seeds=seeds)
    assert "exceeds" in refused(codec.encode(lease), Lease)


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\x91\xc0"], ids=["lists", "maps", "nested"])
def test_a_bomb_of_small_objects_is_refused_before_they_are_made(item):
    """Eight such megabytes would be 600 MB of Python objects."""
    bomb = b"\x81\xa7samples\xdc\x00\x20" + (b"\xdc\xff\xff" + item * 65535) * 32
    tracemalloc.start()
    try:
        refused(bomb, Upload)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_keys_must_be_text():
    assert "got `int`" in refused(b"\x82\xa1t\xa4ping\x05\x01")
    refused(b"\x82\xc4\x01t\xa4ping\xa5nonce\x01")


def test_text_does_not_pass_for_bytes_nor_bytes_for_text():
    refused(msgpack.packb({"t": "proof", "signature": "AAAA"}), Proof)
    refused(msgpack.packb({"t": "goodbye", "reason": b"AAAA"}), Goodbye)


def test_a_whole_number_passes_for_a_float_but_not_the_other_way():
    plain = {"t": "refusal", "reason": "busy", "detail": "", "retry_after_s": 2}
    assert codec.decode(msgpack.packb(plain), Refusal).retry_after_s == 2.0
    refused(msgpack.packb({"t": "ping", "nonce": 2.0}))


def test_a_frame_without_its_tag_is_refused():
    refused(msgpack.packb({"nonce": 7}))


def test_any_buffer_is_read():
    for data in (PING, bytearray(PING), memoryview(PING)):
        assert codec.decode(data, RelayFrame) == Ping(nonce=7)


def test_the_detail_is_one_short_line_whatever_was_sent():
    plain = {"t": "ping", "nonce": 1, "x\n" * 5000: 2}
    detail = refused(msgpack.packb(plain))
    assert "\n" not in detail
    assert len(detail) <= 200


def test_an_inner_message_of_another_kind_is_refused():
    offer = next(each for each in EXAMPLES if isinstance(each, Offer))
    plain = msgpack.unpackb(codec.encode(offer))
    plain["manifest"]["t"] = "address"
    assert "address" in refused(msgpack.packb(plain), Offer)
