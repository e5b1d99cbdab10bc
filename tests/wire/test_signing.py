"""Signed records: only the run's key, only for the purpose, only the exact bytes."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.testing.strategies import message_of
from echo2p2p.wire import codec, signing
from echo2p2p.wire.messages import ManifestHeader, MemberCard, Signed
from echo2p2p.wire.signing import open_record, sign_record, verify

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
CARD = MemberCard(run_id="r", peer_id="p", incarnation=1, public_key=bytes(32))
CARD_DOMAIN = b"echo2p2p card 0\x00"
MANIFEST_DOMAIN = b"echo2p2p manifest 0\x00"


def violation(signed, kind=MemberCard, public_key=PUBLIC):
    with pytest.raises(RemoteProtocolError) as caught:
        open_record(signed, public_key, kind)
    return caught.value.violation


@given(st.one_of(message_of(ManifestHeader), message_of(MemberCard)))
def test_a_signed_record_opens_to_itself(record):
    signed = sign_record(KEY, record)
    assert signed.body == codec.encode(record)
    assert open_record(signed, PUBLIC, type(record)) == record


def test_the_signature_is_over_the_domain_and_the_exact_body():
    signed = sign_record(KEY, CARD)
    KEY.public_key().verify(signed.signature, CARD_DOMAIN + codec.encode(CARD))


@given(st.data())
def test_a_flipped_bit_anywhere_is_a_bad_signature(data):
    signed = sign_record(KEY, CARD)
    parts = {"body": bytearray(signed.body), "signature": bytearray(signed.signature)}
    part = parts[data.draw(st.sampled_from(sorted(parts)))]
    part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    forged = Signed(body=bytes(parts["body"]), signature=bytes(parts["signature"]))
    assert violation(forged) is Violation.BAD_SIGNATURE


def test_another_runs_record_is_refused():
    assert violation(sign_record(OTHER, CARD)) is Violation.BAD_SIGNATURE


def test_a_card_does_not_pass_for_a_manifest_nor_the_other_way():
    assert violation(sign_record(KEY, CARD), ManifestHeader) is Violation.BAD_SIGNATURE
    body = codec.encode(CARD)
    as_manifest = Signed(body=body, signature=KEY.sign(MANIFEST_DOMAIN + body))
    assert violation(as_manifest) is Violation.BAD_SIGNATURE


def test_a_signed_body_that_is_no_record_is_malformed():
    for body in (b"", b"\xc0", codec.encode(CARD) + b"\xc0"):
        signed = Signed(body=body, signature=KEY.sign(CARD_DOMAIN + body))
        assert violation(signed) is Violation.MALFORMED


@given(st.binary(max_size=40), st.binary(max_size=70))
def test_keys_and_signatures_of_any_length_are_refused_and_nothing_else(key, signature):
    with pytest.raises(RemoteProtocolError, match="a thing is not signed"):
        verify(key, b"message", signature, what="a thing")


def test_verify_accepts_what_the_key_signed():
    verify(PUBLIC, b"message", KEY.sign(b"message"), what="a thing")


def test_a_record_that_was_found_good_is_verified_once_and_a_forged_one_each_time(monkeypatch):
    verified = []

    def watched(public_key, message, signature, *, what):
        verified.append(message)
        verify(public_key, message, signature, what=what)

    monkeypatch.setattr(signing, "verify", watched)
    record = MemberCard(run_id="once", peer_id="p", incarnation=1, public_key=bytes(32))
    good = sign_record(KEY, record)
    assert [open_record(good, PUBLIC, MemberCard) for _ in range(3)] == [record] * 3
    assert len(verified) == 1
    forged = Signed(body=good.body, signature=bytes(64))
    assert {violation(forged) for _ in range(3)} == {Violation.BAD_SIGNATURE}
    assert violation(good, public_key=OTHER.public_key().public_bytes_raw())
    assert len(verified) == 1 + 3 + 1
