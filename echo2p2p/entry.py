"""How the commands begin: quiet on Ctrl-C while they import, and when nobody reads on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

UNREAD: Final = 128 + signal.SIGPIPE
"""Exit code when standard output was closed by its reader (``| head``): the shells' own."""


def enter(module: str, argv: Sequence[str] | None = None) -> int:
    """Import a module and run its ``main(argv)``; returns the exit code."""
    # Imports take a while; a Ctrl-C meanwhile ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.stdout is None:  # closed before we began
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        code = int(import_module(module).main(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        return _unread()
    except BaseExceptionGroup as group:
        if group.split(BrokenPipeError)[1] is not None:
            raise
        return _unread()
    except SystemExit:  # of argparse, after --help
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            return _unread()
        raise
    return code


def _unread() -> int:
    # What is still in the buffer is written at exit; not into the closed pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNREAD
