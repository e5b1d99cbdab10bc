"""The torch learner, in this process: packing, one step by hand, bounded batches, checkpoints."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coordinator.learner import checkpoint
from coordinator.learner.base import LearnerSetup, TrainBatch, TrainSample, WarmStart
from coordinator.learner.layout import layout_of
from coordinator.learner.rows import pack_rows
from coordinator.learner.torch_learner import TorchLearner
from coordinator.model import TINY_QWEN3, prepare_model
from echo2p2p.errors import ConfigError, LocalProtocolError, StoreError
from echo2p2p.net.memory import FileMemory
from echo2p2p.net.tokenizer import FolderTokenizer
from echo2p2p.tasks.base import Prompt
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.found import FoundElsewhere, room_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    prepare_model(TINY_QWEN3, folder)
    return folder


def make_learner(folder, report=lambda phase, figures: None, **changes):
    return TorchLearner(LearnerSetup(model_dir=folder, task="sort_digits", **changes), report)


def make_sample(rng, prompt, tokens, advantage):
    return TrainSample(
        prompt=rng.integers(4, 60, prompt).astype(np.uint32),
        tokens=rng.integers(4, 60, tokens).astype(np.uint32),
        logprobs=(-4 + 0.3 * rng.normal(size=tokens)).astype(np.float32),
        advantage=advantage,
    )


def make_batch(step, seed=0, rows=6):
    rng = np.random.default_rng([seed, step])
    samples = [
        make_sample(rng, int(rng.integers(1, 9)), int(rng.integers(1, 9)), float(rng.normal()))
        for _ in range(rows)
    ]
    return TrainBatch(step=step, samples=tuple(samples), tokens_total=64)


def weights(learner):
    return {name: value.clone() for name, value in learner.model.state_dict().items()}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_answers_are_the_likeliest_tokens_one_after_the_other_whatever_stands_beside(folder):
    learner = make_learner(folder, seed=3, micro_batch=2)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(4, 60, size).astype(np.uint32) for size in (5, 2, 9)]

    def greedy(prompt, stop):
        row = prompt.tolist()
        for _ in range(6):
            with torch.no_grad():
                row.append(int(learner.model(torch.tensor([row])).logits[0, -1].argmax()))
            if row[-1] == stop:
                break
        return row[prompt.size :]

    stop = greedy(prompts[0], -1)[2]  # one that is met
    wanted = [greedy(prompt, stop) for prompt in prompts]
    found = learner.answer(prompts, tokens_max=6, stop_ids=[stop])
    assert [answer.tolist() for answer in found] == wanted
    assert len(wanted[0]) < 6


def logprobs_of(learner, prompt, tokens):
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        found = learner.model(ids[:, :-1]).logits.log_softmax(-1)
    at = len(prompt) - 1
    return found[0, at:].gather(-1, ids[0, at + 1 :, None])[:, 0].numpy()


def rounded(learner):
    """Give the model the weights of its publish copy, which it has then by both ways."""
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.copy_(parameter.bfloat16())


def test_parity_is_of_the_weights_that_sampled_whatever_the_learner_has_learnt_since(
    folder, tmp_path
):
    learner = make_learner(folder, seed=3, parity_rows=2, parity_copies=2, learning_rate=1e-2)
    state = FileMemory(tmp_path).allocate("state", learner.ready().layout.total_bytes)
    rounded(learner)
    learner.export(state.path)
    prompts, tokens = ([5, 9], [7, 8, 9, 4]), ([30, 31, 32], [33, 34])
    own = [logprobs_of(learner, *pair) for pair in zip(prompts, tokens, strict=True)]
    off = [np.float32([0, 0.25, 0]), np.float32([0, 0])]

    def rows(step):
        return tuple(
            TrainSample(np.uint32(prompt), np.uint32(said), mine + more, value, step)
            for prompt, said, mine, more, value in zip(
                prompts, tokens, own, off, (1.0, -1.0), strict=True
            )
        )

    for step in range(3):  # the same rollouts, older by a step each time
        metrics = learner.train(TrainBatch(step, rows(0), tokens_total=5)).metrics
        assert metrics["parity_tokens"] == 5
        assert metrics["parity_mean"] == pytest.approx(0.25 / 5, abs=1e-5)
        assert metrics["parity_max"] == pytest.approx(0.25, abs=1e-5)
        assert metrics["parity_kl"] == pytest.approx((np.exp(-0.25) - 1 + 0.25) / 5, abs=1e-5)
    assert abs(logprobs_of(learner, prompts[0], tokens[0]) - own[0]).max() > 0.05, "it has learnt"
    for step in (3, 4):
        learner.export(state.path)  # the third copy drives out the first
        metrics = learner.train(TrainBatch(step, rows(0), tokens_total=5)).metrics
        assert ("parity_mean" in metrics) == (step == 3)
    metrics = learner.train(TrainBatch(5, rows(None), tokens_total=5)).metrics
    assert "parity_mean" not in metrics, "of several versions"
    state.close()


def test_rows_that_are_computed_again_are_bounded_and_none_by_default(folder, tmp_path):
    for limit in (0, 3):
        learner = make_learner(folder, seed=3, parity_rows=limit, parity_copies=2)
        state = FileMemory(tmp_path).allocate("state", learner.ready().layout.total_bytes)
        learner.export(state.path)
        batch = make_batch(0, rows=8)
        samples = tuple(replace(sample, step=0) for sample in batch.samples)
        metrics = learner.train(replace(batch, samples=samples)).metrics
        allowed = sum(sorted(sample.tokens.size for sample in samples)[-limit:]) if limit else 0
        assert ("parity_tokens" in metrics) == bool(limit)
        assert metrics.get("parity_tokens", 0.0) <= allowed
        state.close()


def test_rows_of_different_lengths_are_aligned_with_what_predicts_them():
    rng = np.random.default_rng(1)
    rows = [make_sample(rng, 4, 2, 1.0), make_sample(rng, 2, 1, -1.0)]
    packed = pack_rows(rows)
    first, second = rows
    assert packed.ids.tolist() == [[*first.prompt, *first.tokens],
                                   [*second.prompt, *second.tokens, 0, 0, 0]]  # fmt: skip
    assert packed.mask.tolist() == [[False, False, True, True], [True, False, False, False]]
    assert packed.behaviour[0, 2:].tolist() == first.logprobs.tolist()
    assert packed.behaviour[1, 0].item() == second.logprobs[0]
    assert packed.advantages.tolist() == [1.0, -1.0]


def test_one_step_is_adamw_on_the_gradient_of_each_row_alone(folder):
    """The oracle runs row by row, unpadded, with torch's own log-softmax and one plain AdamW."""
    learner = make_learner(folder, correction="none", warmup_steps=4, micro_batch=4)
    reference = make_learner(folder).model
    batch = make_batch(0)
    loss = 0.0
    for row in batch.samples:
        ids = torch.tensor([[*row.prompt, *row.tokens]], dtype=torch.int64)
        logprobs = reference(ids).logits[0].log_softmax(-1)
        for i, token in enumerate(row.tokens.tolist()):
            ratio = (logprobs[row.prompt.size + i - 1, token] - float(row.logprobs[i])).exp()
            a = row.advantage
            loss = loss - torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) / 64
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.optim.AdamW(reference.parameters(), 2e-4 / 4, betas=(0.9, 0.95), weight_decay=0.0).step()
    before = weights(learner)
    report = learner.train(batch)
    assert report.step == 1
    assert report.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert report.metrics["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert report.metrics["learning_rate"] == 2e-4 / 4
    for name, value in reference.state_dict().items():
        moved = weights(learner)[name]
        torch.testing.assert_close(moved, value, atol=2e-6, rtol=0)
        assert not torch.equal(moved, before[name])


def test_the_micro_batch_bounds_the_rows_and_not_the_result(folder):
    shapes, results = [], []
    for micro_batch in (2, 100):
        learner = make_learner(folder, micro_batch=micro_batch)
        learner.model.register_forward_pre_hook(
            lambda _, __, kwargs: shapes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
        )
        report = learner.train(make_batch(0, rows=5))
        results.append((report.metrics, weights(learner)))
    assert shapes == [2, 2, 1, 5]
    for key, value in results[0][0].items():
        assert value == pytest.approx(results[1][0][key], rel=1e-4), key
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], atol=2e-6, rtol=0)


