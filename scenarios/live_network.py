"""The lines of a live story: the orders that a nemesis gives to a `SimNetwork`, done by the kernel.

Each order is done at once, in ten milliseconds or so, while the lab waits: a fault of a partition
takes one command a pair. Machine 0 is the coordinator. Cuts count, so that two faults may overlap.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Final

import trio

from echo2p2p.errors import EchoError
from echo2p2p.testing.links import Traffic
from echo2p2p.testing.network import SimNetwork
from scenarios import namespaces
from scenarios.broadcast_links import BYTES_PER_MBIT, Line

LOSS: Final = "LOSS"
"""The chain of lost packets."""


def arrival_s(latency_s: float) -> float:
    """Return how late packets must arrive at a machine so far, one way, from the middle.

    They are held at the receiver only, so a round trip is the sum of both ends' delays.
    """
    return 2 * latency_s


class LiveNetwork(SimNetwork):
    """The same orders, for real lines.

    Args:
        names: Of the machines, the coordinator first.
        lines: Theirs.
        distance: Where delays are set.
    """

    def __init__(
        self, names: Sequence[str], lines: Sequence[Line], distance: namespaces.Distance
    ) -> None:
        super().__init__()
        self._at = {name: index for index, name in enumerate(names)}
        self._lines = tuple(lines)
        self._distance = distance
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._unplugged: Counter[str] = Counter()
        for index in range(len(lines)):
            self._inside(index, ["iptables", "-w", "-N", LOSS])
            for chain in ("INPUT", "OUTPUT"):
                self._inside(index, ["iptables", "-w", "-A", chain, "-j", LOSS])

    async def run(self) -> None:
        """Nothing has to be moved: packets move by themselves."""
        await trio.sleep_forever()

    def traffic(self, name: str) -> Traffic:
        """Return what its line has carried, by the kernel's account."""
        index = self._at[name]
        show = ["-j", "-s", "qdisc", "show"]
        ups = namespaces.sent_bytes(_do(["tc", "-n", namespaces.name_of(index), *show]))
        downs = namespaces.sent_bytes(_do(["tc", "-n", namespaces.HUB, *show]))
        return Traffic(ups[namespaces.PORT], downs[f"h{index}"])

    def crash(self, name: str) -> None:
        """Processes are killed, not lines."""

    def restart(self, name: str) -> None:
        """As `crash`."""

    # --- orders -------------------------------------------------------------------------------

    def set_rates(self, name: str, *, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Give a machine another line."""
        line = Line(up_bytes_per_s / BYTES_PER_MBIT, down_bytes_per_s / BYTES_PER_MBIT)
        for command in namespaces.reshaping(self._at[name], line):
            _do(command)

    def set_quality(self, name: str, *, latency_s: float, loss: float = 0.0) -> None:
        """Let packets be late, and let a share of them be lost each way."""
        index = self._at[name]
        self._distance.set(index, arrival_s(latency_s))
        self._inside(index, ["iptables", "-w", "-F", LOSS])
        if loss:
            self._inside(index, ["iptables", "-w", "-A", LOSS, *namespaces.loss_rule(loss)])

    def freeze(self, name: str) -> None:
        """Let nothing through to or from a machine."""
        self._unplugged[name] += 1
        if self._unplugged[name] == 1:
            _do(namespaces.plugging(self._at[name], None))

    def thaw(self, name: str) -> None:
        """Undo one `freeze`."""
        self._unplugged[name] = max(0, self._unplugged[name] - 1)
        if self._unplugged[name]:
            return
        index = self._at[name]
        for command in namespaces.rejoining(index, self._lines[index]):
            _do(command)

    def cut(self, sender: str, receiver: str) -> None:
        """Let nothing through from one machine to another, silently."""
        self._dropped[sender, receiver] += 1
        if self._dropped[sender, receiver] == 1:
            self._drop("-I", sender, receiver)

    def heal(self, sender: str, receiver: str) -> None:
        """Undo one `cut`."""
        self._dropped[sender, receiver] -= 1
        if self._dropped[sender, receiver] == 0:
            self._drop("-D", sender, receiver)

    def _drop(self, verb: str, sender: str, receiver: str) -> None:
        rule = ["INPUT", "-s", namespaces.address_of(self._at[sender]), "-j", "DROP"]
        self._inside(self._at[receiver], ["iptables", "-w", verb, *rule])

    def _inside(self, index: int, command: Sequence[str]) -> None:
        _do(namespaces.inside(index, command))


def _do(command: Sequence[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - our own words
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()
        raise EchoError(f"{' '.join(command)} failed: {words}")
    return done.stdout
