"""A peer that is killed at any point of an apply starts again into a whole version."""

import random
import time
from pathlib import Path

import pytest

from echo2p2p.testing.live import Live, start_coordinator, start_peer
from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BALLAST = 12_000_000
"""Elements: an apply takes most of a second in numpy's loops."""
DELAYS_S = (0.0, 0.08, 0.2, 0.4, 0.6)


def wait_more(peer: Live, name: str) -> None:
    """Wait until there is one more event of this name, and see it at once."""
    before, end_s = len(peer.events(name)), time.monotonic() + 60
    while len(peer.events(name)) == before:
        assert peer.process.poll() is None, peer.text()[-2000:]
        assert time.monotonic() < end_s, f"no {name}: {peer.text()[-2000:]}"
        time.sleep(0.005)


def spoil(file: Path, rng: random.Random, *, places: int) -> None:
    """Write garbage into a file, before its last hundredth."""
    size = file.stat().st_size
    with file.open("r+b") as opened:
        for _ in range(places):
            opened.seek(rng.randrange(size - size // 100))
            opened.write(rng.randbytes(100))


def test_a_peer_killed_at_any_point_of_an_apply_restarts_into_a_whole_version(tmp_path):
    rng = random.Random(1)
    in_the_middle = 0
    with Processes(tmp_path) as processes:
        run = start_coordinator(processes, "--fake-ballast", str(BALLAST), "--fake-step-s", "1")
        for delay_s in DELAYS_S:
            peer = start_peer(processes, run.url, run.token)
            wait_more(peer, "version.loaded")  # an engine has proved it by digest
            wait_more(peer, "payload.completed")
            applied = len(peer.events("version.applied"))
            time.sleep(delay_s)
            peer.process.kill()
            peer.process.wait()
            in_the_middle += len(peer.events("version.applied")) == applied
            left = list((tmp_path / "peer" / "memory").iterdir())
            assert "weights" in {file.name for file in left}
            for file in left:
                kept = file.name.startswith("kept-")
                assert kept or file.name == "weights"
                spoil(file, rng, places=3 if kept else 100)
        peer = start_peer(processes, run.url, run.token)
        wait_more(peer, "version.loaded")
        wait_more(peer, "version.loaded")
        for bad in ("version.refused", "memory.corrupt", "engine.lost", "chunk.rejected"):
            assert peer.events(bad) == [], "every life began with whole weights"
        taken = [(event["chunks"], event["of"]) for event in peer.events("payload.taken_up")]
        assert any(0 < chunks < of for chunks, of in taken), "what was spoilt was fetched again"
    assert in_the_middle >= 2
