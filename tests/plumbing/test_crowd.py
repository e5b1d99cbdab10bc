"""A coordinator beset by idle, slow and half-open connections goes on serving the others."""

import contextlib
import resource
import select
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack

import pytest
import trio

from echo2p2p.ids import SOURCE
from echo2p2p.limits import PROTOCOL
from echo2p2p.net import open_files
from echo2p2p.net.aio import AioHttpClients, AioHttpServer, HttpLimits, open_aio
from echo2p2p.net.ports import Endpoint, Request, Response, Route, TlsClient, TlsServer
from echo2p2p.net.system import SystemClock
from echo2p2p.net.trust import (
    CertificateAuthority,
    JoinToken,
    PeerIdentity,
    RunKeys,
    join_proof,
)
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.live import start_coordinator, start_peer, wait_steps
from echo2p2p.testing.processes import Processes
from echo2p2p.testing.system import SimEntropy
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Caps, Hardware, JoinReply, JoinRequest, ManifestsRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

POLLS = 1000


def join(run) -> JoinReply:
    """Join as a peer that only polls."""
    identity, nonce = PeerIdentity.create(SimEntropy("crowd")), bytes(16)
    run_key = JoinToken.parse(run.token).fingerprint
    request = JoinRequest(
        protocol=PROTOCOL,
        name="crowd",
        public_key=identity.public_key,
        proof=join_proof(identity, run_key, nonce, b"", "crowd"),
        nonce=nonce,
        csr=b"",
        relay=None,
        engine="none",
        hardware=Hardware(accelerator="cpu", cores=1, memory_bytes=0),
        caps=Caps(upload_bytes_per_s=None, download_bytes_per_s=None, bytes_per_day=None),
    )
    return codec.decode(post(run, "/join", run.token, codec.encode(request)), JoinReply)


