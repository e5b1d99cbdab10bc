"""The ledger in the store: counters by event, and the same figures counted from the leases' rows.

Both are functions on a transaction; `coordinator.book` calls them. They must agree at any time. So
must what the rows say of each peer.
"""

from __future__ import annotations

from typing import Final, cast

from coordinator.schema import Standing
from echo2p2p.ids import PeerId
from echo2p2p.net.ports import Rows
from echo2p2p.rollouts.ledger import Balance, Moved, Place


def count_event(rows: Rows, event: Moved) -> None:
    """Count an event, in the transaction that moves the rows."""
    rows.execute(
        "INSERT INTO ledger VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
        "SET count = count + excluded.count",
        (event.source or "", event.target.value, event.reason or "", event.count),
    )


def balance(rows: Rows) -> Balance:
    """Return the ledger as its events have counted it."""
    net = dict.fromkeys(Place, 0)
    issued, rejected = 0, dict[str, int]()
    for row in rows.execute("SELECT source, target, reason, count FROM ledger").fetchall():
        source, target, reason, count = cast("tuple[str, str, str, int]", row)
        if source:
            net[Place(source)] -= count
        else:
            issued += count
        net[Place(target)] += count
        if reason:
            rejected[reason] = rejected.get(reason, 0) + count
    return Balance(
        issued=issued,
        trained=net[Place.TRAINED],
        queued=net[Place.QUEUED],
        in_flight=net[Place.IN_FLIGHT],
        rejected=dict(sorted(rejected.items())),
    )


def recount(rows: Rows) -> Balance:
    """Return the balance counted afresh from the leases' rows."""
    places = dict.fromkeys(Place, 0)
    rejected: dict[str, int] = {}
    found = rows.execute(
        "SELECT fate, coalesce(reason, ''), sum(samples) FROM leases GROUP BY 1, 2 "
        "UNION ALL SELECT fate, reason, sum(count) FROM archive GROUP BY 1, 2"
    ).fetchall()
    for row in found:
        fate, reason, count = cast("tuple[str, str, int]", row)
        places[Place(fate)] += count
        if fate == Place.REJECTED:
            rejected[reason] = rejected.get(reason, 0) + count
    return Balance(
        issued=sum(places.values()),
        trained=places[Place.TRAINED],
        queued=places[Place.QUEUED],
        in_flight=places[Place.IN_FLIGHT],
        rejected=dict(sorted(rejected.items())),
    )


_STANDINGS: Final = """
WITH counts AS (
    SELECT peer_id, fate, coalesce(reason, '') AS reason, sum(samples) AS count
    FROM leases GROUP BY 1, 2, 3
    UNION ALL SELECT peer_id, fate, reason, count FROM archive
), good AS (
    SELECT peer_id, sum(count) AS accepted FROM counts
    WHERE fate IN ('trained', 'queued') GROUP BY 1
), shown AS (
    SELECT peer_id, name, relayed_bytes FROM members LEFT JOIN good USING (peer_id)
    ORDER BY live DESC, coalesce(accepted, 0) DESC, peer_id
    LIMIT ? + (SELECT count(*) FROM members WHERE live)
)
SELECT peer_id, name, relayed_bytes, fate, reason, sum(count)
FROM shown LEFT JOIN counts USING (peer_id) GROUP BY 1, 4, 5 ORDER BY 1, 4, 5
"""


def standings(rows: Rows, gone_max: int) -> list[Standing]:
    """Return how peers stand; see `coordinator.book.Book.standings`."""
    shown: dict[PeerId, Standing] = {}
    for row in rows.execute(_STANDINGS, (gone_max,)).fetchall():
        peer_id, name, relayed, fate, reason, count = cast(
            "tuple[PeerId, str, int, str | None, str, int]", row
        )
        one = shown.setdefault(peer_id, Standing(peer_id, name, relayed, {}, {}))
        if fate is not None:
            one.fates[fate] = one.fates.get(fate, 0) + count
        if fate == Place.REJECTED.value:
            one.reasons[reason] = count
    return list(shown.values())
