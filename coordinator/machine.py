"""The real world of a coordinator: files, sockets, child processes. Only this file opens them."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coordinator.app import CoordinatorPorts
from coordinator.config import Settings
from coordinator.learner.client import TorchLearnerProcess
from coordinator.model import prepare_model
from coordinator.schema import MIGRATIONS
from coordinator.task_client import TaskWorkerProcess
from echo2p2p.errors import ConfigError
from echo2p2p.net.aio import AioHttpServer, open_aio
from echo2p2p.net.blobs import FileBlobs
from echo2p2p.net.memory import FileMemory
from echo2p2p.net.ports import Journal
from echo2p2p.net.store import SqliteStore
from echo2p2p.net.system import SystemClock, SystemEntropy, ThreadOffload
from echo2p2p.net.tcp import TcpStreams


class FolderShelf:
    """Checkpoint folders by step: ``<root>/step-000050``; temporary ones carry a suffix."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, step: int) -> Path:
        """Return the folder of a step; one left by an earlier life at this step is removed."""
        folder = self._root / f"step-{step:06d}"
        if folder.exists():
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
    try:
        for name in ("payloads", "checkpoints", "logs", "memory"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("run.folder", f"cannot write {folder}: {error.strerror}") from error
    spec = settings.model.path
    model_dir = folder / "model" if spec.startswith("@") else Path(spec).expanduser()
    prepare_model(spec, model_dir)
    logs = folder / "logs"
    async with (
        SqliteStore.open(folder / "run.sqlite", MIGRATIONS) as store,
        open_aio(journal) as aio,
    ):
        yield CoordinatorPorts(
            clock=SystemClock(),
            entropy=SystemEntropy(),
            journal=journal,
            offload=ThreadOffload(),
            streams=TcpStreams(),
            make_http_server=lambda tls: AioHttpServer(aio, tls, journal),
            store=store,
            blobs=FileBlobs(folder / "payloads"),
            memory=FileMemory(folder / "memory"),
            shelf=FolderShelf(folder / "checkpoints"),
            make_learner=lambda: TorchLearnerProcess(log_file=logs / "learner.log"),
            make_task_worker=lambda: TaskWorkerProcess(log_file=logs / "task_worker.log"),
            model_dir=model_dir,
            model_config=(model_dir / "config.json").read_text(encoding="utf-8"),
        )


def export_trained(run_folder: Path) -> Path:
    """Copy the newest checkpoint without optimizer and position to ``<run>/trained``.

    The result is a plain Hugging Face folder.
    """
    newest = FolderShelf(run_folder / "checkpoints").newest()
    assert newest is not None, "a finished run has a checkpoint"
    target, fresh = run_folder / "trained", run_folder / "trained.new"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(newest, fresh, ignore=shutil.ignore_patterns("optimizer.pt", "position.json"))
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return target


def write_json(path: Path, value: object) -> None:
    """Write a JSON file for people, whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
