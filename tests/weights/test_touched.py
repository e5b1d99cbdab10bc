"""Parts of flat states: what is selected, in which order, and what their digests tell."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.testing.states import changed_state, random_layout, random_state
from echo2p2p.weights.delta import DeltaApply, encode_delta
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.touched import (
    TURNS,
    Window,
    digest_selected,
    next_window,
    selected_parts,
    selection_bytes,
    touched_parts,
)

LAYOUT = plan_layout(
    [
        ("matrix", "bf16", (5, 4), ()),
        ("none", "bf16", (0, 4), ()),
        ("scalar", "f32", (), ()),
        ("bytes", "i8", (7,), ()),
        ("cube", "f32", (3, 2, 2), ()),
    ]
)
NOTHING = np.zeros(0, dtype=np.int64)


def shown(parts):
    return [
        (
            LAYOUT.tensors[part.tensor].name,
            (part.elements.start, part.elements.stop)
            if isinstance(part.elements, slice)
            else part.elements.tolist(),
        )
        for part in parts
    ]


def test_places_are_sorted_and_taken_once_and_belong_to_tensors():
    places = np.array([51, 0, 38, 44, 40, 0, 45])
    assert shown(touched_parts(LAYOUT, places)) == [
        ("matrix", [0, 19]),
        ("scalar", [0]),
        ("bytes", [0, 1]),
        ("cube", [0]),
    ]


@pytest.mark.parametrize(
    ("window", "parts"),
    [
        (Window(0, 1), [("matrix", (0, 4))]),
        (Window(7, 9), [("matrix", (0, 8))]),
        (Window(39, 46), [("matrix", (16, 20)), ("scalar", (0, 1)), ("bytes", (0, 2))]),
        (Window(66, 68), [("cube", (0, 8))]),
        (Window(98, 99), [("cube", (8, 12))]),
    ],
)
def test_a_window_takes_the_whole_rows_that_it_lies_in(window, parts):
    assert shown(selected_parts(LAYOUT, NOTHING, window)) == parts


@pytest.mark.parametrize("total", [1, 1 << 20, (1 << 20) + 1, (200 << 20) + 7])
def test_windows_that_follow_each_other_see_every_byte(total):
    layout = plan_layout([("w", "i8", (total,), ())])
    windows = [next_window(layout, turn) for turn in range(TURNS)]
    seen = sorted({(window.first, window.past) for window in windows})
    assert seen[0][0] == 0
    assert seen[-1][1] == total
    assert all(one[1] == other[0] for one, other in itertools.pairwise(seen))
    assert next_window(layout, len(seen)) == windows[0]


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False))
def test_every_bit_that_is_selected_counts_and_no_other(rng):
    layout = random_layout(rng)
    state = bytearray(random_state(layout, rng))
    starts = [
        tensor.offset + n * tensor.item_bytes
        for tensor in layout.tensors
        for n in range(tensor.elements)
    ]
    places = np.array(rng.sample(starts, len(starts) // 3), dtype=np.int64)
    first = rng.randint(0, layout.total_bytes)
    window = Window(first, rng.randint(first, layout.total_bytes))
    parts = selected_parts(layout, places, window)
    assert selection_bytes(layout, parts) >= window.past - window.first
    digest = digest_selected(layout, state, places, window)
    selected = set()
    for part in parts:
        tensor = layout.tensors[part.tensor]
        for element in np.arange(tensor.elements)[part.elements].tolist():
            at = tensor.offset + element * tensor.item_bytes
            selected.update(range(at, at + tensor.item_bytes))
    for at in rng.sample(range(layout.total_bytes), min(layout.total_bytes, 20)):
        state[at] ^= 1 << rng.randrange(8)
        assert (digest_selected(layout, state, places, window) != digest) == (at in selected)
        digest = digest_selected(layout, state, places, window)


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.sampled_from([0, 0.001, 0.05, 0.3]))
def test_a_delta_tells_the_places_that_it_writes_and_no_bit_differs_elsewhere(rng, density):
    layout = random_layout(rng)
    base = random_state(layout, rng)
    result = changed_state(layout, base, density, rng)
    target = bytearray(base)
    delta = DeltaApply(
        layout, encode_delta(layout, base, result), target, changes_bytes_max=1 << 30
    )
    delta.write()
    places = delta.touched(layout.total_bytes)
    if places is None:  # a block says something of every element
        return
    mended = bytearray(base)
    for part in touched_parts(layout, places):
        tensor = layout.tensors[part.tensor]
        for element in part.elements.tolist():
            at = tensor.offset + element * tensor.item_bytes
            mended[at : at + tensor.item_bytes] = result[at : at + tensor.item_bytes]
    assert mended == target == result


def test_small_deltas_are_told_and_what_has_no_room_is_not():
    layout = plan_layout([("w", "bf16", (40_000,), ()), ("v", "f32", (9_000,), ())])
    rng = random.Random(1)
    base = random_state(layout, rng)
    result = bytearray(base)
    wanted = sorted(rng.sample(range(0, 80_000, 2), 40) + rng.sample(range(80_000, 116_000, 4), 9))
    for place in wanted:
        result[place] ^= 1
    payload = encode_delta(layout, base, result)
    for room, most, places in ((1 << 20, 49, wanted), (1 << 20, 48, None), (20, 49, None)):
        delta = DeltaApply(layout, payload, bytearray(base), changes_bytes_max=room)
        delta.write()
        told = delta.touched(most)
        assert (told if told is None else sorted(told.tolist())) == places
