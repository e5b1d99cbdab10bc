"""Hypothesis strategies for messages, made from their type annotations.

A new message, or a new field, is thereby in every property test from the start. Values have the
right types and nothing more: a manifest id of three bytes is a message, though not a sensible one.
"""

from __future__ import annotations

import functools
import types
import typing
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from echo2p2p.wire import messages
from echo2p2p.wire.messages import Message, RelayFrame

INTEGERS: Final = st.integers(-(2**63), 2**64 - 1)
"""What MessagePack holds."""

_ITEMS_MAX: Final = 3
_SCALARS: Final[dict[object, st.SearchStrategy[Any]]] = {
    int: INTEGERS,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    type(None): st.none(),
}


def all_messages() -> tuple[type[Message], ...]:
    """Return every message class of the protocol, in the order of their definition."""
    return tuple(
        each
        for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, Message) and each is not Message
    )


@functools.cache
def message_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Return a strategy for messages of ``kind``; NaN is left out, as it equals nothing."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: _value_of(hints[field.name]) for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **fields)


@functools.cache
def any_message() -> st.SearchStrategy[Message]:
    """Return a strategy for messages of all classes."""
    return st.one_of(*(message_of(kind) for kind in all_messages()))


@functools.cache
def relay_frames() -> st.SearchStrategy[RelayFrame]:
    """Return a strategy for the frames of a relay link, `Chunk` included."""
    frames: st.SearchStrategy[Any] = st.one_of(*map(message_of, typing.get_args(RelayFrame)))
    return frames


def _value_of(hint: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401 - an annotation has no type
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(_value_of(arguments[0]), max_size=_ITEMS_MAX)
    if origin in {typing.Union, types.UnionType}:
        return st.one_of(*map(_value_of, arguments))
    assert isinstance(hint, type), hint
    assert issubclass(hint, Message), hint
    return message_of(hint)
