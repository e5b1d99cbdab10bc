"""What a volunteer allows: bytes a second up and down, and bytes a day, of all links of one node.

`TokenBucket` and `DailyCount` are cores (``now`` is an argument); `Shaper` is the shell around
them, one for the life of a peer. Every byte of relay links (`echo2p2p.net.stream`) and of HTTP
(`ShapedHttpClients`) passes it:

* chunks and long bodies wait for their turn *before* they are written, slice by slice, so that
  links share the uplink and a link never falls silent for long;
* what is received is paid for *before the next read*: the sender is slowed down by TCP itself,
  which is why links of a limited peer have small receive buffers (`receive_buffer_bytes`);
* control frames, heartbeats and other short requests go at once and are charged: whoever waits
  next waits longer. Held up, they would cost the link or the membership.

A daily cap has two stages. From `THRIFTY_SHARE` of it on the peer relays nothing and takes only
what its own work needs; when all of it is spent the peer leaves the run and comes back when the
day is over, 24 hours after its first byte. The count survives restarts.

Counted is what the program itself reads and writes; TCP, IP and TLS add about 4 %. Refused: limits
under which a peer could not even keep its links alive. Rejected: shaping in the kernel, which
needs root.
"""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from echo2p2p.errors import StoreError
from echo2p2p.net.ports import HttpClient, HttpClients, Journal, Response, TlsClient, WallClock

RATE_BYTES_PER_S_MIN: Final = 8_000.0
"""Slower than this, slices come too seldom to show that a link is alive."""
CAP_BYTES_MIN: Final = 100_000_000
"""Heartbeats alone take about 50 MB a day."""

BURST_S: Final = 0.2
"""Idle time that may be caught up with; also covers a late wake-up on a busy machine."""
WRITE_S: Final = 0.05
READ_S: Final = 0.01
"""Each link reads this much of the rate before it pays for it."""
SLICE_BYTES_MIN: Final = 1024
SLICE_BYTES_MAX: Final = 128 * 1024
"""A long chunk is written in such parts, each of which shows that the link is alive."""
BUFFER_S: Final = 0.25
BUFFER_BYTES_MIN: Final = 16 * 1024
"""What the kernel takes in for a link before it is read cannot be held back. TLS takes in as much
again, at most 64 KiB, before it hands it on."""

SHORT_BYTES: Final = 16 * 1024
"""An HTTP body up to this length does not wait."""
HTTP_HEAD_BYTES: Final = 250
"""About what head and framing of one HTTP message take."""

DAY_S: Final = 86_400.0
THRIFTY_SHARE: Final = 0.8
SAVE_SHARE: Final = 1 / 500
"""Of the cap: so much may be forgotten by a kill -9."""

TRAFFIC_NOT_SAVED: Final = "traffic.not_saved"


# --- cores ------------------------------------------------------------------------------------


class TokenBucket:
    """Paces bytes: those that are taken may go when all that were taken before have gone.

    Args:
        bytes_per_s: The rate; infinity paces nothing.
        now: Seconds, monotonic, as in every call.
        burst_s: Idle time up to this may be made up for.
    """

    __slots__ = ("_burst_s", "_bytes_per_s", "_free_s")

    def __init__(self, bytes_per_s: float, now: float, *, burst_s: float = BURST_S) -> None:
        assert bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._free_s = now

    def take(self, count: int, now: float) -> float:
        """Take ``count`` bytes and return how many seconds to wait before they may go."""
        start_s = max(self._free_s, now - self._burst_s)
        self._free_s = start_s + count / self._bytes_per_s
        return max(0.0, start_s - now)


class Stage(enum.StrEnum):
    """How much of a day's bytes is left."""

    OPEN = "open"
    THRIFTY = "thrifty"
    """Relay nothing, take only what is needed."""
    SPENT = "spent"
    """Neither send nor take anything until the day is over."""


@dataclass(frozen=True, slots=True)
class DayTraffic:
    """The bytes of one day, as kept on disk."""

    since_s: float
    """Time of day of its first byte, seconds since 1970."""
    used_bytes: int


