"""What the coordinator and a task worker say to each other: the port's values as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from coordinator.task_port import Done, Failed, Next, Opening, Turn
from echo2p2p.tasks.base import Verdict
from echo2p2p.wire.arrays import from_tokens, to_tokens
from echo2p2p.wire.messages import Array


class SetupCall(msgspec.Struct, frozen=True):
    """`TaskSetup`."""

    model_dir: str
    task: str
    options: dict[str, Any]


class TurnCall(msgspec.Struct, frozen=True):
    """`Turn`."""

    tokens: Array
    finish: Literal["stop", "length", "aborted"]


class EpisodeCall(msgspec.Struct, frozen=True):
    """One episode to be stepped."""

    seed: int
    turns: list[TurnCall]


class OpeningReply(msgspec.Struct, frozen=True, tag="opening"):
    """`Opening`."""

    seed: int
    item_id: str
    prompt: Array
    player: int


class NextReply(msgspec.Struct, frozen=True, tag="next"):
    """`Next`."""

    prompt: Array
    player: int


class DoneReply(msgspec.Struct, frozen=True, tag="done"):
    """`Done`."""

    verdict: Verdict


class FailedReply(msgspec.Struct, frozen=True, tag="failed"):
    """`Failed`."""

    detail: str


def to_call(seed: int, turns: Sequence[Turn]) -> EpisodeCall:
    """Return one episode as a message."""
    return EpisodeCall(seed, [TurnCall(from_tokens(turn.tokens), turn.finish) for turn in turns])


def from_call(call: EpisodeCall) -> tuple[int, list[Turn]]:
    """Undo `to_call`."""
    return call.seed, [Turn(to_tokens(turn.tokens), turn.finish) for turn in call.turns]


OpenedReply = OpeningReply | FailedReply
ScoredReply = NextReply | DoneReply | FailedReply


def to_opened(result: Opening | Failed) -> OpenedReply:
    """Return one opened item as a message."""
    if isinstance(result, Failed):
        return FailedReply(result.detail)
    return OpeningReply(result.seed, result.item_id, from_tokens(result.prompt), result.player)


def from_opened(reply: OpenedReply) -> Opening | Failed:
    """Undo `to_opened`."""
    if isinstance(reply, FailedReply):
        return Failed(reply.detail)
    return Opening(reply.seed, reply.item_id, to_tokens(reply.prompt), reply.player)


def to_scored(result: Next | Done | Failed) -> ScoredReply:
    """Return one stepped episode as a message."""
    match result:
        case Next():
            return NextReply(from_tokens(result.prompt), result.player)
        case Done():
            return DoneReply(result.verdict)
        case Failed():
            return FailedReply(result.detail)


def from_scored(reply: ScoredReply) -> Next | Done | Failed:
    """Undo `to_scored`."""
    match reply:
        case NextReply():
            return Next(to_tokens(reply.prompt), reply.player)
        case DoneReply():
            return Done(reply.verdict)
        case FailedReply():
            return Failed(reply.detail)
