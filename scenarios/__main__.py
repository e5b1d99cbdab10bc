"""``echo2-scenario``; all but the entry point is in `scenarios.command`."""

from __future__ import annotations

import signal
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    # Imports take a while; a Ctrl-C meanwhile ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from scenarios.command import main as command

    return command(argv)


if __name__ == "__main__":
    sys.exit(main())
