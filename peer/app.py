"""Composition root of a peer: builds the parts, supervises them, joins again when it must.

The engine and the flat weights outlive a membership: a peer that was evicted (or whose
coordinator came back without knowing it) joins again as a new incarnation and goes on from the
version that it holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

import trio

from echo2p2p.errors import ConfigError, EchoError, EngineError, HttpError, StoreError
from echo2p2p.limits import PROTOCOL, Fill
from echo2p2p.net.ports import (
    Blobs,
    Endpoint,
    Entropy,
    HttpClient,
    HttpClients,
    HttpServer,
    Journal,
    Offload,
    SharedMemory,
    Streams,
    TlsClient,
    TlsServer,
    WallClock,
)
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.shaping import (
    Limits,
    NoTrafficLog,
    ShapedHttpClients,
    Shaper,
    Stage,
    TrafficLog,
)
from echo2p2p.net.tls_streams import TlsStreams
from echo2p2p.net.tokenizer import MODEL_FILES, FolderTokenizer
from echo2p2p.net.trust import (
    NONCE_BYTES,
    JoinToken,
    PeerIdentity,
    authority_from,
    join_proof,
    run_key_from,
)
from echo2p2p.weights.layout import Layout
from echo2p2p.wire.messages import (
    Address,
    Caps,
    CaReply,
    Hardware,
    JoinReply,
    JoinRequest,
    LayoutTable,
)
from peer.config import PeerSettings
from peer.coordinator_client import STARTING, BusyError, CoordinatorClient, fetch_ca
from peer.coordinator_client import join as send_join
from peer.engine.base import CACHE_BYTES_CPU, Engine, EngineSetup, VllmSetup
from peer.figures import PeerFigures, Tally
from peer.keeper import EngineKeeper
from peer.local import ReadModel
from peer.membership import Membership, Outcome
from peer.state import Weights

_T = TypeVar("_T")

PEER_JOINED: Final = "peer.joined"
JOIN_WAITS: Final = "join.waits"
TOKENIZER_MISSING: Final = "tokenizer.missing"
MEMBERSHIP_LOST: Final = "membership.lost"
RUN_ENDED: Final = "run.ended"
DATA_CAP_SPENT: Final = "data_cap.spent"
DATA_CAP_RENEWED: Final = "data_cap.renewed"
PAUSE_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Between tries to reach the coordinator."""
PROBE_S: Final = 3.0
"""For a look whether the coordinator speaks the other scheme."""
ENGINE_BASE_BYTES: Final = {"hf": 400_000_000, "vllm": 900_000_000}
"""Of an engine's process without a model: Python, torch, and room to generate."""
STATE_SHARE: Final = 1.2
"""Memory of the weights while a version is applied, as a share of the model (ARCHITECTURE §5)."""
BYTES_BY_DTYPE: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    outbox: Blobs | None = None
    """For finished work while the coordinator is away; ``None``: it waits in memory."""
    memory_free: Callable[[], int | None] = lambda: None
    """Bytes that this machine can still give; ``None``: it does not say."""
    read_model: ReadModel | None = None
    """Reads the folder that the volunteer has of the run's first weights."""
    traffic_log: TrafficLog = field(default_factory=NoTrafficLog)
    """Used only where there is a daily cap."""
    make_http_server: Callable[[], HttpServer] | None = None
    """For the peer's own metrics, and its model; ``None``: it serves none."""
    open_tokenizer: Callable[[Mapping[str, bytes] | None], FolderTokenizer] | None = None
    """Reads the model's tokenizer, to serve it, from files that the run gave or from the
    volunteer's own folder."""


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
        self._tls = _scheme(settings.url) == "https"
        if not settings.token:
            raise ConfigError(
                "token", "none was given: add --token e2p-..., as the run's owner has it"
            )
        self._token = JoinToken.parse(settings.token)
        self._shaper: Shaper | None = None
        self._http: HttpClients = ports.http
        self._weights: Weights | None = None
        self._keeper: EngineKeeper | None = None
        self._membership: Membership | None = None
        self._past = Tally()
        self.tokenizer: FolderTokenizer | None = None
        """Of the model, for those who talk to it."""

    def figures(self) -> PeerFigures:
        """Return how this peer stands now."""
        if self._membership is not None:
            return self._membership.figures(self._past)
        resting = self._shaper is not None and self._shaper.stage() is Stage.SPENT
        return PeerFigures(state="resting" if resting else "joining", tally=self._past)

    @property
    def keeper(self) -> EngineKeeper | None:
        """The engine's keeper; ``None`` before the first membership, and of a relay."""
        return self._keeper

    def fills(self) -> Iterator[Fill]:
        """Yield how full everything is that has a bound; nothing between two memberships."""
        if self._membership is not None:
            yield from self._membership.fills()

    async def run(self) -> Literal["finished", "failed"]:
        """Take part until the run ends.

        Raises:
            RefusedError: The coordinator does not take us.
            HttpError: The coordinator cannot be reached for ``join_timeout_s``.
            EngineError: The engine cannot be kept alive.
            StoreError: The model does not fit into this machine.
        """
        limits, ports = limits_of(self._settings), self._ports
        if limits != Limits():
            self._shaper = Shaper(
                limits, clock=ports.clock, log=ports.traffic_log, journal=ports.journal
            )
            self._http = ShapedHttpClients(ports.http, self._shaper)
        try:
            async with trio.open_nursery() as nursery:
                outcome = await self._sessions(nursery)
                nursery.cancel_scope.cancel()
                return outcome
        finally:
            if self._shaper is not None:
                self._shaper.save()
            if self._weights is not None:
                self._weights.close()
        raise AssertionError("the nursery was cancelled by us alone")

    async def _sessions(self, nursery: trio.Nursery) -> Literal["finished", "failed"]:
        while True:
            await self._rest()
            trust = await self._patiently(self._fetch_trust)
            csr, key = self._identity.make_csr(self._ports.entropy) if self._tls else (b"", b"")
            ended = await self._session(nursery, trust, csr, key)
            match ended:
                case "finished" | "failed":
                    if self._weights is not None:
                        self._weights.drop_left(self._weights.left())
                    self._ports.journal.event(RUN_ENDED, outcome=ended)
                    return ended
                case "evicted":
                    self._ports.journal.event(MEMBERSHIP_LOST)
                case "resting":
                    pass

    async def _rest(self) -> None:
        """Wait for the next day if this one's bytes are spent."""
        shaper = self._shaper
        if shaper is None or shaper.stage() is not Stage.SPENT:
            return
        self._ports.journal.event(
            DATA_CAP_SPENT,
            used_bytes=shaper.day().used_bytes,
            cap_bytes=shaper.limits.bytes_per_day,
            joins_again_in_s=round(shaper.renews_in_s()),
        )
        await shaper.wait_renewed()
        self._ports.journal.event(DATA_CAP_RENEWED)

    # --- joining ------------------------------------------------------------------------------

    async def _patiently(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Try until ``join_timeout_s`` is over, with one line a try.

        A coordinator that says that it is starting is waited for as long as it says so: building
        a large model, and warming it up, may take hours.
        """
        deadline_s = trio.current_time() + self._settings.join_timeout_s
        tries = 0
        while True:
            try:
                return await attempt()
            except BusyError as busy:
                error: HttpError = busy
                pause_s = busy.retry_after_s
                if busy.reason == STARTING:
                    deadline_s = trio.current_time() + self._settings.join_timeout_s
            except HttpError as unreachable:
                error = unreachable
                pause_s = PAUSE_S[min(tries, len(PAUSE_S) - 1)]
            tries += 1
            if trio.current_time() + pause_s > deadline_s:
                waited_s = self._settings.join_timeout_s
                raise HttpError(f"{error} (gave up after {waited_s:g} s)") from error
            self._ports.journal.event(JOIN_WAITS, detail=str(error), tries=tries, pause_s=pause_s)
            await trio.sleep(pause_s)

    async def _fetch_trust(self) -> _Trust:
        """Believe nobody: take the run's key only if it is the token's."""
        url = self._settings.url
        try:
            reply = await self._ask_ca(url)
        except HttpError as error:
            other = _other_scheme(url)
            if not await self._answers(other):
                raise
            speaks = "speaks no TLS" if self._tls else "uses TLS"
            raise ConfigError("url", f"the coordinator {speaks}: write {other}") from error
        if self._tls:
            return _Trust(reply.run_public_key, authority_from(reply, self._token))
        return _Trust(run_key_from(reply, self._token), None)

    async def _ask_ca(self, url: str) -> CaReply:
        unverified = TlsClient(authority=None) if _scheme(url) == "https" else None
        async with self._http.connect(url, unverified) as http:
            return await fetch_ca(http)

    async def _answers(self, url: str) -> bool:
        """Return whether a coordinator answers there, asked once."""
        with trio.move_on_after(PROBE_S):
            try:
                await self._ask_ca(url)
            except EchoError:
                return False
            return True
        return False

    async def _join(self, http: HttpClient, csr: bytes, address: Address | None) -> JoinReply:
        nonce = self._ports.entropy.secret(NONCE_BYTES)
        settings = self._settings
        name = settings.name
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
            caps=Caps(
                upload_bytes_per_s=settings.upload_limit,
                download_bytes_per_s=settings.download_limit,
                bytes_per_day=settings.data_cap_per_day,
            ),
        )
        return await send_join(http, self._token.encode(), request)

    # --- one membership -----------------------------------------------------------------------

    async def _session(self, outer: trio.Nursery, trust: _Trust, csr: bytes, key: bytes) -> Outcome:
        """Listen, join, work; return how the membership ended."""
        settings, ports = self._settings, self._ports
        holder: list[RelayNode] = []

        async def accept(stream: trio.abc.Stream, host: str) -> None:
            if holder:
                await holder[0].accept(stream, host)

        bind = Endpoint(settings.relay.host, settings.relay.port)
        first = TlsClient(authority=trust.authority) if self._tls else None
        secure = TlsStreams(ports.streams)
        streams = secure if self._tls else ports.streams
        async with streams.listen(bind, accept) as real:
            address = public_address(settings, real)
            async with self._http.connect(settings.url, first) as http:
                reply = await self._patiently(lambda: self._join(http, csr, address))
            journal = ports.journal.bind(peer=reply.peer_id[:8])
            journal.event(
                PEER_JOINED,
                incarnation=reply.incarnation,
                run=reply.run_id,
                relay=f"{real.host} port {real.port}",
                dialable=address is not None,
            )
            mine = None
            if trust.authority is not None:
                mine = TlsClient(trust.authority, reply.certificate, key)
                secure.show(TlsServer(trust.authority, reply.certificate, key))
            async with self._http.connect(settings.url, mine) as http:
                membership = Membership(
                    settings=settings,
                    streams=streams,
                    entropy=ports.entropy,
                    offload=ports.offload,
                    sign=self._identity.sign,
                    dialable=address is not None,
                    reply=reply,
                    run_public_key=trust.run_public_key,
                    http=http,
                    shaper=self._shaper,
                    outbox=ports.outbox,
                    local=ports.read_model,
                    journal=journal,
                )
                holder.append(membership.relay)
                self._membership = membership
                try:
                    weights, keeper = self._parts(outer, reply)
                    if settings.serve.address is not None and self.tokenizer is None:
                        outer.start_soon(self._fetch_tokenizer, membership.client)
                    return await membership.run(weights, keeper)
                finally:
                    self._past, self._membership = self._past.plus(membership.tally()), None
                    await membership.leave()

    async def _fetch_tokenizer(self, client: CoordinatorClient) -> None:
        """Bring the model's tokenizer; without one it is tried again in the next membership."""
        ports, files = self._ports, {}
        assert ports.open_tokenizer is not None
        open_tokenizer = ports.open_tokenizer
        try:
            for name in MODEL_FILES:
                data = await client.model_file(name)
                if data is not None:
                    files[name] = data
            self.tokenizer = await ports.offload.run(lambda: open_tokenizer(files))
        except EchoError as error:
            ports.journal.event(TOKENIZER_MISSING, detail=str(error))

    def _parts(self, outer: trio.Nursery, reply: JoinReply) -> tuple[Weights, EngineKeeper | None]:
        """Return weights and engine, made once for the life of the process.

        Raises:
            StoreError: They do not fit.
            EngineError: The run has another model than before.
        """
        layout = Layout.from_table(reply.layout)
        if self._weights is None:
            self._check_memory(reply.layout)
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
                        vllm=VllmSetup(**engine.vllm.model_dump()),
                        in_flight=engine.switch == "in-flight",
                    ),
                    restarts_max=engine.restarts_max,
                    generate_timeout_s=engine.generate_timeout_s,
                    journal=self._ports.journal,
                    offload=self._ports.offload,
                )
                outer.start_soon(self._keeper.run)
        elif self._weights.layout.digest != layout.digest:
            raise EngineError("the run has another model now; start this peer again")
        return self._weights, self._keeper

    def _check_memory(self, layout: LayoutTable) -> None:
        """Compare what the model needs with what is free, before anything is fetched.

        Raises:
            StoreError: With the figures.
        """
        free = self._ports.memory_free()
        states, engine = int(STATE_SHARE * layout.total_bytes), 0
        if self._ports.make_engine is not None:
            engine = ENGINE_BASE_BYTES.get(self._ports.engine_kind, 0) + self._model_bytes(layout)
        if free is None or states + engine <= free:
            return
        need = f"{_giga(states + engine)} of memory ({_giga(states)} for the weights"
        if engine:
            need += f", {_giga(engine)} for the engine"
        mend = "free some, or use a larger machine"
        if engine and states <= free:
            mend = f"free some, or only relay, with --engine.kind none ({_giga(states)})"
        raise StoreError(f"the model needs {need}), and {_giga(free)} are free: {mend}")

    def _model_bytes(self, layout: LayoutTable) -> int:
        """Return what the engine's copy of the model takes of this machine's memory."""
        ports, engine = self._ports, self._settings.engine
        if ports.engine_kind == "vllm" and ports.hardware.accelerator != "cpu":
            return 0  # it lies on the GPU
        elements = sum(prod(tensor.shape) for tensor in layout.tensors)
        cache = (engine.vllm.cache_bytes or CACHE_BYTES_CPU) if ports.engine_kind == "vllm" else 0
        return elements * BYTES_BY_DTYPE.get(engine.dtype, 4) + cache


def limits_of(settings: PeerSettings) -> Limits:
    """Return what the volunteer allows."""
    return Limits(settings.upload_limit, settings.download_limit, settings.data_cap_per_day)


def _giga(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 50_000_000 else f"{count / 1e6:.1f} MB"


def _scheme(url: str) -> str:
    """Return ``http`` or ``https``.

    Raises:
        ConfigError: Not the URL of a coordinator.
    """
    if not url:
        raise ConfigError("url", "none was given: echo2-peer join https://host:port --token e2p-..")
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError("url", f"{url!r} is no URL; write https://host:port")
    return parts.scheme


def _other_scheme(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(scheme="http" if parts.scheme == "https" else "https"))


def public_address(settings: PeerSettings, real: Endpoint) -> Address | None:
    """Return where others can dial us, or ``None`` if they cannot; ``real`` is what was bound."""
    host = settings.relay.public_host or real.host
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104 compared, not bound
        return None
    return Address(host=host, port=settings.relay.public_port or real.port)
