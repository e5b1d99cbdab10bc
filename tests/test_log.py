"""The journal: levels, lines, and what must never be in them."""

import io
import json
from pathlib import Path

import pytest

from echo2p2p import log as log_module
from echo2p2p.errors import ConfigError
from echo2p2p.log import (
    SINK_LOST,
    LogFlags,
    level_of,
    open_journal,
    plain_fields,
    take_log_flags,
)
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
        ("link.violated", "warning"),
        ("failed_over.ended", "info"),
        ("step.done", "debug"),
        ("upload.accepted", "debug"),
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
        pytest.raises(ConfigError, match="no such folder: make it"),
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


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ([], LogFlags()),
        (["--quiet"], LogFlags(lowest="warning")),
        (["--verbose"], LogFlags(lowest="debug")),
        (["--log-json"], LogFlags(form="json", lowest="debug")),
        (["--log-json", "--quiet"], LogFlags(form="json", lowest="warning")),
    ],
)
def test_flags_are_taken_out_of_the_command_line(words: list[str], flags: LogFlags) -> None:
    assert take_log_flags(["--a", "1", *words, "b"]) == (flags, ["--a", "1", "b"])


def test_quiet_and_verbose_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradicts --verbose"):
        take_log_flags(["--verbose", "--quiet"])


def test_progress_is_for_people_who_did_not_ask_for_quiet() -> None:
    shown = [
        words
        for words in ("--quiet", "--verbose", "--log-json", "--x")
        if take_log_flags([words])[0].shows_progress
    ]
    assert shown == ["--verbose", "--x"]


def test_a_stream_gets_what_is_at_its_level_and_the_file_everything(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "x.jsonl"
    with open_journal(out, FixedClock(), form="json", lowest="warning", file=path) as journal:
        for name in ("step.done", "peer.joined", "peer.lost", "child.died"):
            journal.event(name)
    assert [line["level"] for line in lines(out.getvalue())] == ["warning", "error"]
    assert [line["level"] for line in lines(path.read_text())] == [
        "debug",
        "info",
        "warning",
        "error",
    ]


def test_a_long_file_is_moved_aside_and_no_line_is_lost(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(log_module, "FILE_BYTES_MAX", 4096)
    file = tmp_path / "events.jsonl"
    with open_journal(io.StringIO(), FixedClock(), file=file) as journal:
        for number in range(60):
            journal.event("peer.joined", number=number)
    old = lines((tmp_path / "events.jsonl.1").read_text())
    new = lines(file.read_text())
    assert [line["number"] for line in [*old, *new]] == list(range(60))
    with open_journal(io.StringIO(), FixedClock(), file=file) as journal:
        for number in range(1000):
            journal.event("peer.joined", number=number)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 4096 + 500
    assert lines(file.read_text())[-1]["number"] == 999
