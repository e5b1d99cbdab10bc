"""A run's keys, payloads of random bytes, and whole networks of `RelayNode` for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2p2p.broadcast.settings import MESH_NODES_MAX
from echo2p2p.errors import LocalProtocolError
from echo2p2p.ids import SOURCE, Incarnation, ManifestId, PeerId, digest_of, peer_id_of
from echo2p2p.limits import PROTOCOL
from echo2p2p.net import trust
from echo2p2p.net.payloads import Begin, RelaySettings, in_memory
from echo2p2p.net.ports import Endpoint, Streams, TlsServer, WallClock
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.system import SystemClock
from echo2p2p.net.trust import CertificateAuthority, PeerIdentity
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import SimEntropy
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.chunks import split
from echo2p2p.weights.manifest import manifest_id
from echo2p2p.wire.messages import Address, ManifestHeader, MemberCard, Neighbour, Signed
from echo2p2p.wire.signing import sign_record

RUN_ID: Final = "5eed" * 8


@dataclass(frozen=True)
class Payload:
    """Something to broadcast."""

    manifest_id: ManifestId
    signed: Signed
    assembly: Assembly
    """Complete."""

    @property
    def size(self) -> int:
        """Bytes of all chunks, the index included."""
        return self.assembly.header.payload_bytes + self.assembly.header.index_bytes


class RunKeys:
    """The secrets of one run, all from one seed."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.run_key = self._key("run")
        self.run_public_key = self.run_key.public_key().public_bytes_raw()

    def _key(self, name: str) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self._secret(name))

    def _secret(self, name: str) -> bytes:
        return digest_of(f"{self._seed} {name}".encode())

    def identity(self, name: str) -> tuple[PeerId, Ed25519PrivateKey]:
        """Return the id and the key of the member called ``name``."""
        key = self._key(name)
        return peer_id_of(key.public_key().public_bytes_raw()), key

    def card(self, name: str, *, incarnation: int = 1) -> Signed:
        """Return the run's card for ``name``."""
        peer_id, key = self.identity(name)
        public_key = key.public_key().public_bytes_raw()
        card = MemberCard(
            run_id=RUN_ID, peer_id=peer_id, incarnation=incarnation, public_key=public_key
        )
        return sign_record(self.run_key, card)

    def leaf(self, name: str, *, clock: WallClock | None = None) -> TlsServer:
        """Return what the member called ``name``, or the source, shows in TLS.

        Args:
            name: ``"source"``, or any other.
            clock: The leaf is valid from the day before on; real by default, as is that of `ssl`.
        """
        entropy = SimEntropy(f"{self._seed} {name}")
        authority = CertificateAuthority(
            trust.RunKeys(self.run_key), clock or SystemClock(), entropy
        )
        if name == "source":
            return TlsServer(authority.certificate, *authority.issue_coordinator([]))
        identity = PeerIdentity(self._secret(name))
        csr, key = identity.make_csr(entropy)
        leaf = authority.sign_peer(csr, identity.peer_id, Incarnation(1))
        return TlsServer(authority.certificate, leaf, key)

    def payload(
        self, version: int, size: int, *, chunk_bytes: int = 16 * 1024, anchor: bool = False
    ) -> Payload:
        """Return ``size`` random bytes, signed as a delta on the version before or as an anchor."""
        rng = random.Random(f"{self._seed} {version} {anchor}")  # noqa: S311 - to be repeatable
        chunked = split(rng.randbytes(size), chunk_bytes)
        digest = digest_of(chunked.payload)
        header = ManifestHeader(
            protocol=PROTOCOL,
            content="model",
            run_id=RUN_ID,
            version=version,
            chain_id="chain",
            step=version,
            generation=0,
            base_version=None if anchor else version - 1,
            base_digest=None if anchor else digest,
            result_digest=digest,
            layout_digest=digest,
            index_digest=chunked.index_digest,
            index_bytes=len(chunked.index),
            payload_bytes=size,
            chunk_bytes=chunk_bytes,
            expires_at_s=0.0,
        )
        signed = sign_record(self.run_key, header)
        assembly = Assembly.whole(header, chunked.payload, chunked.index)
        return Payload(manifest_id(signed), signed, assembly)


@dataclass(eq=False)
class Member:
    """One running node."""

    name: str
    node: RelayNode
    journal: TraceJournal
    address: Address | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    completed_s: dict[ManifestId, float] = field(default_factory=dict)
    """When each payload that was waited for by `RelayNet.broadcast` was complete."""


