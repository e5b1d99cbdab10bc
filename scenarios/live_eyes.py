"""Looks at the processes of a live story from outside: what each tells over HTTP on its machine.

A machine is a network namespace. A thread steps into it for as long as a connection is opened and
comes back; the connection stays there. So one process looks into all machines, and none of them has
one more on it. Who does not answer in time is not seen this time: that it lives is not the eyes'
to judge.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import trio

from coordinator.app import Opened
from echo2p2p.limits import Fill
from scenarios import namespaces

TIMEOUT_S: Final = 5.0
NAMES: Final = Path("/run/netns")
CLONE_NEWNET: Final = 0x40000000
METRICS_PORT: Final = 9100
"""Of each peer, on its own loopback."""
BOUND: Final = re.compile(r'^echo2_peer_bound_(now|limit)\{what="([^"]*)"\} (\S+)$', re.MULTILINE)


class Machine:
    """Where requests come from, and go to.

    Args:
        index: Of the namespace.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def ask(
        self,
        url: str,
        path: str,
        *,
        method: str = "GET",
        admin_token: str = "",
        authority: bytes | None = None,
    ) -> bytes:
        """Return the body of an answer; blocks, for a thread.

        Raises:
            OSError: There was none, or it was a refusal.
        """
        parts = urlsplit(url)
        assert parts.hostname is not None
        link: http.client.HTTPConnection
        if authority is None:
            link = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
        else:
            context = ssl.create_default_context(cadata=authority.decode())
            context.check_hostname = False  # its certificate is the run's, whatever its address
            link = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=TIMEOUT_S, context=context
            )
        headers = {"authorization": f"Bearer {admin_token}"} if admin_token else {}
        try:
            with self._inside():
                link.connect()
            link.request(method, path, headers=headers)
            answer = link.getresponse()
            body = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{url}{path}: {type(error).__name__}: {error}") from error
        finally:
            link.close()
        if answer.status >= http.client.BAD_REQUEST:
            raise ConnectionError(f"{url}{path}: status {answer.status}")
        return body

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Let this thread be on that machine."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            there = os.open(NAMES / namespaces.name_of(self._index), os.O_RDONLY)
            try:
                _step_into(there)
            finally:
                os.close(there)
            try:
                yield
            finally:
                _step_into(home)
        finally:
            os.close(home)


def _step_into(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


async def stop(opened: Opened) -> None:
    """Tell the coordinator to stop, from its own machine.

    Raises:
        OSError: It does not answer.
    """

    def ask() -> None:
        Machine(0).ask(
            opened.url,
            "/control/stop",
            method="POST",
            admin_token=opened.admin_token,
            authority=opened.authority,
        )

    await trio.to_thread.run_sync(ask)


async def status_of(opened: Opened) -> Mapping[str, Any] | None:
    """Return what the coordinator tells of itself; ``None``: nothing."""

    def ask() -> Mapping[str, Any] | None:
        try:
            body = Machine(0).ask(
                opened.url, "/status", admin_token=opened.admin_token, authority=opened.authority
            )
            found: Mapping[str, Any] = json.loads(body)
        except (OSError, ValueError):
            return None
        return found

    return await trio.to_thread.run_sync(ask)


def fills_of(status: Mapping[str, Any]) -> list[Fill]:
    """Return how full everything of the coordinator is that has a bound."""
    return [Fill(one["what"], one["now"], one["limit"]) for one in status["bounds"]]


async def peer_fills(index: int) -> list[Fill]:
    """Return the same of a peer, by its own metrics; none if it does not answer."""

    def ask() -> list[Fill]:
        try:
            body = Machine(index).ask(f"http://127.0.0.1:{METRICS_PORT}", "/metrics")
        except OSError:
            return []
        return read_fills(body.decode(errors="replace"))

    return await trio.to_thread.run_sync(ask)


def read_fills(text: str) -> list[Fill]:
    """Return the bounds in a peer's metrics."""
    now: dict[str, int] = {}
    limit: dict[str, int] = {}
    for name, what, value in BOUND.findall(text):
        {"now": now, "limit": limit}[name][what] = int(float(value))
    return [Fill(what, now[what], limit[what]) for what in now if what in limit]
