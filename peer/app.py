"""Composition root of a peer: builds the parts, supervises them, joins again when it must.

The engine and the flat weights outlive a membership: a peer that was evicted (or whose
coordinator came back without knowing it) joins again as a new incarnation and goes on from the
version that it holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar
from urllib.parse import urlsplit

import trio

from echo2p2p.errors import ConfigError, EngineError, HttpError
from echo2p2p.limits import PROTOCOL
from echo2p2p.net.ports import (
    Endpoint,
    Entropy,
    HttpClient,
    HttpClients,
    Journal,
    Offload,
    SharedMemory,
    Streams,
    TlsClient,
    WallClock,
)
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.trust import (
    NONCE_BYTES,
    JoinToken,
    PeerIdentity,
    authority_from,
    join_proof,
    run_key_from,
)
from echo2p2p.weights.layout import Layout
from echo2p2p.wire.messages import Address, Caps, Hardware, JoinReply, JoinRequest
from peer.config import PeerSettings
from peer.coordinator_client import BusyError, fetch_ca
from peer.coordinator_client import join as send_join
from peer.engine.base import Engine, EngineSetup
from peer.keeper import EngineKeeper
from peer.membership import Membership
from peer.weights import Weights

_T = TypeVar("_T")

PEER_JOINED: Final = "peer.joined"
JOIN_WAITS: Final = "join.waits"
MEMBERSHIP_LOST: Final = "membership.lost"
RUN_ENDED: Final = "run.ended"
PAUSE_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Between tries to reach the coordinator."""


@dataclass(frozen=True)
class PeerPorts:
    """The world, real or simulated."""

    clock: WallClock
    entropy: Entropy
    journal: Journal
    offload: Offload
    streams: Streams
    http: HttpClients
    memory: SharedMemory
    make_engine: Callable[[], Engine] | None
    """``None``: relay only."""
    engine_kind: Literal["none", "hf", "vllm", "fake"]
    hardware: Hardware


@dataclass(frozen=True)
class _Trust:
    """What the token has led us to believe."""

    run_public_key: bytes
    authority: bytes | None
    """``None`` without TLS."""


