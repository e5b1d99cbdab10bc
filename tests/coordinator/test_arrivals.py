"""Versions on their way: who has them, and how long it took."""

from coordinator.arrivals import PEERS_MAX, VERSIONS_MAX, Arrivals


def told(arrivals):
    return [(row.version, row.peers, row.after_s) for row in arrivals.rows()]


def test_a_peer_that_switches_is_counted_for_the_version_that_it_proves():
    arrivals = Arrivals()
    arrivals.look(0, 0, {"a": None}, 10.0)
    arrivals.look(0, 0, {"a": 0, "b": 0}, 11.0)
    arrivals.look(1, 2, {"a": 0, "b": 0}, 20.0)
    arrivals.look(1, 2, {"a": 1, "b": 0}, 20.5)
    arrivals.look(1, 2, {"a": 1, "b": 1}, 22.0)
    assert told(arrivals) == [(0, 0, {}), (1, 2, {"a": 0.5, "b": 2.0})]
    newest = arrivals.rows()[-1]
    assert (newest.step, newest.published_s, newest.last_after_s) == (2, 20.0, 2.0)


def test_looking_twice_counts_once():
    arrivals = Arrivals()
    for _ in range(2):
        arrivals.look(0, 0, {"a": 0}, 1.0)
    for now in (2.0, 3.0):
        arrivals.look(1, 1, {"a": 1}, now)
    assert told(arrivals)[-1] == (1, 1, {"a": 0.0})


def test_the_first_version_of_a_newcomer_says_nothing_of_the_broadcast():
    arrivals = Arrivals()
    arrivals.look(0, 0, {"a": 0}, 1.0)
    arrivals.look(0, 0, {"a": 0, "late": 0}, 500.0)
    assert told(arrivals) == [(0, 0, {})]


def test_a_peer_that_went_and_came_back_is_a_newcomer():
    arrivals = Arrivals()
    arrivals.look(0, 0, {"a": 0}, 1.0)
    arrivals.look(1, 1, {}, 2.0)
    arrivals.look(1, 1, {"a": 1}, 90.0)
    assert told(arrivals)[-1] == (1, 0, {})


def test_a_version_that_a_peer_skipped_is_not_counted_for_it():
    arrivals = Arrivals()
    arrivals.look(0, 0, {"a": 0}, 1.0)
    arrivals.look(1, 1, {"a": 0}, 2.0)
    arrivals.look(2, 2, {"a": 0}, 3.0)
    arrivals.look(2, 2, {"a": 2}, 3.5)
    assert told(arrivals) == [(0, 0, {}), (1, 0, {}), (2, 1, {"a": 0.5})]


def test_an_engine_that_is_started_again_does_not_count_the_same_version_as_new():
    arrivals = Arrivals()
    arrivals.look(1, 1, {"a": 1}, 1.0)
    arrivals.look(1, 1, {"a": None}, 2.0)
    arrivals.look(1, 1, {"a": 1}, 30.0)
    assert told(arrivals) == [(1, 0, {})]


def test_memory_is_bounded_in_versions_and_in_peers():
    arrivals = Arrivals()
    peers = [f"p{number}" for number in range(PEERS_MAX + 5)]
    for version in range(VERSIONS_MAX + 3):
        arrivals.look(version, version, dict.fromkeys(peers, version), float(version))
    rows = arrivals.rows()
    assert [row.version for row in rows] == list(range(3, VERSIONS_MAX + 3))
    assert all(row.peers == len(peers) for row in rows)
    assert all(len(row.after_s) == PEERS_MAX for row in rows)
