"""The routes for watching: who may read, and what a stranger's browser gets."""

import re
from contextlib import asynccontextmanager

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator import dashboard
from coordinator.api import Api, Secrets
from coordinator.board import Board
from coordinator.config import Settings
from coordinator.publish import WeightBytes
from echo2p2p.net import routing
from echo2p2p.net.ports import Request
from echo2p2p.net.trust import JoinToken, draw_admin_token
from echo2p2p.testing.clock import SimClock
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.system import SimEntropy
from echo2p2p.wire import codec
from echo2p2p.wire.messages import CaReply, Refusal
from scenarios.middle import open_bench


class Weights:
    source_bytes = (0, 0)

    def statistics(self):
        return WeightBytes(0, 0, 0, 0.0, state_bytes=0)


class Front:
    def __init__(self, bench, *, local):
        entropy = SimEntropy("front")
        self.admin = draw_admin_token(entropy)
        board = Board(
            settings=Settings(),
            clock=SimClock(),
            book=bench.book,
            state=bench.state,
            roster=bench.roster,
            intake=bench.intake,
            queue=bench.queue,
            publisher=Weights(),
            fills=lambda: (),
            held_out=lambda: None,
        )
        api = Api(
            secrets=Secrets(
                token=JoinToken.create(entropy, bench.keys.public_key),
                admin_token=self.admin,
                tls=False,
                ca=CaReply(run_public_key=bench.keys.public_key, certificate=b""),
                local=local,
            ),
            state=bench.state,
            roster=bench.roster,
            desk=bench.desk,
            intake=bench.intake,
            publisher=None,
            status=board.status,
            stop=lambda: None,
            journal=bench.journal,
        )
        self._router = routing.Router(api.routes())

    async def get(self, path, *, secret=None, host="127.0.0.1:7070", method="GET"):
        found = self._router.find(method, path)
        if not isinstance(found, routing.Match):
            return found
        headers = {"host": host}
        if secret is not None:
            headers["authorization"] = f"Bearer {secret}"
        return await found.route.handler(
            Request(method=method, path=path, query=found.parts, headers=headers)
        )


@asynccontextmanager
async def open_front(*, local):
    async with open_bench(SimDisk()) as bench:
        yield Front(bench, local=local)


def reason(answer):
    return answer.status, codec.decode(answer.body, Refusal).reason


@pytest.mark.parametrize("path", ["/status", "/metrics"])
async def test_off_loopback_only_the_admin_token_reads(autojump_clock, path):
    async with open_front(local=False) as front:
        for secret in (None, "", "e2a-wrong", front.admin[:-1]):
            answer = await front.get(path, secret=secret)
            assert reason(answer) == (401, "wrong_admin_token")
        assert (await front.get(path, secret=front.admin)).status == 200


@pytest.mark.parametrize("path", ["/status", "/metrics"])
async def test_on_loopback_anybody_of_this_machine_reads_but_no_page_from_elsewhere(
    autojump_clock, path
):
    async with open_front(local=True) as front:
        for host in ("127.0.0.1", "localhost:7070", "[::1]:7070", "LOCALHOST"):
            assert (await front.get(path, host=host)).status == 200
        for host in ("evil.example:7070", "127.0.0.1.evil.example", "", "[", "192.168.1.2:7070"):
            assert reason(await front.get(path, host=host)) == (401, "wrong_admin_token")
            assert (await front.get(path, host=host, secret=front.admin)).status == 200


async def test_reading_opens_nothing_else(autojump_clock):
    async with open_front(local=True) as front:
        assert reason(await front.get("/control/stop", method="POST")) == (401, "wrong_admin_token")
        for path in ("/status", "/metrics", "/dashboard"):
            for method in ("POST", "PUT", "DELETE"):
                assert reason(await front.get(path, method=method)) == (405, "wrong_method")


async def test_status_is_json_and_metrics_is_what_prometheus_reads(autojump_clock):
    async with open_front(local=True) as front:
        status = await front.get("/status")
        metrics = await front.get("/metrics")
    told = msgspec.json.decode(status.body)
    assert status.content_type == "application/json"
    assert told["trajectories"]["balances"] is True
    names = {family.name for family in text_string_to_metric_families(metrics.body.decode())}
    assert "echo2_step" in names
    assert metrics.content_type.startswith("text/plain")


async def test_the_page_is_open_to_all_and_has_no_figure_and_no_secret(autojump_clock):
    async with open_front(local=False) as front:
        files = {
            path: await front.get(path, host="lab.example")
            for path in ("/dashboard", *(f"/dashboard/{name}" for name in dashboard._TYPES))
        }
    assert files["/dashboard"].body == files["/dashboard/index.html"].body
    for answer in files.values():
        assert answer.status == 200
        assert not re.search(rb"e2[ap]-\w{8}", answer.body)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert files["/dashboard"].content_type.startswith("text/html")
    assert files["/dashboard/page.js"].content_type.startswith("text/javascript")


@pytest.mark.parametrize(
    "path", ["/dashboard/__init__.py", "/dashboard/..", "/dashboard/", "/dashboard/x.js"]
)
async def test_the_page_has_its_files_and_no_others(autojump_clock, path):
    async with open_front(local=True) as front:
        assert reason(await front.get(path)) == (404, "no_such_path")


def test_the_page_loads_nothing_from_elsewhere():
    for name in dashboard._TYPES:
        text = dashboard.dashboard_file(name).body.decode()
        urls = set(re.findall(r"""\w+://[^\s"'`)]+""", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, "which is a name and no place"
        assert "innerHTML" not in text
        assert "localStorage" not in text
