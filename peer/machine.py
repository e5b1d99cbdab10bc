"""The real world of a peer: files, sockets, the engine's process. Only this file opens them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from echo2p2p.errors import ConfigError
from echo2p2p.net.aio import AioHttpClients, open_aio
from echo2p2p.net.memory import FileMemory
from echo2p2p.net.ports import Journal
from echo2p2p.net.system import SystemClock, SystemEntropy, ThreadOffload
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.net.trust import PeerIdentity
from echo2p2p.wire.messages import Hardware
from peer.app import PeerPorts
from peer.config import PeerSettings
from peer.engine.client import HfEngineProcess


def engine_kind(settings: PeerSettings) -> Literal["hf", "none"]:
    """Return which engine to use, from what is asked and what is installed.

    Raises:
        ConfigError: The engine that is asked for is not installed.
    """
    installed = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    asked = settings.engine.kind
    if asked == "hf" and not installed:
        raise ConfigError(
            "engine.kind", "torch and transformers are missing; pip install 'echo2p2p[hf]'"
        )
    return "hf" if installed and asked != "none" else "none"


def open_identity(folder: Path) -> PeerIdentity:
    """Return the folder's identity, drawn on first use.

    Raises:
        ConfigError: The folder or the file cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("folder", f"cannot write {folder}: {error.strerror}") from error
    path = folder / "identity"
    identity = PeerIdentity.load(path)
    if identity is None:
        identity = PeerIdentity.create(SystemEntropy())
        identity.save(path)
    return identity


@asynccontextmanager
async def open_machine(settings: PeerSettings, journal: Journal) -> AsyncIterator[PeerPorts]:
    """Open the peer's world."""
    folder = Path(settings.folder).expanduser()
    kind = engine_kind(settings)

    def make_engine() -> HfEngineProcess:
        return HfEngineProcess(
            generate_timeout_s=settings.engine.generate_timeout_s,
            log_file=folder / "engine.log",
        )

    async with open_aio(journal) as aio:
        yield PeerPorts(
            clock=SystemClock(),
            entropy=SystemEntropy(),
            journal=journal,
            offload=ThreadOffload(),
            streams=TcpStreams(),
            http=AioHttpClients(aio),
            memory=FileMemory(folder / "memory"),
            make_engine=None if kind == "none" else make_engine,
            engine_kind=kind,
            hardware=Hardware(
                accelerator="cpu",
                cores=os.cpu_count() or 1,
                memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            ),
        )
