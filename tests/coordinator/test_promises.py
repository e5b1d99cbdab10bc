"""What a live member may be fetching stays, until it says that it got past it."""

from dataclasses import replace

from coordinator.membership import Member, State
from coordinator.promises import PATIENCE_S, Promises
from echo2p2p.ids import Incarnation, PeerId, Version
from echo2p2p.weights.chain import Link

ANCHOR = Link(b"anchor of 3", Version(3), None, 100)
FOURTH = Link(b"delta 3 to 4", Version(4), Version(3), 10)
FIFTH = Link(b"delta 4 to 5", Version(5), Version(4), 10)
LINKS = [ANCHOR, FOURTH, FIFTH]
ANN, BOB = PeerId("ann"), PeerId("bob")


def member(peer_id, version):
    return Member(
        peer_id=peer_id,
        incarnation=Incarnation(1),
        name=peer_id,
        public_key=b"",
        credential=b"",
        relay=None,
        engine="none",
        state=State.ACTIVE,
        term_end_s=10.0,
        version=version,
    )


def names(*links):
    return {link.manifest_id for link in links}


def test_the_path_that_a_member_was_told_stays_until_it_holds_its_end_or_asks_again():
    promises = Promises()
    promises.told(ANN, (ANCHOR, FOURTH, FIFTH))

    def kept(version):
        return promises.fetching([member(ANN, version)], LINKS, [], 0.0)

    assert kept(None) == names(ANCHOR, FOURTH, FIFTH)
    assert kept(3) == names(FOURTH, FIFTH)
    assert kept(2) == names(ANCHOR, FOURTH, FIFTH)
    assert kept(5) == kept(6) == set()
    promises.told(ANN, (FIFTH,))
    assert kept(None) == names(FIFTH)
    promises.told(ANN, ())
    assert kept(None) == set()


def test_what_a_neighbour_follows_stays_until_it_says_that_it_got_past_it():
    promises = Promises()
    followed = [(ANN, FOURTH.manifest_id), (BOB, ANCHOR.manifest_id), (BOB, b"gone long ago")]
    members = [member(ANN, 3), member(BOB, 3)]
    assert promises.fetching(members, LINKS, followed, 0.0) == names(FOURTH)
    assert promises.fetching([member(BOB, None)], LINKS, followed, 0.0) == names(ANCHOR)


def test_nothing_is_promised_to_those_that_are_gone_nor_to_their_next_incarnation():
    promises = Promises()
    promises.told(ANN, (ANCHOR,))
    assert promises.fetching([member(BOB, None)], LINKS, [], 0.0) == set()
    assert promises.fetching([member(ANN, None)], LINKS, [], 0.0) == set()


def test_a_member_that_gets_nowhere_for_hours_holds_nothing_back_whatever_it_says():
    promises, followed = Promises(), [(BOB, FIFTH.manifest_id)]
    promises.told(ANN, (ANCHOR, FOURTH))

    def kept(now, version, incarnation=1):
        members = [
            replace(member(peer, version), incarnation=Incarnation(incarnation))
            for peer in (ANN, BOB)
        ]
        return promises.fetching(members, LINKS, followed, now)

    everything = names(ANCHOR, FOURTH, FIFTH)
    assert kept(0.0, 2) == kept(PATIENCE_S, 2) == everything
    assert kept(PATIENCE_S + 1.0, None) == set(), "to go back is no progress"
    assert kept(PATIENCE_S + 2.0, 2) == set()
    assert kept(PATIENCE_S + 3.0, 3) == names(FOURTH, FIFTH)
    assert kept(2 * PATIENCE_S + 4.0, 3) == set()
    assert kept(2 * PATIENCE_S + 5.0, None, incarnation=2) == everything
