import argparse
import importlib.util
import itertools
import json
import os
from dataclasses import asdict, replace

import pytest

from echo2p2p.errors import ConfigError, EchoError
from echo2p2p.ids import SOURCE, PeerId
from scenarios import (
    bench_broadcast,
    bench_report,
    broadcast_plot,
    broadcast_virtual,
    namespaces,
)
from scenarios.broadcast_faults import FAULTS, lie_of
from scenarios.broadcast_links import (
    BYTES_PER_MBIT,
    GOODPUT,
    KINDS,
    Bound,
    Line,
    bound_of,
    plan_lines,
    plan_neighbours,
)
from scenarios.broadcast_rows import Case, Outcome, row_of, table
from scenarios.broadcast_torrent import SETTINGS

KEYS = {
    "system",
    "peers",
    "links",
    "rtt_ms",
    "payload_bytes",
    "bound_s",
    "last_s",
    "multiple",
    "source_copies",
    "duplicate_share",
    "cpu_ms_per_mb",
}
MB = 1_000_000
ONE_S = GOODPUT * BYTES_PER_MBIT
"""Bytes that one Mbit/s carries in a second."""


def arguments(*words):
    parser = argparse.ArgumentParser()
    bench_broadcast.add_arguments(parser)
    return parser.parse_args(words)


# --- lines and bounds ---------------------------------------------------------------------------


def test_the_bound_is_the_tightest_of_uplink_downlink_and_all_uplinks():
    size = int(20 * ONE_S)
    assert bound_of(size, [Line(20, 20)] * 5).seconds == pytest.approx(1)
    assert bound_of(size, [Line(10, 20), *[Line(20, 20)] * 4]).seconds == pytest.approx(2)
    slow_down = [Line(20, 20), Line(20, 20), Line(20, 5)]
    assert bound_of(size, slow_down).seconds == pytest.approx(4)
    few_uplinks = [Line(20, 20), *[Line(4, 20)] * 5]
    assert bound_of(size, few_uplinks).seconds == pytest.approx(5 * 20 / 40)


def test_who_cannot_be_dialled_is_served_by_the_others_only():
    size = int(20 * ONE_S)
    lines = [Line(20, 40), Line(20, 40), *[Line(20, 40, reachable=False)] * 6]
    found = bound_of(size, lines)
    assert found.cut_s == pytest.approx(6 * 20 / 40)
    assert found.fluid_s == pytest.approx(1)
    assert found.seconds == found.cut_s


def test_a_benchmark_of_20_mb_takes_the_same_least_time_on_all_lines():
    """As in the notes: then 1.00 copy from the source is best in each cell."""
    for links, peers in itertools.product(("homogeneous", "mixed"), (4, 8, 16)):
        assert bound_of(20 * MB, plan_lines(links, peers)).seconds == pytest.approx(8.368, abs=0.01)


def test_lines_of_each_kind():
    assert plan_lines("homogeneous", 3) == [Line(20, 20)] * 4
    assert [line.up_mbit for line in plan_lines("mixed", 5)] == [20, 10, 20, 40, 10, 20]
    assert {line.down_mbit for line in plan_lines("mixed", 5)} == {40}
    assert [line.reachable for line in plan_lines("nat", 4)] == [True, True, False, True, False]
    source, *far = plan_lines("satellite", 2)
    assert (source.rtt_ms, source.loss) == (0, 0)
    assert [(line.up_mbit, line.down_mbit, line.rtt_ms, line.loss) for line in far] == [
        (1, 5, 600, 0.02)
    ] * 2


@pytest.mark.parametrize(("kind", "peers"), list(itertools.product(KINDS, (4, 40))))
def test_neighbours_are_mutual_and_never_two_that_cannot_be_dialled(kind, peers):
    lines = plan_lines(kind, peers)
    ids = [PeerId(f"{place:064x}") for place in range(peers)]
    plan = plan_neighbours(ids, lines, seed=1)
    hidden = {one for one, line in zip(ids, lines[1:], strict=True) if not line.reachable}
    assert set(plan.pop(SOURCE)) == set(ids)
    for one, others in plan.items():
        assert others
        assert all(one in plan[other] for other in others)
        assert one not in hidden or not hidden & set(others)


# --- namespaces ---------------------------------------------------------------------------------


