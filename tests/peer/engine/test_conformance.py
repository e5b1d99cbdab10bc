"""One suite for every engine, the fake one included: whatever a peer relies on."""

import os
import signal

import numpy as np
import pytest

from coordinator.model import TINY_QWEN3, prepare_model
from echo2p2p.errors import ChildError, EngineError
from echo2p2p.net.memory import FileMemory
from echo2p2p.testing.system import SimSharedMemory
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.arrays import from_tokens, to_logprobs, to_tokens
from echo2p2p.wire.messages import Lease, Sampling
from peer.engine.base import EngineSetup
from peer.engine.client import HfEngineProcess
from scenarios.fake_engine import EngineFaults, FakeEngine

STOP = 2


def tiny_qwen3_layout():
    """Return the layout of the built-in model, written down without torch."""
    entries = [("model.embed_tokens.weight", "bf16", (64, 128), ("lm_head.weight",))]
    for layer in range(3):
        shapes = {
            "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128),
            "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
            "self_attn.q_norm": (32,), "self_attn.k_norm": (32,),
            "mlp.gate_proj": (384, 128), "mlp.up_proj": (384, 128), "mlp.down_proj": (128, 384),
            "input_layernorm": (128,), "post_attention_layernorm": (128,),
        }  # fmt: skip
        entries += [(f"model.layers.{layer}.{name}.weight", "bf16", shape, ())
                    for name, shape in shapes.items()]  # fmt: skip
    return plan_layout([*entries, ("model.norm.weight", "bf16", (128,), ())])


LAYOUT = tiny_qwen3_layout()


class FakeSubject:
    def __init__(self, folder):
        self.memory = SimSharedMemory()
        self.model_config = "{}"

    def make(self):
        return FakeEngine()

    def kill(self, engine):
        engine.kill()


class ProcessSubject:
    def __init__(self, folder):
        prepare_model(TINY_QWEN3, folder)
        self.memory = FileMemory(folder / "shared")
        self.model_config = (folder / "config.json").read_text()

    def make(self):
        return HfEngineProcess()

    def kill(self, engine):
        os.kill(engine.child.pid, signal.SIGKILL)


