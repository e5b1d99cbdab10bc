"""Where others are told that they can dial a peer."""

import pytest

from echo2p2p.net.ports import Endpoint
from echo2p2p.wire.messages import Address
from peer.app import public_address
from peer.config import PeerSettings


@pytest.mark.parametrize(
    ("relay", "address"),
    [
        ({}, None),
        ({"host": "10.1.2.3"}, ("10.1.2.3", 7072)),
        ({"public_host": "attic.example"}, ("attic.example", 7072)),
        ({"public_host": "attic.example", "public_port": 443}, ("attic.example", 443)),
        ({"public_port": 443}, None),
    ],
)
def test_a_peer_is_dialled_where_its_owner_says_or_where_it_is_bound(relay, address):
    settings = PeerSettings.model_validate({"relay": relay})
    wanted = None if address is None else Address(host=address[0], port=address[1])
    assert public_address(settings, Endpoint(settings.relay.host, 7072)) == wanted
