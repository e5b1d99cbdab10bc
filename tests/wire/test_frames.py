import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import LocalProtocolError, RemoteProtocolError, Violation
from echo2p2p.limits import CHUNK_BYTES_MAX, CHUNKS_MAX, FRAME_BYTES_MAX
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.frames import ChunkPayload, Frame, FrameDecoder, encode_frame
from echo2p2p.wire.messages import Chunk, Goodbye, Have, Hello, Ping, Request, Want

ID = bytes(range(16))


def decode(splits):
    decoder = FrameDecoder()
    events = []
    for data in [*(s for s in splits if s), b""]:
        decoder.receive_data(data)
        while (event := decoder.next_event()) is not None:
            events.append(event)
    return events


def on_the_wire(item):
    if isinstance(item, bytes):
        return encode_frame(Chunk(manifest_id=ID, index=3, payload_bytes=len(item))) + item
    return encode_frame(item)


def expected(item):
    return ChunkPayload(ID, 3, memoryview(item)) if isinstance(item, bytes) else Frame(item)


items = st.one_of(
    st.binary(min_size=1, max_size=60),
    st.builds(Ping, nonce=st.integers(0, 2**63)),
    st.builds(Goodbye, reason=st.text(max_size=20)),
    st.builds(Request, manifest_id=st.just(ID), index=st.integers(0, CHUNKS_MAX)),
    st.builds(
        lambda i: Have(manifest_id=ID, indices=from_tokens(i), ask=False),
        st.lists(st.integers(0, 99)),
    ),
)


@given(st.lists(items, max_size=6), st.data())
def test_any_split_of_the_stream_gives_the_same_events(sequence, data):
    stream = b"".join(map(on_the_wire, sequence))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    splits = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decode(splits) == list(map(expected, sequence))
    assert decode([stream[i : i + 1] for i in range(len(stream))]) == list(map(expected, sequence))


@given(st.lists(items, min_size=1, max_size=4), st.data())
def test_a_stream_cut_inside_a_frame_or_payload_is_truncated(sequence, data):
    stream = b"".join(map(on_the_wire, sequence))
    whole = {0}
    for item in sequence:
        whole.add(max(whole) + len(on_the_wire(item)))
    end = data.draw(st.integers(0, len(stream)).filter(lambda n: n not in whole))
    with pytest.raises(RemoteProtocolError) as caught:
        decode([stream[:end]])
    assert caught.value.violation is Violation.TRUNCATED


@given(st.lists(st.binary(max_size=60), max_size=6), st.booleans())
def test_garbage_is_parsed_or_refused_and_nothing_else(splits, with_a_plausible_length):
    if with_a_plausible_length:
        splits = [struct.pack(">I", len(s)) + s for s in splits]
    with contextlib.suppress(RemoteProtocolError):
        decode(splits)


def refusal(data):
    with pytest.raises(RemoteProtocolError) as caught:
        decode([data])
    return caught.value.violation


def test_an_overlong_frame_is_refused_from_its_length_alone():
    assert refusal(struct.pack(">I", FRAME_BYTES_MAX + 1)) is Violation.FRAME_TOO_LONG


def test_an_overlong_payload_is_refused_from_its_frame_alone_but_the_index_may_be_longer():
    def chunk(index, size):
        return encode_frame(Chunk(manifest_id=ID, index=index, payload_bytes=size))

    assert refusal(chunk(1, CHUNK_BYTES_MAX + 1)) is Violation.FRAME_TOO_LONG
    assert refusal(chunk(0, 32 * CHUNKS_MAX + 1)) is Violation.FRAME_TOO_LONG
    assert refusal(chunk(0, CHUNK_BYTES_MAX + 1)) is Violation.TRUNCATED
    assert refusal(chunk(1, 0)) is Violation.MALFORMED
    assert refusal(chunk(1, -1)) is Violation.MALFORMED


def test_ids_and_indices_out_of_shape_are_refused():
    assert refusal(encode_frame(Want(manifest_id=ID[:15]))) is Violation.MALFORMED
    assert refusal(encode_frame(Request(manifest_id=ID, index=-1))) is Violation.MALFORMED
    too_far = Request(manifest_id=ID, index=CHUNKS_MAX + 1)
    assert refusal(encode_frame(too_far)) is Violation.MALFORMED
    assert refusal(struct.pack(">I", 0)) is Violation.MALFORMED


def test_an_http_message_is_no_relay_frame():
    body = codec.encode(from_tokens([1]))
    assert refusal(struct.pack(">I", len(body)) + body) is Violation.MALFORMED


def test_after_an_error_every_call_raises_the_same_again():
    decoder = FrameDecoder()
    decoder.receive_data(b"\xff\xff\xff\xff")
    errors = []
    for call in (decoder.next_event, decoder.next_event, lambda: decoder.receive_data(b"x")):
        with pytest.raises(RemoteProtocolError) as caught:
            call()
        errors.append(caught.value)
    assert errors[0] is errors[1] is errors[2]


def test_events_before_an_error_are_still_delivered():
    decoder = FrameDecoder()
    decoder.receive_data(encode_frame(Ping(nonce=1)) + b"\xff\xff\xff\xff")
    assert decoder.next_event() == Frame(Ping(nonce=1))
    with pytest.raises(RemoteProtocolError):
        decoder.next_event()


def test_the_caller_may_reuse_its_buffer_and_a_payload_owns_its_memory():
    decoder = FrameDecoder()
    stream = on_the_wire(b"abcdef") + on_the_wire(b"ghi")
    scratch = bytearray(1)
    payloads = []
    for byte in stream:
        scratch[0] = byte
        decoder.receive_data(scratch)
        if (event := decoder.next_event()) is not None:
            payloads.append(event.data)
    assert [bytes(p) for p in payloads] == [b"abcdef", b"ghi"]
    assert payloads[0].readonly


def test_data_after_the_end_is_our_own_bug():
    decoder = FrameDecoder()
    decoder.receive_data(b"")
    assert decoder.next_event() is None
    assert decoder.ended
    with pytest.raises(LocalProtocolError):
        decoder.receive_data(b"x")


def test_a_message_that_the_other_side_would_refuse_is_never_encoded():
    long = from_tokens(np.zeros(FRAME_BYTES_MAX // 4 + 1, dtype=np.uint32))
    with pytest.raises(LocalProtocolError):
        encode_frame(Have(manifest_id=ID, indices=long, ask=False))


def test_golden_bytes():
    assert encode_frame(Ping(nonce=1)).hex(" ") == (
        "00 00 00 10 82 a1 74 a4 70 69 6e 67 a5 6e 6f 6e 63 65 01".replace(
            "00 00 00 10", "00 00 00 0f"
        )
    )
    assert decode([encode_frame(Hello(protocol=0, run_id="r", card=None, nonce=b"n"))]) == [
        Frame(Hello(protocol=0, run_id="r", card=None, nonce=b"n"))
    ]
