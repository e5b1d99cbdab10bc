"""Real processes on real file systems that are full, read-only, limited or damaged.

A small memory file system stands for the disk; where a test may not mount one it is skipped. What
runs without is the limit of a file's size, which any process may set for its own children.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2p2p.net.store import PAGE_BYTES
from echo2p2p.testing.live import (
    Live,
    LiveCoordinator,
    begin_coordinator,
    start_coordinator,
    start_peer,
    wait_steps,
)
from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

KIB = 1024


class Disk:
    """A mounted memory file system."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self._filler = at / "filler"

    def folder(self, name: str, beside: Path) -> None:
        """Make a folder on the disk that a process finds beside its other files."""
        (self.at / name).mkdir()
        (beside / name).symlink_to(self.at / name)

    def fill(self) -> None:
        """Leave no byte."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)

    def set_writable(self, writable: bool) -> None:
        option = "remount,rw" if writable else "remount,ro"
        subprocess.run(["mount", "-o", option, str(self.at)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    at = tmp_path / "disk"
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(at)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield Disk(at)
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


def one_line(ended: Live, code: int, *words: str) -> str:
    """Return the only line in which a process says why it has ended."""
    assert ended.ended() == code, ended.text()[-2000:]
    assert "Traceback" not in ended.text(), ended.text()[-3000:]
    (line,) = ended.errors()[-1:]
    for word in words:
        assert word in line
    return line


def goes_on(processes: Processes, port: int, *arguments: str) -> LiveCoordinator:
    """Start the run's next life and wait until it answers; its log has the earlier lives too."""
    run = start_coordinator(processes, "--server.port", str(port), *arguments)

    def answers() -> bool:
        assert run.process.poll() is None, run.text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{run.url}/healthz"):
            return True
        return False

    processes.wait(answers, 20, "the coordinator answering")
    return run


def stop_well(run: LiveCoordinator) -> None:
    """Tell a run to stop; its books must balance."""
    request = urllib.request.Request(
        f"{run.url}/control/stop",
        method="POST",
        headers={"authorization": f"Bearer {run.admin_token}"},
    )
    with urllib.request.urlopen(request, timeout=10):
        pass
    assert run.ended() == 0, run.text()[-2000:]
    counts = json.loads((run.folder / "summary.json").read_text())["trajectories"]
    assert (counts["balances"], counts["recount_agrees"]) == (True, True)


def test_a_full_disk_ends_the_coordinator_in_one_line_and_with_room_the_run_goes_on(
    processes: Processes, disk: Disk
) -> None:
    disk.folder("run", processes.folder)
    run = start_coordinator(processes, "--learner.checkpoint_every_steps", "5")
    peer = start_peer(processes, run.url, run.token)
    wait_steps(processes, run, 4, peer)
    with contextlib.suppress(TimeoutError):
        while True:  # what is deleted meanwhile makes room again
            disk.fill()
            run.ended(0.2)
            break
    one_line(run, 1, "the disk is full: free some space")
    begin = begin_coordinator(processes, "--server.port", str(run.port))
    one_line(begin, 1, "the disk is full: free some space")
    disk.make_room()
    again = goes_on(processes, run.port)
    wait_steps(processes, again, 4, peer)
    stop_well(again)
    assert peer.ended() == 0


@pytest.mark.parametrize("limit_kib", [4, 256])
def test_a_limit_on_files_ends_the_coordinator_in_one_line_and_without_it_the_run_goes_on(
    processes: Processes, limit_kib: int
) -> None:
    run = start_coordinator(processes, "--learner.checkpoint_every_steps", "3")
    peer = start_peer(processes, run.url, run.token)
    wait_steps(processes, run, 2, peer)
    limit = (limit_kib * KIB, limit_kib * KIB)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, limit)
    line = one_line(run, 1)
    assert "the disk failed: free some space" in line or "may not grow so long" in line
    again = goes_on(processes, run.port)
    wait_steps(processes, again, 4, peer)
    stop_well(again)
    assert peer.ended() == 0


def test_a_peer_on_a_full_disk_says_so_and_leaves_no_half_identity(
    processes: Processes, disk: Disk
) -> None:
    run = start_coordinator(processes)
    disk.folder("peer", processes.folder)
    disk.fill()
    one_line(start_peer(processes, run.url, run.token), 1, "the disk is full: free some space")
    assert list((disk.at / "peer").glob("identity*")) == []
    disk.make_room()
    peer = start_peer(processes, run.url, run.token)
    wait_steps(processes, run, 2, peer)
    stop_well(run)
    assert peer.ended() == 0


def test_a_peer_without_room_for_the_weights_says_so(processes: Processes, disk: Disk) -> None:
    run = start_coordinator(processes)
    disk.folder("peer", processes.folder)
    for name in ("memory", "outbox"):
        (disk.at / "peer" / name).mkdir()
    (disk.at / "peer" / "identity").write_bytes(bytes(range(32)))
    (disk.at / "peer" / "events.jsonl").write_bytes(b"")
    disk.fill()
    line = one_line(
        start_peer(processes, run.url, run.token), 1, "the disk is full: free some space"
    )
    assert "MB of weights in" in line


