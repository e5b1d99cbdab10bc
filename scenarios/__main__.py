"""``echo2-scenario``; all but the entry point is in `scenarios.command`."""

from __future__ import annotations

import sys

from echo2p2p.entry import enter


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return enter("scenarios.command", argv)


if __name__ == "__main__":
    sys.exit(main())
