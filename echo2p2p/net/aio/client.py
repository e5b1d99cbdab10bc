"""The HTTP client: pooled connections to one server, and every failure as one line.

The environment's proxies are ignored: links go to where the user said. Answers are bounded, and
what arrives compressed is not inflated.
"""

from __future__ import annotations

import asyncio
import functools
import io
import math
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import trio
from yarl import URL

from echo2p2p.errors import ConfigError, HttpError
from echo2p2p.limits import HTTP_BODY_BYTES_MAX, MIB
from echo2p2p.net.aio.thread import AioThread
from echo2p2p.net.ports import Response, TlsClient
from echo2p2p.net.tls import client_context
from echo2p2p.net.trust import SERVER_NAME


class AioHttpClients:
    """`HttpClients` on aiohttp."""

    def __init__(self, aio: AioThread) -> None:
        self._aio = aio

    @asynccontextmanager
    async def connect(self, url: str, tls: TlsClient | None) -> AsyncIterator[AioHttpClient]:
        """Open a client with a pool of its own for ``url``; nothing is sent yet.

        Raises:
            ConfigError: Not an ``http`` or ``https`` URL of a server, or one without trust
                material that needs it or the reverse, or the material is damaged.
        """
        base = _checked_url(url, tls)
        context = None if tls is None else client_context(tls)
        client = AioHttpClient(self._aio, base, context)
        try:
            await self._aio.call(client.open)
            yield client
        finally:
            with trio.CancelScope(shield=True):
                await self._aio.call(client.close)


class AioHttpClient:
    """`HttpClient` of one server; made by `AioHttpClients.connect`."""

    def __init__(self, aio: AioThread, base: URL, context: ssl.SSLContext | None) -> None:
        self._aio = aio
        self._base = str(base.origin())
        self._context = context
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """On the loop: make the pool."""
        connector = aiohttp.TCPConnector(
            ssl=self._context or True, keepalive_timeout=15.0, limit=100
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )

    async def close(self) -> None:
        """On the loop: close the pool."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Response:
        """Return the server's answer, whatever its status. Cancelling drops the connection.

        Raises:
            HttpError: No answer, and why in one line; the request may have been carried out.
        """
        return await self._aio.call(
            functools.partial(self._request, method, path, body, dict(headers or {}), timeout_s)
        )

    async def _request(
        self, method: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> Response:
        session = self._session
        assert session is not None
        # aiohttp warns of large bodies as bytes, and sends a file piece by piece.
        data = body if len(body) <= MIB else io.BytesIO(body)
        try:
            async with (
                asyncio.timeout(None if math.isinf(timeout_s) else timeout_s),
                session.request(
                    method,
                    URL(self._base + path, encoded=True),
                    data=data or None,
                    headers=headers,
                    allow_redirects=False,
                    server_hostname=None if self._context is None else SERVER_NAME,
                ) as response,
            ):
                return Response(
                    response.status,
                    await _read_answer(response),
                    {name.lower(): value for name, value in response.headers.items()},
                    response.headers.get("Content-Type", ""),
                )
        except TimeoutError as error:
            raise HttpError(f"{self._base}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            cause = _cause(error, uses_tls=self._context is not None)
            raise HttpError(f"{self._base}: {cause}") from error


async def _read_answer(response: aiohttp.ClientResponse) -> bytes:
    too_long = HttpError(f"{response.url.origin()}: an answer of over {HTTP_BODY_BYTES_MAX} bytes")
    if (response.content_length or 0) > HTTP_BODY_BYTES_MAX:
        raise too_long
    body = bytearray()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > HTTP_BODY_BYTES_MAX:
            raise too_long
    return bytes(body)


def _checked_url(url: str, material: TlsClient | None) -> URL:
    try:
        base = URL(url)
        complete = base.scheme in {"http", "https"} and base.host and base.port
    except ValueError as error:
        raise ConfigError("url", f"not a URL: {url}: write https://host:port") from error
    if not complete or base.path not in {"", "/"} or base.user or base.query_string:
        raise ConfigError("url", f"not the URL of a server: {url}: write https://host:port")
    if base.scheme == "https" and material is None:
        raise ConfigError("url", "https needs the run's authority: join with the run's token")
    if base.scheme == "http" and material is not None:
        raise ConfigError("url", "this run uses TLS: write https:// in place of http://")
    return base


def _cause(error: aiohttp.ClientError | OSError, *, uses_tls: bool) -> str:
    """Return what went wrong and what to do, in one line."""
    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    if isinstance(inner, ssl.SSLCertVerificationError):
        if inner.verify_code == 62:
            return "shows a certificate that is not the coordinator's: check host and port"
        return f"shows a certificate of another run ({inner.verify_message}): check URL and token"
    if isinstance(inner, ssl.SSLError):
        if inner.reason in {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"}:
            return "speaks no TLS: write http:// in place of https://"
        return f"TLS failed ({inner.reason}): join again for a fresh certificate"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "no such host name: check the URL and the network"
    if isinstance(inner, ConnectionRefusedError):
        return "refused: nothing listens there; check the port, or wait for the server"
    if isinstance(error, aiohttp.ClientResponseError):
        return "answers in something other than HTTP: check the port, and http or https"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
        # A server that does not take the client's certificate just hangs up, and so does one that
        # was spoken to without TLS.
        hint = (
            "it may belong to another run than this peer's certificate"
            if uses_tls
            else "if it uses TLS, write https:// in place of http://"
        )
        return f"closed the connection before it had answered; {hint}"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "broke off in the middle of its answer"
    return getattr(inner, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
