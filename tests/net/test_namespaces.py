"""The broadcast over real sockets and shaped links, seen by the kernel's counters."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echo2p2p.testing.processes import processes_with
from scenarios import namespaces

PEERS = 4
PAYLOAD_MB = 0.6
COMMAND = (sys.executable, "-P", "-m", "scenarios", "bench", "broadcast", "--json")
WHY = namespaces.why_impossible()
DISTANT = WHY or namespaces.why_no_packets_held()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY is not None, reason=str(WHY))]


def outside():
    """Return what of a network can be seen from outside of the test-bed."""
    names = sorted(path.name for path in Path("/sys/class/net").iterdir())
    return names, Path("/run/netns").exists() and sorted(Path("/run/netns").iterdir())


@pytest.mark.parametrize("links", ["homogeneous", "nat"])
def test_a_payload_leaves_the_source_about_once_by_the_kernels_account(links):
    words = ("--peers", str(PEERS), "--payload-mb", str(PAYLOAD_MB), "--links", links)
    done = subprocess.run(
        [*COMMAND, *words, "--systems", "one-to-many", "echo2p2p"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    unicast, ours = json.loads(done.stdout)
    payload_bytes = PAYLOAD_MB * 1e6
    assert [unicast["system"], ours["system"]] == ["one-to-many", "echo2p2p"]
    assert unicast["source_copies"] == pytest.approx(PEERS, rel=0.05)
    assert ours["source_copies"] < 1.5
    assert ours["duplicate_share"] < 0.2
    assert min(ours["down_bytes"][1:]) > payload_bytes
    relayed = sum(ours["up_bytes"][1:])
    assert relayed > (PEERS - 1.5) * payload_bytes
    assert unicast["bound_s"] == ours["bound_s"]
    assert ours["last_s"] > 0.9 * ours["bound_s"]  # less: the lines are not what they should be
    assert unicast["last_s"] > 0.9 * PEERS * ours["bound_s"]


@pytest.mark.parametrize(
    ("fault", "recovers"),
    [
        ("kill", False),
        ("cut", False),
        ("freeze", False),
        ("throttle", False),
        ("partition", True),
        ("source-restart", True),
        ("lie:corrupt", False),
    ],
)
def test_a_fault_in_the_middle_leaves_everybody_else_whole(fault, recovers):
    """The command fails if a peer that was not hit, or that recovered, never has the payload."""
    words = ("--peers", "5", "--payload-mb", "2", "--fault", fault)
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    without, hit = json.loads(done.stdout)
    assert [without["fault"], hit["fault"]] == ["", fault]
    assert hit["times_faultless"] == pytest.approx(hit["last_s"] / without["last_s"], rel=0.01)
    assert (hit["hit_last_s"] is not None) == (fault == "partition")
    assert without["tls"] == hit["tls"] == (not fault.startswith("lie:"))
    assert recovers or sum(count > 2e6 for count in hit["down_bytes"][1:]) >= 4
    assert hit["source_copies"] < 3


@pytest.mark.skipif(DISTANT is not None, reason=str(DISTANT))
def test_machines_can_be_far_from_each_other_and_their_connections_be_reset():
    words = ("--peers", "3", "--payload-mb", "1.5", "--rtt-ms", "150", "--fault", "flap")
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    without, flapping = json.loads(done.stdout)
    # One way for the source's chunks, another for a relay's.
    assert without["last_s"] > without["bound_s"] + 0.15
    assert flapping["hit_last_s"] is not None


def test_kill_9_leaves_nothing_behind():
    before = outside()
    seed = f"9{os.getpid()}{time.monotonic_ns()}"
    words = ("--peers", "4", "--payload-mb", "40", "--seed", seed, "--systems", "one-to-many")
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while len(processes_with(seed)) < PEERS + 4:  # this, unshare, the first inside, the source
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, "the test-bed did not come up"
            time.sleep(0.05)
        assert outside() == before
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 20
    while processes_with(seed):
        assert time.monotonic() < deadline, "processes outlived the test-bed"
        time.sleep(0.05)
    assert outside() == before
