import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import LocalProtocolError, RemoteProtocolError, Violation
from echo2p2p.ids import SOURCE, peer_id_of
from echo2p2p.limits import PROTOCOL
from echo2p2p.wire.handshake import Authenticated, Handshake, Self
from echo2p2p.wire.messages import Hello, MemberCard, Ping, Proof, Signed
from echo2p2p.wire.signing import sign_record

RUN = "5eed"


def key(number):
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


RUN_KEY = key(250)


def member(number, *, run_id=RUN, run_key=RUN_KEY, incarnation=1, **card_changes):
    mine = key(number)
    public = mine.public_key().public_bytes_raw()
    fields = {
        "run_id": run_id,
        "peer_id": peer_id_of(public),
        "incarnation": incarnation,
        "public_key": public,
    }
    card = sign_record(run_key, MemberCard(**(fields | card_changes)))
    return Self(peer_id_of(public), RUN, RUN_KEY.public_key().public_bytes_raw(), card, mine.sign)


def source(signer=RUN_KEY):
    return Self(SOURCE, RUN, RUN_KEY.public_key().public_bytes_raw(), None, signer.sign)


def side(who, number, **options):
    return Handshake(who, nonce=bytes([number]) * 32, **options)


def run(left, right):
    """Exchange the two hellos and the two proofs; return what each side concludes."""
    hello_left, hello_right = left.start(), right.start()
    proof_right, proof_left = right.receive(hello_left), left.receive(hello_right)
    return left.receive(proof_right), right.receive(proof_left)


def refusal(handshake, *messages):
    handshake.start()
    *accepted, last = messages
    for message in accepted:
        handshake.receive(message)
    with pytest.raises(RemoteProtocolError) as caught:
        handshake.receive(last)
    with pytest.raises(LocalProtocolError):
        handshake.receive(last)
    return caught.value.violation


def hello(who, nonce=b"\x09" * 32, **changes):
    fields = {"protocol": PROTOCOL, "run_id": RUN, "card": who.card, "nonce": nonce}
    return Hello(**(fields | changes))


def test_two_members_learn_each_others_identity_and_incarnation():
    one, two = member(1, incarnation=3), member(2)
    assert run(side(one, 1), side(two, 2)) == (
        Authenticated(two.peer_id, 1),
        Authenticated(one.peer_id, 3),
    )


def test_the_source_proves_the_run_key_and_has_no_card():
    one = member(1)
    seen = run(side(one, 1, expected=SOURCE), side(source(), 2))
    assert seen == (Authenticated(SOURCE, 0), Authenticated(one.peer_id, 1))


def test_whoever_has_no_card_and_not_the_run_key_is_refused():
    impostor, victim = side(source(signer=key(66)), 2), side(member(1), 1)
    proof = impostor_proof(impostor, victim)
    with pytest.raises(RemoteProtocolError) as caught:
        victim.receive(proof)
    assert caught.value.violation is Violation.BAD_SIGNATURE


def impostor_proof(impostor, victim):
    hello_impostor, hello_victim = impostor.start(), victim.start()
    victim.receive(hello_impostor)
    return impostor.receive(hello_victim)


def test_a_copied_card_without_its_key_is_refused():
    honest = member(2)
    thief = Self(honest.peer_id, RUN, honest.run_public_key, honest.card, key(66).sign)
    victim = side(member(1), 1)
    proof = impostor_proof(side(thief, 2), victim)
    with pytest.raises(RemoteProtocolError) as caught:
        victim.receive(proof)
    assert caught.value.violation is Violation.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"protocol": PROTOCOL + 1}, Violation.WRONG_PROTOCOL),
        ({"run_id": "other"}, Violation.WRONG_RUN),
        ({"nonce": b"short"}, Violation.MALFORMED),
        ({"card": Signed(body=b"junk", signature=bytes(64))}, Violation.BAD_SIGNATURE),
        ({"card": member(2, run_key=key(66)).card}, Violation.BAD_SIGNATURE),
        ({"card": member(2, run_id="other").card}, Violation.WRONG_RUN),
        ({"card": member(2, peer_id=SOURCE).card}, Violation.NOT_A_MEMBER),
        ({"card": member(2, peer_id=member(3).peer_id).card}, Violation.NOT_A_MEMBER),
        ({"card": member(2, incarnation=0).card}, Violation.NOT_A_MEMBER),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_with_its_violation(changes, violation):
    assert refusal(side(member(1), 1), hello(member(2), **changes)) is violation


def test_another_peer_than_the_one_that_was_dialled_is_refused():
    handshake = side(member(1), 1, expected=member(3).peer_id)
    assert refusal(handshake, hello(member(2))) is Violation.NOT_A_MEMBER


def test_a_mirror_is_refused():
    one = side(member(1), 1)
    mine = one.start()
    with pytest.raises(RemoteProtocolError) as caught:
        one.receive(mine)
    assert caught.value.violation is Violation.NOT_A_MEMBER


def test_a_source_refuses_a_second_source():
    assert refusal(side(source(), 1), hello(source())) is Violation.NOT_A_MEMBER


def test_a_proof_from_another_link_is_refused():
    one, two = member(1), member(2)
    old_two = side(two, 7)
    old_two.start()
    old_proof = old_two.receive(side(one, 8).start())
    assert refusal(side(one, 1), hello(two, nonce=bytes([7]) * 32), old_proof) is (
        Violation.BAD_SIGNATURE
    )


def test_our_own_proof_sent_back_is_refused():
    one = side(member(1), 1)
    one.start()
    mine = one.receive(hello(member(2)))
    with pytest.raises(RemoteProtocolError) as caught:
        one.receive(mine)
    assert caught.value.violation is Violation.BAD_SIGNATURE


@pytest.mark.parametrize("early", [(), (hello(member(2)),)])
def test_any_other_message_is_unexpected_at_every_stage(early):
    assert refusal(side(member(1), 1), *early, Ping(nonce=1)) is Violation.UNEXPECTED
    again = (*early, hello(member(2))) if early else (Proof(signature=bytes(64)),)
    assert refusal(side(member(1), 1), *again) is Violation.UNEXPECTED


def test_it_is_started_once_and_before_anything_is_received():
    one = side(member(1), 1)
    with pytest.raises(LocalProtocolError):
        one.receive(hello(member(2)))
    one.start()
    with pytest.raises(LocalProtocolError):
        one.start()


@given(st.binary(max_size=80))
def test_no_guessed_signature_passes(signature):
    assert refusal(side(member(1), 1), hello(member(2)), Proof(signature=signature)) is (
        Violation.BAD_SIGNATURE
    )
