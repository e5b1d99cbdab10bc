"""The loop's thread, and how a trio task waits for a coroutine that runs there."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import functools
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeVar

import outcome
import trio

from echo2p2p.errors import LinkError
from echo2p2p.limits import KIB
from echo2p2p.net.ports import Journal

T = TypeVar("T")

LOOP_FAILED: Final = "http.loop_failed"

CLOSE_S: Final = 2.0
"""How long the thread may take to end."""


TLS_BUFFER_BYTES: Final = 64 * KIB
"""Each TLS connection reads into a buffer of its own. asyncio's 256 KiB would be 2 GiB for 8192
idle members, and reading is no faster with them."""


class _Call(Generic[T]):
    """One coroutine that a trio task waits for."""

    def __init__(self, aio: AioThread, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._aio = aio
        self._work = work
        self._trio_task = trio.lowlevel.current_task()
        self._aio_task: asyncio.Task[T] | None = None
        self._raise_cancel: Callable[[], Any] | None = None
        self._delivered = False

    def start(self) -> None:
        """In the loop's thread: begin."""
        self._aio_task = self._aio.loop.create_task(self._work())
        self._aio_task.add_done_callback(self._finished)

    def abort(self, raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
        """In trio's thread: cancel the coroutine, and go on waiting for it."""
        self._raise_cancel = raise_cancel
        self._aio.tell_loop(self._cancel)
        return trio.lowlevel.Abort.FAILED

    def _cancel(self) -> None:
        if self._aio_task is not None:
            self._aio_task.cancel()

    def _finished(self, task: asyncio.Task[T]) -> None:
        result: outcome.Outcome[T] | None = None
        if not task.cancelled():
            error = task.exception()
            result = outcome.Value(task.result()) if error is None else outcome.Error(error)
        self._aio.tell_trio(functools.partial(self.deliver, result))

    def deliver(self, result: outcome.Outcome[T] | None) -> None:
        """In trio's thread: wake the task. ``None`` means cancelled, by it or by the closing."""
        if self._delivered:
            return
        self._delivered = True
        self._aio.forget(self)
        if result is None:
            if self._raise_cancel is not None:
                result = outcome.capture(self._raise_cancel)
            else:
                result = outcome.Error(LinkError("the HTTP thread is closed"))
        trio.lowlevel.reschedule(self._trio_task, result)


class AioThread:
    """An asyncio loop in a thread of its own; made by `open_aio`."""

    def __init__(self, journal: Journal | None, close_s: float) -> None:
        self.loop = asyncio.new_event_loop()
        self._journal = journal
        self._close_s = close_s
        self._token = trio.lowlevel.current_trio_token()
        self._calls: dict[_Call[Any], None] = {}
        self._ended = trio.Event()
        self._thread = threading.Thread(target=self._run, name="asyncio", daemon=True)
        if journal is not None:
            self.loop.set_exception_handler(self._on_loop_error)

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return ``await work()``, run on the loop.

        Cancelling cancels the asyncio task and waits for its end; a result that came all the same
        is returned.

        Raises:
            LinkError: The thread was closed meanwhile.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._ended.is_set():
            raise LinkError("the HTTP thread is closed")
        call = _Call(self, work)
        self._calls[call] = None
        self.tell_loop(call.start)
        result: T = await trio.lowlevel.wait_task_rescheduled(call.abort)
        return result

    def tell_loop(self, call: Callable[[], object]) -> None:
        """Run ``call`` soon in the loop's thread, unless the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call)

    def tell_trio(self, call: Callable[[], object]) -> None:
        """Run ``call`` soon in trio's thread, unless the trio run is over."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(call)

    def forget(self, call: _Call[Any]) -> None:
        """Drop a call that has its result."""
        self._calls.pop(call, None)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def close(self) -> None:
        """End the thread; whoever still waits for it gets a `LinkError`."""
        self.tell_loop(self.loop.stop)
        with trio.move_on_after(self._close_s, shield=True) as scope:
            await self._ended.wait()
        if not scope.cancelled_caught:
            # It has said that it ends: this takes microseconds.
            self._thread.join()
        elif self._journal is not None:
            self._journal.event(LOOP_FAILED, cause=f"did not end within {self._close_s:g} s")
        self._ended.set()
        for call in list(self._calls):
            call.deliver(None)

    def _run(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=self._close_s / 2))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
            self.tell_trio(self._ended.set)

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        fields: dict[str, object] = {"cause": str(context.get("message"))}
        if isinstance(error, BaseException):
            fields["exception"] = "".join(traceback.format_exception(error))
        journal = self._journal
        assert journal is not None
        self.tell_trio(lambda: journal.event(LOOP_FAILED, **fields))


@asynccontextmanager
async def open_aio(
    journal: Journal | None = None, *, close_s: float = CLOSE_S
) -> AsyncIterator[AioThread]:
    """Run an asyncio loop in a thread while the context is open.

    ``journal`` gets stray errors of the loop, which otherwise go to the ``asyncio`` logger. A
    thread that does not end within ``close_s`` is given up; as a daemon it ends with the process.
    """
    asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
    aio = AioThread(journal, close_s)
    aio.start()
    try:
        yield aio
    finally:
        await aio.close()
