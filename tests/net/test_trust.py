"""Tokens, the authority, identities: what is accepted, and each way of being refused."""

import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import ConfigError, RefusedError, RemoteProtocolError, StoreError
from echo2p2p.ids import SOURCE, Incarnation, PeerId, peer_id_of
from echo2p2p.net.certificates import key_pem, name
from echo2p2p.net.trust import (
    ADMIN_PREFIX,
    SERVER_NAME,
    CertificateAuthority,
    Fingerprint,
    JoinToken,
    PeerIdentity,
    RunKeys,
    authority_from,
    certificate_owner,
    check_join_proof,
    credential_digest,
    draw_admin_token,
    draw_credential,
    fingerprint,
    join_proof,
    link_owner,
    run_key_from,
    same_secret,
)
from echo2p2p.testing.system import SimEntropy
from echo2p2p.wire.messages import Caps, CaReply, Hardware, JoinRequest

NOW = datetime(2027, 5, 1, 12, tzinfo=UTC)


class FixedClock:
    def time(self) -> float:
        return NOW.timestamp()


def authority(seed: int = 1) -> CertificateAuthority:
    entropy = SimEntropy(seed)
    return CertificateAuthority(RunKeys.create(entropy), FixedClock(), entropy)


def der_of(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


# --- tokens -------------------------------------------------------------------------------------

tokens = st.builds(
    JoinToken,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=20, max_size=20).map(Fingerprint),
)


@given(tokens)
def test_a_token_survives_paper_and_capitals(token: JoinToken) -> None:
    text = token.encode()
    assert len(text) == 68
    assert text.isascii()
    assert JoinToken.parse(text) == token
    assert JoinToken.parse(f"  {text.upper()}\n") == token


@given(tokens, st.integers(4, 67), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_a_token_with_one_wrong_letter_is_recognised(
    token: JoinToken, at: int, letter: str
) -> None:
    text = token.encode()
    changed = text[:at] + letter + text[at + 1 :]
    if changed != text:
        with pytest.raises(ConfigError, match="mistyped"):
            JoinToken.parse(changed)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text[:40], "cut: 36 characters"),
        (lambda text: text + "a", "too long: 65 characters"),
        (lambda text: text[4:], "starts with e2p-"),
        (lambda _: "", "starts with e2p-"),
        (lambda text: text[:-1] + "1", "mistyped"),
        (lambda text: text[:-1] + "é", "mistyped"),
        (lambda _: draw_admin_token(SimEntropy(1)), "another secret"),
        (lambda _: draw_credential(SimEntropy(1)), "another secret"),
    ],
)
def test_what_is_no_token_is_told_why_and_not_repeated(change, complaint: str) -> None:
    text = change(JoinToken.create(SimEntropy(3), bytes(32)).encode())
    with pytest.raises(ConfigError, match=complaint) as caught:
        JoinToken.parse(text)
    assert caught.value.path == "token"
    assert not text or text not in str(caught.value)


def test_tokens_compare_by_secret_and_run_and_hide_the_secret() -> None:
    one = JoinToken.create(SimEntropy(1), b"a" * 32)
    assert one != JoinToken.create(SimEntropy(2), b"a" * 32)
    assert one != JoinToken.create(SimEntropy(1), b"b" * 32)
    assert len({one, JoinToken.create(SimEntropy(1), b"a" * 32)}) == 1
    assert one.secret.hex() not in repr(one)
    assert repr(one.secret) not in repr(one)


def test_secrets_differ_and_only_their_digest_need_be_kept() -> None:
    entropy = SimEntropy(1)
    one, two = draw_credential(entropy), draw_credential(entropy)
    assert one != two
    assert credential_digest(one) == credential_digest(one) != credential_digest(two)
    assert len(credential_digest(one)) == 32
    assert draw_admin_token(entropy).startswith(ADMIN_PREFIX)
    assert same_secret(one, one)
    assert not same_secret(one, two)
    assert not same_secret("é", two)


# --- the run's key ------------------------------------------------------------------------------


def test_a_run_key_survives_its_file_and_signs_alike() -> None:
    keys = RunKeys.create(SimEntropy(1))
    again = RunKeys.from_pem(keys.pem())
    assert again.public_key == keys.public_key
    assert again.sign(b"x") == keys.sign(b"x")
    assert len(fingerprint(keys.public_key)) == 20