class DailyCount:
    """Bytes since the day began, against a cap.

    A day is 24 hours from its first byte. A clock that is set back does not make it longer than
    24 hours from then.

    Args:
        cap_bytes: A day; ``None``: no cap, everything is `Stage.OPEN`.
        kept: What an earlier life has kept.
    """

    def __init__(self, cap_bytes: int | None, kept: DayTraffic | None = None) -> None:
        self.cap_bytes = cap_bytes
        self._day = kept or DayTraffic(-math.inf, 0)

    def add(self, count: int, now_s: float) -> None:
        """Count bytes; ``now_s`` is the time of day, as in every call."""
        day = self.day(now_s)
        self._day = DayTraffic(day.since_s, day.used_bytes + count)

    def day(self, now_s: float) -> DayTraffic:
        """Return the day that is now; a new one if the last is over."""
        if self._day.since_s + DAY_S <= now_s:
            self._day = DayTraffic(now_s, 0)
        elif self._day.since_s > now_s:
            self._day = DayTraffic(now_s, self._day.used_bytes)
        return self._day

    def stage(self, now_s: float) -> Stage:
        """Return what is allowed."""
        used = self.day(now_s).used_bytes
        if self.cap_bytes is None or used < THRIFTY_SHARE * self.cap_bytes:
            return Stage.OPEN
        return Stage.THRIFTY if used < self.cap_bytes else Stage.SPENT

    def renews_in_s(self, now_s: float) -> float:
        """Return how long the day still lasts."""
        return self.day(now_s).since_s + DAY_S - now_s


# --- the shell --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What the volunteer allows; ``None``: no limit."""

    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    bytes_per_day: int | None = None


class TrafficLog(Protocol):
    """Where a day's count is kept."""

    def load(self) -> DayTraffic | None:
        """Return what was kept last, or ``None``.

        Raises:
            ConfigError: It cannot be read.
        """
        ...

    def save(self, day: DayTraffic) -> None:
        """Keep it; fast, as it is called from the event loop.

        Raises:
            StoreError: The disk refused.
        """
        ...


class NoTrafficLog:
    """A `TrafficLog` that forgets: without a cap nothing needs to be kept."""

    def load(self) -> DayTraffic | None:
        """Return ``None``."""
        return None

    def save(self, day: DayTraffic) -> None:
        """Do nothing."""


class Shaper:
    """All traffic of one node; made and used inside one trio run.

    Args:
        limits: What is allowed.
        clock: Tells the day.
        log: Keeps the day's count; used only if there is a cap.
        journal: Where a count that cannot be kept is reported, once.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        clock: WallClock,
        log: TrafficLog,
        journal: Journal,
    ) -> None:
        now = trio.current_time()
        self.limits = limits
        self._up = TokenBucket(limits.upload_bytes_per_s or math.inf, now)
        self._down = TokenBucket(limits.download_bytes_per_s or math.inf, now)
        self._clock = clock
        self._log = log
        self._journal = journal
        capped = limits.bytes_per_day is not None
        self._count = DailyCount(limits.bytes_per_day, log.load() if capped else None)
        self._saved_bytes = self._count.day(clock.time()).used_bytes
        self._stage = self.stage()
        self._lost = False
        self.changed = trio.lowlevel.ParkingLot()
        """Unparked when traffic has changed the stage; time alone does not unpark it."""
        self.write_bytes_max = _slice_bytes(limits.upload_bytes_per_s, WRITE_S)
        """How much to write between two calls of `before_sending`."""
        self.read_bytes_max = _slice_bytes(limits.download_bytes_per_s, READ_S)
        """How much to read between two calls of `after_receiving`."""

    # --- bytes --------------------------------------------------------------------------------

    async def before_sending(self, count: int) -> None:
        """Wait until ``count`` bytes, at most `write_bytes_max`, may go; endless by itself."""
        await self._wait(self._up, count)

    async def after_receiving(self, count: int) -> None:
        """Wait until ``count`` bytes that were read, at most `read_bytes_max`, are paid for."""
        await self._wait(self._down, count)

    def charge_sent(self, count: int) -> None:
        """Count bytes that go at once."""
        self._up.take(count, trio.current_time())
        self._add(count)

    def charge_received(self, count: int) -> None:
        """Count bytes that came and are not waited for."""
        self._down.take(count, trio.current_time())
        self._add(count)

    async def _wait(self, bucket: TokenBucket, count: int) -> None:
        wait_s = bucket.take(count, trio.current_time())
        self._add(count)
        if wait_s > 0:
            await trio.sleep(wait_s)

    # --- the day ------------------------------------------------------------------------------

    def stage(self) -> Stage:
        """Return what the cap allows now."""
        return self._count.stage(self._clock.time())

    def day(self) -> DayTraffic:
        """Return the day's count."""
        return self._count.day(self._clock.time())

    def renews_in_s(self) -> float:
        """Return how long the day still lasts."""
        return self._count.renews_in_s(self._clock.time())

    async def wait_renewed(self) -> None:
        """Sleep until the cap allows something again."""
        while self.stage() is Stage.SPENT:  # noqa: ASYNC110 only time changes it
            await trio.sleep(max(1.0, self.renews_in_s()))

    def save(self) -> None:
        """Keep the count now; a disk that refuses is reported once and otherwise ignored."""
        if self._count.cap_bytes is None:
            return
        day = self.day()
        self._saved_bytes = day.used_bytes
        try:
            self._log.save(day)
        except StoreError as error:
            if not self._lost:
                self._journal.event(TRAFFIC_NOT_SAVED, detail=str(error))
            self._lost = True

    def _add(self, count: int) -> None:
        cap = self._count.cap_bytes
        if cap is None:
            return
        self._count.add(count, self._clock.time())
        stage = self.stage()
        if stage is not self._stage or abs(self.day().used_bytes - self._saved_bytes) > (
            SAVE_SHARE * cap
        ):
            self.save()
        if stage is not self._stage:
            self._stage = stage
            self.changed.unpark_all()


