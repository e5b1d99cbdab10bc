"""Ten times kill -9 of a coordinator under load; and that the audit would have seen a loss."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from coordinator.schema import MIGRATIONS
from scenarios.record import Record
from scenarios.torture import Torture
from scenarios.torture_audit import audit

KILLS = 10


@pytest.mark.slow
async def test_ten_kills_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    result = await Torture(tmp_path, kills=KILLS, seed=3).run()
    assert result.problems == []
    assert (result.lost, result.trained_twice, result.unbalanced) == (0, 0, 0)
    assert result.lives == KILLS + 1
    assert result.early_kills > 0
    assert result.acknowledged_leases > KILLS, "there was work in most lives"
    assert result.trained > 0
    assert result.duplicates > 0


class Folder:
    """A run's folder with a database that a test has written."""

    def __init__(self, path: Path) -> None:
        self.path = path / "run"
        self.path.mkdir()
        self.scratch = path / "scratch"
        self.record = Record()
        with self.rows() as rows:
            for script in MIGRATIONS:
                rows.executescript(script)

    @contextlib.contextmanager
    def rows(self):
        with contextlib.closing(sqlite3.connect(self.path / "run.sqlite")) as connection:
            yield connection
            connection.commit()

    def lease(self, name: str, fate: str, step: int | None = None, reason: str | None = None):
        """Issue one lease of two samples, and let it come to ``fate``."""
        ways = {
            "in_flight": [("", "in_flight")],
            "queued": [("", "in_flight"), ("in_flight", "queued")],
            "trained": [("", "in_flight"), ("in_flight", "queued"), ("queued", "trained")],
            "rejected": [("", "in_flight"), ("in_flight", "rejected")],
        }
        with self.rows() as rows:
            row = (name, "p", 1, 0, 2, b"", fate, reason, step, None)
            rows.execute(
                "INSERT INTO leases (lease_id, peer_id, incarnation, seed, samples, lease, fate, "
                "reason, step, upload) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            for source, target in ways[fate]:
                why = (reason or "") if target == "rejected" else ""
                rows.execute(
                    "INSERT INTO ledger VALUES (?, ?, ?, 2) "
                    "ON CONFLICT DO UPDATE SET count = count + 2",
                    (source, target, why),
                )
            if step is not None:
                rows.execute("INSERT OR REPLACE INTO steps VALUES (?, x'')", (step,))

    def learner(self, *lines: dict[str, object]) -> None:
        """Write the learner's log."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self.path / "train.jsonl").write_text(text)

    def look(self):
        return audit(self.path, self.scratch, self.record, groups_per_step=1)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_sound_folder_has_no_findings(folder: Folder) -> None:
    for name, fate, step in (("a", "trained", 1), ("b", "trained", 2), ("c", "queued", None)):
        folder.lease(name, fate, step)
        folder.record.acknowledged[name] = 2
        folder.record.samples[f"{name}1"] = name
    folder.lease("d", "in_flight")
    folder.lease("e", "rejected", reason="dead_generation")
    folder.record.acknowledged["e"] = 2
    folder.lease("f", "rejected", reason="lease_expired")
    folder.record.refused["f"] = "lease_expired"
    folder.learner(
        {"start": 0},
        {"step": 1, "samples": ["a1"]},
        {"step": 2, "samples": ["c1"]},
        {"start": 1},
        {"step": 2, "samples": ["b1"]},
        {"step": 3, "samples": ["c1"]},
    )
    look = folder.look()
    assert look.findings.problems == []
    assert (look.steps, look.trained, look.queued) == (2, 4, 2)


@pytest.mark.parametrize(
    ("fate", "reason"), [(None, None), ("in_flight", None), ("rejected", "lease_expired")]
)
def test_an_acknowledged_lease_that_is_not_there_is_lost(
    folder: Folder, fate: str | None, reason: str | None
) -> None:
    if fate is not None:
        folder.lease("a", fate, reason=reason)
    folder.record.acknowledged["a"] = 2
    assert len(folder.look().findings.lost) == 1


def test_a_refused_lease_that_is_accepted_is_found(folder: Folder) -> None:
    folder.lease("a", "queued")
    folder.record.refused["a"] = "stale"
    assert "was refused" in folder.look().findings.other[0]


def test_a_sample_that_two_steps_have_consumed_is_found(folder: Folder) -> None:
    folder.lease("a", "trained", 1)
    folder.lease("b", "trained", 2)
    folder.record.samples |= {"a1": "a"}
    folder.learner({"step": 1, "samples": ["a1"]}, {"step": 2, "samples": ["a1"]})
    findings = folder.look().findings
    assert findings.twice == ["sample a1 was trained on 2 times"]
    assert "step 2 consumed a" in findings.other[0]


def test_a_step_without_a_batch_of_its_own_is_found(folder: Folder) -> None:
    folder.lease("a", "trained", 1)
    with folder.rows() as rows:
        rows.execute("INSERT INTO steps VALUES (2, x'')")
        rows.execute("INSERT INTO steps VALUES (4, x'')")
    findings = folder.look().findings
    assert findings.twice == [f"step {step} has 0 groups of its own" for step in (2, 4)]
    assert "gaps" in findings.other[0]


def test_a_ledger_that_does_not_balance_is_found(folder: Folder) -> None:
    folder.lease("a", "queued")
    with folder.rows() as rows:
        rows.execute("UPDATE ledger SET count = 3 WHERE target = 'queued'")
    assert len(folder.look().findings.unbalanced) == 1


def test_what_nobody_sent_and_half_a_line_at_the_end_are_told_apart(folder: Folder) -> None:
    folder.learner({"step": 1, "samples": ["x"]})
    with (folder.path / "train.jsonl").open("a") as file:
        file.write('{"step": 2, "samp')
    assert folder.look().findings.other == ["step 1 consumed a sample that nobody sent"]


def test_a_version_that_is_published_twice_differently_is_found(folder: Folder) -> None:
    class Header:
        version = 3
        result_digest = b"a"

    folder.record.shown(Header())
    folder.record.shown(Header())
    assert folder.record.problems == []
    Header.result_digest = b"b"
    folder.record.shown(Header())
    assert len(folder.record.problems) == 1
