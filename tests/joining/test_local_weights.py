"""A volunteer who has the model's folder does not download it; with another it is fetched."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import trio

from coordinator.config import Settings
from coordinator.learner.base import LearnerSetup
from echo2p2p.errors import ConfigError
from echo2p2p.testing.live import Live, start_coordinator, start_peer
from echo2p2p.testing.processes import Processes
from peer.config import PeerSettings
from peer.machine import model_reader
from scenarios.fake_learner import FakeLearner

BALLAST = 200_000
SEED = Settings().run.seed


def write_first_version(folder: Path) -> None:
    """Write the weights that the fake learner starts from as a folder of safetensors."""

    async def start():
        learner = FakeLearner(ballast=BALLAST)
        setup = LearnerSetup(model_dir=folder, task="sort_digits", seed=SEED)
        ready = await learner.start(setup, lambda *_: None)
        return ready.layout, learner._bits.tobytes()

    layout, bits = trio.run(start)
    header = {
        spec.name: {
            "dtype": "BF16",
            "shape": list(spec.shape),
            "data_offsets": [spec.offset, spec.offset + 2 * int(np.prod(spec.shape))],
        }
        for spec in layout.tensors
    }
    head = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bits)


def downloaded(peer: Live) -> list[dict[str, object]]:
    """Return the anchors that a peer has applied."""
    return [event for event in peer.events("version.applied") if event["anchor"]]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_right_folder_is_used_and_a_wrong_one_costs_a_line(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    write_first_version(good)
    write_first_version(bad)
    file = bad / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with Processes(tmp_path) as processes:
        run = start_coordinator(processes, "--fake-ballast", str(BALLAST))
        peers = [
            start_peer(processes, run.url, run.token, "--model-dir", name, name=f"with-{name}")
            for name in ("good", "bad", "run")
        ]
        for peer in peers:
            processes.wait(
                lambda peer=peer: len(peer.events("version.loaded")) >= 2, 40, "two versions"
            )
        used, *others = peers
        assert [event["version"] for event in used.events("local_weights.used")] == [0]
        assert downloaded(used) == []
        for other in others:
            assert len(other.events("local_weights.rejected")) == 1
            assert "they are downloaded" in other.text()
            assert len(downloaded(other)) == 1
        for peer in peers:
            assert peer.events("version.refused") == peer.events("engine.lost") == []


def test_a_folder_that_is_none_is_refused_before_anything_else(tmp_path):
    missing = PeerSettings.model_validate({"model_dir": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="is no folder") as caught:
        model_reader(missing)
    assert caught.value.path == "model_dir"
    assert model_reader(PeerSettings()) is None
    assert model_reader(PeerSettings.model_validate({"model-dir": str(tmp_path)})) is not None
