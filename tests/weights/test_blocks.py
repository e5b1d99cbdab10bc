import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import IntegrityError
from echo2p2p.weights.blocks import (
    ANCHOR_BLOCK_ELEMENTS,
    BLOCK_ELEMENTS_MAX,
    Block,
    BlockReader,
    Content,
    anchor_ranges,
    pack_blocks,
    read_blocks,
)
from echo2p2p.weights.forms import Form
from echo2p2p.weights.layout import plan_layout

LAYOUT = plan_layout(
    [
        ("a", "bf16", (4,), ()),
        ("b", "f32", (3 * (1 << 28),), ()),
        ("empty", "bf16", (0,), ()),
        ("none", "i8", (0,), ()),
        ("c", "bf16", (6,), ()),
    ]
)


def raw(sequence, first, count, body=b"xy"):
    return Block(sequence, first, count, Form.RAW, body)


def read(payload, content=Content.DELTA):
    return list(read_blocks(LAYOUT, payload, content, source="mallory"))


def test_blocks_come_back_and_share_the_payloads_memory():
    blocks = [raw(0, 0, 4), raw(0, 6, 4, b""), raw(1, 5, BLOCK_ELEMENTS_MAX)]
    payload = bytearray(pack_blocks(Content.DELTA, blocks))
    got = read(payload)
    assert got == blocks
    assert len(payload) == 4 + sum(block.coded_bytes for block in blocks)
    payload[-1] = ord("z")
    assert bytes(got[-1].body) == b"xz"


def test_a_payload_without_blocks_is_not_empty():
    assert pack_blocks(Content.DELTA, []) == b"EWD\x00"
    assert read(b"EWD\x00") == []


def test_an_anchors_ranges_tile_every_sequence():
    last = LAYOUT.sequences[1].elements // ANCHOR_BLOCK_ELEMENTS - 1
    got = list(anchor_ranges(LAYOUT))
    assert got[:2] == [(0, 0, 10), (1, 0, ANCHOR_BLOCK_ELEMENTS)]
    assert got[-1] == (1, last * ANCHOR_BLOCK_ELEMENTS, ANCHOR_BLOCK_ELEMENTS)


def test_blocks_are_read_as_far_as_their_bytes_are_there():
    blocks = [raw(0, 0, 4, b"1234"), raw(0, 6, 4, b""), raw(1, 5, 9)]
    whole = pack_blocks(Content.DELTA, blocks)
    memory = bytearray(len(whole))
    reader = BlockReader(LAYOUT, memory, Content.DELTA)
    got, arrived = [], []
    for ready in range(len(whole) + 1):
        memory[:ready] = whole[:ready]
        for block in reader.read(ready):
            got.append(block)
            arrived.append(ready)
        assert reader.complete == (ready == len(whole))
    assert got == blocks
    sizes = [block.coded_bytes for block in blocks]
    assert arrived == [4 + sum(sizes[: number + 1]) for number in range(3)]


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param([raw(2, 0, 1)], id="no such sequence"),
        pytest.param([raw(0, 0, 0)], id="no elements"),
        pytest.param([raw(0, 0, 11)], id="past the end"),
        pytest.param([raw(0, 10, 1)], id="behind the end"),
        pytest.param([raw(0, (1 << 64) - 1, 1)], id="far away"),
        pytest.param([raw(1, 0, BLOCK_ELEMENTS_MAX + 1)], id="too long"),
        pytest.param([raw(0, 0, 4), raw(0, 0, 4)], id="twice"),
        pytest.param([raw(0, 0, 4), raw(0, 3, 2)], id="overlap"),
        pytest.param([raw(0, 5, 2), raw(0, 0, 2)], id="backwards"),
        pytest.param([raw(1, 0, 2), raw(0, 0, 2)], id="sequences backwards"),
    ],
)
def test_a_bad_range_is_refused(blocks):
    with pytest.raises(IntegrityError) as caught:
        read(pack_blocks(Content.DELTA, blocks))
    assert caught.value.source == "mallory"


@pytest.mark.parametrize("tag", [5, 255])
def test_an_unknown_form_is_refused(tag):
    with pytest.raises(IntegrityError, match=f"form {tag}"):
        read(b"EWD\x00" + struct.pack("<BQIBI", 0, 0, 1, tag, 0))


@pytest.mark.parametrize("head", [b"", b"EWD", b"EWA\x00", b"EWD\x01", b"PK\x03\x04", b"EWX\x00"])
def test_another_content_or_format_is_refused(head):
    with pytest.raises(IntegrityError, match="not of content DELTA"):
        read(head)


def test_an_anchor_is_not_a_delta_nor_the_reverse():
    assert read(b"EWA\x00", Content.ANCHOR) == []
    with pytest.raises(IntegrityError):
        read(b"EWD\x00", Content.ANCHOR)


def test_a_cut_off_payload_is_refused_wherever_it_is_cut():
    payload = pack_blocks(Content.DELTA, [raw(0, 0, 4), raw(1, 0, 4)])
    ends = {4, 4 + raw(0, 0, 4).coded_bytes, len(payload)}
    for length in range(len(payload) + 1):
        if length in ends:
            read(payload[:length])
        else:
            with pytest.raises(IntegrityError):
                read(payload[:length])


@given(st.binary(max_size=200))
def test_garbage_gives_blocks_inside_their_sequences_or_an_integrity_error(garbage):
    try:
        blocks = read(b"EWD\x00" + garbage)
    except IntegrityError:
        return
    for block in blocks:
        assert block.first + block.count <= LAYOUT.sequences[block.sequence].elements
