from dataclasses import dataclass

import msgspec

from echo2p2p.ids import RunId, Step, Version
from echo2p2p.testing.states import trained_step
from echo2p2p.weights.anchor import encode_anchor
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.chunks import split
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import build_header
from echo2p2p.weights.rebuild import rebuild_anchor
from echo2p2p.weights.state import state_digest

LAYOUT = plan_layout([("w", "bf16", (300_000,), ())])
OLD, STATE = trained_step(300_000, deviation=0.02, step=1e-4, seed=1)


@dataclass
class Published:
    payload: bytes

    def header(self, *, base=None):
        return build_header(
            content="model",
            run_id=RunId("run"),
            version=Version(7),
            chain_id="chain",
            step=Step(7),
            generation=0,
            base=base,
            result_digest=state_digest(LAYOUT, STATE),
            layout=LAYOUT,
            chunked=split(self.payload, 1 << 16),
        )


def test_a_holder_rebuilds_the_very_chunks_and_a_joiner_takes_them():
    published = Published(encode_anchor(LAYOUT, STATE))
    header = published.header()
    rebuilt = rebuild_anchor(header, LAYOUT, bytearray(STATE), threads=2)
    assert rebuilt is not None
    assert rebuilt.complete
    joiner = Assembly(header)
    for index in range(joiner.count):
        joiner.add(index, rebuilt.chunk(index), source="holder")
    assert joiner.payload() == published.payload


def test_another_version_a_delta_or_another_layout_is_not_rebuilt():
    published = Published(encode_anchor(LAYOUT, STATE))
    assert rebuild_anchor(published.header(), LAYOUT, OLD) is None
    base = (Version(6), state_digest(LAYOUT, OLD))
    assert rebuild_anchor(published.header(base=base), LAYOUT, STATE) is None
    other = plan_layout([("v", "bf16", (300_000,), ())])
    assert rebuild_anchor(published.header(), other, STATE) is None


def test_bytes_of_another_release_are_not_served():
    payload = encode_anchor(LAYOUT, STATE)
    published = Published(payload + b"\x00")
    header = published.header()
    assert rebuild_anchor(header, LAYOUT, STATE) is None
    same_length = msgspec.structs.replace(Published(payload).header(), index_digest=bytes(32))
    assert rebuild_anchor(same_length, LAYOUT, STATE) is None