@pytest.mark.parametrize(
    "pem", [b"", b"-----BEGIN PRIVATE KEY-----", key_pem(ec.generate_private_key(ec.SECP256R1()))]
)
def test_a_file_that_is_no_run_key_is_a_config_error(pem: bytes) -> None:
    with pytest.raises(ConfigError, match="restore the file"):
        RunKeys.from_pem(pem)


# --- the authority ------------------------------------------------------------------------------


def csr(key: object, algorithm: object = None) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(name("coordinator"))
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM)


def test_the_authoritys_certificate_depends_on_the_key_alone() -> None:
    keys = RunKeys.create(SimEntropy(1))
    one = CertificateAuthority(keys, FixedClock(), SimEntropy(2)).certificate
    assert one == CertificateAuthority(keys, FixedClock(), SimEntropy(3)).certificate
    assert one != authority(2).certificate


def test_a_peers_leaf_names_the_peer_whatever_its_request_says() -> None:
    run = authority()
    peer = PeerIdentity.create(SimEntropy(9))
    key = ec.generate_private_key(ec.SECP256R1())
    pem = run.sign_peer(csr(key, hashes.SHA256()), peer.peer_id, Incarnation(3))
    leaf = x509.load_pem_x509_certificate(pem)
    assert certificate_owner(der_of(pem)) == link_owner(der_of(pem)) == peer.peer_id
    assert leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == peer.peer_id
    assert leaf.subject.get_attributes_for_oid(NameOID.SERIAL_NUMBER)[0].value == "3"
    assert SERVER_NAME.encode() not in der_of(pem)
    assert leaf.not_valid_before_utc == NOW - timedelta(days=1)
    assert leaf.not_valid_after_utc == NOW + timedelta(days=365)
    assert leaf.public_key() == key.public_key()
    leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(run.certificate))


