"""The real world of a coordinator: files, sockets, child processes. Only this file opens them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from coordinator.app import CoordinatorPorts
from coordinator.config import Settings
from coordinator.learner.client import TorchLearnerProcess
from coordinator.model import model_folder, prepare_model
from coordinator.schema import MIGRATIONS
from coordinator.task_client import TaskWorkerProcess
from echo2p2p.errors import StoreError
from echo2p2p.limits import MODEL_FILE_BYTES_MAX
from echo2p2p.net.aio import AioHttpServer, HttpLimits, open_aio
from echo2p2p.net.blobs import FileBlobs
from echo2p2p.net.disk_errors import guard_disk, make_folders
from echo2p2p.net.memory import FileMemory
from echo2p2p.net.open_files import allow_connections
from echo2p2p.net.ports import Journal
from echo2p2p.net.store import SqliteStore
from echo2p2p.net.system import SystemClock, SystemEntropy, ThreadOffload
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.net.tokenizer import MODEL_FILES

CONNECTIONS_LIMITED: Final = "http.connections_limited"
OFFLOAD_THREADS: Final = 3
"""A publication, a merged delta, and whatever else takes CPU for a moment."""
ULIMIT: Final = "the system allows this process no more open files; see ulimit -Hn"


class FolderShelf:
    """Checkpoint folders by step: ``<root>/step-000050``; temporary ones carry a suffix."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, step: int) -> Path:
        """Return the folder of a step; one left by an earlier life at this step is removed."""
        folder = self._root / f"step-{step:06d}"
        if folder.exists():
            with guard_disk(f"remove {folder}"):
                shutil.rmtree(folder)
        return folder

    def newest(self) -> Path | None:
        """Return the newest checkpoint, or ``None``."""
        found = self._all()
        return found[-1] if found else None

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep``."""
        for old in self._all()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(p for p in self._root.glob("step-*") if p.is_dir() and p.suffix == "")


@asynccontextmanager
async def open_machine(settings: Settings, journal: Journal) -> AsyncIterator[CoordinatorPorts]:
    """Open everything that the run's folder holds; one coordinator a folder.

    Raises:
        ConfigError: The folder or the model cannot be used; says why.
        StoreError: The disk refused.
    """
    folder = Path(settings.run.folder).expanduser()
    names = ("payloads", "checkpoints", "logs", "memory")
    make_folders("run.folder", folder, *(folder / name for name in names))
    spec = settings.model.path
    model_dir = model_folder(spec, folder)
    prepare_model(spec, model_dir)
    logs = folder / "logs"
    wanted = HttpLimits.connections_max
    limits = HttpLimits(connections_max=allow_connections(wanted))
    if limits.connections_max < wanted:
        journal.event(CONNECTIONS_LIMITED, allowed=limits.connections_max, detail=ULIMIT)
    async with (
        SqliteStore.open(folder / "run.sqlite", MIGRATIONS) as store,
        open_aio(journal) as aio,
    ):
        yield CoordinatorPorts(
            clock=SystemClock(),
            entropy=SystemEntropy(),
            journal=journal,
            offload=ThreadOffload(threads=OFFLOAD_THREADS),
            streams=TcpStreams(),
            make_http_server=lambda tls: AioHttpServer(aio, tls, journal, limits),
            store=store,
            blobs=FileBlobs(folder / "payloads"),
            memory=FileMemory(folder / "memory"),
            shelf=FolderShelf(folder / "checkpoints"),
            make_learner=lambda: TorchLearnerProcess(
                train_timeout_s=settings.learner.step_timeout_s, log_file=logs / "learner.log"
            ),
            make_task_worker=lambda: TaskWorkerProcess(
                item_timeout_s=settings.task.item_timeout_s,
                memory_max_bytes=settings.task.memory_max_bytes,
                log_file=logs / "task_worker.log",
            ),
            model_dir=model_dir,
            model_files=model_files(model_dir),
            model_config=(model_dir / "config.json").read_text(encoding="utf-8"),
            cores=len(os.sched_getaffinity(0)),
        )


def model_files(folder: Path) -> dict[str, bytes]:
    """Return what peers may have of the model's folder, as it is now; too long files are not."""
    found = {}
    for name in MODEL_FILES:
        with suppress(OSError):
            file = folder / name
            if file.stat().st_size <= MODEL_FILE_BYTES_MAX:
                found[name] = file.read_bytes()
    return found


def export_trained(run_folder: Path) -> Path | None:
    """Copy the newest checkpoint without optimizer and position to ``<run>/trained``.

    The result is a plain Hugging Face folder; ``None`` if the run was stopped before it had one.

    Raises:
        StoreError: The disk refused; what was there before still is.
    """
    newest = FolderShelf(run_folder / "checkpoints").newest()
    if newest is None:
        return None
    target, fresh = run_folder / "trained", run_folder / "trained.new"
    left_out = shutil.ignore_patterns("optimizer.pt", "position.json")
    with guard_copy(target):
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(newest, fresh, ignore=left_out)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    return target


@contextmanager
def guard_copy(target: Path) -> Iterator[None]:
    """As `guard_disk`, for `shutil`, which collects its errors as text."""
    try:
        with guard_disk(f"write {target}"):
            yield
    except StoreError as error:
        if isinstance(error.__cause__, shutil.Error):
            detail = str(error.__cause__.args[0][0][2])
            raise StoreError(f"cannot write {target}: {detail}: free some space") from error
        raise


def write_json(path: Path, value: object) -> None:
    """Write a JSON file for people, whole or not at all.

    Raises:
        StoreError: The disk refused.
    """
    fresh = path.with_suffix(".new")
    with guard_disk(f"write {path}"):
        fresh.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)
