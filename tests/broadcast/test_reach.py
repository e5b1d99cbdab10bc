from echo2p2p.broadcast.reach import Reach
from echo2p2p.ids import PeerId

A, B, C = map(PeerId, "abc")


def test_only_two_that_cannot_be_dialled_have_no_link():
    reach = Reach(undialable=frozenset({A, B}))
    assert not reach.links(A, B)
    assert reach.links(A, C)
    assert reach.links(C, B)
    assert Reach().links(A, B)