def test_a_folder_that_became_read_only_is_named(processes: Processes, disk: Disk) -> None:
    disk.folder("run", processes.folder)
    disk.folder("peer", processes.folder)
    run = start_coordinator(processes)
    peer = start_peer(processes, run.url, run.token)
    wait_steps(processes, run, 2, peer)
    stop_well(run)
    assert peer.ended() == 0
    disk.set_writable(False)
    one_line(begin_coordinator(processes), 2, "run.folder", "read-only: choose another folder")
    one_line(start_peer(processes, run.url, run.token), 2, "folder", "read-only")
    disk.set_writable(True)
    stop_well(goes_on(processes, run.port))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_one_may_not_write_is_named(processes: Processes) -> None:
    (processes.folder / "run").mkdir(mode=0o555)
    one_line(begin_coordinator(processes), 2, "run.folder", "give this user the right")


def test_a_damaged_database_ends_the_start_in_one_line(processes: Processes) -> None:
    run = start_coordinator(processes)
    peer = start_peer(processes, run.url, run.token)
    wait_steps(processes, run, 3, peer)
    stop_well(run)
    database = run.folder / "run.sqlite"
    content = bytearray(database.read_bytes())
    content[PAGE_BYTES * 3 : PAGE_BYTES * 3 + 100] = os.urandom(100)
    database.write_bytes(content)
    one_line(begin_coordinator(processes), 1, "run.sqlite is damaged", "put a copy")
    database.write_bytes(b"SQLite format 2\0" + bytes(5000))
    one_line(begin_coordinator(processes), 1, "not a database")


def test_a_damaged_payload_is_never_served_and_the_peers_go_on(processes: Processes) -> None:
    run = start_coordinator(processes)
    peer = start_peer(processes, run.url, run.token)
    wait_steps(processes, run, 3, peer)
    run.process.send_signal(signal.SIGKILL)
    run.ended()
    for blob in (run.folder / "payloads").iterdir():
        content = bytearray(blob.read_bytes())
        content[len(content) // 2] ^= 1
        blob.write_bytes(content)
    again = goes_on(processes, run.port)
    wait_steps(processes, again, 3, peer)
    assert again.events("payload.corrupt")
    (lost,) = again.events("chain.lost")
    anchors = [entry["version"] for entry in peer.events("version.applied") if entry["anchor"]]
    assert anchors == [anchors[0], lost["version"] + 1]
    assert peer.events("version.refused") == []
    stop_well(again)
    assert peer.ended() == 0


def test_payloads_cut_under_a_running_coordinator_end_it_in_one_line_and_the_next_mends_it(
    processes: Processes,
) -> None:
    run = start_coordinator(processes, "--fake-step-s", "2")  # no new anchor meanwhile
    peer = start_peer(processes, run.url, run.token)
    wait_steps(processes, run, 1, peer)
    peer.process.terminate()  # or it would give the weights to the next
    peer.ended()
    for blob in (run.folder / "payloads").iterdir():
        os.truncate(blob, 0)
    patient = ("--stall_timeout_s", "1000")  # though what it was told of is nowhere any more
    late = start_peer(processes, run.url, run.token, *patient, name="late")
    one_line(run, 1, "payload", "it was cut short: start again")
    assert (run.folder / "reward.png").stat().st_size > 1000, "how it went is drawn all the same"
    again = goes_on(processes, run.port)
    wait_steps(processes, again, 3, late)
    assert again.events("payload.corrupt")
    stop_well(again)
    assert late.ended() == 0


def test_while_the_coordinator_is_dead_finished_work_is_on_disk_and_is_sent_later(
    processes: Processes,
) -> None:
    run = start_coordinator(processes, "--membership.term_s", "20")
    peer = start_peer(processes, run.url, run.token, "--fake-token-s", "0.3")
    outbox = peer.folder / "outbox"
    issued = len(run.events("leases.issued"))  # an answer takes over a second
    processes.wait(lambda: len(run.events("leases.issued")) > issued, 20, "work being taken")
    run.process.send_signal(signal.SIGKILL)
    run.ended()
    processes.wait(lambda: any(outbox.glob("upload-*")), 20, "finished work on disk")
    kept = {path.name for path in outbox.glob("upload-*")}
    again = goes_on(processes, run.port, "--membership.term_s", "20")
    processes.wait(lambda: not any(outbox.iterdir()), 20, "the work being sent")
    wait_steps(processes, again, 2, peer)
    assert kept
    assert all(name.startswith("upload-1-") for name in kept), "the same incarnation sends it"
    assert peer.events("work.dropped") == []
    assert len(peer.events("peer.joined")) == 1
    stop_well(again)
    assert peer.ended() == 0
    counts = json.loads((again.folder / "summary.json").read_text())["trajectories"]
    assert counts["rejected"].keys() <= {"dead_generation", "stale", "unused", "aborted"}