def test_bytes_are_read_from_what_tc_prints():
    text = b"""[{"kind":"noqueue","handle":"0:","dev":"lo","root":true,"refcnt":2,"bytes":7},
    {"kind":"tbf","handle":"1:","dev":"h0","root":true,"refcnt":2,
     "options":{"rate":2500000,"burst":65536,"limit":1000000},
     "bytes":5232400,"packets":3488,"drops":0,"overlimits":401,"requeues":0,"backlog":0},
    {"kind":"tbf","dev":"h1","options":{}}]"""
    assert namespaces.sent_bytes(text) == {"h0": 5232400, "h1": 0}
    with pytest.raises(EchoError, match="not understood"):
        namespaces.sent_bytes(b"qdisc tbf 1: dev h0 root")


def test_each_line_is_shaped_at_both_ends():
    lines = [Line(20, 40), Line(10, 40), Line(2.5, 40, reachable=False)]
    assert namespaces.shaping("e0", 2.5) == (
        "qdisc add dev e0 root handle 1: tbf rate 2.5mbit burst 8000 limit 1000000"
    )
    hub = namespaces.hub_batch(lines).splitlines()
    assert "link add h2 type veth peer name e0 address 02:e2:00:00:00:02 netns n2" in hub
    assert namespaces.isolation_batch(lines) == "link set dev h2 isolated on"
    assert namespaces.names_batch(2).splitlines() == [
        "netns add hub",
        "netns add n0",
        "netns add n1",
    ]
    assert "congctl cubic" in namespaces.machine_batch(1, 2)
    known = [line for line in namespaces.machine_batch(1, 64).splitlines() if "neigh" in line]
    assert len(known) == 63, "or the kernel runs out of neighbours, 1024 in all namespaces"
    assert "neigh add 198.18.0.1 lladdr 02:e2:00:00:00:00 dev e0 nud permanent" in known
    changed = namespaces.shaping("e0", 1, "change")
    assert changed.startswith("qdisc change dev e0 root handle 1: tbf rate 1mbit")
    addresses = {namespaces.address_of(index) for index in range(1000)}
    assert len(addresses) == 1000
    assert len({namespaces.hardware_address_of(index) for index in range(1000)}) == 1000


# --- rows ---------------------------------------------------------------------------------------


def test_a_row_is_the_run_of_the_median_time():
    case = Case(peers=2, links="mixed", rtt_ms=0.0, payload_bytes=2 * MB)
    outcomes = [
        Outcome((1.0, last_s), copies, 0.01, 0.4, up_bytes=(1, 2, 3))
        for last_s, copies in ((4.0, 1.3), (2.0, 1.1), (3.0, 1.2))
    ]
    row = row_of("echo2p2p", "", "virtual", case, Bound(2.0, 1.0), outcomes)
    assert (row.last_s, row.multiple, row.source_copies) == (3.0, 1.5, 1.2)
    assert row.runs_s == [4.0, 2.0, 3.0]
    assert (row.first_s, row.middle_s) == (1.0, 2.0)
    assert row.cpu_ms_per_mb == 100.0
    heading = table([asdict(replace(row, seed=3))]).splitlines()[0]
    assert heading == f"{bench_report.stated()}; seed 3"
    assert row_of("x", "", "virtual", case, Bound(2.0, 1.0), outcomes[:2]).last_s == 2.0


