"""The asyncio thread, and what only the aiohttp forms must withstand: hostile bytes on a socket."""

import asyncio
import contextlib
import functools
import gzip
import threading
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import trio

from echo2p2p.errors import ConfigError, HttpError, LinkError
from echo2p2p.limits import HTTP_BODY_BYTES_MAX, MIB
from echo2p2p.net.aio import (
    LOOP_FAILED,
    REQUEST_REFUSED,
    AioHttpClients,
    AioHttpServer,
    AioThread,
    HttpLimits,
    open_aio,
)
from echo2p2p.net.ports import Endpoint, Handler, Request, Response, Route
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Refusal

# --- the thread ---------------------------------------------------------------------------------


async def test_a_coroutine_runs_in_the_other_thread_and_its_value_comes_back() -> None:
    async def where() -> tuple[int, str]:
        await asyncio.sleep(0)
        return threading.get_ident(), threading.current_thread().name

    async with open_aio() as aio:
        ident, name = await aio.call(where)
    assert (ident != threading.get_ident(), name) == (True, "asyncio")


async def test_an_error_of_the_coroutine_comes_out_in_trio() -> None:
    async def fail() -> None:
        raise KeyError("x")

    async with open_aio() as aio:
        with pytest.raises(KeyError):
            await aio.call(fail)


async def test_cancelling_reaches_the_coroutine_and_waits_for_its_end() -> None:
    steps = []
    begun = trio.Event()

    async with open_aio() as aio:

        async def work() -> None:
            aio.tell_trio(begun.set)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                steps.append("cleaned up")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(aio.call, work)
            await begun.wait()
            nursery.cancel_scope.cancel()
        steps.append("call ended")
    assert steps == ["cleaned up", "call ended"]


async def test_a_value_that_comes_in_spite_of_cancelling_is_not_lost() -> None:
    begun = trio.Event()
    got = []

    async with open_aio() as aio:

        async def stubborn() -> int:
            aio.tell_trio(begun.set)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return 7

        async def ask() -> None:
            got.append(await aio.call(stubborn))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await begun.wait()
            nursery.cancel_scope.cancel()
    assert got == [7]


async def test_a_call_that_is_cancelled_already_never_starts() -> None:
    started = []

    async def work() -> None:
        started.append(1)

    async with open_aio() as aio:
        with trio.CancelScope() as scope:
            scope.cancel()
            await aio.call(work)
        assert scope.cancelled_caught
    assert not started


async def test_closing_ends_calls_under_way_with_a_link_error_and_the_thread() -> None:
    failures = []

    async def hang() -> None:
        await asyncio.Event().wait()

    async def ask(aio: AioThread) -> None:
        with pytest.raises(LinkError) as caught:
            await aio.call(hang)
        failures.append(str(caught.value))

    async with trio.open_nursery() as nursery, open_aio() as aio:
        nursery.start_soon(ask, aio)
        await trio.testing.wait_all_tasks_blocked()
    assert failures == ["the HTTP thread is closed"]
    assert "asyncio" not in [thread.name for thread in threading.enumerate() if thread.is_alive()]
    with pytest.raises(LinkError):
        await aio.call(hang)


async def test_a_coroutine_that_blocks_the_loop_cannot_hold_up_closing() -> None:
    journal = TraceJournal()
    begun = trio.Event()
    release = threading.Event()

    async def block() -> None:
        aio.tell_trio(begun.set)
        release.wait(30)

    async with trio.open_nursery() as nursery:

        async def ask(aio: AioThread) -> None:
            with pytest.raises(LinkError):
                await aio.call(block)

        with trio.fail_after(5):
            async with open_aio(journal, close_s=0.2) as aio:
                nursery.start_soon(ask, aio)
                await begun.wait()
        release.set()
    assert journal.named(LOOP_FAILED)
    for thread in threading.enumerate():
        if thread.name == "asyncio":
            await trio.to_thread.run_sync(thread.join, 10)
            assert not thread.is_alive()


