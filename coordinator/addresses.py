"""Under which names a coordinator is reached, from where it is bound and what its owner says.

Bound to all interfaces it cannot know its own name, and an address that peers cannot dial is worse
than none: then ``server.public_url`` must be given. Its host serves for the relay too, unless
``server.relay_public_host`` names another; ``server.relay_public_port`` is for a router that maps
ports.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from coordinator.config import ServerSection
from echo2p2p.errors import ConfigError
from echo2p2p.net.ports import Endpoint
from echo2p2p.wire.messages import Address

ANYWHERE: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 compared, not bound
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_EXAMPLE: Final = "https://lab.example:7070"


def check_addresses(server: ServerSection, *, tls: bool) -> None:
    """Check what the owner says of the coordinator's addresses.

    Raises:
        ConfigError: Peers could not reach it by that.
    """
    if server.public_url is None:
        if server.host in ANYWHERE:
            detail = f"needed with server.host {server.host or 'of all interfaces'}: "
            raise ConfigError(
                "server.public_url", f"{detail}how peers reach this machine, such as {_EXAMPLE}"
            )
        return
    url = server.public_url
    try:
        parts = urlsplit(url)
        good = parts.hostname and parts.scheme in {"http", "https"} and parts.port != 0
        bare = parts.path in {"", "/"} and not (parts.query or parts.fragment or parts.username)
    except ValueError:
        good = bare = False
    if not (good and bare):
        raise ConfigError("server.public_url", f"{url!r} is no server's URL; write {_EXAMPLE}")
    if (parts.scheme == "https") != tls:
        said, is_on = ("https", "off") if parts.scheme == "https" else ("http", "on")
        detail = f"it says {said}, but TLS is {is_on}; change it, or server.tls"
        raise ConfigError("server.public_url", detail)


def certificate_hosts(server: ServerSection) -> list[str]:
    """Return the names and addresses that the coordinator's certificate must carry."""
    hosts = [] if server.host in ANYWHERE else [server.host]
    if server.public_url is not None:
        hosts.append(_host(server.public_url))
    if server.host in ANYWHERE or server.host in LOOPBACK:
        hosts += LOOPBACK
    return list(dict.fromkeys(hosts))


def public_url(server: ServerSection, real: Endpoint, *, tls: bool) -> str:
    """Return the URL that peers are told; ``real`` is what was bound."""
    if server.public_url is not None:
        return server.public_url.rstrip("/")
    host = f"[{real.host}]" if ":" in real.host else real.host
    return f"{'https' if tls else 'http'}://{host}:{real.port}"


def relay_address(server: ServerSection, real: Endpoint) -> Address:
    """Return where peers dial the coordinator's relay; ``real`` is what was bound."""
    host = server.relay_public_host
    if host is None and server.public_url is not None:
        host = _host(server.public_url)
    return Address(host=host or real.host, port=server.relay_public_port or real.port)


def _host(url: str) -> str:
    host = urlsplit(url).hostname
    assert host is not None, "check_addresses has seen it"
    return host
