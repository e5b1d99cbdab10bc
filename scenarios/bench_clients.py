"""One client process of `echo2-scenario bench intake`: many members, each with its own sockets.

It is told what to do one line at a time on standard input and answers each with one line, both
JSON; when the input ends, so does it. The members are the peer's own HTTP client, without an engine
behind it: they lie about having one, and upload noise of the right form.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import trio

from coordinator.membership import NO_MEASUREMENTS
from echo2p2p.errors import EchoError
from echo2p2p.ids import Incarnation, Version
from echo2p2p.limits import LEASES_PER_CALL_MAX, PROTOCOL
from echo2p2p.net.aio import AioHttpClients, open_aio
from echo2p2p.net.open_files import allow_connections
from echo2p2p.net.ports import TlsClient
from echo2p2p.net.system import SystemEntropy
from echo2p2p.net.trust import JoinToken, PeerIdentity, join_proof
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_logprobs, from_tokens
from echo2p2p.wire.messages import (
    Address,
    Caps,
    Hardware,
    Heartbeat,
    JoinRequest,
    Lease,
    Sample,
    Span,
    Upload,
)
from peer.coordinator_client import BusyError, CoordinatorClient, join

READ_BYTES = 65536


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of all commands."""


class Join(Command, frozen=True):
    """Become this many members; each has sockets of its own."""

    url: str
    token: str
    authority: bytes | None
    """Certificate of the run's authority; ``None``: no TLS."""
    pollers: int
    uploaders: int
    seed: int


class Poll(Command, frozen=True):
    """Open one long poll a poller, of work and of versions in turn, and keep it open."""

    wait_s: float


class TakeLeases(Command, frozen=True):
    """Take this many leases with the uploaders, in turn, and fill them."""

    count: int


class Beat(Command, frozen=True):
    """Send this many heartbeats with the uploaders, each one after the other."""

    count: int


class UploadAll(Command, frozen=True):
    """Upload all that is filled, each uploader one after the other."""

    beat_every_s: float | None
    """Send heartbeats beside it, from a connection of their own."""


class Look(Command, frozen=True):
    """Say how the long polls are."""


AnyCommand = Join | Poll | TakeLeases | Beat | UploadAll | Look


class Answer(msgspec.Struct, frozen=True):
    """What came of a command."""

    count: int = 0
    """Members joined, polls open, leases taken, heartbeats or uploads acknowledged."""
    seconds: list[float] = []
    """Of each request, as the client saw it."""
    beat_seconds: list[float] = []
    body_bytes: int = 0
    """Of one upload."""
    put_off: int = 0
    """Uploads that were told to come back later, and did."""
    polls_renewed: int = 0
    polls_broken: int = 0


@dataclass
class Client:
    """One member."""

    http: CoordinatorClient
    incarnation: Incarnation
    filled: list[Upload] = field(default_factory=list)

    async def beat(self) -> None:
        """Send a heartbeat that claims an engine with version 0."""
        await self.http.heartbeat(
            Heartbeat(
                incarnation=self.incarnation,
                state="ready",
                version=0,
                holdings=[],
                relays=True,
                measurements=NO_MEASUREMENTS,
                price_usd_per_hour=0.0,
                available_s=None,
            )
        )


