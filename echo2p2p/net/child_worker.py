"""The blocking side of a child process: read a call, do it, answer; die with the parent.

A child (engine, learner, task worker) has one socket for messages and one *lifeline*: a pipe that
the parent holds open and never writes to. A watchdog thread waits on the lifeline and ends the
whole family as soon as it reaches end of file, so that even ``kill -9`` of the parent, in the
middle of a long computation, leaves nothing behind. (The kernel's parent-death signal is no
use here: it fires when the *thread* that spawned the child ends, and trio spawns from a worker
thread.) The watchdog needs the interpreter lock for an instant; C code that holds it for minutes
delays the end by as much.

A start may take minutes (imports, weights from a slow disk), and must not be taken for a hang. So a
method may be marked to *beat*: while it runs, a thread says every few seconds that the process has
worked or read from disk since the last beat. One that is stuck has no pulse.

Messages are frames: four bytes of length, then MessagePack of one of the structs below. Both
sides are one machine and one owner, so the limits of `echo2p2p.wire.codec` do not apply, but
nothing is pickled either. This module imports neither trio nor torch: a child loads what it needs
after the watchdog is up.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, process_time, thread_time  # noqa: TID251 - a child has no trio
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from echo2p2p.errors import ConfigError
from echo2p2p.net.process_memory import process_tree

ENVIRONMENT_KEY: Final = "ECHO2P2P_CHILD_FDS"
"""Carries the two descriptors: message socket and lifeline."""

HEADER: Final = struct.Struct("<I")

FRAME_BYTES_MAX: Final = (1 << 32) - 1
"""A batch of 512 rollouts of 32k tokens takes about 200 MB; settings bound a batch to less."""

BEAT_S: Final = 5.0
BEAT_CPU_S: Final = 0.005
"""Work between two beats that counts as life, beyond the beating itself."""
BEAT_CPU_SHARE: Final = 0.05
"""Of the time between two beats, for processes that it has started: what compiles or loads takes
all of it, what waits in a loop much less."""

OOM_SCORE: Final = 500
"""Of a child, when the system must kill something: rather a child than the network process, which
would take all children along."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Parent to child: do ``method``; exactly one `Reply` or `Failure` follows."""

    method: str
    body: msgspec.Raw


class Nudge(msgspec.Struct, frozen=True, tag="nudge"):
    """Parent to child, while a call runs: answer before it is done, if you can.

    It has no answer of its own, and one that comes too late for its call says nothing.
    """


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Child to parent, any number of times before the answer: a sign of life."""

    body: msgspec.Raw


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Child to parent, while a call that beats runs: the process works."""


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Child to parent: the call's result."""

    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Child to parent: the call raised; the child lives on and takes the next call."""

    detail: str
    """One line: type and message. The traceback went to standard error."""
    kind: str = ""
    """Name of the exception's class."""
    config_path: str | None = None
    """Of a `ConfigError`, whose detail is then ``detail``: the user's own fault."""


ToChild = Call | Nudge
FromChild = Beat | Progress | Reply | Failure


class FrameTooLongError(Exception):
    """A message is over `FRAME_BYTES_MAX`."""


Report = Callable[[Any], None]
"""Sends one progress message, of any type that msgspec encodes."""