def test_the_coordinators_leaf_carries_the_fixed_name_and_its_hosts() -> None:
    pem, key = authority().issue_coordinator(["lab.example", "10.1.2.3", "::1", "lab.example"])
    names = (
        x509.load_pem_x509_certificate(pem)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME, "lab.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "::1"]
    assert isinstance(serialization.load_pem_private_key(key, None), ec.EllipticCurvePrivateKey)
    with pytest.raises(RemoteProtocolError, match="not a peer's certificate"):
        certificate_owner(der_of(pem))
    assert link_owner(der_of(pem)) == SOURCE


def tampered(request: bytes) -> bytes:
    """Change the name in a request, after it was signed."""
    der = x509.load_pem_x509_csr(request).public_bytes(serialization.Encoding.DER)
    return x509.load_der_x509_csr(der.replace(b"coordinator", b"cOordinator")).public_bytes(
        serialization.Encoding.PEM
    )


@pytest.mark.parametrize(
    ("request_pem", "complaint"),
    [
        (b"", "not a certificate request"),
        (b"\xff" * 100, "not a certificate request"),
        (csr(Ed25519PrivateKey.generate()), "must be P-256"),
        (csr(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()), "must be P-256"),
        (tampered(csr(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())), "not signed"),
    ],
)
def test_a_bad_request_gets_no_certificate(request_pem: bytes, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        authority().sign_peer(request_pem, PeerId("0" * 32), Incarnation(1))


@pytest.mark.parametrize("der", [b"", b"0" * 50, der_of(authority().certificate)])
def test_what_is_no_peers_certificate_has_no_owner(der: bytes) -> None:
    for owner in (certificate_owner, link_owner):
        with pytest.raises(RemoteProtocolError):
            owner(der)


# --- first contact ------------------------------------------------------------------------------


def ca_reply(seed: int = 1) -> CaReply:
    keys = RunKeys.create(SimEntropy(seed))
    return CaReply(run_public_key=keys.public_key, certificate=authority(seed).certificate)


def token_of(reply: CaReply) -> JoinToken:
    return JoinToken.create(SimEntropy(5), reply.run_public_key)


def test_the_authority_of_the_tokens_run_is_believed() -> None:
    reply = ca_reply()
    assert authority_from(reply, token_of(reply)) == reply.certificate
    assert run_key_from(reply, token_of(reply)) == reply.run_public_key


def test_another_runs_server_is_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        authority_from(ca_reply(2), token_of(ca_reply(1)))
    assert caught.value.reason == "wrong_run"


def test_the_runs_key_beside_another_ones_certificate_is_refused() -> None:
    mine, other = ca_reply(1), ca_reply(2)
    for certificate in (other.certificate, b"", b"junk"):
        with pytest.raises(RefusedError) as caught:
            authority_from(msgspec.structs.replace(mine, certificate=certificate), token_of(mine))
        assert caught.value.reason == "bad_authority"


def test_a_certificate_that_names_the_runs_key_but_was_signed_by_another_is_refused() -> None:
    mine = ca_reply(1)
    genuine = x509.load_pem_x509_certificate(mine.certificate)
    forged = (
        x509.CertificateBuilder()
        .subject_name(genuine.subject)
        .issuer_name(genuine.subject)
        .public_key(genuine.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
        .sign(Ed25519PrivateKey.generate(), None)
        .public_bytes(serialization.Encoding.PEM)
    )
    with pytest.raises(RefusedError):
        authority_from(msgspec.structs.replace(mine, certificate=forged), token_of(mine))


def test_a_second_certificate_in_the_same_text_is_dropped() -> None:
    mine, other = ca_reply(1), ca_reply(2)
    both = msgspec.structs.replace(mine, certificate=mine.certificate + other.certificate)
    assert authority_from(both, token_of(mine)) == mine.certificate


# --- peers --------------------------------------------------------------------------------------


def join_request(peer: PeerIdentity, run: Fingerprint, request: bytes = b"csr") -> JoinRequest:
    nonce = bytes(range(16))
    return JoinRequest(
        protocol=0,
        name="box",
        public_key=peer.public_key,
        proof=join_proof(peer, run, nonce, request, "box"),
        nonce=nonce,
        csr=request,
        relay=None,
        engine="none",
        hardware=Hardware(accelerator="cpu", cores=1, memory_bytes=1),
        caps=Caps(upload_bytes_per_s=None, download_bytes_per_s=None, bytes_per_day=None),
    )


def test_a_join_is_proved_by_the_identity_key() -> None:
    peer, run = PeerIdentity.create(SimEntropy(1)), fingerprint(b"r" * 32)
    assert check_join_proof(join_request(peer, run), run) == peer_id_of(peer.public_key)


@pytest.mark.parametrize(
    "change",
    [
        {"public_key": PeerIdentity.create(SimEntropy(2)).public_key},
        {"public_key": b"short"},
        {"nonce": bytes(16)},
        {"nonce": bytes(15)},
        {"csr": b"another"},
        {"name": "boxcsr"},
        {"name": "", "csr": b"csrbox"},
        {"proof": bytes(64)},
        {"proof": b""},
    ],
)
def test_a_proof_does_not_fit_another_join(change: dict[str, object]) -> None:
    peer, run = PeerIdentity.create(SimEntropy(1)), fingerprint(b"r" * 32)
    with pytest.raises(RemoteProtocolError):
        check_join_proof(msgspec.structs.replace(join_request(peer, run), **change), run)


def test_a_proof_does_not_fit_another_run() -> None:
    peer = PeerIdentity.create(SimEntropy(1))
    with pytest.raises(RemoteProtocolError):
        check_join_proof(join_request(peer, fingerprint(b"r" * 32)), fingerprint(b"s" * 32))


def test_an_identity_survives_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    assert PeerIdentity.load(path) is None
    peer = PeerIdentity.create(SimEntropy(1))
    peer.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = PeerIdentity.load(path)
    assert again is not None
    assert again.peer_id == peer.peer_id
    with pytest.raises(StoreError, match="of this name already"):
        peer.save(path)
    path.write_bytes(b"cut")
    with pytest.raises(ConfigError, match="3 bytes, not 32"):
        PeerIdentity.load(path)


def test_the_same_entropy_gives_the_same_keys_and_certificates() -> None:
    def make() -> tuple[bytes, ...]:
        entropy = SimEntropy(4)
        run = CertificateAuthority(RunKeys.create(entropy), FixedClock(), entropy)
        peer = PeerIdentity.create(entropy)
        request, key = peer.make_csr(entropy)
        leaf = run.sign_peer(request, peer.peer_id, Incarnation(1))
        return (request, key, leaf, *run.issue_coordinator(["::1"]))

    first = make()
    assert first == make()
    assert len(set(first)) == len(first)


def test_tokens_are_values() -> None:
    token = JoinToken.create(SimEntropy(1), bytes(32))
    assert replace(token, secret=bytes(16)) != token
