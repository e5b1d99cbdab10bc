"""``echo2-coordinator``; all but the entry point is in `coordinator.command`."""

from __future__ import annotations

import sys

from echo2p2p.entry import enter


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return enter("coordinator.command", argv)


if __name__ == "__main__":
    sys.exit(main())
