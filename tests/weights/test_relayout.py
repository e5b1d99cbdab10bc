import random

from echo2p2p.testing.states import random_state
from echo2p2p.weights.delta import apply_delta, encode_delta
from echo2p2p.weights.layout import elements_of, flat_bytes, plan_layout
from echo2p2p.weights.relayout import carry_over

OLD = plan_layout(
    [
        ("embed", "bf16", (50, 8), ("head",)),
        ("norm", "f32", (8,), ()),
        ("gone", "bf16", (9,), ()),
        ("reshaped", "bf16", (6, 4), ()),
        ("recast", "bf16", (30,), ()),
    ]
)
NEW = plan_layout(
    [
        ("norm", "f32", (8,), ()),
        ("reshaped", "bf16", (4, 6), ()),
        ("embed", "bf16", (50, 8), ()),
        ("head", "bf16", (50, 8), ()),
        ("recast", "f16", (30,), ()),
        ("appeared", "bf16", (40,), ()),
        ("empty", "bf16", (0,), ()),
    ]
)


def tensor(layout, state, name):
    entry = next(each for each in layout.tensors if each.name == name)
    return elements_of(flat_bytes(layout, state), entry).tobytes()


def test_what_kept_its_name_dtype_and_shape_is_carried_over_and_the_rest_is_named():
    state = random_state(OLD, random.Random(1))
    base, fresh = carry_over(OLD, state, NEW)
    assert fresh == ("reshaped", "recast", "appeared", "empty")
    assert tensor(NEW, base, "norm") == tensor(OLD, state, "norm")
    assert tensor(NEW, base, "embed") == tensor(OLD, state, "embed")
    assert tensor(NEW, base, "head") == tensor(OLD, state, "embed")
    assert not any(b"".join(tensor(NEW, base, name) for name in fresh))


def test_a_delta_across_layouts_is_exact():
    state, result = random_state(OLD, random.Random(1)), random_state(NEW, random.Random(2))
    payload = encode_delta(NEW, carry_over(OLD, state, NEW)[0], result)
    target, _ = carry_over(OLD, state, NEW)
    apply_delta(NEW, payload, target)
    assert target == result


def test_the_same_layout_carries_everything_over():
    state = random_state(OLD, random.Random(1))
    assert carry_over(OLD, state, OLD) == (bytearray(state), ())
