"""``echo2-peer``: take part in a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

from echo2p2p.cli import load_settings
from echo2p2p.errors import EchoError
from echo2p2p.log import open_journal
from echo2p2p.net.ports import Journal
from echo2p2p.net.program import FAILED, OK, USAGE, run_program
from echo2p2p.net.system import SystemClock
from peer.app import PeerApp, PeerPorts
from peer.config import PeerSettings
from peer.machine import open_identity, open_machine

Machine = Callable[[PeerSettings, Journal], AbstractAsyncContextManager[PeerPorts]]
USAGE_TEXT: Final = """\
usage: echo2-peer join URL --token T [options]

Joins the run at URL, generates rollouts and relays weights until the run ends.
`echo2-peer join --help` lists all settings; --config FILE reads them from TOML.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in {"-h", "--help"}:
        print(USAGE_TEXT, end="")
        return OK
    if not words or words[0] != "join":
        print(USAGE_TEXT, end="", file=sys.stderr)
        return USAGE
    rest = words[1:]
    if rest and not rest[0].startswith("-"):
        rest = ["--url", *rest]
    try:
        settings = load_settings(PeerSettings, rest, program="echo2-peer join URL", presets={})
    except EchoError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    return run_program(lambda: join(settings))


async def join(settings: PeerSettings, *, machine: Machine = open_machine) -> int:
    """Take part until the run ends; ``machine`` opens the world, by default the real one."""
    folder = Path(settings.folder).expanduser()
    identity = open_identity(folder)
    with open_journal(sys.stderr, SystemClock(), file=folder / "events.jsonl") as journal:
        async with machine(settings, journal) as ports:
            outcome = await PeerApp(settings, ports, identity).run()
    print(f"the run has {outcome}")
    return OK if outcome == "finished" else FAILED
