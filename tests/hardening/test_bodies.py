"""Hostile uploads on real sockets: each is answered by its name, and the books balance.

A real aiohttp server in front of the real routes and the real book; whoever sends is a script.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgpack
import msgspec
import pytest
import trio

from coordinator.api import Api, Secrets
from coordinator.config import RolloutsSection
from echo2p2p.limits import HTTP_BODY_BYTES_MAX, MIB
from echo2p2p.net import routing
from echo2p2p.net.aio import AioHttpClients, AioHttpServer, HttpLimits, open_aio
from echo2p2p.net.ports import Endpoint, HttpClient, Response
from echo2p2p.net.trust import JoinToken
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.system import SimEntropy
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_logprobs, from_tokens
from echo2p2p.wire.messages import (
    CaReply,
    JoinReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Outcome,
    Refusal,
    Sample,
    Span,
    Upload,
    UploadReply,
)
from scenarios.middle import Bench, heartbeat, open_bench, right_answers, sample

LIMITS = HttpLimits(close_s=0.2, bodies_bytes_max_each=3 * MIB)


@dataclass
class Front:
    """A served bench and a client of it."""

    bench: Bench
    http: HttpClient
    at: Endpoint
    token: JoinToken
    credentials: dict[str, str] = field(default_factory=dict)

    async def join(self, name: str) -> None:
        """Become a member with a proved version."""
        answer = await self.http.request(
            "POST",
            "/join",
            body=codec.encode(self.bench.request(name)),
            headers={"authorization": f"Bearer {self.token.encode()}"},
            timeout_s=10.0,
        )
        self.credentials[name] = codec.decode(answer.body, JoinReply).credential
        assert (await self.post("/heartbeat", codec.encode(heartbeat(1, 0)), name)).status == 200

    async def post(
        self, path: str, body: bytes, name: str = "p", headers: dict[str, str] | None = None
    ) -> Response:
        """Send a member's body as it is."""
        secret = {"authorization": f"Bearer {self.credentials[name]}"}
        return await self.http.request(
            "POST", path, body=body, headers=secret | (headers or {}), timeout_s=20.0
        )

    async def leases(self, count: int, name: str = "p") -> list[Lease]:
        """Take work."""
        asked = LeaseRequest(incarnation=1, version=0, leases_max=count, wait_s=0.0)
        answer = await self.post("/lease", codec.encode(asked), name)
        leases = codec.decode(answer.body, LeaseReply).leases
        assert len(leases) == count
        return leases

    async def say(self, *pieces: bytes, hang_up: bool = False) -> bytes:
        """Send bytes, end the sending side if told, and return all that comes."""
        heard = b""
        async with await trio.open_tcp_stream(self.at.host, self.at.port) as stream:
            with contextlib.suppress(trio.BrokenResourceError):
                for piece in pieces:
                    await stream.send_all(piece)
                if hang_up:
                    await stream.send_eof()
                async for data in stream:
                    heard += data
        return heard

    def head(self, name: str, *lines: str) -> bytes:
        """Return the head of an upload."""
        first = ("POST /upload HTTP/1.1", "Host: h", "Connection: close")
        secret = f"Authorization: Bearer {self.credentials.get(name, 'e2c-nobody')}"
        return "\r\n".join((*first, secret, *lines, "", "")).encode()

    async def check(self) -> None:
        """The server lives, takes good work, and nothing is lost or counted twice."""
        assert (await self.http.request("GET", "/healthz", timeout_s=5.0)).status == 200
        balance, recounted = self.bench.book.ledger.statistics(), await self.bench.book.recount()
        assert balance.balances
        assert balance == recounted
        assert self.bench.journal.named(routing.HANDLER_FAILED) == []


