"""The real world of a peer: files, sockets, the engine's process. Only this file opens them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal

from echo2p2p.errors import ConfigError
from echo2p2p.net.aio import AioHttpClients, AioHttpServer, open_aio
from echo2p2p.net.blobs import FileBlobs
from echo2p2p.net.disk_errors import guard_disk, make_folders
from echo2p2p.net.memory import FileMemory
from echo2p2p.net.ports import Journal
from echo2p2p.net.shaping import DayTraffic, receive_buffer_bytes
from echo2p2p.net.system import SystemClock, SystemEntropy, ThreadOffload
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.net.tokenizer import MODEL_FILES, FolderTokenizer
from echo2p2p.net.trust import PeerIdentity
from echo2p2p.wire.messages import Hardware
from peer.app import PeerPorts, limits_of
from peer.checkpoint import read_checkpoint
from peer.config import PeerSettings
from peer.engine.client import EngineProcess
from peer.local import ReadModel

ENGINE_STARTING: Final = "engine.starting"
ENGINE_SHARE: Final = 0.9
"""Of the free memory, for the engine's process; more, and the system would begin to kill."""


def is_installed(name: str) -> bool:
    """Return whether a package can be imported, without doing so."""
    return importlib.util.find_spec(name) is not None


def gpu_name(root: Path = Path("/")) -> str | None:
    """Return the first GPU's name, as its driver tells it; ``None`` without one."""
    for about in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = about.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
        return models[0] if models else "NVIDIA GPU"
    return "AMD GPU" if (root / "dev/kfd").exists() else None


def engine_kind(
    settings: PeerSettings,
    gpu: str | None,
    installed: Callable[[str], bool] = is_installed,
) -> Literal["hf", "vllm", "none"]:
    """Return which engine to use, from what is asked, what is installed and what there is.

    Raises:
        ConfigError: The engine that is asked for is not installed.
    """
    asked = settings.engine.kind
    if asked == "none":
        return "none"
    if asked == "vllm" or (asked == "auto" and gpu is not None and installed("vllm")):
        if not installed("vllm"):
            raise ConfigError(
                "engine.kind",
                "vLLM is missing; pip install 'echo2p2p[vllm]', or use --engine transformers",
            )
        return "vllm"
    if all(installed(name) for name in ("torch", "transformers")):
        return "hf"
    if asked == "transformers":
        raise ConfigError(
            "engine.kind", "torch and transformers are missing; pip install 'echo2p2p[hf]'"
        )
    return "none"


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory a new process may have; ``None`` where that is not told.

    The least of what Linux calls available and what the control groups of this process leave.
    """
    try:
        words = (root / "proc/meminfo").read_text(encoding="ascii").split()
        free = [int(words[words.index("MemAvailable:") + 1]) * 1024]
    except (OSError, ValueError):
        return None
    groups = root / "sys/fs/cgroup"
    try:
        names = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        names = []
    for name in names:
        if name.startswith("0::"):
            group = groups / name.removeprefix("0::/")
            free += [left for at in (group, *group.parents) if (left := _group_left(at))]
    return min(free)


def _group_left(group: Path) -> int | None:
    """Return what a control group still has for anonymous memory; ``None``: no limit."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii").split()
        cache = int(stat[stat.index("inactive_file") + 1])  # given back when it is needed
        return max(1, int(limit) - used + cache)
    except (OSError, ValueError):
        return None


def open_identity(folder: Path) -> PeerIdentity:
    """Return the folder's identity, drawn on first use.

    Raises:
        ConfigError: The folder or the file cannot be used.
    """
    make_folders("folder", folder)
    path = folder / "identity"
    identity = PeerIdentity.load(path)
    if identity is None:
        identity = PeerIdentity.create(SystemEntropy())
        identity.save(path)
    return identity


