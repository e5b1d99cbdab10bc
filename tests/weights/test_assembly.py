import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import IntegrityError, LocalProtocolError, RemoteProtocolError
from echo2p2p.limits import UNVERIFIED_CHUNKS_MAX
from echo2p2p.weights.assembly import Added, Assembly, Duplicate, Early
from echo2p2p.weights.chunks import split
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import build_header

LAYOUT = plan_layout([])


def publication(payload_bytes, seed=0):
    chunked = split(random.Random(seed).randbytes(payload_bytes), 1024)
    header = build_header(
        content="model",
        run_id="run",
        version=0,
        chain_id="chain",
        step=0,
        generation=0,
        base=None,
        result_digest=bytes(32),
        layout=LAYOUT,
        chunked=chunked,
    )
    return header, chunked


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12_000))
def test_chunks_in_any_order_make_the_payload(rng, payload_bytes):
    header, chunked = publication(payload_bytes)
    assembly = Assembly(header)
    order = list(range(chunked.count))
    rng.shuffle(order)
    added = []
    for index in order:
        assert not assembly.complete
        got = assembly.add(index, chunked.chunk(index), source="a")
        added += got.indices if isinstance(got, Added) else ()
        assert sorted([*assembly.held(), *assembly.missing()]) == sorted(order)
    assert sorted(added) == assembly.held() == sorted(order)
    assert assembly.complete
    assert assembly.payload() == chunked.payload
    assert all(assembly.chunk(i) == chunked.chunk(i) for i in order)


def test_the_payload_is_put_together_in_memory_that_is_given():
    header, chunked = publication(3000)
    memory = memoryview(bytearray(3500))
    assembly = Assembly(header, memory)
    for index in (2, 0, 3, 1):
        assembly.add(index, chunked.chunk(index), source="a")
    assert memory[:3000] == chunked.payload == assembly.payload()
    index = bytes(chunked.index)
    assert bytes(memory[3000:]) == index + bytes(500 - len(index))


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12_000))
def test_another_life_takes_up_the_chunks_that_are_still_right(rng, payload_bytes):
    header, chunked = publication(payload_bytes)
    memory = memoryview(bytearray(rng.randbytes(payload_bytes + header.index_bytes)))
    first = Assembly(header, memory)
    assert first.take_up() == 0, "garbage is believed"
    fetched = [0, *rng.sample(range(1, chunked.count), rng.randint(0, chunked.count - 1))]
    for index in fetched:
        first.add(index, chunked.chunk(index), source="a")
    torn = rng.choice(fetched[1:]) if len(fetched) > 1 else None
    if torn is not None:
        memory[(torn - 1) * 1024] ^= 1
    later = Assembly(header, memory)
    assert later.take_up() == len(fetched) - (torn is not None)
    assert set(later.held()) == set(fetched) - {torn}
    for index in later.missing():
        later.add(index, chunked.chunk(index), source="b")
    assert later.payload() == chunked.payload


def test_nothing_is_taken_up_where_the_index_has_no_room_or_is_torn():
    header, chunked = publication(5000)
    for extra, flips in ((header.index_bytes - 1, False), (header.index_bytes, True)):
        memory = memoryview(bytearray(5000 + extra))
        whole = Assembly(header, memory)
        for index in range(chunked.count):
            whole.add(index, chunked.chunk(index), source="a")
        memory[-1] ^= flips
        later = Assembly(header, memory)
        assert later.take_up() == 0
        assert later.held() == []


def test_a_verified_chunk_is_served_before_the_rest_is_there():
    header, chunked = publication(3000)
    assembly = Assembly(header)
    assert assembly.add(0, chunked.chunk(0), source="a") == Added((0,))
    assert assembly.add(2, chunked.chunk(2), source="a") == Added((2,))
    assert assembly.chunk(2) == chunked.chunk(2)
    assert assembly.chunk(1) is assembly.chunk(-1) is assembly.chunk(4) is None
    assert assembly.held() == [0, 2]
    assert assembly.missing() == [1, 3]


def test_chunks_before_chunk_0_wait_and_are_reported_with_it():
    header, chunked = publication(3000)
    assembly = Assembly(header)
    assert assembly.add(3, chunked.chunk(3), source="a") == Early(kept=True)
    assert assembly.add(1, bytes(1024), source="liar") == Early(kept=True)
    assert assembly.add(1, chunked.chunk(1), source="b") == Early(kept=True)
    assert assembly.add(2, bytes(1024), source="liar") == Early(kept=True)
    assert assembly.chunk(3) is None
    assert assembly.held() == []
    got = assembly.add(0, chunked.chunk(0), source="c")
    assert got == Added((0, 1, 3), bad_sources=("liar",))
    assert assembly.missing() == [2]


