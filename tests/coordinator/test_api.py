"""Every route: who may call it, what it refuses and why, and what it answers."""

import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import membership, report
from coordinator.api import COUNT_MAX, HOLDINGS_MAX, JOIN_BYTES_MAX, WAIT_S_MAX, Api, Secrets
from echo2p2p.ids import ManifestId, PeerId, Version
from echo2p2p.net import routing
from echo2p2p.net.ports import Request, Response
from echo2p2p.net.trust import JoinToken, draw_admin_token
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.system import SimEntropy
from echo2p2p.wire import codec
from echo2p2p.wire.messages import (
    Address,
    CaReply,
    HeartbeatReply,
    JoinReply,
    LeaseReply,
    LeaseRequest,
    Leave,
    Left,
    ManifestsReply,
    ManifestsRequest,
    Measurements,
    Message,
    Refusal,
    Signed,
    Upload,
    UploadReply,
)
from scenarios.middle import LAYOUT, Bench, heartbeat, open_bench, right_answers

MANIFEST = ManifestId(bytes(range(16)))
MEMBER_ROUTES = ["/heartbeat", "/manifests", "/lease", "/upload", "/leave"]


class Shelf:
    """Stands for the publisher: one payload of one chunk, and paths that are noted."""

    def __init__(self) -> None:
        self.asked: list[tuple[Version | None, float]] = []

    async def path(self, member: PeerId, have: Version | None, wait_s: float) -> list[Signed]:
        """Note the question."""
        assert member
        self.asked.append((have, wait_s))
        return [Signed(body=b"manifest", signature=b"s")]

    def chunk(self, identity: ManifestId, index: int) -> memoryview | None:
        """Return the only chunk."""
        return memoryview(b"chunk 0") if (identity, index) == (MANIFEST, 0) else None


class Front:
    """The routes over a bench, asked without a network."""

    def __init__(self, bench: Bench, *, tls: bool = False) -> None:
        entropy = SimEntropy("front")
        self.bench = bench
        self.shelf = Shelf()
        self.stopped = 0
        self.admin = draw_admin_token(entropy)
        self.token = JoinToken.create(entropy, bench.keys.public_key)
        self.credentials: dict[str, str] = {}
        self.ca = CaReply(run_public_key=bench.keys.public_key, certificate=b"pem")
        self.api = Api(
            secrets=Secrets(self.token, self.admin, tls, self.ca),
            state=bench.state,
            roster=bench.roster,
            desk=bench.desk,
            intake=bench.intake,
            publisher=self.shelf,
            status=self.status,
            stop=self.stop,
            journal=bench.journal,
            model_files={"tokenizer.json": b"{}"},
        )
        self.router = routing.Router(self.api.routes())

    async def status(self) -> dict[str, object]:
        """Return a summary as the app makes it."""
        book, state = self.bench.book, self.bench.state
        return {
            "outcome": state.outcome,
            "step": state.step,
            "latest": state.latest,
            "nan": math.nan,
            **report.Progress(began_s=0.0).summary(1.0),
            "trajectories": report.trajectories(book.ledger.statistics(), await book.recount()),
            "traffic": await self.bench.roster.relayed_bytes(),
            "peers": [
                {"peer": member.peer_id, "state": member.state, "version": member.version}
                for member in state.members.live()
            ],
        }

    def stop(self) -> None:
        """Count."""
        self.stopped += 1

    async def ask(
        self,
        method: str,
        path: str,
        message: Message | bytes = b"",
        *,
        secret: str | None = None,
        scheme: str = "Bearer",
        certificate: bytes | None = None,
    ) -> Response:
        """Send one request."""
        found = self.router.find(method, path)
        assert isinstance(found, routing.Match), found
        body = message if isinstance(message, bytes) else codec.encode(message)
        return await found.route.handler(
            Request(
                method=method,
                path=path,
                query=found.parts,
                headers={} if secret is None else {"authorization": f"{scheme} {secret}"},
                body=body,
                client_certificate=certificate,
            )
        )

    async def join(self, who: str, **changes: object) -> Response:
        """Join with the token; keeps the credential of who is taken."""
        request = msgspec.structs.replace(self.bench.request(who), **changes)
        response = await self.ask("POST", "/join", request, secret=self.token.encode())
        if response.status == 200:
            self.credentials[who] = codec.decode(response.body, JoinReply).credential
        return response

    async def post(self, path: str, message: Message | bytes, name: str = "p") -> Response:
        """Send a member's request."""
        return await self.ask("POST", path, message, secret=self.credentials[name])


