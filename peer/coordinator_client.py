"""What a peer asks of the coordinator, typed; refusals become exceptions once, here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from echo2p2p.errors import HttpError, RefusedError, RemoteProtocolError
from echo2p2p.ids import Incarnation, ManifestId, Version
from echo2p2p.limits import MODEL_FILE_BYTES_MAX
from echo2p2p.net.ports import HttpClient, Response
from echo2p2p.wire import codec
from echo2p2p.wire.messages import (
    CaReply,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
    Leave,
    Left,
    ManifestsReply,
    ManifestsRequest,
    Message,
    Refusal,
    Signed,
    Upload,
    UploadReply,
)

REQUEST_TIMEOUT_S: Final = 10.0
UPLOAD_TIMEOUT_S: Final = 120.0
NOT_A_MEMBER: Final = "not_a_member"
"""Reason of a refusal after which the peer must join again."""

STARTING: Final = "starting"
"""Reason of a refusal by a coordinator whose learner is not up yet."""

ReplyT = TypeVar("ReplyT", bound=Message)


class BusyError(HttpError):
    """The coordinator asks us to come back.

    Attributes:
        reason: Wire code.
        retry_after_s: Seconds.
    """

    def __init__(self, reason: str, detail: str, retry_after_s: float) -> None:
        super().__init__(f"{detail} (again in {retry_after_s:.0f} s)")
        self.reason = reason
        self.retry_after_s = retry_after_s


def checked(response: Response, kind: type[ReplyT]) -> ReplyT:
    """Return the body of a 200 answer.

    Raises:
        BusyError: Come back later.
        RefusedError: No, for good.
        HttpError: Not an answer of ours: something else listens there.
        RemoteProtocolError: A 200 answer that is not a ``kind``.
    """
    if response.status == 200:
        try:
            return codec.decode(response.body, kind)
        except RemoteProtocolError as error:
            detail = f"the coordinator's answer is not understood ({error.detail[:100]}); "
            raise RemoteProtocolError(
                error.violation, f"{detail}install the release that the run uses"
            ) from error
    try:
        refusal = codec.decode(response.body, Refusal)
    except RemoteProtocolError as error:
        detail = f"HTTP status {response.status} without a reason; is this a coordinator's URL?"
        raise HttpError(detail) from error
    if refusal.retry_after_s is not None:
        raise BusyError(refusal.reason, refusal.detail, refusal.retry_after_s)
    raise RefusedError(refusal.reason, refusal.detail)


async def fetch_ca(http: HttpClient) -> CaReply:
    """Return what GET /ca answers; nothing is verified yet."""
    return checked(await http.request("GET", "/ca", timeout_s=REQUEST_TIMEOUT_S), CaReply)


async def join(http: HttpClient, secret: str, request: JoinRequest) -> JoinReply:
    """Join with the token's secret. Raises as `checked`."""
    response = await http.request(
        "POST",
        "/join",
        body=codec.encode(request),
        headers={"authorization": f"Bearer {secret}"},
        timeout_s=REQUEST_TIMEOUT_S,
    )
    return checked(response, JoinReply)


class CoordinatorClient:
    """One incarnation's requests. All raise as `checked`, and `HttpError` for no answer."""

    def __init__(
        self,
        http: HttpClient,
        credential: str,
        incarnation: Incarnation,
        on_answer: Callable[[], None],
    ) -> None:
        self._http = http
        self._headers = {"authorization": f"Bearer {credential}"}
        self._incarnation = incarnation
        self._on_answer = on_answer

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Renew the term."""
        return await self._post("/heartbeat", beat, HeartbeatReply)

    async def manifests(self, have: Version | None, wait_s: float) -> list[Signed]:
        """Long-poll for the path to the newest version; empty when nothing is newer."""
        message = ManifestsRequest(incarnation=self._incarnation, have_version=have, wait_s=wait_s)
        reply = await self._post("/manifests", message, ManifestsReply, wait_s)
        return reply.path

    async def leases(self, version: Version, leases_max: int, wait_s: float) -> list[Lease]:
        """Long-poll for work; may be empty."""
        message = LeaseRequest(
            incarnation=self._incarnation, version=version, leases_max=leases_max, wait_s=wait_s
        )
        reply = await self._post("/lease", message, LeaseReply, wait_s)
        return reply.leases

    async def upload(self, upload: Upload) -> UploadReply:
        """Hand in the samples of one lease."""
        return await self._post("/upload", upload, UploadReply, UPLOAD_TIMEOUT_S)

    async def leave(self, reason: str) -> None:
        """Say goodbye."""
        await self._post("/leave", Leave(incarnation=self._incarnation, reason=reason), Left)

    async def chunk(self, identity: ManifestId, index: int) -> bytes:
        """Fetch one chunk over HTTP."""
        response = await self._http.request(
            "GET",
            f"/chunk/{identity.hex()}/{index}",
            headers=self._headers,
            timeout_s=UPLOAD_TIMEOUT_S,
        )
        if response.status != 200:
            checked(response, Left)
        return response.body

    async def model_file(self, name: str) -> bytes | None:
        """Fetch a file of the model's folder; ``None``: it has none of this name."""
        response = await self._http.request(
            "GET", f"/model/{name}", headers=self._headers, timeout_s=UPLOAD_TIMEOUT_S
        )
        if response.status == 404:
            return None
        if response.status != 200:
            checked(response, Left)
        if len(response.body) > MODEL_FILE_BYTES_MAX:
            raise HttpError(f"{name} has {len(response.body)} bytes; too many for such a file")
        return response.body

    async def _post(
        self, path: str, message: Message, kind: type[ReplyT], wait_s: float = 0.0
    ) -> ReplyT:
        response = await self._http.request(
            "POST",
            path,
            body=codec.encode(message),
            headers=self._headers,
            timeout_s=REQUEST_TIMEOUT_S + wait_s,
        )
        reply = checked(response, kind)
        self._on_answer()
        return reply
