"""vLLM in its process under the real keeper: it starts slowly, is killed, hangs, and comes back."""

import importlib.util
import json
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from echo2p2p.errors import ConfigError, EngineError
from echo2p2p.ids import Version
from echo2p2p.net.memory import FileMemory
from echo2p2p.net.process_memory import process_tree
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import InlineOffload
from echo2p2p.weights.state import state_digest
from echo2p2p.weights.touched import digest_selected, next_window
from echo2p2p.wire.arrays import to_logprobs
from peer.engine.base import EngineSetup, Selection, VllmSetup
from peer.engine.client import EngineProcess
from peer.keeper import EngineKeeper, WeightState
from peer.touched import TouchLog
from scenarios.middle import loose_lease as lease
from scenarios.qwen3 import Qwen3, change_weights, write_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; make test-vllm installs it and runs this",
    ),
]
MODEL = Qwen3()
LAYOUT = MODEL.layout()
SILENCE_S = 7.0
"""Less than a start takes, more than the time between two beats."""


class Slot:
    """A keeper of vLLM processes."""

    def __init__(self, folder, *, generate_timeout_s):
        self.journal = TraceJournal()
        self.phases, self.engines = [], []
        self.folder = folder
        self.state = FileMemory(folder / "memory").allocate("weights", LAYOUT.total_bytes)
        write_weights(self.state.view, seed=1)
        self.keeper = EngineKeeper(
            make_engine=self._make,
            setup=EngineSetup(
                layout=LAYOUT.table,
                model_config=MODEL.config(),
                vllm=VllmSetup(cache_bytes=64 << 20),
            ),
            restarts_max=3,
            generate_timeout_s=generate_timeout_s,
            journal=self.journal,
            offload=InlineOffload(),
        )

    def _make(self):
        self.engines.append(
            EngineProcess(
                "vllm",
                start_silence_s=SILENCE_S,
                log_file=self.folder / "engine.log",
                on_phase=self.phases.append,
            )
        )
        return self.engines[-1]

    def offer(self, version):
        digest = state_digest(LAYOUT, self.state.view)
        self.keeper.offer(WeightState(Version(version), digest, self.state))

    def lost(self):
        return [str(entry.fields["detail"]) for entry in self.journal.named("engine.lost")]

    async def wait_version(self, version):
        while self.keeper.version != version:
            await self.keeper.changed.park()

    @asynccontextmanager
    async def running(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keeper.run)
            with trio.fail_after(300):
                yield self.keeper
            nursery.cancel_scope.cancel()
        self.state.close()


async def test_vllm_is_waited_for_follows_versions_and_comes_back_after_a_kill_and_a_hang(tmp_path):
    slot = Slot(tmp_path, generate_timeout_s=20.0)
    slot.offer(0)
    async with slot.running() as keeper:
        await slot.wait_version(0)
        assert slot.lost() == [], "a start longer than the silence that is borne is no death"
        assert slot.phases[0].startswith("importing")
        assert slot.phases[-1] == "generating for a trial"
        (ready,) = slot.journal.named("engine.ready")
        assert (ready.fields["kind"], ready.fields["model"]) == ("vllm", "Qwen3ForCausalLM")
        assert ready.fields["tokens_per_s"] > 0
        (answer,) = await keeper.generate([lease("first")])
        assert {s.spans[0].version for s in answer.samples} == {0}
        await keeper.withdraw()
        change_weights(LAYOUT, slot.state.view, 0.001, seed=3)
        slot.offer(1)
        await slot.wait_version(1)

        os.kill(slot.engines[-1].child.pid, signal.SIGKILL)
        with pytest.raises(EngineError):
            await keeper.generate([lease("killed")])
        await slot.wait_version(1)
        (answer,) = await keeper.generate([lease("second")])
        assert {s.spans[0].version for s in answer.samples} == {1}

        os.kill(slot.engines[-1].child.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="did not finish 'generate' within"):
            await keeper.generate([lease("hung")])
        await slot.wait_version(1)
        await keeper.generate([lease("third")])
    killed, hung = slot.lost()
    assert killed.startswith("engine: died")
    assert "of SIGKILL" in killed
    assert hung.startswith("engine: did not finish 'generate' within 20.0 s")
    assert not any("\n" in line for line in (killed, hung))
    assert len(slot.engines) == 3


async def test_a_model_that_vllm_cannot_take_ends_the_keeper_at_once(tmp_path):
    slot = Slot(tmp_path, generate_timeout_s=20.0)
    slot.keeper._setup = EngineSetup(layout=LAYOUT.table, model_config='{"model_type": "none"}')
    with pytest.raises(EngineError, match="model configuration cannot be used"):
        await slot.keeper.run()
    assert len(slot.engines) == 1
    assert not slot.lost()[0].count("\n")


