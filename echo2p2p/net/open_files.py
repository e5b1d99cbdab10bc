"""How many files this process may have open, which bounds its connections.

Many systems give a process 1024 unless it asks for more, up to a hard limit that only an
administrator moves. A server that runs into it can accept nobody, not even who would help; so it
asks at the start, and takes only as many connections as leave room for everything else.
"""

from __future__ import annotations

import resource
from typing import Final

from echo2p2p.errors import ConfigError
from echo2p2p.limits import NEIGHBOURS_MAX

RESERVED: Final = NEIGHBOURS_MAX + 144
"""Relay links and those in their handshake, store, logs, payloads, pipes of child processes."""
CONNECTIONS_MIN: Final = 64
"""With fewer there is no use in starting."""


def allow_connections(wanted: int) -> int:
    """Raise this process's limit if need be; return how many connections a server may have.

    Args:
        wanted: More are not needed.

    Raises:
        ConfigError: The system's hard limit leaves fewer than `CONNECTIONS_MIN`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        goal = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
            soft = goal
        except (OSError, ValueError):  # a sandbox may forbid it; then what there is must do
            pass
    allowed = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - RESERVED)
    if allowed < CONNECTIONS_MIN:
        detail = f"this process may have {soft} at most, and needs {RESERVED + CONNECTIONS_MIN}"
        raise ConfigError("open files", f"{detail}: raise the hard limit (ulimit -Hn 4096)")
    return allowed