async def test_a_stray_error_of_the_loop_is_journalled_and_harms_nobody() -> None:
    journal = TraceJournal()

    async def stray() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)

    async with open_aio(journal) as aio:
        await aio.call(stray)
        await aio.call(lambda: asyncio.sleep(0, result=None))
        await trio.testing.wait_all_tasks_blocked()
    (entry,) = journal.named(LOOP_FAILED)
    assert "ZeroDivisionError" in str(entry.fields["exception"])


# --- the server against bytes -------------------------------------------------------------------


async def echo(request: Request) -> Response:
    return Response(200, request.body)


QUICK = HttpLimits(close_s=0.1)


class Wire:
    """A served echo, its journal, and raw connections to it."""

    def __init__(self, at: Endpoint, aio: AioThread, journal: TraceJournal) -> None:
        self.at = at
        self.aio = aio
        self.journal = journal

    async def say(self, *pieces: bytes) -> bytes:
        """Send the pieces and return all that comes until the server closes."""
        stream = await trio.open_tcp_stream(self.at.host, self.at.port)
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError):
                for piece in pieces:
                    await stream.send_all(piece)
            heard = b""
            with contextlib.suppress(trio.BrokenResourceError):
                async for data in stream:
                    heard += data
        return heard


@contextlib.asynccontextmanager
async def wire(
    limits: HttpLimits = QUICK, *, host: str = "127.0.0.1", body_max: int = 100
) -> AsyncIterator[Wire]:
    journal = TraceJournal()
    with trio.fail_after(20):
        async with open_aio(journal) as aio:
            server = AioHttpServer(aio, None, journal, limits)
            routes = (Route("POST", "/x", echo, body_max),)
            async with server.serve(routes, Endpoint(host, 0)) as at:
                yield Wire(at, aio, journal)


POST = b"POST /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"


async def test_a_long_body_is_refused_by_its_length_before_it_is_sent() -> None:
    async with wire() as bench:
        heard = await bench.say(POST + b"Content-Length: 101\r\n\r\n")
    assert heard.startswith(b"HTTP/1.1 413 ")
    assert codec.decode(heard.split(b"\r\n\r\n", 1)[1], Refusal).reason == "body_too_long"


async def test_a_body_of_unknown_length_is_refused_when_it_grows_too_long() -> None:
    chunk = b"40\r\n" + bytes(64) + b"\r\n"
    async with wire() as bench:
        heard = await bench.say(POST + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk)
        assert heard.startswith(b"HTTP/1.1 413 ")
        heard = await bench.say(POST + b"Transfer-Encoding: chunked\r\n\r\n", chunk, b"0\r\n\r\n")
        assert heard.endswith(bytes(64))


async def test_a_body_that_comes_too_slowly_is_refused() -> None:
    async with wire(HttpLimits(transfer_s=0.1, close_s=0.1)) as bench:
        heard = await bench.say(POST + b"Content-Length: 50\r\n\r\n", b"a")
    assert heard.startswith(b"HTTP/1.1 408 ")


async def test_a_request_head_that_never_ends_is_cut_off() -> None:
    async with wire(HttpLimits(idle_s=0.1)) as bench:
        assert await bench.say(POST + b"X-Slow: ") == b""
        assert await bench.say() == b""


async def test_of_too_many_connections_the_oldest_is_cut_and_the_newest_served() -> None:
    heard: dict[int, bytes] = {}
    async with wire(HttpLimits(connections_max=2)) as bench:

        async def idle(number: int) -> None:
            heard[number] = await bench.say(POST)

        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(idle, number)
                await trio.testing.wait_all_tasks_blocked(0.05)
            for _ in range(3):
                answer = await bench.say(POST + b"Content-Length: 0\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 ")
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
        assert heard == {0: b""}, "who has left makes room"


async def test_bodies_that_do_not_fit_into_memory_together_are_put_off() -> None:
    async with wire(HttpLimits(short_bytes_max=0, bodies_bytes_max=60, close_s=0.1)) as bench:
        heard = await bench.say(POST + b"Content-Length: 61\r\n\r\n")
        assert heard.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 2" in heard
        for _ in range(2):
            heard = await bench.say(POST + b"Content-Length: 60\r\n\r\n", bytes(60))
            assert heard.startswith(b"HTTP/1.1 200 ")


