"""What a killed coordinator has left on disk, for the audit.

The database is copied, write-ahead log and all, and the copy is opened: so SQLite recovers it as
the next life will, and the next life still has to. What the learner has consumed is read from its
own log.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

from echo2p2p.net.ports import Rows
from scenarios.audit import Look, audit_rows, surviving
from scenarios.record import Record

DATABASE: Final = "run.sqlite"


def audit(run: Path, scratch: Path, record: Record, *, groups_per_step: int) -> Look:
    """Look at the folder of a run whose coordinator is dead.

    Args:
        run: The folder.
        scratch: Where the copy goes; emptied first.
        record: What the clients know.
        groups_per_step: Of a batch.
    """
    with copied(run, scratch) as rows:
        history = surviving(entries(run / "train.jsonl"))
        return audit_rows(rows, history, record, groups_per_step=groups_per_step)


@contextlib.contextmanager
def copied(run: Path, scratch: Path) -> Iterator[Rows]:
    """Open a copy of a dead coordinator's database, made in ``scratch``, which is emptied first."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name in (DATABASE, f"{DATABASE}-wal"):
        if (run / name).exists():
            shutil.copyfile(run / name, scratch / name)
    connection = sqlite3.connect(scratch / DATABASE, isolation_level=None)
    try:
        yield cast("Rows", connection)
    finally:
        connection.close()


def entries(log: Path) -> list[tuple[str, int, list[str]]]:
    """Return a learner's starts and steps, the latter with their samples."""
    found: list[tuple[str, int, list[str]]] = []
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # it was killed in the middle of the line
        entry = json.loads(line)
        if "start" in entry:
            found.append(("start", entry["start"], []))
        else:
            found.append(("step", entry["step"], entry["samples"]))
    return found
