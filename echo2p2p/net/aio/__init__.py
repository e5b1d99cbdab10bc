"""HTTP on aiohttp: asyncio in one thread with a loop of its own, behind the ports.

trio runs the process. A trio task hands a coroutine function to the loop's thread and sleeps until
its result comes back; cancelling the trio task cancels the asyncio task and waits for it. The other
way, each request becomes a trio task of whoever opened the server; a client that goes away cancels
it. So neither side ever runs the other's code in its own thread.

Nothing outside this package imports asyncio or aiohttp, and nothing outside imports its modules.

Rejected (measured): trio-asyncio, 50 % dearer and killed by a stray asyncio error; trio as a guest
of asyncio, which is abandoned without clean-up on SIGINT.
"""

from __future__ import annotations

from echo2p2p.net.aio.client import AioHttpClient, AioHttpClients
from echo2p2p.net.aio.server import REQUEST_REFUSED, AioHttpServer, HttpLimits
from echo2p2p.net.aio.thread import CLOSE_S, LOOP_FAILED, AioThread, open_aio

__all__ = [
    "CLOSE_S",
    "LOOP_FAILED",
    "REQUEST_REFUSED",
    "AioHttpClient",
    "AioHttpClients",
    "AioHttpServer",
    "AioThread",
    "HttpLimits",
    "open_aio",
]