class Bell(TraceJournal):
    """A journal that can be waited for."""

    rung: trio.Event

    def event(self, name: str, **fields: object) -> None:
        super().event(name, **fields)
        self.rung.set()


async def test_a_piece_of_an_answer_is_there_before_the_next_is_made() -> None:
    read = trio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"first"
        await read.wait()
        yield b"second"

    async def handle(request: Request) -> Response:
        return Response(200, rest=pieces())

    with trio.fail_after(20):
        async with open_aio() as aio:
            server = AioHttpServer(aio, None, TraceJournal())
            async with (
                server.serve((Route("POST", "/x", handle, 0),), Endpoint("127.0.0.1", 0)) as at,
                await trio.open_tcp_stream(at.host, at.port) as stream,
            ):
                await stream.send_all(POST + b"Content-Length: 0\r\n\r\n")
                heard = b""
                while b"first" not in heard:
                    heard += await stream.receive_some()
                assert b"Transfer-Encoding: chunked" in heard
                read.set()
                async for data in stream:
                    heard += data
                assert heard.endswith(b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n")


async def whole(request: Request) -> Response:
    return Response(200, bytes(16 * MIB))


async def piecemeal(request: Request) -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(16):
            yield bytes(MIB)

    return Response(200, rest=pieces())


@pytest.mark.parametrize("much", [whole, piecemeal])
async def test_a_client_that_does_not_read_its_answer_is_cut_off(much: Handler) -> None:

    journal = Bell()
    object.__setattr__(journal, "rung", trio.Event())
    limits = HttpLimits(transfer_s=0.1, transfer_bytes_per_s_min=1e12)
    with trio.fail_after(20):
        async with open_aio() as aio:
            server = AioHttpServer(aio, None, journal, limits)
            async with (
                server.serve((Route("POST", "/x", much, 0),), Endpoint("127.0.0.1", 0)) as at,
                await trio.open_tcp_stream(at.host, at.port) as stream,
            ):
                await stream.send_all(POST + b"Content-Length: 0\r\n\r\n")
                await journal.rung.wait()
                heard = 0
                with contextlib.suppress(trio.BrokenResourceError):
                    async for data in stream:
                        heard += len(data)
                assert heard < 16 * MIB
    (entry,) = journal.named(REQUEST_REFUSED)
    assert "too slowly" in str(entry.fields["cause"])


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"{}\n\n"])
async def test_bytes_that_are_no_http_are_refused_and_journalled(garbage: bytes) -> None:
    async with wire() as bench:
        heard = await bench.say(garbage, b"\r\n\r\n")
        assert heard.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
        heard = await bench.say(POST + b"Content-Length: 0\r\n\r\n")
        assert heard.startswith(b"HTTP/1.1 200 ")
        assert {entry.name for entry in bench.journal.entries} <= {REQUEST_REFUSED}


async def test_a_compressed_body_is_refused_before_it_is_read() -> None:
    packed = gzip.compress(bytes(10_000))
    async with wire() as bench, AioHttpClients(bench.aio).connect(url(bench.at), None) as client:
        for encoding, status in (("gzip", 415), ("br", 415), ("identity", 200)):
            answer = await client.request(
                "POST", "/x", body=packed, headers={"Content-Encoding": encoding}, timeout_s=5
            )
            assert answer.status == status
        heard = await bench.say(POST + b"Content-Encoding: gzip\r\nContent-Length: 50\r\n\r\n")
    assert heard.startswith(b"HTTP/1.1 415 ")


