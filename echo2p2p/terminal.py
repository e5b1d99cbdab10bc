"""What a program shows its person: plain lines, or on a terminal a view that is drawn in place.

A terminal may take nothing for minutes (Ctrl-S, a slow line, a pipe that nobody reads), and a
network process must not wait for it. So a thread of its own writes, from a bounded queue: lines
that find it full are dropped and counted, and of views only the newest is drawn. A terminal that is
gone is given up.

The view needs `rich`, which is imported when first drawn; without it, or where standard output is
no terminal, there are lines only. The cursor stays visible, so that a ``kill -9`` leaves a usable
terminal behind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from rich.live import Live

LINES_MAX: Final = 1000
"""Lines that wait for a terminal that takes none."""
CLOSE_S: Final = 2.0
"""How long a terminal may take for the last lines."""


class Screen:
    """Standard output of a program; made by `open_screen`. Any thread may call it.

    Args:
        stream: Where everything goes.
        live: Whether it takes views; see `can_draw`.
    """

    def __init__(self, stream: TextIO, *, live: bool) -> None:
        self.live = live
        self._stream = stream
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._view: Callable[[], object] | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._drawn: Live | None = None
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)

    def line(self, text: str) -> None:
        """Show a line; above the view, if there is one."""
        with self._changed:
            if len(self._lines) >= LINES_MAX:
                self._dropped += 1
                return
            self._lines.append(text)
            self._changed.notify()

    def show(self, view: Callable[[], object]) -> None:
        """Draw what ``view()`` returns, a `rich` renderable, in place of the last one.

        It is called in the screen's thread. Does nothing where views cannot be drawn.
        """
        if not self.live:
            return
        with self._changed:
            self._view = view
            self._changed.notify()

    def stream(self) -> TextIO:
        """Return a text stream whose lines are shown as by `line`, for a journal."""
        return _LineStream(self)

    # --- the thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self) -> None:
        """Write what waits, for a moment at most, and stop; the last view stays on the screen."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone: say no more
            while self._write_next():
                pass
            if self._drawn is not None:
                self._drawn.stop()

    def _write_next(self) -> bool:
        """Wait for something and write it; false once all is written and we close."""
        with self._changed:
            while not (self._lines or self._dropped or self._view or self._closing):
                self._changed.wait()
            lines, self._lines = list(self._lines), deque()
            if self._dropped:
                lines.append(f"({self._dropped} lines were dropped: this terminal took none)")
                self._dropped = 0
            view, self._view = self._view, None
            more = bool(lines or view) or not self._closing
        if lines:
            self._write(lines)
        if view is not None:
            self._draw(view())
        return more

    def _write(self, lines: list[str]) -> None:
        if self._drawn is None:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
            return
        from rich.text import Text

        for line in lines:
            self._drawn.console.print(Text.from_ansi(line), soft_wrap=True)

    def _draw(self, renderable: object) -> None:
        from rich.console import Console, ConsoleRenderable
        from rich.live import Live

        assert isinstance(renderable, ConsoleRenderable)
        if self._drawn is None:
            console = Console(file=self._stream, force_terminal=True)
            self._drawn = Live(
                console=console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._drawn.start()
            console.show_cursor(True)
        self._drawn.update(renderable, refresh=True)


class _LineStream(io.StringIO):
    """Whole lines go to a screen."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen
        self._rest = ""

    def write(self, text: str) -> int:
        """Show the lines that are whole."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._screen.line(line)
        return len(text)

    def isatty(self) -> bool:
        """Return whether colours are fit for it."""
        return self._screen.live


def can_draw(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal on which a view can be drawn in place."""
    return (
        stream.isatty()
        and os.environ.get("TERM", "") not in {"", "dumb", "unknown"}
        and importlib.util.find_spec("rich") is not None
    )


@contextmanager
def open_screen(stream: TextIO, *, live: bool) -> Iterator[Screen]:
    """Open a screen on ``stream``, usually standard output, which is left open at the end."""
    screen = Screen(stream, live=live)
    screen.start()
    try:
        yield screen
    finally:
        screen.close()
