"""TIGHT, FAST and DENSE by hand: each body is what its module says, over segments too."""

import numpy as np
import pytest

from echo2p2p.weights.dense import put_dense, take_dense
from echo2p2p.weights.fast import GAP_WIDE_BELOW, put_fast, take_fast
from echo2p2p.weights.kernels import find_in
from echo2p2p.weights.layout import DTYPES
from echo2p2p.weights.streams import StreamReader, StreamWriter
from echo2p2p.weights.stretch import Stretch
from echo2p2p.weights.tight import put_tight, take_tight

BF16 = DTYPES["bf16"]
OLD = np.array([0x3F80, 0, 0x3F80, 0x4000, 0x3F80, 0x4000, 0x3F80], dtype="<u2")
NEW = np.array([0x3F81, 0x8000, 0x3F80, 0x3FFF, 0x3F80, 0x4000, 0x3F82], dtype="<u2")


def split(array, *cuts):
    return np.split(array.copy(), cuts)


def written(put, *cuts, low=127):
    old, new = split(OLD, *cuts), split(NEW, *cuts)
    out = StreamWriter()
    put(out, Stretch(BF16, old, new, find_in(BF16, old, new), low))
    return StreamReader(memoryview(out.body()), source="local")


def packed(body, count, dtype):
    values = np.zeros(count, dtype=dtype)
    body.packed(values)
    return values.tolist()


@pytest.mark.parametrize("cuts", [(), (1,), (2, 5)])
def test_a_tight_body_is_gaps_and_differences_by_class(cuts):
    body = written(put_tight, *cuts)
    assert body.number(255) == 127
    assert [body.number(9) for _ in range(16)] == [1, 2, 1, *[0] * 13]  # zeros, 1.0s, 2.0s
    assert body.number(1 << 16) == 0
    assert packed(body, 4, "<u4") == [0, 0, 2, 0]
    assert packed(body, 4, "<u2") == [1, 2, 4, 1]
    body.end()


@pytest.mark.parametrize("cuts", [(), (1,), (2, 5)])
def test_a_fast_body_is_gaps_and_differences(cuts):
    body = written(put_fast, *cuts)
    assert [body.number(9) for _ in range(3)] == [4, 1, 4]
    assert body.planes(4, np.dtype("<u1")).tolist() == [0, 0, 1, 2]
    assert body.planes(4, np.dtype("<u2")).tolist() == [1, 0, 0, 3]
    body.end()


@pytest.mark.parametrize("cuts", [(), (1,), (2, 5)])
def test_a_dense_body_is_all_differences_by_class(cuts):
    body = written(put_dense, *cuts)
    assert (body.number(255), body.number(1 << 16)) == (127, 0)
    assert packed(body, 7, "<u2") == [1, 2, 0, 0, 4, 1, 0]
    body.end()


@pytest.mark.parametrize("cuts", [(), (1,), (2, 5)])
@pytest.mark.parametrize(
    ("put", "take"), [(put_tight, take_tight), (put_fast, take_fast), (put_dense, take_dense)]
)
def test_each_is_undone_whatever_the_segments(put, take, cuts):
    target = split(OLD, *cuts)
    body = written(put, 3)
    take(body, BF16, target)
    body.end()
    assert np.array_equal(np.concatenate(target), NEW)


@pytest.mark.parametrize(("changes", "width"), [(1, 2), (2, 2), (3, 1)])
def test_rare_changes_have_wide_gaps(changes, width):
    old = np.zeros(1000, dtype="<u2")
    new = old.copy()
    new[:changes] = 1
    out = StreamWriter()
    put_fast(out, Stretch.of(BF16, old, new))
    body = StreamReader(memoryview(out.body()), source="local")
    assert (body.number(9), body.number(9)) == (changes, width)
    assert GAP_WIDE_BELOW * 1000 == 2.5
