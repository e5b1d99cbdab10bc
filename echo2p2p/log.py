"""The journal: events as structured lines, for people on a terminal and for machines in a file.

Code says what happened (`journal.event("peer.joined", peer=...)`), never how it reads. Event
names are constants beside the code that emits them, written ``subject.what_happened``; the last
word decides the level (`level_of`), so that nobody chooses levels one by one. Names and tokens:

* a field whose name speaks of a secret is masked, and so is anything that looks like one of our
  secrets (they carry recognisable prefixes, see `echo2p2p.net.trust`) in any text;
* bytes appear as their first 16 hex digits;
* a journal that cannot be written (full disk, closed terminal) never stops the node: that sink is
  given up, and the others say so.

Rejected: the standard library's logging tree, whose global configuration every imported package
may change, and which knows texts instead of fields.
"""

from __future__ import annotations

import datetime
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal, Protocol, TextIO

import structlog

from echo2p2p.errors import ConfigError
from echo2p2p.net.ports import WallClock

Level = Literal["info", "warning", "error"]
Form = Literal["human", "json"]

SINK_LOST: Final = "journal.sink_lost"

_ERROR_WORDS: Final = frozenset({"failed", "crashed", "died", "corrupt", "stuck"})
_WARNING_WORDS: Final = frozenset(
    {"refused", "rejected", "lost", "dropped", "late", "slow", "evicted", "snubbed", "retried"}
)
_SECRET_WORDS: Final = frozenset(
    {"secret", "token", "credential", "password", "authorization", "private"}
)
_OWN_KEYS: Final = frozenset({"timestamp", "level", "event"})
_SECRET_TEXT: Final = re.compile(r"\be2[pac]-[A-Za-z0-9_-]{8,}")
_MASK: Final = "***"
_BYTES_SHOWN: Final = 8


def level_of(name: str) -> Level:
    """Return the level of an event by the last word of its name: ``upload_rejected`` warns."""
    last = re.split(r"[._]", name)[-1]
    if last in _ERROR_WORDS:
        return "error"
    return "warning" if last in _WARNING_WORDS else "info"


def without_secrets(text: str) -> str:
    """Return ``text`` with everything that looks like one of our secrets masked."""
    return _SECRET_TEXT.sub(lambda found: found.group()[:4] + _MASK, text)


def _is_secret(name: str, value: object) -> bool:
    # Numbers pass: usd_per_token is a price.
    if value is None or isinstance(value, int | float):
        return False
    return not _SECRET_WORDS.isdisjoint(name.lower().split("_"))


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return without_secrets(str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        shown = bytes(value[:_BYTES_SHOWN]).hex()
        return shown if len(value) <= _BYTES_SHOWN else f"{shown}.."
    if isinstance(value, Mapping):
        return plain_fields({str(name): item for name, item in value.items()})
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return without_secrets(str(value))


def plain_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Return ``fields`` as JSON can hold them, secrets masked."""
    return {
        name: _MASK if _is_secret(name, value) else _plain(value) for name, value in fields.items()
    }


class _Sink(Protocol):
    """One place where lines go; raises OSError or ValueError (closed) when it is gone."""

    def write(self, entry: dict[str, object]) -> None:
        """Write one line."""
        ...


class _HumanSink:
    """Lines for people; fields stand in the order in which they were given."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._render = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), sort_keys=False, pad_event_to=26
        )

    def write(self, entry: dict[str, object]) -> None:
        """Write one line, and a traceback below it if there is one."""
        self._stream.write(str(self._render(None, "", dict(entry))) + "\n")
        self._stream.flush()


class _JsonSink:
    """One JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._render = structlog.processors.JSONRenderer(ensure_ascii=False)

    def write(self, entry: dict[str, object]) -> None:
        """Write one line."""
        self._stream.write(str(self._render(None, "", dict(entry))) + "\n")
        self._stream.flush()


class _Sinks:
    """All sinks of a process, written under one lock; a broken one is given up."""

    def __init__(self, sinks: list[_Sink], clock: WallClock) -> None:
        self._sinks = sinks
        self._clock = clock
        self._lock = threading.Lock()

    def write(self, name: str, fields: Mapping[str, object]) -> None:
        """Write to each sink that still takes lines."""
        with self._lock:
            lost = self._write(name, fields)
            if lost is not None:
                self._write(SINK_LOST, {"cause": lost})

    def _write(self, name: str, fields: Mapping[str, object]) -> str | None:
        moment = datetime.datetime.fromtimestamp(self._clock.time(), datetime.UTC)
        entry: dict[str, object] = {
            "timestamp": moment.isoformat(timespec="milliseconds"),
            "level": level_of(name),
            "event": name,
            **{(f"{key}_" if key in _OWN_KEYS else key): fields[key] for key in fields},
        }
        lost = None
        for sink in list(self._sinks):
            try:
                sink.write(entry)
            except (OSError, ValueError) as error:
                self._sinks.remove(sink)
                lost = str(error) or type(error).__name__
        return lost


class StructlogJournal:
    """`Journal` of a real process; made by `open_journal`. Any thread may call it."""

    def __init__(self, sinks: _Sinks, bound: Mapping[str, object]) -> None:
        self._sinks = sinks
        self._bound = bound

    def event(self, name: str, /, **fields: object) -> None:
        """Write one line to every sink; a traceback goes under ``exception``."""
        self._sinks.write(name, plain_fields({**self._bound, **fields}))

    def bind(self, **fields: object) -> StructlogJournal:
        """Return a journal that adds ``fields`` to each event."""
        return StructlogJournal(self._sinks, {**self._bound, **fields})


@contextmanager
def open_journal(
    stream: TextIO, clock: WallClock, *, form: Form = "human", file: Path | None = None
) -> Iterator[StructlogJournal]:
    """Open the journal of a process.

    Args:
        stream: The terminal, usually standard error; left open at the end.
        clock: Stamps the lines.
        form: What ``stream`` gets.
        file: Also append JSON lines here, for as long as the context is open.

    Raises:
        ConfigError: ``file`` cannot be written.
    """
    sinks: list[_Sink] = [_JsonSink(stream) if form == "json" else _HumanSink(stream)]
    with ExitStack() as stack:
        if file is not None:
            try:
                lines = stack.enter_context(file.open("a", encoding="utf-8"))
            except OSError as error:
                detail = f"cannot write {file} ({error.strerror}): choose another file"
                raise ConfigError("log.file", detail) from error
            sinks.append(_JsonSink(lines))
        yield StructlogJournal(_Sinks(sinks, clock), {})
