"""A peer's figures for Prometheus and its health, on a loopback port of its own.

Off unless ``--metrics.port`` is set, and never on another address: what a machine does is its
owner's business. `prometheus_client` is imported on the first scrape.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from echo2p2p.limits import Fill
from echo2p2p.net.ports import Endpoint, HttpServer, Request, Response, Route
from peer.figures import PeerFigures

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LOOPBACK: Final = "127.0.0.1"
SILENT_S_MAX: Final = 60.0
"""A peer whose coordinator has not answered for so long is not healthy."""


@asynccontextmanager
async def serve_metrics(
    server: HttpServer,
    port: int,
    figures: Callable[[], PeerFigures],
    fills: Callable[[], Iterable[Fill]],
) -> AsyncIterator[Endpoint]:
    """Serve ``/metrics`` and ``/healthz`` while the context is open.

    Raises:
        ConfigError: The port cannot be bound.
    """

    async def metrics(request: Request) -> Response:
        del request
        body, content_type = exposition(figures(), fills())
        return Response(200, body, content_type=content_type)

    async def healthz(request: Request) -> Response:
        del request
        now = figures()
        good = now.state in {"ready", "resting"} and now.silent_s < SILENT_S_MAX
        return Response(200 if good else 503, now.state.encode(), content_type="text/plain")

    routes = (Route("GET", "/metrics", metrics, 0), Route("GET", "/healthz", healthz, 0))
    async with server.serve(routes, Endpoint(LOOPBACK, port)) as real:
        yield real


def exposition(figures: PeerFigures, fills: Iterable[Fill] = ()) -> tuple[bytes, str]:
    """Return the figures in Prometheus' text format, and its content type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(figures, tuple(fills)))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Collector:
    """One snapshot as families."""

    def __init__(self, figures: PeerFigures, fills: Sequence[Fill]) -> None:
        self._figures = figures
        self._fills = fills

    def collect(self) -> Iterable[Metric]:
        """Yield them."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            StateSetMetricFamily,
        )

        now = self._figures
        states = {name: name == now.state for name in ("joining", "resting", "warming", "ready")}
        yield StateSetMetricFamily("echo2_peer_state", "What the peer does now", states)
        for name, text, gauge in (
            ("version", "Proved by the engine", now.version),
            ("latest_version", "Published, as far as known", now.latest_version),
            ("tokens_per_second", "Of the engine", now.tokens_per_s),
            ("leases_held", "Taken and not handed in", now.leases_held),
            ("links", "Relay links that are up", now.links),
            ("coordinator_silent_seconds", "Since its last answer", now.silent_s),
        ):
            if gauge is not None:
                yield GaugeMetricFamily(f"echo2_peer_{name}", text, value=gauge)
        for name, text, count in (
            ("tokens_generated", "Since the start", now.tokens_generated),
            ("relayed_bytes", "Chunk bytes sent to others", now.tally.relayed_bytes),
            ("received_bytes", "Chunk bytes received", now.tally.received_bytes),
            ("groups_accepted", "Handed in and kept", now.tally.accepted),
            ("groups_trained", "Consumed by the learner", now.tally.trained),
        ):
            yield CounterMetricFamily(f"echo2_peer_{name}", text, value=count)
        rejected = CounterMetricFamily(
            "echo2_peer_groups_rejected", "By reason", labels=("reason",)
        )
        for reason, number in now.tally.rejected.items():
            rejected.add_metric((reason,), number)
        yield rejected
        used = GaugeMetricFamily(
            "echo2_peer_bound_now", "How much there is of what has a bound", labels=("what",)
        )
        limit = GaugeMetricFamily("echo2_peer_bound_limit", "How much may be", labels=("what",))
        for fill in self._fills:
            used.add_metric((fill.what,), fill.now)
            limit.add_metric((fill.what,), fill.limit)
        yield used
        yield limit
