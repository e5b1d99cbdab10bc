import json
from html.parser import HTMLParser

import pytest

from echo2p2p.testing.browser import find_chromium, open_page
from scenarios.command import main
from scenarios.report_page import ROWS_MAX, page

STORY = """
[world]
stop_s = 45
heal_s = 25
[[peers]]
count = 3
[[nemesis]]
fault = "freeze"
at_s = 15
for_s = 5
[checks]
converge_s = 15
"""


class Parsed(HTMLParser):
    """What a page has: its tags, what it loads from elsewhere, and its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.texts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data):
        self.texts.append(data)


def played(tmp_path, name="tiny"):
    story, target, trace = (tmp_path / f"{name}.{end}" for end in ("toml", "html", "jsonl"))
    story.write_text(STORY)
    assert main(["run", str(story), "--report", str(target), "--trace", str(trace)]) == 0
    return target, [json.loads(line) for line in trace.read_text().splitlines()]


@pytest.mark.slow
def test_a_page_shows_machines_faults_versions_steps_and_fates(tmp_path, capsys):
    target, entries = played(tmp_path)
    text = target.read_text()
    found = Parsed(text)
    assert found.links == []
    assert "script" not in found.tags
    titles = [text.strip() for text in found.texts]
    assert titles.count("Every checker held.") == 1
    steps = [e for e in entries if e["event"] == "step.done"]
    assert sum(title.startswith("step ") and ", age " in title for title in titles) == len(steps)
    assert sum(title.startswith("freeze, 15.0 to 20.0 s") for title in titles) == 1
    for name in ("coordinator", "peer-0", "peer-1", "peer-2"):
        assert name in titles
    loaded = [e for e in entries if e["event"] == "version.loaded"]
    marks = [t for t in titles if t.startswith("version ") and ":" not in t]
    assert len(marks) == len(loaded)
    assert "every queue is bounded" in titles
    assert "freeze: 1" in titles


def result(**more):
    return {
        "story": "<b>",
        "seed": 1,
        "held": False,
        "problems": ["ledger balances: <script>"],
        "replay": "echo2-scenario run x",
        "virtual_s": 10.0,
        "peers": 1,
        "steps": None,
        "idle_share": None,
        "trajectories": None,
        "versions": {"published": 0},
        "strikes": {},
        "converged_s": None,
        "bytes": {"coordinator": {"sent": 1, "received": 2}},
        **more,
    }


def test_a_run_that_broke_is_told_with_nothing_taken_for_markup():
    text = page(result(), [], {"cores": 2}, {"echo2p2p": "0"})
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "no summary" in text
    assert "<b>" not in text


def test_of_many_machines_the_first_are_drawn():
    entries = [
        {"t": 1.0, "event": "version.loaded", "node": f"p-{n}", "version": 0} for n in range(200)
    ]
    text = page(result(), entries, {}, {})
    assert f"and {201 - ROWS_MAX} more" in text
    assert text.count("p-") < 200


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")
def test_a_browser_draws_it_without_a_complaint(tmp_path):
    target, _ = played(tmp_path)
    with open_page(find_chromium()) as browser:
        browser.open(target.as_uri())
        browser.wait("document.querySelectorAll('svg').length == 4")
        assert browser.value("document.querySelectorAll('rect').length > 5")
        wide = "[...document.querySelectorAll('svg')].every(s => s.clientWidth == 960)"
        assert browser.value(wide)
        assert browser.complaints == []
