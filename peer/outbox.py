"""Finished work that waits for the coordinator: in memory while it is taken at once, else on disk.

While the coordinator is away, restarts or is full, finished uploads must neither fill the memory
that the engine needs nor be lost. So from the first failed try on all of them go to the disk, and
whoever sends one reads it back; beyond a bound in bytes the oldest is dropped and counted, since
its lease ends first.

The disk does not make work outlive its incarnation: a peer that was killed can join again only
when its old term is over, and then the coordinator has given its leases to others. What an earlier
incarnation has left behind is therefore deleted and counted. A disk that refuses is no reason to
stop: work then waits in memory, within a smaller bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import trio

from echo2p2p.errors import RemoteProtocolError, StoreError
from echo2p2p.ids import Incarnation
from echo2p2p.limits import LEASES_PER_CALL_MAX, MIB, Fill
from echo2p2p.net.ports import Blobs, Journal
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Upload

WORK_DROPPED: Final = "work.dropped"
OUTBOX_FAILED: Final = "outbox.failed"
LEASES_MAX: Final = 64
"""Finished leases that wait; beyond it no new ones are asked for."""
BYTES_MAX: Final = 256 * MIB
"""Of them in all; beyond it the oldest is dropped."""
MEMORY_BYTES_MAX: Final = 32 * MIB
"""Of those in memory; beyond it even a coordinator that answers finds the rest on disk."""
OVERHEAD_BYTES: Final = 256
"""Of an upload, and of each sample in it, beside tokens and log-probs."""


@dataclass(eq=False)
class Finished:
    """One finished lease."""

    lease_id: str
    name: str
    """Of its blob."""
    size: int
    """Bytes, about."""
    upload: Upload | None
    """``None``: it is on disk."""


class Outbox:
    """What one incarnation has finished.

    Args:
        blobs: The peer's own folder; ``None``: there is no disk.
        incarnation: Marks what is ours.
        journal: Told what is dropped, and of a disk that refuses.
        bytes_max: Of all that waits.
        memory_bytes_max: Of what waits in memory.
    """

    def __init__(
        self,
        blobs: Blobs | None,
        incarnation: Incarnation,
        journal: Journal,
        *,
        bytes_max: int = BYTES_MAX,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
    ) -> None:
        self._blobs = blobs
        self._incarnation = incarnation
        self._journal = journal
        self._bytes_max = bytes_max
        self._memory_bytes_max = memory_bytes_max
        self._waiting: deque[Finished] = deque()
        self._sending: set[Finished] = set()
        self._count = 0
        self._away = False
        self._takes = blobs is not None
        """Whether the disk takes more; what it has can be read all the same."""
        self._writing = trio.Lock()
        self._changed = trio.lowlevel.ParkingLot()
        self.dropped = 0
        """Leases of this incarnation that there was no room for."""

    @property
    def leases(self) -> int:
        """Finished leases that the coordinator has not decided yet."""
        return len(self._waiting) + len(self._sending)

    @property
    def bytes(self) -> int:
        """Of these."""
        return sum(item.size for item in (*self._waiting, *self._sending))

    @property
    def memory_bytes(self) -> int:
        """Of those that are in memory."""
        everything = (*self._waiting, *self._sending)
        return sum(item.size for item in everything if item.upload is not None)

    def fills(self) -> Iterator[Fill]:
        """Yield how full it is, by number and by bytes."""
        # A batch that was begun while there was room may still be finished.
        yield Fill("finished leases", self.leases, LEASES_MAX + LEASES_PER_CALL_MAX)
        yield Fill("bytes of finished leases", self.bytes, self._bytes_max)

    async def open(self) -> None:
        """Delete what earlier incarnations have left; call it once, before anything else."""
        if self._blobs is None:
            return
        try:
            names = await self._blobs.names()
            for name in names:
                await self._blobs.delete(name)
        except StoreError as error:
            self._give_up_disk(error)
            return
        if names:
            detail = "of an earlier incarnation, whose leases were given to others"
            self._journal.event(WORK_DROPPED, leases=len(names), detail=detail)

    async def wait_room(self) -> None:
        """Wait until new work may be taken; endless while the coordinator does not answer."""
        while self.leases >= LEASES_MAX or self.bytes >= self._bytes_max:
            await self._changed.park()

    async def put(self, upload: Upload) -> None:
        """Keep a finished upload until it is decided, or dropped for want of room."""
        self._count += 1
        name = f"upload-{self._incarnation}-{self._count}"
        item = Finished(upload.lease_id, name, _size(upload), upload)
        self._waiting.append(item)
        if self._away or self.memory_bytes > self._memory_bytes_max:
            await self._spill()
        await self._shrink()
        self._changed.unpark_all()

    async def take(self) -> Finished:
        """Wait for one to send, the oldest first; give it to `done` when it is decided."""
        while not self._waiting:
            await self._changed.park()
        item = self._waiting.popleft()
        self._sending.add(item)
        return item

    async def read(self, item: Finished) -> Upload | None:
        """Return what is to be sent; ``None`` if the disk has lost it, which is journalled."""
        if item.upload is not None:
            return item.upload
        assert self._blobs is not None, "only a disk could have taken it"
        try:
            return codec.decode(await self._blobs.get(item.name), Upload)
        except (StoreError, RemoteProtocolError) as error:
            self._drop(item, f"the disk has lost it: {error}")
            return None

    async def away(self) -> None:
        """The coordinator has not taken one: keep all of them on disk from now on."""
        self._away = True
        await self._spill()

    async def done(self, item: Finished) -> None:
        """The coordinator has decided: forget it."""
        self._away = False
        self._sending.discard(item)
        await self._delete(item)
        self._changed.unpark_all()

    def close(self) -> None:
        """The membership has ended; what waits is worth nothing any more."""
        if self.leases:
            self._journal.event(WORK_DROPPED, leases=self.leases, detail="the membership has ended")

    # --- the disk -----------------------------------------------------------------------------

    async def _spill(self) -> None:
        """Write what is in memory to the disk."""
        async with self._writing:
            for item in (*self._sending, *self._waiting):
                if self._blobs is None or not self._takes:
                    return
                if item.upload is None:
                    continue
                try:
                    await self._blobs.put(item.name, codec.encode(item.upload))
                except StoreError as error:
                    self._give_up_disk(error)
                    return
                item.upload = None
                if item not in self._sending and item not in self._waiting:
                    await self._delete(item)  # it was decided while we wrote

    async def _shrink(self) -> None:
        """Drop the oldest that nobody sends until the rest fits."""
        while self._waiting and (
            self.bytes > self._bytes_max
            or (not self._takes and self.memory_bytes > self._memory_bytes_max)
        ):
            item = self._waiting.popleft()
            self._drop(item, "the coordinator is away and there is no more room")
            await self._delete(item)

    async def _delete(self, item: Finished) -> None:
        if item.upload is not None or self._blobs is None:
            return
        try:
            await self._blobs.delete(item.name)
        except StoreError as error:
            self._give_up_disk(error)

    def _drop(self, item: Finished, detail: str) -> None:
        self.dropped += 1
        self._journal.event(WORK_DROPPED, leases=1, lease=item.lease_id[:8], detail=detail)

    def _give_up_disk(self, error: StoreError) -> None:
        if self._takes:
            self._takes = False
            self._journal.event(OUTBOX_FAILED, detail=f"{error}; finished work waits in memory")


def _size(upload: Upload) -> int:
    samples = upload.samples
    data = sum(len(sample.tokens.data) + len(sample.logprobs.data) for sample in samples)
    return data + OVERHEAD_BYTES * (1 + len(samples))
