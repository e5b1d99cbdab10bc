"""What others do with the same two states: public forms, and coders without our context.

Each is a pair of functions over bf16 states as ``uint16``; nothing of ours is used but the search
for changed elements where a rival needs it too.

* ``index+value+zstd1``: 16-bit gaps between changed elements (65535: skip) and the *new* bits, in
  one zstd-1 frame; what PULSESync and its like send.
* ``xor+zstd1``, ``xor+zstd3``: both states exclusive-ored.
* ``zipnn``: the same through ZipNN, if it is installed.
* ``pco``: gaps and differences through pcodec, without classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from pcodec import ChunkConfig, standalone

from echo2p2p.weights import kernels
from echo2p2p.weights.layout import DTYPES

Words = NDArray[np.uint16]


@dataclass(frozen=True)
class Rival:
    """A scheme: encoder from old and new, decoder from old and the wire bytes."""

    name: str
    encode: Callable[[Words, Words], bytes]
    decode: Callable[[Words, bytes], Words]


def rivals() -> list[Rival]:
    """Return those that can run here."""
    found = [
        Rival("index+value+zstd1", _put_values, _take_values),
        Rival("xor+zstd1", lambda old, new: _put_xor(old, new, 1), _take_xor),
        Rival("xor+zstd3", lambda old, new: _put_xor(old, new, 3), _take_xor),
        Rival("pco", _put_pco, _take_pco),
    ]
    if importlib.util.find_spec("zipnn") is not None:
        found.append(Rival("zipnn", _put_zipnn, _take_zipnn))
    return found


def _put_values(old: Words, new: Words) -> bytes:
    where = kernels.find(DTYPES["bf16"], old, new).where
    gaps = kernels.put_gaps(where, 0xFFFF) if where.size else np.zeros(0, dtype=np.uint16)
    plain = struct.pack("<QQ", where.size, gaps.size) + gaps.tobytes() + new[where].tobytes()
    return zstandard.ZstdCompressor(level=1).compress(plain)


def _take_values(old: Words, wire: bytes) -> Words:
    plain = zstandard.ZstdDecompressor().decompress(wire)
    changed, entries = struct.unpack_from("<QQ", plain)
    words = np.frombuffer(plain, dtype=np.uint16, offset=16)
    new = old.copy()
    if changed:
        where = kernels.take_gaps(words[:entries], 0xFFFF, changed, old.size)
        new[where] = words[entries:]
    return new


def _put_xor(old: Words, new: Words, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress((old ^ new).tobytes())


def _take_xor(old: Words, wire: bytes) -> Words:
    return old ^ np.frombuffer(zstandard.ZstdDecompressor().decompress(wire), dtype=np.uint16)


def _put_pco(old: Words, new: Words) -> bytes:
    found = kernels.find(DTYPES["bf16"], old, new)
    if not found.where.size:
        return b""
    gaps = np.diff(found.where, prepend=np.uint32(0))
    parts = [standalone.simple_compress(each, ChunkConfig()) for each in (gaps, found.zigzag)]
    return struct.pack("<Q", len(parts[0])) + b"".join(parts)


def _take_pco(old: Words, wire: bytes) -> Words:
    new = old.copy()
    if wire:
        (length,) = struct.unpack_from("<Q", wire)
        gaps: Any = standalone.simple_decompress(wire[8 : 8 + length])
        zigzag: Any = standalone.simple_decompress(wire[8 + length :])
        where = np.cumsum(gaps, dtype=np.uint32)
        kernels.move(DTYPES["bf16"], new, where, 0, zigzag)
    return new


def _zipnn() -> Any:  # noqa: ANN401 - a library without types
    return importlib.import_module("zipnn").ZipNN(
        bytearray_dtype="bfloat16", input_format="byte", threads=1
    )


def _put_zipnn(old: Words, new: Words) -> bytes:
    # It changes its input, and gives up on bytes it did not shrink: hence the copy and the bytes.
    return bytes(_zipnn().compress(bytearray((old ^ new).tobytes())))


def _take_zipnn(old: Words, wire: bytes) -> Words:
    return old ^ np.frombuffer(bytes(_zipnn().decompress(wire)), dtype=np.uint16)
