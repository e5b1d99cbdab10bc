"""Who is who: the run's key, the join token, certificates, peers' identities.

Everything hangs on one Ed25519 key, the run's. It signs manifests and member cards, and it is the
key of the run's certificate authority. The join token carries a secret and the key's fingerprint,
so that a volunteer needs nothing else: it fetches the authority's certificate unverified, compares
the fingerprint, and from then on believes only what that key has signed.

A peer has an Ed25519 identity key, which its id is derived from and which survives restarts, and
for each join a fresh P-256 key for TLS (browsers take no Ed25519 leaf).

Keys are drawn through the `Entropy` port and signatures are deterministic, so that a simulation
gives the same bytes twice. Refused: certificates of other runs, leaves that are not P-256, requests
that their own key did not sign, authority certificates that came with company.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hmac
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NewType

from blake3 import blake3
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from echo2p2p.errors import ConfigError, RefusedError, RemoteProtocolError, Violation
from echo2p2p.ids import SOURCE, Incarnation, PeerId, peer_id_of
from echo2p2p.net import certificates
from echo2p2p.net.disk_errors import guard_disk
from echo2p2p.net.ports import Entropy, WallClock
from echo2p2p.wire import signing
from echo2p2p.wire.messages import CaReply, JoinRequest

Fingerprint = NewType("Fingerprint", bytes)
"""20 bytes of BLAKE3 of the run's public key: what a token has room for."""

SERVER_NAME: Final = "coordinator.echo2p2p"
"""The name that clients insist on, whatever host they dialled; no peer's leaf carries it."""

FINGERPRINT_BYTES: Final = 20
SECRET_BYTES: Final = 16
NONCE_BYTES: Final = 16
_CHECK_BYTES: Final = 4

JOIN_PREFIX: Final = "e2p-"
ADMIN_PREFIX: Final = "e2a-"
CREDENTIAL_PREFIX: Final = "e2c-"
"""Secrets can be recognised by their prefix, and the journal masks what can be recognised."""

BACKDATED: Final = datetime.timedelta(days=1)
"""Leaves are valid from yesterday: some volunteers' clocks are wrong."""
PEER_VALID: Final = datetime.timedelta(days=365)
COORDINATOR_VALID: Final = datetime.timedelta(days=365)

_PEER_ID: Final = re.compile(r"[0-9a-f]{32}")
_PEER_DOMAIN: Final = ".peer.echo2p2p"
_JOIN_DOMAIN: Final = b"echo2p2p join 0\x00"


# --- the run's key ------------------------------------------------------------------------------


def fingerprint(public_key: bytes) -> Fingerprint:
    """Return the fingerprint of a raw Ed25519 key, as carried by tokens."""
    return Fingerprint(blake3(b"echo2p2p run 0" + public_key).digest(length=FINGERPRINT_BYTES))


