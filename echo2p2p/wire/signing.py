"""Signed records: a message's exact bytes, and an Ed25519 signature over a domain and them.

The domain (one a record type) keeps a signature for one purpose from passing for another.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeVar, cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.wire import codec
from echo2p2p.wire.messages import ManifestHeader, MemberCard, Message, Signed

RecordT = TypeVar("RecordT", ManifestHeader, MemberCard)

RECORDS_KEPT: Final = 4096
"""Records that were found good; each of them comes again over every link."""

_DOMAIN: Final[dict[type[Message], bytes]] = {
    ManifestHeader: b"echo2p2p manifest 0\x00",
    MemberCard: b"echo2p2p card 0\x00",
}


def sign_record(key: Ed25519PrivateKey, record: ManifestHeader | MemberCard) -> Signed:
    """Return ``record`` encoded and signed by the run's key."""
    body = codec.encode(record)
    return Signed(body=body, signature=key.sign(_DOMAIN[type(record)] + body))


def open_record(signed: Signed, public_key: bytes, kind: type[RecordT]) -> RecordT:
    """Verify and decode.

    Args:
        signed: As received.
        public_key: The run's raw 32-byte key.
        kind: The record that it must be.

    Raises:
        RemoteProtocolError: The signature is not the run's, or the body is malformed. Nothing in
            the record may be believed; whoever sent it lies or belongs to another run.
    """
    return cast("RecordT", _opened(signed, public_key, kind))


@lru_cache(RECORDS_KEPT)
def _opened(
    signed: Signed, public_key: bytes, kind: type[ManifestHeader | MemberCard]
) -> ManifestHeader | MemberCard:
    """Do what `open_record` does; what is refused is not kept."""
    verify(public_key, _DOMAIN[kind] + signed.body, signed.signature, what=kind.__name__)
    return codec.decode(signed.body, kind)


def verify(public_key: bytes, message: bytes, signature: bytes, *, what: str) -> None:
    """Check one Ed25519 signature.

    Raises:
        RemoteProtocolError: `Violation.BAD_SIGNATURE`, naming ``what``.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise RemoteProtocolError(
            Violation.BAD_SIGNATURE, f"{what} is not signed by its key"
        ) from error
