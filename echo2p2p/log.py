"""The journal: events as structured lines, for people on a terminal and for machines in a file.

Code says what happened (`journal.event("peer.joined", peer=...)`), never how it reads. Event
names are constants beside the code that emits them, written ``subject.what_happened``; the last
word decides the level (`level_of`), so that nobody chooses levels one by one. A user chooses by
``--quiet`` and ``--verbose`` what a terminal shows (`LogFlags`); a file gets everything. Names and
tokens:

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, TextIO

import structlog

from echo2p2p.errors import ConfigError
from echo2p2p.net.disk_errors import chosen_error
from echo2p2p.net.ports import WallClock

Level = Literal["debug", "info", "warning", "error"]
Form = Literal["human", "json"]

LEVELS: Final[tuple[Level, ...]] = ("debug", "info", "warning", "error")

SINK_LOST: Final = "journal.sink_lost"

_ERROR_WORDS: Final = frozenset({"failed", "crashed", "died", "corrupt", "stuck"})
_WARNING_WORDS: Final = frozenset(
    {
        *(
            "dropped",
            "evicted",
            "late",
            "lost",
            "refused",
            "rejected",
            "retried",
            "slow",
            "snubbed",
        ),
        "violated",
    }
)
_ROUTINE_WORDS: Final = frozenset(
    {
        *("accepted", "applied", "completed", "decided", "done", "followed", "issued", "loaded"),
        *("published", "start"),
    }
)
"""What a healthy run does all the time: the terminal shows it on request only."""
_SECRET_WORDS: Final = frozenset(
    {"secret", "token", "credential", "password", "authorization", "private"}
)
_OWN_KEYS: Final = frozenset({"timestamp", "level", "event"})
_SECRET_TEXT: Final = re.compile(r"\be2[pac]-[A-Za-z0-9_-]{8,}")
_MASK: Final = "***"
FILE_BYTES_MAX: Final = 64 << 20
_BYTES_SHOWN: Final = 8


def level_of(name: str) -> Level:
    """Return the level of an event by the last word of its name: ``upload_rejected`` warns."""
    last = re.split(r"[._]", name)[-1]
    if last in _ERROR_WORDS:
        return "error"
    if last in _WARNING_WORDS:
        return "warning"
    return "debug" if last in _ROUTINE_WORDS else "info"


LOG_HELP: Final = """\
--quiet shows warnings and errors only, --verbose also what a healthy run does all the time,
--log-json writes everything as one JSON object a line to standard error, and nothing else
anywhere; with --quiet warnings and errors only."""


@dataclass(frozen=True)
class LogFlags:
    """What a user wants to see on the terminal."""

    form: Form = "human"
    lowest: Level = "info"

    @property
    def shows_progress(self) -> bool:
        """Whether lines for a person belong on standard output, beside the journal."""
        return self.form == "human" and self.lowest != "warning"


def take_log_flags(words: Sequence[str]) -> tuple[LogFlags, list[str]]:
    """Return what ``--quiet``, ``--verbose`` and ``--log-json`` say, and the other words.

    Raises:
        ConfigError: Quiet and verbose at once.
    """
    flags = {"--quiet", "--verbose", "--log-json"}
    found = flags & set(words)
    if {"--quiet", "--verbose"} <= found:
        raise ConfigError("--quiet", "contradicts --verbose; give one of them")
    form: Form = "json" if "--log-json" in found else "human"
    lowest: Level = "info"
    if "--quiet" in found:
        lowest = "warning"
    elif "--verbose" in found or form == "json":
        lowest = "debug"
    return LogFlags(form, lowest), [word for word in words if word not in flags]


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


class _FileSink:
    """One JSON object a line in a file; one that has grown long becomes ``<name>.1``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._stream = self._path.open("a", encoding="utf-8")
        self._lines = _JsonSink(self._stream)

    def write(self, entry: dict[str, object]) -> None:
        """Write one line."""
        if self._stream.tell() >= FILE_BYTES_MAX:
            self._stream.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._open()
        self._lines.write(entry)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a full disk refuses once more what it has refused before
            self._stream.close()


class _Sinks:
    """All sinks of a process, written under one lock; a broken one is given up."""

    def __init__(self, sinks: list[tuple[_Sink, Level]], clock: WallClock) -> None:
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
        level = level_of(name)
        moment = datetime.datetime.fromtimestamp(self._clock.time(), datetime.UTC)
        entry: dict[str, object] = {
            "timestamp": moment.isoformat(timespec="milliseconds"),
            "level": level,
            "event": name,
            **{(f"{key}_" if key in _OWN_KEYS else key): fields[key] for key in fields},
        }
        lost = None
        for sink, lowest in list(self._sinks):
            if LEVELS.index(level) < LEVELS.index(lowest):
                continue
            try:
                sink.write(entry)
            except (OSError, ValueError) as error:
                self._sinks.remove((sink, lowest))
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
    stream: TextIO,
    clock: WallClock,
    *,
    form: Form = "human",
    lowest: Level = "debug",
    file: Path | None = None,
) -> Iterator[StructlogJournal]:
    """Open the journal of a process.

    Args:
        stream: The terminal, usually standard error; left open at the end.
        clock: Stamps the lines.
        form: What ``stream`` gets.
        lowest: Level below which ``stream`` gets nothing.
        file: Also append all JSON lines here, for as long as the context is open; at
            `FILE_BYTES_MAX` it is moved aside, in place of the one that was moved before.

    Raises:
        ConfigError: ``file`` cannot be written.
        StoreError: It could be if the disk had room.
    """
    shown = _JsonSink(stream) if form == "json" else _HumanSink(stream)
    sinks: list[tuple[_Sink, Level]] = [(shown, lowest)]
    with ExitStack() as stack:
        if file is not None:
            try:
                lines = stack.enter_context(closing(_FileSink(file)))
            except OSError as error:
                raise chosen_error("log.file", f"write {file}", error) from error
            sinks.append((lines, "debug"))
        yield StructlogJournal(_Sinks(sinks, clock), {})
