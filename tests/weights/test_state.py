import pytest

from echo2p2p.errors import LocalProtocolError
from echo2p2p.ids import digest_of
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.state import (
    STATE_BLOCK_BYTES,
    block_digests,
    root_digest,
    state_digest,
)


def layout_of(count):
    return plan_layout([("a", "i8", (count,), ())])


def test_a_changed_byte_changes_its_own_block_and_the_root():
    layout = layout_of(2 * STATE_BLOCK_BYTES + 3)
    state = bytearray(layout.total_bytes)
    before, root = block_digests(layout, state), state_digest(layout, state)
    state[STATE_BLOCK_BYTES] = 1
    after = block_digests(layout, memoryview(state))
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert state_digest(layout, state) != root
    assert after[2] == digest_of(bytes(3))


def test_the_root_can_be_built_from_blocks_checked_one_by_one():
    layout = layout_of(STATE_BLOCK_BYTES + 1)
    state = bytes(layout.total_bytes)
    assert root_digest(layout, block_digests(layout, state)) == state_digest(layout, state)


def test_the_same_bits_under_another_layout_are_another_state():
    other = plan_layout([("b", "i8", (4,), ())])
    assert state_digest(layout_of(4), bytes(4)) != state_digest(other, bytes(4))


def test_an_empty_state_has_a_digest_and_no_blocks():
    layout = plan_layout([("a", "bf16", (0,), ())])
    assert block_digests(layout, b"") == ()
    assert len(state_digest(layout, b"")) == 32


def test_a_state_of_another_length_is_our_own_bug():
    with pytest.raises(LocalProtocolError):
        state_digest(layout_of(4), bytes(5))


def test_the_digest_of_a_fixed_state_never_changes():
    layout = plan_layout([("w", "bf16", (2, 2), ("v",))])
    assert state_digest(layout, bytes(range(8))).hex() == (
        "b515d67f7d3569fcf63b3d49ea620c7b419e6986446d4fcdc092c70adc97636c"
    )