@contextlib.asynccontextmanager
async def open_front(limits: HttpLimits = LIMITS) -> AsyncIterator[Front]:
    """Serve a bench with members p and q."""
    async with open_bench(SimDisk(sync_s=0.0)) as bench, open_aio(bench.journal) as aio:
        token = JoinToken.create(SimEntropy("front"), bench.keys.public_key)
        ca = CaReply(run_public_key=bench.keys.public_key, certificate=b"")
        routes = Api(
            secrets=Secrets(token, "e2a-x", False, ca),
            state=bench.state,
            roster=bench.roster,
            desk=bench.desk,
            intake=bench.intake,
            publisher=None,
            status=None,
            stop=None,
            journal=bench.journal,
        ).routes()
        with trio.fail_after(60):
            async with AioHttpServer(aio, None, bench.journal, limits).serve(
                routes, Endpoint("127.0.0.1", 0)
            ) as at:
                url = f"http://{at.host}:{at.port}"
                async with AioHttpClients(aio).connect(url, None) as http:
                    front = Front(bench, http, at, token)
                    await front.join("p")
                    await front.join("q")
                    yield front
                    await front.check()


@pytest.fixture
async def front():
    async with open_front() as opened:
        yield opened


def refusal(answer: Response) -> tuple[int, str]:
    return answer.status, codec.decode(answer.body, Refusal).reason


def outcome(answer: Response) -> Outcome:
    assert answer.status == 200, codec.decode(answer.body, Refusal)
    return codec.decode(answer.body, UploadReply).outcome


def changed(upload: Upload, **fields: object) -> Upload:
    """Return the upload with its first sample changed."""
    first = msgspec.structs.replace(upload.samples[0], **fields)
    return msgspec.structs.replace(upload, samples=[first, *upload.samples[1:]])


def plain(upload: Upload) -> dict[str, object]:
    return msgpack.unpackb(codec.encode(upload), raw=False)


# --- what is not a message --------------------------------------------------------------------


def with_field(upload: Upload) -> bytes:
    return msgpack.packb({**plain(upload), "reward": 1.0})


def with_field_in_sample(upload: Upload) -> bytes:
    body = plain(upload)
    body["samples"][0]["reward"] = 1.0
    return msgpack.packb(body)


def without_field(upload: Upload) -> bytes:
    body = plain(upload)
    del body["lease_id"]
    return msgpack.packb(body)


def with_lying_length(upload: Upload) -> bytes:
    body = plain(upload)
    body["samples"][0]["tokens"]["length"] += 1
    return msgpack.packb(body)


def with_text_for_bytes(upload: Upload) -> bytes:
    body = plain(upload)
    body["samples"][0]["tokens"]["data"] = "AAAA"
    return msgpack.packb(body)


def with_extension(upload: Upload) -> bytes:
    body = plain(upload)
    body["seconds"] = msgpack.ExtType(5, b"x")
    return msgpack.packb(body)


