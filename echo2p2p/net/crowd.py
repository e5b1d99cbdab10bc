"""Who gives way when more strangers are at the door than there is room for.

A connection costs something before it has shown whose it is, so there is a limit to how many may be
in that state. Refusing the newest would let whoever fills the places first keep all others out, for
as long as a place may be held. So room is made instead: of the network that holds most places, the
oldest gives way. One address then takes places from nobody but itself, and many of them must open
connections faster than an honest one takes to show itself (a few round trips).

Rejected: a fixed number for each address. Volunteers behind one NAT share an address, as do all
peers of a test; any number is too small for some of them, and alone none of them is a danger.
"""

from __future__ import annotations

import ipaddress
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_IPV6_PREFIX_BITS: Final = 64
"""What one customer of a provider has at least."""


def network_of(host: str) -> str:
    """Return whom an address belongs to: itself, or the first half of an IPv6 address.

    What is no address (a machine's name in a simulation) stands for itself.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address), _IPV6_PREFIX_BITS), strict=False))
    return str(address)


class Crowd(Generic[T]):
    """Hashable things that came from somewhere, in order of their coming.

    Args:
        count_max: How many may be there, at least one.
    """

    def __init__(self, count_max: int) -> None:
        assert count_max > 0
        self._count_max = count_max
        self._network: dict[T, str] = {}
        self._by_network: dict[str, dict[T, int]] = {}
        self._entered = 0

    def __len__(self) -> int:
        return len(self._network)

    def enter(self, one: T, host: str) -> T | None:
        """Add ``one``; return who has to give way for it, no longer counted, if anybody."""
        network = self._network[one] = network_of(host)
        self._entered += 1
        self._by_network.setdefault(network, {})[one] = self._entered
        if len(self._network) <= self._count_max:
            return None
        fullest = max(self._by_network.values(), key=lambda there: (len(there), -_oldest(there)[1]))
        victim, _ = _oldest(fullest)
        self.leave(victim)
        return victim

    def leave(self, one: T) -> None:
        """Remove ``one``, if it is there."""
        network = self._network.pop(one, None)
        if network is not None:
            there = self._by_network[network]
            del there[one]
            if not there:
                del self._by_network[network]


def _oldest(there: dict[T, int]) -> tuple[T, int]:
    return next(iter(there.items()))