@asynccontextmanager
async def open_front(tls: bool = False) -> AsyncIterator[Front]:
    async with open_bench(SimDisk(), tls=tls) as bench:
        yield Front(bench, tls=tls)


@pytest.fixture
async def front():
    async with open_front() as opened:
        yield opened


def refused(response: Response, status: int, reason: str) -> Refusal:
    refusal = codec.decode(response.body, Refusal)
    assert (response.status, refusal.reason) == (status, reason), refusal.detail
    assert refusal.detail
    return refusal


def body_for(path: str, incarnation: int = 1) -> Message:
    """Return a good body of a member's route."""
    return {
        "/heartbeat": heartbeat(incarnation, 0),
        "/manifests": ManifestsRequest(incarnation=incarnation, have_version=None, wait_s=0.0),
        "/lease": LeaseRequest(incarnation=incarnation, version=0, leases_max=1, wait_s=0.0),
        "/upload": Upload(incarnation=incarnation, lease_id="f" * 32, samples=[], seconds=0.0),
        "/leave": Leave(incarnation=incarnation, reason="bye"),
    }[path]


# --- who may do what --------------------------------------------------------------------------


async def test_anybody_may_ask_for_the_authority_and_for_health(
    autojump_clock, front: Front
) -> None:
    answer = await front.ask("GET", "/ca")
    assert codec.decode(answer.body, CaReply) == front.ca
    for outcome, status in [("running", 200), ("finished", 200), ("failed", 503)]:
        front.bench.state.outcome = outcome
        answer = await front.ask("GET", "/healthz")
        assert (answer.status, answer.body) == (status, outcome.encode())


Secret = Callable[[Front], str | None]
STRANGERS: dict[str, Secret] = {
    "nothing": lambda front: None,
    "the join token": lambda front: front.token.encode(),
    "the admin token": lambda front: front.admin,
    "an invented credential": lambda front: "e2c-" + "A" * 43,
    "an empty secret": lambda front: "",
    "bytes that are no text": lambda front: "e2c-\udcff\udcfe",
}


@pytest.mark.parametrize("path", [*MEMBER_ROUTES, f"/chunk/{MANIFEST.hex()}/0"])
@pytest.mark.parametrize("stranger", STRANGERS)
async def test_only_a_members_credential_opens_a_members_route(
    autojump_clock, front: Front, path: str, stranger: str
) -> None:
    await front.join("p")
    method, body = ("GET", b"") if path.startswith("/chunk") else ("POST", body_for(path))
    secret = STRANGERS[stranger](front)
    refused(await front.ask(method, path, body, secret=secret), 401, "not_a_member")
    good = front.credentials["p"]
    refused(await front.ask(method, path, body, secret=good, scheme="Basic"), 401, "not_a_member")
    assert (await front.ask(method, path, body, secret=good, scheme="bearer")).status == 200


@pytest.mark.parametrize("stranger", [name for name in STRANGERS if name != "the join token"])
async def test_only_the_join_token_opens_the_join(
    autojump_clock, front: Front, stranger: str
) -> None:
    secret = STRANGERS[stranger](front)
    request = front.bench.request("p")
    refused(await front.ask("POST", "/join", request, secret=secret), 401, "wrong_token")
    assert front.bench.state.members.live() == []


async def test_another_runs_token_and_a_members_credential_do_not_open_the_join(
    autojump_clock, front: Front
) -> None:
    await front.join("p")
    other = JoinToken.create(SimEntropy("other"), front.bench.keys.public_key)
    for secret in (other.encode(), front.credentials["p"], front.token.encode()[:-1]):
        answer = await front.ask("POST", "/join", front.bench.request("q"), secret=secret)
        refused(answer, 401, "wrong_token")