def _slice_bytes(bytes_per_s: float | None, seconds: float) -> int:
    if bytes_per_s is None:
        return SLICE_BYTES_MAX
    return max(SLICE_BYTES_MIN, min(SLICE_BYTES_MAX, int(bytes_per_s * seconds)))


def receive_buffer_bytes(limits: Limits) -> int | None:
    """Return how much the kernel should take in for a link; ``None``: as it likes."""
    rate = limits.download_bytes_per_s
    return None if rate is None else max(BUFFER_BYTES_MIN, int(rate * BUFFER_S))


# --- HTTP -------------------------------------------------------------------------------------


class ShapedHttpClients:
    """`HttpClients` whose bytes count."""

    def __init__(self, inner: HttpClients, shaper: Shaper) -> None:
        self._inner = inner
        self._shaper = shaper

    @asynccontextmanager
    async def connect(self, url: str, tls: TlsClient | None) -> AsyncIterator[HttpClient]:
        """Open a client; see `HttpClients`."""
        async with self._inner.connect(url, tls) as client:
            yield ShapedHttpClient(client, self._shaper)


class ShapedHttpClient:
    """`HttpClient` whose bytes count.

    A long body waits before it is sent, a long answer before it is returned; neither wait is part
    of the request's timeout.
    """

    def __init__(self, inner: HttpClient, shaper: Shaper) -> None:
        self._inner = inner
        self._shaper = shaper

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Response:
        """Return the server's answer; see `HttpClient`."""
        shaper = self._shaper
        shaper.charge_sent(HTTP_HEAD_BYTES + len(path))
        if len(body) <= SHORT_BYTES:
            shaper.charge_sent(len(body))
        else:
            for size in _slices(len(body), shaper.write_bytes_max):
                await shaper.before_sending(size)
        response = await self._inner.request(
            method, path, body=body, headers=headers, timeout_s=timeout_s
        )
        shaper.charge_received(HTTP_HEAD_BYTES)
        if len(response.body) <= SHORT_BYTES:
            shaper.charge_received(len(response.body))
        else:
            for size in _slices(len(response.body), shaper.read_bytes_max):
                await shaper.after_receiving(size)
        return response


def _slices(length: int, most: int) -> list[int]:
    return [min(most, length - start) for start in range(0, length, most)]
