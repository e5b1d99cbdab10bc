"""The trace: times, binding, and a digest that tells two runs apart."""

import trio

from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.journal import TraceJournal


def trace(gap_s: float = 1.0, **fields: object) -> TraceJournal:
    journal = TraceJournal()

    async def main() -> None:
        journal.event("a.begun")
        await trio.sleep(gap_s)
        journal.bind(peer="p").event("a.done", **fields)

    run_virtual(main, seed=1)
    return journal


def test_events_come_with_virtual_times_and_bound_fields() -> None:
    assert trace(2.5, n=1).entries == [
        (0.0, "a.begun", {}),
        (2.5, "a.done", {"peer": "p", "n": 1}),
    ]
    assert [entry.at_s for entry in trace(2.5).named("a.done")] == [2.5]


def test_the_digest_sees_times_names_and_fields_but_not_their_order() -> None:
    base = trace(1.0, x=1, y=2).digest()
    assert base == trace(1.0, y=2, x=1).digest()
    others = {
        trace(1.5, x=1, y=2).digest(),
        trace(1.0, x=1).digest(),
        trace(1.0, x=1, y=3).digest(),
    }
    assert len(others | {base}) == 4


def test_secrets_are_masked_in_the_trace_too() -> None:
    assert trace(token="abc").entries[1].fields["token"] == "***"
