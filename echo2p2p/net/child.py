"""The trio side of a child process: start it, call it, and be sure that it ends.

The network process never imports torch and is never blocked by a training step: learner, engine
and task workers are children, and a crashed child is an event with an error and its last words,
not the end of the node. Calls go over a socket pair as length-prefixed MessagePack
(`echo2p2p.net.child_worker` has the format and the child's loop), one at a time. What the child
prints is kept (the last 4 KiB) and may be appended to a log file, which is moved aside when it has
grown long. A child that uses more memory than it may is killed while a call runs, before the
machine has to kill something.

No nursery outlives a call: the output is read while a call runs, and a child that writes more
than a pipe holds between two calls waits for the next one. Whatever goes wrong (death, a broken
pipe, silence, a missed deadline, a cancelled call) leaves the child unusable; the caller closes
it and starts another.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import trio

from echo2p2p.errors import ChildError, ConfigError, LocalProtocolError
from echo2p2p.net.child_worker import (
    ENVIRONMENT_KEY,
    FRAME_BYTES_MAX,
    HEADER,
    Beat,
    Call,
    Failure,
    FrameTooLongError,
    FromChild,
    Nudge,
    Progress,
    Reply,
    encode_body,
    encode_frame,
)
from echo2p2p.net.process_memory import process_tree, tree_memory

T = TypeVar("T")

ENVIRONMENT: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Laid over ours. Threads that spin cost a busy machine a factor of ten; no child goes online."""

LOG_TAIL_BYTES: Final = 4096
LAST_WORDS_LINES: Final = 3
LOG_FILE_BYTES_MAX: Final = 16 << 20
"""A log file that has grown to this becomes ``<name>.1``, in place of the one before."""
MEMORY_LOOK_S: Final = 0.25
GOODBYE_S: Final = 1.0
"""How long an idle child may take to end by itself."""
CLOSE_S: Final = 5.0
"""Limit of the whole clean-up: a killed process in the middle of disk IO may take a while."""
_READ_BYTES: Final = 65536
_READ_BYTES_MAX: Final = 1 << 20