class RunKeys:
    """The run's Ed25519 key; whoever has it is the coordinator."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self.private = private
        self.public_key = private.public_key().public_bytes_raw()
        """Raw, 32 bytes."""

    @classmethod
    def create(cls, entropy: Entropy) -> RunKeys:
        """Draw a new key."""
        return cls(Ed25519PrivateKey.from_private_bytes(entropy.secret(32)))

    @classmethod
    def from_pem(cls, pem: bytes) -> RunKeys:
        """Load what `pem` gave.

        Raises:
            ConfigError: Not an Ed25519 key in PEM.
        """
        try:
            private = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError("run key", "not a private key in PEM: restore the file") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError("run key", "not an Ed25519 key: restore the file")
        return cls(private)

    def pem(self) -> bytes:
        """Return the private key, unencrypted: keep it readable by its owner only."""
        return certificates.key_pem(self.private)

    def sign(self, message: bytes) -> bytes:
        """Return 64 bytes; ``message`` must start with a domain of its own."""
        return self.private.sign(message)


# --- secrets that people and peers carry --------------------------------------------------------


@dataclass(frozen=True, eq=False)
class JoinToken:
    """What a volunteer is given. Compare with `==`, which takes constant time."""

    secret: bytes = field(repr=False)
    """16 bytes: opens ``/join`` and nothing else."""
    fingerprint: Fingerprint
    """Of the run's key."""

    @classmethod
    def create(cls, entropy: Entropy, run_public_key: bytes) -> JoinToken:
        """Draw a token for the run with this key."""
        return cls(entropy.secret(SECRET_BYTES), fingerprint(run_public_key))

    def encode(self) -> str:
        """Return it for people: a prefix and 64 letters and digits, the last of them a check."""
        raw = self.secret + self.fingerprint
        return JOIN_PREFIX + base64.b32encode(raw + _check(raw)).decode().lower()

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Return the token in ``text``, in any case and with space around it.

        Raises:
            ConfigError: Says whether it is another secret, cut, or mistyped; never repeats it.
        """
        text = text.strip().lower()
        if text.startswith((ADMIN_PREFIX, CREDENTIAL_PREFIX)):
            raise ConfigError("token", "this is another secret: a join token starts with e2p-")
        if not text.startswith(JOIN_PREFIX):
            raise ConfigError("token", "a join token starts with e2p-: copy it whole")
        letters = text.removeprefix(JOIN_PREFIX)
        wanted = (SECRET_BYTES + FINGERPRINT_BYTES + _CHECK_BYTES) * 8 // 5
        if len(letters) != wanted:
            kind = "cut" if len(letters) < wanted else "too long"
            detail = f"{kind}: {len(letters)} characters after e2p-, not {wanted}: copy it whole"
            raise ConfigError("token", detail)
        mistyped = ConfigError("token", "mistyped: its check does not fit; copy it again")
        try:
            raw = base64.b32decode(letters.upper().encode("ascii"))
        except (binascii.Error, UnicodeEncodeError) as error:
            raise mistyped from error
        raw, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
        if check != _check(raw):
            raise mistyped
        return cls(raw[:SECRET_BYTES], Fingerprint(raw[SECRET_BYTES:]))

    def __eq__(self, other: object) -> bool:
        """Compare in constant time."""
        if not isinstance(other, JoinToken):
            return NotImplemented
        mine, theirs = self.secret + self.fingerprint, other.secret + other.fingerprint
        return hmac.compare_digest(mine, theirs)

    def __hash__(self) -> int:
        """Hash the public part."""
        return hash(self.fingerprint)


def _check(raw: bytes) -> bytes:
    return blake3(b"echo2p2p token 0" + raw).digest(length=_CHECK_BYTES)


def draw_admin_token(entropy: Entropy) -> str:
    """Return a new secret for the lab's own people: status, dashboard, control."""
    return ADMIN_PREFIX + _text(entropy.secret(32))


def draw_credential(entropy: Entropy) -> str:
    """Return a new secret for one incarnation of one peer; keep its `credential_digest` only."""
    return CREDENTIAL_PREFIX + _text(entropy.secret(32))


def credential_digest(credential: str) -> bytes:
    """Return what is stored and looked up instead of a credential: 32 bytes.

    The credential has 256 random bits, so a plain digest of it cannot be searched.
    """
    return blake3(b"echo2p2p credential 0" + credential.encode()).digest()


