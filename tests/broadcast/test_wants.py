"""Who is sent what: WANT, what it stands for, and how it is taken back."""

import random

from echo2p2p.broadcast.effects import SendChunk, SendHave, SendOffer, SendReject, SendWant
from echo2p2p.broadcast.settings import SwarmSettings
from echo2p2p.broadcast.swarm import Swarm
from echo2p2p.ids import SOURCE, ManifestId, PeerId

ID = ManifestId(bytes(16))
NEXT = ManifestId(b"2" * 16)
CHUNK = 1000


def quiet(is_source=False):
    return Swarm(is_source=is_source, rng=random.Random(0), settings=SwarmSettings())


def opened(*links, is_source=False, held=(), count=10):
    swarm = quiet(is_source)
    for link in links:
        swarm.link_opened(PeerId(link), is_source=link == SOURCE, rtt_s=0.02, now=0.0)
    swarm.add_transfer(ID, count=count, chunk_bytes=CHUNK, held=held, push=True, now=0.0)
    return swarm


def test_a_want_that_comes_early_is_honoured_later():
    swarm = quiet()
    swarm.link_opened("a", is_source=False, rtt_s=0.02, now=0.0)
    assert swarm.receive_want("a", ID, 0.0) == []
    effects = swarm.add_transfer(ID, count=3, chunk_bytes=CHUNK, held=range(3), push=True, now=1.0)
    assert effects == [SendOffer("a", ID), SendHave("a", ID, (0, 1, 2))]


def test_the_source_says_at_once_that_it_has_no_such_payload():
    swarm = quiet(is_source=True)
    swarm.link_opened("a", is_source=False, rtt_s=0.02, now=0.0)
    assert swarm.receive_want("a", ID, 0.0) == [SendReject("a", ID, 0, "unknown")]
    effects = swarm.add_transfer(ID, count=3, chunk_bytes=CHUNK, held=range(3), push=False, now=1.0)
    assert SendHave("a", ID, (0, 1, 2)) in effects, "the want is honoured later"


def test_who_is_fetching_a_payload_is_told_that_it_is_forgotten():
    swarm = opened("a", "b", "c", held=[0, 1, 2])
    for link in "ab":
        swarm.receive_want(link, ID, 0.0)
    swarm.receive_have("a", ID, range(10), 0.5)
    swarm.receive_request("b", ID, 2, 1.0)
    assert swarm.drop_transfer(ID, 1.0) == [SendReject("b", ID, 0, "unknown")]
    assert swarm.drop_transfer(ID, 1.0) == []


def test_a_peer_that_forgot_a_payload_and_wants_it_again_is_told_again():
    swarm = opened("a", held=[0, 1, 2])
    first = swarm.receive_want("a", ID, 0.0)
    assert first == [SendHave("a", ID, (0, 1, 2))]
    swarm.receive_have("a", ID, [0, 5], 1.0)
    again = swarm.receive_want("a", ID, 9.0)
    assert again == [SendWant("a", ID), SendHave("a", ID, (0, 1, 2))]


def following(*links, count=10):
    """A relay that follows ``ID``, as do its links, and is linked to the source."""
    swarm = opened(SOURCE, *links, count=count)
    for link in links:
        swarm.receive_want(link, ID, 0.0)
    return swarm


def succeed(swarm, identity=NEXT, after=ID, *, push=True, count=10, held=()):
    return swarm.add_transfer(
        identity, count=count, chunk_bytes=CHUNK, held=held, push=push, after=after, now=1.0
    )


def dealt(swarm, identity, index):
    swarm.chunk_arrived(SOURCE, identity, index, CHUNK, 1.0)
    return [
        effect.link
        for effect in swarm.chunks_stored(identity, [index], 1.0)
        if effect == SendChunk(effect.link, identity, index)
    ]


def test_who_wanted_a_delta_is_pushed_the_next_without_having_asked():
    swarm = following("a", "b")
    assert SendOffer("a", NEXT) in succeed(swarm), "before the first chunk"
    assert sorted(dealt(swarm, NEXT, 3)) == ["a", "b"]
    assert swarm.receive_want("a", NEXT, 1.0) == [], "known already"
    again = swarm.receive_want("a", NEXT, 1.0)
    assert again == [SendWant("a", NEXT), SendHave("a", NEXT, (3,))], "it forgot the payload"


def test_a_want_stands_for_the_next_delta_and_not_for_the_one_after():
    swarm = following("a", "b")
    succeed(swarm)
    swarm.receive_want("a", NEXT, 1.0)
    third = ManifestId(b"3" * 16)
    succeed(swarm, third, NEXT)
    assert dealt(swarm, third, 3) == ["a"]


def test_a_want_of_a_delta_stands_for_no_payload_that_is_pulled():
    swarm = following("a")
    offers = [SendOffer(SOURCE, NEXT), SendOffer("a", NEXT)]
    assert succeed(swarm, push=False, held=range(10)) == offers
    assert swarm.receive_want("a", NEXT, 1.0) == [SendHave("a", NEXT, tuple(range(10)))]


def test_who_declines_a_delta_is_sent_no_more_of_it_unless_it_wants_it_after_all():
    swarm = following("a", "b")
    succeed(swarm)
    assert sorted(dealt(swarm, NEXT, 3)) == ["a", "b"]
    swarm.receive_reject("a", NEXT, 0, "unknown", 1.0)
    assert dealt(swarm, NEXT, 4) == ["b"]
    swarm.chunk_sent("a", NEXT, 3, 1.0)
    told = swarm.receive_want("a", NEXT, 1.0)
    assert SendHave("a", NEXT, (3, 4)) in told, "it has dropped what was on its way"


def test_the_source_deals_the_next_delta_to_all_who_wanted_the_last_at_once():
    source = opened("a", "b", "c", is_source=True, held=range(10))
    for link in "abc":
        for sent in source.receive_want(link, ID, 0.0):
            source.chunk_sent(link, ID, sent.index, 0.0)
        source.receive_have(link, ID, range(10), 0.5)
    effects = succeed(source, held=range(10))
    first = [effect.link for effect in effects if effect == SendChunk(effect.link, NEXT, 0)]
    assert sorted(first) == ["a", "b", "c"]
    source.receive_reject("a", NEXT, 0, "unknown", 1.0)
    assert ("a", NEXT) not in source.fetching()
    assert ("b", NEXT) in source.fetching()


def test_an_offer_that_came_first_is_not_sent_back():
    swarm = quiet()
    swarm.link_opened("a", is_source=False, rtt_s=0.02, now=0.0)
    swarm.receive_offer("a", ID)
    effects = swarm.add_transfer(ID, count=3, chunk_bytes=CHUNK, held=(), push=True, now=1.0)
    assert effects == [SendWant("a", ID)]