@pytest.mark.parametrize(("method", "path"), [("GET", "/status"), ("POST", "/control/stop")])
async def test_only_the_admin_token_opens_status_and_control(
    autojump_clock, front: Front, method: str, path: str
) -> None:
    await front.join("p")
    wrong = [STRANGERS[name](front) for name in STRANGERS if name != "the admin token"]
    for secret in [*wrong, front.credentials["p"], front.admin[:-1]]:
        refused(await front.ask(method, path, secret=secret), 401, "wrong_admin_token")
    assert front.stopped == 0
    assert (await front.ask(method, path, secret=front.admin)).status in {200, 202}


@pytest.mark.parametrize("path", MEMBER_ROUTES)
async def test_a_credential_ends_with_its_membership(
    autojump_clock, front: Front, path: str
) -> None:
    await front.join("p")
    old = front.credentials["p"]
    assert (await front.post("/leave", body_for("/leave"))).status == 200
    refused(await front.post(path, body_for(path)), 401, "not_a_member")
    await front.join("p")
    refused(await front.ask("POST", path, body_for(path, 1), secret=old), 401, "not_a_member")
    assert (await front.post(path, body_for(path, 2))).status == 200


@pytest.mark.parametrize("path", MEMBER_ROUTES)
async def test_a_credential_speaks_for_its_own_incarnation_only(
    autojump_clock, front: Front, path: str
) -> None:
    await front.join("p")
    refused(await front.post(path, body_for(path, incarnation=2)), 403, "wrong_incarnation")
    assert len(front.bench.state.members.live()) == 1


async def test_another_members_credential_does_not_help_with_a_lease(
    autojump_clock, front: Front
) -> None:
    await front.join("p")
    await front.join("q")
    for name in "pq":
        await front.post("/heartbeat", heartbeat(1, 0), name)
    answer = await front.post("/lease", body_for("/lease"))
    (lease,) = codec.decode(answer.body, LeaseReply).leases
    upload = right_answers(lease, 1)
    stolen = codec.decode((await front.post("/upload", upload, "q")).body, UploadReply)
    assert stolen.outcome.reason == "not_yours"
    own = codec.decode((await front.post("/upload", upload)).body, UploadReply)
    assert own.outcome.accepted
    (row,) = await front.bench.book.queued()
    assert row.upload == upload


# --- TLS --------------------------------------------------------------------------------------


async def test_with_tls_the_credential_must_come_with_its_own_certificate(autojump_clock) -> None:
    def der(pem: bytes) -> bytes:
        return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)

    async with open_front(tls=True) as front:
        leaves: dict[str, bytes] = {}
        for name in "pq":
            front.bench.request(name)
            csr, _ = front.bench.identities[name].make_csr(SimEntropy(name))
            request = front.bench.request(name, csr=csr)
            answer = await front.ask("POST", "/join", request, secret=front.token.encode())
            reply = codec.decode(answer.body, JoinReply)
            front.credentials[name], leaves[name] = reply.credential, der(reply.certificate)
        authority = front.bench.roster._authority
        assert authority is not None
        leaves["coordinator"] = der(authority.issue_coordinator(["127.0.0.1"])[0])
        for certificate in (None, leaves["q"], leaves["coordinator"], b"no certificate"):
            answer = await front.ask(
                "POST",
                "/heartbeat",
                heartbeat(1, 0),
                secret=front.credentials["p"],
                certificate=certificate,
            )
            refused(answer, 401, "wrong_certificate")
        answer = await front.ask(
            "POST",
            "/heartbeat",
            heartbeat(1, 0),
            secret=front.credentials["p"],
            certificate=leaves["p"],
        )
        assert answer.status == 200


# --- what is malformed ------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*MEMBER_ROUTES, "/join"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"<html>",
        codec.encode(Left()),
        b"\x81\xa1t\xa4join",
        b"\x91" * 1000,
    ],
    ids=["empty", "not msgpack", "text", "another message", "fields missing", "deep"],
)
async def test_a_malformed_body_is_refused_with_its_reason_and_changes_nothing(
    autojump_clock, front: Front, path: str, body: bytes
) -> None:
    await front.join("p")
    secret = front.token.encode() if path == "/join" else front.credentials["p"]
    refused(await front.ask("POST", path, body, secret=secret), 400, "malformed")
    assert len(front.bench.state.members.live()) == 1


