"""What both HTTP servers and clients promise: aiohttp on the loopback, and the simulated ones."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import trio

from echo2p2p.errors import ConfigError, HttpError
from echo2p2p.net.aio import AioHttpClients, AioHttpServer, open_aio
from echo2p2p.net.ports import (
    Endpoint,
    Handler,
    HttpClients,
    HttpServer,
    Request,
    Response,
    Route,
)
from echo2p2p.net.routing import HANDLER_FAILED
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.http import SimHttp
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Refusal


@dataclass
class Bench:
    """One form of the ports, and where it lives."""

    server: HttpServer
    clients: HttpClients
    host: str
    journal: TraceJournal


Story = Callable[[Bench], Awaitable[None]]
Form = Callable[[Story], None]


def with_aiohttp(story: Story) -> None:
    async def main() -> None:
        journal = TraceJournal()
        with trio.fail_after(20):
            async with open_aio(journal) as aio:
                server = AioHttpServer(aio, None, journal)
                await story(Bench(server, AioHttpClients(aio), "127.0.0.1", journal))

    trio.run(main)


def with_simulation(story: Story) -> None:
    async def main() -> None:
        network, journal = SimHttp(latency_s=0.02), TraceJournal()
        server = network.server("coordinator", journal)
        with trio.fail_after(20):
            await story(Bench(server, network.clients("peer"), "coordinator", journal))

    run_virtual(main, seed=1)


@pytest.fixture(params=[with_aiohttp, with_simulation], ids=["aiohttp", "simulated"])
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


def route(handler: Handler, path: str = "/x", method: str = "POST", body_max: int = 1000) -> Route:
    return Route(method, path, handler, body_max)


async def echo(request: Request) -> Response:
    query = ",".join(f"{name}={value}" for name, value in sorted(request.query.items()))
    tag = request.headers.get("x-tag", "")
    text = f"{request.method} {request.path} [{query}] {tag} ".encode() + request.body
    return Response(201, text, {"X-Answer": "yes"}, "text/plain")


def refusal_in(response: Response) -> Refusal:
    return codec.decode(response.body, Refusal)


def url_of(at: Endpoint) -> str:
    return f"http://{at.host}:{at.port}"


def test_a_request_reaches_its_handler_and_the_answer_its_client(form: Form) -> None:
    async def story(bench: Bench) -> None:
        routes = (route(echo), route(echo, "/of/{peer}/{n}", "GET"))
        async with (
            bench.server.serve(routes, Endpoint(bench.host, 0)) as at,
            bench.clients.connect(url_of(at), None) as client,
        ):
            assert at.port != 0
            answer = await client.request(
                "POST", "/x?b=2&a=%C3%A9", body=b"\x00abc", headers={"X-Tag": "t"}, timeout_s=5
            )
            assert (answer.status, answer.content_type) == (201, "text/plain")
            assert answer.body == "POST /x [a=é,b=2] t ".encode() + b"\x00abc"
            assert answer.headers["x-answer"] == "yes"
            answer = await client.request("GET", "/of/p%201/7?n=0&q=1", timeout_s=5)
            assert answer.body == b"GET /of/p 1/7 [n=7,peer=p 1,q=1]  "

    form(story)


def test_unknown_paths_and_wrong_methods_are_refused_with_a_message(form: Form) -> None:
    async def story(bench: Bench) -> None:
        routes = (route(echo), route(echo, "/x", "GET"))
        async with (
            bench.server.serve(routes, Endpoint(bench.host, 0)) as at,
            bench.clients.connect(url_of(at), None) as client,
        ):
            answer = await client.request("GET", "/y", timeout_s=5)
            assert (answer.status, refusal_in(answer).reason) == (404, "no_such_path")
            answer = await client.request("DELETE", "/x", timeout_s=5)
            assert (answer.status, refusal_in(answer).reason) == (405, "wrong_method")
            assert answer.headers["allow"] == "GET, POST"

    form(story)


def test_a_body_over_its_routes_limit_is_refused_and_the_handler_not_called(form: Form) -> None:
    async def story(bench: Bench) -> None:
        seen = []

        async def note(request: Request) -> Response:
            seen.append(len(request.body))
            return Response(200)

        async with (
            bench.server.serve((route(note),), Endpoint(bench.host, 0)) as at,
            bench.clients.connect(url_of(at), None) as client,
        ):
            answer = await client.request("POST", "/x", body=bytes(1001), timeout_s=5)
            assert (answer.status, refusal_in(answer).reason) == (413, "body_too_long")
            answer = await client.request("POST", "/x", body=bytes(1000), timeout_s=5)
            assert answer.status == 200
        assert seen == [1000]

    form(story)


def test_a_handler_that_raises_is_journalled_and_the_server_lives_on(form: Form) -> None:
    async def story(bench: Bench) -> None:
        async def fail(request: Request) -> Response:
            raise KeyError("who")

        async def fail_in_a_group(request: Request) -> Response:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail, request)
            return Response(200)

        routes = (route(fail), route(fail_in_a_group, "/group"), route(echo, "/echo"))
        async with (
            bench.server.serve(routes, Endpoint(bench.host, 0)) as at,
            bench.clients.connect(url_of(at), None) as client,
        ):
            for path in ("/x", "/group"):
                answer = await client.request("POST", path, timeout_s=5)
                assert (answer.status, refusal_in(answer).reason) == (500, "internal_error")
                assert b"who" not in answer.body
            assert (await client.request("POST", "/echo", timeout_s=5)).status == 201
        first, second = bench.journal.named(HANDLER_FAILED)
        assert first.fields["cause"] == "KeyError: 'who'"
        assert "in fail" in str(first.fields["exception"])
        assert second.fields["path"] == "/group"

    form(story)


def test_requests_run_side_by_side(form: Form) -> None:
    async def story(bench: Bench) -> None:
        waiting = 0
        all_here = trio.Event()

        async def meet(request: Request) -> Response:
            nonlocal waiting
            waiting += 1
            if waiting == 8:
                all_here.set()
            await all_here.wait()
            return Response(200, request.body)

        async with (
            bench.server.serve((route(meet),), Endpoint(bench.host, 0)) as at,
            bench.clients.connect(url_of(at), None) as client,
        ):
            answers: list[bytes] = []

            async def ask(number: int) -> None:
                body = bytes([number])
                answers.append((await client.request("POST", "/x", body=body, timeout_s=9)).body)

            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(ask, number)
            assert sorted(answers) == [bytes([number]) for number in range(8)]

    form(story)


@pytest.mark.parametrize("way", ["cancelled", "timed out"])
def test_a_client_that_goes_away_cancels_its_handler(form: Form, way: str) -> None:
    async def story(bench: Bench) -> None:
        begun, ended = trio.Event(), trio.Event()

        async def poll(request: Request) -> Response:
            begun.set()
            try:
                await trio.sleep_forever()
            finally:
                ended.set()
            raise AssertionError

        async with (
            bench.server.serve((route(poll), route(echo, "/echo")), Endpoint(bench.host, 0)) as at,
            bench.clients.connect(url_of(at), None) as client,
        ):
            if way == "cancelled":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lambda: client.request("POST", "/x", timeout_s=60))
                    await begun.wait()
                    nursery.cancel_scope.cancel()
            else:
                with pytest.raises(HttpError, match=r"no answer within 0\.3 s"):
                    await client.request("POST", "/x", timeout_s=0.3)
            await ended.wait()
            assert (await client.request("POST", "/echo", timeout_s=5)).status == 201
        assert not bench.journal.entries

    form(story)


def test_a_server_that_closes_cancels_its_handlers_and_says_so(form: Form) -> None:
    async def story(bench: Bench) -> None:
        begun = trio.Event()
        answers = []

        async def poll(request: Request) -> Response:
            begun.set()
            await trio.sleep_forever()
            raise AssertionError

        async with trio.open_nursery() as nursery:
            async with bench.server.serve((route(poll),), Endpoint(bench.host, 0)) as at:

                async def ask() -> None:
                    async with bench.clients.connect(url_of(at), None) as client:
                        answers.append(await client.request("POST", "/x", timeout_s=60))

                nursery.start_soon(ask)
                await begun.wait()
                closing_at = trio.current_time()
            assert trio.current_time() - closing_at < 5
        (answer,) = answers
        assert (answer.status, refusal_in(answer).reason) == (503, "closing")
        assert answer.headers["retry-after"] == "1"

    form(story)


def test_nobody_there_is_an_http_error_in_one_line(form: Form) -> None:
    async def story(bench: Bench) -> None:
        async with bench.server.serve((), Endpoint(bench.host, 0)) as at:
            pass
        async with bench.clients.connect(url_of(at), None) as client:
            with pytest.raises(HttpError, match="refused: nothing listens there") as caught:
                await client.request("GET", "/", timeout_s=5)
        assert "\n" not in str(caught.value)

    form(story)


def test_an_address_in_use_is_a_config_error_and_free_again_later(form: Form) -> None:
    async def story(bench: Bench) -> None:
        async with bench.server.serve((), Endpoint(bench.host, 0)) as at:
            with pytest.raises(ConfigError, match="another program does: stop it") as caught:
                async with bench.server.serve((), at):
                    raise AssertionError
            assert caught.value.path == "listen"
        async with bench.server.serve((), at) as again:
            assert again == at

    form(story)


@pytest.mark.parametrize("url", ["coordinator", "ftp://coordinator:1", "https://coordinator:1"])
def test_a_url_that_cannot_be_meant_is_a_config_error(form: Form, url: str) -> None:
    async def story(bench: Bench) -> None:
        with pytest.raises(ConfigError) as caught:
            async with bench.clients.connect(url, None):
                raise AssertionError
        assert caught.value.path == "url"

    form(story)


def test_an_answer_may_come_piece_by_piece(form: Form) -> None:
    async def story(bench: Bench) -> None:
        async def count() -> AsyncGenerator[bytes, None]:
            for number in range(1, 4):
                await trio.sleep(0.01)
                yield b"%d," % number

        async def handle(request: Request) -> Response:
            return Response(206, b"0,", {"X-Answer": "yes"}, "text/plain", rest=count())

        async with (
            bench.server.serve(
                (route(handle), route(echo, "/echo")), Endpoint(bench.host, 0)
            ) as at,
            bench.clients.connect(url_of(at), None) as client,
        ):
            for _ in range(2):
                answer = await client.request("POST", "/x", timeout_s=5)
                assert (answer.status, answer.body) == (206, b"0,1,2,3,")
                assert (answer.headers["x-answer"], answer.content_type) == ("yes", "text/plain")
            assert (await client.request("POST", "/echo", timeout_s=5)).status == 201
        assert not bench.journal.entries

    form(story)


@pytest.mark.parametrize("way", ["raises", "client goes", "server closes"])
def test_pieces_that_end_early_break_the_answer_off_and_are_closed(form: Form, way: str) -> None:
    async def story(bench: Bench) -> None:
        begun, ended = trio.Event(), trio.Event()

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                yield b"one"
                begun.set()
                if way == "raises":
                    raise KeyError("two")
                await trio.sleep_forever()
            finally:
                ended.set()

        async def handle(request: Request) -> Response:
            return Response(200, b"", {}, "text/plain", rest=pieces())

        async def ask() -> None:
            async with bench.clients.connect(url_of(at), None) as client:
                if way == "client goes":
                    with trio.move_on_after(0.5):
                        await client.request("POST", "/x", timeout_s=9)
                else:
                    with pytest.raises(HttpError):
                        await client.request("POST", "/x", timeout_s=9)

        async with trio.open_nursery() as nursery:
            routes = (route(handle), route(echo, "/echo"))
            async with bench.server.serve(routes, Endpoint(bench.host, 0)) as at:
                nursery.start_soon(ask)
                await begun.wait()
                if way != "server closes":
                    await ended.wait()
                    async with bench.clients.connect(url_of(at), None) as client:
                        assert (await client.request("POST", "/echo", timeout_s=5)).status == 201
            await ended.wait()
        assert [entry.fields["cause"] for entry in bench.journal.entries] == (
            ["KeyError: 'two'"] if way == "raises" else []
        )

    form(story)
