"""Who is at the other end of a relay link: hello, proof, done. Both sides run the same machine.

Each side sends a `Hello` with a fresh nonce and its run-signed `MemberCard`, then a `Proof`: a
signature by the card's key over both nonces, both peer ids and the run id, the signer's own
first. So a proof made for one link, run, pair or direction is worthless on any other. The
coordinator's own relay has no card and proves the run's key, which every member knows.

The order "signer first" needs no roles (who dialled does not matter); a mirror that sends our own
hello back is refused because it claims our id. The machine holds no key: it is given ``sign``.
It refuses: another protocol or run, a card that the run did not sign or that names a key other
than its own, ourselves, another peer than the one we dialled, a bad proof, any other message.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from echo2p2p.errors import LocalProtocolError, RemoteProtocolError, Violation
from echo2p2p.ids import SOURCE, Incarnation, PeerId, peer_id_of
from echo2p2p.limits import PROTOCOL
from echo2p2p.wire import signing
from echo2p2p.wire.messages import Hello, MemberCard, Proof, RelayFrame, Signed

NONCE_BYTES: Final = 32
_DOMAIN: Final = b"echo2p2p link 0\x00"


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The handshake is done: the other side holds the key of this member of the run."""

    peer_id: PeerId
    incarnation: Incarnation
    """0 for the source."""


class _State(enum.Enum):
    NEW = enum.auto()
    HELLO_AWAITED = enum.auto()
    PROOF_AWAITED = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class Self:
    """What we bring to every handshake."""

    peer_id: PeerId
    run_id: str
    run_public_key: bytes
    """Raw Ed25519, 32 bytes."""
    card: Signed | None
    """``None`` only for the source, whose ``sign`` uses the run's key."""
    sign: Callable[[bytes], bytes]


class Handshake:
    """One side of one handshake.

    Args:
        me: Our identity.
        nonce: 32 fresh random bytes, used for this handshake only.
        expected: The peer that was dialled, or whose TLS certificate was shown; anybody else is
            refused. ``None``: any member.
    """

    def __init__(self, me: Self, *, nonce: bytes, expected: PeerId | None = None) -> None:
        assert len(nonce) == NONCE_BYTES
        assert (me.card is None) == (me.peer_id == SOURCE)
        self._me = me
        self._nonce = nonce
        self._expected = expected
        self._state = _State.NEW
        self._remote: tuple[Authenticated, bytes, bytes] | None = None  # who, its key, its nonce

    def start(self) -> Hello:
        """Return the frame to send first, at once, without waiting for the other side."""
        if self._state is not _State.NEW:
            raise LocalProtocolError("a handshake is started once")
        self._state = _State.HELLO_AWAITED
        return Hello(
            protocol=PROTOCOL, run_id=self._me.run_id, card=self._me.card, nonce=self._nonce
        )

    def receive(self, message: RelayFrame) -> Proof | Authenticated:
        """Take the other side's next frame.

        Returns:
            After its hello the `Proof` to send; after its proof the result.

        Raises:
            RemoteProtocolError: It is not who it should be, or out of order. The machine is dead
                then; say goodbye with the violation and close.
            LocalProtocolError: Called before `start`, or after the end.
        """
        if self._state not in {_State.HELLO_AWAITED, _State.PROOF_AWAITED}:
            raise LocalProtocolError(f"handshake is {self._state.name.lower()}")
        state, self._state = self._state, _State.FAILED
        if state is _State.HELLO_AWAITED:
            if not isinstance(message, Hello):
                raise _unexpected(message, "a hello")
            who, key = self._identify(message)
            self._remote = (who, key, message.nonce)
            self._state = _State.PROOF_AWAITED
            mine = (self._nonce, self._me.peer_id)
            text = _transcript(*mine, message.nonce, who.peer_id, self._me.run_id)
            return Proof(signature=self._me.sign(text))
        if not isinstance(message, Proof):
            raise _unexpected(message, "a proof")
        assert self._remote is not None
        who, key, nonce = self._remote
        text = _transcript(nonce, who.peer_id, self._nonce, self._me.peer_id, self._me.run_id)
        signing.verify(key, text, message.signature, what="link proof")
        self._state = _State.DONE
        return who

    def _identify(self, hello: Hello) -> tuple[Authenticated, bytes]:
        if hello.protocol != PROTOCOL:
            raise RemoteProtocolError(
                Violation.WRONG_PROTOCOL, f"speaks protocol {hello.protocol}, we {PROTOCOL}"
            )
        if hello.run_id != self._me.run_id:
            raise RemoteProtocolError(Violation.WRONG_RUN, "hello from another run")
        if len(hello.nonce) != NONCE_BYTES:
            raise RemoteProtocolError(Violation.MALFORMED, f"nonce of {len(hello.nonce)} bytes")
        if hello.card is None:
            who, key = Authenticated(SOURCE, Incarnation(0)), self._me.run_public_key
        else:
            who, key = self._open_card(hello.card)
        if who.peer_id == self._me.peer_id:
            raise RemoteProtocolError(Violation.NOT_A_MEMBER, "claims to be ourselves")
        if self._expected is not None and who.peer_id != self._expected:
            raise RemoteProtocolError(
                Violation.NOT_A_MEMBER, f"{who.peer_id} answers for {self._expected}"
            )
        return who, key

    def _open_card(self, signed: Signed) -> tuple[Authenticated, bytes]:
        card = signing.open_record(signed, self._me.run_public_key, MemberCard)
        if card.run_id != self._me.run_id:
            raise RemoteProtocolError(Violation.WRONG_RUN, "card of another run")
        if card.incarnation < 1 or card.peer_id != peer_id_of(card.public_key):
            raise RemoteProtocolError(Violation.NOT_A_MEMBER, "card does not fit its own key")
        return Authenticated(PeerId(card.peer_id), Incarnation(card.incarnation)), card.public_key


def _transcript(nonce: bytes, who: str, other_nonce: bytes, other: str, run_id: str) -> bytes:
    """Return what the holder of ``nonce`` signs; every field carries its length."""
    fields = (nonce, other_nonce, who.encode(), other.encode(), run_id.encode())
    return _DOMAIN + b"".join(struct.pack(">I", len(field)) + field for field in fields)


def _unexpected(message: RelayFrame, wanted: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        Violation.UNEXPECTED, f"{type(message).__name__.lower()} where {wanted} must come"
    )
