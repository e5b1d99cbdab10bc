"""What others leave unsent or unread takes no room from those who do."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from echo2p2p.limits import MIB
from echo2p2p.net.aio import AioHttpServer, HttpLimits, open_aio
from echo2p2p.net.ports import Endpoint, Request, Response, Route
from echo2p2p.testing.journal import TraceJournal

LONG = 1000
"""Bytes of an upload at most, here."""
SHORT = 100


class Front:
    """A server with a route for uploads, one for short requests, and one with a long answer."""

    def __init__(self, at: Endpoint) -> None:
        self._at = at
        self.waiting = 0

    async def begin(self, path: bytes, head: bytes, *parts: bytes) -> trio.SocketStream:
        """Send a request, or the beginning of one."""
        stream = await trio.open_tcp_stream(self._at.host, self._at.port)
        await stream.send_all(b"POST " + path + b" HTTP/1.1\r\nHost: h\r\n" + head + b"\r\n\r\n")
        for part in parts:
            await stream.send_all(part)
        return stream

    async def status(self, path: bytes, head: bytes, *parts: bytes) -> int:
        """Return what the answer begins with."""
        async with await self.begin(path, head, *parts) as stream:
            return int((await stream.receive_some(200)).split()[1])

    async def wait(self, request: Request) -> Response:
        """Answer never."""
        self.waiting += 1
        await trio.sleep_forever()
        raise AssertionError(request)

    async def until_waiting(self, count: int) -> None:
        """Until so many handlers have their request."""
        while self.waiting < count:
            await trio.testing.wait_all_tasks_blocked(0.01)


@asynccontextmanager
async def opened(**limits: int) -> AsyncIterator[Front]:
    async def answer(request: Request) -> Response:
        return Response(200, b"ok")

    async def much(request: Request) -> Response:
        return Response(200, bytes(16 * MIB))

    journal = TraceJournal()
    with trio.fail_after(20):
        async with open_aio(journal) as aio:
            one = HttpLimits(short_bytes_max=SHORT, close_s=0.1, **limits)
            server, front = AioHttpServer(aio, None, journal, one), Front(Endpoint("", 0))
            routes = (
                Route("POST", "/upload", answer, LONG),
                Route("POST", "/short", answer, SHORT),
                Route("POST", "/wait", front.wait, SHORT),
                Route("POST", "/score", front.wait, LONG),
                Route("POST", "/much", much, SHORT),
            )
            async with server.serve(routes, Endpoint("127.0.0.1", 0)) as at:
                front._at = at
                yield front


async def test_announced_uploads_leave_room_for_heartbeats():
    async with opened(bodies_bytes_max=LONG) as front:
        held = await front.begin(b"/upload", b"Content-Length: 1000")
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert await front.status(b"/upload", b"Content-Length: 1", b"x") == 503
        assert await front.status(b"/short", b"Content-Length: 100", bytes(100)) == 200
        await held.aclose()


async def test_a_short_body_counts_when_it_has_come():
    async with opened(short_bodies_bytes_max=150) as front:
        held = [await front.begin(b"/wait", b"Content-Length: 100") for _ in range(3)]
        held += [await front.begin(b"/wait", b"Transfer-Encoding: chunked") for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert await front.status(b"/short", b"Content-Length: 100", bytes(100)) == 200
        held.append(await front.begin(b"/wait", b"Content-Length: 100", bytes(100)))
        await front.until_waiting(1)
        assert await front.status(b"/short", b"Content-Length: 60", bytes(60)) == 503
        chunk = b"3c\r\n" + bytes(60) + b"\r\n"  # that it is too long shows when it has come
        assert await front.status(b"/short", b"Transfer-Encoding: chunked", chunk) == 503
        for stream in held:
            await stream.aclose()


async def test_a_body_of_unknown_length_takes_what_it_was_once_it_is_read():
    async with opened(bodies_bytes_max=LONG + 10) as front:
        chunks = b"a\r\n" + bytes(10) + b"\r\n0\r\n\r\n"
        async with await front.begin(b"/score", b"Transfer-Encoding: chunked", chunks):
            await front.until_waiting(1)
            assert await front.status(b"/upload", b"Content-Length: 1000", bytes(1000)) == 200
            assert await front.status(b"/upload", b"Content-Length: 1000", bytes(1000)) == 200


async def test_a_short_answer_leaves_in_one_write_with_its_head():
    async with opened() as front:
        for _ in range(20):
            async with await front.begin(b"/short", b"Content-Length: 0") as stream:
                assert (await stream.receive_some(4096)).endswith(b"ok")


@pytest.mark.slow
async def test_an_answer_that_nobody_reads_is_not_copied_for_each_who_asks():
    async with opened() as front:
        held = [await front.begin(b"/much", b"Content-Length: 0") for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked(0.5)
        copied = [
            each.get_write_buffer_size()
            for each in gc.get_objects()
            # Not `isinstance`: that asks lazy objects of other packages for their class.
            if issubclass(type(each), asyncio.Transport) and each.get_protocol() is not None
        ]
        assert len(copied) >= 3
        assert max(copied) < MIB
        for stream in held:
            await stream.aclose()
