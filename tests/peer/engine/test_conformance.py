"""One suite for every engine, the fake one included: whatever a peer relies on."""

import importlib.util
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import trio

from echo2p2p.errors import ChildError, EngineError
from echo2p2p.net.memory import FileMemory
from echo2p2p.testing.system import SimSharedMemory
from echo2p2p.weights.state import state_digest
from echo2p2p.weights.touched import TURNS, digest_selected, next_window
from echo2p2p.wire.arrays import from_tokens, to_logprobs, to_tokens
from echo2p2p.wire.messages import Lease, Sampling
from peer.engine.answers import check_answers
from peer.engine.base import EngineSetup, Selection, VllmSetup
from peer.engine.client import EngineProcess
from peer.touched import TouchLog
from scenarios.fake_engine import EngineFaults, FakeEngine
from scenarios.qwen3 import Qwen3, change_weights, write_weights

STOP = 2


MODEL = Qwen3()
LAYOUT = MODEL.layout()


class FakeSubject:
    def __init__(self, folder):
        self.memory = SimSharedMemory()

    def make(self):
        return FakeEngine(seconds_per_token=0.001)

    def kill(self, engine):
        engine.kill()

    def hang(self, engine):
        engine.hang()


class ProcessSubject:
    kind = "hf"

    def __init__(self, folder):
        self.memory = FileMemory(folder / "shared")

    def make(self):
        return EngineProcess(self.kind)

    def kill(self, engine):
        os.kill(engine.child.pid, signal.SIGKILL)

    def hang(self, engine):
        os.kill(engine.child.pid, signal.SIGSTOP)


class VllmSubject(ProcessSubject):
    kind = "vllm"


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
    write_weights(state.view, seed=2)
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


async def logprobs_are_those_of_the_tokens(engine, state):
    cut = Sampling(temperature=0.8, top_p=0.9, top_k=30)
    leases = [make_lease("a"), make_lease("b", sampling=cut)]
    for lease, answer in zip(leases, await engine.generate(leases), strict=True):
        for seed, sample in zip(lease.seeds, answer.samples, strict=True):
            changes = {"kind": "audit", "seeds": (seed,), "sampling": lease.sampling}
            audit = make_lease(forced=sample.tokens, **changes)
            [scored] = (await engine.generate([audit]))[0].samples
            gap = to_logprobs(scored.logprobs) - to_logprobs(sample.logprobs)
            assert np.abs(gap).max() <= 1e-4


async def a_prompt_that_is_too_long_is_refused_by_name(engine, state):
    long = make_lease("long", prompt=[5] * 120, tokens_max=9)
    refused, answered = await engine.generate([long, make_lease("a")])
    assert refused.refused == (
        "has a prompt of 120 tokens and wants 9 more; the model takes 128 in all"
    )
    assert (refused.samples, len(answered.samples)) == ((), 3)


async def a_senseless_lease_is_refused_and_the_others_are_answered(engine, state):
    odd = make_lease("odd", seeds=(1,), samples=2)
    answers = await engine.generate([make_lease("a"), odd, make_lease("b")])
    assert [answer.lease_id for answer in answers] == ["a", "odd", "b"]
    assert [len(answer.samples) for answer in answers] == [3, 0, 3]
    assert [bool(answer.refused) for answer in answers] == [False, True, False]
    [only] = await engine.generate([odd])
    assert (only.samples, bool(only.refused)) == ((), True)


async def a_delta_is_written_in_place_and_proved(engine, state, log):
    before = bytes(state.view)
    for version, density in ((5, 0.001), (6, 0.003)):
        digest = change(state, log, version, density)
        touched = log.since(version - 1)
        assert 0 < touched.count < LAYOUT.total_bytes / 2 / 200
        report = await engine.load(version, state, touched)
        assert (report.version, report.sparse) == (version, True)
        for turn in range(3):
            window = next_window(LAYOUT, turn)
            wanted = digest_selected(LAYOUT, state.view, touched.places, window)
            assert await engine.prove(Selection(touched, window)) == wanted
        assert await engine.prove() == digest
    [answer] = await engine.generate([make_lease()])
    assert {span.version for sample in answer.samples for span in sample.spans} == {6}
    state.view[:] = before
    report = await engine.load(7, state, log.since(4))
    assert not report.sparse, "the engine is at version 6, and what differs from 4 is of no use"
    assert await engine.prove() == state_digest(LAYOUT, before)


async def several_deltas_are_written_at_once(engine, state, log):
    before = bytes(state.view)
    await engine.load(4, state)
    change(state, log, 5, 0.001)
    digest = change(state, log, 6, 0.001)
    assert (await engine.load(6, state, log.since(4))).sparse
    assert await engine.prove() == digest
    state.view[:] = before
    await engine.load(4, state)


