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
from scenarios.audit import History, Look, audit_rows, surviving
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
    with _copy(run, scratch) as rows:
        history = _history(run / "train.jsonl")
        return audit_rows(rows, history, record, groups_per_step=groups_per_step)


@contextlib.contextmanager
def _copy(run: Path, scratch: Path) -> Iterator[Rows]:
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


def _history(log: Path) -> History:
    """Return the steps that no restart has taken back, with their samples."""
    entries: list[tuple[str, int, list[str]]] = []
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # it was killed in the middle of the line
        entry = json.loads(line)
        if "start" in entry:
            entries.append(("start", entry["start"], []))
        else:
            entries.append(("step", entry["step"], entry["samples"]))
    return surviving(entries)
