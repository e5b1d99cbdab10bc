"""Under which names a coordinator is reached."""

import pytest

from coordinator.addresses import certificate_hosts, check_addresses, public_url, relay_address
from coordinator.config import ServerSection
from echo2p2p.errors import ConfigError
from echo2p2p.net.ports import Endpoint
from echo2p2p.wire.messages import Address

LAB = "https://lab.example:7070"


def server(**settings: object) -> ServerSection:
    return ServerSection.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "tls", "url"),
    [
        ({}, False, "http://127.0.0.1:4711"),
        ({"host": "::1"}, True, "https://[::1]:4711"),
        ({"host": "10.1.2.3"}, True, "https://10.1.2.3:4711"),
        ({"host": "0.0.0.0", "public_url": LAB}, True, LAB),
        ({"host": "::", "public_url": "https://[2001:db8::1]/"}, True, "https://[2001:db8::1]"),
        ({"public_url": "http://gateway:80"}, False, "http://gateway:80"),
    ],
)
def test_peers_are_told_what_the_owner_says_or_what_was_bound(settings, tls, url):
    section = server(**settings)
    check_addresses(section, tls=tls)
    assert public_url(section, Endpoint(section.host, 4711), tls=tls) == url


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "127.0.0.1"),
        ({"host": "0.0.0.0", "public_url": LAB}, "lab.example"),
        ({"host": "::", "public_url": "https://[2001:db8::1]:1"}, "2001:db8::1"),
        ({"public_url": LAB, "relay_public_host": "relay.example"}, "relay.example"),
    ],
)
def test_the_relay_is_where_the_server_is_unless_the_owner_says_otherwise(settings, host):
    section = server(**settings)
    assert relay_address(section, Endpoint(section.host, 99)) == Address(host=host, port=99)


def test_a_router_may_map_another_port_to_the_relays():
    section = server(host="0.0.0.0", public_url=LAB, relay_port=7071, relay_public_port=443)
    assert relay_address(section, Endpoint("0.0.0.0", 7071)) == Address(
        host="lab.example", port=443
    )


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        ({"host": "10.1.2.3"}, ["10.1.2.3"]),
        ({}, ["127.0.0.1", "localhost", "::1"]),
        ({"host": "0.0.0.0", "public_url": LAB}, ["lab.example", "localhost", "127.0.0.1", "::1"]),
        ({"host": "10.1.2.3", "public_url": LAB}, ["10.1.2.3", "lab.example"]),
    ],
)
def test_the_certificate_carries_every_name_by_which_a_browser_may_come(settings, hosts):
    assert certificate_hosts(server(**settings)) == hosts


@pytest.mark.parametrize(
    ("settings", "tls", "mend"),
    [
        ({"host": "0.0.0.0"}, True, "needed with server.host 0.0.0.0: how peers reach this"),
        ({"host": "::"}, True, "needed with server.host ::: how peers reach this"),
        ({"public_url": "lab.example:7070"}, True, "is no server's URL; write https://lab"),
        ({"public_url": "ftp://lab.example"}, True, "is no server's URL; write https://lab"),
        ({"public_url": LAB + "/echo"}, True, "is no server's URL; write https://lab"),
        ({"public_url": "https://lab.example:99999"}, True, "is no server's URL"),
        ({"public_url": "https://[::1"}, True, "is no server's URL"),
        ({"public_url": "http://lab.example"}, True, "it says http, but TLS is on; change it, or"),
        ({"public_url": LAB}, False, "it says https, but TLS is off; change it, or server.tls"),
    ],
)
def test_an_address_that_peers_could_not_use_is_refused_with_the_mend(settings, tls, mend):
    with pytest.raises(ConfigError) as refused:
        check_addresses(server(**settings), tls=tls)
    assert refused.value.path == "server.public_url"
    assert mend in refused.value.detail
