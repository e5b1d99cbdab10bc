"""X.509 as this project uses it: one authority, two kinds of leaf, everything deterministic.

Serial numbers are digests of what is certified and signatures have no randomness of their own, so
that the same key, request and time give the same certificate. What the certificates mean is said
in `echo2p2p.net.trust`, the only user.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from echo2p2p.net.ports import Entropy

_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_FOR_EVER: Final = (
    datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC),
)
_PEM: Final = serialization.Encoding.PEM


def p256_key(entropy: Entropy) -> ec.EllipticCurvePrivateKey:
    """Draw a key for a TLS leaf."""
    # 48 bytes for a range of 32: the bias of the remainder is below 2**-128.
    value = int.from_bytes(entropy.secret(48), "big") % (_P256_ORDER - 1) + 1
    return ec.derive_private_key(value, ec.SECP256R1())


def key_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key, unencrypted."""
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def name(common_name: str, *, serial: str | None = None) -> x509.Name:
    """Return a subject; ``serial`` tells holders of one common name apart."""
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if serial is not None:
        attributes.append(x509.NameAttribute(NameOID.SERIAL_NUMBER, serial))
    return x509.Name(attributes)


def request(key: ec.EllipticCurvePrivateKey, common_name: str) -> bytes:
    """Return a certificate request, PEM."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(name(common_name))
    return builder.sign(key, hashes.SHA256(), ecdsa_deterministic=True).public_bytes(_PEM)


def self_signed(key: Ed25519PrivateKey, common_name: str) -> bytes:
    """Return the authority's certificate, PEM: valid for ever, and a function of the key alone."""
    public = key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(name(common_name))
        .issuer_name(name(common_name))
        .public_key(public)
        .serial_number(_serial(public.public_bytes_raw()))
        .not_valid_before(_FOR_EVER[0])
        .not_valid_after(_FOR_EVER[1])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    return builder.sign(key, None).public_bytes(_PEM)


@dataclass(frozen=True)
class Issuer:
    """The authority's key and common name."""

    key: Ed25519PrivateKey
    common_name: str

    def leaf(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        names: Sequence[x509.GeneralName],
        purposes: Sequence[x509.ObjectIdentifier],
        valid: tuple[datetime.datetime, datetime.datetime],
    ) -> bytes:
        """Return a certificate, PEM, that can sign nothing itself."""
        point = key.public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
        )
        mine = self.key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(name(self.common_name))
            .public_key(key)
            .serial_number(_serial(point + subject.public_bytes() + repr(valid).encode()))
            .not_valid_before(valid[0])
            .not_valid_after(valid[1])
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(mine), critical=False)
        )
        return builder.sign(self.key, None).public_bytes(_PEM)


def _serial(material: bytes) -> int:
    # 19 bytes are positive in the 20 that X.509 allows; 0 is not allowed.
    return int.from_bytes(blake3(b"echo2p2p serial 0" + material).digest(length=19), "big") or 1


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
