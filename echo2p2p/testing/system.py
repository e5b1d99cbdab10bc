"""Randomness from a seed, CPU work inline, and shared memory that is plain memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TypeVar

import trio
from blake3 import blake3

from echo2p2p.errors import LocalProtocolError, StoreError

T = TypeVar("T")


class SimEntropy:
    """`Entropy` from a seed: a stream of secrets, and generators numbered per purpose.

    Draws of one purpose, or of one fork, do not move the others, so a change in one part of a
    scenario leaves the rest of it as it was.
    """

    def __init__(self, seed: int | str) -> None:
        self._key = blake3(f"echo2p2p simulation {seed}".encode()).digest()
        self._secrets_drawn = 0
        self._rngs_drawn: dict[str, int] = {}

    def fork(self, name: str) -> SimEntropy:
        """Return the randomness of the part called ``name``: same name, same randomness."""
        return SimEntropy(f"{self._key.hex()} {name}")

    def secret(self, count: int) -> bytes:
        """Return the next ``count`` bytes; as secret as the seed."""
        self._secrets_drawn += 1
        text = f"secret {self._secrets_drawn}".encode()
        return blake3(text, key=self._key).digest(length=count)

    def rng(self, purpose: str) -> random.Random:
        """Return the next generator of ``purpose``."""
        drawn = self._rngs_drawn.get(purpose, 0)
        self._rngs_drawn[purpose] = drawn + 1
        seed = blake3(f"rng {drawn} {purpose}".encode(), key=self._key).digest()
        return random.Random(seed)  # noqa: S311 - a simulation wants to be repeatable


class InlineOffload:
    """`Offload` in the caller's own thread, taking ``work_s`` of virtual time."""

    def __init__(self, work_s: float = 0.0) -> None:
        self._work_s = work_s

    async def run(self, work: Callable[[], T]) -> T:
        """Return ``work()``; once begun it is waited for, as a thread would be."""
        await trio.lowlevel.checkpoint()
        result = work()
        if self._work_s:
            with trio.CancelScope(shield=True):
                await trio.sleep(self._work_s)
        await trio.lowlevel.checkpoint_if_cancelled()
        return result


class MemoryState:
    """`SharedState` in this process only."""

    def __init__(
        self, size: int, data: bytearray | None = None, closed: Callable[[], None] | None = None
    ) -> None:
        data = bytearray(size) if data is None else data
        self._view: memoryview | None = memoryview(data)
        self._closed = closed

    @property
    def path(self) -> str:
        """Empty: there is nothing that a child could map."""
        return ""

    @property
    def view(self) -> memoryview:
        """All of it, writable.

        Raises:
            LocalProtocolError: It is closed.
        """
        if self._view is None:
            raise LocalProtocolError("shared state used after it was closed")
        return self._view

    def rest(self) -> None:
        """Do nothing: there is no file behind it."""

    def close(self) -> None:
        """Give the memory back, unless an array still looks at it; then with that array."""
        view, self._view = self._view, None
        if view is not None and self._closed is not None:
            self._closed()
        if view is not None:
            with contextlib.suppress(BufferError):
                view.release()


class SimSharedMemory:
    """`SharedMemory` with an allowance, so that "no room" can be simulated.

    Args:
        bytes_max: The allowance.
        files: Where kept blocks lie; whoever gives it decides what outlives what.
    """

    def __init__(
        self, bytes_max: int | None = None, files: dict[str, bytearray] | None = None
    ) -> None:
        self._bytes_max = bytes_max
        self._files = {} if files is None else files
        self._states: dict[str, tuple[MemoryState, int]] = {}

    def allocate(self, name: str, size: int) -> MemoryState:
        """Return a zeroed block; an old one of this name is closed.

        Raises:
            StoreError: It would take more than the allowance.
        """
        if name in {"", ".", ".."} or "/" in name or size <= 0:
            raise LocalProtocolError(f"no block of {size} bytes can be called {name!r}")
        old = self._states.pop(name, None)
        if old is not None:
            old[0].close()
        self._check_room(size)
        state = MemoryState(size)
        self._states[name] = (state, size)
        return state

    def scratch(self, size: int) -> MemoryState:
        """Return a zeroed block; it counts only while it is asked for.

        Raises:
            StoreError: It would take more than the allowance.
        """
        if size <= 0:
            raise LocalProtocolError(f"no block of {size} bytes")
        self._check_room(size)
        return MemoryState(size)

    def keep(self, name: str, size: int) -> MemoryState:
        """Return a block that outlives us if ``files`` does; see `SharedMemory`.

        Raises:
            StoreError: It would take more than the allowance.
        """
        if not name or "/" in name or size <= 0:
            raise LocalProtocolError(f"no block of {size} bytes can be kept as {name!r}")
        data = self._files.get(name)
        if data is None or len(data) != size:
            self._check_room(size)
            data = self._files[name] = bytearray(size)
        return MemoryState(size, data, lambda: self.drop(name))

    def kept(self) -> list[str]:
        """Return the names of all blocks that `keep` has made and nobody has closed, sorted."""
        return sorted(self._files)

    def drop(self, name: str) -> None:
        """Remove a kept block; no error if there is none."""
        self._files.pop(name, None)

    def _check_room(self, size: int) -> None:
        used = sum(taken for _, taken in self._states.values())
        if self._bytes_max is not None and used + size > self._bytes_max:
            raise StoreError(f"no room for {size} bytes of shared memory ({used} in use)")