def test_a_batch_without_gradient_is_a_step_that_moves_nothing(folder):
    learner = make_learner(folder)
    learner.train(make_batch(0))
    before = weights(learner)
    report = learner.train(TrainBatch(step=1, samples=(), tokens_total=100))
    assert (report.step, report.metrics["gradient_norm"], report.metrics["loss"]) == (2, 0.0, 0.0)
    assert_equal(weights(learner), before)


def test_a_gradient_that_is_not_finite_takes_no_step(folder):
    learner = make_learner(folder)
    before = weights(learner)
    good = make_batch(0)
    bad = TrainBatch(
        step=0,
        samples=(*good.samples[:-1], make_sample(np.random.default_rng(1), 3, 3, math.nan)),
        tokens_total=64,
    )
    with pytest.raises(ArithmeticError, match="not taken"):
        learner.train(bad)
    assert_equal(weights(learner), before)
    with pytest.raises(LocalProtocolError):
        learner.train(make_batch(1))
    twin = make_learner(folder)
    twin.train(good)
    learner.train(good)
    assert_equal(weights(learner), weights(twin))


def test_the_seed_decides_the_weights_and_the_warm_start(folder):
    seen = []
    warm = WarmStart(steps=11, batch=4)
    learners = [
        make_learner(folder, lambda phase, figures: seen.append((phase, figures)), seed=seed,
                     warm_start=warm)
        for seed in (3, 3, 4)
    ]  # fmt: skip
    assert_equal(weights(learners[0]), weights(learners[1]))
    norm = "model.embed_tokens.weight"
    assert not torch.equal(weights(learners[0])[norm], weights(learners[2])[norm])
    steps = [figures["step"] for phase, figures in seen if phase == "warm_start"]
    assert steps == [5.0, 10.0, 11.0] * 3
    assert all(math.isfinite(f["loss"]) for phase, f in seen if phase == "warm_start")


