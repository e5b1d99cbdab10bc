"""``echo2-scenario compare A.json B.json``: two results of ``run --json`` side by side."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from echo2p2p.errors import ConfigError
from echo2p2p.net.program import OK, USAGE
from scenarios.world import COORDINATOR

COLUMN: Final = 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    parser.add_argument("a", type=Path, help="a file with what `run --json` has printed")
    parser.add_argument("b", type=Path, help="another")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print both; returns the exit code."""
    try:
        results = [_read(path) for path in (arguments.a, arguments.b)]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    rows = beside(*results)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print(table(rows, [str(arguments.a.name), str(arguments.b.name)]))
    return OK


def _read(path: Path) -> Mapping[str, Any]:
    try:
        result: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        figures(result)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        detail = "not what `echo2-scenario run --json` prints; write that into a file first"
        raise ConfigError(str(path), detail) from error
    return result


def figures(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of one result by their names."""
    counts, versions = result["trajectories"] or {}, result["versions"]
    issued = counts.get("issued")
    peers = [line["sent"] for name, line in result["bytes"].items() if name != COORDINATOR]

    def share(count: float | None) -> float | None:
        return None if not issued or count is None else count / issued

    return {
        "seconds": result["virtual_s"],
        "steps": result["steps"],
        "idle share": result["idle_share"],
        "versions": versions["published"],
        "in half of the engines, s": versions["reached_s"]["0.5"],
        "in 95 % of the engines, s": versions["reached_s"]["0.95"],
        "in all engines, middle version, s": versions["last_peer_median_s"],
        "in the last engine ever, s": versions["reached_s"]["1"],
        "trajectories issued": issued,
        "trained share": share(counts.get("trained")),
        "rejected share": share(sum(counts["rejected"].values()) if counts else None),
        **{
            f"rejected({reason}) share": share(count)
            for reason, count in sorted(counts.get("rejected", {}).items())
        },
        "coordinator sent, MB": result["bytes"][COORDINATOR]["sent"] / 1e6,
        "peers sent, MB": sum(peers) / 1e6,
        "converged, s": result["converged_s"],
    }


def beside(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return each figure of both."""
    left, right = figures(a), figures(b)
    names = [*left, *(name for name in right if name not in left)]
    return {name: [left.get(name), right.get(name)] for name in names}


def table(rows: Mapping[str, list[float | None]], heads: list[str]) -> str:
    """Return them for a person, with B over A."""
    widths = [max(COLUMN, len(head) + 2) for head in heads]
    first = "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    lines = [f"{'':<30}{first}{'ratio':>9}"]
    for name, (a, b) in rows.items():
        cells = "".join(
            f"{'-' if value is None else f'{value:.4g}':>{width}}"
            for value, width in zip((a, b), widths, strict=True)
        )
        ratio = "" if not a or b is None else f"{b / a:.2f}"
        lines.append(f"{name:<30}{cells}{ratio:>9}".rstrip())
    return "\n".join(lines)
