"""Distance between the machines of `scenarios.namespaces`, on kernels without netem.

Each machine's arriving packets go to a netfilter queue (NFQUEUE), where the kernel holds them; this
process gets their numbers only, and lets them go when their time is up. So every packet is late by
``one_way_s`` when it arrives, and a round trip by twice that. Nothing is lost or overtaken.

Run as ``python -m scenarios.delay NAMESPACE=SECONDS ...``; it prints one line when all queues are
bound, takes other delays as such words, one a line, on standard input, and ends when that does. If
it dies, packets are lost from then on: nobody takes a short round trip for a long one.

The messages are those of Linux's ``nfnetlink_queue.h``: a netlink header, a netfilter header, then
attributes of length, type and value.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import sys
import time  # noqa: TID251 - the kernel's packets keep the kernel's time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

NETNS: Final = Path("/run/netns")
CLONE_NEWNET: Final = 0x40000000
NETLINK_NETFILTER: Final = 12
SOL_NETLINK: Final = 270
NETLINK_NO_ENOBUFS: Final = 5
SO_RCVBUFFORCE: Final = 33
RECEIVE_BYTES: Final = 8 << 20
QUEUE_SUBSYSTEM: Final = 3
PACKET, CONFIG, VERDICT_BATCH = 0, 2, 3
PACKET_HEADER, VERDICT_HEADER = 1, 2
"""Attributes of what comes and what goes."""
CONFIG_COMMAND, CONFIG_COPY, CONFIG_LENGTH, CONFIG_MASK, CONFIG_FLAGS = 1, 2, 3, 4, 5
BIND: Final = 1
COPY_META: Final = 1
FLAG_GSO: Final = 4
"""Packets that the kernel has merged stay merged: a tenth of the work."""
ACCEPT: Final = 1
PACKETS_MAX: Final = 100_000
"""That wait in one queue."""
READ_AT_ONCE: Final = 256


def rule(device: str) -> list[str]:
    """Return the command that sends what arrives at ``device`` into queue 0."""
    into = ["-j", "NFQUEUE", "--queue-num", "0"]
    return ["iptables", "-w", "-t", "mangle", "-A", "PREROUTING", "-i", device, *into]


def attribute(kind: int, value: bytes) -> bytes:
    """Return one attribute, padded to four bytes."""
    return struct.pack("HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def message(kind: int, body: bytes) -> bytes:
    """Return a message for queue 0."""
    head = struct.pack("!BBH", socket.AF_UNSPEC, 0, 0)
    length = 16 + len(head) + len(body)
    return struct.pack("IHHII", length, QUEUE_SUBSYSTEM << 8 | kind, 1, 0, 0) + head + body


def packet_number(data: bytes) -> int | None:
    """Return the number of the packet that ``data`` tells of; ``None``: it tells of none."""
    length, kind = struct.unpack_from("IH", data)
    at = 20
    while kind == QUEUE_SUBSYSTEM << 8 | PACKET and at < length:
        size, name = struct.unpack_from("HH", data, at)
        if name & 0x3FFF == PACKET_HEADER:
            (number,) = struct.unpack_from("!I", data, at + 4)
            return int(number)
        at += (size + 3) & ~3
    return None


class Queue:
    """One namespace's packets.

    Raises:
        OSError: The kernel refused: no such namespace, no root, or no NFQUEUE.
    """

    def __init__(self, namespace: str, one_way_s: float) -> None:
        _enter(namespace)
        self.namespace = namespace
        self.one_way_s = one_way_s
        self._held: deque[tuple[float, int]] = deque()
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self.socket.bind((0, 0))
        self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
        self.socket.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
        command = struct.pack("!BBH", BIND, 0, socket.AF_INET)
        self.socket.send(message(CONFIG, attribute(CONFIG_COMMAND, command)))
        settings = (
            attribute(CONFIG_COPY, struct.pack("!IB", 0, COPY_META)),
            attribute(CONFIG_LENGTH, struct.pack("!I", PACKETS_MAX)),
            attribute(CONFIG_FLAGS, struct.pack("!I", FLAG_GSO)),
            attribute(CONFIG_MASK, struct.pack("!I", FLAG_GSO)),
        )
        self.socket.send(message(CONFIG, b"".join(settings)))
        self.socket.setblocking(False)

    @property
    def next_s(self) -> float | None:
        """When the first packet may go, by the monotonic clock."""
        return self._held[0][0] if self._held else None

    def read(self, now_s: float) -> None:
        """Note what has arrived."""
        for _ in range(READ_AT_ONCE):
            try:
                number = packet_number(self.socket.recv(4096))
            except BlockingIOError:
                return
            if number is not None:
                self._held.append((now_s + self.one_way_s, number))

    def release(self, now_s: float) -> None:
        """Let go all whose time is up, in one message: the last one's number means all before."""
        last: int | None = None
        while self._held and self._held[0][0] <= now_s:
            last = self._held.popleft()[1]
        if last is not None:
            header = struct.pack("!II", ACCEPT, last)
            self.socket.send(message(VERDICT_BATCH, attribute(VERDICT_HEADER, header)))


def _enter(namespace: str) -> None:
    """Make sockets of this thread belong to a namespace from now on."""
    with (NETNS / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def parse(word: str) -> tuple[str, float]:
    """Return a namespace and its delay, one way, in seconds."""
    name, _, seconds = word.partition("=")
    return name, float(seconds)


def serve(queues: Sequence[Queue], orders: int) -> None:
    """Hold packets until the file descriptor ``orders`` ends."""
    by_number = {queue.socket.fileno(): queue for queue in queues}
    by_name = {queue.namespace: queue for queue in queues}
    with select.epoll() as poll:
        for number in (orders, *by_number):
            poll.register(number, select.EPOLLIN)
        while True:
            ready = dict(poll.poll(_patience_s(queues)))
            if orders in ready:
                words = os.read(orders, 4096).decode().split()
                if not words:
                    return
                for name, one_way_s in map(parse, words):
                    by_name[name].one_way_s = one_way_s
            for number in ready.keys() & by_number.keys():
                by_number[number].read(time.monotonic())
            now_s = time.monotonic()
            for queue in queues:
                queue.release(now_s)


def _patience_s(queues: Sequence[Queue]) -> float | None:
    times: Iterator[float] = (queue.next_s for queue in queues if queue.next_s is not None)
    first_s = min(times, default=None)
    return None if first_s is None else max(0.0, first_s - time.monotonic())


def main(words: Sequence[str]) -> int:
    """Delay what arrives in these namespaces."""
    queues = [Queue(name, one_way_s) for name, one_way_s in map(parse, words)]
    print("ready", flush=True)
    serve(queues, sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
