"""The compiled loops and the numpy loops must not differ in a bit."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.testing.states import AWKWARD_BF16, trained_step
from echo2p2p.weights import kernels
from echo2p2p.weights.kernels import Ranks
from echo2p2p.weights.layout import DTYPES
from echo2p2p.weights.ordered import class_table, plan_low


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    assert kernels.warm_up()


def states(seed, count, density, *, awkward=False):
    draws = np.random.default_rng(seed)
    old = np.frombuffer(trained_step(count, deviation=0.02, step=0, seed=seed)[0], dtype="<u2")
    old = old.copy()
    if awkward:
        where = draws.random(count) < 0.3
        old[where] = draws.choice(np.array(AWKWARD_BF16, dtype="<u2"), int(where.sum()))
    new = old.copy()
    where = np.flatnonzero(draws.random(count) < density)
    new[where] += draws.choice(np.array([1, 65535, 7, 0x8000], dtype="<u2"), where.size)
    return old, new


def walked(dtype, old, new, cuts):
    """Every loop's outcome over segments that end at ``cuts``; and all round trips are checked."""
    found = kernels.find(dtype, old, new)
    low = plan_low(np.bincount(found.exponent, minlength=256))
    changes = np.bincount(class_table(low)[found.exponent], minlength=16)
    gaps = np.zeros(found.where.size, dtype=np.uint32)
    values = np.zeros(found.where.size, dtype=np.uint16)
    edges = [0, *cuts, old.size]
    ranks = Ranks.start(low, changes)
    for start, past in itertools.pairwise(edges):
        lo, hi = np.searchsorted(found.where, (start, past))
        part = (found.where[lo:hi], found.zigzag[lo:hi], start)
        kernels.put_ranks(dtype, old[start:past], *part, ranks, gaps, values)
    assert (ranks.at == ranks.end).all()
    target = old.copy()
    if found.where.size:
        ranks = kernels.first_ranks(low, changes, gaps)
        for start, past in itertools.pairwise(edges):
            kernels.take_ranks(dtype, target[start:past], ranks, gaps, values)
        assert (ranks.at == ranks.end).all()
    assert (target == new).all()
    population = kernels.population(dtype, old, low)
    dense = np.zeros(old.size, dtype=np.uint16)
    ranks = Ranks.start(low, population)
    for start, past in itertools.pairwise(edges):
        kernels.put_dense(dtype, old[start:past], new[start:past], ranks, dense)
    target = old.copy()
    kernels.take_dense(dtype, target, Ranks.start(low, population), dense)
    assert (target == new).all()
    target = old.copy()
    kernels.move(dtype, target, found.where, 0, found.zigzag)
    assert (target == new).all()
    coded = [kernels.put_gaps(found.where, skip) for skip in (255, 65535) if found.where.size]
    for skip, entries in zip((255, 65535), coded, strict=False):
        back = kernels.take_gaps(entries, skip, found.where.size, old.size)
        assert (back == found.where).all()
    return [found.where, found.zigzag, found.exponent, gaps, values, population, dense, *coded]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 1000),
    st.integers(1, 700),
    st.sampled_from([0, 0.002, 0.1, 0.6, 1]),
    st.sampled_from(["bf16", "f16", "i16"]),
    st.lists(st.integers(0, 700), max_size=3),
)
def test_both_loops_agree_on_any_elements_and_segments(seed, count, density, name, cuts):
    old, new = states(seed, count, density, awkward=True)
    cuts = sorted(min(cut, count) for cut in cuts)
    fast = walked(DTYPES[name], old, new, cuts)
    with kernels.numpy_only():
        slow = walked(DTYPES[name], old, new, cuts)
    for one, other in zip(fast, slow, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_both_loops_agree_across_the_numpy_loops_pieces(monkeypatch):
    monkeypatch.setattr(kernels, "PIECE_ELEMENTS", 1000)
    old, new = states(1, 12_345, 0.03)
    fast = walked(DTYPES["bf16"], old, new, [4000, 4001])
    with kernels.numpy_only():
        slow = walked(DTYPES["bf16"], old, new, [4000, 4001])
    assert all(np.array_equal(one, other) for one, other in zip(fast, slow, strict=True))


@pytest.mark.parametrize("numpy_only", [False, True])
@pytest.mark.parametrize(
    ("coded", "changed", "elements"),
    [([1, 255], 1, 1000), ([1], 2, 1000), ([1, 1], 1, 1000), ([9], 1, 9), ([255, 5], 1, 260)],
)
def test_gaps_that_do_not_fit_are_refused(numpy_only, coded, changed, elements):
    entries = np.array(coded, dtype=np.uint8)
    if numpy_only:
        with kernels.numpy_only():
            assert kernels.take_gaps(entries, 255, changed, elements) is None
    else:
        assert kernels.take_gaps(entries, 255, changed, elements) is None


def test_ranks_that_lead_beyond_the_block_leave_changes_over():
    gaps, values = np.array([5, 2**32 - 1], dtype=np.uint32), np.array([1, 1], dtype=np.uint16)
    changes = np.array([2, *[0] * 15])
    for compiled in (True, False):
        target = np.zeros(100, dtype=np.uint16)
        ranks = kernels.first_ranks(1, changes, gaps)
        if compiled:
            kernels.take_ranks(DTYPES["bf16"], target, ranks, gaps, values)
        else:
            with kernels.numpy_only():
                kernels.take_ranks(DTYPES["bf16"], target, ranks, gaps, values)
        assert np.flatnonzero(target).tolist() == [5]
        assert ranks.at[0] == 1


def test_elements_that_are_not_aligned_take_the_numpy_loop():
    memory = np.zeros(2001, dtype=np.uint8)
    old = memory[1:].view("<u2")
    assert not old.flags.aligned
    new = np.arange(1000, dtype="<u2") % 2
    found = kernels.find(DTYPES["i16"], old, new)
    assert found.where.tolist() == list(range(1, 1000, 2))


def test_the_compiled_loops_are_used_once_warmed_up_and_can_be_put_aside(monkeypatch):
    from echo2p2p.weights.compiled import find

    calls = []
    monkeypatch.setattr(
        "echo2p2p.weights.compiled.find", lambda *arguments: calls.append(1) or find(*arguments)
    )
    old, new = states(1, 100, 0.5)
    with kernels.numpy_only():
        slow = kernels.find(DTYPES["bf16"], old, new)
    assert not calls
    fast = kernels.find(DTYPES["bf16"], old, new)
    assert calls
    assert np.array_equal(slow.where, fast.where)
