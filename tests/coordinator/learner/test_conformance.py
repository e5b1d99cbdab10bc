"""One suite for every learner, the fake one included: whatever the coordinator relies on."""

import os
import signal

import numpy as np
import pytest

from coordinator.learner.base import LearnerSetup, TrainBatch, TrainSample, WarmStart
from coordinator.learner.client import TorchLearnerProcess
from coordinator.model import TINY_QWEN3, prepare_model
from echo2p2p.errors import ChildError
from echo2p2p.net.memory import FileMemory
from echo2p2p.testing.system import SimSharedMemory
from echo2p2p.weights.layout import Layout
from scenarios.fake_learner import FakeLearner, LearnerFaults


class FakeSubject:
    def __init__(self, folder):
        self.memory = SimSharedMemory()
        self.checkpoints = {}

    def make(self):
        return FakeLearner(self.checkpoints)

    def kill(self, learner):
        learner.kill()


class ProcessSubject:
    def __init__(self, folder):
        prepare_model(TINY_QWEN3, folder)
        self.memory = FileMemory(folder / "shared")

    def make(self):
        return TorchLearnerProcess()

    def kill(self, learner):
        os.kill(learner.child.pid, signal.SIGKILL)


def make_batch(step, rows=4):
    rng = np.random.default_rng(step)
    samples = tuple(
        TrainSample(
            prompt=np.array([1, 8, 5, 7, 6, 17], dtype=np.uint32),
            tokens=rng.integers(4, 14, 3 + row % 3).astype(np.uint32),
            logprobs=np.full(3 + row % 3, -3.0, dtype=np.float32),
            advantage=(-1.0) ** row,
        )
        for row in range(rows)
    )
    total = sum(sample.tokens.size for sample in samples)
    return TrainBatch(step=step, samples=samples, tokens_total=total + 10)


async def started(learner, folder, **changes):
    seen = []
    setup = LearnerSetup(
        model_dir=folder,
        task="sort_digits",
        warm_start=WarmStart(steps=2, batch=4),
        seed=5,
        **changes,
    )
    ready = await learner.start(setup, lambda phase, figures: seen.append((phase, dict(figures))))
    return ready, seen


async def exported(learner, state):
    done = await learner.export(state, None)
    assert done.found_bytes is None
    return done.step, bytes(state.view)


@pytest.mark.parametrize(
    "kind", [FakeSubject, pytest.param(ProcessSubject, marks=pytest.mark.slow)]
)
async def test_a_learner_keeps_its_contract_until_it_is_killed(kind, tmp_path):
    """One learner and its successor for all checks: starting a real one takes seconds."""
    subject = kind(tmp_path)
    first, second = subject.make(), subject.make()
    folder = tmp_path / "checkpoints" / "one"
    try:
        ready, seen = await started(first, tmp_path)
        assert ready.step == 0
        assert [figures["step"] for phase, figures in seen if phase == "warm_start"] == [2.0]
        layout = Layout.from_table(ready.layout)
        assert layout.total_bytes == 2 * ready.parameters
        state = subject.memory.allocate("state", layout.total_bytes)
        step, bits = await exported(first, state)
        assert step == 0
        assert any(bits)

        prompts = [np.array([1, 8, 5], np.uint32), np.array([1, 8, 5, 7, 6, 17], np.uint32)]
        answers = await first.answer(prompts, tokens_max=4, stop_ids=[2])
        for answer in answers:
            assert 1 <= answer.size <= 4
            assert 2 not in answer[:-1]
        again = await first.answer(prompts[::-1], tokens_max=4, stop_ids=[2])
        assert [each.tolist() for each in again] == [each.tolist() for each in answers[::-1]]
        assert await exported(first, state) == (0, bits), "to answer changes nothing"

        report = await first.train(make_batch(0))
        assert report.step == 1
        assert report.seconds >= 0
        assert {"loss", "gradient_norm", "ratio_mean", "clipped_share", "kl_behaviour",
                "learning_rate"} <= report.metrics.keys()  # fmt: skip
        step, after_one = await exported(first, state)
        assert step == 1
        assert after_one != bits

        for wrong in (0, 2):
            with pytest.raises(ChildError, match=f"a batch for step {wrong}"):
                await first.train(make_batch(wrong))
        assert await exported(first, state) == (1, after_one), "a refused batch changes nothing"

        assert await first.save(folder) == 1
        with pytest.raises(ChildError, match="exists"):
            await first.save(folder)
        small = subject.memory.allocate("small", layout.total_bytes - 1)
        with pytest.raises(ChildError, match="shared state of"):
            await first.export(small, None)
        small.close()
        await first.train(make_batch(1))
        step, after_two = await exported(first, state)
        assert (step, after_two != after_one) == (2, True)

        resumed, seen = await started(second, tmp_path, checkpoint=folder)
        assert (resumed.step, resumed.layout) == (1, ready.layout)
        assert "warm_start" not in [phase for phase, _ in seen]
        assert await exported(second, state) == (1, after_one)
        await second.train(make_batch(1))
        assert await exported(second, state) == (2, after_two), "as if nothing had happened"

        subject.kill(first)
        with pytest.raises(ChildError, match=r"learner: .*SIGKILL"):
            await first.train(make_batch(2))
        with pytest.raises(ChildError):
            await first.save(tmp_path / "checkpoints" / "two")
        state.close()
    finally:
        for learner in (first, second):
            await learner.close()
            await learner.close()


async def test_the_fake_is_a_function_of_its_seed_and_step():
    states = []
    for seed in (1, 1, 2):
        learner = FakeLearner()
        ready = await learner.start(
            LearnerSetup(model_dir=None, task="", seed=seed), lambda phase, figures: None
        )
        state = SimSharedMemory().allocate("state", ready.layout.total_bytes)
        before = (await exported(learner, state))[1]
        await learner.train(make_batch(0))
        states.append((await exported(learner, state))[1])
        changed = np.frombuffer(before, "<u2") != np.frombuffer(states[-1], "<u2")
        assert changed.mean() == pytest.approx(0.02, abs=0.005)
    assert states[0] == states[1] != states[2]


async def test_the_fakes_faults_come_when_they_were_ordered(autojump_clock, tmp_path):
    disk = {}
    faults = LearnerFaults(die_at_step=2, hang_at_step=1, die_at_save=1)

    async def make(step):
        learner = FakeLearner(disk, start_s=3.0, step_s=2.0, save_s=1.0, timeout_s=50.0,
                              faults=faults)  # fmt: skip
        await started(learner, tmp_path, checkpoint=None)
        if step:
            await learner.train(make_batch(0))
        return learner

    learner = await make(1)
    with pytest.raises(ChildError, match="SIGKILL"):
        await learner.save(tmp_path)
    assert disk == {}
    learner = await make(1)
    start = autojump_clock.current_time()
    with pytest.raises(ChildError, match="did not finish 'train' within 50"):
        await learner.train(make_batch(1))
    assert autojump_clock.current_time() - start == 50.0
    with pytest.raises(ChildError):
        await learner.train(make_batch(1))
    absent = FakeLearner(disk)
    with pytest.raises(ChildError, match="no checkpoint"):
        await started(absent, tmp_path, checkpoint=tmp_path)