def test_the_same_bytes_are_a_duplicate_waiting_or_held():
    header, chunked = publication(3000)
    assembly = Assembly(header)
    assembly.add(1, chunked.chunk(1), source="a")
    assert assembly.add(1, chunked.chunk(1), source="b") == Duplicate()
    assembly.add(0, chunked.chunk(0), source="a")
    assert assembly.add(1, chunked.chunk(1), source="b") == Duplicate()
    assert assembly.add(0, chunked.chunk(0), source="b") == Duplicate()


def test_a_sender_has_one_guess_a_chunk():
    header, chunked = publication(3000)
    assembly = Assembly(header)
    assert assembly.add(1, bytes(1024), source="liar") == Early(kept=True)
    assert assembly.add(1, b"\x01" * 1024, source="liar") == Early(kept=False)
    assert assembly.add(1, chunked.chunk(1), source="b") == Early(kept=True)


def test_the_waiting_room_is_bounded():
    header, chunked = publication(1024 * (UNVERIFIED_CHUNKS_MAX + 2))
    assembly = Assembly(header)
    for index in range(1, UNVERIFIED_CHUNKS_MAX + 1):
        assert assembly.add(index, chunked.chunk(index), source="a") == Early(kept=True)
    last = UNVERIFIED_CHUNKS_MAX + 1
    assert assembly.add(last, chunked.chunk(last), source="a") == Early(kept=False)
    got = assembly.add(0, chunked.chunk(0), source="a")
    assert got == Added(tuple(range(last)))
    assert assembly.add(last, chunked.chunk(last), source="a") == Added((last,))


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize(
    ("index", "data"),
    [
        (0, bytes(96)),
        (0, bytes(95)),
        (1, bytes(1023)),
        (3, bytes(1024)),
        (4, b""),
        (-1, bytes(952)),
    ],
)
def test_what_does_not_fit_changes_nothing_and_names_its_sender(with_index, index, data):
    header, chunked = publication(3000)
    assembly = Assembly(header)
    if with_index and index:
        assembly.add(0, chunked.chunk(0), source="a")
    before = assembly.held()
    with pytest.raises(IntegrityError) as caught:
        assembly.add(index, data, source="mallory")
    assert caught.value.source == "mallory"
    assert assembly.held() == before


def test_wrong_bytes_of_the_right_length_are_refused_and_the_chunk_can_still_come():
    header, chunked = publication(3000)
    assembly = Assembly(header)
    assembly.add(0, chunked.chunk(0), source="a")
    with pytest.raises(IntegrityError):
        assembly.add(1, chunked.chunk(2), source="mallory")
    assert assembly.add(1, chunked.chunk(1), source="a") == Added((1,))


def test_data_is_copied():
    header, chunked = publication(3000)
    assembly = Assembly(header)
    for index in (1, 0, 2):
        data = bytearray(chunked.chunk(index))
        assembly.add(index, data, source="a")
        data[:] = bytes(len(data))
    assert [assembly.chunk(i) == chunked.chunk(i) for i in range(3)] == [True] * 3


def test_nothing_that_is_handed_out_can_be_written_to():
    header, chunked = publication(10)
    assembly = Assembly(header)
    for index in range(2):
        assembly.add(index, chunked.chunk(index), source="a")
    for view in (assembly.chunk(0), assembly.chunk(1), assembly.payload()):
        assert view.readonly


def test_an_incomplete_payload_is_not_to_be_had():
    header, chunked = publication(10)
    assembly = Assembly(header)
    assembly.add(0, chunked.chunk(0), source="a")
    with pytest.raises(LocalProtocolError, match="1 of 2"):
        assembly.payload()


def test_a_header_that_makes_no_sense_gets_no_buffer():
    header, _ = publication(10)
    with pytest.raises(RemoteProtocolError):
        Assembly(msgspec.structs.replace(header, payload_bytes=1 << 60))


def test_a_publisher_holds_everything_at_once():
    header, chunked = publication(3000)
    assembly = Assembly.whole(header, chunked.payload, chunked.index)
    assert assembly.complete
    assert assembly.held() == [0, 1, 2, 3]
    assert assembly.chunk(0) == chunked.index
    assert assembly.payload() == chunked.payload
    assert assembly.add(1, chunked.chunk(1), source="a") == Duplicate()


@pytest.mark.parametrize("place", [0, 2999])
def test_a_payload_from_a_bad_disk_is_noticed(place):
    header, chunked = publication(3000)
    payload = bytearray(chunked.payload)
    payload[place] ^= 1
    for bad, index in (
        (payload, chunked.index),
        (chunked.payload[:-1], chunked.index),
        (chunked.payload, chunked.index[:-32]),
    ):
        with pytest.raises(IntegrityError) as caught:
            Assembly.whole(header, bad, index)
        assert caught.value.source == "local"
