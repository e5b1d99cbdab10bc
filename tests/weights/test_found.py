"""Changes found by one process and used by another: the same changes, or none."""

import random

import numpy as np
import pytest

from echo2p2p.errors import IntegrityError
from echo2p2p.testing.states import changed_state, random_state
from echo2p2p.weights import cuts, found
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.found import FoundElsewhere, room_for, write_found
from echo2p2p.weights.kernels import find_in
from echo2p2p.weights.layout import DTYPES, flat_bytes, plan_layout, segments_of


def finder(layout, base, result):
    sides = [flat_bytes(layout, state) for state in (base, result)]

    def find(sequence, first, count):
        return find_in(
            DTYPES[sequence.dtype], *(segments_of(flat, sequence, first, count) for flat in sides)
        )

    return find


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch):
    monkeypatch.setattr(cuts, "FIND_ELEMENTS", 100)
    monkeypatch.setattr(found, "FIND_ELEMENTS", 100)


def states(density, seed=0):
    rng = random.Random(seed)
    names = [*DTYPES, *DTYPES]
    layout = plan_layout(
        [(f"{number}", name, (rng.randrange(600),), ()) for number, name in enumerate(names)]
    )
    base = random_state(layout, rng)
    return layout, base, changed_state(layout, base, density, rng)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_handed_over_gives_the_same_delta(density, seed, threads):
    layout, base, result = states(density, seed)
    memory = np.full(8 * layout.total_bytes + 10_000, 0xFF, np.uint8)
    size = write_found(layout, finder(layout, base, result), memory)
    find = FoundElsewhere(layout, memory[:size])
    handed = encode_delta(layout, base, result, find=find, threads=threads)
    assert handed == encode_delta(layout, base, result)


def test_more_than_there_is_room_for_is_not_handed_over():
    layout, base, result = states(1.0)
    memory = np.zeros(room_for(layout), np.uint8)
    assert write_found(layout, finder(layout, base, result), memory) is None
    layout, base, result = states(0.02)
    assert write_found(layout, finder(layout, base, result), memory) is not None


def test_an_empty_layout_has_no_changes():
    layout = plan_layout([])
    memory = np.zeros(room_for(layout), np.uint8)
    size = write_found(layout, finder(layout, b"", b""), memory)
    assert size == 0
    find = FoundElsewhere(layout, memory[:size])
    assert encode_delta(layout, b"", b"", find=find) == encode_delta(layout, b"", b"")


@pytest.mark.parametrize("harm", ["cut", "longer", "no table", "count"])
def test_a_list_of_another_length_is_refused(harm):
    layout, base, result = states(0.1)
    memory = np.zeros(8 * layout.total_bytes + 10_000, np.uint8)
    size = write_found(layout, finder(layout, base, result), memory)
    match harm:
        case "cut":
            size -= 1
        case "longer":
            size += 1
        case "no table":
            size = 8
        case "count":
            memory[0] += 1
    with pytest.raises(IntegrityError, match="changes in"):
        FoundElsewhere(layout, memory[:size])
