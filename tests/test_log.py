"""The journal: levels, lines, and what must never be in them."""

import io
import json
from pathlib import Path

import pytest

from echo2p2p.errors import ConfigError
from echo2p2p.log import SINK_LOST, level_of, open_journal, plain_fields
from echo2p2p.net.trust import JoinToken, draw_admin_token, draw_credential
from echo2p2p.testing.clock import EPOCH_S
from echo2p2p.testing.system import SimEntropy


class FixedClock:
    def time(self) -> float:
        return EPOCH_S


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("http.handler_failed", "error"),
        ("child.died", "error"),
        ("upload_rejected", "warning"),
        ("peer.lost", "warning"),
        ("peer.joined", "info"),
        ("failed_over.done", "info"),
    ],
)
def test_the_last_word_of_an_event_is_its_level(name: str, level: str) -> None:
    assert level_of(name) == level


def test_a_json_line_has_time_level_event_and_fields() -> None:
    out = io.StringIO()
    with open_journal(out, FixedClock(), form="json") as journal:
        journal.bind(peer="p1").bind(run="r").event("peer.joined", cores=4, digest=bytes(range(32)))
    assert lines(out.getvalue()) == [
        {
            "timestamp": "2027-01-15T08:00:00.000+00:00",
            "level": "info",
            "event": "peer.joined",
            "peer": "p1",
            "run": "r",
            "cores": 4,
            "digest": "0001020304050607..",
        }
    ]


def test_a_line_for_people_shows_the_fields_and_a_traceback_below() -> None:
    out = io.StringIO()
    with open_journal(out, FixedClock()) as journal:
        journal.event("peer.joined", peer="p1")
        journal.event("http.handler_failed", path="/x", exception="Traceback:\n  boom")
    first, second, *rest = out.getvalue().splitlines()
    assert "peer.joined" in first
    assert "peer=p1" in first
    assert "error" in second
    assert [line.strip() for line in rest if line] == ["Traceback:", "boom"]


def test_what_only_looks_like_our_own_key_is_renamed_not_lost() -> None:
    out = io.StringIO()
    with open_journal(out, FixedClock(), form="json") as journal:
        journal.event("x.y", event="theirs", level=3)
    (line,) = lines(out.getvalue())
    assert (line["event"], line["event_"], line["level_"]) == ("x.y", "theirs", 3)


def test_secrets_are_masked_by_name_and_by_look() -> None:
    entropy = SimEntropy(1)
    secrets = [
        JoinToken.create(entropy, bytes(32)).encode(),
        draw_admin_token(entropy),
        draw_credential(entropy),
    ]
    out = io.StringIO()
    with open_journal(out, FixedClock(), form="json") as journal:
        journal.event(
            "peer.joined",
            token="abc",
            join_secret=b"abc",
            Authorization="abc",
            private_key="abc",
            url=f"https://h/?t={secrets[0]}",
            exception=f"refused {secrets[1]}\nagain",
            nested={"credential": "abc", "list": [secrets[2]]},
        )
    text = out.getvalue()
    assert "abc" not in text
    assert not any(secret in text or secret[4:] in text for secret in secrets)
    assert "refused e2a-***" in text


def test_prices_and_counts_of_tokens_are_no_secrets() -> None:
    fields: dict[str, object] = {"usd_per_token": 0.1, "tokens": 5, "token": None, "seed": 7}
    assert plain_fields(fields) == fields


def test_odd_values_become_text() -> None:
    plain = plain_fields({"path": Path("a/b"), "none": None, "flag": True, "pair": (1, b"\x01")})
    assert plain == {"path": "a/b", "none": None, "flag": True, "pair": [1, "01"]}


def test_a_file_gets_json_lines_whatever_the_terminal_gets(tmp_path: Path) -> None:
    path = tmp_path / "node.jsonl"
    for _ in range(2):
        with open_journal(io.StringIO(), FixedClock(), file=path) as journal:
            journal.event("peer.joined", peer="é")
    assert [line["peer"] for line in lines(path.read_text("utf-8"))] == ["é", "é"]


def test_a_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="choose another file"),
        open_journal(io.StringIO(), FixedClock(), file=tmp_path / "nowhere" / "x"),
    ):
        raise AssertionError


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_sink_that_fails_is_given_up_and_the_others_say_so(tmp_path: Path) -> None:
    path = tmp_path / "node.jsonl"
    with open_journal(FullDisk(), FixedClock(), file=path) as journal:
        journal.event("a.one")
        journal.event("a.two")
    written = lines(path.read_text())
    assert [line["event"] for line in written] == ["a.one", SINK_LOST, "a.two"]
    assert "No space left" in str(written[1]["cause"])


def test_a_journal_without_any_sink_left_is_silent() -> None:
    closed = io.StringIO()
    with open_journal(closed, FixedClock()) as journal:
        closed.close()
        journal.event("a.one")
        journal.event("a.two")
