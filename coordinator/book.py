"""What the coordinator knows for certain: rows in the store, one transaction an event.

The store is the truth. Every method decides inside its transaction (so that the same upload ten
times at once is settled by the disk and not by luck), and only then moves the counters in memory.
Acknowledged means: the transaction has returned.

Leases carry their trajectories' fate: ``in_flight`` -> ``queued`` -> ``trained``, or
``rejected``. The ledger's counters are kept by event in ``ledger`` and can be recounted from
``leases`` and ``archive``; `recount` does it, and the two must agree at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import trio

from coordinator.ledger_rows import balance, count_event, recount, standings
from coordinator.schema import (
    LEASE_ROWS_KEPT,
    OPEN_ROWS,
    QUEUED_ROWS,
    RELAYED_BYTES_MAX,
    DamagedRow,
    MemberRow,
    OpenLease,
    PayloadRow,
    QueuedRow,
    Standing,
    VersionRow,
    lease_digest,
    read_open,
    read_queued,
    stored,
)
from echo2p2p.ids import Generation, Incarnation, LeaseId, PeerId, Step, Version, digest_of
from echo2p2p.net.ports import Rows, Store
from echo2p2p.rollouts.ledger import Balance, Ledger, Moved, Place
from echo2p2p.rollouts.trajectory import Reason
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Lease, Signed


class Book:
    """The store's operations and the ledger in memory.

    Args:
        store: Opened with `coordinator.schema.MIGRATIONS`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ledger = Ledger()

    async def load(self) -> None:
        """Read the ledger; call once, before anything else."""
        self.ledger = Ledger(await self._store.transact(balance))

    # --- the run ------------------------------------------------------------------------------

    async def get(self, key: str) -> bytes | None:
        """Return a value of the run, or ``None``."""

        def work(rows: Rows) -> bytes | None:
            row = rows.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
            return None if row is None else cast("bytes", row[0])

        return await self._store.transact(work)

    async def put(self, key: str, value: bytes) -> None:
        """Set a value of the run."""

        def work(rows: Rows) -> None:
            rows.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, value))

        await self._store.transact(work)

    # --- members ------------------------------------------------------------------------------

    async def put_member(self, row: MemberRow) -> None:
        """Insert or replace a member (a new incarnation keeps its relayed bytes)."""

        def work(rows: Rows) -> None:
            rows.execute(
                "INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, 0) ON CONFLICT (peer_id) "
                "DO UPDATE SET incarnation = excluded.incarnation, name = excluded.name, "
                "credential = excluded.credential, join_body = excluded.join_body, "
                "live = excluded.live",
                (
                    row.peer_id,
                    row.incarnation,
                    row.name,
                    row.credential,
                    row.join_body,
                    int(row.live),
                ),
            )

        await self._store.transact(work)

    async def end_member(
        self, peer_id: PeerId, incarnation: Incarnation, relayed_bytes: int
    ) -> None:
        """Mark an incarnation as gone and add what it relayed, by its own account.

        That account is a stranger's: whatever it says, the sum stays within `RELAYED_BYTES_MAX`.
        """
        relayed_bytes = max(0, min(relayed_bytes, RELAYED_BYTES_MAX))

        def work(rows: Rows) -> None:
            rows.execute(
                "UPDATE members SET live = 0, join_body = x'', "
                "relayed_bytes = min(relayed_bytes + ?, ?) "
                "WHERE peer_id = ? AND incarnation = ? AND live",
                (relayed_bytes, RELAYED_BYTES_MAX, peer_id, incarnation),
            )

        await self._store.transact(work)

    async def members(self) -> list[MemberRow]:
        """Return all members ever seen."""

        def work(rows: Rows) -> list[MemberRow]:
            found = rows.execute("SELECT * FROM members ORDER BY peer_id").fetchall()
            return [
                MemberRow(
                    *cast("tuple[PeerId, Incarnation, str, bytes, bytes]", row[:5]),
                    live=bool(row[5]),
                    relayed_bytes=cast("int", row[6]),
                )
                for row in found
            ]

        return await self._store.transact(work)

    # --- versions -----------------------------------------------------------------------------

    async def add_version(self, version: VersionRow, payloads: Sequence[PayloadRow]) -> None:
        """Record a publication and its payloads; their blobs are already on disk."""

        def work(rows: Rows) -> None:
            rows.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?)",
                (version.version, version.step, version.generation, int(version.dead)),
            )
            _insert_payloads(rows, payloads)

        await self._store.transact(work)

    async def add_payload(self, payload: PayloadRow) -> None:
        """Record another payload of a version that exists: an anchor, or a merged delta."""
        await self._store.transact(lambda rows: _insert_payloads(rows, [payload]))

    async def versions(self) -> list[VersionRow]:
        """Return all publications, ascending."""

        def work(rows: Rows) -> list[VersionRow]:
            found = rows.execute("SELECT * FROM versions ORDER BY version").fetchall()
            return [
                VersionRow(*cast("tuple[Version, Step, Generation]", row[:3]), bool(row[3]))
                for row in found
            ]

        return await self._store.transact(work)

    async def payloads(self) -> list[PayloadRow]:
        """Return the payloads that are retained, in order of version."""

        def work(rows: Rows) -> list[PayloadRow]:
            found = rows.execute(
                "SELECT manifest_id, version, base_version, signed, wire_bytes FROM payloads "
                "WHERE retained ORDER BY version, base_version"
            ).fetchall()
            return [
                PayloadRow(
                    cast("bytes", row[0]),
                    cast("Version", row[1]),
                    cast("Version | None", row[2]),
                    stored(cast("bytes", row[3]), Signed),
                    cast("int", row[4]),
                )
                for row in found
            ]

        return await self._store.transact(work)

    async def delta_sizes(self) -> tuple[int, int, float]:
        """Return count, bytes and sum of 1 / bytes of all deltas ever published, on the wire.

        Merged ones, which say again what others have said, are not among them.
        """

        def work(rows: Rows) -> tuple[int, int, float]:
            found = rows.execute(
                "SELECT count(*), coalesce(sum(wire_bytes), 0), "
                "coalesce(sum(1.0 / wire_bytes), 0.0) FROM payloads "
                "WHERE base_version = version - 1"
            ).fetchone()
            return cast("tuple[int, int, float]", found)

        return await self._store.transact(work)

    async def forget_payloads(self, manifest_ids: Iterable[bytes]) -> None:
        """Mark payloads as no longer retained; their blobs may then be deleted.

        Only their sizes are kept.
        """
        ids = list(manifest_ids)

        def work(rows: Rows) -> None:
            for manifest_id in ids:
                rows.execute(
                    "UPDATE payloads SET retained = 0, signed = x'' WHERE manifest_id = ?",
                    (manifest_id,),
                )

        await self._store.transact(work)

    # --- leases and trajectories --------------------------------------------------------------

    async def issue(
        self, peer_id: PeerId, incarnation: Incarnation, leases: Sequence[tuple[Lease, int]]
    ) -> None:
        """Record new leases, each with its item's seed."""
        event = Moved(sum(lease.samples for lease, _ in leases), None, Place.IN_FLIGHT)

        def work(rows: Rows) -> None:
            for lease, seed in leases:
                data = codec.encode(lease)
                rows.execute(
                    "INSERT INTO leases (lease_id, peer_id, incarnation, seed, samples, lease, "
                    "lease_digest, fate) VALUES (?, ?, ?, ?, ?, ?, ?, 'in_flight')",
                    (
                        lease.lease_id,
                        peer_id,
                        incarnation,
                        seed,
                        lease.samples,
                        data,
                        lease_digest(data, seed),
                    ),
                )
            count_event(rows, event)

        with trio.CancelScope(shield=True):  # the disk and the counters move together
            await self._store.transact(work)
            self.ledger.apply(event)

    async def accept(self, lease_id: LeaseId, samples: int, upload: bytes) -> bool:
        """Queue a checked upload.

        Returns:
            False if the lease was not in flight any more: another upload, or its end, won.
        """
        return await self._move(
            [(lease_id, samples)], Place.IN_FLIGHT, Place.QUEUED, upload=upload
        ) == [lease_id]

    async def reject(
        self, leases: Sequence[tuple[LeaseId, int]], source: Place, reason: Reason
    ) -> list[LeaseId]:
        """End leases (id, samples) untrained; returns those that really were at ``source``."""
        return await self._move(leases, source, Place.REJECTED, reason=reason)

    async def train(
        self, leases: Sequence[tuple[LeaseId, int]], step: Step, record: bytes | None = None
    ) -> list[LeaseId]:
        """Record that the update that reached ``step`` consumed these.

        Args:
            leases: Ids and samples.
            step: Steps after the update.
            record: What is to be known of the step later, encoded by the caller.
        """
        return await self._move(leases, Place.QUEUED, Place.TRAINED, step=step, record=record)

    async def steps(self) -> list[bytes]:
        """Return the records of the steps in the surviving history, in order."""

        def work(rows: Rows) -> list[bytes]:
            found = rows.execute("SELECT record FROM steps ORDER BY step").fetchall()
            return [cast("bytes", row[0]) for row in found]

        return await self._store.transact(work)

    async def _move(
        self,
        leases: Sequence[tuple[LeaseId, int]],
        source: Place,
        target: Place,
        *,
        reason: Reason | None = None,
        step: Step | None = None,
        upload: bytes | None = None,
        record: bytes | None = None,
    ) -> list[LeaseId]:
        digest = None if upload is None else digest_of(upload)

        def work(rows: Rows) -> tuple[list[LeaseId], int]:
            moved, count = list[LeaseId](), 0
            for lease_id, samples in leases:
                changed = rows.execute(
                    "UPDATE leases SET fate = ?, reason = ?, step = ?, "
                    "upload = CASE WHEN ? THEN NULL ELSE coalesce(?, upload) END, "
                    "upload_digest = coalesce(?, upload_digest) "
                    "WHERE lease_id = ? AND fate = ?",
                    (
                        target.value,
                        reason,
                        step,
                        int(target is Place.REJECTED),
                        upload,
                        digest,
                        lease_id,
                        source.value,
                    ),
                ).rowcount
                if changed == 1:
                    moved.append(lease_id)
                    count += samples
            if count:
                count_event(rows, Moved(count, source, target, reason))
            if record is not None:
                rows.execute("INSERT OR REPLACE INTO steps VALUES (?, ?)", (step, record))
            return moved, count

        with trio.CancelScope(shield=True):  # the disk and the counters move together
            moved, count = await self._store.transact(work)
            if count:
                self.ledger.apply(Moved(count, source, target, reason))
        return moved

    async def fate(self, lease_id: LeaseId) -> tuple[Place, Reason | None, PeerId] | None:
        """Return what became of a lease and whose it was; ``None`` if there is none."""

        def work(rows: Rows) -> tuple[Place, Reason | None, PeerId] | None:
            row = rows.execute(
                "SELECT fate, reason, peer_id FROM leases WHERE lease_id = ?", (lease_id,)
            ).fetchone()
            if row is None:
                return None
            reason = None if row[1] is None else Reason(cast("str", row[1]))
            return Place(cast("str", row[0])), reason, cast("PeerId", row[2])

        return await self._store.transact(work)

    async def open_leases(self) -> list[OpenLease | DamagedRow]:
        """Return the leases in flight; after a restart their peers may still answer."""

        def work(rows: Rows) -> list[OpenLease | DamagedRow]:
            return [read_open(row) for row in rows.execute(OPEN_ROWS).fetchall()]

        return await self._store.transact(work)

    async def queued(self) -> list[QueuedRow | DamagedRow]:
        """Return the accepted uploads that wait for a step, in order of issue."""

        def work(rows: Rows) -> list[QueuedRow | DamagedRow]:
            return [read_queued(row) for row in rows.execute(QUEUED_ROWS).fetchall()]

        return await self._store.transact(work)

    # --- checkpoints and rollbacks ------------------------------------------------------------

    async def checkpointed(self, step: Step) -> None:
        """A durable checkpoint contains all up to ``step``: its batches may be forgotten."""

        def work(rows: Rows) -> None:
            rows.execute(
                "UPDATE leases SET upload = NULL, lease = x'', upload_digest = NULL, "
                "lease_digest = NULL "
                "WHERE (fate = 'trained' AND step <= ?) OR fate = 'rejected'",
                (step,),
            )
            newest = rows.execute("SELECT coalesce(max(rowid), 0) FROM leases").fetchone()
            assert newest is not None
            old = cast("int", newest[0]) - LEASE_ROWS_KEPT
            rows.execute(
                "INSERT INTO archive SELECT peer_id, fate, coalesce(reason, ''), sum(samples) "
                "FROM leases WHERE ((fate = 'trained' AND step <= ?) OR fate = 'rejected') "
                "AND rowid <= ? GROUP BY peer_id, fate, reason "
                "ON CONFLICT DO UPDATE SET count = count + excluded.count",
                (step, old),
            )
            rows.execute(
                "DELETE FROM leases "
                "WHERE ((fate = 'trained' AND step <= ?) OR fate = 'rejected') AND rowid <= ?",
                (step, old),
            )
            rows.execute(
                "INSERT OR REPLACE INTO run VALUES ('checkpoint_step', ?)",
                (str(step).encode(),),
            )

        await self._store.transact(work)

    async def roll_back(self, step: Step) -> int:
        """The learner restarts from a checkpoint at ``step``: later steps never happened.

        Versions of later steps die, and what those steps had consumed is rejected as of a dead
        generation. What was sampled from them and still waits is rejected by the intake, which
        knows it; after a crash in between it does so when it takes up the rows.

        Returns:
            How many trajectories that were counted as trained no longer are.
        """
        reason = Reason.DEAD_GENERATION

        def work(rows: Rows) -> int:
            rows.execute("UPDATE versions SET dead = 1 WHERE step > ?", (step,))
            rows.execute("DELETE FROM steps WHERE step > ?", (step,))
            lost = rows.execute(
                "SELECT coalesce(sum(samples), 0) FROM leases WHERE fate = 'trained' AND step > ?",
                (step,),
            ).fetchone()
            assert lost is not None
            count = cast("int", lost[0])
            if count:
                rows.execute(
                    "UPDATE leases SET fate = 'rejected', reason = ?, upload = NULL "
                    "WHERE fate = 'trained' AND step > ?",
                    (reason.value, step),
                )
                count_event(rows, Moved(count, Place.TRAINED, Place.REJECTED, reason))
            return count

        with trio.CancelScope(shield=True):  # the disk and the counters move together
            count = await self._store.transact(work)
        if count:
            self.ledger.apply(Moved(count, Place.TRAINED, Place.REJECTED, reason))
        return count

    async def recount(self) -> Balance:
        """Return the balance counted afresh from the rows, not from the events."""
        return await self._store.transact(recount)

    async def audit(self) -> tuple[Balance, Balance]:
        """Return the balance by events and by rows, both of one moment."""
        return await self._store.transact(lambda rows: (balance(rows), recount(rows)))

    async def standings(self, gone_max: int) -> list[Standing]:
        """Return how the peers stand that are worth a row, in order of their ids.

        Those that live, and of those that are gone the ``gone_max`` of whom most was accepted: all
        identities of a run's life would be too many to hold at once.
        """
        return await self._store.transact(lambda rows: standings(rows, gone_max))

    async def relayed_bytes(self) -> int:
        """Return what all lives that are over have relayed, by their own account."""

        def work(rows: Rows) -> int:
            # Not sum(): a thousand who boast make more than its 64 bits hold.
            found = rows.execute("SELECT total(relayed_bytes) FROM members").fetchone()
            assert found is not None
            return int(cast("float", found[0]))

        return await self._store.transact(work)


def _insert_payloads(rows: Rows, payloads: Sequence[PayloadRow]) -> None:
    for payload in payloads:
        rows.execute(
            "INSERT INTO payloads VALUES (?, ?, ?, ?, ?, 1)",
            (
                payload.manifest_id,
                payload.version,
                payload.base_version,
                codec.encode(payload.signed),
                payload.wire_bytes,
            ),
        )
