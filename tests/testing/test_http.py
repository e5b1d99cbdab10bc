"""The simulated network: exact times, crashes, cuts. The rest is in the suite for both forms."""

from contextlib import asynccontextmanager

import pytest
import trio

from echo2p2p.errors import ConfigError, HttpError
from echo2p2p.net.ports import Endpoint, Request, Response, Route, TlsClient
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.http import FIRST_FREE_PORT, SimHttp
from echo2p2p.testing.journal import TraceJournal


async def echo(request: Request) -> Response:
    return Response(200, request.body or request.client.encode())


@asynccontextmanager
async def served(network: SimHttp, handler=echo):
    server = network.server("c", TraceJournal())
    routes = (Route("POST", "/x", handler, 1000),)
    async with (
        server.serve(routes, Endpoint("0.0.0.0", 0)) as at,
        network.clients("p").connect(f"http://c:{at.port}", None) as client,
    ):
        yield client


def test_latency_and_bytes_take_their_time() -> None:
    async def main() -> None:
        network = SimHttp(latency_s=0.05, bytes_per_s=1000)
        async with served(network) as client:
            assert (await client.request("POST", "/x", timeout_s=9)).body == b"p"
            assert trio.current_time() == pytest.approx(0.101)
            await client.request("POST", "/x", body=bytes(1000), timeout_s=9)
            assert trio.current_time() == pytest.approx(0.101 + 2.1)

    run_virtual(main, seed=1)


def test_a_refused_body_is_not_waited_for() -> None:
    async def main() -> None:
        network = SimHttp(latency_s=0.05, bytes_per_s=10_000)
        async with served(network) as client:
            answer = await client.request("POST", "/x", body=bytes(10**9), timeout_s=9)
            assert answer.status == 413
            assert trio.current_time() < 0.2

    run_virtual(main, seed=1)


def test_a_crash_breaks_requests_cancels_handlers_and_refuses_until_restart() -> None:
    async def main() -> None:
        network = SimHttp()
        begun, ended = trio.Event(), trio.Event()

        async def poll(request: Request) -> Response:
            begun.set()
            try:
                await trio.sleep_forever()
            finally:
                ended.set()
            raise AssertionError

        async with served(network, poll) as client, trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(HttpError, match="closed the connection"):
                    await client.request("POST", "/x", timeout_s=60)
                assert trio.current_time() < 1

            nursery.start_soon(ask)
            await begun.wait()
            network.crash("c")
            await ended.wait()
            with pytest.raises(HttpError, match="refused"):
                await client.request("POST", "/x", timeout_s=60)
            routes = (Route("POST", "/x", echo, 10),)
            again = network.server("c", TraceJournal())
            async with again.serve(routes, Endpoint("c", FIRST_FREE_PORT)):
                assert (await client.request("POST", "/x", timeout_s=60)).status == 200

    run_virtual(main, seed=1)


def test_a_cut_is_silence_until_the_timeout_and_between_those_two_only() -> None:
    async def main() -> None:
        network = SimHttp()
        async with served(network) as client:
            network.cut("c", "p")
            with pytest.raises(HttpError, match="no answer within 3 s"):
                await client.request("POST", "/x", timeout_s=3)
            assert trio.current_time() == 3
            url = f"http://c:{FIRST_FREE_PORT}"
            async with network.clients("q").connect(url, None) as other:
                assert (await other.request("POST", "/x", timeout_s=3)).body == b"q"
            network.heal("p", "c")
            assert (await client.request("POST", "/x", timeout_s=3)).status == 200

    run_virtual(main, seed=1)


def test_tls_is_off_and_asking_for_it_is_an_error() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError):
            async with SimHttp().clients("p").connect("http://c:1", TlsClient(None)):
                raise AssertionError

    run_virtual(main, seed=1)
