"""What a volunteer sees of its own work: a line, metrics, health."""

from contextlib import AsyncExitStack

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from echo2p2p.limits import Fill
from echo2p2p.net.aio import AioHttpClients, AioHttpServer, open_aio
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.wire.messages import Outcome
from peer.figures import PeerFigures, Tally
from peer.metrics import exposition, serve_metrics
from peer.view import LINE_S, peer_line, show_figures


def outcome(reason=None):
    return Outcome(lease_id="f" * 32, accepted=reason is None, reason=reason)


READY = PeerFigures(
    state="ready",
    incarnation=2,
    version=41,
    latest_version=42,
    tokens_per_s=310.4,
    tokens_generated=5000,
    leases_held=3,
    links=4,
    tally=Tally(130, 120, {"stale": 2, "lease_expired": 1}, 4_100_000, 9_000_000),
)


def test_outcomes_are_counted_by_what_became_of_the_work():
    tally = Tally(accepted=5)
    tally.note([outcome(), outcome("stale"), outcome(), outcome("stale"), outcome("unused")])
    assert tally == Tally(5, 2, {"stale": 2, "unused": 1})


def test_tallies_add_up_and_the_summands_stay_as_they_are():
    first, second = Tally(1, 1, {"stale": 1}, 10, 20), Tally(2, 0, {"stale": 2, "unused": 1}, 1, 2)
    assert first.plus(second) == Tally(3, 1, {"stale": 3, "unused": 1}, 11, 22)
    assert first.with_uploads(4, {"not_finite": 1}).rejected == {"stale": 1, "not_finite": 1}
    assert (first, second) == (
        Tally(1, 1, {"stale": 1}, 10, 20),
        Tally(2, 0, {"stale": 2, "unused": 1}, 1, 2),
    )


def test_the_line_says_that_work_is_accepted_or_why_not():
    assert peer_line(READY) == (
        "ready  version 41 (-1)  310 tokens/s  130 groups accepted, 120 trained so far, "
        "3 rejected (stale 2, lease_expired 1); 4.1 MB relayed, 9.0 MB received"
    )


def test_before_there_is_anything_to_say_the_line_is_short():
    assert peer_line(PeerFigures()) == (
        "joining  version -  0 groups accepted, 0 trained so far; 0.0 MB relayed, 0.0 MB received"
    )


def test_a_coordinator_that_is_silent_is_mentioned():
    silent = PeerFigures(state="ready", version=1, silent_s=12.3)
    assert peer_line(silent).endswith("no answer from the coordinator for 12 s")


async def test_a_line_is_said_every_interval_if_it_is_another_one(autojump_clock):
    said = []
    now = [READY]
    with trio.move_on_after(LINE_S * 5.5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(show_figures, lambda: now[0], lambda line: said.append(line))
            await trio.sleep(LINE_S * 2.5)
            now[0] = PeerFigures(state="warming")
    assert said == [peer_line(READY), peer_line(PeerFigures(state="warming"))]


FILLS = [Fill("links", 3, 256)]


def samples(figures):
    body, _ = exposition(figures, FILLS)
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_metrics_are_what_prometheus_reads():
    found = samples(READY)
    assert found["echo2_peer_version",] == 41
    assert found["echo2_peer_groups_trained_total",] == 120
    assert found["echo2_peer_groups_rejected_total", "stale"] == 2
    assert found["echo2_peer_state", "ready"] == 1
    assert found["echo2_peer_state", "joining"] == 0
    assert found["echo2_peer_bound_now", "links"] == 3
    assert found["echo2_peer_bound_limit", "links"] == 256
    assert ("echo2_peer_version",) not in samples(PeerFigures())


@pytest.mark.parametrize(
    ("figures", "status"),
    [
        (READY, 200),
        (PeerFigures(state="resting"), 200),
        (PeerFigures(state="joining"), 503),
        (PeerFigures(state="warming"), 503),
        (PeerFigures(state="ready", silent_s=300.0), 503),
    ],
)
async def test_health_is_told_on_a_loopback_port(figures, status):
    async with AsyncExitStack() as stack:
        aio = await stack.enter_async_context(open_aio())
        server = AioHttpServer(aio, None, TraceJournal())
        real = await stack.enter_async_context(
            serve_metrics(server, 0, lambda: figures, lambda: FILLS)
        )
        assert real.host == "127.0.0.1"
        clients = AioHttpClients(aio)
        url = f"http://{real.host}:{real.port}"
        http = await stack.enter_async_context(clients.connect(url, None))
        answer = await http.request("GET", "/healthz", timeout_s=5.0)
        assert (answer.status, answer.body) == (status, figures.state.encode())
        answer = await http.request("GET", "/metrics", timeout_s=5.0)
        assert (answer.status, answer.body) == (200, exposition(figures, FILLS)[0])
