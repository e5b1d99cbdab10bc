"""The messages themselves: each survives the wire, and nothing that is not one passes for one."""

import typing

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.testing.examples import EXAMPLES
from echo2p2p.testing.strategies import all_messages, any_message, relay_frames
from echo2p2p.wire import codec
from echo2p2p.wire.messages import HTTP_MESSAGES, Ping, RelayFrame, Upload

CASES = [
    pytest.param(example, field.name, id=f"{type(example).__name__}.{field.name}")
    for example in EXAMPLES
    for field in msgspec.structs.fields(type(example))
]
MISFITS = (["no", "such"], [[[]]], {"t": "nothing"}, {}, b"\xff", "\x00", -1.5, 3, True, None)
"""Every field refuses at least three of these."""


def as_map(message):
    return msgpack.unpackb(codec.encode(message))


def refusal(plain, kind):
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(msgpack.packb(plain), kind)
    return caught.value


def fits(value, hint):
    """Say whether a plain value has the annotated type: a second opinion, written by hand."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(fits(each, arguments[0]) for each in value)
    if arguments:
        return any(fits(value, each) for each in arguments)
    if hint is float:
        return type(value) in (float, int)
    if hint is type(None):
        return value is None
    return hint in (int, str, bytes, bool) and type(value) is hint


@given(any_message())
def test_every_message_survives_the_wire(message):
    data = codec.encode(message)
    again = codec.decode(data, type(message))
    assert again == message
    assert codec.encode(again) == data


@given(relay_frames())
def test_a_relay_frame_is_told_from_the_others_by_its_tag(frame):
    again = codec.decode(codec.encode(frame), RelayFrame)
    assert type(again) is type(frame)
    assert again == frame


@given(any_message())
def test_the_wire_form_is_a_map_with_the_tag_first_and_the_fields_in_order(message):
    plain = as_map(message)
    assert list(plain) == ["t", *type(message).__struct_fields__]
    assert plain["t"] == type(message).__struct_config__.tag


def test_no_two_messages_share_a_tag():
    tags = [kind.__struct_config__.tag for kind in all_messages()]
    assert len(set(tags)) == len(tags)


def test_every_http_body_and_frame_is_known_to_the_property_tests():
    assert {*HTTP_MESSAGES, *typing.get_args(RelayFrame)} <= set(all_messages())


def test_messages_are_frozen():
    with pytest.raises(AttributeError, match="immutable"):
        Ping(nonce=1).nonce = 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: type(each).__name__)
def test_a_field_that_nobody_knows_is_refused(example):
    assert "unknown field" in refusal({**as_map(example), "x": 1}, type(example)).detail


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: type(each).__name__)
def test_the_tag_of_another_message_is_refused(example):
    error = refusal({**as_map(example), "t": "another"}, type(example))
    assert error.violation is Violation.MALFORMED


@pytest.mark.parametrize(("example", "name"), CASES)
def test_a_missing_field_is_refused(example, name):
    plain = as_map(example)
    del plain[name]
    assert name in refusal(plain, type(example)).detail


@pytest.mark.parametrize(("example", "name"), CASES)
def test_a_value_of_another_type_is_refused(example, name):
    hint = typing.get_type_hints(type(example))[name]
    misfits = [value for value in MISFITS if not fits(value, hint)]
    assert len(misfits) >= 3
    for value in misfits:
        error = refusal({**as_map(example), name: value}, type(example))
        assert name in error.detail


def test_an_unknown_field_deep_inside_is_refused():
    upload = next(each for each in EXAMPLES if isinstance(each, Upload))
    plain = as_map(upload)
    plain["samples"][1]["spans"][0]["x"] = None
    assert "samples" in refusal(plain, Upload).detail


@given(st.data())
def test_a_frame_of_the_other_family_is_refused(data):
    message = data.draw(any_message())
    kind = Upload if isinstance(message, typing.get_args(RelayFrame)) else RelayFrame
    with pytest.raises(RemoteProtocolError):
        codec.decode(codec.encode(message), kind)
