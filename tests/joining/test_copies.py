"""One identity, one live peer: a copy is refused, a restart waits and gets in."""

import shutil

import pytest

from echo2p2p.testing.live import start_coordinator, start_peer, wait_steps
from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def test_a_second_live_copy_is_refused_and_the_first_lives_on(tmp_path):
    with Processes(tmp_path) as processes:
        run = start_coordinator(processes)
        first = start_peer(processes, run.url, run.token, name="first")
        processes.wait(lambda: bool(first.events("version.loaded")), 20, "the first at work")
        (tmp_path / "second").mkdir()
        shutil.copy(tmp_path / "first" / "identity", tmp_path / "second" / "identity")
        second = start_peer(processes, run.url, run.token, name="second")
        assert second.ended() == 1, second.text()
        assert second.errors() == [
            "error: identity_duplicate: another copy of this identity is alive; give each peer a "
            "folder of its own"
        ]
        wait_steps(processes, run, 4, first)
        assert len(first.events("peer.joined")) == 1
        assert not first.events("membership.lost")


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_restart_of_the_same_peer_gets_in(tmp_path, how):
    with Processes(tmp_path) as processes:
        # The next one is up before the term is over, on a busy machine too.
        run = start_coordinator(processes, "--membership.term_s", "10")
        first = start_peer(processes, run.url, run.token)
        processes.wait(lambda: bool(first.events("version.loaded")), 20, "the first at work")
        if how == "killed":
            first.process.kill()
        else:
            first.process.terminate()
        first.process.wait()
        again = start_peer(processes, run.url, run.token)
        processes.wait(lambda: len(again.events("peer.joined")) == 2, 30, "the restart getting in")
        incarnations = [entry["incarnation"] for entry in again.events("peer.joined")]
        assert incarnations == [1, 2]
        waited = again.events("join.waits")
        assert bool(waited) == (how == "killed"), "a peer that has said goodbye leaves no term"
        if waited:
            assert "last term still runs; it ends soon if the copy is dead" in waited[0]["detail"]
        wait_steps(processes, run, 4, again)
