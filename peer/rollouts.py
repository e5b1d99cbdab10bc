"""Takes leases, has them generated, hands the samples in.

Two lanes take turns at the engine, so that one waits for work or uploads while the other
generates. Finished work waits in a bounded outbox while the coordinator cannot be reached.
"""

from __future__ import annotations

from typing import Final

import trio

from echo2p2p.errors import EngineError, LinkError, RefusedError
from echo2p2p.ids import Incarnation
from echo2p2p.net.ports import Journal
from echo2p2p.wire.messages import Upload
from peer.coordinator_client import NOT_A_MEMBER, BusyError, CoordinatorClient
from peer.engine.base import Generated
from peer.keeper import EngineKeeper

LEASES_LOST: Final = "leases.lost"
UPLOAD_REFUSED: Final = "upload.refused"
POLL_S: Final = 20.0
LANES: Final = 2
OUTBOX_MAX: Final = 64
"""Finished leases that wait for the coordinator; beyond it no new ones are generated."""
UPLOADERS: Final = 4
RETRY_S: Final = 1.0


class Rollouts:
    """One incarnation's work."""

    def __init__(
        self,
        *,
        client: CoordinatorClient,
        incarnation: Incarnation,
        keeper: EngineKeeper,
        leases_at_once: int,
        journal: Journal,
    ) -> None:
        self._client = client
        self._incarnation = incarnation
        self._keeper = keeper
        self._leases_at_once = leases_at_once
        self._journal = journal
        self._outbox, self._finished = trio.open_memory_channel[Generated](OUTBOX_MAX)
        self.held = 0
        """Leases taken and not handed in yet."""
        self.accepted = 0
        self.rejected: dict[str, int] = {}

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            RefusedError: We are no member any more.
        """
        async with trio.open_nursery() as nursery:
            for _ in range(LANES):
                nursery.start_soon(self._lane)
            for _ in range(UPLOADERS):
                nursery.start_soon(self._uploader)

    async def _lane(self) -> None:
        while True:
            version = await self._keeper.wait_version()
            try:
                leases = await self._client.leases(version, self._leases_at_once, POLL_S)
            except BusyError as busy:
                await trio.sleep(busy.retry_after_s)
                continue
            except LinkError:
                await trio.sleep(RETRY_S)
                continue
            if not leases:
                continue
            self.held += len(leases)
            try:
                answers = await self._keeper.generate(leases)
            except EngineError as error:
                self.held -= len(leases)
                self._journal.event(LEASES_LOST, leases=len(leases), detail=str(error))
                await self._give_up([lease.lease_id for lease in leases])
                continue
            for answer in answers:
                await self._outbox.send(answer)

    async def _give_up(self, lease_ids: list[str]) -> None:
        """Hand leases back at once, so that others can have them."""
        for lease_id in lease_ids:
            await self._send(Generated(lease_id=lease_id, samples=(), seconds=0.0))

    async def _uploader(self) -> None:
        while True:
            answer = await self._finished.receive()
            await self._send(answer)
            self.held -= 1

    async def _send(self, answer: Generated) -> None:
        """Hand one lease in; tries until the coordinator has decided."""
        upload = Upload(
            incarnation=self._incarnation,
            lease_id=answer.lease_id,
            samples=list(answer.samples),
            seconds=answer.seconds,
        )
        while True:
            try:
                reply = await self._client.upload(upload)
            except BusyError as busy:
                await trio.sleep(busy.retry_after_s)
            except LinkError:
                await trio.sleep(RETRY_S)
            except RefusedError as error:
                if error.reason == NOT_A_MEMBER:
                    raise
                self._journal.event(UPLOAD_REFUSED, reason=error.reason, detail=error.detail)
                return
            else:
                outcome = reply.outcome
                if outcome.accepted:
                    self.accepted += 1
                else:
                    reason = outcome.reason or "unknown"
                    self.rejected[reason] = self.rejected.get(reason, 0) + 1
                return
