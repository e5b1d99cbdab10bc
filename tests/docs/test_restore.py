"""The lab page's backup and restore, played through as the page says; the run goes on after."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from echo2p2p.net.program import INTERRUPTED
from echo2p2p.testing.live import LiveCoordinator, start_coordinator, start_peer, wait_steps
from echo2p2p.testing.pages import commands
from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LAB = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
BACKUP = LAB.partition("\n## Backup\n")[2].partition("\n## ")[0]
EXTRACT = next(place for place, line in enumerate(commands(BACKUP)) if "--extract" in line)
RESTORE = next(
    place for place in range(EXTRACT, -1, -1) if "systemctl stop" in commands(BACKUP)[place]
)
SETTINGS = ("--learner.checkpoint_every_steps", "3", "--membership.term_s", "2")


class Lab:
    """A run whose folder is called as on the page, and whoever serves it."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.run = start_coordinator(processes, *SETTINGS, name="first")
        self.port = self.run.port

    def follow(self, lines: list[str]) -> None:
        """Do what the page says; ``systemctl`` is us."""
        for line in lines:
            match line.removeprefix("sudo ").split():
                case ["systemctl", "stop", "echo2"]:
                    self.run.process.terminate()
                    assert self.run.ended() in {INTERRUPTED, -9}, self.run.text()[-2000:]
                case ["systemctl", "start", "echo2"]:
                    self.start()
                case words:
                    there = str(self.processes.folder)
                    local = [re.sub("^/var/(lib/echo2|backups)", there, word) for word in words]
                    subprocess.run(local, check=True, cwd=there)

    def start(self, *arguments: str) -> LiveCoordinator:
        words = ("--server.port", str(self.port), *SETTINGS, *arguments)
        self.run = start_coordinator(self.processes, *words, name="first")
        return self.run

    def peer(self, name: str):
        return start_peer(self.processes, self.run.url, self.run.token, name=name)


def test_a_run_goes_on_from_its_backup_with_its_peers_and_a_ledger_that_balances(tmp_path) -> None:
    with Processes(tmp_path) as processes:
        lab = Lab(processes)
        peers = [lab.peer(name) for name in ("ann", "bob")]
        wait_steps(processes, lab.run, 10, *peers)
        lab.follow(commands(BACKUP)[:RESTORE])
        wait_steps(processes, lab.run, 10, *peers)  # they have versions of which it knows nothing
        lab.run.process.kill()
        lab.run.ended()
        (tmp_path / "first" / "run.sqlite").write_bytes(b"the disk is gone")
        identities = [(peer.folder / "identity").read_bytes() for peer in peers]
        token = lab.run.token
        lab.follow(commands(BACKUP)[RESTORE:])
        assert lab.run.token == token, "no volunteer needs a new one"
        for peer in peers:
            peer.process.terminate()
            peer.ended()
        peers = [lab.peer(name) for name in ("ann", "bob")]
        wait_steps(processes, lab.run, 10, *peers)
        assert [(peer.folder / "identity").read_bytes() for peer in peers] == identities
        metrics = (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in metrics]
        goal = max(steps) + 6
        lab.run.process.terminate()
        lab.run.ended()
        run = lab.start("--run.steps", str(goal))
        assert run.ended(60) == 0, run.text()[-3000:]
        assert [peer.ended() for peer in peers] == [0, 0]
        summary = json.loads((tmp_path / "first" / "summary.json").read_text())
        counts = summary["trajectories"]
        assert (counts["balances"], counts["recount_agrees"]) == (True, True)
        assert counts["trained"] == goal * 4, "each step of the history once"
        assert {peer["name"] for peer in summary["peers"]} == {"ann", "bob"}
        for peer in peers:
            assert peer.events("version.refused") == []