async def test_a_join_that_would_fill_the_store_is_malformed(autojump_clock, front: Front) -> None:
    request = front.bench.request("p", csr=bytes(JOIN_BYTES_MAX))
    answer = await front.ask("POST", "/join", codec.encode(request), secret=front.token.encode())
    refused(answer, 400, "malformed")
    assert await front.bench.book.members() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "x" * 101},
        {"name": "\x1b[2Jbox"},
        {"relay": Address(host="h", port=0)},
        {"relay": Address(host="h", port=65536)},
        {"relay": Address(host="h", port=-1)},
        {"relay": Address(host="", port=1)},
        {"relay": Address(host="a\0b", port=1)},
        {"relay": Address(host="h" * 256, port=1)},
        {"relay": Address(host="h\u00f6st", port=1)},
    ],
)
async def test_names_and_addresses_that_would_harm_others_are_malformed(
    autojump_clock, front: Front, changes: dict
) -> None:
    refused(await front.join("p", **changes), 400, "malformed")
    assert front.bench.state.members.live() == []


async def test_long_names_and_hosts_pass_up_to_their_limit(autojump_clock, front: Front) -> None:
    request = front.bench.request("x" * 100)
    request = msgspec.structs.replace(request, relay=Address(host="h" * 255, port=65535))
    answer = await front.ask("POST", "/join", request, secret=front.token.encode())
    assert answer.status == 200


def said(**changes: int) -> Measurements:
    return msgspec.structs.replace(membership.NO_MEASUREMENTS, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        *({"measurements": said(relayed_bytes=lie)} for lie in (-1, COUNT_MAX + 1, 2**64 - 1)),
        {"measurements": said(received_bytes=-1)},
        {"measurements": said(duplicate_bytes=-1)},
        {"measurements": said(tokens_generated=-1)},
        {"measurements": said(queue_leases=COUNT_MAX + 1)},
        {"version": -1},
        {"version": COUNT_MAX + 1},
        *({"price_usd_per_hour": lie} for lie in (-0.01, math.nan, math.inf)),
        *({"available_s": lie} for lie in (-1.0, math.nan, math.inf)),
        {"holdings": [bytes(16)] * (HOLDINGS_MAX + 1)},
        {"holdings": [bytes(100_000)]},
    ],
    ids=str,
)
async def test_figures_that_cannot_be_are_malformed_and_do_not_renew_the_term(
    autojump_clock, front: Front, changes: dict
) -> None:
    await front.join("p")
    before = front.bench.member("p")
    beat = msgspec.structs.replace(heartbeat(1, 0), **changes)
    refused(await front.post("/heartbeat", beat), 400, "malformed")
    assert front.bench.member("p") == before


async def test_the_largest_figures_pass_and_can_be_stored_summed_and_shown(
    autojump_clock, front: Front
) -> None:
    for name in "pq":
        await front.join(name)
        beat = heartbeat(1, 0, measurements=said(relayed_bytes=COUNT_MAX))
        assert (await front.post("/heartbeat", beat, name)).status == 200
    await front.post("/leave", body_for("/leave"), "q")
    status = await front.ask("GET", "/status", secret=front.admin)
    assert json.loads(status.body)["traffic"] == 2 * COUNT_MAX


ROUTES = [*MEMBER_ROUTES, "/join"]
GOOD = [codec.encode(body_for(path)) for path in MEMBER_ROUTES]


def damaged(good: bytes) -> st.SearchStrategy[bytes]:
    edits = st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=3)

    def apply(drawn: list[tuple[int, int]]) -> bytes:
        changed = bytearray(good)
        for position, value in drawn:
            changed[position] = value
        return bytes(changed)

    return edits.map(apply)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(ROUTES), st.binary(max_size=40) | st.sampled_from(GOOD).flatmap(damaged)
        ),
        max_size=8,
    )
)
def test_no_body_makes_a_handler_fail(requests: list[tuple[str, bytes]]) -> None:
    async def main() -> None:
        async with open_front() as front:
            await front.join("p")
            for path, body in requests:
                secret = front.token.encode() if path == "/join" else front.credentials["p"]
                answer = await front.ask("POST", path, body, secret=secret)
                assert answer.status in {200, 400, 401, 403}
                if answer.status != 200:
                    codec.decode(answer.body, Refusal)

    run_virtual(main, seed=1)


