"""A run's figures for Prometheus, made from a status when asked.

Each call fills a registry of its own: nothing is counted twice, and no global state is shared with
whatever else the process imports. `prometheus_client` is imported on the first call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PEERS_MAX: Final = 1000
"""Live peers that get series of their own; beyond it there are only the sums, as a scrape would
grow without limit."""
STATES: Final = ("joining", "warming", "active", "idle", "draining")

_Path = tuple[str, ...]
_GAUGES: Final[Sequence[tuple[str, str, _Path]]] = (
    ("step", "Optimizer steps in the surviving history", ("step",)),
    ("steps_target", "Steps after which the run is finished", ("steps_target",)),
    ("generation", "Restarts of the learner from a checkpoint", ("generation",)),
    ("reward_version0", "Mean reward of rollouts of version 0", ("reward_version0",)),
    ("reward_recent", "Mean reward of the newest ten steps", ("reward_recent",)),
    ("age_steps_recent", "Mean age of what the newest ten steps consumed", ("age_recent",)),
    ("age_steps_max", "Largest age consumed in the run", ("age_steps", "max")),
    ("learner_idle_ratio", "Share of time the learner waited", ("learner_idle_share",)),
    ("parity_mean", "Mean |log-prob of engine less learner's|, same weights", ("parity", "mean")),
    ("parity_max", "Largest of these", ("parity", "max")),
    ("parity_kl", "KL of engine to learner on the same weights, k3", ("parity", "kl")),
    ("steps_per_second", "Speed of the newest ten steps", ("steps_per_s",)),
    ("engine_tokens_per_second", "Sum over live peers", ("tokens_per_s",)),
    ("queue_groups", "Scored groups that wait for a step", ("queue", "groups")),
    ("queue_unscored_groups", "Accepted groups that wait for scores", ("queue", "unscored")),
    ("trajectories_trained", "Falls when the learner rolls back", ("trajectories", "trained")),
    ("trajectories_queued", "Accepted, not trained yet", ("trajectories", "queued")),
    ("trajectories_in_flight", "Leased to peers", ("trajectories", "in_flight")),
    ("anchor_bytes", "Wire bytes of the newest anchor", ("weights", "anchor_bytes")),
    ("delta_bytes_mean", "Mean wire bytes of a delta", ("weights", "delta_bytes_mean")),
)
_COUNTERS: Final[Sequence[tuple[str, str, _Path]]] = (
    ("versions_published", "Publications", ("versions_published",)),
    ("trajectories_issued", "Leased, ever", ("trajectories", "issued")),
    ("source_sent_bytes", "Chunk bytes from the source", ("weights", "source_bytes")),
    ("peers_relayed_bytes", "Chunk bytes from all peers", ("weights", "peer_bytes")),
)
_PEER_GAUGES: Final[Sequence[tuple[str, str, str]]] = (
    ("version", "Proved by the engine", "version"),
    ("versions_behind", "Publications not reached yet", "behind"),
    ("tokens_per_second", "By its own account", "tokens_per_s"),
    ("queue_leases", "Leases taken and not handed in", "queue_leases"),
    ("heard_seconds", "Since its last heartbeat", "heard_s"),
    ("trajectories_accepted", "Trained or queued", "accepted"),
)
_PEER_COUNTERS: Final[Sequence[tuple[str, str, str]]] = (
    ("relayed_bytes", "Chunk bytes sent to others", "relayed_bytes"),
    ("received_bytes", "Chunk bytes received since it joined", "received_bytes"),
    ("tokens_generated", "Since it joined", "tokens_generated"),
)


def exposition(status: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return a status (`coordinator.board`) in Prometheus' text format, and its content type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(_run(status)) + list(_peers(status["peers"]))))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Collector:
    """Families that are already made."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


def _run(status: Mapping[str, Any]) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    info = InfoMetricFamily("echo2_run", "The run")
    info.add_metric((), {"run": status["run"], "outcome": status["outcome"]})
    yield info
    for name, text, path in _GAUGES:
        if (value := _at(status, path)) is not None:
            yield GaugeMetricFamily(f"echo2_{name}", text, value=value)
    for name, text, path in _COUNTERS:
        if (value := _at(status, path)) is not None:
            yield CounterMetricFamily(f"echo2_{name}", text, value=value)
    ledger = status["trajectories"]
    rejected = CounterMetricFamily("echo2_trajectories_rejected", "By reason", labels=("reason",))
    for reason, count in ledger["rejected"].items():
        rejected.add_metric((reason,), count)
    yield rejected
    good = bool(ledger["balances"] and ledger["recount_agrees"])
    yield GaugeMetricFamily("echo2_ledger_balances", "1: every trajectory is accounted for", good)
    for name, text, key in (
        ("echo2_bound_now", "How much there is of what has a bound", "now"),
        ("echo2_bound_limit", "How much there may be", "limit"),
    ):
        gauge = GaugeMetricFamily(name, text, labels=("what",))
        for bound in status["bounds"]:
            gauge.add_metric((bound["what"],), bound[key])
        yield gauge
    peers = GaugeMetricFamily("echo2_peers", "Live members", labels=("state",))
    for state in STATES:
        peers.add_metric((state,), sum(peer["state"] == state for peer in status["peers"]))
    yield peers


def _peers(all_peers: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    peers = [peer for peer in all_peers if peer["state"] != "gone"][:PEERS_MAX]
    for name, text, key in _PEER_GAUGES:
        gauge = GaugeMetricFamily(f"echo2_peer_{name}", text, labels=("peer", "name"))
        for peer in peers:
            if (value := peer[key]) is not None:
                gauge.add_metric((peer["peer"], peer["name"]), value)
        yield gauge
    for name, text, key in _PEER_COUNTERS:
        counter = CounterMetricFamily(f"echo2_peer_{name}", text, labels=("peer", "name"))
        for peer in peers:
            counter.add_metric((peer["peer"], peer["name"]), peer[key])
        yield counter
    rejected = CounterMetricFamily(
        "echo2_peer_trajectories_rejected", "By reason", labels=("peer", "name", "reason")
    )
    for peer in peers:
        for reason, count in peer["rejected_by_reason"].items():
            rejected.add_metric((peer["peer"], peer["name"], reason), count)
    yield rejected


def _at(status: Mapping[str, Any], path: _Path) -> float | None:
    value: Any = status
    for key in path:
        value = None if value is None else value[key]  # a part that there is not yet
    return None if value is None else float(value)