def test_a_warm_start_needs_no_warm_up(folder):
    losses = []
    make_learner(
        folder,
        lambda phase, figures: losses.append(figures.get("loss")),
        warm_start=WarmStart(steps=2, batch=4, warmup_steps=0),
    )
    assert math.isfinite(losses[-1])


def test_a_warm_start_learns_the_demonstrations_and_not_the_prompts(folder):
    losses = []
    make_learner(
        folder,
        lambda phase, figures: losses.append(figures.get("loss")),
        warm_start=WarmStart(steps=30, batch=64),
    )
    assert losses[-1] < 0.6 * losses[1]


def test_the_publish_copy_is_the_masters_rounded_to_bf16_tied_once(folder, tmp_path):
    learner = make_learner(folder)
    layout, _ = layout_of(learner.model)
    assert learner.ready().layout == layout.table
    first, *others = layout.table.tensors
    assert (first.name, first.tied) == ("model.embed_tokens.weight", ["lm_head.weight"])
    assert all(not other.tied for other in others)
    assert layout.total_bytes == 2 * learner.ready().parameters == 2 * 599_104
    state = FileMemory(tmp_path).allocate("state", layout.total_bytes)
    learner.export(state.path)
    for entry, spec in zip(layout.tensors, layout.table.tensors, strict=True):
        bits = np.frombuffer(state.view[entry.offset : entry.offset + entry.bytes], "<u2")
        found = torch.from_numpy((bits.astype("<u4") << 16).view("<f4").copy()).view(spec.shape)
        master = learner.model.state_dict()[spec.name]
        assert torch.equal(found, master.bfloat16().float())
    del bits
    state.close()


