"""What a peer's network process takes while versions are applied: 1.2 times the model.

A process of its own follows a run of three versions on real files, and looks at itself all the
time. Its own memory is that which no file backs. Of a long payload it maps the file beside, and the
system takes such pages back as it likes; with a delta of few changes everything counts.
"""

import json
import subprocess
import sys

import pytest

from echo2p2p.ids import RunId, Step, Version
from echo2p2p.testing.relays import RUN_ID, RunKeys
from echo2p2p.testing.states import trained_step
from echo2p2p.weights.anchor import encode_anchor
from echo2p2p.weights.chunks import split
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.kernels import warm_up
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import build_header, manifest_id
from echo2p2p.weights.state import state_digest
from echo2p2p.wire import codec
from echo2p2p.wire.signing import sign_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COUNT = 1 << 25
LAYOUT = plan_layout([("w", "bf16", (COUNT,), ())])
KEYS = RunKeys()

CHILD = """
import json, sys, threading, time
from pathlib import Path
import trio
from echo2p2p.ids import PeerId
from echo2p2p.net.memory import FileMemory
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.system import SystemEntropy, ThreadOffload
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.relays import RUN_ID, RunKeys
from echo2p2p.weights.kernels import warm_up
from echo2p2p.weights.layout import plan_layout
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Signed
from peer.state import Weights
from peer.weights import Follower

folder, count, versions = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
layout = plan_layout([("w", "bf16", (count,), ())])
keys, journal, entropy = RunKeys(), TraceJournal(), SystemEntropy()
signed = [codec.decode((folder / f"{n}.manifest").read_bytes(), Signed) for n in range(versions)]


class Client:
    async def manifests(self, have, wait_s):
        at = 0 if have is None else have + 1
        if at == versions:
            await trio.sleep_forever()
        return [signed[at]]

    async def chunk(self, identity, index):
        await trio.lowlevel.checkpoint()
        with open(folder / identity.hex() / str(index), "rb") as file:
            return file.read()


def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    held = dict(line.split()[:2] for line in lines if "RSS" in line or "Rss" in line)
    return int(held["RssAnon:"]) * 1024, int(held["VmRSS:"]) * 1024


warm_up()
weights = Weights(layout, FileMemory(folder / "memory"))
peer_id, key = keys.identity("p")
relay = RelayNode(
    me=PeerId(peer_id), run_id=RUN_ID, run_public_key=keys.run_public_key, sign=key.sign,
    card=keys.card("p"), streams=TcpStreams(), endpoint=None, wants=lambda _: False,
    begin=lambda *what: follower.begin(*what), journal=journal,
    entropy=entropy, rng=entropy.rng("relay"),
)
follower = Follower(
    client=Client(), relay=relay, weights=weights, keeper=None,
    run_public_key=keys.run_public_key, offload=ThreadOffload(), journal=journal,
    stall_timeout_s=0.01,
)
before, peaks, over = memory(), {}, threading.Event()


def watch():
    while not over.is_set():
        at = -1 if weights.version is None else weights.version
        for kind, now, was in zip(("own", "all"), memory(), before):
            name = f"{kind} {at + 1}"
            peaks[name] = max(peaks.get(name, 0), now - was)
        time.sleep(0.001)


async def main():
    with trio.fail_after(200):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.run)
            while weights.version != versions - 1:
                await follower.applied.park()
            nursery.cancel_scope.cancel()


thread = threading.Thread(target=watch)
thread.start()
trio.run(main)
over.set()
thread.join()
refused = [entry.fields for entry in journal.named("version.refused")]
print(json.dumps({"peaks": peaks, "refused": refused}))
"""


def publish(folder, version: int, states: list[bytes]) -> int:
    """Write manifest and chunks of one version; return the payload's length."""
    result = states[version]
    if version == 0:
        payload, base = encode_anchor(LAYOUT, result), None
    else:
        payload = encode_delta(LAYOUT, states[version - 1], result)
        base = Version(version - 1), state_digest(LAYOUT, states[version - 1])
    chunked = split(payload, 1 << 18)
    header = build_header(
        content="model",
        run_id=RunId(RUN_ID),
        version=Version(version),
        chain_id="chain",
        step=Step(version),
        generation=0,
        base=base,
        result_digest=state_digest(LAYOUT, result),
        layout=LAYOUT,
        chunked=chunked,
    )
    signed = sign_record(KEYS.run_key, header)
    (folder / f"{version}.manifest").write_bytes(codec.encode(signed))
    chunks = folder / manifest_id(signed).hex()
    chunks.mkdir()
    for index in range(chunked.count):
        (chunks / str(index)).write_bytes(chunked.chunk(index))
    return len(payload)


def test_a_peer_takes_no_more_than_a_fifth_of_the_model_beside_the_model(tmp_path):
    warm_up()
    few = trained_step(COUNT, deviation=0.02, step=1e-6, seed=1)
    many = trained_step(COUNT, deviation=0.02, step=2e-5, seed=1)
    states = [*few, many[1]]
    sizes = [publish(tmp_path, version, states) for version in range(3)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(COUNT), "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["refused"] == []
    peaks = {name: peak / LAYOUT.total_bytes for name, peak in said["peaks"].items()}
    payloads = [size / LAYOUT.total_bytes for size in sizes]
    assert 0.01 < payloads[1] < 0.02 < 0.05 < payloads[2], "one of few changes and one of many"
    for version in range(3):
        assert peaks[f"own {version}"] <= 0.2, (peaks, payloads)
        at_most = 1.2 if version == 1 else 1.2 + payloads[version]
        assert peaks[f"all {version}"] <= at_most, (peaks, payloads)
