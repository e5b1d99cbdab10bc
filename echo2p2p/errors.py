"""Every exception that a caller of echo2p2p may see, in one tree.

Expected outcomes are values, not exceptions (see `echo2p2p.rollouts.admission`). An exception
carries fields; its message is one line for a person, with the cause and the mend.
"""

from __future__ import annotations

import enum


class Violation(enum.StrEnum):
    """How a remote party broke the protocol; sent in the goodbye, used as a metric label."""

    FRAME_TOO_LONG = "frame_too_long"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"
    UNEXPECTED = "unexpected"
    BAD_SIGNATURE = "bad_signature"
    WRONG_RUN = "wrong_run"
    WRONG_PROTOCOL = "wrong_protocol"
    NOT_A_MEMBER = "not_a_member"
    TOO_MUCH = "too_much"


class EchoError(Exception):
    """Base of all errors raised on purpose by this project."""


class LocalProtocolError(EchoError):
    """We asked our own state machine for an illegal step: a bug of ours, never the remote's."""


class RemoteProtocolError(EchoError):
    """The other side sent something that the protocol forbids; never retried.

    Attributes:
        violation: What it did, as told to it in the goodbye message.
        detail: One line for a person.
    """

    def __init__(self, violation: Violation, detail: str) -> None:
        super().__init__(f"{violation.value}: {detail}")
        self.violation = violation
        self.detail = detail


class IntegrityError(EchoError):
    """Bytes disagree with a digest, a signature or their own index; drop them and fetch again.

    Attributes:
        source: Whom to blame: a peer id, or ``"local"`` for our own disk or memory.
    """

    def __init__(self, detail: str, *, source: str = "local") -> None:
        super().__init__(detail if source == "local" else f"{detail} (from {source})")
        self.detail = detail
        self.source = source


class LinkError(EchoError):
    """The transport failed; nothing is known of the remote's intentions. Retried, with a bound."""


class HttpError(LinkError):
    """A request got no answer at all: refused, reset, timed out, or not TLS."""


class EngineError(EchoError):
    """The inference engine died, hung, or refused weights; it must be started afresh."""


class ChildError(EngineError):
    """A child process ended or broke its pipe.

    Attributes:
        name: Which child (``"engine"``, ``"learner"``, ``"task worker"``).
        log_tail: The last lines that it wrote to its standard error, for a person.
        raised: Class of the exception that its own code raised, if it lives and has said no.
    """

    def __init__(self, name: str, detail: str, *, log_tail: str = "", raised: str = "") -> None:
        super().__init__(
            f"{name}: {detail}" + (f"; its last words: {log_tail}" if log_tail else "")
        )
        self.name = name
        self.detail = detail
        self.log_tail = log_tail
        self.raised = raised


class StoreError(EchoError):
    """The disk refused: full, read-only, torn or corrupt."""


class RefusedError(EchoError):
    """The coordinator said no, for good.

    Attributes:
        reason: Wire code of the refusal.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class ConfigError(EchoError):
    """A setting is wrong; shown to the user without a traceback, exit code 2.

    Attributes:
        path: Dotted path of the key, e.g. ``learner.batch_prompts``.
    """

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = path
        self.detail = detail