class PeerApp:
    """One peer, from start to the end of the run."""

    def __init__(self, settings: PeerSettings, ports: PeerPorts, identity: PeerIdentity) -> None:
        self._settings = settings
        self._ports = ports
        self._identity = identity
        self._token = JoinToken.parse(settings.token)
        parts = urlsplit(settings.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError("url", f"{settings.url!r} is no URL; write https://host:port")
        self._tls = parts.scheme == "https"
        self._weights: Weights | None = None
        self._keeper: EngineKeeper | None = None

    async def run(self) -> Literal["finished", "failed"]:
        """Take part until the run ends.

        Raises:
            RefusedError: The coordinator does not take us.
            HttpError: The coordinator cannot be reached for ``join_timeout_s``.
            EngineError: The engine cannot be kept alive.
        """
        try:
            async with trio.open_nursery() as nursery:
                outcome = await self._sessions(nursery)
                nursery.cancel_scope.cancel()
                return outcome
        finally:
            if self._weights is not None:
                self._weights.close()
        raise AssertionError("the nursery was cancelled by us alone")

    async def _sessions(self, nursery: trio.Nursery) -> Literal["finished", "failed"]:
        while True:
            trust = await self._patiently(self._fetch_trust)
            csr, key = self._identity.make_csr(self._ports.entropy) if self._tls else (b"", b"")
            ended = await self._session(nursery, trust, csr, key)
            if ended != "evicted":
                self._ports.journal.event(RUN_ENDED, outcome=ended)
                return ended
            self._ports.journal.event(MEMBERSHIP_LOST)

    # --- joining ------------------------------------------------------------------------------

    async def _patiently(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Try until ``join_timeout_s`` is over, with one line a try."""
        deadline_s = trio.current_time() + self._settings.join_timeout_s
        tries = 0
        while True:
            try:
                return await attempt()
            except BusyError as busy:
                error: HttpError = busy
                pause_s = busy.retry_after_s
            except HttpError as unreachable:
                error = unreachable
                pause_s = PAUSE_S[min(tries, len(PAUSE_S) - 1)]
            tries += 1
            if trio.current_time() + pause_s > deadline_s:
                raise error
            self._ports.journal.event(JOIN_WAITS, detail=str(error), tries=tries, pause_s=pause_s)
            await trio.sleep(pause_s)

    async def _fetch_trust(self) -> _Trust:
        """Believe nobody: take the run's key only if it is the token's."""
        unverified = TlsClient(authority=None) if self._tls else None
        async with self._ports.http.connect(self._settings.url, unverified) as http:
            reply = await fetch_ca(http)
        if self._tls:
            return _Trust(reply.run_public_key, authority_from(reply, self._token))
        return _Trust(run_key_from(reply, self._token), None)

    async def _join(self, http: HttpClient, csr: bytes, address: Address | None) -> JoinReply:
        nonce = self._ports.entropy.secret(NONCE_BYTES)
        name = self._settings.name
        proof = join_proof(self._identity, self._token.fingerprint, nonce, csr, name)
        request = JoinRequest(
            protocol=PROTOCOL,
            name=name,
            public_key=self._identity.public_key,
            proof=proof,
            nonce=nonce,
            csr=csr,
            relay=address,
            engine=self._ports.engine_kind,
            hardware=self._ports.hardware,
            caps=Caps(upload_bytes_per_s=None, download_bytes_per_s=None, bytes_per_day=None),
        )
        return await send_join(http, self._token.encode(), request)

    # --- one membership -----------------------------------------------------------------------

    async def _session(
        self, outer: trio.Nursery, trust: _Trust, csr: bytes, key: bytes
    ) -> Literal["finished", "failed", "evicted"]:
        """Listen, join, work; return how the membership ended."""
        settings, ports = self._settings, self._ports
        holder: list[RelayNode] = []

        async def accept(stream: trio.abc.Stream) -> None:
            if holder:
                await holder[0].accept(stream)

        bind = Endpoint(settings.relay.host, settings.relay.port)
        first = TlsClient(authority=trust.authority) if self._tls else None
        async with ports.streams.listen(bind, accept) as real:
            address = _public(settings, real)
            async with ports.http.connect(settings.url, first) as http:
                reply = await self._patiently(lambda: self._join(http, csr, address))
            journal = ports.journal.bind(peer=reply.peer_id[:8])
            journal.event(PEER_JOINED, incarnation=reply.incarnation, run=reply.run_id)
            mine = TlsClient(trust.authority, reply.certificate, key) if self._tls else None
            async with ports.http.connect(settings.url, mine) as http:
                membership = Membership(
                    settings=settings,
                    streams=ports.streams,
                    entropy=ports.entropy,
                    offload=ports.offload,
                    sign=self._identity.sign,
                    dialable=address is not None,
                    reply=reply,
                    run_public_key=trust.run_public_key,
                    http=http,
                    journal=journal,
                )
                holder.append(membership.relay)
                weights, keeper = self._parts(outer, reply)
                try:
                    return await membership.run(weights, keeper)
                finally:
                    await membership.leave()

    def _parts(self, outer: trio.Nursery, reply: JoinReply) -> tuple[Weights, EngineKeeper | None]:
        """Return weights and engine, made once for the life of the process."""
        layout = Layout.from_table(reply.layout)
        if self._weights is None:
            self._weights = Weights(layout, self._ports.memory)
            if self._ports.make_engine is not None:
                engine = self._settings.engine
                self._keeper = EngineKeeper(
                    make_engine=self._ports.make_engine,
                    setup=EngineSetup(
                        layout=reply.layout,
                        model_config=reply.model_config,
                        threads=engine.threads,
                        dtype=engine.dtype,
                    ),
                    restarts_max=engine.restarts_max,
                    journal=self._ports.journal,
                )
                outer.start_soon(self._keeper.run)
        elif self._weights.layout.digest != layout.digest:
            raise EngineError("the run has another model now; start this peer again")
        return self._weights, self._keeper


def _public(settings: PeerSettings, real: Endpoint) -> Address | None:
    """Return where others can dial us, or ``None`` if they cannot."""
    host = settings.relay.public_host or real.host
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104 compared, not bound
        return None
    return Address(host=host, port=real.port)
