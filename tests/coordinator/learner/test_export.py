"""Publish copies, and the changes between them: torch's way on the CPU, byte for byte."""

import numpy as np
import pytest
import torch

from coordinator.learner.export import Exporter
from echo2p2p.net.memory import FileMemory
from echo2p2p.weights import found as found_module
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.found import FoundElsewhere, room_for
from echo2p2p.weights.layout import plan_layout

LAYOUT = plan_layout(
    [
        ("embedding", "bf16", (300, 7), ()),
        ("steps", "i64", (3,), ()),
        ("norm", "bf16", (13,), ()),
        ("mask", "i8", (5,), ()),
        ("head", "bf16", (101, 3), ()),
    ]
)


class Model:
    """Tensors that move, and the memory that their copies go to."""

    def __init__(self, folder, device="cpu", **settings):
        torch.manual_seed(1)
        self.tensors = {
            "embedding": torch.randn(300, 7, device=device) * 0.02,
            "steps": torch.arange(3, device=device),
            "norm": torch.ones(13, device=device),
            "mask": torch.zeros(5, dtype=torch.int8, device=device),
            "head": torch.randn(3, 101, device=device).T * 0.02,  # not contiguous
        }
        memory = FileMemory(folder)
        self.state = memory.allocate("export", LAYOUT.total_bytes)
        self.found = memory.allocate("found", room_for(LAYOUT))
        self.exporter = Exporter(LAYOUT, self.tensors, **settings)

    def step(self, size=1e-6):
        for tensor in self.tensors.values():
            if tensor.is_floating_point():
                tensor += torch.randn_like(tensor) * size
        self.tensors["steps"] += 1

    def export(self, *, listed=True):
        """Return the copy and what was found, if anything."""
        size = self.exporter.write(self.state.path, self.found.path if listed else "")
        copy = bytes(self.state.view)
        if size is None:
            return copy, None
        return copy, FoundElsewhere(LAYOUT, np.frombuffer(self.found.view[:size], np.uint8))


def check_chain(model):
    last, found = model.export()
    assert found is None, "there is nothing yet that it could differ from"
    for size in (1e-6, 0.0, 3e-7):
        model.step(size)
        copy, found = model.export()
        assert found is not None
        assert copy != last
        assert encode_delta(LAYOUT, last, copy, find=found) == encode_delta(LAYOUT, last, copy)
        last = copy


def test_what_torch_finds_between_two_copies_gives_the_encoders_own_bytes(tmp_path):
    check_chain(Model(tmp_path, has_room=lambda: True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_so_does_what_a_gpu_finds(tmp_path):
    check_chain(Model(tmp_path, "cuda", has_room=lambda: True))


def test_copies_are_the_same_whether_changes_are_looked_for_or_not(tmp_path):
    models = [
        Model(tmp_path / "a", has_room=lambda: False),
        Model(tmp_path / "b", has_room=lambda: True),
    ]
    for _ in range(3):
        (plain, nothing), (copy, _) = (model.export() for model in models)
        assert nothing is None
        assert plain == copy
        for model in models:
            torch.manual_seed(2)
            model.step()


def test_what_changed_is_always_since_the_last_copy_or_not_told_at_all(tmp_path):
    model = Model(tmp_path, has_room=lambda: True)
    model.export()
    model.step(1.0)  # everything changes: no room for the list
    last, found = model.export()
    assert found is None
    model.step()
    copy, found = model.export()
    assert found is not None
    assert encode_delta(LAYOUT, last, copy, find=found) == encode_delta(LAYOUT, last, copy)
    model.step()
    model.export(listed=False)  # nobody wants a list of this one, so there is none of the next
    model.step()
    assert model.export()[1] is None


def test_while_there_is_no_room_nothing_is_kept_to_compare_with(tmp_path):
    answers = iter([True, True, False, True, True])
    model = Model(tmp_path, has_room=lambda: next(answers))
    listed = []
    for _ in range(5):
        listed.append(model.export()[1] is not None)
        model.step()
    assert listed == [False, True, False, False, True]


def test_a_device_without_room_for_another_copy_leaves_the_search_to_the_encoder(
    tmp_path, monkeypatch
):
    def full(*_):
        raise torch.cuda.OutOfMemoryError

    model = Model(tmp_path / "a", has_room=lambda: True)
    plain = Model(tmp_path / "b", has_room=lambda: False)
    model.export()
    monkeypatch.setattr("coordinator.learner.export.TorchFinder", full)
    for each in (model, plain):
        torch.manual_seed(2)
        each.step()
    assert model.export() == plain.export()
    monkeypatch.undo()
    assert model.export()[1] is None, "and does not try again"


def test_windows_of_a_few_elements_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(found_module, "FIND_ELEMENTS", 64)
    monkeypatch.setattr("echo2p2p.weights.cuts.FIND_ELEMENTS", 64)
    check_chain(Model(tmp_path, has_room=lambda: True))
