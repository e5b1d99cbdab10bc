"""The messages of `nfnetlink_queue`; that packets are late is seen in tests/net."""

import struct

from scenarios import delay


def test_attributes_are_padded_to_four_bytes():
    assert delay.attribute(2, b"abcde") == struct.pack("HH", 9, 2) + b"abcde\0\0\0"


def test_a_message_names_its_length_and_the_queue_subsystem():
    data = delay.message(delay.CONFIG, b"x" * 8)
    length, kind, flags, _, _ = struct.unpack_from("IHHII", data)
    assert length == len(data)
    assert kind == 0x302
    assert flags == 1


def test_a_packets_number_is_found_among_other_attributes():
    other = delay.attribute(3, b"\1\2\3\4\5")
    head = delay.attribute(delay.PACKET_HEADER, struct.pack("!IHB", 77, 0x0800, 0))
    assert delay.packet_number(delay.message(delay.PACKET, other + head)) == 77
    assert delay.packet_number(delay.message(delay.PACKET, other)) is None
    assert delay.packet_number(delay.message(delay.CONFIG, head)) is None
