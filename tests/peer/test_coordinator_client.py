"""What a peer sends, and what it makes of every kind of answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from echo2p2p.errors import HttpError, RefusedError, RemoteProtocolError
from echo2p2p.ids import Incarnation, ManifestId, Version
from echo2p2p.net.ports import Endpoint, HttpClient, Request, Response, Route
from echo2p2p.net.routing import refusal
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.http import SimHttp
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.wire import codec
from echo2p2p.wire.messages import (
    CaReply,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Leave,
    Left,
    ManifestsReply,
    ManifestsRequest,
    Message,
    Outcome,
    Plan,
    Signed,
    Upload,
    UploadReply,
)
from peer.coordinator_client import (
    REQUEST_TIMEOUT_S,
    UPLOAD_TIMEOUT_S,
    BusyError,
    CoordinatorClient,
    checked,
    fetch_ca,
    join,
)
from scenarios.middle import heartbeat, open_bench

SIGNED = Signed(body=b"b", signature=b"s")
BEAT = HeartbeatReply(
    term_s=10.0,
    now_s=0.0,
    latest_version=None,
    outcomes=[],
    plan=Plan(activation="active", neighbours=[], peers=1, run_state="running"),
)
UPLOADED = UploadReply(outcome=Outcome(lease_id="l", accepted=True, reason=None), duplicate=False)
ANSWERS: dict[str, Message] = {
    "/ca": CaReply(run_public_key=bytes(32), certificate=b""),
    "/heartbeat": BEAT,
    "/manifests": ManifestsReply(path=[SIGNED]),
    "/lease": LeaseReply(leases=[]),
    "/upload": UPLOADED,
    "/leave": Left(),
}


class Server:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.answer: Response | None = None
        self.delay_s = 0.0

    async def handle(self, request: Request) -> Response:
        """Answer."""
        self.asked.append(request)
        await trio.sleep(self.delay_s)
        if self.answer is not None:
            return self.answer
        if request.path.startswith("/chunk"):
            return Response(200, b"chunk", content_type="application/octet-stream")
        return Response(200, codec.encode(ANSWERS[request.path]))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HttpClient]:
        """Serve, and connect."""
        network = SimHttp(latency_s=0.0)
        paths = [("GET", "/ca"), ("POST", "/join"), ("GET", "/chunk/{manifest}/{index}")]
        paths += [("POST", path) for path in ANSWERS if path != "/ca"]
        routes = tuple(Route(method, path, self.handle, 10**6) for method, path in paths)
        server = network.server("c", TraceJournal())
        async with (
            server.serve(routes, Endpoint("c", 80)),
            network.clients("p").connect("http://c:80", None) as http,
        ):
            yield http


@pytest.fixture
def server() -> Server:
    return Server()


class Ear:
    """Counts answers that were heard."""

    count = 0

    def __call__(self) -> None:
        self.count += 1


def client_of(http: HttpClient, ear: Ear | None = None) -> CoordinatorClient:
    return CoordinatorClient(http, "e2c-secret", Incarnation(3), ear or Ear())


UPLOAD = Upload(incarnation=3, lease_id="l", samples=[], seconds=1.0)


async def test_every_request_carries_credential_and_incarnation(
    autojump_clock, server: Server
) -> None:
    ear = Ear()
    async with server.open() as http:
        client = client_of(http, ear)
        assert await client.heartbeat(heartbeat(3, 1)) == BEAT
        assert await client.manifests(None, 1.0) == [SIGNED]
        assert await client.manifests(Version(4), 1.0) == [SIGNED]
        assert await client.leases(Version(2), 8, 2.0) == []
        assert await client.upload(UPLOAD) == UPLOADED
        await client.leave("bye")
        assert await client.chunk(ManifestId(b"\x01\xff"), 7) == b"chunk"
    assert {request.headers["authorization"] for request in server.asked} == {"Bearer e2c-secret"}
    assert [(request.method, request.path) for request in server.asked] == [
        ("POST", "/heartbeat"),
        ("POST", "/manifests"),
        ("POST", "/manifests"),
        ("POST", "/lease"),
        ("POST", "/upload"),
        ("POST", "/leave"),
        ("GET", "/chunk/01ff/7"),
    ]
    bodies = [request.body for request in server.asked]
    assert codec.decode(bodies[0], type(heartbeat(3, 1))) == heartbeat(3, 1)
    assert codec.decode(bodies[2], ManifestsRequest) == ManifestsRequest(
        incarnation=3, have_version=4, wait_s=1.0
    )
    assert codec.decode(bodies[3], LeaseRequest) == LeaseRequest(
        incarnation=3, version=2, leases_max=8, wait_s=2.0
    )
    assert codec.decode(bodies[4], Upload) == UPLOAD
    assert codec.decode(bodies[5], Leave) == Leave(incarnation=3, reason="bye")
    assert ear.count == 6


@pytest.mark.parametrize(
    ("call", "limit_s"),
    [
        (lambda client: client.heartbeat(heartbeat(3, 1)), REQUEST_TIMEOUT_S),
        (lambda client: client.leave("bye"), REQUEST_TIMEOUT_S),
        (lambda client: client.manifests(None, 25.0), REQUEST_TIMEOUT_S + 25.0),
        (lambda client: client.leases(Version(0), 1, 20.0), REQUEST_TIMEOUT_S + 20.0),
        (lambda client: client.upload(UPLOAD), REQUEST_TIMEOUT_S + UPLOAD_TIMEOUT_S),
        (lambda client: client.chunk(ManifestId(b"x"), 0), UPLOAD_TIMEOUT_S),
    ],
    ids=["heartbeat", "leave", "manifests", "leases", "upload", "chunk"],
)
async def test_a_silent_coordinator_is_given_up_in_time_but_not_in_its_long_poll(
    autojump_clock, server: Server, call, limit_s: float
) -> None:
    async with server.open() as http:
        server.delay_s = limit_s - 0.1
        await call(client_of(http))
        server.delay_s = 10_000.0
        began, ear = trio.current_time(), Ear()
        with pytest.raises(HttpError, match="no answer"):
            await call(client_of(http, ear))
        assert trio.current_time() - began == pytest.approx(limit_s, abs=0.01)
        assert ear.count == 0


async def test_a_refusal_for_good_carries_its_reason(autojump_clock, server: Server) -> None:
    server.answer = refusal(401, "not_a_member", "join again")
    ear = Ear()
    async with server.open() as http:
        client = client_of(http, ear)
        for call in (
            lambda: client.heartbeat(heartbeat(3, 1)),
            lambda: client.upload(UPLOAD),
            lambda: client.chunk(ManifestId(b"x"), 0),
        ):
            with pytest.raises(RefusedError) as caught:
                await call()
            assert (caught.value.reason, caught.value.detail) == ("not_a_member", "join again")
    assert ear.count == 0


async def test_a_refusal_for_now_carries_its_pause_and_is_a_link_error(
    autojump_clock, server: Server
) -> None:
    server.answer = refusal(503, "starting", "the learner starts", retry_after_s=2.5)
    async with server.open() as http:
        with pytest.raises(HttpError) as caught:
            await client_of(http).leases(Version(0), 1, 0.0)
    assert isinstance(caught.value, BusyError)
    assert (caught.value.reason, caught.value.retry_after_s) == ("starting", 2.5)
    assert str(caught.value) == "the learner starts (again in 2 s)"


@pytest.mark.parametrize(
    "answer",
    [
        Response(404, b"<html>nothing here</html>"),
        Response(502, b""),
        Response(301, codec.encode(Left())),
        Response(500, b"\x91" * 1000),
    ],
    ids=["html", "empty", "another message", "deep"],
)
def test_an_answer_that_is_no_refusal_of_ours_may_pass_and_is_tried_again(
    answer: Response,
) -> None:
    with pytest.raises(HttpError, match=f"{answer.status}.*coordinator") as caught:
        checked(answer, Left)
    assert not isinstance(caught.value, BusyError)


@pytest.mark.parametrize("body", [b"", b"hello", codec.encode(BEAT)])
def test_a_good_status_with_something_else_inside_is_the_servers_fault(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        checked(Response(200, body), Left)


async def test_the_authority_is_asked_for_without_a_secret(autojump_clock, server: Server) -> None:
    async with server.open() as http:
        assert await fetch_ca(http) == ANSWERS["/ca"]
    (request,) = server.asked
    assert "authorization" not in request.headers


async def test_a_join_shows_the_token_and_gives_the_reply(autojump_clock, server: Server) -> None:
    async with open_bench(SimDisk()) as bench, server.open() as http:
        request = bench.request("p")
        reply = await bench.join("p")
        server.answer = Response(200, codec.encode(reply))
        assert await join(http, "e2p-token", request) == reply
        server.answer = refusal(409, "identity_live", "wait", retry_after_s=7.0)
        with pytest.raises(BusyError) as caught:
            await join(http, "e2p-token", request)
        assert caught.value.retry_after_s == 7.0
    asked = server.asked[0]
    assert asked.headers["authorization"] == "Bearer e2p-token"
    assert codec.decode(asked.body, type(request)) == request