# --- joining ----------------------------------------------------------------------------------


async def test_another_protocol_is_refused_with_both_numbers(autojump_clock, front: Front) -> None:
    refusal = refused(await front.join("p", protocol=7), 400, "wrong_protocol")
    assert "7" in refusal.detail
    assert "0" in refusal.detail
    assert refusal.retry_after_s is None


async def test_a_wrong_proof_is_refused_and_told_to_the_journal(
    autojump_clock, front: Front
) -> None:
    refused(await front.join("p", nonce=bytes(16)), 403, "bad_proof")
    (entry,) = front.bench.journal.named("join.refused")
    assert entry.fields["who"] == "p"


async def test_a_live_identity_is_told_when_to_ask_again_and_a_second_copy_that_it_is_one(
    autojump_clock, front: Front
) -> None:
    assert (await front.join("p")).status == 200
    first = front.credentials["p"]
    await trio.sleep(4.0)
    refusal = refused(await front.join("p"), 409, "identity_live")
    assert refusal.retry_after_s == pytest.approx(6.0, abs=0.1)
    for _ in range(3):
        await trio.sleep(2.0)
        await front.ask("POST", "/heartbeat", heartbeat(1, 0), secret=first)
    refusal = refused(await front.join("p"), 409, "identity_duplicate")
    assert refusal.retry_after_s is None
    assert (await front.ask("POST", "/heartbeat", heartbeat(1, 0), secret=first)).status == 200


