"""A stopped process: nothing of it runs, timers included, until it goes on."""

import trio

from echo2p2p.net.ports import Endpoint, Response, Route
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.http import SimHttp
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.stopping import SimProcess


def test_timers_of_a_stopped_process_expire_together_when_it_goes_on():
    woken: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        await trio.sleep(seconds)
        woken.append((name, trio.current_time()))

    async def main() -> None:
        process = SimProcess()
        async with trio.open_nursery() as nursery:
            with process.inside():
                for seconds in (1, 3, 5, 20):
                    nursery.start_soon(sleep, "mine", seconds)
            for seconds in (3, 5):
                nursery.start_soon(sleep, "other", seconds)
            await trio.sleep(2)
            process.stop()
            process.stop()
            await trio.sleep(5)
            process.go_on()
            await trio.sleep(5)
            process.go_on()

    run_virtual(main, seed=1)
    mine = [at for name, at in woken if name == "mine"]
    assert (mine, [at for name, at in woken if name == "other"]) == ([1, 12, 12, 20], [3, 5])


def test_a_stopped_process_hears_what_has_come_meanwhile_and_what_times_out_has_timed_out():
    seen: list[tuple[object, float]] = []

    async def listen(event: trio.Event) -> None:
        with trio.move_on_after(4) as scope:
            await event.wait()
        seen.append((scope.cancelled_caught, trio.current_time()))

    async def main() -> None:
        process, early, late = SimProcess(), trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            with process.inside():
                nursery.start_soon(listen, early)
                nursery.start_soon(listen, late)
            await trio.sleep(1)
            process.stop()
            await trio.sleep(1)
            early.set()
            await trio.sleep(8)
            late.set()
            process.go_on()

    run_virtual(main, seed=1)
    assert sorted(seen) == [(False, 10), (True, 10)]


def test_whoever_serves_a_stopped_process_is_not_stopped_and_the_other_way_round():
    handled: list[str] = []
    accepted: list[float] = []

    async def main() -> None:
        network, process = SimNetwork(), SimProcess()
        network.add_node("client")
        network.add_node("server")
        http = SimHttp(links=network)

        async def handle(request) -> Response:
            del request
            await trio.sleep(2)
            handled.append("done")
            return Response(200)

        async def accept(stream, host) -> None:
            del stream, host
            await trio.sleep(1)
            accepted.append(trio.current_time())

        async def ask() -> None:
            async with http.clients("client").connect(f"http://server:{at.port}", None) as client:
                await client.request("POST", "/x", timeout_s=100)

        async def listen(task_status) -> None:
            streams = network.streams("client")
            async with streams.listen(Endpoint("", 9), accept):
                task_status.started()
                await trio.sleep_forever()

        route = Route("POST", "/x", handle, 10**6)
        async with (
            trio.open_nursery() as nursery,
            http.server("server", TraceJournal()).serve((route,), Endpoint("", 0)) as at,
        ):
            nursery.start_soon(network.run)
            with process.inside():
                await nursery.start(lambda task_status: listen(task_status))
                nursery.start_soon(ask)
            dialled = await network.streams("server").dial(Endpoint("client", 9), timeout_s=1)
            await trio.sleep(0.5)
            process.stop()
            await trio.sleep(10)
            assert handled == ["done"], "the server's task goes on"
            assert accepted == [], "the client's does not"
            process.go_on()
            await trio.sleep(0.1)
            assert len(accepted) == 1
            await dialled.aclose()
            nursery.cancel_scope.cancel()

    run_virtual(main, seed=1)
