"""One machine's process in `echo2-scenario bench broadcast`: the source, or a peer.

Told its role on the command line and the rest one word a line on standard input, it answers each
word with one line of JSON: ``link``, once everybody listens; ``go <time>``, with the monotonic time
at which the clock starts (a peer answers when it has the payload, verified); ``stop``, answered
with a `Report`. When the input ends, so does the process.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time  # noqa: TID251 - processes share no clock but the kernel's
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, Protocol

import msgspec
import trio

from echo2p2p.ids import PeerId
from echo2p2p.net.ports import Endpoint, Streams
from echo2p2p.net.program import OK, run_program
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.net.tls_streams import TlsStreams
from echo2p2p.testing.relays import Payload, RelayNet, RunKeys, wait_whole
from echo2p2p.weights.chunks import chunk_bytes_for
from echo2p2p.wire.messages import Address, Neighbour
from scenarios.lies import Lies, WatchedStreams
from scenarios.one_to_many import OneToMany, receive_whole

PORT: Final = 7000
POLL_S: Final = 0.01
LINK_POLL_S: Final = 0.25
"""Many processes that look often would leave each other no time to link."""
CHUNK_BYTES_MIN: Final = 16 * 1024
CHUNK_BYTES_MAX: Final = 1024 * 1024
"""Both as the coordinator's settings are by default."""
LINE_BYTES: Final = 65_536


class Role(msgspec.Struct, frozen=True):
    """Which machine of which network this is."""

    system: str
    settings: str
    index: int
    """0: the source."""
    hosts: list[str]
    reachable: list[bool]
    neighbours: list[int]
    """Peers that it should be linked to, beside the source."""
    payload_bytes: int
    seed: int
    tls: bool = False
    lie: str = ""
    """Of `scenarios.lies`, told from the start; not with ``tls``."""

    @property
    def name(self) -> str:
        """As `RelayNet` calls it."""
        return member_name(self.index)


class Ready(msgspec.Struct, frozen=True):
    """It listens, or is linked."""


class Finished(msgspec.Struct, frozen=True):
    """The whole payload is there; of the source, that it may begin."""

    seconds: float
    """Since the clock started."""


class Report(msgspec.Struct, frozen=True):
    """What it cost this process."""

    cpu_s: float
    """Since the clock started, kernel included."""
    received_bytes: int = 0
    """Of chunks."""
    duplicate_bytes: int = 0
    redealt: int = 0
    first_s: float = 0.0
    """When the first byte of payload left a source that makes others wait for its start."""


class Part(Protocol):
    """One system's part on this machine."""

    async def start(self) -> None:
        """Listen."""
        ...

    async def link(self) -> None:
        """Connect to the others; returns when that is done."""
        ...

    async def broadcast(self) -> None:
        """Begin, at the source; have all of it, elsewhere."""
        ...

    def report(self, cpu_s: float) -> Report:
        """Return the counters."""
        ...


def member_name(index: int) -> str:
    """Return what `RelayNet` calls the machine."""
    return "source" if index == 0 else f"p{index - 1}"


def make_payload(relays: RelayNet, payload_bytes: int) -> Payload:
    """Return a delta of random bytes, in chunks as a coordinator cuts them."""
    chunk_bytes = chunk_bytes_for(
        payload_bytes, chunk_bytes_min=CHUNK_BYTES_MIN, chunk_bytes_max=CHUNK_BYTES_MAX
    )
    return relays.keys.payload(1, payload_bytes, chunk_bytes=chunk_bytes)


