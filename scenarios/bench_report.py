"""What every benchmark says beside its figures: the machine, the versions, and how to read it.

A benchmark is a report, never a test: it has no threshold and nothing waits for its times. Figures
of two machines, or of two days, say little of each other; ratios within one run do.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np

MIB: Final = 1024 * 1024
LIBRARIES: Final = ("echo2p2p", "trio", "aiohttp", "msgpack", "msgspec", "numpy", "cryptography")


def machine() -> dict[str, object]:
    """Return what the figures were taken on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def versions(*more: str) -> dict[str, str]:
    """Return the versions of everything that takes part.

    Args:
        more: Other packages, which may be missing.
    """
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for name in more:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {name: metadata.version(name) for name in LIBRARIES}


def stated() -> str:
    """Return machine and versions in one line."""
    here, found = machine(), versions()
    return (
        f"{here['cores']} cores of {here['processor']}, {here['system']}; "
        f"echo2p2p {found['echo2p2p']}, Python {found['python']}"
    )


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return the middle and the tail of some durations, in milliseconds; zeros of none."""
    values = 1000 * np.asarray(seconds or [0.0], dtype=np.float64)
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "max": float(values.max())}


def table(result: Mapping[str, object]) -> str:
    """Return a result for a person: one line a figure, nested names joined with dots."""
    rows = list(_rows(result, ""))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _rows(value: Mapping[str, object], prefix: str) -> Iterator[tuple[str, str]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _rows(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _text(inner)


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