def last_words_of(log: str) -> str:
    """Return the end of what a process has written, in one line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return " | ".join(lines[-LAST_WORDS_LINES:])[-500:]


class ChildProcess:
    """One child process, from `start` to `close`.

    Args:
        name: For people, in errors: ``"engine"``.
        module: Run with ``python -P -m``; calls `child_worker.connect` first of all.
        arguments: Its command line.
        environment: Laid over `ENVIRONMENT`.
        log_file: All output is appended here.
        memory_max_bytes: Private memory of the child and its own children; more is death.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        memory_max_bytes: int | None = None,
    ) -> None:
        self.name = name
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._environment = {**ENVIRONMENT, **(environment or {})}
        self._log_file = log_file
        self._memory_max_bytes = memory_max_bytes
        self._tail = bytearray()
        self._process: trio.Process | None = None
        self._stream: trio.SocketStream | None = None
        self._lifeline: int | None = None
        self._broken: str | None = "it was never started"
        self._idle = trio.Event()
        self._idle.set()
        self._nudged = trio.Event()
        self._spawning = trio.Lock()
        self._closing = False
        self._closed = trio.Event()

    @property
    def pid(self) -> int | None:
        """Process id while it runs, as far as we know."""
        return self._process.pid if self._process is not None else None

    @property
    def log_tail(self) -> str:
        """The end of its output, at most 4 KiB."""
        return self._tail.decode("utf-8", errors="replace")

    async def start(self) -> None:
        """Spawn it; returns at once, before the child has done anything.

        Raises:
            ChildError: The process could not be made.
        """
        async with self._spawning:
            if self._process is not None or self._closing:
                raise LocalProtocolError(f"{self.name} was started twice, or after its end")
            await self._spawn()

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        descriptors = (theirs.fileno(), lifeline_read)
        environment = {
            **os.environ,
            **self._environment,
            ENVIRONMENT_KEY: ",".join(map(str, descriptors)),
        }
        try:
            self._process = await trio.lowlevel.open_process(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for us, not for the child
            )
        except OSError as error:
            raise ChildError(self.name, f"cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(lifeline_read)
            if self._process is None:
                ours.close()
                os.close(lifeline_write)
        ours.setblocking(False)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        self._lifeline = lifeline_write
        self._broken = None

    async def call(
        self,
        method: str,
        argument: Any,  # noqa: ANN401 - whatever msgspec encodes
        kind: type[T],
        *,
        timeout_s: float | None,
        silence_s: float | None = None,
        progress: Callable[[Any], None] | None = None,
        progress_kind: Any = None,  # noqa: ANN401 - a type, as msgspec understands types
    ) -> T:
        """Ask for one thing and wait for it.

        Args:
            method: A key of the child's table.
            argument: Encoded with msgspec.
            kind: What the reply must be.
            timeout_s: For all of it; ``None`` for calls that only ``silence_s`` bounds.
            silence_s: Longest time without any message from the child, beats included.
            progress: Called with each progress message, decoded as ``progress_kind``.
            progress_kind: See ``progress``.

        Raises:
            ChildError: The method raised (``raised`` says what, and the child lives on), or the
                child died, broke its pipe, was silent or late, or used too much memory (it is of
                no more use: close it).
            ConfigError: The method raised one; the child lives on.

        Cancelling leaves the child unusable: its late answer would pass for the next one.
        """
        if not self._idle.is_set():
            raise LocalProtocolError(f"{self.name} was called while a call was under way")
        stream = self._stream
        if self._broken is not None or stream is None:
            raise self._error(self._broken or "it was closed")
        try:
            frame = encode_frame(Call(method=method, body=encode_body(argument)))
        except FrameTooLongError as error:
            raise self._error(f"{method!r} was not asked: {error}", last_words=False) from error
        self._idle, self._nudged = trio.Event(), trio.Event()
        self._broken = f"its call {method!r} was cancelled"
        try:
            answer = await self._exchange(
                stream, method, frame, timeout_s, silence_s, progress, progress_kind
            )
            if isinstance(answer, Failure):
                self._broken = None
                if answer.config_path is not None:
                    raise ConfigError(answer.config_path, answer.detail)
                raise self._error(answer.detail, last_words=False, raised=answer.kind)
            reply: T = msgspec.msgpack.decode(answer.body, type=kind)
            self._broken = None
            return reply  # noqa: TRY300 - an else block would hide that decoding may fail too
        except msgspec.MsgspecError as error:
            self._broken = f"answered {method!r} with something else: {error}"
            raise self._error(self._broken) from error
        finally:
            self._idle.set()

    def nudge(self) -> None:
        """Ask for an early answer to the call under way; the method may not know how.

        Returns at once. Without a call it does nothing.
        """
        self._nudged.set()

    async def _pass_nudge(self, stream: trio.SocketStream) -> None:
        await self._nudged.wait()
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.send_all(encode_frame(Nudge()))

    async def _exchange(
        self,
        stream: trio.SocketStream,
        method: str,
        frame: bytes,
        timeout_s: float | None,
        silence_s: float | None,
        progress: Callable[[Any], None] | None,
        progress_kind: Any,  # noqa: ANN401 - as in `call`
    ) -> Reply | Failure:
        """Send, then read until the answer; another task reads the child's output meanwhile."""
        answer: Reply | Failure | None = None
        lost = ""
        output_ended, overgrown, gone = trio.Event(), trio.Event(), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_output, output_ended)
            nursery.start_soon(self._watch_memory, overgrown)
            nursery.start_soon(self._watch_end, gone)
            with gone, trio.move_on_after(inf if timeout_s is None else timeout_s) as limit:
                try:
                    await stream.send_all(frame)
                    nursery.start_soon(self._pass_nudge, stream)
                    while answer is None:
                        message = await self._receive(stream, silence_s)
                        if isinstance(message, Progress):
                            if progress is not None:
                                progress(msgspec.msgpack.decode(message.body, type=progress_kind))
                        elif not isinstance(message, Beat):
                            answer = message
                except (_LostError, trio.BrokenResourceError, trio.ClosedResourceError):
                    lost = "died"
                except msgspec.MsgspecError as error:
                    lost = f"sent something else than an answer: {error}"
                except trio.TooSlowError:
                    lost = f"gave no sign of life for {silence_s} s during {method!r}"
            if gone.cancelled_caught:
                lost = "died"
            if limit.cancelled_caught:
                lost = f"did not finish {method!r} within {timeout_s} s"
            elif lost == "died":
                with trio.move_on_after(GOODBYE_S):  # for the traceback that is still in the pipe
                    await output_ended.wait()
                if overgrown.is_set():
                    lost = f"was killed during {method!r}: {self._overgrown()}"
                else:
                    lost = f"died during {method!r}{await self._fate()}"
            nursery.cancel_scope.cancel()
        if answer is None:
            self._broken = "it was closed" if self._closing else lost
            raise self._error(self._broken)
        return answer

    async def _watch_end(self, gone: trio.CancelScope) -> None:
        """Give the call up when the child has ended without an end of file on its socket.

        A process that it has forked may hold that open for ever.
        """
        assert self._process is not None
        with contextlib.suppress(OSError):  # an old kernel: then limits of time must do
            descriptor = os.pidfd_open(self._process.pid)
            try:
                await trio.lowlevel.wait_readable(descriptor)
            finally:
                os.close(descriptor)
            await trio.sleep(GOODBYE_S)  # for an answer that it gave before
            gone.cancel()

    async def _watch_memory(self, overgrown: trio.Event) -> None:
        """Kill it when it has grown too large; the call under way then sees its end."""
        process, most = self._process, self._memory_max_bytes
        assert process is not None
        if most is None:
            return
        while True:
            if tree_memory(process.pid).private_bytes > most:
                overgrown.set()
                _kill_all(process.pid, _hold_descendants(process.pid))
                return
            await trio.sleep(MEMORY_LOOK_S)

    def _overgrown(self) -> str:
        assert self._memory_max_bytes is not None
        return f"it used more than the {self._memory_max_bytes / 1e6:.0f} MB of memory it may"

    async def _receive(self, stream: trio.SocketStream, silence_s: float | None) -> FromChild:
        with trio.fail_after(inf if silence_s is None else silence_s):
            (size,) = HEADER.unpack(await _read_exactly(stream, HEADER.size))
            if size > FRAME_BYTES_MAX:
                raise _LostError
            body = await _read_exactly(stream, size)
        message: FromChild = msgspec.msgpack.decode(body, type=FromChild)
        return message

    async def _read_output(self, ended: trio.Event | None = None) -> None:
        """Keep what the child prints, until its end of file."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while data := await self._process.stdout.receive_some(_READ_BYTES):
                self._keep(bytes(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        if ended is not None:
            ended.set()

    def _keep(self, data: bytes) -> None:
        self._tail += data
        del self._tail[:-LOG_TAIL_BYTES]
        if self._log_file is None:
            return
        try:
            with self._log_file.open("ab") as file:
                file.write(data)
                long = file.tell() >= LOG_FILE_BYTES_MAX
            if long:
                self._log_file.replace(self._log_file.with_name(f"{self._log_file.name}.1"))
        except OSError as error:  # a full disk must not end a training run; the tail says it
            self._tail += f"\n[no longer logged: {error}]\n".encode()
            self._log_file = None

    async def _fate(self) -> str:
        """Return how it ended, for people; looks without reaping, so its group stays ours."""
        assert self._process is not None
        look = functools.partial(os.waitid, os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        status: os.waitid_result | None = None
        with trio.move_on_after(GOODBYE_S), contextlib.suppress(ChildProcessError):
            status = await trio.to_thread.run_sync(look, abandon_on_cancel=True)
        if status is None:
            return ""
        if status.si_code == os.CLD_EXITED:
            return f" with exit code {status.si_status}"
        if status.si_status == signal.SIGKILL:
            return " of SIGKILL (by hand, or because the machine has no memory left)"
        return f" of {signal.Signals(status.si_status).name}"

    def _error(self, detail: str, *, last_words: bool = True, raised: str = "") -> ChildError:
        words = last_words_of(self.log_tail) if last_words else ""
        return ChildError(self.name, detail, log_tail=words, raised=raised)

    async def close(self) -> None:
        """End it: politely if it is idle, at once if it is busy. Idempotent.

        Shielded, and over within `CLOSE_S` whatever the child does; it is dead and reaped then,
        and so are all of its process group and all of its descendants.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                async with self._spawning:
                    await self._end()
        finally:
            self._broken = "it was closed"
            self._closed.set()

    async def _end(self) -> None:
        process, stream = self._process, self._stream
        if process is None or stream is None:
            return
        assert process.stdout is not None
        idle = self._idle.is_set()
        descendants = _hold_descendants(process.pid)
        if idle and self._broken is None:
            try:
                await stream.send_eof()
                with trio.move_on_after(GOODBYE_S):
                    await self._read_output()
            except trio.BrokenResourceError:
                pass  # it is dead already
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        # Before the leader is reaped: until then its id cannot belong to anybody else.
        _kill_all(process.pid, descendants)
        await process.wait()
        if idle:
            with trio.move_on_after(GOODBYE_S):
                await self._read_output()
        else:
            await self._idle.wait()  # the call under way sees the end of file and raises
        await stream.aclose()
        await process.stdout.aclose()


def _hold_descendants(pid: int) -> list[int]:
    """Return a descriptor of each; by its id one could not be found once its parent is dead."""
    held = []
    for each in list(process_tree(pid))[1:]:
        with contextlib.suppress(OSError):
            held.append(os.pidfd_open(each))
    return held


def _kill_all(pid: int, descendants: list[int]) -> None:
    """Kill a child that leads its group, all in it, and its descendants; it is not reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for each in descendants:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(each, signal.SIGKILL)
        os.close(each)


class _LostError(Exception):
    """The message socket is of no more use."""


async def _read_exactly(stream: trio.SocketStream, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = await stream.receive_some(min(size, _READ_BYTES_MAX))
        if not part:
            raise _LostError
        parts.append(bytes(part))
        size -= len(part)
    return b"".join(parts)