def post(run, path: str, secret: str, body: bytes) -> bytes:
    asked = urllib.request.Request(
        run.url + path, data=body, headers={"Authorization": f"Bearer {secret}"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return answer.read()


def healthy_s(run) -> float:
    """Return how long a new connection takes to be answered."""
    began = time.monotonic()
    with urllib.request.urlopen(run.url + "/healthz", timeout=10) as answer:
        assert answer.read() == b"running"
    return time.monotonic() - began


def poll_request(reply: JoinReply) -> bytes:
    body = codec.encode(
        ManifestsRequest(incarnation=reply.incarnation, have_version=0, wait_s=30.0)
    )
    head = (
        "POST /manifests HTTP/1.1\r\nHost: test\r\n"
        f"Authorization: Bearer {reply.credential}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def test_a_thousand_idle_long_polls_leave_room_for_a_peer_that_works_and_are_all_woken(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < POLLS + 600:
        pytest.skip(f"this machine allows {hard} open files, which is too few for the test")
    with Processes(tmp_path) as processes, ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (700, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        run = start_coordinator(processes, "--membership.term_s", "60")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, POLLS + 600), hard))
        processes.wait(lambda: bool(run.events("version.published")), 20, "version 0")
        request = poll_request(join(run))
        crowd, answered = [], select.poll()
        for _ in range(POLLS):
            crowd.append(stack.enter_context(socket.create_connection(("127.0.0.1", run.port), 10)))
            answered.register(crowd[-1], select.POLLIN)
            crowd[-1].sendall(request)
        assert healthy_s(run) < 2.0
        assert answered.poll(0) == [], "nobody is cut or answered"
        peer = start_peer(processes, run.url, run.token)
        wait_steps(processes, run, 5, peer)
        for connection in crowd:  # the next version wakes them all
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("tls", ["on", "off"])
def test_slow_and_half_open_connections_are_no_harm_to_others(tmp_path, tls):
    with Processes(tmp_path) as processes, ExitStack() as stack:
        run = start_coordinator(processes, "--server.tls", tls)
        for kind in range(150):
            connection = socket.create_connection(("127.0.0.1", run.port), 10)
            stack.enter_context(connection)
            if kind % 3 == 1:
                connection.sendall(b"POST /upload HTTP/1.1\r\nHost: t\r\nX-")  # or a bad handshake
            elif kind % 3 == 2 and tls == "on":
                connection.sendall(b"\x16\x03\x01\x02\x00\x01")  # a hello that never ends
            elif kind % 3 == 2:
                connection.sendall(
                    b"POST /join HTTP/1.1\r\nHost: t\r\nContent-Length: 1000\r\n\r\nx"
                )
        peer = start_peer(processes, run.url, run.token)
        wait_steps(processes, run, 3, peer)
        assert SOURCE in {entry["peer"] for entry in peer.events("link.opened")}
        assert "Traceback" not in run.text()


@contextlib.asynccontextmanager
async def beset_by_half_open_tls(limits: HttpLimits, count: int):
    """Yield ``count`` connections in their TLS handshake, and what asks the same server."""
    entropy, journal = SimEntropy("tls"), TraceJournal()
    authority = CertificateAuthority(RunKeys.create(entropy), SystemClock(), entropy)
    material = TlsServer(authority.certificate, *authority.issue_coordinator(["127.0.0.1"]))

    async def answer(_: Request) -> Response:
        return Response(200)

    routes = (Route("GET", "/", answer, 0),)
    with trio.fail_after(20):
        async with open_aio(journal) as aio:
            server = AioHttpServer(aio, material, journal, limits)
            async with server.serve(routes, Endpoint("127.0.0.1", 0)) as at:
                half_open = [await trio.open_tcp_stream(at.host, at.port) for _ in range(count)]
                for stream in half_open[::2]:
                    await stream.send_all(b"\x16\x03\x01\x02\x00\x01")
                url, trusted = f"https://127.0.0.1:{at.port}", TlsClient(authority.certificate)

                async def status() -> int:
                    async with AioHttpClients(aio).connect(url, trusted) as client:
                        return (await client.request("GET", "/", timeout_s=5)).status

                yield half_open, status


async def is_cut(stream: trio.SocketStream) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        assert await stream.receive_some(1) == b""
    await stream.aclose()


async def test_a_tls_handshake_that_never_ends_is_cut_and_others_are_served():
    async with beset_by_half_open_tls(HttpLimits(handshake_s=0.3), 20) as (half_open, status):
        assert await status() == 200
        for stream in half_open:
            await is_cut(stream)


async def test_tls_handshakes_count_as_connections_and_take_no_more_files_than_these():
    limits = HttpLimits(handshake_s=60, connections_max=5)
    async with beset_by_half_open_tls(limits, 20) as (half_open, status):
        for stream in half_open[:15]:
            await is_cut(stream)
        assert await status() == 200
        await is_cut(half_open[15])
        for stream in half_open[16:]:
            with trio.move_on_after(0.05) as scope:
                await stream.receive_some(1)
            assert scope.cancelled_caught, "there is room for it"
            await stream.aclose()


# --- open files ---------------------------------------------------------------------------------

ASK = (
    "import resource, sys\n"
    "from echo2p2p.net.open_files import allow_connections\n"
    "from echo2p2p.errors import ConfigError\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))\n"
    "try: print(allow_connections(int(sys.argv[3])))\n"
    "except ConfigError as error: print(error)\n"
    "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
)


def ask(soft: int, hard: int, wanted: int) -> list[str]:
    words = [sys.executable, "-P", "-c", ASK, *map(str, (soft, hard, wanted))]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be():
    spare = open_files.RESERVED
    assert ask(256, 4096, 1000) == ["1000", str(1000 + spare)]
    assert ask(2000, 4096, 1000) == ["1000", "2000"], "enough is left alone"
    assert ask(256, 1024, 8192) == [str(1024 - spare), "1024"], "fewer connections, then"
    few = open_files.CONNECTIONS_MIN + spare
    assert ask(256, few - 1, 8192) == [
        f"open files: this process may have {few - 1} at most, and needs {few}: raise the hard "
        "limit (ulimit -Hn 4096)",
        str(few - 1),
    ]


def test_the_servers_default_has_room_for_a_thousand_peers():
    assert HttpLimits().connections_max >= 8 * 1000
