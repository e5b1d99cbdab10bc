import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.weights.layout import DTYPES
from echo2p2p.weights.ordered import CLASSES, class_table, plan_low
from echo2p2p.weights.stretch import (
    GROUP_MIN,
    Stretch,
    group_slices,
    plan_groups,
    population,
    value_dtype,
    walk,
)


def test_a_walk_gives_each_segment_its_own_changes():
    segments = [np.zeros(size, dtype="<u2") for size in (3, 4, 1)]
    where = np.array([0, 2, 3, 6, 7], dtype=np.uint32)
    assert [
        (number, origin, where[part].tolist()) for number, origin, part in walk(segments, where)
    ] == [
        (0, 0, [0, 2]),
        (1, 3, [3, 6]),
        (2, 7, [7]),
    ]


@given(st.lists(st.sampled_from([0, 1, GROUP_MIN, 5 * GROUP_MIN]), min_size=16, max_size=16))
def test_groups_hold_all_entries_in_order_and_none_is_small(entries):
    counts = np.array(entries)
    slices = group_slices(plan_groups(counts), counts)
    assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    assert slices[-1].stop == sum(entries)
    sizes = [part.stop - part.start for part in slices]
    assert len(sizes) == 1 or min(sizes) >= GROUP_MIN


def test_classes_follow_the_old_exponent():
    table = class_table(110)
    assert table[[0, 1, 110, 111, 123, 124, 255]].tolist() == [0, 1, 1, 2, 14, 15, 15]
    bits = np.array([0, 0x8000, 110 << 7, 0x8000 | 111 << 7, 0x7F80], dtype="<u2")
    counts = population(DTYPES["bf16"], [bits[:2], bits[2:]], 110)
    assert counts[[0, 1, 2, 15]].tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("changed", "low"),
    [
        ({}, 1),
        ({0: 5}, 1),
        ({5: 1}, 1),
        ({120: 1}, 107),
        ({110: 5000, 125: 1}, 97),
        ({255: 9}, 241),
    ],
)
def test_the_class_above_what_changes_is_for_what_does_not(changed, low):
    changes = np.zeros(256, dtype=np.int64)
    for exponent, count in changed.items():
        changes[exponent] = count
    assert plan_low(changes) == low
    top = max((e for e, n in changed.items() if 1000 * n >= changes.sum()), default=0)
    if 0 < top < 255:
        assert class_table(low)[top] < CLASSES - 1


def test_a_stretch_counts_its_changes_by_class():
    old = np.array([0x3F80, 0x3F80, 0, 0x4000], dtype="<u2")
    new = np.array([0x3F81, 0x3F80, 1, 0x4002], dtype="<u2")
    stretch = Stretch.of(DTYPES["bf16"], old, new)
    assert (stretch.count, stretch.changed, stretch.raw_bytes) == (4, 3, 8)
    counts = stretch.changes_by_class()
    assert counts[0] == 1
    assert counts.sum() == 3
    assert stretch.found.zigzag.tolist() == [2, 2, 4]


def test_differences_are_packed_in_two_bytes_at_least():
    assert [value_dtype(DTYPES[name]).itemsize for name in ("i8", "bf16", "f32", "i64")] == [
        2,
        2,
        4,
        8,
    ]
