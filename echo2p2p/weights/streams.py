"""Byte streams inside a block: short numbers and compressed runs of bytes, read with bounds.

The problem: a block is a handful of short byte streams, each with its own statistics, and whoever
wrote it may lie. The idea: the reader always knows how many bytes a stream must decode to before
it looks at it, so nothing that comes in can ask for memory. A stream is stored, one repeated
byte, or a zstd frame without magic, size or checksum, whichever is shortest.

zstd is used as a Huffman coder. At its ordinary levels it finds chance repetitions in what is
nearly noise and pays more for them than for the literals: on geometric symbols level 1 is 26 %
above the entropy, the setting below (a tiny match table, long matches only) 9 %, at twice the
speed (measured).

Integers that follow one distribution go through pcodec instead: it bins them and codes the bins
with fractions of bits, within 1 % of the entropy. Its modes that look for structure are switched
off and refused: there is none, and a hostile one could make the decoder work for nothing.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pcodec
import zstandard
from numpy.typing import NDArray
from pcodec import wrapped

from echo2p2p.errors import IntegrityError

WINDOW_BYTES_LOG2: Final = 17
"""Also bounds what a hostile frame can make the decoder allocate beside its output."""

_STORED: Final = 0
_ZSTD: Final = 1
_REPEATED: Final = 2
_KIND_BITS: Final = 2

PACKED_MAX: Final = 1 << 18
"""Integers that share one table of bins."""

_PACKING: Final = pcodec.ChunkConfig(
    mode_spec=pcodec.ModeSpec.classic(), delta_spec=pcodec.DeltaSpec.no_op()
)
_PACKER: Final = wrapped.FileCompressor()
_UNPACKER: Final = wrapped.FileDecompressor.new(b"\x04\x01")[0]
"""The two bytes are pcodec's file header: format 4.1. A `FileCompressor` must write the same."""

_PLAIN_MODE: Final = 0
"""First byte of a chunk in classic mode without deltas."""

_FRAME_BYTES_MIN: Final = 5
"""A zstd frame without magic: descriptor, window, one block header."""

_NUMBER_BYTES_MAX: Final = 10

_PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(
    1,
    format=zstandard.FORMAT_ZSTD1_MAGICLESS,
    strategy=zstandard.STRATEGY_FAST,
    window_log=WINDOW_BYTES_LOG2,
    hash_log=6,
    min_match=7,
    write_content_size=False,
    write_checksum=False,
)


