import random

import pytest
import torch

from coordinator.learner.changes import TorchFinder
from echo2p2p.testing.states import changed_state, random_state, trained_step
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.layout import DTYPES, plan_layout


def flat(state):
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_torch_finds_the_same_changes_so_the_bytes_are_the_same(density, seed):
    rng = random.Random(seed)
    names = [*DTYPES, *DTYPES]
    layout = plan_layout(
        [(f"{number}", name, (rng.randrange(300),), ()) for number, name in enumerate(names)]
    )
    base = random_state(layout, rng)
    result = changed_state(layout, base, density, rng)
    find = TorchFinder(layout, flat(base), flat(result))
    assert encode_delta(layout, base, result, find=find) == encode_delta(layout, base, result)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_finds_the_same_changes():
    layout = plan_layout([("w", "bf16", (1 << 20,), ())])
    base, result = trained_step(1 << 20, deviation=0.02, step=1e-6, seed=1)
    find = TorchFinder(layout, flat(base).cuda(), flat(result).cuda())
    assert encode_delta(layout, base, result, find=find) == encode_delta(layout, base, result)


def test_a_state_of_another_size_is_refused():
    layout = plan_layout([("w", "bf16", (10,), ())])
    with pytest.raises(ValueError, match="19"):
        TorchFinder(layout, flat(bytes(20)), flat(bytes(19)))