async def what_a_delta_keeps_silent_is_found_by_the_windows(engine, state, log):
    """The list of what was touched is not believed: here it lacks the last tensor."""
    before = bytes(state.view)
    change(state, log, 5, 0.001)
    last = LAYOUT.tensors[-1]
    state.view[last.offset] ^= 1
    touched = log.since(4)
    short = replace(touched, count=int((touched.places < last.offset).sum()))
    assert short.count < touched.count
    assert (await engine.load(5, state, short)).sparse
    found = []
    for turn in range(TURNS):
        window = next_window(LAYOUT, turn)
        wanted = digest_selected(LAYOUT, state.view, short.places, window)
        found.append(await engine.prove(Selection(short, window)) != wanted)
    assert any(found)
    state.view[:] = before
    await engine.load(4, state)


async def what_grows_is_told_and_adds_up(engine, state):
    leases = [
        make_lease("a", range(4, 60), range(10, 14), tokens_max=60),
        make_lease("scored", forced=from_tokens([7, 8, 9]), seeds=(1,)),
        make_lease("b", seeds=(5,), tokens_max=2),
    ]
    told = []
    answers = await engine.generate(leases, heard=told.append)
    silent = await engine.generate(leases)
    assert [one.samples for one in answers] == [one.samples for one in silent]
    assert len(told) > 4, "not only at the end"
    first = {(each.lease, each.sample) for grown in told[:2] for each in grown}
    assert {(0, number) for number in range(4)} <= first, "all of them at once"
    whole = {}
    for each in (each for grown in told for each in grown):
        assert each.version == 4
        tokens, logprobs = whole.setdefault((each.lease, each.sample), ([], []))
        tokens += each.tokens
        logprobs += each.logprobs
    samples = {(place, number): sample for place in (0, 2)
               for number, sample in enumerate(answers[place].samples)}  # fmt: skip
    assert whole.keys() == samples.keys()
    for key, sample in samples.items():
        assert whole[key][0] == to_tokens(sample.tokens).tolist()
        assert whole[key][1] == to_logprobs(sample.logprobs).tolist()


def change(state, log, version, density):
    before = bytes(state.view)
    digest = change_weights(LAYOUT, state.view, density, seed=version)
    bits = np.frombuffer(before, "<u2") != np.frombuffer(state.view, "<u2")
    log.add(version - 1, version, 2 * np.flatnonzero(bits))
    return digest