class StreamWriter:
    """Builds one block's body. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._out = bytearray()
        self.tables_bytes = 0
        """Of all that was written: what would not double with twice the data."""
        self._compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)

    def number(self, value: int) -> None:
        """Append a non-negative number, 7 bits a byte, low bits first."""
        assert value >= 0
        while value >= 0x80:
            self._out.append(value & 0x7F | 0x80)
            value >>= 7
        self._out.append(value)

    def stream(self, values: NDArray[np.uint8]) -> None:
        """Append ``values``, in the shortest of the three ways; nothing at all if empty."""
        if not values.size:
            return
        if bool((values == values[0]).all()):
            self.number(1 << _KIND_BITS | _REPEATED)
            self._out.append(int(values[0]))
            return
        plain = values.tobytes()
        coded = self._compressor.compress(plain)
        kind = _ZSTD if len(coded) < len(plain) else _STORED
        shorter = coded if kind == _ZSTD else plain
        self.number(len(shorter) << _KIND_BITS | kind)
        self._out += shorter

    def planes(self, values: NDArray[Any]) -> None:
        """Append each byte plane of ``values``, low first, as a stream."""
        table = np.ascontiguousarray(values).view(np.uint8).reshape(values.size, values.itemsize)
        for place in range(values.itemsize):
            self.stream(np.ascontiguousarray(table[:, place]))

    def raw(self, values: NDArray[Any]) -> None:
        """Append ``values`` as they are."""
        self._out += values.tobytes()

    def packed(self, values: NDArray[Any]) -> None:
        """Append unsigned ``values`` of two, four or eight bytes through pcodec."""
        for start in range(0, values.size, PACKED_MAX):
            chunk = _PACKER.chunk_compressor(values[start : start + PACKED_MAX], _PACKING)
            tables, pages = chunk.write_meta(), chunk.write_page(0)
            self.number(len(tables) + len(pages))
            self._out += tables
            self._out += pages
            self.tables_bytes += len(tables)

    def __len__(self) -> int:
        return len(self._out)

    def body(self) -> bytes:
        """Return all that was written."""
        return bytes(self._out)


class StreamReader:
    """Reads one block's body back.

    Every method raises `IntegrityError`, blaming ``source``, if the body is not what a
    `StreamWriter` makes.
    """

    def __init__(self, body: memoryview, *, source: str) -> None:
        self._body = body
        self._at = 0
        self._source = source
        self._decompressor = zstandard.ZstdDecompressor(
            format=zstandard.FORMAT_ZSTD1_MAGICLESS, max_window_size=1 << WINDOW_BYTES_LOG2
        )

    def number(self, at_most: int) -> int:
        """Return the next number, refused if above ``at_most``."""
        value = 0
        for place in range(_NUMBER_BYTES_MAX):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                if value > at_most:
                    raise self.corrupt(f"the number {value} is above {at_most}")
                return value
        raise self.corrupt("a number without end")

    def stream(self, size: int) -> NDArray[np.uint8]:
        """Return the next stream, which must decode to exactly ``size`` bytes; read-only."""
        if size == 0:
            return np.zeros(0, dtype=np.uint8)
        head = self.number(len(self._body) << _KIND_BITS | 3)
        kind, coded_bytes = head & 3, head >> _KIND_BITS
        coded = self._take(coded_bytes)
        if kind == _REPEATED and coded_bytes == 1:
            return np.full(size, coded[0], dtype=np.uint8)
        if kind == _STORED and coded_bytes == size:
            return np.frombuffer(coded, dtype=np.uint8)
        if kind != _ZSTD or not _FRAME_BYTES_MIN <= coded_bytes < size:
            raise self.corrupt(f"a stream of kind {kind}: {coded_bytes} bytes for {size}")
        return np.frombuffer(self._decompress(coded, size), dtype=np.uint8)

    def planes(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return ``count`` values of ``dtype`` from their byte planes."""
        if dtype.itemsize == 1:
            return self.stream(count)
        values = np.empty((count, dtype.itemsize), dtype=np.uint8)
        for place in range(dtype.itemsize):
            values[:, place] = self.stream(count)
        return values.reshape(-1).view(dtype)

    def raw(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return ``count`` values of ``dtype``, sharing the body's memory."""
        return np.frombuffer(self._take(count * dtype.itemsize), dtype=np.uint8).view(dtype)

    def packed(self, values: NDArray[Any]) -> None:
        """Fill ``values``, unsigned of two, four or eight bytes, with what was packed."""
        for start in range(0, values.size, PACKED_MAX):
            part = values[start : start + PACKED_MAX]
            coded = bytes(self._take(self.number(len(self._body))))
            if coded[:1] != bytes([_PLAIN_MODE]):
                raise self.corrupt("packed integers in a mode that is not ours")
            try:
                chunk, tables = _UNPACKER.chunk_decompressor(coded, f"u{8 * part.itemsize}")
                progress, page = chunk.read_page_into(coded[tables:], part.size, part)
            except RuntimeError as error:
                raise self.corrupt(f"packed integers that do not unpack: {error}") from error
            if progress.n_processed != part.size or tables + page != len(coded):
                raise self.corrupt("packed integers of another number")

    def end(self) -> None:
        """Check that nothing is left."""
        if self._at != len(self._body):
            raise self.corrupt(f"{len(self._body) - self._at} bytes after the block's end")

    def corrupt(self, detail: str) -> IntegrityError:
        """Return the error to raise, with whom to blame."""
        return IntegrityError(f"block: {detail}", source=self._source)

    def _decompress(self, coded: memoryview, size: int) -> bytes:
        try:
            frame = zstandard.get_frame_parameters(coded, format=zstandard.FORMAT_ZSTD1_MAGICLESS)
            if frame.content_size != zstandard.CONTENTSIZE_UNKNOWN:
                # The library would allocate whatever the frame claims.
                raise self.corrupt("a frame that states its own size")
            plain = self._decompressor.decompress(
                coded, max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise self.corrupt(f"a stream that does not decompress: {error}") from error
        if len(plain) != size:
            raise self.corrupt(f"a stream of {len(plain)} bytes instead of {size}")
        return plain

    def _take(self, count: int) -> memoryview:
        if count > len(self._body) - self._at:
            raise self.corrupt("it ends early")
        self._at += count
        return self._body[self._at - count : self._at]
