"""The coordinator's HTTP routes: trio functions from a frozen Request to a frozen Response.

Who may do what (DESIGN §9): anybody may ask for the authority's certificate and for health; the
join token opens ``/join`` and nothing else; a member's credential (with TLS: and its certificate)
opens the member's routes, for that incarnation only; the admin token opens status, metrics and
control. A coordinator that can be reached on loopback only tells status and metrics to anybody who
asks it by a loopback name (a web page elsewhere cannot: its name would be in ``Host``).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import trio

from coordinator import metrics
from coordinator.config import LOOPBACK_HOSTS
from coordinator.dashboard import dashboard_file
from coordinator.intake import Intake
from coordinator.leases import LeaseDesk
from coordinator.membership import Duplicate, Full, Member, Wait
from coordinator.publish import Publisher
from coordinator.roster import Roster, Starting
from coordinator.run_state import RunState
from echo2p2p.errors import ConfigError, RefusedError, RemoteProtocolError, StoreError, Violation
from echo2p2p.ids import Incarnation, ManifestId, PeerId, Version
from echo2p2p.limits import HTTP_BODY_BYTES_MAX, HTTP_CONTROL_BYTES_MAX, PROTOCOL
from echo2p2p.net.ports import Handler, Journal, Request, Response, Route
from echo2p2p.net.routing import REASON_NO_SUCH_PATH, closing, refusal
from echo2p2p.net.trust import JoinToken, certificate_owner, credential_digest, same_secret
from echo2p2p.wire import codec
from echo2p2p.wire.messages import (
    CaReply,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaseRequest,
    Leave,
    Left,
    ManifestsReply,
    ManifestsRequest,
    Message,
    Upload,
)

WAIT_S_MAX: Final = 30.0
"""Longest long poll; proxies cut idle connections after about a minute."""
JOIN_REFUSED: Final = "join.refused"
COUNT_MAX: Final = 2**53
"""Of any counter that a peer reports; exact in JSON, and sums of them fit into a store's row."""
INTAKE_FULL_RETRY_S: Final = 2.0
NAME_CHARACTERS_MAX: Final = 100
JOIN_BYTES_MAX: Final = 16 * 1024
"""The store keeps it for each identity; an honest one takes less than 1 KiB."""
HOLDINGS_MAX: Final = 256
"""Kept for each member; an honest one has about 16."""
HOST_CHARACTERS_MAX: Final = 255

MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True)
class Secrets:
    """What the routes check against."""

    token: JoinToken
    admin_token: str
    tls: bool
    ca: CaReply
    local: bool = False
    """Whether this machine alone can reach the server, so that status and metrics are open."""


