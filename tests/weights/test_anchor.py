import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import IntegrityError
from echo2p2p.ids import digest_of
from echo2p2p.testing.states import random_layout, random_state, trained_step
from echo2p2p.weights.anchor import AnchorApply, decode_anchor, encode_anchor
from echo2p2p.weights.blocks import ANCHOR_BLOCK_ELEMENTS, Block, Content, pack_blocks
from echo2p2p.weights.delta import apply_delta, encode_delta
from echo2p2p.weights.forms import Form
from echo2p2p.weights.layout import plan_layout


def blamed(work):
    """Run ``work``; return whom its `IntegrityError` blames, ``None`` if there is none."""
    try:
        work()
    except IntegrityError as error:
        return error.source
    return None


@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_an_anchor_of_any_state_is_exact_whatever_the_target_held(rng):
    layout = random_layout(rng)
    state = random_state(layout, rng)
    target = bytearray(rng.randbytes(layout.total_bytes))
    decode_anchor(layout, encode_anchor(layout, state), target)
    assert bytes(target) == state


def test_the_same_state_gives_the_same_bytes_however_it_was_reached():
    layout = plan_layout([("w", "bf16", (ANCHOR_BLOCK_ELEMENTS + 5,), ())])
    base, result = trained_step(ANCHOR_BLOCK_ELEMENTS + 5, deviation=0.02, step=1e-4, seed=4)
    reached = bytearray(base)
    apply_delta(layout, encode_delta(layout, base, result), reached)
    anchor = encode_anchor(layout, reached)
    assert anchor == encode_anchor(layout, memoryview(result), threads=2)
    target = bytearray(len(base))
    decode_anchor(layout, anchor, target, threads=2)
    assert target == result


def test_an_anchor_of_trained_weights_saves_a_third():
    layout = plan_layout([("w", "bf16", (1 << 17,), ())])
    state, _ = trained_step(1 << 17, deviation=0.02, step=0, seed=5)
    assert len(encode_anchor(layout, state)) < 0.67 * len(state)


def test_an_anchor_of_noise_costs_no_more_than_the_noise():
    layout = plan_layout([("w", "bf16", (50_000,), ()), ("x", "i32", (1000,), ())])
    state = random.Random(1).randbytes(layout.total_bytes)
    assert len(encode_anchor(layout, state)) <= len(state) + 4 + 2 * 18


def test_an_empty_layout_has_an_anchor():
    layout = plan_layout([])
    target = bytearray()
    decode_anchor(layout, encode_anchor(layout, b""), target)
    assert encode_anchor(layout, b"") == b"EWA\x00"


def test_the_bytes_of_a_fixed_anchor_never_change():
    layout = plan_layout([("w", "bf16", (3000,), ()), ("b", "f32", (40,), ())])
    words = (np.arange(3000) * 7 % 640 + 0x3C00).astype("<u2")
    state = words.tobytes() + bytes(range(160))
    assert digest_of(encode_anchor(layout, state)).hex()[:32] == "648e85227e973de8c3d0f7e6cc395b69"


LAYOUT = plan_layout([("a", "bf16", (4,), ()), ("none", "bf16", (0,), ()), ("b", "f16", (4,), ())])


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param([], id="nothing"),
        pytest.param([Block(0, 0, 4, Form.RAW, bytes(8))], id="a tensor missing"),
        pytest.param(
            [Block(0, 0, 4, Form.RAW, bytes(8)), Block(1, 1, 3, Form.RAW, bytes(6))],
            id="an element missing",
        ),
        pytest.param(
            [Block(0, 0, 4, Form.RAW, bytes(8)), Block(1, 0, 4, Form.DENSE, b"\x01\x00")],
            id="a block that needs a base",
        ),
    ],
)
def test_an_anchor_that_leaves_anything_open_is_refused_before_it_writes(blocks):
    target = bytearray(b"\x11" * 16)
    with pytest.raises(IntegrityError) as caught:
        decode_anchor(LAYOUT, pack_blocks(Content.ANCHOR, blocks), target, source="mallory")
    assert caught.value.source == "mallory"
    assert target == b"\x11" * 16


def test_a_delta_is_not_decoded_as_an_anchor():
    with pytest.raises(IntegrityError, match="ANCHOR"):
        decode_anchor(LAYOUT, encode_delta(LAYOUT, bytes(16), bytes(16)), bytearray(16))


@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False), st.floats(0, 1), st.integers(0, 255))
def test_a_damaged_anchor_gives_a_state_or_an_integrity_error(rng, place, value):
    layout = plan_layout([("w", "bf16", (600,), ()), ("x", "f32", (90,), ())])
    payload = bytearray(encode_anchor(layout, random_state(layout, rng)))
    payload[int(place * (len(payload) - 1))] = value
    assert blamed(
        lambda: decode_anchor(layout, payload, bytearray(layout.total_bytes), source="mallory")
    ) in (None, "mallory")


def test_an_anchor_is_written_block_by_block_as_it_arrives():
    layout = plan_layout([("w", "bf16", (ANCHOR_BLOCK_ELEMENTS * 3,), ()), ("b", "f32", (9,), ())])
    state = random.Random(2).randbytes(layout.total_bytes)
    payload = encode_anchor(layout, state)
    memory, target = bytearray(len(payload)), bytearray(layout.total_bytes)
    work = AnchorApply(layout, memory, target)
    done, half = 0, len(payload) // 2
    memory[:half] = payload[:half]
    done += work.advance(half)
    assert done == 1
    assert target[: 2 * ANCHOR_BLOCK_ELEMENTS] == state[: 2 * ANCHOR_BLOCK_ELEMENTS]
    with pytest.raises(IntegrityError, match="elements of"):
        work.check_end()
    memory[half:] = payload[half:]
    done += work.advance(len(payload))
    work.check_end()
    assert done == 4
    assert target == state


def test_a_block_that_needs_a_base_is_refused_as_it_arrives():
    blocks = [Block(0, 0, 4, Form.RAW, bytes(8)), Block(1, 0, 4, Form.DENSE, b"\x01\x00")]
    payload = pack_blocks(Content.ANCHOR, blocks)
    work = AnchorApply(LAYOUT, payload, bytearray(16), source="mallory")
    assert blamed(lambda: work.advance(len(payload))) == "mallory"
