"""What a block changes, worked out without touching it, is what decoding it in place does."""

import numpy as np
import pytest

from echo2p2p.errors import IntegrityError
from echo2p2p.weights.changes import Changes, joined, pieces_of
from echo2p2p.weights.forms import Form, decode_block, encode_block, find_changes
from echo2p2p.weights.kernels import PIECE_ELEMENTS, numpy_only, warm_up
from echo2p2p.weights.layout import DTYPES

COUNT = PIECE_ELEMENTS + 5000
"""More than one piece."""


def pair(name: str, density: float):
    """Return old and new elements of a dtype."""
    dtype = DTYPES[name]
    draws = np.random.default_rng(3)
    old = draws.integers(0, 256, COUNT * dtype.item_bytes, dtype=np.uint8).view(dtype.bits)
    new = old.copy()
    where = np.flatnonzero(draws.random(COUNT) < density)
    new[where] += draws.integers(1, 60, where.size).astype(dtype.bits)
    return old, new


def cut(elements):
    """Return the elements as segments of uneven lengths."""
    return np.split(elements, [1, 700, COUNT - 3])


@pytest.mark.parametrize("form", [Form.TIGHT, Form.FAST])
@pytest.mark.parametrize("name", ["bf16", "f32", "i8"])
@pytest.mark.parametrize("density", [0.0005, 0.05])
def test_changes_are_those_that_decoding_in_place_makes(form, name, density):
    dtype = DTYPES[name]
    old, new = pair(name, density)
    body = memoryview(encode_block(form, dtype, old, new))
    untouched = old.copy()
    changes = find_changes(form, dtype, body, cut(old), source="local")
    assert (old == untouched).all()
    assert (changes.where == np.flatnonzero(old != new)).all()
    assert changes.bytes == changes.where.size * (4 + dtype.item_bytes)
    assert changes.where.base is None or changes.where.base.nbytes < 2 * changes.where.nbytes + 64
    changes.move(dtype, cut(old))
    assert (old == new).all()


@pytest.mark.skipif(not warm_up(), reason="numba is not installed")
def test_both_kinds_of_loops_find_the_same_changes():
    old, new = pair("bf16", 0.01)
    body = memoryview(encode_block(Form.TIGHT, DTYPES["bf16"], old, new))
    arguments = (Form.TIGHT, DTYPES["bf16"], body, cut(old))
    compiled = find_changes(*arguments, source="local")
    with numpy_only():
        plain = find_changes(*arguments, source="local")
    assert (compiled.where == plain.where).all()
    assert (compiled.zigzag == plain.zigzag).all()


@pytest.mark.parametrize("form", [Form.DENSE, Form.PLANES, Form.RAW])
def test_forms_that_say_something_of_every_element_are_left_to_the_writer(form):
    old, new = pair("bf16", 0.5)
    body = memoryview(encode_block(form, DTYPES["bf16"], old, new))
    assert find_changes(form, DTYPES["bf16"], body, [old], source="local") is None


@pytest.mark.parametrize("form", [Form.TIGHT, Form.FAST])
def test_a_body_that_is_longer_than_the_block_is_refused_with_its_source(form):
    old, new = pair("bf16", 0.01)
    body = encode_block(form, DTYPES["bf16"], old, new) + b"\x00"
    with pytest.raises(IntegrityError) as caught:
        find_changes(form, DTYPES["bf16"], memoryview(body), [old], source="mallory")
    assert caught.value.source == "mallory"
    short = old[: COUNT // 2].copy()
    with pytest.raises(IntegrityError):
        decode_block(form, DTYPES["bf16"], memoryview(body), [short], source="mallory")
    with pytest.raises(IntegrityError):
        find_changes(form, DTYPES["bf16"], memoryview(body), [short], source="mallory")


def test_pieces_cover_the_segments_in_order_and_parts_are_joined():
    elements = np.arange(COUNT, dtype="<u2")
    segments = [elements[:10], elements[10:]]
    pieces = list(pieces_of(segments))
    assert [origin for origin, _ in pieces] == [0, 10, 10 + PIECE_ELEMENTS]
    assert (np.concatenate([piece for _, piece in pieces]) == elements).all()
    parts = [
        Changes(np.array([at], dtype=np.uint32), np.array([at + 1], dtype="<u2")) for at in (3, 9)
    ]
    assert joined(parts).where.tolist() == [3, 9]
    assert joined(parts).zigzag.tolist() == [4, 10]
    assert joined(parts[:1]) is parts[0]
