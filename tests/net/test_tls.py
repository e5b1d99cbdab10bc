"""Mutual TLS over real sockets: who is let in, who is not, and what the user is told."""

import contextlib
import ssl
from collections.abc import AsyncIterator

import pytest
import trio

from echo2p2p.errors import ConfigError, HttpError
from echo2p2p.ids import Incarnation
from echo2p2p.net import tls
from echo2p2p.net.aio import AioHttpClients, AioHttpServer, AioThread, open_aio
from echo2p2p.net.ports import Endpoint, Request, Response, Route, TlsClient, TlsServer
from echo2p2p.net.system import SystemClock
from echo2p2p.net.trust import (
    SERVER_NAME,
    CertificateAuthority,
    PeerIdentity,
    RunKeys,
    certificate_owner,
)
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import SimEntropy


class Run:
    """One run's authority, coordinator and peers."""

    def __init__(self, seed: int) -> None:
        self.entropy = SimEntropy(seed)
        self.authority = CertificateAuthority(
            RunKeys.create(self.entropy), SystemClock(), self.entropy
        )

    def server(self) -> TlsServer:
        certificate, key = self.authority.issue_coordinator(["127.0.0.1"])
        return TlsServer(self.authority.certificate, certificate, key)

    def peer(self) -> tuple[PeerIdentity, TlsClient]:
        identity = PeerIdentity.create(self.entropy)
        csr, key = identity.make_csr(self.entropy)
        certificate = self.authority.sign_peer(csr, identity.peer_id, Incarnation(1))
        return identity, TlsClient(self.authority.certificate, certificate, key)


async def who(request: Request) -> Response:
    shown = request.client_certificate
    return Response(200, b"nobody" if shown is None else certificate_owner(shown).encode())


@contextlib.asynccontextmanager
async def served(material: TlsServer | None) -> AsyncIterator[tuple[AioThread, int]]:
    with trio.fail_after(20):
        async with open_aio() as aio:
            server = AioHttpServer(aio, material, TraceJournal())
            routes = (Route("GET", "/who", who, 0),)
            async with server.serve(routes, Endpoint("127.0.0.1", 0)) as at:
                yield aio, at.port


async def ask(aio: AioThread, port: int, material: TlsClient | None, scheme: str = "https") -> str:
    url = f"{scheme}://127.0.0.1:{port}"
    async with AioHttpClients(aio).connect(url, material) as client:
        answer = await client.request("GET", "/who", timeout_s=5)
    assert answer.status == 200
    return answer.body.decode()


async def test_a_peer_is_known_by_its_certificate_and_a_stranger_may_still_ask() -> None:
    run = Run(1)
    identity, material = run.peer()
    async with served(run.server()) as (aio, port):
        assert await ask(aio, port, material) == identity.peer_id
        assert await ask(aio, port, TlsClient(run.authority.certificate)) == "nobody"
        assert await ask(aio, port, TlsClient(None)) == "nobody"


async def test_a_server_of_another_run_is_not_believed() -> None:
    run, other = Run(1), Run(2)
    async with served(other.server()) as (aio, port):
        with pytest.raises(HttpError, match="certificate of another run"):
            await ask(aio, port, run.peer()[1])


async def test_a_peer_of_another_run_is_refused() -> None:
    run, other = Run(1), Run(2)
    _, stranger = other.peer()
    mixed = TlsClient(run.authority.certificate, stranger.certificate, stranger.private_key)
    async with served(run.server()) as (aio, port):
        with pytest.raises(HttpError, match="another run than this peer's certificate"):
            await ask(aio, port, mixed)
        assert await ask(aio, port, TlsClient(run.authority.certificate)) == "nobody"


async def test_a_peers_certificate_does_not_pass_as_the_coordinators() -> None:
    run = Run(1)
    _, liar = run.peer()
    assert liar.certificate is not None
    assert liar.private_key is not None
    material = TlsServer(run.authority.certificate, liar.certificate, liar.private_key)
    async with served(material) as (aio, port):
        with pytest.raises(HttpError, match="not the coordinator's"):
            await ask(aio, port, run.peer()[1])


async def test_the_coordinators_certificate_does_not_pass_as_a_peers() -> None:
    run = Run(1)
    leaf = run.server()
    material = TlsClient(run.authority.certificate, leaf.certificate, leaf.private_key)
    async with served(run.server()) as (aio, port):
        with pytest.raises(HttpError):
            await ask(aio, port, material)


async def test_speaking_tls_to_a_plain_server_and_the_reverse_says_what_to_change() -> None:
    run = Run(1)
    async with served(None) as (aio, port):
        with pytest.raises(HttpError, match="write http:// in place of https://"):
            await ask(aio, port, run.peer()[1])
    async with served(run.server()) as (aio, port):
        with pytest.raises(HttpError, match="if it uses TLS, write https://"):
            await ask(aio, port, None, scheme="http")


async def test_a_scheme_that_disagrees_with_the_trust_material_is_refused_at_once() -> None:
    async with open_aio() as aio:
        with pytest.raises(ConfigError, match="https needs the run's authority"):
            await ask(aio, 1, None)
        with pytest.raises(ConfigError, match="this run uses TLS"):
            await ask(aio, 1, TlsClient(None), scheme="http")


async def test_closing_a_tls_server_with_open_connections_takes_no_time() -> None:
    run = Run(1)
    async with open_aio() as aio:
        server = AioHttpServer(aio, run.server(), TraceJournal())
        routes = (Route("GET", "/who", who, 0),)
        async with contextlib.AsyncExitStack() as pools:
            async with server.serve(routes, Endpoint("127.0.0.1", 0)) as at:
                url, material = f"https://127.0.0.1:{at.port}", TlsClient(run.authority.certificate)
                pool = await pools.enter_async_context(AioHttpClients(aio).connect(url, material))
                assert (await pool.request("GET", "/who", timeout_s=5)).status == 200
                begun_at = trio.current_time()
            assert trio.current_time() - begun_at < 2


def test_tls_1_2_is_refused() -> None:
    run = Run(1)
    server = tls.server_context(run.server())
    client = tls.client_context(TlsClient(run.authority.certificate))
    assert client.minimum_version == server.minimum_version == ssl.TLSVersion.TLSv1_3
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(cadata=run.authority.certificate.decode())
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(server, client) == "TLSv1.3"
    with pytest.raises(ssl.SSLError):
        handshake(server, old)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Shake hands in memory and return the version agreed on."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=SERVER_NAME),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].version()


@pytest.mark.parametrize("damaged", ["authority", "certificate", "private_key"])
def test_damaged_material_is_a_config_error(damaged: str) -> None:
    good = Run(1).server()
    texts = {name: getattr(good, name) for name in ("authority", "certificate", "private_key")}
    texts[damaged] = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    with pytest.raises(ConfigError, match="join again"):
        tls.server_context(TlsServer(**texts))


def test_a_certificate_with_another_ones_key_is_a_config_error() -> None:
    run = Run(1)
    with pytest.raises(ConfigError, match="do not belong together"):
        tls.server_context(
            TlsServer(run.authority.certificate, run.server().certificate, run.server().private_key)
        )
