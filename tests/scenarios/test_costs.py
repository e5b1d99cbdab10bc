"""What work costs in virtual time, if it is to cost anything."""

from dataclasses import replace
from functools import partial

import pytest
import trio

from echo2p2p.net.ports import Endpoint, Response, Route
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.http import SimHttp
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.network import SimNetwork
from echo2p2p.weights.anchor import encode_anchor
from echo2p2p.weights.delta import encode_delta
from peer.apply import Apply
from scenarios import namespaces
from scenarios.costs import MEASURED, SLICE_S, Cores, name_of
from scenarios.play import play
from scenarios.story import read_story

ONE = replace(MEASURED, cores=1, start_s=1.0)
STORY = """
[world]
stop_s = 20
heal_s = 6
learner_start_s = 0
[[peers]]
count = 3
[checks]
converge_s = 8
"""


def test_who_finds_no_core_waits():
    async def start_three(costs):
        cores = Cores(costs, 1.0)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(cores.start_process)
        return trio.current_time()

    assert run_virtual(start_three, ONE, seed=1) == pytest.approx(3.0)
    assert run_virtual(start_three, replace(ONE, cores=3), seed=1) == pytest.approx(1.0)
    assert run_virtual(start_three, None, seed=1) == 0.0


def test_what_is_short_does_not_wait_for_what_is_long():
    async def publish():
        cores = Cores(ONE, 1.0)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(cores.start_process)
            await trio.sleep(0.1)
            await cores.spend(0.001)
            return trio.current_time() - 0.1

    assert run_virtual(publish, seed=1) <= 3 * SLICE_S + 0.001


def test_a_process_does_one_thing_after_another_and_is_not_cancelled_in_its_work():
    async def work(processes):
        cores = Cores(replace(MEASURED, cores=2, start_s=0.0), 1.0)
        both = [await cores.start_process() for _ in range(processes)] * (2 // processes)
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as nursery:
                for process in both:
                    nursery.start_soon(process.work, 1.0)
        return trio.current_time()

    assert run_virtual(work, 1, seed=1) == pytest.approx(2.0)
    assert run_virtual(work, 2, seed=1) == pytest.approx(1.0)


def test_pieces_and_exchanges_take_the_time_of_whoever_makes_them():
    costs = replace(MEASURED, start_s=0.0, piece_s=1.0, exchange_s=4.0, handshake_s=0.25)

    async def main():
        network = SimNetwork()
        for name in "ab":
            network.add_node(name, latency_s=0.5)
        cores = Cores(costs, 1.0)
        ann, bob = await cores.start_process(), await cores.start_process()
        heard = []

        async def accept(stream, _):
            heard.append((await stream.receive_some(), trio.current_time()))

        async def answer(request):
            return Response(200, b"%f" % trio.current_time())

        http = SimHttp(links=network)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.run)
            streams = bob.streams(network.streams("b"))
            async with streams.listen(Endpoint("b", 1), accept):
                stream = await ann.streams(network.streams("a")).dial(
                    Endpoint("b", 1), timeout_s=9.0
                )
                # A round trip of 2 s, as much again for TLS, and the handshake's work.
                assert trio.current_time() == pytest.approx(4.25)
                await stream.send_all(b"x")
                await trio.sleep(2.0)
            # Ann has worked for a second, a second of way, and Bob has worked for one.
            assert heard == [(b"x", pytest.approx(4.25 + 3.0))]
            server = bob.server(http.server("b", TraceJournal()))
            async with (
                server.serve((Route("GET", "/", answer, 0),), Endpoint("b", 2)),
                ann.clients(http.clients("a")).connect("http://b:2", None) as client,
            ):
                began_s = trio.current_time()
                said = await client.request("GET", "/", timeout_s=99.0)
                # Half of the work is Ann's; then a connection, the question and Bob's half.
                assert float(said.body) == pytest.approx(began_s + 2.0 + 2.0 + 1.0 + 2.0)
            nursery.cancel_scope.cancel()

    run_virtual(main, seed=1)


def test_what_takes_long_is_known_by_the_name_that_it_has_in_the_code():
    assert {name_of(partial(encode_delta, None)), name_of(encode_anchor)} < set(MEASURED.work)
    (write,) = set(MEASURED.work) - {"encode_delta", "encode_anchor"}
    owner, method, _, inner = write.split(".")
    code = getattr(Apply, method).__code__.co_consts
    assert owner == Apply.__name__
    assert write in {one.co_qualname for one in code if hasattr(one, "co_qualname")}
    assert inner == "write"
    assert name_of(object()) == ""


def test_a_larger_model_takes_longer():
    def encode(value):
        return value

    encode.__qualname__ = "encode_delta"

    async def work(state_mb):
        cores = Cores(ONE, state_mb)
        assert await cores.run(partial(encode, 7)) == 7
        return trio.current_time(), cores.step_s(0.5)

    (small_s, small_step_s), (large_s, large_step_s) = (
        run_virtual(work, mb, seed=1) for mb in (1.0, 100.0)
    )
    assert 0 < small_s < large_s
    assert 0.5 < small_step_s < large_step_s


def test_lines_are_those_of_the_test_bed_where_work_costs_something():
    framing = Cores(MEASURED, 1.0).framing
    assert framing is not None
    assert framing.burst_bytes(20e6 / 8) == namespaces.BURST_BYTES
    assert framing.burst_bytes(1e6 / 8) == namespaces.SLOW_BURST_BYTES_MIN
    assert Cores(None, 1.0).framing is None


def joined_s(costs):
    world = play("three", read_story(STORY, "three"), 7, costs=costs).world
    return [
        entry.at_s for entry in world.trace.named("peer.joined") if "engine" not in entry.fields
    ]


@pytest.mark.slow
def test_processes_of_a_story_share_a_few_cores_as_they_come_up():
    free, costly = joined_s(None), joined_s(MEASURED)
    # The coordinator and then three peers on two cores. Where nothing costs anything, timers are
    # late by a tick each.
    assert -0.02 < max(costly) - max(free) - 2.5 * MEASURED.start_s < 0.5
