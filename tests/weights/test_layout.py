import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import LocalProtocolError, RemoteProtocolError, Violation
from echo2p2p.testing.states import random_layout
from echo2p2p.weights.layout import (
    STATE_BYTES_MAX,
    Layout,
    elements_of,
    flat_bytes,
    plan_layout,
)
from echo2p2p.wire import codec
from echo2p2p.wire.messages import LayoutTable, TensorSpec


def spec(name="a", dtype="bf16", shape=(2, 3), offset=0, tied=()):
    return TensorSpec(name=name, dtype=dtype, shape=list(shape), offset=offset, tied=list(tied))


def table(*specs, total_bytes):
    return LayoutTable(tensors=list(specs), total_bytes=total_bytes)


def test_a_plan_lays_tensors_end_to_end_and_counts_ties_once():
    layout = plan_layout(
        [("embed", "bf16", (4, 3), ("head",)), ("scale", "f32", (), ()), ("none", "i8", (0, 9), ())]
    )
    assert [(t.name, t.offset, t.bytes, t.elements) for t in layout.tensors] == [
        ("embed", 0, 24, 12),
        ("scale", 24, 4, 1),
        ("none", 28, 0, 0),
    ]
    assert layout.total_bytes == 28


def test_a_table_survives_the_wire_with_its_digest():
    layout = plan_layout([("a", "bf16", (3,), ("b",)), ("c", "i64", (2, 2), ())])
    received = codec.decode(codec.encode(layout.table), LayoutTable)
    assert Layout.from_table(received) == layout


def test_the_digest_tells_names_ties_shapes_and_dtypes_apart():
    plans = [
        [("a", "bf16", (6,), ())],
        [("b", "bf16", (6,), ())],
        [("a", "bf16", (2, 3), ())],
        [("a", "f16", (6,), ())],
        [("a", "bf16", (6,), ("b",))],
        [("a", "bf16", (6,), ()), ("b", "bf16", (0,), ())],
    ]
    assert len({plan_layout(plan).digest for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    "bad",
    [
        table(spec(offset=2), total_bytes=14),
        table(spec(), spec("b", offset=10), total_bytes=22),
        table(spec(), spec("b", offset=14), total_bytes=26),
        table(spec("b", offset=12), spec("a", offset=0), total_bytes=24),
        table(spec(), total_bytes=13),
        table(spec(), total_bytes=-12),
        table(spec(dtype="f8"), total_bytes=6),
        table(spec(), spec(offset=12), total_bytes=24),
        table(spec(tied=("a",)), total_bytes=12),
        table(spec(tied=("b", "b")), total_bytes=12),
        table(spec(tied=("b",)), spec("b", offset=12), total_bytes=24),
        table(spec(name=""), total_bytes=12),
        table(spec(name="x" * 1025), total_bytes=12),
        table(spec(shape=(-2, -3)), total_bytes=12),
        table(spec(shape=(-1,)), total_bytes=-2),
        table(spec(shape=(1,) * 9), total_bytes=2),
        table(spec(shape=(STATE_BYTES_MAX,)), total_bytes=2 * STATE_BYTES_MAX),
        table(spec(shape=(2**64 - 1,) * 8), total_bytes=2**64 - 1),
    ],
)
def test_a_bad_table_is_the_senders_fault(bad):
    with pytest.raises(RemoteProtocolError) as caught:
        Layout.from_table(bad)
    assert caught.value.violation is Violation.MALFORMED


def test_a_model_with_an_unknown_dtype_cannot_be_planned():
    with pytest.raises(RemoteProtocolError, match="complex"):
        plan_layout([("a", "complex", (1,), ())])


def test_too_many_tensors_are_refused():
    many = [spec(f"t{i}", shape=(0,)) for i in range(65_537)]
    with pytest.raises(RemoteProtocolError, match="at most"):
        Layout.from_table(table(*many, total_bytes=0))


def test_elements_share_the_states_memory_even_at_odd_offsets():
    layout = plan_layout([("a", "i8", (1,), ()), ("b", "f32", (2,), ())])
    state = bytearray(9)
    elements_of(flat_bytes(layout, state, writable=True), layout.tensors[1])[1] = 0x01020304
    assert bytes(state) == bytes(5) + b"\x04\x03\x02\x01"


def test_a_state_of_the_wrong_kind_is_our_own_bug():
    layout = plan_layout([("a", "i8", (4,), ())])
    with pytest.raises(LocalProtocolError, match="3 bytes"):
        flat_bytes(layout, bytes(3))
    with pytest.raises(LocalProtocolError, match="read-only"):
        flat_bytes(layout, bytes(4), writable=True)


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_tensors_of_any_layout_tile_the_state(rng):
    layout = random_layout(rng)
    seen = np.zeros(layout.total_bytes, dtype=np.int64)
    for tensor in layout.tensors:
        seen[tensor.offset : tensor.offset + tensor.bytes] += 1
        assert tensor.bytes == tensor.elements * tensor.item_bytes
    assert (seen == 1).all()
