import contextlib
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import IntegrityError
from echo2p2p.weights.streams import PACKED_MAX, StreamReader, StreamWriter

MAGICLESS = zstandard.FORMAT_ZSTD1_MAGICLESS


def reader(body):
    return StreamReader(memoryview(body), source="mallory")


def written(*parts):
    out = StreamWriter()
    for part in parts:
        out.number(part) if isinstance(part, int) else out.stream(part)
    return out.body()


def zstd_stream(plain, **options):
    """A zstd stream that a `StreamWriter` would not write."""
    options = {"write_content_size": 0, "write_checksum": 0, "format": MAGICLESS, **options}
    parameters = zstandard.ZstdCompressionParameters.from_level(3, **options)
    coded = zstandard.ZstdCompressor(compression_params=parameters).compress(plain)
    return written(len(coded) << 2 | 1) + coded


@given(st.lists(st.integers(0, 2**63)))
def test_numbers_come_back_and_nothing_is_left(numbers):
    body = reader(written(*numbers))
    assert [body.number(2**63) for _ in numbers] == numbers
    body.end()


@settings(deadline=None)
@given(st.lists(st.binary() | st.binary(min_size=1, max_size=1).map(lambda b: 700 * b)))
def test_streams_come_back_and_nothing_is_left(plain):
    body = reader(written(*(np.frombuffer(part, dtype=np.uint8) for part in plain)))
    assert [body.stream(len(part)).tobytes() for part in plain] == plain
    body.end()


def test_a_skewed_stream_is_coded_near_its_entropy():
    draws = np.minimum(np.random.default_rng(1).geometric(0.5, 100_000) - 1, 255)
    assert len(written(draws.astype(np.uint8))) < 1.12 * 2 * 100_000 / 8


@pytest.mark.parametrize("size", [0, 1, 2, 255, 4097, PACKED_MAX + 1])
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8"])
@pytest.mark.parametrize("scale", [0, 0.01, 2, 1000])
def test_packed_integers_of_any_spread_and_width_come_back(size, dtype, scale):
    top = float(np.iinfo(dtype).max) / 4
    draws = np.random.default_rng(size).exponential(scale, size)
    values = np.minimum(draws, top).astype(dtype)
    values[: size // 300] = np.iinfo(dtype).max
    out = StreamWriter()
    out.packed(values)
    assert out.tables_bytes <= len(out)
    body = reader(out.body())
    got = np.zeros(size, dtype=dtype)
    body.packed(got)
    body.end()
    assert (got == values).all()


def test_packed_integers_take_hardly_more_than_their_entropy():
    values = np.minimum(np.random.default_rng(1).geometric(0.9, 100_000) - 1, 99).astype("<u2")
    out = StreamWriter()
    out.packed(values)
    assert len(out) < 1.01 * 100_000 / 8 * 0.5211  # -(.9 log .9 + .1 log .1) / .9


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda body: body[:-1], "ends early"),
        (lambda body: bytes([body[0] - 1]) + body[1:-1], "do not unpack"),
        (lambda body: bytes([body[0] + 1]) + body[1:] + b"!", "another number"),
        (lambda body: body[:1] + b"\x05" + body[2:], "mode that is not ours"),
        (lambda body: b"\x00" + body[1:], "mode that is not ours"),
    ],
)
def test_damaged_packed_integers_are_refused(damage, what):
    out = StreamWriter()
    out.packed(np.arange(60, dtype="<u2"))
    with pytest.raises(IntegrityError, match=what) as caught:
        reader(damage(out.body())).packed(np.zeros(60, dtype="<u2"))
    assert caught.value.source == "mallory"


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=80), st.sampled_from(["<u2", "<u4", "<u8"]), st.integers(1, 300))
def test_garbage_unpacks_or_is_refused(garbage, dtype, size):
    body = written(len(garbage) + 1) + b"\x00" + garbage
    got = np.zeros(size, dtype=dtype)
    with contextlib.suppress(IntegrityError):
        reader(body).packed(got)
        again = np.ones(size, dtype=dtype)
        reader(body).packed(again)
        assert (got == again).all()


def test_planes_come_back():
    values = np.arange(-5, 5, dtype="<i8").view("<u8")
    out = StreamWriter()
    out.planes(values)
    assert (reader(out.body()).planes(10, np.dtype("<u8")) == values).all()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "ends early"),
        (b"\x80", "ends early"),
        (b"\xff" * 10, "without end"),
        (b"\x05", "above 4"),
    ],
)
def test_a_bad_number_is_refused(body, what):
    with pytest.raises(IntegrityError, match=what) as caught:
        reader(body).number(4)
    assert caught.value.source == "mallory"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(written(8 << 2 | 0) + bytes(7), id="stored, cut off"),
        pytest.param(written(7 << 2 | 0) + bytes(7), id="stored, too short"),
        pytest.param(written(9 << 2 | 0) + bytes(9), id="stored, too long"),
        pytest.param(written(0 << 2 | 2), id="repeated nothing"),
        pytest.param(written(2 << 2 | 2) + bytes(2), id="repeated two"),
        pytest.param(written(1 << 2 | 3) + bytes(1), id="unknown kind"),
        pytest.param(written(1 << 60), id="longer than the block"),
        pytest.param(written(4 << 2 | 1) + bytes(4), id="shorter than a frame"),
        pytest.param(written(7 << 2 | 1) + b"garbage", id="no frame"),
    ],
)
def test_a_bad_stream_of_eight_bytes_is_refused(body):
    with pytest.raises(IntegrityError):
        reader(body).stream(8)


@pytest.mark.parametrize("size", [999, 1001])
def test_a_frame_must_decode_to_exactly_the_known_size(size):
    with pytest.raises(IntegrityError):
        reader(zstd_stream(bytes(1000))).stream(size)


def test_a_frame_with_something_behind_it_is_refused():
    body = zstd_stream(bytes(1000))
    length = len(body) - 1
    with pytest.raises(IntegrityError):
        reader(written((length + 3) << 2 | 1) + body[1:] + b"abc").stream(1000)


def test_a_frame_that_states_its_size_is_refused():
    with pytest.raises(IntegrityError, match="states its own size"):
        reader(zstd_stream(bytes(1000), write_content_size=1)).stream(1000)


def test_a_frame_with_a_huge_window_is_refused():
    with pytest.raises(IntegrityError, match="too much memory"):
        reader(zstd_stream(bytes(1 << 22), window_log=22)).stream(1 << 22)


def test_a_bomb_costs_no_more_memory_than_the_honest_stream():
    bomb = zstd_stream(bytes(1 << 26), window_log=17)
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            reader(bomb).stream(10_000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_bytes_behind_the_end_are_refused():
    with pytest.raises(IntegrityError, match="after the block's end"):
        reader(b"\x00").end()