class Api:
    """All routes of one run.

    Args:
        fail: Called when the disk refuses: the run must end. Without it that is a bug.
        model_files: By name: what members may have of the model's folder.
        upload_bytes_max: Of one upload.
    """

    def __init__(
        self,
        *,
        secrets: Secrets,
        state: RunState,
        roster: Roster,
        desk: LeaseDesk,
        intake: Intake,
        publisher: Publisher,
        status: Callable[[], Awaitable[Mapping[str, object]]],
        stop: Callable[[], None],
        journal: Journal,
        fail: Callable[[StoreError], None] | None = None,
        model_files: Mapping[str, bytes] | None = None,
        upload_bytes_max: int = HTTP_BODY_BYTES_MAX,
    ) -> None:
        self._fail = fail
        self._model_files = model_files or {}
        self._upload_bytes_max = upload_bytes_max
        self._secrets = secrets
        self._state = state
        self._roster = roster
        self._desk = desk
        self._intake = intake
        self._publisher = publisher
        self._status = status
        self._stop = stop
        self._journal = journal

    def routes(self) -> tuple[Route, ...]:
        """Return the table that a server serves."""
        small, large = HTTP_CONTROL_BYTES_MAX, self._upload_bytes_max
        who = self._admit_member
        routes = (
            Route("GET", "/ca", self.ca, 0),
            Route("GET", "/healthz", self.healthz, 0),
            Route("POST", "/join", self.join, small, self._admit_stranger),
            Route("POST", "/heartbeat", self._member(Heartbeat, self.heartbeat), small, who),
            Route("POST", "/manifests", self._member(ManifestsRequest, self.manifests), small, who),
            Route("POST", "/lease", self._member(LeaseRequest, self.lease), small, who),
            Route("POST", "/upload", self._member(Upload, self.upload), large, self._admit_upload),
            Route("POST", "/leave", self._member(Leave, self.leave), small, who),
            Route("GET", "/chunk/{manifest}/{index}", self.chunk, 0),
            Route("GET", "/model/{file}", self.model_file, 0),
            Route("GET", "/status", self.status, 0),
            Route("GET", "/metrics", self.metrics, 0),
            Route("GET", "/dashboard", self.dashboard, 0),
            Route("GET", "/dashboard/{file}", self.dashboard, 0),
            Route("POST", "/control/stop", self.stop, small, self._admit_admin),
        )
        return tuple(replace(route, handler=self._safe(route.handler)) for route in routes)

    def _safe(self, handler: Handler) -> Handler:
        """Return ``handler``, with a disk that refuses ending the run and not one request."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except StoreError as error:
                if self._fail is None:
                    raise
                self._fail(error)
                return closing()

        return handle

    # --- before a body is read (in the server's thread) -----------------------------------------

    def _admit_stranger(self, head: Request) -> str | Response:
        return "join" if self._shows_token(head) else _wrong_token()

    def _admit_admin(self, head: Request) -> str | Response:
        return self._admin(head) or "admin"

    def _admit_member(self, head: Request) -> str | Response:
        member = self._by_credential(head)
        return member if isinstance(member, Response) else member.peer_id

    def _admit_upload(self, head: Request) -> str | Response:
        member = self._admit_member(head)
        if isinstance(member, str) and self._intake.full:
            detail = "more has come in than can be scored now: keep it and send it again later"
            return refusal(429, "intake_full", detail, retry_after_s=INTAKE_FULL_RETRY_S)
        return member

    # --- open to all --------------------------------------------------------------------------

    async def ca(self, request: Request) -> Response:
        """GET /ca: the run's public key and the authority's certificate."""
        del request
        return _answer(self._secrets.ca)

    async def healthz(self, request: Request) -> Response:
        """GET /healthz: 200 while the run is running or finished, 503 once it has failed."""
        del request
        status = 503 if self._state.outcome == "failed" else 200
        return Response(status, self._state.outcome.encode(), content_type="text/plain")

    # --- the join token -----------------------------------------------------------------------

    async def join(self, request: Request) -> Response:
        """POST /join: admit a peer that has the token and proves its key."""
        if not self._shows_token(request):
            return _wrong_token()
        try:
            message = _checked_join(codec.decode(request.body, JoinRequest))
        except RemoteProtocolError as error:
            other = _protocol_of(request.body)
            if other not in {None, PROTOCOL}:
                return _wrong_protocol(other)
            return refusal(400, error.violation.value, error.detail)
        if message.protocol != PROTOCOL:
            return _wrong_protocol(message.protocol)
        try:
            outcome = await self._roster.join(message)
        except (RemoteProtocolError, RefusedError) as error:
            self._journal.event(JOIN_REFUSED, who=message.name, detail=str(error))
            return refusal(403, "bad_proof", str(error))
        match outcome:
            case Wait(retry_after_s):
                return refusal(
                    409,
                    "identity_live",
                    "this identity's last term still runs; it ends soon if the copy is dead",
                    retry_after_s=retry_after_s,
                )
            case Duplicate():
                return refusal(
                    409,
                    "identity_duplicate",
                    "another copy of this identity is alive; give each peer a folder of its own",
                )
            case Starting():
                return refusal(503, "starting", "the learner is still starting", retry_after_s=1.0)
            case Full():
                return refusal(
                    503, "full", "the run has all the members it takes", retry_after_s=60.0
                )
            case JoinReply() as reply:
                return _answer(reply)

    def _shows_token(self, request: Request) -> bool:
        try:
            return JoinToken.parse(_bearer(request) or "") == self._secrets.token
        except ConfigError:
            return False

    # --- members ------------------------------------------------------------------------------

    def _member(
        self,
        kind: type[MessageT],
        handler: Callable[[Member, MessageT, Request], Awaitable[Message]],
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that authenticates a member, decodes, calls and encodes."""

        async def handle(request: Request) -> Response:
            member = self._authenticate(request)
            if isinstance(member, Response):
                return member
            try:
                message = codec.decode(request.body, kind)
                if isinstance(message, Heartbeat):
                    _check_figures(message)
            except RemoteProtocolError as error:
                return refusal(400, error.violation.value, error.detail)
            incarnation = getattr(message, "incarnation", None)
            if incarnation != member.incarnation:
                return refusal(403, "wrong_incarnation", "the credential is another incarnation's")
            return _answer(await handler(member, message, request))

        return handle

    def _authenticate(self, request: Request) -> Member | Response:
        member = self._by_credential(request)
        if isinstance(member, Response) or not self._secrets.tls:
            return member
        if _owner(request.client_certificate) != member.peer_id:
            return refusal(401, "wrong_certificate", "the TLS certificate is not this member's")
        return member

    def _by_credential(self, request: Request) -> Member | Response:
        credential = _bearer(request)
        member = (
            None
            if credential is None
            else self._state.members.by_credential(credential_digest(credential))
        )
        if member is None and not self._roster.is_open:  # we restarted; it may well be one
            return refusal(503, "starting", "the learner is still starting", retry_after_s=1.0)
        if member is None:
            return refusal(401, "not_a_member", "unknown or ended membership; join again")
        return member

    async def heartbeat(self, member: Member, beat: Heartbeat, request: Request) -> Message:
        """POST /heartbeat: renew the term."""
        del request
        now = trio.current_time()
        renewed = self._roster.heartbeat(member, beat, now)
        return HeartbeatReply(
            term_s=self._roster.term_s,
            now_s=self._roster.now_s(),
            latest_version=self._state.latest,
            outcomes=self._intake.take_outcomes(member.peer_id),
            plan=self._roster.plan_for(renewed or member),
        )

    async def manifests(
        self, member: Member, message: ManifestsRequest, request: Request
    ) -> Message:
        """POST /manifests: long poll for the path to the newest version."""
        del request
        have = None if message.have_version is None else Version(message.have_version)
        path = await self._publisher.path(member.peer_id, have, _wait_s(message.wait_s))
        return ManifestsReply(path=path)

    async def lease(self, member: Member, message: LeaseRequest, request: Request) -> Message:
        """POST /lease: long poll for work."""
        del request
        capped = msgspec.structs.replace(message, wait_s=_wait_s(message.wait_s))
        return LeaseReply(leases=await self._desk.request(member, capped))

    async def upload(self, member: Member, message: Upload, request: Request) -> Message:
        """POST /upload: all samples of one lease."""
        return await self._intake.upload(member, message, request.body)

    async def leave(self, member: Member, message: Leave, request: Request) -> Message:
        """POST /leave: give everything back now instead of at the end of the term."""
        del request
        await self._roster.leave(member.peer_id, Incarnation(message.incarnation), message.reason)
        return Left()

    async def chunk(self, request: Request) -> Response:
        """GET /chunk/{manifest}/{index}: the last resort when no relay link works."""
        member = self._authenticate(request)
        if isinstance(member, Response):
            return member
        try:
            identity = ManifestId(bytes.fromhex(request.query["manifest"]))
            index = int(request.query["index"])
        except ValueError:
            return refusal(400, "malformed", "the path is /chunk/<hex manifest id>/<index>")
        data = self._publisher.chunk(identity, index)
        if data is None:
            return refusal(404, "no_such_chunk", "no such payload is kept, or no such chunk")
        return Response(200, bytes(data), content_type="application/octet-stream")

    async def model_file(self, request: Request) -> Response:
        """GET /model/{file}: configuration and tokenizer, for a peer that answers people."""
        member = self._authenticate(request)
        if isinstance(member, Response):
            return member
        data = self._model_files.get(request.query["file"])
        if data is None:
            return refusal(404, "no_such_file", "the model has no such file to give")
        return Response(200, data, content_type="application/octet-stream")

    # --- the admin token ----------------------------------------------------------------------

    def _admin(self, request: Request) -> Response | None:
        if same_secret(_bearer(request) or "", self._secrets.admin_token):
            return None
        return refusal(401, "wrong_admin_token", "this route needs the admin token")

    def _reader(self, request: Request) -> Response | None:
        """Refuse whoever may not look; see the module's header."""
        if self._secrets.local and _host(request) in LOOPBACK_HOSTS:
            return None
        return self._admin(request)

    async def status(self, request: Request) -> Response:
        """GET /status: everything about the run, as JSON."""
        if (refused := self._reader(request)) is not None:
            return refused
        body = msgspec.json.encode(await self._status())
        headers = {"Cache-Control": "no-store"}
        return Response(200, body, headers, content_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: the same figures for Prometheus."""
        if (refused := self._reader(request)) is not None:
            return refused
        body, content_type = metrics.exposition(await self._status())
        return Response(200, body, content_type=content_type)

    async def dashboard(self, request: Request) -> Response:
        """GET /dashboard: the page, which asks /status for what it shows; no secret is in it."""
        answer = dashboard_file(request.query.get("file", "index.html"))
        if answer is None:
            return refusal(404, REASON_NO_SUCH_PATH, "the dashboard has no such file")
        return answer

    async def stop(self, request: Request) -> Response:
        """POST /control/stop: end the run after the step under way, with a checkpoint."""
        if (refused := self._admin(request)) is not None:
            return refused
        self._stop()
        return Response(202, b"stopping", content_type="text/plain")


def _wrong_token() -> Response:
    return refusal(401, "wrong_token", "the join token is not this run's; ask its owner for it")


def _answer(message: Message) -> Response:
    return Response(200, codec.encode(message))


def _bearer(request: Request) -> str | None:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    # Header bytes that are no text arrive as surrogates, which nothing of ours can encode.
    return value if scheme.lower() == "bearer" and value and value.isascii() else None


def _host(request: Request) -> str | None:
    """Return the name by which the client thinks to have reached us, without the port."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname
    except ValueError:
        return None


def _owner(certificate: bytes | None) -> PeerId | None:
    try:
        return None if certificate is None else certificate_owner(certificate)
    except RemoteProtocolError:
        return None


class _AnyJoin(msgspec.Struct, tag_field="t", tag="join"):
    """What a join request has in every protocol."""

    protocol: int


def _protocol_of(body: bytes) -> int | None:
    """Return the protocol of a join request that is not one of ours."""
    try:
        return codec.decode(body, _AnyJoin).protocol
    except RemoteProtocolError:
        return None


def _wrong_protocol(theirs: int | None) -> Response:
    return refusal(
        400,
        "wrong_protocol",
        f"this run speaks protocol {PROTOCOL}, the peer {theirs}; install the same release on both",
    )


def _checked_join(message: JoinRequest) -> JoinRequest:
    """Return the request if what it says can be shown to people and told to other peers.

    Raises:
        RemoteProtocolError: A name or an address that no honest peer has.
    """
    name, relay = message.name, message.relay
    if len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        detail = f"the name must be printable, of {NAME_CHARACTERS_MAX} characters at most"
        raise RemoteProtocolError(Violation.MALFORMED, detail)
    if relay is not None and not (
        0 < relay.port < 65536
        and 0 < len(relay.host) <= HOST_CHARACTERS_MAX
        and relay.host.isascii()
        and relay.host.isprintable()
    ):
        raise RemoteProtocolError(Violation.MALFORMED, "the relay's address cannot be dialled")
    if len(codec.encode(message)) > JOIN_BYTES_MAX:
        detail = f"a join takes at most {JOIN_BYTES_MAX} bytes"
        raise RemoteProtocolError(Violation.MALFORMED, detail)
    return message


def _check_figures(beat: Heartbeat) -> None:
    """Refuse figures that cannot be: they would be stored, summed and shown.

    Raises:
        RemoteProtocolError: Negative, infinite, not a number, or beyond `COUNT_MAX`; or more
            payloads than a peer keeps.
    """
    said = beat.measurements
    counts = (
        said.relayed_bytes,
        said.received_bytes,
        said.duplicate_bytes,
        said.tokens_generated,
        said.queue_leases,
        beat.version or 0,
    )
    figures = (said.engine_tokens_per_s, beat.price_usd_per_hour, beat.available_s or 0.0)
    if not all(0 <= count <= COUNT_MAX for count in counts):
        raise RemoteProtocolError(Violation.MALFORMED, f"a count is not in 0..{COUNT_MAX}")
    if not all(0.0 <= figure < math.inf for figure in figures):
        raise RemoteProtocolError(Violation.MALFORMED, "a figure is negative or not finite")
    if len(beat.holdings) > HOLDINGS_MAX or any(len(each) != 16 for each in beat.holdings):
        detail = f"holdings are manifest ids, {HOLDINGS_MAX} at most"
        raise RemoteProtocolError(Violation.MALFORMED, detail)


def _wait_s(asked: float) -> float:
    return min(max(asked, 0.0), WAIT_S_MAX) if not math.isnan(asked) else 0.0
