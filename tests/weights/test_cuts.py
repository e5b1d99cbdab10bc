import threading

import numpy as np
import pytest

from echo2p2p.testing.states import trained_step
from echo2p2p.weights import cuts, kernels
from echo2p2p.weights.forms import Form
from echo2p2p.weights.kernels import Found
from echo2p2p.weights.layout import DTYPES, flat_bytes, plan_layout, segments_of
from echo2p2p.weights.policy import SMALLEST, FormPolicy

COUNT = 1 << 20
LAYOUT = plan_layout([("w", "bf16", (COUNT,), ())])
(SEQUENCE,) = LAYOUT.sequences
OLD, NEW = (
    flat_bytes(LAYOUT, state) for state in trained_step(COUNT, deviation=0.02, step=1e-5, seed=1)
)


def find(sequence, first, count):
    sides = (segments_of(flat, sequence, first, count) for flat in (OLD, NEW))
    return kernels.find_in(DTYPES["bf16"], *sides)


def opened(*, whole=False, threads=1):
    return list(cuts.windows(SEQUENCE, find, whole=whole, threads=threads))


@pytest.mark.parametrize("threads", [1, 3])
def test_work_is_mapped_in_order(threads):
    seen = set()

    def work(item):
        seen.add(threading.get_ident())
        return item * item

    assert list(cuts.mapped(work, range(20), threads)) == [item * item for item in range(20)]
    assert (threading.get_ident() in seen) == (threads == 1)


def test_windows_hold_every_change_however_they_are_cut(monkeypatch):
    (whole,) = opened()
    everything = find(SEQUENCE, 0, COUNT)
    assert np.array_equal(whole.found.where, everything.where)
    monkeypatch.setattr(cuts, "FIND_ELEMENTS", 10_000)
    monkeypatch.setattr(cuts, "WINDOW_CHANGES", 50_000)
    parts = opened(threads=2)
    assert len(parts) > 2
    places = [part.found.where.astype(np.int64) + part.first for part in parts]
    assert np.array_equal(np.concatenate(places), everything.where)
    zigzags = np.concatenate([part.found.zigzag for part in parts])
    assert np.array_equal(zigzags, everything.zigzag)
    assert [part.first for part in parts[1:]] == [part.first + part.count for part in parts[:-1]]


def test_a_stretch_without_changes_makes_no_window():
    def nothing(sequence, first, count):
        empty = np.zeros(0, dtype=np.uint16)
        return Found(empty.astype(np.uint32), empty, empty.astype(np.uint8))

    assert list(cuts.windows(SEQUENCE, nothing, whole=False, threads=1)) == []


def test_pieces_hold_equally_many_changes_and_their_estimates_are_near(monkeypatch):
    monkeypatch.setattr(cuts, "BLOCK_BYTES", 20_000)
    (window,) = opened()
    pieces = list(cuts.pieces(window, OLD, NEW, SMALLEST))
    changed = [piece.stretch.changed for piece in pieces]
    assert len(pieces) > 3
    assert max(changed) - min(changed) <= 1
    assert sum(changed) == window.found.where.size
    for piece in pieces:
        body = cuts.put_block(Form.TIGHT, piece.stretch)
        assert 0.85 < len(body) / piece.estimate < 1.15


def test_a_whole_policy_makes_one_piece():
    (window,) = opened(whole=True)
    policy = FormPolicy("one", frozenset({Form.TIGHT}), whole=True)
    (piece,) = cuts.pieces(window, OLD, NEW, policy)
    assert piece.stretch.changed == window.found.where.size


def test_what_the_estimate_rules_out_is_not_coded(monkeypatch):
    (window,) = opened()
    (piece,) = cuts.pieces(window, OLD[:], NEW[:], FormPolicy("all", frozenset(Form), whole=True))
    coded = []

    def counted(form, stretch):
        coded.append((form, stretch.changed == piece.stretch.changed))
        return put_block(form, stretch)

    put_block = cuts.put_block
    monkeypatch.setattr(cuts, "put_block", counted)
    form, _ = cuts.shortest(piece, SMALLEST)
    assert [form for form, whole in coded if whole] == [form]
