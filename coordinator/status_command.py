"""``echo2-coordinator status``: what a running coordinator says of itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from coordinator.access import Access, fetch_status, read_access
from coordinator.view import RunView, status_lines
from echo2p2p.errors import HttpError
from echo2p2p.net.aio import AioHttpClients, open_aio
from echo2p2p.net.ports import HttpClients
from echo2p2p.net.program import OK
from echo2p2p.terminal import Screen, can_draw, open_screen

WATCH_S: Final = 2.0

HELP: Final = """\
Shows peers, versions, queue, ages, idle time and the ledger of a running run. WHERE is the run's
folder (or a copy of the join.json in it), which has all that is needed, or the coordinator's URL;
then --admin-token opens it (a coordinator on loopback asks for none), and with https --token tells
which server to believe."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the command's arguments.

    Raises:
        SystemExit: 0 after ``--help``, 2 after something wrong, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="echo2-coordinator status", description=HELP, allow_abbrev=False
    )
    parser.add_argument("where", metavar="WHERE", help="run folder, join.json or URL")
    parser.add_argument("--admin-token", default="", metavar="T", help="e2a-...; see join.json")
    parser.add_argument("--token", default="", metavar="T", help="the join token, e2p-...")
    parser.add_argument("--url", default="", help="reach the server of a join.json here instead")
    parser.add_argument("--json", action="store_true", help="print all there is, as JSON")
    parser.add_argument("--watch", action="store_true", help="go on until Ctrl-C")
    return parser.parse_args(words)


def access_of(arguments: argparse.Namespace) -> Access:
    """Return how to reach the coordinator.

    Raises:
        ConfigError: WHERE names neither a URL nor a run.
    """
    if "://" in arguments.where:
        return Access(arguments.where, arguments.admin_token, arguments.token)
    access = read_access(Path(arguments.where).expanduser())
    return replace(
        access,
        url=arguments.url or access.url,
        admin_token=arguments.admin_token or access.admin_token,
        token=arguments.token or access.token,
    )


async def status(arguments: argparse.Namespace) -> int:
    """Print the status once, or again and again.

    Raises:
        EchoError: It cannot be had.
    """
    access = access_of(arguments)
    async with open_aio() as aio:
        clients = AioHttpClients(aio)
        if arguments.watch:
            live = can_draw(sys.stdout) and not arguments.json
            with open_screen(sys.stdout, live=live) as screen:
                await _watch(clients, access, screen, as_json=arguments.json)
        else:
            _print(await fetch_status(clients, access), access.url, as_json=arguments.json)
    return OK


def _print(found: dict[str, Any], url: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif can_draw(sys.stdout):
        from rich.console import Console

        Console().print(RunView(found, url))
    else:
        sys.stdout.write("".join(f"{line}\n" for line in status_lines(found)))


async def _watch(clients: HttpClients, access: Access, screen: Screen, *, as_json: bool) -> None:
    """Show the newest status until cancelled; one that was heard once may be away for a while."""
    heard = False
    while True:
        try:
            found = await fetch_status(clients, access)
        except HttpError as error:
            if not heard:
                raise
            screen.line(f"{error}; trying again")
        else:
            heard = True
            if as_json:
                screen.line(json.dumps(found))
            elif screen.live:
                screen.show(partial(RunView, found, access.url))
            else:
                for line in [*status_lines(found), ""]:
                    screen.line(line)
        await trio.sleep(WATCH_S)
