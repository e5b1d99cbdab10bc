"""Event files for TensorBoard, written line by line without TensorFlow, torch or protobuf.

The format (TFRecord, and five fields of ``tensorflow/core/util/event.proto`` and
``framework/summary.proto``) has not changed in ten years. Rejected: ``tensorboardX``, which imports
torch where that is installed and writes from a thread that blocks its caller for ever once the
disk is full; ``torch.utils.tensorboard``, which needs torch in the network process and the package
``tensorboard``, whose dependencies outweigh ours.

A run that goes on in its folder, or rolls back, begins another file with a mark that makes
TensorBoard forget the steps which never happened.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from echo2p2p.net.ports import WallClock

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SESSION_START: Final = 1
_POLYNOMIAL: Final = 0x82F63B78
"""CRC-32C (Castagnoli), bits reversed."""


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE: Final = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of ``data`` (RFC 3720, appendix B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


class EventFile:
    """Scalars of a run, in a folder that ``tensorboard --logdir`` reads.

    Args:
        folder: Made if it is not there.
        clock: Stamps the events and names the file.
        first_step: The step that comes next; what earlier files say of it and later ones is
            forgotten.

    Raises:
        OSError: The folder or the file cannot be written; so do the methods.
    """

    def __init__(self, folder: Path, clock: WallClock, *, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        now = clock.time()
        name = f"events.out.tfevents.{int(now)}.echo2.{int(now % 1 * 1e6):06}"
        self._file = (folder / name).open("ab")
        self._write(_field(3, b"brain.Event:2"))
        start = _field(7, _number(1, _SESSION_START))  # SessionLog, status
        self._write(_number(2, first_step) + start)
        self._file.flush()

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one step, at once."""
        values = b"".join(
            _field(1, _field(1, tag.encode()) + _tag(2, _FIXED32) + struct.pack("<f", value))
            for tag, value in scalars.items()
        )
        self._write(_number(2, step) + _field(5, values))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        """Write one record: length, masked CRC of it, data, masked CRC of it."""
        data = _tag(1, _FIXED64) + struct.pack("<d", self._clock.time()) + event
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked(length) + data + _masked(data))


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _tag(field: int, kind: int) -> bytes:
    return bytes([field << 3 | kind])


def _number(field: int, value: int) -> bytes:
    return _tag(field, _VARINT) + _varint(value)


def _field(field: int, data: bytes) -> bytes:
    return _tag(field, _BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    assert value >= 0
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
