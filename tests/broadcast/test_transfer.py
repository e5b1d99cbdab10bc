import pytest

from echo2p2p.broadcast.chunk_sets import ChunkSet
from echo2p2p.broadcast.settings import HAVE_INDICES_MAX
from echo2p2p.broadcast.transfer import EARLY_MAX, Transfer, remember
from echo2p2p.errors import RemoteProtocolError
from echo2p2p.ids import ManifestId, PeerId

ANN, BOB = PeerId("ann"), PeerId("bob")


def transfer(count: int, *, push: bool = True) -> Transfer:
    return Transfer(
        manifest_id=ManifestId(b"m" * 16),
        count=count,
        chunk_bytes=1024,
        push=push,
        held=ChunkSet(count),
        dealer=None,
        dealing=False,
    )


def news(it, link, indices, *, to_source=False):
    found = it.news(link, indices, to_source=to_source, undialable=False)
    return [effect.indices for effect in found]


def test_a_follower_hears_of_each_chunk_once():
    it = transfer(5)
    assert news(it, ANN, [1, 3]) == [(1, 3)]
    assert news(it, ANN, [1, 2, 3]) == [(2,)]
    assert news(it, BOB, [1]) == [(1,)], "each follower by itself"


def test_a_long_announcement_is_cut():
    count = HAVE_INDICES_MAX + 10
    parts = news(transfer(count), ANN, range(count))
    assert [len(part) for part in parts] == [HAVE_INDICES_MAX, 10]


def test_who_holds_all_of_what_is_never_pushed_is_told_nothing_but_the_source_is():
    it = transfer(2, push=False)
    for index in range(2):
        it.view(ANN).add(index)
    assert news(it, ANN, [0, 1]) == []
    assert news(it, ANN, [0, 1], to_source=True) == [(0, 1)]


def test_what_a_follower_was_sent_or_announced_is_not_lacking():
    it = transfer(3)
    for link in (ANN, BOB):
        it.followers[link] = it.view(link).known
    it.view(ANN).add(1)
    assert it.lacking(1) == [BOB]
    assert it.held_beside(1, BOB)
    assert not it.held_beside(1, ANN)
    it.forget(ANN, now=0.0)
    assert it.lacking(2) == [BOB]
    assert not it.held_beside(1, BOB), "a link that is gone holds nothing for us"


def test_an_index_that_does_not_exist_is_the_remotes_fault():
    it = transfer(3)
    it.check_index(2)
    with pytest.raises(RemoteProtocolError, match="chunk 3 of 3"):
        it.check_index(3)


def test_names_of_unknown_payloads_are_bounded_and_the_oldest_goes_first():
    early: dict[ManifestId, None] = {}
    names = [ManifestId(bytes([n])) for n in range(EARLY_MAX + 1)]
    for name in names:
        remember(early, name)
    assert list(early) == names[1:]