async def test_a_route_decides_by_the_head_and_says_whose_bytes_a_body_is() -> None:
    seen = []

    def admit(head: Request) -> str | Response:
        seen.append((head.body, head.path))
        who = head.headers.get("who", "")
        return who or Response(401)

    started = trio.Event()

    async def wait(request: Request) -> Response:
        if request.headers["who"] == "held":
            started.set()
            await trio.sleep_forever()
        return Response(200)

    head = POST + b"Who: %s\r\nContent-Length: %d\r\n\r\n"
    limits = HttpLimits(
        short_bytes_max=0, bodies_bytes_max=1000, bodies_bytes_max_each=60, close_s=0.1
    )
    journal = TraceJournal()
    with trio.fail_after(20):
        async with open_aio(journal) as aio, trio.open_nursery() as nursery:
            server = AioHttpServer(aio, None, journal, limits)
            routes = (Route("POST", "/x", wait, 100, admit),)
            async with server.serve(routes, Endpoint("127.0.0.1", 0)) as at:
                bench = Wire(at, aio, journal)
                heard = await bench.say(POST + b"Content-Length: 50\r\n\r\n")
                assert heard.startswith(b"HTTP/1.1 401 "), "no byte of the body was sent"
                heard = await bench.say(head % (b"one", 100), bytes(100))
                assert heard.startswith(b"HTTP/1.1 200 "), "one body may be as long as the route"
                nursery.start_soon(bench.say, head % (b"held", 40), bytes(40))
                await started.wait()
                heard = await bench.say(head % (b"held", 21))
                assert heard.startswith(b"HTTP/1.1 429 ")
                assert b"Retry-After: 1" in heard
                heard = await bench.say(head % (b"other", 21), bytes(21))
                assert heard.startswith(b"HTTP/1.1 200 "), "each has a room of its own"
                nursery.cancel_scope.cancel()
    assert all(body == b"" and path == "/x" for body, path in seen)


async def test_ipv6_works() -> None:
    async with wire(host="::1") as bench:
        assert bench.at.host == "::1"
        async with AioHttpClients(bench.aio).connect(url(bench.at), None) as client:
            assert (await client.request("POST", "/x", body=b"6", timeout_s=5)).body == b"6"


@pytest.mark.parametrize(
    ("host", "mend"),
    [("192.0.2.1", "not an address of this machine"), ("no host", "no such host name")],
)
async def test_an_address_that_cannot_be_bound_says_why(host: str, mend: str) -> None:
    async with open_aio() as aio:
        server = AioHttpServer(aio, None, TraceJournal())
        with pytest.raises(ConfigError, match=mend):
            async with server.serve((), Endpoint(host, 0)):
                raise AssertionError


# --- the client ---------------------------------------------------------------------------------


def url(at: Endpoint) -> str:
    return f"http://[{at.host}]:{at.port}" if ":" in at.host else f"http://{at.host}:{at.port}"


async def test_megabytes_go_both_ways() -> None:
    body = bytes(range(256)) * (12 * MIB // 256)
    async with (
        wire(body_max=len(body)) as bench,
        AioHttpClients(bench.aio).connect(url(bench.at), None) as client,
    ):
        assert (await client.request("POST", "/x", body=body, timeout_s=20)).body == body


async def test_the_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with wire() as bench, AioHttpClients(bench.aio).connect(url(bench.at), None) as client:
        assert (await client.request("POST", "/x", body=b"p", timeout_s=5)).body == b"p"


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (b"", "closed the connection before it had answered"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "something other than HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "broke off in the middle"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (HTTP_BODY_BYTES_MAX + 1),
            "an answer of over",
        ),
    ],
)
async def test_a_server_that_answers_badly_is_an_http_error_in_one_line(
    reply: bytes, cause: str
) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(reply)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, open_aio() as aio:
            serve = functools.partial(trio.serve_tcp, host="127.0.0.1")
            listeners = await nursery.start(serve, answer, 0)
            at = Endpoint("127.0.0.1", listeners[0].socket.getsockname()[1])
            async with AioHttpClients(aio).connect(url(at), None) as client:
                with pytest.raises(HttpError, match=cause) as caught:
                    await client.request("POST", "/x", timeout_s=5)
            assert "\n" not in str(caught.value)
            nursery.cancel_scope.cancel()