class RelayNet:
    """A source and peers on any `Streams`, linked as a full mesh.

    Args:
        nursery: Their tasks live here.
        streams: The port of the node with this name.
        listen: Where the node with this name listens; ``None``: it only dials.
        seed: Of keys and choices.
        settings: For all nodes.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        streams: Callable[[str], Streams],
        *,
        listen: Callable[[str], Endpoint | None] = lambda name: Endpoint(name, 0),
        seed: int = 0,
        settings: RelaySettings | None = None,
    ) -> None:
        self.keys = RunKeys(seed)
        self.members: dict[str, Member] = {}
        self._nursery = nursery
        self._streams = streams
        self._listen = listen
        self._entropy = SimEntropy(seed)
        self._settings = settings

    @property
    def source(self) -> Member:
        """The source."""
        return self.members["source"]

    @property
    def peers(self) -> list[Member]:
        """All others, in the order of their start."""
        return [member for member in self.members.values() if member.name != "source"]

    def peer_id(self, name: str) -> PeerId:
        """Return the id of the member called ``name``."""
        return SOURCE if name == "source" else self.keys.identity(name)[0]

    async def start(
        self,
        name: str,
        *,
        incarnation: int = 1,
        wants: Callable[[ManifestHeader], bool] = lambda _header: True,
        asked: Callable[[Signed, ManifestHeader], None] = lambda _signed, _header: None,
        begin: Begin = in_memory,
        streams: Streams | None = None,
        kind: type[RelayNode] = RelayNode,
    ) -> Member:
        """Start one member; links come with `link_up`. ``kind`` may misbehave."""
        peer_id, key = self.keys.identity(name)
        is_source = name == "source"
        journal = TraceJournal()
        entropy = self._entropy.fork(f"{name} {incarnation}")
        node = kind(
            me=SOURCE if is_source else peer_id,
            run_id=RUN_ID,
            run_public_key=self.keys.run_public_key,
            sign=(self.keys.run_key if is_source else key).sign,
            card=None if is_source else self.keys.card(name, incarnation=incarnation),
            streams=streams or self._streams(name),
            endpoint=self._listen(name),
            wants=wants,
            asked=asked,
            begin=begin,
            journal=journal,
            entropy=entropy,
            rng=entropy.rng("relay"),
            settings=self._settings,
        )
        member = self.members[name] = Member(name, node, journal)
        endpoint: Endpoint | None = await self._nursery.start(self._run, member)
        if endpoint is not None:
            member.address = Address(host=endpoint.host, port=endpoint.port)
        return member

    async def _run(self, member: Member, *, task_status: trio.TaskStatus[Endpoint | None]) -> None:
        with member.scope:
            await member.node.run(task_status=task_status)

    def stop(self, name: str) -> None:
        """End a member's tasks, as a killed process would."""
        self.members.pop(name).scope.cancel()

    def link_up(
        self,
        overlay: Mapping[PeerId, Collection[PeerId]] | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        """Tell everybody, or those called so, of everybody, or of those that ``overlay`` names.

        If it names the source's neighbours, others are not linked to it.
        """
        everybody = {
            self.peer_id(member.name): Neighbour(
                peer_id=self.peer_id(member.name), address=member.address
            )
            for member in self.peers
        }
        for name, member in self.members.items():
            if names is None or name in names:
                peer_id = self.peer_id(name)
                chosen = overlay.get(peer_id) if overlay else None
                at_source = not overlay or peer_id in overlay.get(SOURCE, [peer_id])
                plan = [everybody[one] for one in (everybody if chosen is None else chosen)]
                source = self.source.address if at_source else None
                member.node.set_neighbours(plan, source, peers=len(everybody))

    async def wait_linked(self, links: int | None = None) -> None:
        """Wait until there are so many links in all (default: all pairs, the source included)."""
        if links is None:
            links = len(self.members) * (len(self.members) - 1) // 2
        up = 0
        while up < 2 * links:
            await self._progress(len(self.members) / MESH_NODES_MAX)
            up = sum(len(member.node.statistics().links) for member in self.members.values())

    async def _progress(self, patience: float = 1.0) -> None:
        """Let the nodes run on for a moment of the run's time."""
        await trio.sleep(0.01 * max(1.0, patience))

    async def broadcast(
        self, payload: Payload, *, push: bool = True, names: Iterable[str] | None = None
    ) -> float:
        """Publish at the source; return the seconds until all named peers (default: all) have it.

        Each must follow it by itself, on the offer.
        """
        start_s = trio.current_time()
        self.source.node.publish(payload.signed, payload.assembly, push=push)
        waiting = [m for m in self.peers if names is None or m.name in names]
        async with trio.open_nursery() as nursery:
            for member in waiting:
                nursery.start_soon(self._wait, member, payload)
        return trio.current_time() - start_s

    async def _wait(self, member: Member, payload: Payload) -> None:
        start_s = trio.current_time()
        while member.node.assembly(payload.manifest_id) is None:
            await self._progress()
        assembly = await wait_whole(member.node, payload.manifest_id)
        assert assembly.payload() == payload.assembly.payload()
        member.completed_s[payload.manifest_id] = trio.current_time() - start_s


async def wait_whole(node: RelayNode, manifest_id: ManifestId) -> Assembly:
    """Return a payload that a node follows once every chunk is verified; waits without limit.

    Raises:
        LocalProtocolError: It is neither followed nor held, or was forgotten meanwhile.
    """
    while (assembly := node.assembly(manifest_id)) is not None and not assembly.complete:
        await node.wait_grown(manifest_id)
    if assembly is None:
        raise LocalProtocolError(f"payload {manifest_id.hex()} is not followed")
    await trio.lowlevel.checkpoint()
    return assembly