def test_libtorrent_is_left_out_with_a_word_where_it_is_missing(monkeypatch, capsys):
    assert bench_broadcast.systems_of(["echo2p2p"]) == [("echo2p2p", "")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench_broadcast.systems_of(["one-to-many", "libtorrent"]) == [("one-to-many", "")]
    assert "left out" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert bench_broadcast.systems_of(["libtorrent"]) == [("libtorrent", one) for one in SETTINGS]


def test_a_fault_is_told_beside_its_row():
    case = Case(peers=2, links="mixed", rtt_ms=0.0, payload_bytes=2 * MB, fault="flap")
    outcome = Outcome((1.0,), 1.0, 0.0, 0.4, hit_finished_s=(3.0, 2.0))
    row = row_of("echo2p2p", "", "namespaces", case, Bound(2.0, 1.0), [outcome])
    assert (row.last_s, row.hit_last_s) == (1.0, 3.0)
    text = table([asdict(replace(row, times_faultless=1.25))])
    assert "echo2p2p flap" in text
    assert "1.25 x without, who was hit 3.00 s" in text


@pytest.mark.parametrize("peers", [1, 2, 5, 16])
def test_faults_hit_a_fifth_of_the_peers_and_never_the_source(peers):
    for name, fault in FAULTS.items():
        hit = fault.hits(peers)
        assert set(hit) <= set(range(1, peers + 1)), name
    assert len(FAULTS["kill"].hits(peers)) == max(1, round(peers / 5))
    assert lie_of("lie:corrupt") == "corrupt"
    assert lie_of("kill") == ""


# --- the command --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_in_virtual_time_one_to_many_takes_n_times_as_long(tmp_path):
    words = ("--virtual", "--peers", "2", "4", "--payload-mb", "0.8")
    rows = await bench_broadcast.run(arguments(*words))
    assert json.loads(json.dumps(rows)) == rows
    assert all(set(row) >= KEYS for row in rows)
    assert [(row["system"], row["peers"]) for row in rows] == [
        (system, peers) for peers in (2, 4) for system in ("one-to-many", "echo2p2p")
    ]
    multiples = {(row["system"], row["peers"]): row["multiple"] for row in rows}
    for peers in (2, 4):
        assert multiples["one-to-many", peers] == pytest.approx(peers, rel=0.1)
        assert multiples["echo2p2p", peers] < 1.4
    assert all(row["source_copies"] < 1.2 for row in rows if row["system"] == "echo2p2p")
    text = table(rows)
    assert "4 peers, homogeneous links, 0.8 MB, virtual" in text
    if importlib.util.find_spec("matplotlib") is not None:
        broadcast_plot.draw(rows, tmp_path / "time.png")
        assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
async def test_in_virtual_time_peers_that_cannot_be_dialled_are_served_near_the_bound():
    words = ("--virtual", "--peers", "16", "--links", "nat", "--payload-mb", "3")
    (row,) = await bench_broadcast.run(arguments(*words, "--systems", "echo2p2p"))
    assert row["multiple"] <= 1.4  # 1.3 of 20 MB: the start weighs more here
    assert row["source_copies"] <= 1.1
    assert row["duplicate_share"] <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("links", ["homogeneous", "mixed"])
def test_on_thin_lines_relays_are_kept_busy_and_the_source_does_not_send_in_their_stead(links):
    # A chunk to fifteen others takes a relay 0.7 s there, and the thinnest 1.4.
    case = Case(peers=16, links=links, payload_bytes=2_000_000, rtt_ms=0.0, seed=0, mbit=3.0)
    (row,) = broadcast_virtual.measure(case, ["echo2p2p"], 1)
    # With 32 KiB on each link: 1.5 and 1.8 times, 1.5 and 1.6 copies, 6 and 15 %.
    assert row.multiple <= 1.4
    assert row.source_copies <= 1.15
    assert row.duplicate_share <= 0.08


@pytest.mark.slow
async def test_virtual_time_knows_distance():
    def words(rtt_ms):
        return ("--virtual", "--peers", "3", "--payload-mb", "0.5", "--rtt-ms", str(rtt_ms))

    near, far = [await bench_broadcast.run(arguments(*words(rtt_ms))) for rtt_ms in (0, 200)]
    assert far[1]["last_s"] > near[1]["last_s"] + 0.1
    assert far[1]["bound_s"] == near[1]["bound_s"]


async def test_without_root_one_line_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EchoError, match=r"need root.*--virtual") as error:
        await bench_broadcast.run(arguments())
    assert not isinstance(error.value, ConfigError)  # exit code 1


@pytest.mark.parametrize(
    ("words", "detail"),
    [
        (("--rtt-ms", "20"), "apt-get install iptables"),
        (("--fault", "flap"), "apt-get install iptables"),
        (("--links", "satellite"), "apt-get install iptables"),
        (("--peers", "64"), "take fewer"),
        (("--fault", "kill", "--virtual"), "only for echo2p2p"),
        (("--fault", "kill", "--systems", "libtorrent"), "only for echo2p2p"),
    ],
)
async def test_what_namespaces_cannot_do_is_refused(monkeypatch, words, detail):
    monkeypatch.setattr(namespaces, "why_impossible", lambda: None)
    monkeypatch.setattr(namespaces.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=detail):
        await bench_broadcast.run(arguments(*words))


@pytest.mark.parametrize(
    "words",
    [
        ("--payload-mb", "0"),
        ("--payload-mb", "300"),
        ("--peers", "0"),
        ("--peers", "5000"),
        ("--payload-mb", "much"),
        ("--links", "good"),
    ],
)
def test_nonsense_is_refused(words):
    with pytest.raises(SystemExit):
        arguments(*words)
