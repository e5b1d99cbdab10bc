"""Takes leases, has them generated, hands the samples in.

Two lanes take turns at the engine, so that one waits for work or uploads while the other
generates. Finished work waits in a bounded outbox while the coordinator cannot be reached
(`peer.outbox`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import trio

from echo2p2p.errors import EngineError, LinkError, RefusedError
from echo2p2p.ids import Incarnation
from echo2p2p.limits import Fill
from echo2p2p.net.ports import Blobs, Journal
from echo2p2p.wire.messages import Upload
from peer.coordinator_client import NOT_A_MEMBER, BusyError, CoordinatorClient
from peer.engine.base import Generated
from peer.keeper import EngineKeeper
from peer.outbox import BYTES_MAX, Outbox

LEASES_LOST: Final = "leases.lost"
UPLOAD_REFUSED: Final = "upload.refused"
POLL_S: Final = 20.0
LANES: Final = 2
UPLOADERS: Final = 4
RETRY_S: Final = 1.0


class Rollouts:
    """One incarnation's work.

    Args:
        outbox: Where finished work waits while the coordinator is away; ``None``: in memory.
        outbox_bytes_max: Of it.
    """

    def __init__(
        self,
        *,
        client: CoordinatorClient,
        incarnation: Incarnation,
        keeper: EngineKeeper,
        leases_at_once: int,
        journal: Journal,
        outbox: Blobs | None = None,
        outbox_bytes_max: int = BYTES_MAX,
    ) -> None:
        self._client = client
        self._incarnation = incarnation
        self._keeper = keeper
        self._leases_at_once = leases_at_once
        self._journal = journal
        self._outbox = Outbox(outbox, incarnation, journal, bytes_max=outbox_bytes_max)
        self._under_way = 0
        self.accepted = 0
        self.rejected: dict[str, int] = {}

    @property
    def held(self) -> int:
        """Leases taken and not handed in yet."""
        return self._under_way + self._outbox.leases

    def fills(self) -> Iterator[Fill]:
        """Yield how full the outbox is."""
        yield from self._outbox.fills()

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            RefusedError: We are no member any more.
        """
        await self._outbox.open()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(LANES):
                    nursery.start_soon(self._lane)
                for _ in range(UPLOADERS):
                    nursery.start_soon(self._uploader)
        finally:
            self._outbox.close()

    async def _lane(self) -> None:
        while True:
            await self._outbox.wait_room()
            version = await self._keeper.wait_version()
            try:
                count = self._keeper.leases_at_once(self._leases_at_once)
                leases = await self._client.leases(version, count, POLL_S)
            except BusyError as busy:
                await trio.sleep(busy.retry_after_s)
                continue
            except LinkError:
                await trio.sleep(RETRY_S)
                continue
            if not leases:
                continue
            self._under_way += len(leases)
            try:
                answers = await self._keeper.generate(leases)
            except EngineError as error:
                self._under_way -= len(leases)
                self._journal.event(LEASES_LOST, leases=len(leases), detail=str(error))
                await self._give_up([lease.lease_id for lease in leases])
                continue
            for answer in answers:
                self._under_way -= 1
                await self._outbox.put(self._upload(answer))

    async def _give_up(self, lease_ids: list[str]) -> None:
        """Hand leases back at once, so that others can have them."""
        for lease_id in lease_ids:
            upload = self._upload(Generated(lease_id=lease_id, samples=(), seconds=0.0))
            while True:
                pause_s = await self._send(upload)
                if pause_s is None:
                    break
                await trio.sleep(pause_s)

    def _upload(self, answer: Generated) -> Upload:
        return Upload(
            incarnation=self._incarnation,
            lease_id=answer.lease_id,
            samples=list(answer.samples),
            seconds=answer.seconds,
        )

    async def _uploader(self) -> None:
        """Hand in what is finished; each is tried until the coordinator has decided."""
        while True:
            item = await self._outbox.take()
            while (upload := await self._outbox.read(item)) is not None:
                pause_s = await self._send(upload)
                del upload  # it may be large, and be on disk by now
                if pause_s is None:
                    break
                await self._outbox.away()
                await trio.sleep(pause_s)
            await self._outbox.done(item)

    async def _send(self, upload: Upload) -> float | None:
        """Hand one lease in; return after how many seconds to try again, if it must be."""
        try:
            reply = await self._client.upload(upload)
        except BusyError as busy:
            return busy.retry_after_s
        except LinkError:
            return RETRY_S
        except RefusedError as error:
            if error.reason == NOT_A_MEMBER:
                raise
            self._journal.event(UPLOAD_REFUSED, reason=error.reason, detail=error.detail)
            return None
        outcome = reply.outcome
        if outcome.accepted:
            self.accepted += 1
        else:
            reason = outcome.reason or "unknown"
            self.rejected[reason] = self.rejected.get(reason, 0) + 1
        return None