@dataclass(frozen=True)
class Method:
    """One call that a child answers."""

    kind: Any
    """Type of the argument, for `msgspec`: a struct, a dataclass, ``list[int]``, ..."""
    run: Callable[[Any, Report], Any]
    """From the decoded argument to a result that msgspec encodes."""
    beats: bool = False
    """Whether the process shows its pulse meanwhile."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return ``message`` as one frame.

    Raises:
        FrameTooLongError: It would not fit.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise FrameTooLongError(f"a message of {len(body)} bytes; at most {FRAME_BYTES_MAX}")
    return HEADER.pack(len(body)) + body


def encode_body(value: Any) -> msgspec.Raw:  # noqa: ANN401 - whatever msgspec encodes
    """Return ``value`` encoded, to be put into an envelope."""
    return msgspec.Raw(msgspec.msgpack.encode(value))


class Channel:
    """The child's end of the message socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def receive(self) -> Call | None:
        """Return the next call, or ``None`` when the parent has closed its end."""
        while isinstance(message := self._next(), Nudge):
            pass
        return message

    def nudged(self) -> bool:
        """Whether the parent has sent a `Nudge` since the call that runs; never waits."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0)) and self._next() is not None

    def _next(self) -> ToChild | None:
        header = self._read(HEADER.size)
        if header is None:
            return None
        (size,) = HEADER.unpack(header)
        body = self._read(size)
        if body is None:
            return None
        message: ToChild = msgspec.msgpack.decode(body, type=ToChild)
        return message

    def send(self, message: FromChild) -> None:
        """Send one message; blocks until the socket has taken all of it. Any thread may."""
        frame = encode_frame(message)
        with self._sending:
            self._socket.sendall(frame)

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            count = self._socket.recv_into(view[filled:])
            if count == 0:
                return None
            filled += count
        return data


def connect() -> Channel:
    """Take over the descriptors that the parent gave, and start the watchdog. Call this first.

    Raises:
        SystemExit: This process was not started by `echo2p2p.net.child.ChildProcess`.
    """
    given = os.environ.pop(ENVIRONMENT_KEY, "")
    if not given:
        sys.exit("this module is a child process of echo2p2p; it is not started by hand")
    messages, lifeline = (int(part) for part in given.split(","))
    for descriptor in (messages, lifeline):
        os.set_inheritable(descriptor, False)
    faulthandler.enable()
    threading.Thread(target=_watch, args=(lifeline,), name="watchdog", daemon=True).start()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write(str(OOM_SCORE))
    return Channel(socket.socket(fileno=messages))


def _watch(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    for each in list(process_tree(os.getpid()))[1:]:  # vLLM's workers, in whatever session
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGKILL)
    if os.getpgrp() == os.getpid():  # our own group
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def serve(channel: Channel, methods: Mapping[str, Method], *, beat_s: float = BEAT_S) -> None:
    """Answer calls, one at a time, until the parent closes its end.

    Methods that beat do so every ``beat_s`` seconds.

    An exception of a method is answered with `Failure` and the next call is awaited: only the
    parent knows whether the child is still of use.
    """

    def report(value: object) -> None:
        channel.send(Progress(body=encode_body(value)))

    while (call := channel.receive()) is not None:
        method = methods.get(call.method)
        beats = method is not None and method.beats
        with Pulse(channel, beat_s) if beats else contextlib.nullcontext():
            answer = _answer(call, methods, report)
        channel.send(answer)


def _answer(call: Call, methods: Mapping[str, Method], report: Report) -> Reply | Failure:
    try:
        method = methods[call.method]
        argument = msgspec.msgpack.decode(call.body, type=method.kind)
        return Reply(body=encode_body(method.run(argument, report)))
    except ConfigError as error:
        return Failure(error.detail, type(error).__name__, error.path)
    except Exception as error:  # noqa: BLE001 - the boundary of the process: the parent decides
        traceback.print_exc()
        sys.stderr.flush()
        return Failure(one_line(error), type(error).__name__)


class Pulse:
    """Sends a `Beat` every few seconds in which the process has done something; a context.

    Something is CPU time of any thread but the pulse's own, bytes from a disk, or CPU time of its
    own children (compilers; vLLM's workers). A process that waits for ever, for a lock or for a
    device, does none of them.
    """

    def __init__(self, channel: Channel, every_s: float) -> None:
        self._channel = channel
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        cpu_s, read_bytes = process_time() - thread_time(), disk_bytes()
        below_s = descendants_cpu_s()
        while not self._over.wait(self._every_s):
            now_s, now_bytes = process_time() - thread_time(), disk_bytes()
            last_s, below_s = below_s, descendants_cpu_s()
            busy_below = below_s - last_s > BEAT_CPU_SHARE * self._every_s
            if now_s - cpu_s > BEAT_CPU_S or now_bytes != read_bytes or busy_below:
                cpu_s, read_bytes = now_s, now_bytes
                try:
                    self._channel.send(Beat())
                except OSError:  # the parent is gone: the watchdog's business
                    return


def descendants_cpu_s() -> float:
    """Return the CPU seconds that all processes below this one have taken, as far as they live."""
    return _cpu_s(list(process_tree(os.getpid()))[1:])


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all below it, as far as they live."""
    return _cpu_s(list(process_tree(pid)))


def _cpu_s(pids: list[int]) -> float:
    ticks = 0
    for each in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{each}/stat", encoding="ascii") as file:  # noqa: PTH123 - as below
                words = file.read().rpartition(")")[2].split()  # a name may hold anything
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def disk_bytes() -> int:
    """Return how much this process has read from disks; 0 where the system does not tell."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:  # noqa: PTH123 - not a path of ours
            words = file.read().split()
        return int(words[words.index("read_bytes:") + 1])
    except (OSError, ValueError):
        return 0


def one_line(error: BaseException) -> str:
    """Return type and message of ``error`` in one line of at most 500 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def resident_bytes() -> int:
    """Return this process's resident memory now; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - not a path of ours
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Stopwatch:
    """Seconds of work in a child, which has no trio clock; for reports, never for deadlines."""

    def __init__(self) -> None:
        self._start_s = perf_counter()

    def seconds(self) -> float:
        """Return the seconds since it was made."""
        return perf_counter() - self._start_s
