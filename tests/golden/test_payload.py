"""A second decoder of payloads, written from PROTOCOL.md §7 alone, in plain loops, must agree."""

import itertools
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pcodec import wrapped

from echo2p2p.testing import examples, golden
from echo2p2p.weights.anchor import encode_anchor
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.forms import Form
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.policy import FormPolicy

RAW, TIGHT, FAST, DENSE, PLANES = 0, 1, 2, 3, 4
FLOATS = {"bf16": (7, 0xFF), "f16": (10, 0x1F), "f32": (23, 0xFF)}
WIDTHS = {"bf16": 16, "f16": 16, "f32": 32, "i8": 8, "i16": 16, "i32": 32, "i64": 64}


class Body:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        assert self.at + count <= len(self.data)
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self):
        value, shift = 0, 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def stream(self, size):
        if size == 0:
            return b""
        head = self.number()
        coded = self.take(head >> 2)
        kind = head & 3
        if kind == 1:
            reader = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
            coded = reader.decompress(coded, max_output_size=size)
        elif kind == 2:
            coded = coded * size
        assert kind < 3
        assert len(coded) == size
        return coded

    def planes(self, count, bits):
        planes = [self.stream(count) for _ in range(bits // 8)]
        return [sum(plane[i] << 8 * p for p, plane in enumerate(planes)) for i in range(count)]

    def packed(self, count, bits):
        values = []
        while len(values) < count:
            size = min(count - len(values), 2**18)
            coded = self.take(self.number())
            assert coded[0] == 0
            part = np.zeros(size, dtype=f"<u{bits // 8}")
            file, _ = wrapped.FileDecompressor.new(bytes([4, 1]))
            chunk, read = file.chunk_decompressor(coded, f"u{bits}")
            chunk.read_page_into(coded[read:], size, part)
            values += part.tolist()
        return values


def moved(old, zigzag, bits, is_float):
    below = (1 << bits - 1) - 1

    def ordered(u):
        return u ^ below if is_float and u >> bits - 1 else u

    step = zigzag >> 1 if zigzag % 2 == 0 else -((zigzag + 1) >> 1)
    return ordered((ordered(old) + step) % (1 << bits))


def decode_block(form, dtype, body, old):
    bits, is_float = WIDTHS[dtype], dtype in FLOATS
    new = list(old)
    if form == RAW:
        size = bits // 8
        return [int.from_bytes(body.take(size), "little") for _ in range(len(body.data) // size)]
    if form == PLANES:
        rotated = body.planes(len(old), bits)
        return [u >> 1 | (u & 1) << bits - 1 for u in rotated] if is_float else rotated
    if form == FAST:
        changed, width, count = body.number(), body.number(), body.number()
        skip, at, where = (1 << 8 * width) - 1, 0, []
        for gap in body.planes(count, 8 * width):
            at += gap
            if gap != skip:
                where.append(at)
                at += 1
        zigzags = [(value + 1) % (1 << bits) for value in body.planes(changed, bits)]
    else:
        assert form in (TIGHT, DENSE)
        shift, mask = FLOATS.get(dtype, (0, 0))
        low = body.number()
        classes = [[] for _ in range(16)]
        for place, u in enumerate(old):
            exponent = u >> shift & mask
            kind = 0 if exponent == 0 else 1 + min(max(exponent - low, 0), 14)
            classes[kind].append(place)
        counts = [len(places) for places in classes]
        if form == TIGHT:
            counts = [body.number() for _ in range(16)]
        starts = body.number()
        bounds = [0] + [kind for kind in range(1, 16) if starts >> kind & 1] + [16]
        gaps, zigzags = [], []
        for first, past in itertools.pairwise(bounds):
            size = sum(counts[first:past])
            if form == TIGHT:
                gaps += body.packed(size, 32)
            zigzags += body.packed(size, max(16, bits))
        where = []
        if form == DENSE:
            where = [place for places in classes for place in places]
        for kind in range(16) if form == TIGHT else ():
            at = 0
            for gap in gaps[len(where) :][: counts[kind]]:
                where.append(classes[kind][at + gap])
                at += gap + 1
    for place, zigzag in zip(where, zigzags, strict=True):
        new[place] = moved(old[place], zigzag, bits, is_float)
    return new


def decode(payload, content, dtypes, state):
    """Return the new state (a list of integers a sequence), and the forms that were met."""
    assert payload[:4] == b"EW" + content + b"\0"
    at, forms = 4, []
    while at < len(payload):
        sequence, first, count, form, length = struct.unpack_from("<BQIBI", payload, at)
        body = Body(payload[at + 18 : at + 18 + length])
        old = state[sequence][first : first + count]
        state[sequence][first : first + count] = decode_block(form, dtypes[sequence], body, old)
        assert body.at == length
        assert len(old) == count
        at += 18 + length
        forms.append(form)
    return state, forms


def integers(data, dtype):
    return np.frombuffer(data, dtype=f"<u{WIDTHS[dtype] // 8}").tolist()


def test_the_golden_payloads_give_the_golden_state():
    values = golden.values()
    delta, anchor = (bytes.fromhex(values[f"{name} payload"]) for name in ("delta", "anchor"))
    result = integers(examples.RESULT_STATE, "bf16")
    base = integers(examples.BASE_STATE, "bf16")
    assert decode(delta, b"D", ["bf16"], [base]) == ([result], [FAST])
    nothing = [0] * len(result)
    assert decode(anchor, b"A", ["bf16"], [nothing]) == ([result], [PLANES])


@pytest.mark.parametrize(
    ("share", "reach", "form"),
    [(0.0005, 2, FAST), (0.03, 2, FAST), (0.03, 2, TIGHT), (0.9, 40, DENSE), (1.0, 2**15, RAW)],
)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "i16"])
def test_a_delta_of_each_form_is_read_alike(dtype, share, reach, form):
    rng = np.random.default_rng(7)
    count = 6000
    layout = plan_layout([("w", dtype, (count,), ())])
    if dtype == "i16":
        old = rng.integers(0, 2**16, count).astype("<u2")
    else:
        weights = rng.normal(0, 0.02, count).astype(np.float32)
        old = weights.view("<u4") >> 16 if dtype == "bf16" else weights.astype("<f2").view("<u2")
        old = old.astype("<u2")
    step = rng.integers(-reach, reach + 1, count) * (rng.random(count) < share)
    new = (old + step.astype(np.int64)).astype("<u2")
    policy = FormPolicy("one", frozenset({Form(form)}))
    payload = encode_delta(layout, old.tobytes(), new.tobytes(), policy=policy)
    state, forms = decode(payload, b"D", [dtype], [old.tolist()])
    assert state == [new.tolist()]
    assert forms == [form]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(sorted(WIDTHS)))
def test_any_state_and_any_other_are_read_alike(data, dtype):
    count = data.draw(st.integers(1, 40))
    size = count * WIDTHS[dtype] // 8
    old, new = (data.draw(st.binary(min_size=size, max_size=size)) for _ in range(2))
    layout = plan_layout([("w", dtype, (count,), ())])
    wanted = [integers(new, dtype)]
    delta = encode_delta(layout, old, new)
    assert decode(delta, b"D", [dtype], [integers(old, dtype)])[0] == wanted
    assert decode(encode_anchor(layout, new), b"A", [dtype], [[0] * count])[0] == wanted
