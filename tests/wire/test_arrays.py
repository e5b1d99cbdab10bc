"""Token ids and log-probs: exact there and back; a length or dtype that lies is refused."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_logprobs, from_tokens, to_logprobs, to_tokens
from echo2p2p.wire.messages import Array

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=50)
logprobs = st.lists(st.floats(width=32), max_size=50)


@given(tokens)
def test_token_ids_survive_the_wire(ids):
    array = codec.decode(codec.encode(from_tokens(ids)), Array)
    back = to_tokens(array)
    assert back.dtype == np.uint32
    assert back.tolist() == ids
    assert array.data == struct.pack(f"<{len(ids)}I", *ids)


@given(logprobs)
def test_logprobs_survive_the_wire_bit_for_bit(values):
    given_bits = np.array(values, dtype="<f4").tobytes()
    array = codec.decode(codec.encode(from_logprobs(values)), Array)
    back = to_logprobs(array)
    assert back.dtype == np.float32
    assert back.tobytes() == given_bits


@given(tokens)
def test_big_endian_and_strided_input_gives_the_same_bytes(ids):
    plain = np.array(ids, dtype=np.uint32)
    assert from_tokens(plain.astype(">u4")) == from_tokens(ids)
    assert from_tokens(np.repeat(plain, 2)[::2]) == from_tokens(ids)


def test_infinities_and_nan_arrive_for_the_caller_to_check():
    back = to_logprobs(from_logprobs([-math.inf, math.nan]))
    assert back[0] == -math.inf
    assert math.isnan(back[1])


def test_an_array_is_read_only_and_shares_the_messages_memory():
    array = from_tokens([1, 2])
    back = to_tokens(array)
    assert not back.flags.writeable
    assert np.shares_memory(back, np.frombuffer(array.data, dtype=np.uint8))


@given(st.sampled_from(["u4", "f4"]), st.integers(-(2**63), 2**64 - 1), st.binary(max_size=64))
def test_an_array_is_read_only_if_its_length_fits_its_bytes(dtype, length, data):
    array = Array(dtype=dtype, length=length, data=data)
    read = to_tokens if dtype == "u4" else to_logprobs
    if 4 * length == len(data):
        assert read(array).size == length
    else:
        with pytest.raises(RemoteProtocolError) as caught:
            read(array)
        assert caught.value.violation is Violation.MALFORMED


@pytest.mark.parametrize("length", [-1, 0, 1, 3, 2**62])
def test_a_length_that_lies_is_refused(length):
    with pytest.raises(RemoteProtocolError, match="wanted u4"):
        to_tokens(Array(dtype="u4", length=length, data=bytes(8)))


def test_log_probs_do_not_pass_for_token_ids_nor_the_other_way():
    with pytest.raises(RemoteProtocolError, match="wanted u4"):
        to_tokens(from_logprobs([1.0]))
    with pytest.raises(RemoteProtocolError, match="wanted f4"):
        to_logprobs(from_tokens([1]))