async def test_a_full_run_says_when_to_ask_again(
    autojump_clock, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MEMBERS_MAX", 0)
    assert refused(await front.join("p"), 503, "full").retry_after_s == 60.0


async def test_while_the_learner_starts_joins_and_old_members_are_told_to_wait(
    autojump_clock,
) -> None:
    disk = SimDisk()
    async with open_bench(disk, seed=1) as bench:
        before = Front(bench)
        await before.join("p")
        disk.crash()
    async with open_bench(disk, seed=2, learner_up=False) as bench:
        front = Front(bench)
        front.credentials = before.credentials
        assert refused(await front.join("q"), 503, "starting").retry_after_s == 1.0
        # A 401 would make it give up its membership, and its leases with it.
        answer = await front.post("/heartbeat", heartbeat(1, 0))
        assert refused(answer, 503, "starting").retry_after_s == 1.0
        await bench.roster.load(LAYOUT.table)
        assert (await front.post("/heartbeat", heartbeat(1, 0))).status == 200
        front.credentials["p"] = "e2c-invented"
        refused(await front.post("/heartbeat", heartbeat(1, 0)), 401, "not_a_member")


# --- members ----------------------------------------------------------------------------------


async def test_a_heartbeat_renews_the_term_and_brings_news(autojump_clock, front: Front) -> None:
    await front.join("p")
    await trio.sleep(8.0)
    answer = codec.decode((await front.post("/heartbeat", heartbeat(1, 0))).body, HeartbeatReply)
    member = front.bench.member("p")
    assert member.term_end_s == pytest.approx(trio.current_time() + answer.term_s, abs=0.01)
    assert answer.now_s == front.bench.roster.now_s()
    assert (answer.latest_version, answer.outcomes) == (0, [])
    assert answer.plan == front.bench.roster.plan_for(member)


async def test_a_heartbeat_brings_what_became_of_uploads(autojump_clock, front: Front) -> None:
    await front.join("p")
    await front.post("/heartbeat", heartbeat(1, 0))
    leases = codec.decode(
        (
            await front.post(
                "/lease", LeaseRequest(incarnation=1, version=0, leases_max=2, wait_s=0.0)
            )
        ).body,
        LeaseReply,
    ).leases
    for lease in leases:
        await front.post("/upload", right_answers(lease, 1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(front.bench.intake.run)
        while not await front.bench.train():
            await front.bench.state.changed.park()
        nursery.cancel_scope.cancel()
    answer = codec.decode((await front.post("/heartbeat", heartbeat(1, 0))).body, HeartbeatReply)
    assert {item.lease_id for item in answer.outcomes} == {lease.lease_id for lease in leases}
    assert all(item.accepted for item in answer.outcomes)


@pytest.mark.parametrize(
    ("asked", "waited"),
    [(5.0, 5.0), (1e9, WAIT_S_MAX), (math.inf, WAIT_S_MAX), (-1.0, 0.0), (math.nan, 0.0)],
)
async def test_long_polls_are_bounded_by_us(
    autojump_clock, front: Front, asked: float, waited: float
) -> None:
    await front.join("p")  # and is still warming: there is no work for it
    began = trio.current_time()
    request = LeaseRequest(incarnation=1, version=0, leases_max=1, wait_s=asked)
    answer = codec.decode((await front.post("/lease", request)).body, LeaseReply)
    assert answer.leases == []
    assert trio.current_time() - began == pytest.approx(waited, abs=0.01)
    manifests = ManifestsRequest(incarnation=1, have_version=3, wait_s=asked)
    reply = codec.decode((await front.post("/manifests", manifests)).body, ManifestsReply)
    assert reply.path == [Signed(body=b"manifest", signature=b"s")]
    assert front.shelf.asked == [(3, waited)]


async def test_who_leaves_is_gone(autojump_clock, front: Front) -> None:
    await front.join("p")
    answer = await front.post("/leave", body_for("/leave"))
    assert codec.decode(answer.body, Left) == Left()
    assert front.bench.state.members.live() == []


async def test_chunks_and_tokenizers_are_served_as_they_are_and_others_are_not_found(
    autojump_clock, front: Front
) -> None:
    await front.join("p")
    secret = front.credentials["p"]

    async def get(path: str) -> Response:
        return await front.ask("GET", f"/chunk/{path}", secret=secret)

    found = await get(f"{MANIFEST.hex()}/0")
    assert (found.status, found.body) == (200, b"chunk 0")
    assert found.content_type == "application/octet-stream"
    for path in (f"{MANIFEST.hex()}/1", f"{MANIFEST.hex()}/-1", f"{'00' * 16}/0", "00/0"):
        refused(await get(path), 404, "no_such_chunk")
    for path in ("xyz/0", f"{MANIFEST.hex()}/zero", f"{MANIFEST.hex()}/{'9' * 5000}"):
        refused(await get(path), 400, "malformed")
    found = await front.ask("GET", "/model/tokenizer.json", secret=secret)
    assert (found.status, found.body) == (200, b"{}")
    refused(await front.ask("GET", "/model/config.json", secret=secret), 404, "no_such_file")
    refused(await front.ask("GET", "/model/tokenizer.json", secret="x"), 401, "not_a_member")


# --- the admin --------------------------------------------------------------------------------


async def test_the_status_is_json_whatever_the_figures(autojump_clock, front: Front) -> None:
    await front.join("p")
    await front.post("/heartbeat", heartbeat(1, 0))
    answer = await front.ask("GET", "/status", secret=front.admin)
    assert (answer.status, answer.content_type) == (200, "application/json")
    status = json.loads(answer.body)
    assert status["trajectories"]["balances"] is True
    assert status["trajectories"]["recount_agrees"] is True
    assert status["nan"] is None
    assert status["peers"] == [
        {"peer": front.bench.member("p").peer_id, "state": "active", "version": 0}
    ]


async def test_stopping_is_told_once_a_request(autojump_clock, front: Front) -> None:
    answer = await front.ask("POST", "/control/stop", secret=front.admin)
    assert (answer.status, front.stopped) == (202, 1)


def test_every_route_bounds_its_body() -> None:
    async def main() -> None:
        async with open_front() as front:
            limits = {route.path: route.body_bytes_max for route in front.api.routes()}
            assert limits["/upload"] == 64 * 2**20
            assert all(limit <= 2**20 for path, limit in limits.items() if path != "/upload")

    run_virtual(main, seed=1)