NOT_MESSAGES: list[Callable[[Upload], bytes]] = [
    with_field,
    with_field_in_sample,
    without_field,
    with_text_for_bytes,
    with_extension,
    lambda upload: b"",
    lambda upload: codec.encode(upload)[:-1],
    lambda upload: codec.encode(upload)[: len(codec.encode(upload)) // 2],
    lambda upload: codec.encode(upload) + b"\x00",
    lambda upload: b"{}",
    lambda upload: gzip.compress(codec.encode(upload)),
]


async def test_what_is_no_upload_is_malformed_and_its_lease_stays_open(front: Front) -> None:
    (lease,) = await front.leases(1)
    good = right_answers(lease, 1)
    for spoil in NOT_MESSAGES:
        assert refusal(await front.post("/upload", spoil(good))) == (400, "malformed")
        await front.check()
    assert front.bench.book.ledger.statistics().in_flight == 2
    assert outcome(await front.post("/upload", codec.encode(good))).accepted


async def test_any_single_damage_to_an_upload_is_answered_and_counted_once(front: Front) -> None:
    rng = random.Random(5)
    answered = {200: 0, 400: 0}
    for _ in range(4):
        leases = await front.leases(1)
        good = bytearray(codec.encode(right_answers(leases[0], 1)))
        for _ in range(60):
            bad = bytearray(good)
            at = rng.randrange(len(bad))
            match rng.randrange(3):
                case 0:
                    bad[at] ^= 1 << rng.randrange(8)
                case 1:
                    del bad[at : at + rng.randrange(1, 20)]
                case 2:
                    bad[at:at] = rng.randbytes(rng.randrange(1, 20))
            answer = await front.post("/upload", bytes(bad))
            assert answer.status in {200, 400, 403}, codec.decode(answer.body, Refusal)
            answered[answer.status] = answered.get(answer.status, 0) + 1
        await front.check()
        await front.bench.desk.end_peer(front.bench.member("p").peer_id, 1)
    assert answered[200] > 10
    assert answered[400] > 100


# --- what is a message, and wrong -------------------------------------------------------------


def logprobs(*values: float) -> Callable[[Upload], Upload]:
    tokens = from_tokens([5] * (len(values) - 1) + [2])
    spans = [Span(version=0, start=0, end=len(values))]
    return lambda upload: changed(
        upload, tokens=tokens, logprobs=from_logprobs(list(values)), spans=spans
    )


WRONG: list[tuple[str, Callable[[Upload], Upload]]] = [
    ("not_finite", logprobs(math.nan, -1.0)),
    ("not_finite", logprobs(math.inf)),
    ("not_finite", logprobs(-1.0, -math.inf)),
    ("not_finite", logprobs(0.5, -1.0)),
    ("malformed", lambda up: changed(up, logprobs=from_logprobs([-0.5, -0.5]))),
    ("malformed", lambda up: changed(up, logprobs=from_logprobs([]))),
    ("malformed", lambda up: changed(up, tokens=from_tokens([]), logprobs=from_logprobs([]))),
    ("malformed", lambda up: changed(up, finish="length")),
    ("malformed", lambda up: changed(up, spans=[])),
    ("malformed", lambda up: changed(up, spans=[Span(version=0, start=0, end=9)])),
    ("malformed", lambda up: changed(up, spans=[Span(version=0, start=-1, end=1)])),
    ("malformed", lambda up: msgspec.structs.replace(up, samples=up.samples[:1])),
    ("malformed", lambda up: msgspec.structs.replace(up, samples=up.samples * 2)),
    ("malformed", lambda up: msgspec.structs.replace(up, samples=[*up.samples, sample([5], 0)])),
    ("malformed", lambda up: changed(up, tokens=from_logprobs([1.0]))),
    (
        "malformed",
        lambda up: changed(up, tokens=msgspec.structs.replace(from_tokens([2]), length=2)),
    ),
    ("malformed", lambda up: msgspec.structs.replace(up, samples=[long(), *up.samples[1:]])),
    ("out_of_vocabulary", lambda up: changed(up, **of(sample([64, 2], 0)))),
    ("out_of_vocabulary", lambda up: changed(up, **of(sample([2**32 - 1, 2], 0)))),
    ("unknown_version", lambda up: changed(up, spans=[Span(version=10**9, start=0, end=1)])),
    ("unknown_version", lambda up: changed(up, spans=[Span(version=2**63, start=0, end=1)])),
    ("aborted", lambda up: msgspec.structs.replace(up, samples=[])),
    ("aborted", lambda up: changed(up, finish="aborted")),
]


def of(one: Sample) -> dict[str, object]:
    return msgspec.structs.asdict(one)


def long() -> Sample:
    """Return far more tokens than the lease allows."""
    return sample([5] * 100_000 + [2], 0)


@pytest.mark.parametrize(("reason", "spoil"), WRONG)
async def test_a_wrong_upload_is_refused_by_its_reason_and_ends_its_lease(
    front: Front, reason: str, spoil: Callable[[Upload], Upload]
) -> None:
    lease, other = await front.leases(2)
    upload = spoil(right_answers(lease, 1))
    said = outcome(await front.post("/upload", codec.encode(upload)))
    assert (said.accepted, said.reason) == (False, reason)
    balance = front.bench.book.ledger.statistics()
    assert (balance.rejected, balance.in_flight) == ({reason: 2}, 2)
    again = outcome(await front.post("/upload", codec.encode(right_answers(lease, 1))))
    assert (again.accepted, again.reason) == (False, reason), "the first decision stays"
    assert outcome(await front.post("/upload", codec.encode(right_answers(other, 1)))).accepted


async def test_leases_of_nobody_and_of_others_are_named_and_not_touched(front: Front) -> None:
    (lease,) = await front.leases(1, "q")
    theirs = right_answers(lease, 1)
    said = outcome(await front.post("/upload", codec.encode(theirs)))
    assert (said.accepted, said.reason) == (False, "not_yours")
    for name in ("0" * 32, "", "x" * 100_000, lease.lease_id.upper() + "'; DROP TABLE leases"):
        nobodys = msgspec.structs.replace(theirs, lease_id=name)
        said = outcome(await front.post("/upload", codec.encode(nobodys)))
        assert (said.accepted, said.reason) == (False, "unknown_lease")
    other = msgspec.structs.replace(theirs, incarnation=2)
    assert refusal(await front.post("/upload", codec.encode(other), "q")) == (
        403,
        "wrong_incarnation",
    )
    assert front.bench.book.ledger.statistics().rejected == {}
    assert outcome(await front.post("/upload", codec.encode(theirs), "q")).accepted
    said = outcome(await front.post("/upload", codec.encode(theirs)))
    assert (said.accepted, said.reason) == (False, "not_yours"), "nor when it is decided"


# --- the same again ---------------------------------------------------------------------------


async def ten_times(front: Front, body: bytes) -> list[UploadReply]:
    replies = []

    async def send() -> None:
        replies.append(codec.decode((await front.post("/upload", body)).body, UploadReply))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(send)
    return replies


async def test_the_same_upload_ten_times_at_once_is_accepted_once(front: Front) -> None:
    (lease,) = await front.leases(1)
    replies = await ten_times(front, codec.encode(right_answers(lease, 1)))
    assert all(reply.outcome.accepted for reply in replies)
    assert sorted(reply.duplicate for reply in replies) == [False] + [True] * 9
    balance = front.bench.book.ledger.statistics()
    assert (balance.queued, balance.in_flight, balance.rejected) == (2, 0, {})
    assert front.bench.intake.unscored == 1


async def test_the_same_wrong_upload_ten_times_at_once_is_counted_once(front: Front) -> None:
    (lease,) = await front.leases(1)
    bad = changed(right_answers(lease, 1), **of(sample([64, 2], 0)))
    replies = await ten_times(front, codec.encode(bad))
    assert {reply.outcome.reason for reply in replies} == {"out_of_vocabulary"}
    assert front.bench.book.ledger.statistics().rejected == {"out_of_vocabulary": 2}


# --- bytes ------------------------------------------------------------------------------------


async def test_a_body_that_breaks_off_decides_nothing(front: Front) -> None:
    (lease,) = await front.leases(1)
    body = codec.encode(right_answers(lease, 1))
    for whole in (f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"):
        piece = body[:40] if "Length" in whole else b"28\r\n" + body[:40]
        assert await front.say(front.head("p", whole), piece, hang_up=True) == b""
        await front.check()
    assert front.bench.book.ledger.statistics().in_flight == 2
    assert outcome(await front.post("/upload", body)).accepted


async def test_too_long_a_body_is_refused_without_a_byte_of_it(front: Front) -> None:
    too_long = f"Content-Length: {HTTP_BODY_BYTES_MAX + 1}"
    heard = await front.say(front.head("p", too_long))
    assert heard.startswith(b"HTTP/1.1 413 ")
    for path in ("/heartbeat", "/lease", "/leave", "/manifests"):
        assert refusal(await front.post(path, bytes(MIB + 1))) == (413, "body_too_long")


async def test_a_stranger_is_refused_without_a_byte_of_the_body(front: Front) -> None:
    heard = await front.say(front.head("nobody", f"Content-Length: {50 * MIB}"))
    assert heard.startswith(b"HTTP/1.1 401 ")
    join = b"POST /join HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n"
    assert (await front.say(join)).startswith(b"HTTP/1.1 401 ")


async def test_compressed_bodies_are_not_inflated(front: Front) -> None:
    (lease,) = await front.leases(1)
    bomb = gzip.compress(bytes(50 * MIB))
    assert len(bomb) < 100_000
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP"):
        answer = await front.post("/upload", bomb, headers={"Content-Encoding": encoding})
        assert refusal(answer) == (415, "encoded_body")
    coded = front.head("p", "Transfer-Encoding: gzip, chunked")
    heard = await front.say(coded, b"%x\r\n" % len(bomb) + bomb + b"\r\n0\r\n\r\n")
    assert heard.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    assert outcome(await front.post("/upload", codec.encode(right_answers(lease, 1)))).accepted


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\x91\xc0", b"\xa0"])
async def test_a_messagepack_bomb_costs_no_more_memory_than_its_bytes(
    front: Front, item: bytes
) -> None:
    row = b"\xdc\xff\xff" + item * 65535
    head = b"\x85\xa1t\xa6upload\xabincarnation\x01\xa8lease_id\xa1x\xa7seconds\x00\xa7samples"
    bomb = head + b"\xdc\x00\x10" + row * 16
    deep = head + b"\x91" * 500_000 + b"\xc0"
    for body in (bomb, deep):
        tracemalloc.start()
        try:
            assert refusal(await front.post("/upload", body)) == (400, "malformed")
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 4 * len(body) + MIB


async def test_one_member_cannot_take_the_room_of_all(front: Front) -> None:
    (lease,) = await front.leases(1, "q")
    half = front.head("p", f"Content-Length: {2 * MIB}")
    async with await trio.open_tcp_stream(front.at.host, front.at.port) as slow:
        await slow.send_all(half + bytes(1000))
        heard = b""
        while not heard:
            with trio.move_on_after(1.0):  # until the first head was read
                heard = await front.say(half)
        assert heard.startswith(b"HTTP/1.1 429 ")
        assert b"Retry-After: 1" in heard
        assert b"too_much_at_once" in heard
        assert outcome(await front.post("/upload", codec.encode(right_answers(lease, 1)), "q"))
    body = codec.encode(LeaseRequest(incarnation=1, version=0, leases_max=1, wait_s=0.0))
    assert (await front.post("/lease", body)).status == 200


async def test_while_too_much_waits_to_be_scored_uploads_are_put_off_and_nothing_is_lost(
    front: Front,
) -> None:
    first, second = await front.leases(2)
    front.bench.intake._backlog_bytes_max = 1
    assert outcome(await front.post("/upload", codec.encode(right_answers(first, 1)))).accepted
    heard = await front.say(front.head("p", "Content-Length: 1000000"))
    assert heard.startswith(b"HTTP/1.1 429 ")
    assert b"Retry-After: 2" in heard
    body = codec.encode(right_answers(second, 1))
    answer = await front.post("/upload", body)
    assert refusal(answer) == (429, "intake_full")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(front.bench.intake.run)
        while front.bench.intake.full:
            await front.bench.state.changed.park()
        assert outcome(await front.post("/upload", body)).accepted
        while len(front.bench.queue) < 2:
            await front.bench.state.changed.park()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("samples", "tokens"), [(2, 1), (2, 8), (8, 256), (16, 4096), (1024, 64)])
def test_the_longest_honest_upload_fits(samples: int, tokens: int) -> None:
    section = RolloutsSection(samples_per_prompt=samples, tokens_max=tokens)
    one = Sample(
        tokens=from_tokens([2**31] * tokens),
        logprobs=from_logprobs([-1.0] * tokens),
        spans=[Span(version=2**40, start=2**20, end=2**20)] * min(8, tokens),
        finish="length",
    )
    upload = Upload(incarnation=2**40, lease_id="x" * 64, samples=[one] * samples, seconds=1.0)
    assert len(codec.encode(upload)) < section.upload_bytes_max <= HTTP_BODY_BYTES_MAX
