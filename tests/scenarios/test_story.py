"""Story files: what they may say, what they draw, and errors that name the key."""

import random

import pytest

from echo2p2p.errors import ConfigError
from scenarios.story import load_story, read_story, shipped
from scenarios.swarm import DELIVERIES_MAX, PEERS_MAX, draw_story

WRONG = {
    "[world]\nstopp_s = 3": "world.stopp_s: Extra inputs are not permitted",
    "[world]\nstop_s = 20\nheal_s = 10": "world.stop_s 20 leaves no time to converge",
    '[[peers]]\nup = "20Mb"': "peers.0.up: '20Mb' may be bits or bytes",
    "[[peers]]\nup = [5, 2]": "peers.0.up: [5, 2] is upside down",
    "[[peers]]\nlatency_ms = [1, 2, 3]": "peers.0.latency_ms: write one number, or",
    "[[peers]]\n[[peers]]": "peers: two groups have the same name",
    '[[nemesis]]\nfault = "crush"\nat_s = 1': "nemesis.0: Input tag 'crush' found",
    '[[nemesis]]\nfault = "crash"': "nemesis.0.crash: give exactly one of at_s, every_s and",
    '[[nemesis]]\nfault = "crash"\nat_s = 1\nevery_s = 2': "nemesis.0.crash: give exactly one of",
    '[[nemesis]]\nfault = "crash"\nat_s = 1\nfactor = 2': "nemesis.0.crash.factor: Extra inputs",
    '[[nemesis]]\nfault = "crash"\nat_s = 1\nshare = 0.5\ncount = 2': "give count or share",
    '[[nemesis]]\nfault = "crash"\nat_s = 1\non = "rack"': "nemesis.0.on: no group 'rack'",
    '[[nemesis]]\nfault = "lossy-link"\nat_s = 1\nloss = 0.9': "loss must lie between 0 and 0.4",
    '[[nemesis]]\nfault = "lie"\nat_s = 1\nlies = ["white"]': "nemesis.0.lie.lies.0: Input should",
    '[[nemesis]]\nfault = "arrive"\nat_s = 1': 'nemesis.0: nobody there has joins_s = "later"',
    "[settings.rollouts]\nprompts_per_stop = 3": "settings.rollouts.prompts_per_stop: Extra inputs",
    "[settings.rollouts]\nstaleness_budget = -1": "settings.rollouts.staleness_budget: Input",
    "about = ": "not TOML",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named_with_its_key(text):
    with pytest.raises(ConfigError) as caught:
        read_story(text, "mine.toml")
    assert "mine.toml" in str(caught.value)
    assert WRONG[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_story_that_is_not_there_says_where_to_look():
    with pytest.raises(ConfigError, match="no such story"):
        load_story("no-such")


def test_an_empty_file_is_a_story():
    assert len(read_story("", "x").draw(random.Random(1)).peers) == 8


def test_ranges_are_drawn_from_the_seed_within_their_ends():
    text = """
        [[peers]]
        name = "home"
        count = 40
        up = ["8Mbit", "16Mbit"]
        latency_ms = [10, 30]
        nat_share = 0.5
        tokens = [5, 9]
    """
    story = read_story(text, "x")
    first, again, other = (story.draw(random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    ups = [peer.up_bytes_per_s for peer in first.peers]
    assert 1e6 <= min(ups) < max(ups) <= 2e6
    assert all(0.01 <= peer.latency_s <= 0.03 for peer in first.peers)
    assert 8 <= sum(peer.nat for peer in first.peers) <= 32
    assert {peer.name for peer in first.peers} == {f"home-{number}" for number in range(40)}


def test_settings_are_the_coordinators_own_over_those_of_a_small_world():
    text = "[settings.rollouts]\nstaleness_budget = 1\n[settings.membership]\nterm_s = 7.0"
    settings = read_story(text, "x").coordinator()
    assert settings.rollouts.staleness_budget == 1
    assert settings.membership.term_s == 7.0
    assert settings.rollouts.prompts_per_step == 8


def test_every_shipped_story_says_what_it_is_about_and_heals_in_time():
    stories = shipped()
    assert len(stories) >= 14
    for name, story in stories.items():
        assert 10 <= len(story.about) <= 100, name
        assert story.world.healed_s < story.world.stop_s, name


def test_a_thousand_seeds_draw_stories_that_are_valid_small_and_of_every_fault():
    kinds: set[str] = set()
    for seed in range(1, 1001):
        story = draw_story(seed)
        assert sum(group.count for group in story.peers) <= PEERS_MAX
        # One that joins late, if others depart, is drawn when the learner's pace is settled.
        settled = sum(group.count for group in story.peers if group.name != "late")
        period_s = story.world.learner_step_s * story.settings["rollouts"]["publication_period"]
        assert settled * story.world.stop_s / period_s < DELIVERIES_MAX + 0.01
        assert story.world.stop_s <= 180
        kinds |= {fault.fault for fault in story.nemesis}
    assert len(kinds) == 20