async def interrupted(engine, leases, between, heard=None):
    """Return answers to leases after at least one interruption, however busy the machine is."""
    stops = []

    async def stopped():
        stops.append(0)
        if len(stops) == 1:
            await between()

    async def interrupt():
        while True:
            engine.interrupt()
            await trio.sleep(0.004)

    for _ in range(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(interrupt)
            answers = await engine.generate(leases, between=stopped, heard=heard and heard())
            nursery.cancel_scope.cancel()
        if stops:
            return answers
    raise AssertionError("it was never interrupted")


async def a_batch_goes_on_under_other_weights(engine, state, log):
    """In flight: every token is of the version that its label says."""
    before = bytes(state.view)
    await engine.load(4, state)
    leases = [make_lease(name, range(4, 60), range(place, place + 4), tokens_max=60)
              for place, name in ((10, "a"), (20, "b"))]  # fmt: skip

    async def between():
        places = np.arange(0, LAYOUT.total_bytes, 2 * 301)
        np.frombuffer(state.view, "<u2")[places // 2] ^= 0x70  # by half, and more
        log.add(4, 5, places)
        assert (await engine.load(5, state, log.since(4))).sparse
        assert await engine.prove() == state_digest(LAYOUT, state.view)

    told = []

    def fresh():
        told.clear()
        return told.append

    answers = await interrupted(engine, leases, between, fresh)
    assert_told_with_versions(told, answers)
    after = bytes(state.view)
    outside = []
    for version, bits in ((4, before), (5, after)):
        state.view[:] = bits
        await engine.load(version, state)
        for lease, answer in zip(leases, answers, strict=True):
            for seed, sample in zip(lease.seeds, answer.samples, strict=True):
                parts = [(s.start, s.end) for s in sample.spans if s.version == version]
                whole = [(s.version, s.start) for s in sample.spans]
                assert whole in ([(4, 0)], [(4, 0), (5, sample.spans[-1].start)])
                assert sample.spans[-1].end == sample.tokens.length
                audit = make_lease("audit", range(4, 60), [seed], forced=sample.tokens)
                [scored] = (await engine.generate([audit]))[0].samples
                gaps = np.abs(to_logprobs(scored.logprobs) - to_logprobs(sample.logprobs))
                inside = np.zeros(gaps.size, dtype=bool)
                for start, end in parts:
                    inside[start:end] = True
                assert gaps[inside].max(initial=0) <= 1e-4
                if len(sample.spans) == 2:
                    outside.append(gaps[~inside].max())
    assert max(outside) > 1e-2, "the other version says otherwise"
    check_answers(leases, answers, [4, 5], 64)
    state.view[:] = before
    await engine.load(4, state)


def assert_told_with_versions(told, answers):
    """What was told of a batch that was interrupted is what it came to, labels and all."""
    heard = {}
    for each in (each for grown in told for each in grown):
        one = heard.setdefault((each.lease, each.sample), [])
        one += [(each.version, token) for token in each.tokens]
    for place, answer in enumerate(answers):
        for number, sample in enumerate(answer.samples):
            labels = [span.version for span in sample.spans for _ in range(span.start, span.end)]
            tokens = to_tokens(sample.tokens).tolist()
            assert heard[place, number] == list(zip(labels, tokens, strict=True))


async def an_interrupted_batch_goes_on_as_if_it_was_not(engine, state, log):
    lease = make_lease("a", range(4, 60), tokens_max=60)
    [wanted] = await engine.generate([lease])

    async def between():
        """Load nothing."""

    [answer] = await interrupted(engine, [lease], between)
    assert answer.samples == wanted.samples
    engine.interrupt()  # of nothing
    assert (await engine.generate([lease]))[0].samples == wanted.samples


DELTA_CHECKS = [
    a_batch_goes_on_under_other_weights,
    an_interrupted_batch_goes_on_as_if_it_was_not,
    a_delta_is_written_in_place_and_proved,
    several_deltas_are_written_at_once,
    what_a_delta_keeps_silent_is_found_by_the_windows,
]
CHECKS = [
    proof_is_the_digest_of_the_loaded_state,
    swapping_two_tensors_changes_the_proof,
    answers_fit_their_leases,
    the_same_seed_gives_the_same_answer_in_any_company,
    other_weights_or_another_prompt_give_other_answers,
    forced_tokens_come_back_with_their_logprobs,
    logprobs_are_those_of_the_tokens,
    a_prompt_that_is_too_long_is_refused_by_name,
    a_senseless_lease_is_refused_and_the_others_are_answered,
    what_grows_is_told_and_adds_up,
]


REAL = [pytest.mark.slow]
VLLM = [
    *REAL,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; make test-vllm installs it and runs this",
    ),
]
SETUP = EngineSetup(
    layout=LAYOUT.table,
    model_config=MODEL.config(),
    vllm=VllmSetup(cache_bytes=64 << 20),
    in_flight=True,
)


@pytest.mark.parametrize(
    "kind",
    [
        FakeSubject,
        pytest.param(ProcessSubject, marks=REAL),
        pytest.param(VllmSubject, marks=VLLM),
    ],
)
async def test_an_engine_keeps_its_contract_until_it_hangs_or_is_killed(kind, tmp_path):
    """One engine for all checks: starting a real one takes seconds."""
    subject = kind(tmp_path)
    state = subject.memory.allocate("state", LAYOUT.total_bytes)
    write_weights(state.view, seed=1)
    first, second = subject.make(), subject.make()
    try:
        info = await first.start(SETUP)
        assert info.dtype == "float32"
        assert info.memory_bytes >= LAYOUT.total_bytes
        with pytest.raises(EngineError, match="no weights"):
            await first.prove()
        for check in CHECKS:
            await check(first, state)
        log = TouchLog(subject.memory, LAYOUT.total_bytes)
        for check in DELTA_CHECKS:
            log.clear()
            await check(first, state, log)
        answers = await first.generate([make_lease()])
        subject.hang(first)
        with pytest.raises(EngineError, match=r"did not finish 'generate' within 0\.5 s"):
            await first.generate([make_lease()], timeout_s=0.5)
        with pytest.raises(EngineError):
            await first.load(7, state)
        await first.close()

        await second.start(SETUP)
        await second.load(4, state)
        assert await second.prove() == state_digest(LAYOUT, state.view)
        again = await second.generate([make_lease()])
        assert [answer.samples for answer in again] == [answer.samples for answer in answers]
        subject.kill(second)
        with pytest.raises(ChildError, match=r"engine: .*SIGKILL"):
            await second.generate([make_lease()])
        with pytest.raises(EngineError):
            await second.load(7, state)
    finally:
        for engine in (first, second):
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
