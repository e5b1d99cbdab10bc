"""The short form of the nightly ``python -m echo2p2p.testing.fuzz_payloads``."""

import pytest

from echo2p2p.testing import fuzz_payloads
from echo2p2p.weights import kernels


@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_payloads_are_taken_or_refused_and_nothing_else(seed):
    if seed == 2:
        with kernels.numpy_only():
            tally = fuzz_payloads.fuzz(1000, seed)
    else:
        kernels.warm_up()
        tally = fuzz_payloads.fuzz(1000, seed)
    assert len(tally.kinds) == 8
    assert min(tally.taken, tally.refused) > 100


def test_a_broken_reader_would_be_found(monkeypatch):
    def careless(layout, payload, target, *, source):
        target[-1] ^= 1
        memoryview(target.obj)[-1] = 0

    monkeypatch.setattr(fuzz_payloads, "apply_delta", careless)
    with pytest.raises(AssertionError, match="of seed 1"):
        fuzz_payloads.fuzz(100, 1)