async def test_layers_that_cannot_be_read_back_are_refused_with_the_mend():
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "intermediate_size": 64,
    }
    engine = EngineProcess("vllm")
    setup = EngineSetup(
        layout=LAYOUT.table,
        model_config=json.dumps(experts),
        vllm=VllmSetup(cache_bytes=64 << 20),
    )
    try:
        with pytest.raises(ConfigError, match=r"cannot be read back.*use --engine transformers"):
            await engine.start(setup)
    finally:
        await engine.close()


async def test_two_ranks_prove_what_they_share_and_leave_nothing_behind(tmp_path):
    """Key heads that both ranks hold, a vocabulary that does not divide; on CPUs."""
    model = Qwen3(layers=2, key_heads=1, vocabulary=72, tied=False)
    layout = model.layout()
    state = FileMemory(tmp_path / "memory").allocate("weights", layout.total_bytes)
    write_weights(state.view, seed=1)
    pair = VllmSetup(cache_bytes=64 << 20, tensor_parallel_size=2)
    setup = EngineSetup(layout=layout.table, model_config=model.config(), vllm=pair, in_flight=True)
    # Much of the start is other processes' work: that is a pulse, too.
    engine, other = EngineProcess("vllm", start_silence_s=15.0), EngineProcess("hf")
    try:
        await engine.start(setup)
        family = list(process_tree(engine.child.pid))
        assert len(family) > 2
        await engine.load(Version(0), state)
        assert await engine.prove() == state_digest(layout, state.view)
        wanted = change_weights(layout, state.view, 0.001, seed=1)
        assert await engine.prove() != wanted
        await engine.load(Version(1), state)
        assert await engine.prove() == wanted
        before = np.frombuffer(bytes(state.view), "<u2")
        wanted = change_weights(layout, state.view, 0.001, seed=2)
        log = TouchLog(FileMemory(tmp_path / "log"), layout.total_bytes)
        log.add(1, 2, 2 * np.flatnonzero(before != np.frombuffer(state.view, "<u2")))
        touched, window = log.since(1), next_window(layout, 0)
        assert (await engine.load(Version(2), state, touched)).sparse
        ours = digest_selected(layout, state.view, touched.places, window)
        assert await engine.prove(Selection(touched, window)) == ours
        assert await engine.prove() == wanted
        (answer,) = await engine.generate([lease("sampled")])
        await other.start(setup)
        await other.load(Version(2), state)
        for sample in answer.samples:
            assert (await gaps(other, lease("scored"), sample)).max() <= 1e-4
        await both_ranks_change_between_the_same_two_tokens(engine, other, layout, state, log)
    finally:
        await engine.close()
        await other.close()
        state.close()
    assert not [pid for pid in family if Path(f"/proc/{pid}/stat").exists() and alive(pid)]


async def gaps(other, like, sample):
    """Return how far a sample's log-probs are from those of another engine, token by token."""
    audit = msgspec.structs.replace(like, kind="audit", forced=sample.tokens, seeds=[1], samples=1)
    (scored,) = await other.generate([audit])
    return np.abs(to_logprobs(sample.logprobs) - to_logprobs(scored.samples[0].logprobs))


async def both_ranks_change_between_the_same_two_tokens(engine, other, layout, state, log):
    """In flight: version 3 comes in the middle of a batch that began with version 2."""
    long = msgspec.structs.replace(lease("long"), tokens_max=90, stop_ids=[])
    old, loads = bytes(state.view), []

    async def between():
        if loads:
            return
        places = np.arange(0, layout.total_bytes, 2 * 301)
        np.frombuffer(state.view, "<u2")[places // 2] ^= 0x70
        log.add(2, 3, places)
        loads.append(await engine.load(Version(3), state, log.since(2)))
        assert await engine.prove() == state_digest(layout, state.view)

    async def interrupt():
        while True:
            engine.interrupt()
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(interrupt)
        (answer,) = await engine.generate([long], between=between)
        nursery.cancel_scope.cancel()
    assert [load.sparse for load in loads] == [True]
    new, outside = bytes(state.view), []
    for version, bits in ((2, old), (3, new)):
        state.view[:] = bits
        await other.load(Version(version), state)
        for sample in answer.samples:
            assert [(span.version, span.start > 0) for span in sample.spans] == [
                (2, False),
                (3, True),
            ]
            (part,) = [slice(s.start, s.end) for s in sample.spans if s.version == version]
            (rest,) = [slice(s.start, s.end) for s in sample.spans if s.version != version]
            found = await gaps(other, long, sample)
            assert found[part].max() <= 1e-4
            outside.append(found[rest].max())
    assert max(outside) > 1e-2, "the other version says otherwise"


def alive(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