def model_reader(settings: PeerSettings) -> ReadModel | None:
    """Return what reads the volunteer's model folder, if there is one.

    Raises:
        ConfigError: It is no folder.
    """
    if settings.model_dir is None:
        return None
    folder = Path(settings.model_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError("model_dir", f"{folder} is no folder; give the one with the safetensors")
    return partial(read_checkpoint, folder)


def tokenizer_opener(
    settings: PeerSettings,
) -> Callable[[Mapping[str, bytes] | None], FolderTokenizer]:
    """Return what reads the model's tokenizer: the run's files, or the volunteer's folder.

    It raises:
        ConfigError: They are no tokenizer.
        StoreError: The disk refused.
    """

    def read(files: Mapping[str, bytes] | None) -> FolderTokenizer:
        own = settings.serve.tokenizer or settings.model_dir
        folder = Path(own or settings.folder).expanduser()
        if files is not None:
            folder = Path(settings.folder).expanduser() / "tokenizer"
            with guard_disk(f"write {folder}"):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                for name in MODEL_FILES:
                    if name in files:
                        (folder / name).write_bytes(files[name])
        try:
            return FolderTokenizer(folder)
        except ConfigError as error:
            raise ConfigError("serve.tokenizer", error.detail) from error

    return read


class TrafficFile:
    """`TrafficLog` in a file of the peer's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> DayTraffic | None:
        """Return what was kept; a file that is none of ours counts as nothing.

        Raises:
            ConfigError: It cannot be read.
        """
        try:
            kept = json.loads(self._path.read_bytes())
            return DayTraffic(float(kept["since_s"]), int(kept["used_bytes"]))
        except FileNotFoundError:
            return None
        except OSError as error:
            detail = f"cannot read {self._path}: {error.strerror}; mend that or remove it"
            raise ConfigError("folder", detail) from error
        except (ValueError, TypeError, KeyError):
            return None

    def save(self, day: DayTraffic) -> None:
        """Replace the file, at once.

        Raises:
            StoreError: The disk refused.
        """
        fresh = self._path.with_suffix(".new")
        content = {"since_s": day.since_s, "used_bytes": day.used_bytes}
        with guard_disk(f"write {self._path}"):
            fresh.write_text(json.dumps(content) + "\n", encoding="utf-8")
            fresh.replace(self._path)


@asynccontextmanager
async def open_machine(settings: PeerSettings, journal: Journal) -> AsyncIterator[PeerPorts]:
    """Open the peer's world."""
    folder = Path(settings.folder).expanduser()
    gpu = gpu_name()
    kind = engine_kind(settings, gpu)

    def make_engine() -> EngineProcess:
        assert kind != "none"
        most, free = settings.engine.memory_max_bytes, free_memory_bytes()
        if most is None and free is not None:
            most = int(ENGINE_SHARE * free)
        return EngineProcess(
            kind,
            memory_max_bytes=most,
            log_file=folder / "engine.log",
            on_phase=lambda phase: journal.event(ENGINE_STARTING, kind=kind, phase=phase),
        )

    async with open_aio(journal) as aio:
        yield PeerPorts(
            clock=SystemClock(),
            entropy=SystemEntropy(),
            journal=journal,
            offload=ThreadOffload(),
            streams=TcpStreams(receive_buffer_bytes=receive_buffer_bytes(limits_of(settings))),
            http=AioHttpClients(aio),
            memory=FileMemory(folder / "memory"),
            make_engine=None if kind == "none" else make_engine,
            engine_kind=kind,
            hardware=Hardware(
                accelerator=gpu or "cpu",
                cores=os.cpu_count() or 1,
                memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            ),
            outbox=FileBlobs(folder / "outbox"),
            memory_free=free_memory_bytes,
            read_model=model_reader(settings),
            open_tokenizer=tokenizer_opener(settings),
            traffic_log=TrafficFile(folder / "traffic.json"),
            make_http_server=lambda: AioHttpServer(aio, None, journal),
        )
