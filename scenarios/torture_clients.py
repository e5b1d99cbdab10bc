"""The torture's clients: members that upload as fast as they may, and remember what they were told.

They are the peer's own HTTP client without an engine: an answer takes no time. Each sample has
log-probs that no other has, so that it can be found again in what the learner has consumed. What
the coordinator has acknowledged is kept here, in a process that nobody kills.
"""

from __future__ import annotations

import random

import trio

from coordinator.membership import NO_MEASUREMENTS
from echo2p2p.errors import HttpError, RefusedError
from echo2p2p.ids import Incarnation, Version
from echo2p2p.limits import PROTOCOL
from echo2p2p.net.ports import Entropy, HttpClient
from echo2p2p.net.trust import JoinToken, PeerIdentity, join_proof
from echo2p2p.wire.arrays import from_logprobs, from_tokens, to_tokens
from echo2p2p.wire.messages import (
    Caps,
    Hardware,
    Heartbeat,
    JoinRequest,
    Lease,
    ManifestHeader,
    Sample,
    Span,
    Upload,
)
from echo2p2p.wire.signing import open_record
from peer.coordinator_client import BusyError, CoordinatorClient, join
from scenarios.record import Record, sample_name

LANES = 2
LEASES_AT_ONCE = 4
PAUSE_S = 0.05
"""Before something is tried again."""
BEAT_S = 0.3
TWICE_SHARE = 0.1
"""Of the uploads, those sent twice at once."""


class Client:
    """One member, through all lives of the coordinator.

    Args:
        name: For people.
        http: To the coordinator, whichever life it is in.
        token: Of the run.
        entropy: Source of the identity.
        record: Shared by all clients.
    """

    def __init__(
        self, name: str, http: HttpClient, token: JoinToken, entropy: Entropy, record: Record
    ) -> None:
        self._name = name
        self._http = http
        self._token = token
        self._entropy = entropy
        self._identity = PeerIdentity.create(entropy)
        self._record = record
        self._rng = entropy.rng(name)
        self._version: Version | None = None
        self._run_key = b""

    async def run(self) -> None:
        """Join, work, and join again whenever the membership has ended; until cancelled."""
        while True:
            try:
                reply = await join(self._http, self._token.encode(), self._request())
            except (HttpError, RefusedError):
                await trio.sleep(PAUSE_S)
                continue
            incarnation = Incarnation(reply.incarnation)
            client = CoordinatorClient(self._http, reply.credential, incarnation, lambda: None)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._follow, client)
                    nursery.start_soon(self._beat, client, incarnation)
                    for _ in range(LANES):
                        nursery.start_soon(self._work, client, incarnation)
            except* RefusedError:
                pass  # no member any more

    def learn_key(self, run_public_key: bytes) -> None:
        """Take the run's key, with which manifests are verified."""
        self._run_key = run_public_key

    def _request(self) -> JoinRequest:
        nonce = self._entropy.secret(16)
        proof = join_proof(self._identity, self._token.fingerprint, nonce, b"", self._name)
        return JoinRequest(
            protocol=PROTOCOL,
            name=self._name,
            public_key=self._identity.public_key,
            proof=proof,
            nonce=nonce,
            csr=b"",
            relay=None,
            engine="fake",
            hardware=Hardware(accelerator="none", cores=1, memory_bytes=0),
            caps=Caps(upload_bytes_per_s=None, download_bytes_per_s=None, bytes_per_day=None),
        )

    async def _follow(self, client: CoordinatorClient) -> None:
        """Claim each version as soon as its manifest is shown; nothing is downloaded."""
        while True:
            try:
                path = await client.manifests(self._version, 5.0)
            except HttpError:
                await trio.sleep(PAUSE_S)
                continue
            for signed in path:
                header = open_record(signed, self._run_key, ManifestHeader)
                self._record.shown(header)
                self._version = Version(header.version)

    async def _beat(self, client: CoordinatorClient, incarnation: Incarnation) -> None:
        while True:
            beat = Heartbeat(
                incarnation=incarnation,
                state="warming" if self._version is None else "ready",
                version=self._version,
                holdings=[],
                relays=True,
                measurements=NO_MEASUREMENTS,
                price_usd_per_hour=0.0,
                available_s=None,
            )
            try:
                await client.heartbeat(beat)
            except HttpError:
                await trio.sleep(PAUSE_S)
            else:
                await trio.sleep(BEAT_S if self._version is not None else PAUSE_S)

    async def _work(self, client: CoordinatorClient, incarnation: Incarnation) -> None:
        while True:
            if self._version is None:
                await trio.sleep(PAUSE_S)
                continue
            try:
                leases = await client.leases(self._version, LEASES_AT_ONCE, 1.0)
            except HttpError:
                await trio.sleep(PAUSE_S)
                continue
            for lease in leases:
                upload = self._answer(lease, incarnation)
                async with trio.open_nursery() as nursery:
                    for _ in range(2 if self._rng.random() < TWICE_SHARE else 1):
                        nursery.start_soon(self._send, client, lease, upload)

    async def _send(self, client: CoordinatorClient, lease: Lease, upload: Upload) -> None:
        """Hand one in; tries until there is an answer."""
        while True:
            try:
                reply = await client.upload(upload)
            except BusyError as busy:
                await trio.sleep(min(busy.retry_after_s, PAUSE_S))
            except HttpError:
                await trio.sleep(PAUSE_S)
            else:
                self._record.decided(lease.lease_id, lease.samples, reply)
                return

    def _answer(self, lease: Lease, incarnation: Incarnation) -> Upload:
        digits = sorted(to_tokens(lease.prompt).tolist()[1:-1])
        stop = lease.stop_ids[0]
        samples = [_sample([stop], lease.version, self._rng)]
        samples += [
            _sample([*digits, stop], lease.version, self._rng) for _ in range(lease.samples - 1)
        ]
        for sample in samples:
            self._record.samples[sample_name(sample.logprobs.data)] = lease.lease_id
        return Upload(
            incarnation=incarnation, lease_id=lease.lease_id, samples=samples, seconds=0.0
        )


def _sample(tokens: list[int], version: int, rng: random.Random) -> Sample:
    return Sample(
        tokens=from_tokens(tokens),
        logprobs=from_logprobs([-rng.random() - 0.001 for _ in tokens]),
        spans=[Span(version=version, start=0, end=len(tokens))],
        finish="stop",
    )
