"""The ledger in the store: counters by event, and the same figures counted from the leases' rows.

Both are functions on a transaction; `coordinator.book` calls them. They must agree at any time.
"""

from __future__ import annotations

from typing import cast

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
