"""What a lying peer uploads: the real peer's HTTP behind a port that adds to it and twists it.

As with `scenarios.lies`, only the port is wrapped. What all machines send is recorded for the final
audit: what the coordinator has acknowledged, to whomever, must be accounted for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import nan
from typing import Final

import msgspec

from echo2p2p.errors import HttpError, RemoteProtocolError
from echo2p2p.net.ports import HttpClient, HttpClients, Response, TlsClient
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_logprobs, to_logprobs
from echo2p2p.wire.messages import Lease, LeaseReply, Sample, Span, Upload, UploadReply
from scenarios.lies import Lies
from scenarios.record import Record, sample_name

STALE_FLOOD: Final = "stale-flood"
"""Twenty uploads for one, labelled with the oldest weights, under the lease and invented ones."""
DUPLICATE_UPLOADS: Final = "duplicate-uploads"
"""Every upload comes three times."""
CONFLICTING_UPLOADS: Final = "conflicting-uploads"
"""Every upload comes with two different contents."""
BAD_LOGPROBS: Final = "bad-logprobs"
"""Log-probs that are not a number."""
STOLEN_LEASES: Final = "stolen-leases"
"""Answers to other peers' leases under the liar's own name."""
STOLEN_CREDENTIALS: Final = "stolen-credentials"
"""Answers to other peers' leases under their names."""
UPLOAD_LIES: Final = (
    STALE_FLOOD,
    DUPLICATE_UPLOADS,
    CONFLICTING_UPLOADS,
    BAD_LOGPROBS,
    STOLEN_LEASES,
    STOLEN_CREDENTIALS,
)
FLOOD: Final = 20


@dataclass
class Loot:
    """What a thief could have: everybody's credentials and open leases."""

    headers: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Of the last request, by machine."""
    leases: dict[str, tuple[str, Lease]] = field(default_factory=dict)
    """Holder and lease, by lease id; until its holder uploads."""


class WatchedHttp:
    """`HttpClients` of one machine, recorded, and twisted while it lies.

    Args:
        inner: The machine's real port.
        name: Of the machine.
        lies: Of the machine.
        record: Of what is acknowledged.
        loot: Shared by all machines.
    """

    def __init__(
        self, inner: HttpClients, name: str, lies: Lies, record: Record, loot: Loot
    ) -> None:
        self._inner = inner
        self.name = name
        self.lies = lies
        self.record = record
        self.loot = loot

    @asynccontextmanager
    async def connect(self, url: str, tls: TlsClient | None) -> AsyncIterator[HttpClient]:
        """See `HttpClients`."""
        async with self._inner.connect(url, tls) as client:
            yield _WatchedClient(client, self)


class _WatchedClient:
    def __init__(self, inner: HttpClient, of: WatchedHttp) -> None:
        self._inner = inner
        self._name, self._lies, self._record, self._loot = of.name, of.lies, of.record, of.loot

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Response:
        """See `HttpClient`."""
        headers = headers or {}
        if path in {"/lease", "/upload"}:
            self._loot.headers[self._name] = headers
        if path != "/upload":
            response = await self._inner.request(
                method, path, body=body, headers=headers, timeout_s=timeout_s
            )
            if path == "/lease" and response.status == 200:
                self._note_leases(response)
            return response
        upload = codec.decode(body, Upload)
        self._loot.leases.pop(upload.lease_id, None)
        for other, theirs in self._instead(upload, headers):
            try:
                await self._send(other, theirs, timeout_s)
            except HttpError:
                break
        return await self._send(upload, headers, timeout_s)

    def _note_leases(self, response: Response) -> None:
        for lease in codec.decode(response.body, LeaseReply).leases:
            self._loot.leases[lease.lease_id] = (self._name, lease)

    async def _send(self, upload: Upload, headers: Mapping[str, str], timeout_s: float) -> Response:
        for sample in upload.samples:
            self._record.samples[sample_name(sample.logprobs.data)] = upload.lease_id
        response = await self._inner.request(
            "POST", "/upload", body=codec.encode(upload), headers=headers, timeout_s=timeout_s
        )
        if response.status == 200:
            try:
                reply = codec.decode(response.body, UploadReply)
            except RemoteProtocolError as error:
                self._record.problems.append(f"an answer to an upload is not understood: {error}")
            else:
                self._record.decided(upload.lease_id, len(upload.samples), reply)
        return response

    def _instead(
        self, upload: Upload, headers: Mapping[str, str]
    ) -> list[tuple[Upload, Mapping[str, str]]]:
        """Return what is sent before the true upload."""
        told, rng = self._lies.told, self._lies.rng
        sent: list[tuple[Upload, Mapping[str, str]]] = []
        if DUPLICATE_UPLOADS in told:
            sent += [(upload, headers)] * 2
        if CONFLICTING_UPLOADS in told:
            sent.append((_changed(upload, lambda s: _shifted(s, rng.random())), headers))
        if BAD_LOGPROBS in told:
            sent.append((_changed(upload, _not_a_number), headers))
        if STALE_FLOOD in told:
            old = _changed(upload, _oldest)
            false = [replace_id(old, f"{rng.getrandbits(128):032x}") for _ in range(FLOOD - 1)]
            sent += [(each, headers) for each in (*false, old)]
        if told & {STOLEN_LEASES, STOLEN_CREDENTIALS}:
            sent += self._thefts(upload, headers)
        return sent

    def _thefts(
        self, upload: Upload, headers: Mapping[str, str]
    ) -> list[tuple[Upload, Mapping[str, str]]]:
        told, rng = self._lies.told, self._lies.rng
        others = sorted(
            lease_id for lease_id, (who, _) in self._loot.leases.items() if who != self._name
        )
        if not others:
            return []
        lease_id = rng.choice(others)
        holder, lease = self._loot.leases[lease_id]
        false = _changed(
            replace_id(upload, lease_id),
            lambda s: _relabelled(_shifted(s, rng.random()), lease),
        )
        sent: list[tuple[Upload, Mapping[str, str]]] = []
        if STOLEN_LEASES in told:
            sent.append((false, headers))
        if STOLEN_CREDENTIALS in told and holder in self._loot.headers:
            sent.append((false, self._loot.headers[holder]))
        return sent


def replace_id(upload: Upload, lease_id: str) -> Upload:
    """Return the upload as an answer to another lease."""
    return msgspec.structs.replace(upload, lease_id=lease_id)


def _changed(upload: Upload, change: Callable[[Sample], Sample]) -> Upload:
    return msgspec.structs.replace(upload, samples=[change(sample) for sample in upload.samples])


def _shifted(sample: Sample, by: float) -> Sample:
    logprobs = to_logprobs(sample.logprobs) - by
    return msgspec.structs.replace(sample, logprobs=from_logprobs(logprobs.tolist()))


def _not_a_number(sample: Sample) -> Sample:
    logprobs = [nan] * sample.logprobs.length
    return msgspec.structs.replace(sample, logprobs=from_logprobs(logprobs))


def _oldest(sample: Sample) -> Sample:
    spans = [Span(version=0, start=0, end=sample.tokens.length)]
    return msgspec.structs.replace(sample, spans=spans)


def _relabelled(sample: Sample, lease: Lease) -> Sample:
    spans = [Span(version=lease.version, start=0, end=sample.tokens.length)]
    return msgspec.structs.replace(sample, spans=spans)
