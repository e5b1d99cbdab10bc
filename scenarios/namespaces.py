"""A wide-area network on one machine: a namespace for each machine, a bridge between them.

Each machine's line is a pair of virtual Ethernet ports with a token bucket on both: on its own port
for what it sends, on the bridge's for what it receives. Nobody else's network is touched, and
nothing can be left behind: all of it lives in network, mount and process namespaces of its own
(`WRAP`), whose end, however it comes, is the end of every process and every interface in them.

The queues are long (`QUEUE_BYTES`), as those of cheap routers are, and nothing is lost on the way.
Peers that cannot be dialled sit on isolated ports of the bridge: they cannot reach each other.
Distance is a queue in user space at each machine's port (`scenarios.delay`), for kernels without
netem; it takes ``iptables``, as do connections that are to break with a reset.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Final

import msgspec
import trio

from echo2p2p.errors import EchoError
from echo2p2p.testing.links import Framing
from scenarios import delay
from scenarios.broadcast_links import BYTES_PER_MBIT, Line

WRAP: Final = (
    *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("--propagation", "private"),
)
"""What the command that builds machines must run under."""
RUN: Final = Path("/run")
"""Covered with memory inside, because ``ip netns`` keeps its names there."""
HUB: Final = "hub"
BRIDGE: Final = "br0"
ASIDE: Final = "br1"
"""Whoever is on it reaches only others there."""
PORT: Final = "e0"
BURST_BYTES: Final = 65_536
"""What a bucket holds. Less is inexact (at 20 Mbit/s a timer's tick is worth 10 kB) and wakes the
receivers twice as often: with 50 kB at 20 Mbit/s relays took double the CPU, and 8 % longer."""
SLOW_MBIT: Final = 10.0
SLOW_BURST_S: Final = 0.02
SLOW_BURST_BYTES_MIN: Final = 8_000
"""Slower lines than that hold what they carry in such a time: 64 kB are half a second at 1 Mbit/s,
which would then carry small payloads for nothing."""
QUEUE_BYTES: Final = 1_000_000
HEAD_BYTES: Final = 14 + 20 + 32
"""Of a packet: Ethernet, IP, TCP with time stamps."""
TOTAL_MBIT_MAX: Final = 800.0
"""Of all uplinks: what two cores forward with packets of 1,500 bytes."""


@dataclass(frozen=True)
class Counters:
    """What a machine's line has carried, by the kernel's account, headers included."""

    up_bytes: int
    down_bytes: int


class _Qdisc(msgspec.Struct):
    """One entry of ``tc -j -s qdisc show``."""

    kind: str
    dev: str
    bytes: int = 0


def why_impossible() -> str | None:
    """Return why no namespace can be built by this process; ``None``: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run this as root, or with --virtual"
    try:
        done = _try([*WRAP, "ip", "link", "add", "h0", "type", "veth"])
        if done.returncode == 0:
            done = _try(["tc", "-V"])
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces need unshare, ip and tc: {error}; or use --virtual"
    words = done.stderr.decode(errors="replace").strip().splitlines() or ["no words"]
    return f"no network namespaces here ({words[-1]}): use --virtual" if done.returncode else None


def why_no_packets_held() -> str | None:
    """Return why no machine can be made distant, nor connections be reset; ``None``: they can."""
    if shutil.which("iptables") is None:
        return "this takes iptables: apt-get install iptables"
    done = _try([*WRAP, *delay.rule("lo")])
    words = done.stderr.decode(errors="replace").strip().splitlines() or ["no words"]
    return f"this kernel cannot hold packets back ({words[-1]})" if done.returncode else None


def _try(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, check=False, timeout=20)  # noqa: S603 - our own words


def address_of(index: int) -> str:
    """Return a machine's address, of the range for benchmarks (RFC 2544)."""
    return f"198.18.{index // 200}.{index % 200 + 1}"


def hardware_address_of(index: int) -> str:
    """Return the address of a machine's port, of those that nobody sells."""
    return f"02:e2:00:00:{index >> 8:02x}:{index & 255:02x}"


def name_of(index: int) -> str:
    """Return a machine's namespace."""
    return f"n{index}"


def inside(index: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` on a machine."""
    return ["ip", "netns", "exec", name_of(index), *command]


def names_batch(count: int) -> str:
    """Return what `ip` makes first."""
    return "\n".join(f"netns add {name}" for name in (HUB, *map(name_of, range(count))))


def hub_batch(lines: Sequence[Line]) -> str:
    """Return what `ip` makes in the hub."""
    made = []
    for name in (BRIDGE, ASIDE):
        made += [f"link add {name} type bridge stp_state 0 forward_delay 0", f"link set {name} up"]
    for index in range(len(lines)):
        port = f"name {PORT} address {hardware_address_of(index)} netns {name_of(index)}"
        made.append(f"link add h{index} type veth peer {port}")
        made.append(f"link set h{index} master {BRIDGE} up")
    return "\n".join(made)


def isolation_batch(lines: Sequence[Line]) -> str:
    """Return what `bridge` is told in the hub."""
    hidden = [index for index, line in enumerate(lines) if not line.reachable]
    return "\n".join(map(isolation, hidden))


def isolation(index: int) -> str:
    """Return what hides a machine from others that are hidden."""
    return f"link set dev h{index} isolated on"


def machine_batch(index: int, count: int) -> str:
    """Return what `ip` makes on one of ``count`` machines.

    They know each other's hardware addresses: a kernel finds 1024 at most at a time, in all its
    namespaces together, and 64 machines that talk to each other have 4032.
    """
    address = address_of(index)
    made = [
        f"addr add {address}/16 dev {PORT}",
        "link set lo up",
        f"link set {PORT} up",
        f"route replace 198.18.0.0/16 dev {PORT} src {address} congctl cubic",
    ]
    made += [
        f"neigh add {address_of(other)} lladdr {hardware_address_of(other)} dev {PORT} "
        "nud permanent"
        for other in range(count)
        if other != index
    ]
    return "\n".join(made)


def bucket_bytes(mbit: float) -> int:
    """Return what the bucket of a line holds."""
    if mbit >= SLOW_MBIT:
        return BURST_BYTES
    return max(SLOW_BURST_BYTES_MIN, int(mbit * BYTES_PER_MBIT * SLOW_BURST_S))


def framing() -> Framing:
    """Return what these lines are, for a virtual world that is to be like them."""
    return Framing(lambda rate: bucket_bytes(rate / BYTES_PER_MBIT), HEAD_BYTES, HEAD_BYTES)


def shaping(device: str, mbit: float, verb: str = "add") -> str:
    """Return what `tc` is told of one port; ``verb`` is ``change`` if it was told before."""
    bucket = f"tbf rate {mbit:g}mbit burst {bucket_bytes(mbit)} limit {QUEUE_BYTES}"
    return f"qdisc {verb} dev {device} root handle 1: {bucket}"


def loss_rule(share: float) -> list[str]:
    """Return what `iptables` is told of packets to be lost."""
    how = ["-m", "statistic", "--mode", "random", "--probability", f"{share:.4f}"]
    return [*how, "-j", "DROP"]


def plugging(index: int, bridge: str | None) -> list[str]:
    """Return the command that puts a machine's port on a bridge, or on none: it is cut off then."""
    where = ["nomaster"] if bridge is None else ["master", bridge]
    return ["ip", "-n", HUB, "link", "set", f"h{index}", *where]


def rejoining(index: int, line: Line) -> list[list[str]]:
    """Return the commands that put a machine among the others again, hidden if it was."""
    hidden = [] if line.reachable else [["bridge", "-n", HUB, *isolation(index).split()]]
    return [plugging(index, BRIDGE), *hidden]


def reshaping(index: int, line: Line) -> list[list[str]]:
    """Return the commands that give a machine another line."""
    down = shaping(f"h{index}", line.down_mbit, "change").split()
    up = shaping(PORT, line.up_mbit, "change").split()
    return [["tc", "-n", HUB, *down], ["tc", "-n", name_of(index), *up]]


def sent_bytes(text: bytes) -> dict[str, int]:
    """Return the bytes that left through each device's token bucket, from `tc -j -s qdisc`.

    Raises:
        EchoError: That is not what `tc` prints.
    """
    try:
        found = msgspec.json.decode(text, type=list[_Qdisc])
    except msgspec.DecodeError as error:
        raise EchoError(f"tc -j -s qdisc was not understood: {error}") from error
    return {one.dev: one.bytes for one in found if one.kind == "tbf"}


async def run_inside(module: str, text: str) -> bytes:
    """Run ``python -m module text`` as the first process of a test-bed; return what it prints.

    Its end is the end of everything that it built; so is ours, as it watches its standard input
    (`end_with_parent`).

    Raises:
        EchoError: It failed; its own words are on standard error.
    """
    command = [*WRAP, sys.executable, "-P", "-m", module, text]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    printed = b""
    try:
        assert process.stdout is not None
        while data := await process.stdout.receive_some():
            printed += data
        code = await process.wait()
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
    if code:
        raise EchoError(f"the test-bed ended with exit code {code}; see above")
    return printed


def end_with_parent() -> None:
    """End this process, and with it every machine, when standard input ends."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    Thread(target=watch, daemon=True).start()


class Distance:
    """How late packets arrive, while `scenarios.delay` runs and reads ``orders``."""

    def __init__(self, orders: int) -> None:
        self._orders = orders

    def set(self, index: int, one_way_s: float) -> None:
        """Change it for one machine."""
        os.write(self._orders, f"{name_of(index)}={one_way_s!r}\n".encode())


class Machines:
    """The machines with these lines; only inside of `WRAP`."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = tuple(lines)

    async def build(self) -> None:
        """Make them.

        Raises:
            EchoError: The kernel or the tools refused.
        """
        await _run(["mount", "-t", "tmpfs", "none", str(RUN)])
        (RUN / "netns").mkdir()
        await _run(["ip", "-batch", "-"], names_batch(len(self._lines)))
        await _run(["ip", "-n", HUB, "-batch", "-"], hub_batch(self._lines))
        downs = [shaping(f"h{index}", line.down_mbit) for index, line in enumerate(self._lines)]
        await _run(["tc", "-n", HUB, "-batch", "-"], "\n".join(downs))
        isolated = isolation_batch(self._lines)
        if isolated:
            await _run(["bridge", "-n", HUB, "-batch", "-"], isolated)
        for index, line in enumerate(self._lines):
            made = machine_batch(index, len(self._lines))
            await _run(["ip", "-n", name_of(index), "-batch", "-"], made)
            await _run(["tc", "-n", name_of(index), "-batch", "-"], shaping(PORT, line.up_mbit))

    @asynccontextmanager
    async def distant(self, one_way_s: Sequence[float]) -> AsyncIterator[Distance]:
        """Make packets arrive so much later at each machine while the context is open.

        Raises:
            EchoError: The kernel or the tools refused.
        """
        for index in range(len(self._lines)):
            await _run(inside(index, delay.rule(PORT)))
        words = [f"{name_of(index)}={each!r}" for index, each in enumerate(one_way_s)]
        command = [sys.executable, "-P", "-m", "scenarios.delay", *words]
        theirs, ours = os.pipe()
        process = await trio.lowlevel.open_process(command, stdin=theirs, stdout=subprocess.PIPE)
        os.close(theirs)
        try:
            assert process.stdout is not None
            if not await process.stdout.receive_some():
                raise EchoError("no packets can be held back; see above")
            yield Distance(ours)
        finally:
            os.close(ours)
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    async def cut(self, index: int, *, aside: bool = False) -> None:
        """Let nothing through to or from a machine, silently; ``aside``: but from others cut so."""
        await _run(plugging(index, ASIDE if aside else None))

    async def lose(self, index: int, share: float) -> None:
        """Lose this share of a machine's packets, each way."""
        for chain in ("INPUT", "OUTPUT"):
            await _run(inside(index, ["iptables", "-w", "-A", chain, *loss_rule(share)]))

    async def reshape(self, index: int, line: Line) -> None:
        """Give a machine another line."""
        for command in reshaping(index, line):
            await _run(command)

    async def reset_connections(self, index: int, *, for_s: float) -> None:
        """Reset each connection on which a machine sends meanwhile."""
        reject = ["OUTPUT", "-o", PORT, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"]
        there = ["ip", "netns", "exec", name_of(index), "iptables", "-w"]
        await _run([*there, "-A", *reject])
        try:
            await trio.sleep(for_s)
        finally:
            with trio.CancelScope(shield=True):
                await _run([*there, "-D", *reject])

    async def heal(self, index: int) -> None:
        """Undo `cut` and `reshape`."""
        line = self._lines[index]
        for command in (*rejoining(index, line), *reshaping(index, line)):
            await _run(command)

    async def counters(self) -> list[Counters]:
        """Return each machine's."""
        show = ("-j", "-s", "qdisc", "show")
        downs = sent_bytes(await _run(["tc", "-n", HUB, *show]))
        found = []
        for index in range(len(self._lines)):
            ups = sent_bytes(await _run(["tc", "-n", name_of(index), *show]))
            found.append(Counters(ups[PORT], downs[f"h{index}"]))
        return found


async def _run(command: list[str], text: str = "") -> bytes:
    done = await trio.run_process(
        command, stdin=text.encode(), capture_stdout=True, capture_stderr=True, check=False
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()
        raise EchoError(f"{' '.join(command)} failed: {words}")
    return done.stdout