def same_secret(given: str, wanted: str) -> bool:
    """Compare two secrets in a time that tells nothing."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


# --- the authority ------------------------------------------------------------------------------


class CertificateAuthority:
    """Signs the leaves of the coordinator and of its peers with the run's key.

    Its own certificate is a function of the key alone, so that a restart changes nothing.
    """

    def __init__(self, run_keys: RunKeys, clock: WallClock, entropy: Entropy) -> None:
        self._key = run_keys.private
        self._clock = clock
        self._entropy = entropy
        self._name = f"echo2p2p run {fingerprint(run_keys.public_key).hex()}"
        self.certificate = certificates.self_signed(run_keys.private, self._name)
        """PEM."""

    def issue_coordinator(self, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """Return a fresh leaf and its P-256 key, both PEM, valid for a year.

        Args:
            hosts: Names and addresses that browsers may use; `SERVER_NAME` is always in.
        """
        key = certificates.p256_key(self._entropy)
        names: list[x509.GeneralName] = [x509.DNSName(SERVER_NAME)]
        for host in dict.fromkeys(hosts):
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        subject = certificates.name(SERVER_NAME)
        leaf = self._leaf(
            subject, key.public_key(), names, [ExtendedKeyUsageOID.SERVER_AUTH], COORDINATOR_VALID
        )
        return leaf, certificates.key_pem(key)

    def sign_peer(self, csr_pem: bytes, peer_id: PeerId, incarnation: Incarnation) -> bytes:
        """Return a leaf, PEM, for the key in the request; names in the request are ignored.

        The leaf serves both ends of relay links. It is valid for a year from yesterday on; what
        ends earlier is membership, which every peer is told with its plan.

        Raises:
            RemoteProtocolError: Not a request, not P-256, or not signed by its own key.
        """
        assert _PEER_ID.fullmatch(peer_id), peer_id
        try:
            request = x509.load_pem_x509_csr(csr_pem)
            key = request.public_key()
            signed = request.is_signature_valid
        except (ValueError, InvalidSignature, x509.InvalidVersion) as error:
            raise RemoteProtocolError(
                Violation.MALFORMED, "not a certificate request in PEM"
            ) from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
            key.curve, ec.SECP256R1
        ):
            raise RemoteProtocolError(Violation.MALFORMED, "the TLS key must be P-256")
        if not signed:
            raise RemoteProtocolError(
                Violation.BAD_SIGNATURE, "the certificate request is not signed by its key"
            )
        return self._leaf(
            certificates.name(peer_id, serial=str(incarnation)),
            key,
            [x509.DNSName(peer_id + _PEER_DOMAIN)],
            [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
            PEER_VALID,
        )

    def _leaf(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        names: Sequence[x509.GeneralName],
        purposes: Sequence[x509.ObjectIdentifier],
        valid: datetime.timedelta,
    ) -> bytes:
        now = datetime.datetime.fromtimestamp(int(self._clock.time()), datetime.UTC)
        issuer = certificates.Issuer(self._key, self._name)
        return issuer.leaf(subject, key, names, purposes, (now - BACKDATED, now + valid))


def certificate_owner(der: bytes) -> PeerId:
    """Return the peer whose leaf this is. TLS must have verified it already.

    Raises:
        RemoteProtocolError: A certificate of the run, but no peer's.
    """
    return _peer_in(_names_in(der))


def link_owner(der: bytes) -> PeerId:
    """Return who shows this leaf on a relay link, a peer or `SOURCE`. TLS must have verified it.

    Raises:
        RemoteProtocolError: A certificate of the run, but nobody's.
    """
    names = _names_in(der)
    return SOURCE if SERVER_NAME in names else _peer_in(names)


def _names_in(der: bytes) -> list[str]:
    try:
        certificate = x509.load_der_x509_certificate(der)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise RemoteProtocolError(Violation.MALFORMED, "not a peer's certificate") from error
    return names.value.get_values_for_type(x509.DNSName)


def _peer_in(names: Sequence[str]) -> PeerId:
    for name in names:
        peer_id = name.removesuffix(_PEER_DOMAIN)
        if peer_id != name and _PEER_ID.fullmatch(peer_id):
            return PeerId(peer_id)
    raise RemoteProtocolError(Violation.NOT_A_MEMBER, "not a peer's certificate")


def run_key_from(reply: CaReply, token: JoinToken) -> bytes:
    """Return the run's public key, raw, if it is the one that the token speaks of.

    Raises:
        RefusedError: ``wrong_run``: somebody else answers at this address.
    """
    if not hmac.compare_digest(fingerprint(reply.run_public_key), token.fingerprint):
        raise RefusedError(
            "wrong_run",
            "the server at this address belongs to another run than the token: check both",
        )
    return reply.run_public_key


def authority_from(reply: CaReply, token: JoinToken) -> bytes:
    """Return the authority's certificate, PEM, if the token's own key signed it.

    What comes back is encoded anew from the one certificate that was checked: a second one in the
    same text would be believed by TLS as well.

    Raises:
        RefusedError: Another run (``wrong_run``), or not a certificate of its key
            (``bad_authority``): do not talk to this server.
    """
    public_key = run_key_from(reply, token)
    bad = RefusedError("bad_authority", "the run's key did not sign what this server shows")
    try:
        certificate = x509.load_pem_x509_certificate(reply.certificate)
        key = certificate.public_key()
        certificate.verify_directly_issued_by(certificate)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise bad from error
    if not isinstance(key, Ed25519PublicKey) or key.public_bytes_raw() != public_key:
        raise bad
    return certificate.public_bytes(serialization.Encoding.PEM)


# --- a peer's own keys --------------------------------------------------------------------------


class PeerIdentity:
    """A peer's Ed25519 identity; its 32-byte seed is all that has to be kept."""

    def __init__(self, seed: bytes) -> None:
        assert len(seed) == 32, len(seed)
        self.seed = seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes_raw()
        """Raw, 32 bytes."""
        self.peer_id = peer_id_of(self.public_key)

    @classmethod
    def create(cls, entropy: Entropy) -> PeerIdentity:
        """Draw a new identity."""
        return cls(entropy.secret(32))

    @classmethod
    def load(cls, path: Path) -> PeerIdentity | None:
        """Return the identity in a file, or ``None`` if there is no file.

        Raises:
            ConfigError: The file is something else, or cannot be read.
        """
        try:
            seed = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError("identity", f"cannot read {path}: {error.strerror}") from error
        if len(seed) != 32:
            detail = f"{path} holds {len(seed)} bytes, not 32: restore it, or move it away"
            raise ConfigError("identity", f"{detail} and join as a new peer")
        return cls(seed)

    def save(self, path: Path) -> None:
        """Write a file that only its owner can read, whole or not at all; never over another.

        Raises:
            StoreError: It exists, or the disk refused.
        """
        fresh = path.with_name(path.name + ".new")
        with guard_disk(f"write {path}"):
            try:
                fresh.unlink(missing_ok=True)
                descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self.seed)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)

    def sign(self, message: bytes) -> bytes:
        """Return 64 bytes; ``message`` must start with a domain of its own."""
        return self._key.sign(message)

    def make_csr(self, entropy: Entropy) -> tuple[bytes, bytes]:
        """Return a certificate request for a fresh P-256 key, and that key; both PEM."""
        key = certificates.p256_key(entropy)
        return certificates.request(key, self.peer_id), certificates.key_pem(key)