class RelayPart:
    """``echo2p2p``."""

    def __init__(self, role: Role, nursery: trio.Nursery) -> None:
        self._role = role
        reachable = role.reachable[role.index]
        where = Endpoint(role.hosts[role.index], PORT) if reachable else None
        streams: Streams = TcpStreams()
        if role.tls:
            streams = TlsStreams(streams, RunKeys(role.seed).leaf(role.name))
        elif role.lie:
            told = Lies(random.Random(role.seed), {role.lie})  # noqa: S311 - to be repeatable
            streams = WatchedStreams(streams, told, lambda _: None)
        self._net = RelayNet(nursery, lambda _: streams, listen=lambda _: where, seed=role.seed)
        self._payload = None if role.index else make_payload(self._net, role.payload_bytes)

    async def start(self) -> None:
        """See `Part`."""
        await self._net.start(self._role.name)

    async def link(self) -> None:
        """See `Part`."""
        role, node = self._role, self._node
        node.set_neighbours(
            [Neighbour(peer_id=self._id(i), address=self._address(i)) for i in role.neighbours],
            self._address(0),
            peers=len(role.hosts) - 1,
        )
        wanted = len(role.neighbours) + (role.index > 0)
        while len(node.statistics().links) < wanted:
            await a_moment(LINK_POLL_S)

    async def broadcast(self) -> None:
        """See `Part`."""
        payload, node = self._payload, self._node
        if payload is not None:
            node.publish(payload.signed, payload.assembly, push=True)
            return
        while not node.headers():
            await a_moment()
        for manifest_id in node.headers():
            await wait_whole(node, manifest_id)

    def report(self, cpu_s: float) -> Report:
        """See `Part`."""
        found = self._node.statistics()
        return Report(cpu_s, found.received_bytes, found.duplicate_bytes, found.chunks_redealt)

    @property
    def _node(self) -> RelayNode:
        return self._net.members[self._role.name].node

    def _id(self, index: int) -> PeerId:
        return self._net.peer_id(member_name(index))

    def _address(self, index: int) -> Address | None:
        role = self._role
        return Address(host=role.hosts[index], port=PORT) if role.reachable[index] else None


class OneToManyPart:
    """``one-to-many``."""

    def __init__(self, role: Role, nursery: trio.Nursery) -> None:
        self._role = role
        self._nursery = nursery
        self._streams = TcpStreams()
        self._stream: trio.abc.Stream | None = None
        self._server: OneToMany | None = None

    async def start(self) -> None:
        """See `Part`."""
        role = self._role
        if role.index == 0:
            payload = make_payload(
                RelayNet(self._nursery, lambda _: self._streams), role.payload_bytes
            )
            self._server = OneToMany(payload.assembly.payload().tobytes(), len(role.hosts) - 1)
            await self._nursery.start(
                self._server.run, self._streams, Endpoint(role.hosts[0], PORT)
            )

    async def link(self) -> None:
        """See `Part`."""
        if self._server is not None:
            await self._server.connected.wait()
        else:
            where = Endpoint(self._role.hosts[0], PORT)
            self._stream = await self._streams.dial(where, timeout_s=10.0)

    async def broadcast(self) -> None:
        """See `Part`."""
        if self._server is not None:
            self._server.go.set()
        else:
            assert self._stream is not None
            await receive_whole(self._stream, self._role.payload_bytes)

    def report(self, cpu_s: float) -> Report:
        """See `Part`."""
        return Report(cpu_s, 0 if self._server else self._role.payload_bytes)


PARTS: Final[dict[str, Callable[[Role, trio.Nursery], Part]]] = {
    "echo2p2p": RelayPart,
    "one-to-many": OneToManyPart,
}


def cpu_s() -> float:
    """Return the CPU time of this process, kernel included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def a_moment(seconds: float = POLL_S) -> None:
    """Let the relays run on: what is waited for is no event of theirs."""
    await trio.sleep(seconds)


async def words() -> AsyncGenerator[str, None]:
    """Yield the lines of standard input."""
    waiting = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as stream:
        while data := await stream.receive_some(LINE_BYTES):
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                yield line.decode()


def say(answer: Ready | Finished | Report) -> None:
    """Answer one word."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


async def obey(part: Part) -> None:
    """Do what standard input says, until it ends."""
    before_s = 0.0
    await part.start()
    say(Ready())
    async with aclosing(words()) as lines:
        async for line in lines:
            match line.split():
                case ["link"]:
                    await part.link()
                    say(Ready())
                case ["go", text]:
                    before_s, start_s = cpu_s(), float(text)
                    await trio.sleep(max(0.0, start_s - time.monotonic()))
                    await part.broadcast()
                    say(Finished(time.monotonic() - start_s))
                case ["stop"]:
                    say(part.report(cpu_s() - before_s))


async def main(text: str) -> int:
    """Play the role that ``text`` describes."""
    role = msgspec.json.decode(text, type=Role)
    async with trio.open_nursery() as nursery:
        await obey(PARTS[role.system](role, nursery))
        nursery.cancel_scope.cancel()
    return OK


if __name__ == "__main__":
    sys.exit(run_program(partial(main, sys.argv[1])))
