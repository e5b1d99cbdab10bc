"""/metrics, read by Prometheus' own parser."""

import copy

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from coordinator import metrics

STATUS = {
    "outcome": "running",
    "run": "r1",
    "reward_version0": 0.25,
    "reward_recent": None,
    "age_recent": 1.5,
    "steps_per_s": 2.0,
    "parity": None,
    "step": 7,
    "steps_target": 9,
    "generation": 1,
    "versions_published": 4,
    "learner_idle_share": 0.125,
    "age_steps": {"mean": 1.0, "max": 3},
    "tokens_per_s": 30.0,
    "queue": {"groups": 5, "unscored": 2},
    "bounds": [{"what": "members", "now": 3, "limit": 10}],
    "trajectories": {
        "issued": 20,
        "trained": 10,
        "queued": 4,
        "in_flight": 3,
        "rejected": {"stale": 2, "not_finite": 1},
        "balances": True,
        "recount_agrees": True,
    },
    "weights": {
        "anchor_bytes": 800,
        "delta_bytes_mean": 20.0,
        "source_bytes": 900,
        "peer_bytes": 50,
    },
    "peers": [
        {
            "peer": "a1",
            "name": 'an "odd" \\ name\u00e9',
            "state": "active",
            "version": 3,
            "behind": 1,
            "tokens_per_s": 30.0,
            "tokens_generated": 100,
            "queue_leases": 2,
            "heard_s": 0.5,
            "accepted": 14,
            "rejected": 3,
            "rejected_by_reason": {"stale": 3},
            "relayed_bytes": 50,
            "received_bytes": 60,
        },
        {"peer": "b2", "name": "gone", "state": "gone", "version": None, "accepted": 0},
    ],
}


def samples(status):
    body, content_type = metrics.exposition(status)
    assert content_type.startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def test_figures_of_the_run_are_there():
    found = samples(STATUS)
    assert found["echo2_run_info", (("outcome", "running"), ("run", "r1"))] == 1
    assert found["echo2_step", ()] == 7
    assert found["echo2_versions_published_total", ()] == 4
    assert found["echo2_learner_idle_ratio", ()] == 0.125
    assert found["echo2_queue_unscored_groups", ()] == 2
    assert found["echo2_trajectories_rejected_total", (("reason", "stale"),)] == 2
    assert found["echo2_ledger_balances", ()] == 1
    assert found["echo2_bound_now", (("what", "members"),)] == 3
    assert found["echo2_bound_limit", (("what", "members"),)] == 10
    assert found["echo2_peers", (("state", "active"),)] == 1
    assert found["echo2_peers", (("state", "idle"),)] == 0


def test_what_is_not_known_yet_is_left_out():
    assert ("echo2_reward_recent", ()) not in samples(STATUS)
    assert samples(STATUS | {"reward_recent": 0.75})["echo2_reward_recent", ()] == 0.75


def test_a_peer_has_series_of_its_own_whatever_it_calls_itself():
    found = samples(STATUS)
    who = (("name", 'an "odd" \\ name\u00e9'), ("peer", "a1"))
    assert found["echo2_peer_versions_behind", who] == 1
    assert found["echo2_peer_relayed_bytes_total", who] == 50
    assert found["echo2_peer_trajectories_rejected_total", (*who, ("reason", "stale"))] == 3


def test_peers_that_are_gone_have_no_series():
    assert not [key for key in samples(STATUS) if ("peer", "b2") in key[1]]


def test_a_broken_ledger_shows():
    broken = copy.deepcopy(STATUS)
    broken["trajectories"]["recount_agrees"] = False
    assert samples(broken)["echo2_ledger_balances", ()] == 0


def test_the_series_of_peers_are_bounded(monkeypatch):
    monkeypatch.setattr(metrics, "PEERS_MAX", 3)
    crowd = [STATUS["peers"][0] | {"peer": f"p{number}"} for number in range(5)]
    found = samples(STATUS | {"peers": crowd})
    assert len([key for key in found if key[0] == "echo2_peer_version"]) == 3
    assert found["echo2_peers", (("state", "active"),)] == 5


def test_two_scrapes_are_alike_and_the_global_registry_knows_nothing():
    assert metrics.exposition(STATUS) == metrics.exposition(STATUS)
    assert not [f.name for f in REGISTRY.collect() if f.name.startswith("echo2")]


@pytest.mark.parametrize("state", metrics.STATES)
def test_the_states_are_the_memberships(state):
    from coordinator.membership import State

    assert State(state) is not State.GONE
    assert len(metrics.STATES) == len(State) - 1
