"""The transformers engine, in this process: exact weights, honest log-probs, independent rows."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from coordinator.learner.layout import layout_of, write_state
from coordinator.model import TINY_QWEN3, prepare_model
from echo2p2p.errors import ConfigError, EngineError
from echo2p2p.net.memory import FileMemory
from echo2p2p.testing.leases import make_lease
from echo2p2p.weights.state import state_digest
from echo2p2p.weights.touched import digest_selected, next_window
from echo2p2p.wire.arrays import from_tokens, to_logprobs, to_tokens
from echo2p2p.wire.messages import LayoutTable, Sampling, TensorSpec
from peer.engine import hf
from peer.engine.base import EngineSetup, Selection
from peer.engine.calls import ProveCall, TouchedFile
from peer.engine.hf import HfEngine
from peer.engine.hf_batch import Batch
from peer.touched import TouchLog
from scenarios.qwen3 import change_weights

pytestmark = pytest.mark.slow


class World:
    """A model with large random weights, its state in a file, and an engine that has loaded it."""

    def __init__(self, folder):
        torch.set_num_threads(1)
        prepare_model(TINY_QWEN3, folder)
        self.config = (folder / "config.json").read_text()
        torch.manual_seed(7)
        self.reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        with torch.no_grad():
            for parameter in self.reference.parameters():
                noise = 0.1 * torch.randn_like(parameter)
                parameter.copy_((parameter + noise).bfloat16().float())
        self.layout, tensors = layout_of(self.reference)
        self.memory = FileMemory(folder / "shared")
        self.state = self.memory.allocate("state", self.layout.total_bytes)
        write_state(self.layout, tensors, self.state.path)
        self.engine = self.make_engine()

    def make_engine(self, **changes):
        setup = EngineSetup(
            layout=changes.pop("layout", self.layout.table),
            model_config=changes.pop("model_config", self.config),
            **changes,
        )
        engine = HfEngine(setup)
        engine.load(3, self.state.path)
        return engine

    @torch.no_grad()
    def logprobs(self, prompt, tokens, temperature=1.0):
        """Return log-probs of ``tokens`` after ``prompt`` in one plain forward pass."""
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self.reference(ids).logits[0, len(prompt) - 1 : -1] / temperature
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("engine"))


PROMPTS = [[1, 5, 6, 7, 17], [1, 40], [1, *range(4, 44)], [9]]


def tokens_of(generated):
    return [to_tokens(sample.tokens).tolist() for sample in generated.samples]


def test_the_loaded_weights_are_proved_from_the_live_parameters(world):
    assert world.engine.prove() == state_digest(world.layout, world.state.view)
    with torch.no_grad():
        weight = world.engine._model.model.layers[1].mlp.up_proj.weight
        weight[3, 5] += 0.5
        assert world.engine.prove() != state_digest(world.layout, world.state.view)
        weight[3, 5] -= 0.5
    assert world.engine.prove() == state_digest(world.layout, world.state.view)


class Delta:
    """A thousandth of the elements, from version 3 to 4, that an engine of its own loads."""

    def __init__(self, world, folder):
        self.engine = world.make_engine()
        self.state, layout = world.state, world.layout
        self.before = bytes(self.state.view)
        self.digest = change_weights(layout, self.state.view, 0.001, seed=1)
        log = TouchLog(FileMemory(folder), layout.total_bytes)
        differ = np.frombuffer(self.before, "<u2") != np.frombuffer(self.state.view, "<u2")
        log.add(3, 4, 2 * np.flatnonzero(differ))
        touched, window = log.since(3), next_window(layout, 0)
        self.touched = TouchedFile.of(touched)
        self.call = ProveCall.of(Selection(touched, window))
        self.wanted = digest_selected(layout, self.state.view, touched.places, window)

    def is_proved(self):
        assert self.engine.load(4, self.state.path, self.touched).sparse
        return self.engine.prove(self.call) == self.wanted


@pytest.fixture
def delta(world, tmp_path):
    delta = Delta(world, tmp_path)
    yield delta
    delta.state.view[:] = delta.before


def test_a_delta_in_place_is_proved_and_is_all_that_was_written(delta):
    assert delta.is_proved()
    assert delta.engine.prove() == delta.digest


def test_a_delta_that_is_skipped_is_found_out_at_that_switch(delta, monkeypatch):
    monkeypatch.setattr(delta.engine, "_write", lambda *_: None)
    assert not delta.is_proved()


def test_a_delta_that_goes_to_another_tensor_is_found_out_at_that_switch(delta, monkeypatch):
    names = delta.engine._names
    key, value = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")
    monkeypatch.setattr(delta.engine, "_names", {**names, key: names[value], value: names[key]})
    assert not delta.is_proved()


def test_a_delta_that_leaves_one_tensor_out_is_found_out_whichever_it_is(delta, world, monkeypatch):
    honest, changed = delta.engine._write, bytes(delta.state.view)
    for number, tensor in enumerate(world.layout.tensors):
        delta.state.view[:] = delta.before
        delta.engine.load(3, delta.state.path)
        delta.state.view[:] = changed

        def forgetful(flat, part, left=number):
            if part.tensor != left:
                honest(flat, part)

        monkeypatch.setattr(delta.engine, "_write", forgetful)
        assert not delta.is_proved(), tensor.name
        monkeypatch.undo()


def test_a_tied_head_that_stays_old_is_found_out_at_that_switch(delta):
    head = delta.engine._model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with pytest.raises(EngineError, match="no longer tied to lm_head"):
        delta.is_proved()


def test_an_output_layer_that_came_loose_is_found_out(world):
    engine = world.make_engine()
    engine._model.lm_head.weight = torch.nn.Parameter(engine._model.lm_head.weight.clone())
    with pytest.raises(EngineError, match="no longer tied"):
        engine.prove()


def test_logprobs_are_those_of_a_plain_forward_pass_whatever_the_padding(world):
    leases = [make_lease(str(i), prompt, seed=100 * i) for i, prompt in enumerate(PROMPTS)]
    worst = 0.0
    for prompt, generated in zip(PROMPTS, world.engine.generate(leases), strict=True):
        for sample in generated.samples:
            tokens = to_tokens(sample.tokens).tolist()
            gap = world.logprobs(prompt, tokens).numpy() - to_logprobs(sample.logprobs)
            worst = max(worst, np.abs(gap).max())
    assert worst <= 1e-4


def test_a_sample_does_not_depend_on_its_batch_mates(world, monkeypatch):
    leases = [make_lease(str(i), prompt, seed=100 * i) for i, prompt in enumerate(PROMPTS)]
    together = [tokens_of(generated) for generated in world.engine.generate(leases)]
    for lease, tokens in zip(leases, together, strict=True):
        assert [tokens_of(g) for g in world.engine.generate([lease])] == [tokens]
    single = make_lease("one", PROMPTS[2], samples=1, seed=202)
    assert tokens_of(world.engine.generate([single])[0]) == [together[2][2]]
    monkeypatch.setattr(hf, "ROWS_MAX", 3)
    assert [tokens_of(generated) for generated in world.engine.generate(leases)] == together


def test_samples_end_at_a_stop_token_or_at_their_limit(world):
    lease = make_lease("stops", PROMPTS[0], samples=64, stop_ids=list(range(30)), tokens_max=3)
    [generated] = world.engine.generate([lease])
    finishes = set()
    for sample in generated.samples:
        tokens = to_tokens(sample.tokens).tolist()
        finishes.add(sample.finish)
        assert all(token >= 30 for token in tokens[:-1])
        assert (tokens[-1] < 30) == (sample.finish == "stop")
        assert len(tokens) <= 3 if sample.finish == "stop" else len(tokens) == 3
        [span] = sample.spans
        assert (span.version, span.start, span.end) == (3, 0, len(tokens))
    assert finishes == {"stop", "length"}


def test_generation_may_go_to_the_models_last_position(world):
    lease = make_lease("long", [5] * 125, tokens_max=3, stop_ids=[])
    for sample in world.engine.generate([lease])[0].samples:
        assert (sample.tokens.length, sample.finish) == (3, "length")


def test_sampling_settings_belong_to_each_lease(world):
    greedy = Sampling(temperature=1.0, top_p=1.0, top_k=1)
    hot = Sampling(temperature=2.0, top_p=1.0, top_k=0)
    leases = [
        make_lease("greedy", PROMPTS[0], sampling=greedy, stop_ids=[]),
        make_lease("hot", PROMPTS[0], sampling=hot, stop_ids=[]),
    ]
    first, second = world.engine.generate(leases)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 1
    assert all(not to_logprobs(sample.logprobs).any() for sample in first.samples)
    for sample in second.samples:
        tokens = to_tokens(sample.tokens).tolist()
        wanted = world.logprobs(PROMPTS[0], tokens, temperature=2.0).numpy()
        np.testing.assert_allclose(to_logprobs(sample.logprobs), wanted, atol=1e-4)


def test_forced_tokens_are_scored_and_not_sampled(world):
    forced = [7, 8, 2, 9, 2]
    audit = make_lease("audit", PROMPTS[2], samples=2, kind="audit", forced=from_tokens(forced))
    plain = make_lease("plain", PROMPTS[0])
    answers = world.engine.generate([audit, plain])
    assert [answer.lease_id for answer in answers] == ["audit", "plain"]
    assert tokens_of(answers[0]) == [forced, forced]
    assert answers[0].samples[0].finish == "stop"
    np.testing.assert_allclose(
        to_logprobs(answers[0].samples[1].logprobs),
        world.logprobs(PROMPTS[2], forced).numpy(),
        atol=1e-4,
    )
    assert tokens_of(answers[1]) == tokens_of(world.engine.generate([plain])[0])
    cut = Sampling(temperature=1.0, top_p=1.0, top_k=1)
    unlikely = world.engine.generate([make_lease("a", [9], forced=from_tokens([3]), sampling=cut)])
    assert to_logprobs(unlikely[0].samples[0].logprobs).tolist() == [-np.inf]


@pytest.mark.parametrize(
    ("prompt", "changes", "problem"),
    [
        ([5] * 128, {}, "a prompt of 128 tokens and wants 12 more; the model takes 128 in all"),
        ([5] * 125, {"tokens_max": 4}, "a prompt of 125 tokens and wants 4 more"),
        ([], {}, "a prompt of 0 tokens"),
        ([64], {}, "beyond the vocabulary"),
        ([5], {"forced": from_tokens([64])}, "beyond the vocabulary"),
        ([5] * 120, {"forced": from_tokens([5] * 9)}, "a prompt of 120 tokens"),
        ([5], {"forced": from_tokens([])}, "asks for nothing"),
        ([5], {"seeds": [1]}, "asks for nothing"),
        ([5], {"tokens_max": 0}, "asks for nothing"),
        ([5], {"sampling": Sampling(temperature=0.0, top_p=1.0, top_k=0)}, "temperature"),
    ],
)
def test_a_lease_that_cannot_be_answered_is_refused_alone(world, prompt, changes, problem):
    odd, fine = make_lease("odd", prompt, **changes), make_lease("fine", [5])
    refused, answered = world.engine.generate([odd, fine])
    assert (refused.lease_id, refused.samples) == ("odd", ())
    assert problem in refused.refused
    assert (answered.lease_id, answered.refused) == ("fine", "")
    assert tokens_of(answered) == tokens_of(world.engine.generate([fine])[0])


def test_an_engine_without_weights_says_so(world):
    engine = HfEngine(EngineSetup(layout=world.layout.table, model_config=world.config))
    with pytest.raises(EngineError, match="no weights"):
        engine.generate([make_lease("a", [5])])
    with pytest.raises(EngineError, match="no weights"):
        engine.prove()


def test_bfloat16_holds_the_weights_exactly_too(world):
    engine = world.make_engine(dtype="bfloat16")
    assert engine.prove() == state_digest(world.layout, world.state.view)
    assert world.make_engine(dtype="float16").prove() != engine.prove()
    with pytest.raises(ConfigError, match=r"engine\.dtype: 'int3'"):
        world.make_engine(dtype="int3")


def test_a_layout_of_another_model_is_refused(world):
    first, *others = world.layout.table.tensors
    size = world.layout.total_bytes

    def table(*specs):
        return LayoutTable(tensors=list(specs), total_bytes=size)

    def spec(**changes):
        plain = {"name": first.name, "dtype": "bf16", "shape": first.shape, "offset": 0,
                 "tied": first.tied}  # fmt: skip
        return TensorSpec(**{**plain, **changes})

    for layout in (
        table(spec(name="other"), *others),
        table(spec(shape=first.shape[::-1]), *others),
        table(spec(tied=[]), *others),
    ):
        with pytest.raises(EngineError, match="layout is not this model's"):
            world.make_engine(layout=layout)
    untied = json.dumps({**json.loads(world.config), "tie_word_embeddings": False})
    with pytest.raises(EngineError, match="does not tie lm_head"):
        world.make_engine(model_config=untied)


@pytest.mark.parametrize("model_config", ["{", "[]", '{"model_type": "no such"}', "{}"])
def test_a_configuration_that_makes_no_model_is_refused(world, model_config):
    with pytest.raises(EngineError, match="configuration cannot be used"):
        world.make_engine(model_config=model_config)


def test_keys_that_would_load_code_are_ignored(world):
    plain = {**json.loads(world.config), "auto_map": {"AutoModelForCausalLM": "evil--x.Model"},
             "_attn_implementation": "somebody/kernel", "attn_implementation": "somebody/kernel",
             "quantization_config": {"quant_method": "bitsandbytes"}}  # fmt: skip
    engine = world.make_engine(model_config=json.dumps(plain))
    assert engine.prove() == world.engine.prove()


def test_rows_that_have_ended_never_go_beyond_the_last_position():
    """GPT-2 learns its positions: one more is an index error, for all rows of the batch."""
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    batch = Batch(
        GPT2LMHeadModel(config).eval(),
        [np.arange(6, dtype=np.uint32), np.arange(2, dtype=np.uint32)],
        torch.device("cpu"),
        positions_max=config.n_positions,
    )
    with torch.inference_mode():
        for _ in range(5):
            batch.step(torch.tensor([1, 2]))
    assert batch.logits.isfinite().all()
