"""A real checkpoint on a disk that takes files only up to a length."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.learner.base import LearnerSetup
from coordinator.model import TINY_QWEN3, prepare_model
from echo2p2p.errors import StoreError

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def files_up_to(length: int) -> Iterator[None]:
    """Let this process write no file beyond ``length`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory):
    from coordinator.learner.torch_learner import TorchLearner

    folder = tmp_path_factory.mktemp("model")
    prepare_model(TINY_QWEN3, folder)
    return TorchLearner(LearnerSetup(model_dir=folder, task="sort_digits"), lambda *_: None)


@pytest.mark.parametrize("length", [0, 100, 3000, 100_000, 2_000_000])
def test_a_checkpoint_that_does_not_fit_is_named_in_one_line_and_leaves_nothing(
    learner, tmp_path: Path, length: int
) -> None:
    target = tmp_path / "step-000001"
    with files_up_to(length), pytest.raises(StoreError) as caught:
        learner.save(target)
    assert str(caught.value).startswith(f"cannot write the checkpoint {target}: ")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    learner.save(target)
    assert (target / "position.json").is_file()