def write_weights(state, seed):
    """Fill a state with bf16 normals of a size that makes every token likely."""
    values = np.random.default_rng(seed).normal(0, 0.1, LAYOUT.total_bytes // 2)
    state.view[:] = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def make_lease(lease_id="lease", prompt=(1, 8, 5, 7, 6, 17), seeds=(11, 12, 13), **changes):
    plain = {
        "lease_id": lease_id,
        "kind": "train",
        "prompt": from_tokens(list(prompt)),
        "samples": len(seeds),
        "seeds": list(seeds),
        "sampling": Sampling(temperature=1.0, top_p=1.0, top_k=0),
        "tokens_max": 9,
        "stop_ids": [STOP],
        "forced": None,
        "version": 4,
        "deadline_s": 60.0,
        "affinity": None,
    }
    return Lease(**{**plain, **changes})


async def proof_is_the_digest_of_the_loaded_state(engine, state):
    report = await engine.load(4, state)
    assert report.version == 4
    assert await engine.prove() == state_digest(LAYOUT, state.view)


async def swapping_two_tensors_changes_the_proof(engine, state):
    first, second = (tensor for tensor in LAYOUT.tensors if ".k_proj" in tensor.name
                     and ".2." not in tensor.name)  # fmt: skip
    before, digest = bytes(state.view), await engine.prove()
    for source, target in ((first, second), (second, first)):
        end = source.offset + source.bytes
        state.view[target.offset : target.offset + target.bytes] = before[source.offset : end]
    assert await engine.prove() == digest, "loaded weights do not change with the shared state"
    await engine.load(5, state)
    assert await engine.prove() == state_digest(LAYOUT, state.view) != digest
    state.view[:] = before
    await engine.load(4, state)
    assert await engine.prove() == digest


async def answers_fit_their_leases(engine, state):
    leases = [make_lease("a"), make_lease("b", prompt=(1, 9), seeds=(5,), tokens_max=1),
              make_lease("c", stop_ids=[], tokens_max=2)]  # fmt: skip
    answers = await engine.generate(leases)
    assert [answer.lease_id for answer in answers] == ["a", "b", "c"]
    for lease, answer in zip(leases, answers, strict=True):
        assert answer.seconds >= 0
        assert len(answer.samples) == lease.samples
        for sample in answer.samples:
            tokens, logprobs = to_tokens(sample.tokens), to_logprobs(sample.logprobs)
            assert 1 <= tokens.size == logprobs.size <= lease.tokens_max
            assert tokens.max() < 64
            assert np.isfinite(logprobs).all()
            assert (logprobs <= 0).all()
            assert (sample.finish == "stop") == (tokens[-1] in lease.stop_ids)
            assert STOP not in tokens[:-1] or not lease.stop_ids
            assert [(s.version, s.start, s.end) for s in sample.spans] == [(4, 0, tokens.size)]
    assert await engine.generate([]) == []


async def the_same_seed_gives_the_same_answer_in_any_company(engine, state):
    [[first, second]] = [a.samples for a in await engine.generate([make_lease(seeds=(31, 32))])]
    _, answer = await engine.generate([make_lease("x"), make_lease(seeds=(32, 33, 31))])
    assert answer.samples[2].tokens == first.tokens
    assert answer.samples[0].tokens == second.tokens
    many = await engine.generate([make_lease(seeds=range(24))])
    assert len({sample.tokens.data for sample in many[0].samples}) > 1


async def other_weights_or_another_prompt_give_other_answers(engine, state):
    lease = make_lease(seeds=range(24))
    before = [sample.tokens for sample in (await engine.generate([lease]))[0].samples]
    other = make_lease(prompt=(1, 9, 8, 4, 5, 17), seeds=range(24))
    assert [s.tokens for s in (await engine.generate([other]))[0].samples] != before
    bits = bytes(state.view)
    write_weights(state, seed=2)
    await engine.load(6, state)
    [answer] = await engine.generate([lease])
    assert [sample.tokens for sample in answer.samples] != before
    assert {sample.spans[0].version for sample in answer.samples} == {6}
    state.view[:] = bits
    await engine.load(4, state)
    assert [s.tokens for s in (await engine.generate([lease]))[0].samples] == before


async def forced_tokens_come_back_with_their_logprobs(engine, state):
    audit = make_lease(kind="audit", forced=from_tokens([7, 8, 9]), seeds=(1, 2))
    [answer] = await engine.generate([audit])
    for sample in answer.samples:
        assert to_tokens(sample.tokens).tolist() == [7, 8, 9]
        assert to_logprobs(sample.logprobs).shape == (3,)
        assert sample.finish == "length"


async def a_senseless_lease_is_refused_and_the_others_are_answered(engine, state):
    odd = make_lease("odd", seeds=(1,), samples=2)
    answers = await engine.generate([make_lease("a"), odd, make_lease("b")])
    assert [answer.lease_id for answer in answers] == ["a", "odd", "b"]
    assert [len(answer.samples) for answer in answers] == [3, 0, 3]
    assert [bool(answer.refused) for answer in answers] == [False, True, False]
    [only] = await engine.generate([odd])
    assert (only.samples, bool(only.refused)) == ((), True)


CHECKS = [
    proof_is_the_digest_of_the_loaded_state,
    swapping_two_tensors_changes_the_proof,
    answers_fit_their_leases,
    the_same_seed_gives_the_same_answer_in_any_company,
    other_weights_or_another_prompt_give_other_answers,
    forced_tokens_come_back_with_their_logprobs,
    a_senseless_lease_is_refused_and_the_others_are_answered,
]


@pytest.mark.parametrize(
    "kind", [FakeSubject, pytest.param(ProcessSubject, marks=pytest.mark.slow)]
)
async def test_an_engine_keeps_its_contract_until_it_is_killed(kind, tmp_path):
    """One engine for all checks: starting a real one takes seconds."""
    subject = kind(tmp_path)
    state = subject.memory.allocate("state", LAYOUT.total_bytes)
    write_weights(state, seed=1)
    engine = subject.make()
    try:
        info = await engine.start(
            EngineSetup(layout=LAYOUT.table, model_config=subject.model_config)
        )
        assert info.dtype == "float32"
        assert info.memory_bytes >= LAYOUT.total_bytes
        with pytest.raises(EngineError, match="no weights"):
            await engine.prove()
        for check in CHECKS:
            await check(engine, state)
        subject.kill(engine)
        with pytest.raises(ChildError, match=r"engine: .*SIGKILL"):
            await engine.generate([make_lease()])
        with pytest.raises(EngineError):
            await engine.load(7, state)
    finally:
        await engine.close()
        await engine.close()
        state.close()


async def test_the_fakes_faults_come_when_they_were_ordered(autojump_clock):
    faults = EngineFaults(die_at_generate=3, hang_at_generate=None, wrong_weights_at_load=2)
    engine = FakeEngine(start_s=5.0, load_s=1.0, seconds_per_token=0.5, faults=faults)
    state = SimSharedMemory().allocate("state", LAYOUT.total_bytes)
    await engine.start(EngineSetup(layout=LAYOUT.table, model_config="{}"))
    wrong = []
    for version in range(3):
        await engine.load(version, state)
        wrong.append(await engine.prove() != state_digest(LAYOUT, state.view))
    assert wrong == [False, True, False]
    lease = make_lease(seeds=(1,), stop_ids=[], tokens_max=4)
    assert autojump_clock.current_time() == 8.0
    for _ in range(2):
        [answer] = await engine.generate([lease])
        assert answer.seconds == answer.samples[0].tokens.length * 0.5
    spent = 2 * answer.seconds
    assert autojump_clock.current_time() == 8.0 + spent
    with pytest.raises(EngineError, match="SIGKILL"):
        await engine.generate([lease])
    assert autojump_clock.current_time() == 8.0 + 2.5 * answer.seconds


async def test_a_hanging_fake_is_given_up_at_its_deadline(autojump_clock):
    engine = FakeEngine(timeout_s=30.0, faults=EngineFaults(hang_at_generate=1, die_at_load=2))
    state = SimSharedMemory().allocate("state", LAYOUT.total_bytes)
    await engine.start(EngineSetup(layout=LAYOUT.table, model_config="{}"))
    await engine.load(1, state)
    with pytest.raises(EngineError, match="did not finish 'generate'"):
        await engine.generate([make_lease()])
    assert autojump_clock.current_time() == 30.0
    with pytest.raises(EngineError):
        await engine.generate([make_lease()])


async def test_fakes_answer_the_sorting_task_with_their_skill():
    engine = FakeEngine(skill=0.25)
    state = SimSharedMemory().allocate("state", LAYOUT.total_bytes)
    await engine.start(EngineSetup(layout=LAYOUT.table, model_config="{}"))
    await engine.load(1, state)
    [answer] = await engine.generate([make_lease(seeds=range(800))])
    right = from_tokens([5, 6, 7, 8, STOP])
    share = sum(sample.tokens == right for sample in answer.samples) / 800
    assert share == pytest.approx(0.25, abs=0.05)
