"""TensorBoard's event files, against a reader of the format written independently here.

TensorBoard itself (2.21) was seen to read them, steps that a rollback lost left out.
"""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tensorboard import EventFile, _varint, crc32c


class Ticking:
    def __init__(self):
        self.now = 1_000_000_000.25

    def time(self):
        self.now += 0.5
        return self.now


def masked(data):
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    while data:
        length, length_crc = struct.unpack_from("<QI", data)
        assert length_crc == masked(data[:8])
        body = data[12 : 12 + length]
        (body_crc,) = struct.unpack_from("<I", data, 12 + length)
        assert body_crc == masked(body)
        yield body
        data = data[16 + length :]


def fields(data):
    """Decode one protobuf message as a list of (field, value)."""
    found, at = [], 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            value = varint()
        elif kind == 1:
            (value,) = struct.unpack_from("<d", data, at)
            at += 8
        elif kind == 5:
            (value,) = struct.unpack_from("<f", data, at)
            at += 4
        else:
            assert kind == 2
            length = varint()
            value = data[at : at + length]
            at += length
        found.append((key >> 3, value))
    return found


def events(folder):
    for path in sorted(folder.iterdir()):
        assert ".tfevents." in path.name
        yield [fields(record) for record in records(path.read_bytes())]


@pytest.mark.parametrize(
    ("data", "crc"),
    [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (b"", 0)],
)
def test_the_checksum_is_that_of_rfc_3720(data, crc):
    assert crc32c(data) == crc


@given(st.integers(0, 2**63))
def test_numbers_are_written_as_protobuf_does(value):
    assert fields(b"\x10" + _varint(value)) == [(2, value)]


def test_scalars_come_back_with_step_tag_value_and_time(tmp_path):
    file = EventFile(tmp_path, Ticking(), first_step=1)
    file.add(1, {"reward": 0.25, "age/mean": -1.5})
    file.add(300, {"reward": float("inf")})
    file.close()
    ((version, start, first, second),) = events(tmp_path)
    assert version[1:] == [(3, b"brain.Event:2")]
    assert start[1:] == [(2, 1), (7, b"\x08\x01")]
    (_, now), (_, step), (field, summary) = first
    assert (now, step, field) == (1_000_000_002.25, 1, 5)
    values = [fields(value) for _, value in fields(summary)]
    assert values == [[(1, b"reward"), (2, 0.25)], [(1, b"age/mean"), (2, -1.5)]]
    assert second[1] == (2, 300)


def test_another_file_begins_with_the_step_from_which_the_old_ones_are_void(tmp_path):
    clock = Ticking()
    for first in (1, 40):
        file = EventFile(tmp_path / "tb", clock, first_step=first)
        file.add(first, {"reward": 0.5})
        file.close()
    starts = [told[1][1:] for told in events(tmp_path / "tb")]
    assert starts == [[(2, 1), (7, b"\x08\x01")], [(2, 40), (7, b"\x08\x01")]]


def test_what_was_added_is_in_the_file_at_once(tmp_path):
    file = EventFile(tmp_path, Ticking(), first_step=1)
    file.add(1, {"reward": 0.5})
    ((_, _, added),) = events(tmp_path)
    assert added[1] == (2, 1)
    file.close()
