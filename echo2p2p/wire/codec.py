"""The one place where MessagePack is read or written.

`msgspec` looks first whether the bytes are of the wanted kind at all: a megabyte of empty lists
would become a hundred of Python objects in a parser that takes anything, and so it is refused at
the first of them. Then `msgpack` parses, with every limit set, and `msgspec` turns the result into
a frozen struct. Nothing that came in is used untyped, and nothing is ever pickled or evaluated.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Final, TypeVar, cast

import msgpack
import msgspec

from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.limits import (
    MESSAGE_BINARY_BYTES_MAX,
    MESSAGE_ITEMS_MAX,
    MESSAGE_STRING_BYTES_MAX,
)

T = TypeVar("T")

_ENCODER: Final = msgspec.msgpack.Encoder()
"""Writes what `msgpack` would, byte for byte, in a twentieth of the time."""


def encode(message: msgspec.Struct) -> bytes:
    """Return the canonical bytes of ``message``: same message, same bytes, on any machine."""
    return _ENCODER.encode(message)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Return the message in ``data``, which must be of ``kind`` (a struct or a union of them).

    Raises:
        RemoteProtocolError: Not MessagePack, over a limit, an unknown field or a wrong type.
            The sender is at fault; answer with the violation and do not retry.
    """
    try:
        looked_at = cast("T", _looker(cast("Hashable", kind)).decode(data))
        plain = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            max_str_len=MESSAGE_STRING_BYTES_MAX,
            max_bin_len=MESSAGE_BINARY_BYTES_MAX,
            max_array_len=MESSAGE_ITEMS_MAX,
            max_map_len=MESSAGE_ITEMS_MAX,
            max_ext_len=0,
        )
        # Without the last argument text would pass for bytes, read as base64.
        return msgspec.convert(plain, type(looked_at), strict=True, builtin_types=(bytes,))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise RemoteProtocolError(Violation.MALFORMED, detail) from error


@cache
def _looker(kind: Hashable) -> msgspec.msgpack.Decoder[object]:
    """Return the decoder of a kind; to make one for a union takes 20 times as long as its use."""
    return cast("msgspec.msgpack.Decoder[object]", msgspec.msgpack.Decoder(kind, strict=True))
