"""Stories with real processes on real lines, which take root."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from echo2p2p.errors import ConfigError, EchoError
from echo2p2p.testing.processes import processes_with
from scenarios import live_lab, namespaces
from scenarios.live_world import lines_of
from scenarios.story import load_story, read_story

WHY = namespaces.why_impossible() or namespaces.why_no_packets_held()
COMMAND = (sys.executable, "-P", "-m", "scenarios", "run")
needs_namespaces = pytest.mark.skipif(WHY is not None, reason=str(WHY))


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("name", ["live/kills", "live/lies"])
def test_every_checker_holds_with_real_processes(name, tmp_path):
    trace = tmp_path / "trace.jsonl"
    done = subprocess.run(
        [*COMMAND, name, "--live", "--json", "--trace", str(trace)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert result["held"]
    assert result["problems"] == []
    ordered = {fault.fault for fault in load_story(name).nemesis}
    assert set(result["strikes"]) == ordered
    assert result["steps"] > 10
    assert result["trajectories"]["balances"]
    assert result["versions"]["published"] > 5
    seen = {key.partition(":")[0] for key in result["fullest"]}
    assert seen == {"coordinator", "peer"}, "queues are looked at over HTTP"
    assert set(result["load"]["cpu_s"]) == set(result["bytes"])
    assert min(result["load"]["cpu_s"].values()) > 0.5
    source = result["bytes"]["coordinator"]
    assert min(source["sent"], source["received"]) > 100_000, "the kernel counts"
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    nodes = {event.get("node") for event in events if event["event"] == "version.loaded"}
    assert len(nodes) >= 4
    (opened, *_) = [event for event in events if event["event"] == "run.opened"]
    assert opened["url"].startswith("http://" if name == "live/lies" else "https://")


@pytest.mark.slow
@needs_namespaces
def test_kill_9_leaves_nothing_behind(tmp_path):
    name = f"kept-{os.getpid()}-{time.monotonic_ns()}"
    story = tmp_path / f"{name}.toml"
    story.write_text("[world]\nstop_s = 120\n[[peers]]\ncount = 2\n")
    before = sorted(path.name for path in Path("/sys/class/net").iterdir())
    process = subprocess.Popen(
        [*COMMAND, str(story), "--live"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 60
        while len(processes_with("scenarios.live_node")) < 3 or len(processes_with(name)) < 3:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, "the story did not begin"
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 20
    while processes_with(name):
        assert time.monotonic() < deadline, "processes outlived the test-bed"
        time.sleep(0.05)
    assert sorted(path.name for path in Path("/sys/class/net").iterdir()) == before
    assert not namespaces.RUN.joinpath("story").exists()


def live(text, seed=7):
    async def play():
        return await live_lab.play_live("a.toml", read_story(text, "a.toml"), seed)

    return trio.run(play)


def test_what_one_machine_cannot_play_is_refused(monkeypatch):
    monkeypatch.setattr(namespaces, "why_impossible", lambda: None)
    monkeypatch.setattr(namespaces, "why_no_packets_held", lambda: None)
    with pytest.raises(ConfigError, match="too many for one machine"):
        live("[[peers]]\ncount = 41\n")
    with pytest.raises(ConfigError, match="too many for one machine"):
        live('[[peers]]\ncount = 9\nup = "100Mbit"\n')


def test_without_root_one_line_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EchoError, match=r"need root.*without --live") as error:
        live("")
    assert not isinstance(error.value, ConfigError)


def test_machines_have_the_lines_that_the_story_draws():
    story = read_story('[[peers]]\ncount = 2\nup = "10Mbit"\ndown = "40Mbit"\nnat_share = 1\n', "a")
    spec = story.draw(random.Random(1))
    source, *peers = lines_of(spec)
    assert source.up_mbit == 200
    assert [(line.up_mbit, line.down_mbit, line.reachable) for line in peers] == [
        (10, 40, False)
    ] * 2


@pytest.mark.parametrize(
    ("lies", "twisted"), [(["corrupt"], True), (["bad-logprobs"], False), (["stale-flood"], False)]
)
def test_only_relays_that_lie_need_links_without_tls(lies, twisted):
    words = json.dumps(lies)
    story = read_story(f'[[nemesis]]\nfault = "lie"\nat_s = 1\nlies = {words}\n', "a")
    assert live_lab.relays_lie(story) == twisted


def test_its_clock_begins_at_zero():
    async def look():
        return trio.current_time()

    assert 0 <= trio.run(look, clock=live_lab.SinceStart()) < 1