class Clients:
    """All members of one process.

    Args:
        connect: Opens HTTP clients.
        stack: Closes them.
        nursery: Of the long polls.
    """

    def __init__(
        self, connect: AioHttpClients, stack: AsyncExitStack, nursery: trio.Nursery
    ) -> None:
        self._connect = connect
        self._stack = stack
        self._nursery = nursery
        self._pollers: list[Client] = []
        self._uploaders: list[Client] = []
        self._rng = np.random.default_rng()
        self._renewed = 0
        self._broken = 0
        self._put_off = 0

    async def obey(self, command: AnyCommand) -> Answer:
        """Do it and answer."""
        match command:
            case Join():
                self._rng = np.random.default_rng(command.seed)
                self._pollers = [await self._join(command) for _ in range(command.pollers)]
                self._uploaders = [await self._join(command) for _ in range(command.uploaders)]
                return Answer(count=len(self._pollers) + len(self._uploaders))
            case Poll():
                for index, client in enumerate(self._pollers):
                    self._nursery.start_soon(self._poll, client, index % 2 == 0, command.wait_s)
                return Answer(count=len(self._pollers))
            case TakeLeases():
                return Answer(count=await self._take(command.count))
            case Beat():
                each = shares(command.count, len(self._uploaders))
                seconds: list[float] = []
                await _together(
                    partial(self._beat, client, share, seconds)
                    for client, share in zip(self._uploaders, each, strict=True)
                )
                return Answer(count=len(seconds), seconds=seconds)
            case UploadAll():
                return await self._upload_all(command.beat_every_s)
            case Look():
                return Answer(
                    count=len(self._pollers) - self._broken,
                    polls_renewed=self._renewed,
                    polls_broken=self._broken,
                )

    async def _join(self, how: Join) -> Client:
        """Join as a new identity and claim to be ready."""
        entropy = SystemEntropy()
        identity, token = PeerIdentity.create(entropy), JoinToken.parse(how.token)
        csr, key = identity.make_csr(entropy) if how.authority is not None else (b"", b"")
        nonce = entropy.secret(16)
        request = JoinRequest(
            protocol=PROTOCOL,
            name="bench",
            public_key=identity.public_key,
            proof=join_proof(identity, token.fingerprint, nonce, csr, "bench"),
            nonce=nonce,
            csr=csr,
            relay=Address(host="127.0.0.1", port=9),
            engine="fake",
            hardware=Hardware(accelerator="none", cores=1, memory_bytes=0),
            caps=Caps(upload_bytes_per_s=None, download_bytes_per_s=None, bytes_per_day=None),
        )
        tls = None if how.authority is None else TlsClient(how.authority)
        async with self._connect.connect(how.url, tls) as http:
            while True:
                try:
                    reply = await join(http, how.token, request)
                    break
                except BusyError as error:
                    await trio.sleep(error.retry_after_s)
        if how.authority is not None:
            tls = TlsClient(how.authority, reply.certificate, key)
        http = await self._stack.enter_async_context(self._connect.connect(how.url, tls))
        incarnation = Incarnation(reply.incarnation)
        own = CoordinatorClient(http, reply.credential, incarnation, lambda: None)
        client = Client(own, incarnation)
        await client.beat()
        return client

    async def _poll(self, client: Client, is_for_work: bool, wait_s: float) -> None:
        """Ask for what there is not, again and again; endless."""
        try:
            while True:
                if is_for_work:
                    await client.http.leases(Version(0), 1, wait_s)
                else:
                    await client.http.manifests(Version(0), wait_s)
                self._renewed += 1
        except EchoError as error:
            self._broken += 1
            print(error, file=sys.stderr)

    async def _take(self, count: int) -> int:
        taken = 0
        for client, share in zip(self._uploaders, shares(count, len(self._uploaders)), strict=True):
            while len(client.filled) < share:
                wanted = min(share - len(client.filled), LEASES_PER_CALL_MAX)
                leases = await client.http.leases(Version(0), wanted, 0.0)
                if not leases:
                    break
                client.filled += [self._fill(client, lease) for lease in leases]
            taken += len(client.filled)
        return taken

    def _fill(self, client: Client, lease: Lease) -> Upload:
        """Return samples as long as the lease allows."""
        stop, length = lease.stop_ids[0], lease.tokens_max
        samples: list[Sample] = []
        for _ in range(lease.samples):
            tokens = self._rng.integers(stop + 1, 50_000, length, dtype=np.uint32)
            tokens[-1] = stop
            logprobs = -self._rng.random(length, dtype=np.float32)
            spans = [Span(version=lease.version, start=0, end=length)]
            samples.append(
                Sample(
                    tokens=from_tokens(tokens),
                    logprobs=from_logprobs(logprobs),
                    spans=spans,
                    finish="stop",
                )
            )
        return Upload(
            incarnation=client.incarnation, lease_id=lease.lease_id, samples=samples, seconds=1.0
        )

    async def _beat(self, client: Client, count: int, seconds: list[float]) -> None:
        for _ in range(count):
            began_s = trio.current_time()
            await client.beat()
            seconds.append(trio.current_time() - began_s)

    async def _upload_all(self, beat_every_s: float | None) -> Answer:
        seconds: list[float] = []
        beat_seconds: list[float] = []
        sizes = [len(codec.encode(u)) for client in self._uploaders for u in client.filled[:1]]
        async with trio.open_nursery() as nursery:
            if beat_every_s is not None:
                nursery.start_soon(self._watch, beat_every_s, beat_seconds)
            await _together(partial(self._upload, client, seconds) for client in self._uploaders)
            nursery.cancel_scope.cancel()
        return Answer(
            count=len(seconds),
            seconds=seconds,
            beat_seconds=beat_seconds,
            body_bytes=max(sizes, default=0),
            put_off=self._put_off,
        )

    async def _upload(self, client: Client, seconds: list[float]) -> None:
        for upload in client.filled:
            began_s = trio.current_time()
            while True:
                try:
                    reply = await client.http.upload(upload)
                    break
                except BusyError as error:
                    self._put_off += 1
                    await trio.sleep(error.retry_after_s)
            if reply.outcome.accepted and not reply.duplicate:
                seconds.append(trio.current_time() - began_s)

    async def _watch(self, every_s: float, seconds: list[float]) -> None:
        """Send heartbeats at a steady pace until cancelled."""
        while True:
            await self._beat(self._uploaders[0], 1, seconds)
            await trio.sleep(every_s)


def shares(count: int, parts: int) -> list[int]:
    """Return ``count`` cut into ``parts`` that differ by one at most."""
    return [count // parts + (index < count % parts) for index in range(parts)]


async def _together(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(call)


async def read_lines(stream: trio.abc.ReceiveStream) -> AsyncGenerator[bytes, None]:
    """Give the lines of a stream until its end."""
    waiting = bytearray()
    while chunk := await stream.receive_some(READ_BYTES):
        waiting += chunk
        *lines, rest = waiting.split(b"\n")
        waiting = bytearray(rest)
        for line in lines:
            yield bytes(line)


async def main() -> None:
    """Obey standard input until it ends."""
    allow_connections(4096)
    commands = trio.lowlevel.FdStream(os.dup(0))
    async with (
        commands,
        open_aio() as aio,
        AsyncExitStack() as stack,
        trio.open_nursery() as nursery,
        aclosing(read_lines(commands)) as lines,
    ):
        clients = Clients(AioHttpClients(aio), stack, nursery)
        async for line in lines:
            answer = await clients.obey(msgspec.json.decode(line, type=AnyCommand))
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