def join_proof(
    identity: PeerIdentity, run: Fingerprint, nonce: bytes, csr: bytes, name: str
) -> bytes:
    """Return the signature that shows possession of the identity key, for this join only.

    It binds the TLS key and the run, so that nobody can carry it to another run or certificate.
    """
    return identity.sign(_join_message(identity.public_key, run, nonce, csr, name))


def check_join_proof(request: JoinRequest, run: Fingerprint) -> PeerId:
    """Return the id of the peer that really sent ``request``.

    Raises:
        RemoteProtocolError: Another key made the proof, or for another join.
    """
    if len(request.nonce) != NONCE_BYTES:
        raise RemoteProtocolError(Violation.MALFORMED, f"the nonce must have {NONCE_BYTES} bytes")
    message = _join_message(request.public_key, run, request.nonce, request.csr, request.name)
    signing.verify(request.public_key, message, request.proof, what="the join request")
    return peer_id_of(request.public_key)


def _join_message(
    public_key: bytes, run: Fingerprint, nonce: bytes, csr: bytes, name: str
) -> bytes:
    parts = (public_key, run, nonce, csr, name.encode())
    # Lengths in front keep one part's end from passing for the next one's start.
    return _JOIN_DOMAIN + b"".join(len(part).to_bytes(4, "little") + part for part in parts)
