import pytest

from echo2p2p.net.crowd import Crowd, network_of


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("p0", "p0"),
        ("", ""),
    ],
)
def test_an_address_belongs_to_whoever_can_have_many_of_its_kind(host, network):
    assert network_of(host) == network


def test_whoever_holds_most_places_loses_its_oldest():
    crowd = Crowd(4)
    for one, host in (("honest", "a"), ("x1", "x"), ("x2", "x"), ("b", "b")):
        assert crowd.enter(one, host) is None
    assert crowd.enter("c", "c") == "x1"
    assert crowd.enter("x3", "x") == "x2", "a flood takes places from itself alone"
    assert len(crowd) == 4


def test_among_equals_the_oldest_gives_way_and_never_the_newest():
    crowd = Crowd(3)
    for one in "abc":
        assert crowd.enter(one, one) is None
    assert [crowd.enter(one, one) for one in "defg"] == ["a", "b", "c", "d"]


def test_who_has_left_makes_room_and_may_leave_again():
    crowd = Crowd(2)
    crowd.enter("a", "x")
    crowd.enter("b", "x")
    crowd.leave("a")
    crowd.leave("a")
    assert crowd.enter("c", "x") is None
    assert crowd.enter("d", "x") == "b"