def test_what_a_step_has_changed_is_listed_for_the_encoder(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(TorchLearner, "_has_room", lambda _: True)
    learner, memory = make_learner(folder, learning_rate=1e-5), FileMemory(tmp_path)
    layout, _ = layout_of(learner.model)
    state = memory.allocate("state", layout.total_bytes)
    found = memory.allocate("found", room_for(layout))
    assert learner.export(state.path, found.path).found_bytes is None
    before = bytes(state.view)
    learner.train(make_batch(0))
    done = learner.export(state.path, found.path)
    assert done.step == 1
    assert done.found_bytes is not None
    after = bytes(state.view)
    assert before != after
    changes = FoundElsewhere(layout, np.frombuffer(found.view[: done.found_bytes], np.uint8))
    assert encode_delta(layout, before, after, find=changes) == encode_delta(layout, before, after)


def test_a_learner_on_the_cpu_leaves_the_search_to_the_encoder(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    learner, memory = make_learner(folder), FileMemory(tmp_path)
    layout, _ = layout_of(learner.model)
    state = memory.allocate("state", layout.total_bytes)
    found = memory.allocate("found", room_for(layout))
    for step in range(3):
        assert learner.export(state.path, found.path).found_bytes is None
        learner.train(make_batch(step))


def test_a_resumed_learner_goes_on_bit_by_bit(folder, tmp_path):
    straight = make_learner(folder, seed=2)
    straight.train(make_batch(0))
    straight.train(make_batch(1))
    first = make_learner(folder, seed=2)
    first.train(make_batch(0))
    assert first.save(tmp_path / "one") == 1
    torch.manual_seed(99)
    second = make_learner(folder, seed=2, checkpoint=tmp_path / "one")
    assert second.ready().step == 1
    assert_equal(weights(second), weights(first))
    second.train(make_batch(1))
    assert_equal(weights(second), weights(straight))
    third = second.save(tmp_path / "two")
    assert third == 2


def test_a_checkpoint_is_a_plain_hugging_face_folder(folder, tmp_path):
    learner = make_learner(folder)
    learner.train(make_batch(0))
    learner.save(tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    assert_equal(model.state_dict(), weights(learner))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert tokenizer("4132=").input_ids == FolderTokenizer(folder).encode(Prompt(text="4132="))
    assert tokenizer.decode([8, 5, 7, 6, 17]) == "4132="
    assert tokenizer.eos_token_id == 2
    assert json.loads((tmp_path / "one" / "position.json").read_text())["step"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one"]
    torch.load(tmp_path / "one" / "optimizer.pt", weights_only=True)


def test_a_checkpoint_appears_whole_or_not_at_all(folder, tmp_path, monkeypatch):
    learner = make_learner(folder)
    target = tmp_path / "deep" / "one"
    events = []
    sync, rename = os.fsync, Path.rename

    def watched_sync(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    def watched_rename(self, new):
        events.append("rename")
        return rename(self, new)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    learner.save(target)
    partial = target.with_name("one.partial")
    last = events.index("rename")
    assert set(events[:last]) == {partial, *(partial / path.name for path in target.iterdir())}
    assert events[last + 1 :] == [target.parent]

    def refuse(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreError, match="the disk is full: free some space"):
        learner.save(tmp_path / "deep" / "two")
    assert [path.name for path in target.parent.iterdir()] == ["one"]
    with pytest.raises(StoreError, match="never overwritten"):
        learner.save(target)


def test_a_folder_that_is_no_checkpoint_is_refused(folder, tmp_path):
    learner = make_learner(folder)
    learner.save(tmp_path / "one")
    for name, content, problem in [
        ("optimizer.pt", b"junk", "no checkpoint that can be resumed"),
        ("position.json", b'{"format": 9, "step": 1}', "unknown format 9"),
        ("position.json", b"[]", "no checkpoint that can be resumed"),
    ]:
        (tmp_path / "one" / name).write_bytes(content)
        with pytest.raises(StoreError, match=problem):
            checkpoint.read_position(tmp_path / "one")


def test_wrong_settings_are_named(folder):
    with pytest.raises(ConfigError, match=r"learner\.correction"):
        make_learner(folder, correction="magic")
    with pytest.raises(ConfigError, match=r"task\.options\.size"):
        make_learner(folder, task_options={"size": 4}, warm_start=WarmStart(steps=1))
