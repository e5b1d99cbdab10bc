"""The screen: lines in order, a view in place, and a terminal that takes nothing or is gone."""

import io
import threading

import pytest

from echo2p2p import terminal
from echo2p2p.log import open_journal
from echo2p2p.terminal import LINES_MAX, can_draw, open_screen


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Stopped(io.StringIO):
    """A terminal after Ctrl-S: it takes nothing until it is released."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()
        self.asked = threading.Event()

    def write(self, text):
        self.asked.set()
        assert self.released.wait(10)
        return super().write(text)


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


class FixedClock:
    def time(self):
        return 0.0


def test_lines_come_out_in_order_before_the_screen_is_closed():
    out = io.StringIO()
    with open_screen(out, live=False) as screen:
        for number in range(50):
            screen.line(f"line {number}")
    assert out.getvalue().splitlines() == [f"line {number}" for number in range(50)]


def test_a_stopped_terminal_holds_nobody_up_and_the_lines_beyond_the_bound_are_counted():
    out = Stopped()
    with open_screen(out, live=False) as screen:
        screen.line("first")
        assert out.asked.wait(10)
        for _ in range(LINES_MAX + 7):
            screen.line("more")  # returns at once
        out.released.set()
    shown = out.getvalue().splitlines()
    assert shown[:2] == ["first", "more"]
    assert len(shown) == 1 + LINES_MAX + 1
    assert shown[-1] == "(7 lines were dropped: this terminal took none)"


def test_closing_waits_for_a_stopped_terminal_only_so_long(monkeypatch):
    monkeypatch.setattr(terminal, "CLOSE_S", 0.05)
    out = Stopped()
    with open_screen(out, live=False) as screen:
        screen.line("never shown")
    out.released.set()


def test_a_terminal_that_is_gone_is_given_up_in_silence(capsys):
    with open_screen(Gone(), live=False) as screen:
        for _ in range(3):
            screen.line("nobody reads this")
    assert capsys.readouterr() == ("", "")


def test_views_are_ignored_where_they_cannot_be_drawn():
    out = io.StringIO()
    with open_screen(out, live=False) as screen:
        screen.show(lambda: pytest.fail("must not be made"))
        screen.line("plain")
    assert out.getvalue() == "plain\n"


def test_the_newest_view_stays_on_a_terminal_lines_are_above_it_and_the_cursor_is_visible():
    text = pytest.importorskip("rich.text")
    out = Terminal()
    drawn = threading.Event()

    def first():
        drawn.set()
        return text.Text("view 1")

    with open_screen(out, live=True) as screen:
        screen.show(first)
        assert drawn.wait(10)
        screen.line("\x1b[31ma line\x1b[0m")
        screen.show(lambda: text.Text("view 2"))
    raw = out.getvalue()
    assert raw.index("view 1") < raw.index("a line") < raw.rindex("view 2")
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l"), "shown after it was hidden"


def test_a_journal_can_write_above_the_view():
    out = io.StringIO()
    with (
        open_screen(out, live=False) as screen,
        open_journal(screen.stream(), FixedClock()) as journal,
    ):
        journal.event("peer.joined", peer="p1")
        journal.event("peer.lost", peer="p2")
    first, second = out.getvalue().splitlines()
    assert "peer.joined" in first
    assert "peer.lost" in second


@pytest.mark.parametrize(
    ("term", "stream", "expected"),
    [
        ("xterm", Terminal(), True),
        ("dumb", Terminal(), False),
        ("", Terminal(), False),
        ("xterm", io.StringIO(), False),
    ],
)
def test_a_view_needs_a_terminal_that_can_move_its_cursor(monkeypatch, term, stream, expected):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(terminal.importlib.util, "find_spec", lambda name: name)
    assert can_draw(stream) is expected


def test_a_view_needs_rich(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal.importlib.util, "find_spec", lambda name: None)
    assert not can_draw(Terminal())
