"""The vLLM engine, in this process: exact weights in fused layers, honest log-probs."""

import importlib.util
import json
from dataclasses import dataclass

import numpy as np
import pytest

from coordinator.learner.layout import layout_of
from echo2p2p.errors import ConfigError, EngineError
from echo2p2p.net.memory import FileMemory
from echo2p2p.testing.leases import make_lease
from echo2p2p.weights.state import state_digest
from echo2p2p.weights.touched import digest_selected, next_window
from echo2p2p.wire.arrays import from_tokens, to_logprobs, to_tokens
from echo2p2p.wire.messages import Sampling, TensorSpec
from peer.engine.base import EngineSetup, Selection, VllmSetup
from peer.engine.calls import ProveCall, TouchedFile
from peer.touched import Touched, TouchLog
from scenarios.qwen3 import Qwen3, change_weights, write_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, by the dozen
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; make test-vllm installs it and runs this",
    ),
]
CACHE_BYTES = 64 << 20
KEPT = []
"""Whenever one of its engines is collected, vLLM takes the process's groups of ranks down."""


class OtherFamily:
    """A small model of another kind than the benchmarks', as transformers builds it."""

    positions = 128

    def __init__(self, kind, *, tied, **changes):
        self.tied = tied
        self.plain = {
            "model_type": kind,
            "vocab_size": 96,
            "hidden_size": 128,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": tied,
            **changes,
        }

    def config(self):
        return json.dumps(self.plain)

    def layout(self):
        from transformers import AutoConfig, AutoModelForCausalLM

        plain = dict(self.plain)
        config = AutoConfig.for_model(plain.pop("model_type"), **plain)
        return layout_of(AutoModelForCausalLM.from_config(config))[0]


MODELS = {
    "llama": OtherFamily("llama", tied=True),
    "qwen2, with biases": OtherFamily("qwen2", tied=False),
    "tied": Qwen3(),
    "untied": Qwen3(layers=2, heads=4, key_heads=1, vocabulary=72, positions=256, tied=False),
}


class World:
    """A model with large random weights, its state in a file, and an engine that has loaded it."""

    def __init__(self, folder, model):
        # What vLLM itself makes of a layer on CPUs, before the engine's extension replaces it.
        import vllm.model_executor.layers.utils as kernels

        if not hasattr(kernels, "packing_of_vllm"):
            kernels.packing_of_vllm = kernels.dispatch_cpu_unquantized_gemm
        self.packing = kernels.packing_of_vllm
        self.model, self.layout = model, model.layout()
        self.state = FileMemory(folder).allocate("state", self.layout.total_bytes)
        self.phases = []
        self.engine = self.make_vllm()
        self.other = None
        self.refill()

    def setup(self, **changes):
        plain = {"layout": self.layout.table, "model_config": self.model.config()}
        return EngineSetup(**{"vllm": VllmSetup(cache_bytes=CACHE_BYTES), **plain, **changes})

    def make_vllm(self, **changes):
        from peer.engine.vllm import VllmEngine

        KEPT.append(VllmEngine(self.setup(**changes), self.phases.append))
        return KEPT[-1]

    def make_hf(self):
        from peer.engine.hf import HfEngine

        engine = HfEngine(self.setup())
        engine.load(3, self.state.path)
        return engine

    def refill(self):
        write_weights(self.state.view, seed=1)
        self.engine.load(3, self.state.path)

    def digest(self):
        return state_digest(self.layout, self.state.view)

    def delta(self, folder, seed=1):
        """Change a thousandth; return the call that loads it and the one that proves it."""
        before = np.frombuffer(bytes(self.state.view), "<u2")
        change_weights(self.layout, self.state.view, 0.001, seed)
        log = TouchLog(FileMemory(folder), self.layout.total_bytes)
        log.add(3, 4, 2 * np.flatnonzero(before != np.frombuffer(self.state.view, "<u2")))
        touched, window = log.since(3), next_window(self.layout, 0)
        assert touched.count < self.layout.total_bytes / 2 / 100
        wanted = digest_selected(self.layout, self.state.view, touched.places, window)
        return Delta(self, touched, ProveCall.of(Selection(touched, window)), wanted)

    @property
    def inner(self):
        """vLLM's worker, with our extension in it."""
        [worker] = self.engine._llm.collective_rpc(lambda worker: worker.worker)
        return worker

    @property
    def live(self):
        """The model inside of vLLM's worker."""
        [model] = self.engine._llm.collective_rpc(lambda worker: worker.model_runner.get_model())
        return model


@dataclass
class Delta:
    """A thousandth of the elements, from version 3 to 4."""

    world: World
    touched: Touched
    call: ProveCall
    wanted: bytes

    def load(self):
        file = TouchedFile.of(self.touched)
        report = self.world.engine.load(4, self.world.state.path, file)
        assert report.sparse

    def is_proved(self):
        return self.world.engine.prove(self.call) == self.wanted


@pytest.fixture(scope="module", params=MODELS)
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp(request.param), MODELS[request.param])


PROMPTS = [[1, 5, 6, 7, 17], [1, 40], [1, *range(4, 44)], [9]]
SETTINGS = [
    Sampling(temperature=1.0, top_p=1.0, top_k=0),
    Sampling(temperature=0.7, top_p=0.9, top_k=0),
    Sampling(temperature=1.3, top_p=1.0, top_k=5),
    Sampling(temperature=0.9, top_p=0.8, top_k=20),
]


def tokens_of(generated):
    return [to_tokens(sample.tokens).tolist() for sample in generated.samples]


# --- weights --------------------------------------------------------------------------------------


def test_a_load_without_a_restart_is_proved_bit_for_bit(world):
    assert world.engine.prove() == world.digest()
    before = world.digest()
    write_weights(world.state.view, seed=2)
    assert world.engine.prove() == before, "loaded weights do not change with the shared state"
    world.engine.load(4, world.state.path)
    assert world.engine.prove() == world.digest() != before
    world.refill()
    assert world.engine.prove() == before
    assert world.phases[-1] == "generating for a trial"


def test_a_skipped_delta_of_a_thousandth_is_found_out_in_each_tensor(world):
    whole = bytes(world.state.view)
    wanted = change_weights(world.layout, world.state.view, 0.001, seed=1)
    changed = bytes(world.state.view)
    assert world.engine.prove() != wanted, "nothing was loaded"
    for tensor in world.layout.tensors:
        part = slice(tensor.offset, tensor.offset + tensor.bytes)
        assert whole[part] != changed[part]
        world.state.view[:] = changed
        world.state.view[part] = whole[part]
        world.engine.load(4, world.state.path)
        assert world.engine.prove() != wanted, tensor.name
    world.state.view[:] = changed
    world.engine.load(4, world.state.path)
    assert world.engine.prove() == wanted
    world.refill()


def test_a_loader_that_swaps_two_tensors_or_leaves_one_out_is_found_out(world, monkeypatch):
    honest, live = world.live.load_weights, world.live
    key, value = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")
    swap = {key: value, value: key}

    def swapping(weights):
        return honest((swap.get(name, name), tensor) for name, tensor in weights)

    def forgetful(weights):
        return honest((name, tensor) for name, tensor in weights if "layers.1.mlp" not in name)

    monkeypatch.setattr(live, "load_weights", swapping)
    world.engine.load(4, world.state.path)
    assert world.engine.prove() != world.digest()
    monkeypatch.setattr(live, "load_weights", forgetful)
    with pytest.raises(EngineError, match=r"left out model\.layers\.1\.mlp\.down_proj\.weight"):
        world.engine.load(4, world.state.path)
    with pytest.raises(EngineError, match="no weights"):
        world.engine.prove()
    monkeypatch.undo()
    world.refill()
    assert world.engine.prove() == world.digest()


@pytest.mark.parametrize(
    "path", ["lm_head", "model.layers.1.mlp.gate_up_proj", "model.layers.0.self_attn.qkv_proj"]
)
def test_a_packed_copy_that_keeps_the_old_weights_is_found_out(world, path):
    """vLLM's own packing, which it does on CPUs: the parameter is new, the kernel's copy is old."""
    layer = world.live.get_submodule(path)
    world.packing(layer, remove_weight=False)
    try:
        assert world.engine.prove() == world.digest(), "a fresh copy is right"
        wanted = change_weights(world.layout, world.state.view, 0.001, seed=1)
        world.engine.load(4, world.state.path)
        with pytest.raises(EngineError, match=f"the kernel of {path} does not use the weights"):
            world.engine.prove()
    finally:
        import torch

        layer.cpu_linear = torch.nn.functional.linear
    assert world.engine.prove() == wanted
    world.refill()


def test_a_delta_in_place_is_proved_and_is_all_that_was_written(world, tmp_path):
    delta = world.delta(tmp_path)
    delta.load()
    assert delta.is_proved()
    assert world.engine.prove() == world.digest()
    world.refill()


def test_a_delta_that_a_loader_skips_is_found_out_at_that_switch(world, tmp_path, monkeypatch):
    delta = world.delta(tmp_path)
    monkeypatch.setattr(world.inner, "echo_load_touched", lambda *_: None)
    delta.load()
    assert not delta.is_proved()
    monkeypatch.undo()
    world.refill()


def test_a_delta_that_goes_to_another_tensor_is_found_out_at_that_switch(
    world, tmp_path, monkeypatch
):
    delta, honest = world.delta(tmp_path), world.inner._echo_write
    specs = {spec.name: spec for spec in world.layout.table.tensors}
    key, value = (specs[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "kv")
    swap = {key.name: value, value.name: key}

    def swapping(tensor, spec, elements):
        honest(tensor, swap.get(spec.name, spec), elements)

    monkeypatch.setattr(world.inner, "_echo_write", swapping)
    delta.load()
    assert not delta.is_proved()
    monkeypatch.undo()
    world.refill()


def test_a_delta_that_leaves_one_tensor_out_is_found_out_whichever_it_is(
    world, tmp_path, monkeypatch
):
    delta, honest, left = world.delta(tmp_path), world.inner._echo_write, []

    def forgetful(tensor, spec, elements):
        if spec.name not in left:
            honest(tensor, spec, elements)

    monkeypatch.setattr(world.inner, "_echo_write", forgetful)
    before = bytes(world.state.view)
    for tensor in world.layout.tensors:
        left[:] = [tensor.name]
        world.refill()
        world.state.view[:] = before
        delta.load()
        assert not delta.is_proved(), tensor.name
    monkeypatch.undo()
    world.refill()


@pytest.mark.parametrize(
    "path", ["lm_head", "model.layers.1.mlp.gate_up_proj", "model.layers.0.self_attn.qkv_proj"]
)
def test_a_kernel_that_keeps_the_old_weights_is_found_out_after_a_delta(
    world, tmp_path, monkeypatch, path
):
    """With a column of each matrix that has changed, not by luck: none else is looked at."""
    import torch

    from peer.engine import vllm_layers

    monkeypatch.setattr(vllm_layers, "PROBED_ELEMENTS", 0)
    layer = world.live.get_submodule(path)
    world.packing(layer, remove_weight=False)
    try:
        delta = world.delta(tmp_path)
        delta.load()
        with pytest.raises(EngineError, match=f"the kernel of {path} does not use the weights"):
            delta.is_proved()
    finally:
        layer.cpu_linear = torch.nn.functional.linear
    assert delta.is_proved()
    world.refill()


def test_a_tied_head_that_came_loose_and_stays_old_is_found_out_after_a_delta(world, tmp_path):
    import torch

    if not world.model.tied:
        pytest.skip("this model's head is a tensor of its own: left out above")
    head = world.live.get_submodule("lm_head")
    old = head.weight
    head.weight = torch.nn.Parameter(old.clone(), requires_grad=False)
    try:
        delta = world.delta(tmp_path)
        delta.load()
        with pytest.raises(EngineError, match="has moved weights"):
            delta.is_proved()
        world.engine._llm.collective_rpc(_look_again)
        with pytest.raises(EngineError, match=r"lm_head\.weight differs from model\.embed"):
            delta.is_proved()
    finally:
        head.weight = old
        world.engine._llm.collective_rpc(_look_again)
    world.refill()


def test_weights_that_moved_are_found_out(world):
    """What a graph has captured goes on at the old place."""
    import torch

    norm = world.live.get_submodule("model.norm")
    old = norm.weight
    norm.weight = torch.nn.Parameter(old.clone(), requires_grad=False)
    with pytest.raises(EngineError, match="has moved weights"):
        world.engine.prove()
    norm.weight = old
    assert world.engine.prove() == world.digest()


def test_a_head_that_came_loose_is_found_out(world):
    """Both the parameter and the kernel are right, but not those of the tensor that is tied."""
    import torch

    head = world.live.get_submodule("lm_head")
    old = head.weight
    head.weight = torch.nn.Parameter(old.clone(), requires_grad=False)
    head.weight[3, 5] += 1
    engine, tied = world.engine, world.model.tied
    engine._llm.collective_rpc(_look_again)
    if tied:
        with pytest.raises(EngineError, match=r"lm_head\.weight differs from model\.embed"):
            engine.prove()
    else:
        assert engine.prove() != world.digest()
    head.weight = old
    engine._llm.collective_rpc(_look_again)
    assert engine.prove() == world.digest()


def _look_again(worker):
    from peer.engine.vllm_layers import pieces_of
    from peer.engine.vllm_worker import _places

    model, inner = worker.model_runner.get_model(), worker.worker
    inner._echo_pieces, inner._echo_places = pieces_of(model), _places(model)


def test_no_column_of_a_large_matrix_stays_unseen(world, monkeypatch):
    import torch

    from peer.engine import vllm_layers

    monkeypatch.setattr(vllm_layers, "PROBED_ELEMENTS", 1000)
    layer = world.live.get_submodule("model.layers.1.mlp.down_proj")
    old = layer.weight.clone()
    layer.weight[3, 150] += 1
    layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, old, bias)
    found = []
    rows, width = old.shape
    count = -(-1000 // rows)
    for turn in range(-(-width // count)):
        try:
            vllm_layers.check_kernels(world.live, turn)
        except EngineError:
            found.append(turn)
    layer.cpu_linear = torch.nn.functional.linear
    world.refill()
    assert found == [150 // count]


def test_a_tensor_at_an_odd_place_is_read_and_written_too():
    import torch

    from peer.engine.vllm_worker import _put_back, _view

    flat = torch.zeros(13, dtype=torch.uint8)
    for offset in (4, 3):
        spec = TensorSpec(name="w", dtype="f32", shape=[2], offset=offset, tied=[])
        tensor = _view(flat, spec)
        tensor.copy_(torch.tensor([1.5, -2.0]))
        _put_back(flat, spec, tensor)
        assert _view(flat, spec).tolist() == [1.5, -2.0]


# --- samples --------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_transformers_engine_under_all_settings(world):
    leases = [
        make_lease(f"{place} {number}", prompt, seed=100 * place, sampling=sampling)
        for place, prompt in enumerate(PROMPTS)
        for number, sampling in enumerate(SETTINGS)
    ]
    answers = world.engine.generate(leases)
    forced, wanted, lengths = [], [], []
    for lease, answer in zip(leases, answers, strict=True):
        for number, sample in enumerate(answer.samples):
            name, prompt = f"{lease.lease_id} {number}", to_tokens(lease.prompt)
            changes = {"forced": sample.tokens, "sampling": lease.sampling, "kind": "audit"}
            forced.append(make_lease(name, prompt, samples=1, **changes))
            wanted.append(to_logprobs(sample.logprobs))
            lengths.append(sample.tokens.length)
    assert sum(lengths) > 300
    ours = world.engine.generate(forced)
    theirs = world.make_hf().generate(forced)
    for scored in (ours, theirs):
        gaps = [
            np.abs(to_logprobs(answer.samples[0].logprobs) - logprobs).max()
            for answer, logprobs in zip(scored, wanted, strict=True)
        ]
        assert max(gaps) <= 1e-4


def test_a_token_that_the_settings_exclude_is_scored_so(world):
    cut = Sampling(temperature=1.0, top_p=1.0, top_k=1)
    [best] = tokens_of(world.engine.generate([make_lease("a", [9], samples=1, sampling=cut)])[0])
    other = (best[0] + 1) % 64
    lease = make_lease("b", [9], samples=2, forced=from_tokens([best[0], other]), sampling=cut)
    [answer] = world.engine.generate([lease])
    assert [to_logprobs(s.logprobs).tolist() for s in answer.samples] == [[0.0, -np.inf]] * 2


def test_samples_end_at_any_stop_token_or_at_their_limit(world):
    lease = make_lease("stops", PROMPTS[0], samples=64, stop_ids=list(range(30)), tokens_max=3)
    [generated] = world.engine.generate([lease])
    finishes = set()
    for sample in generated.samples:
        tokens = to_tokens(sample.tokens).tolist()
        finishes.add((sample.finish, len(tokens)))
        assert all(token >= 30 for token in tokens[:-1])
        assert (tokens[-1] < 30) == (sample.finish == "stop")
        assert len(tokens) <= 3 if sample.finish == "stop" else len(tokens) == 3
        [span] = sample.spans
        assert (span.version, span.start, span.end) == (3, 0, len(tokens))
    assert {("stop", 1), ("length", 3)} <= finishes, "some are empty but for the stop token"


def test_the_same_seeds_give_the_same_samples_again_and_after_another_version(world):
    leases = [make_lease(str(i), prompt, seed=100 * i) for i, prompt in enumerate(PROMPTS)]
    leases.append(make_lease("largest", PROMPTS[0], seed=(1 << 63) - 5))
    first = world.engine.generate(leases)
    again = world.engine.generate(leases)
    assert [a.samples for a in again] == [a.samples for a in first]
    write_weights(world.state.view, seed=2)
    world.engine.load(4, world.state.path)
    assert [a.samples for a in world.engine.generate(leases)] != [a.samples for a in first]
    world.refill()
    assert [a.samples for a in world.engine.generate(leases)] == [a.samples for a in first]


def test_samples_of_a_lease_share_their_prompt(world):
    prompt = [1, *range(4, 54)] * 2
    computed = []
    engine = world.engine._llm.llm_engine
    original = engine.step

    def watched():
        answers = original()
        computed.extend(len(a.prompt_token_ids) - a.num_cached_tokens for a in answers)
        return answers

    engine.step = watched
    world.refill()
    try:
        world.engine.generate([make_lease("shared", prompt, samples=4)])
    finally:
        engine.step = original
    assert sorted(computed) == [6, 6, 6, 102], "three blocks of 32 are computed once"


@pytest.mark.parametrize(
    ("prompt", "changes", "problem"),
    [
        ([5] * 300, {}, "a prompt of 300 tokens and wants 12 more; the model takes"),
        ([], {}, "a prompt of 0 tokens"),
        ([200], {}, "beyond the vocabulary"),
        ([5], {"forced": from_tokens([])}, "asks for nothing"),
        ([5], {"sampling": Sampling(temperature=0.0, top_p=1.0, top_k=0)}, "temperature"),
        ([5], {"sampling": Sampling(temperature=0.005, top_p=1.0, top_k=0)}, "vLLM's least"),
    ],
)
def test_a_lease_that_cannot_be_answered_is_refused_alone(world, prompt, changes, problem):
    odd, fine = make_lease("odd", prompt, **changes), make_lease("fine", [5])
    refused, answered = world.engine.generate([odd, fine])
    assert (refused.lease_id, refused.samples) == ("odd", ())
    assert problem in refused.refused
    assert (answered.lease_id, answered.refused) == ("fine", "")
    assert len(answered.samples) == 4


def test_generation_may_go_to_the_models_last_position(world):
    most = world.model.positions
    lease = make_lease("long", [5] * (most - 3), tokens_max=3, stop_ids=[])
    for sample in world.engine.generate([lease])[0].samples:
        assert (sample.tokens.length, sample.finish) == (3, "length")


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "int3"}, r"engine\.dtype: 'int3' is none of"),
        ({"vllm": VllmSetup(options={"logprobs_mode": "raw_logprobs"})},
         r"engine\.vllm\.options\.logprobs_mode: is not to be chosen"),
        ({"vllm": VllmSetup(options={"async_scheduling": True}), "in_flight": True},
         r"engine\.vllm\.options\.async_scheduling: is not to be chosen"),
        ({"vllm": VllmSetup(options={"kv_offloading_size": 1.0})},
         r"engine\.vllm\.options\.kv_offloading_size: is not to be chosen"),
        ({"vllm": VllmSetup(options={"spec_method": "ngram"})},
         r"engine\.vllm\.options\.spec_method: is not to be chosen"),
        ({"vllm": VllmSetup(options={"no_such_option": 1})}, "engine.vllm: .*no_such_option"),
        ({"vllm": VllmSetup(max_model_len=100_000)}, "engine.vllm: vLLM refuses: .*max_model"),
        ({"vllm": VllmSetup(cache_bytes=1000)}, r"engine\.vllm: vLLM refuses: "),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_used_are_refused_in_a_line(world, changes, says):
    with pytest.raises(ConfigError, match=says) as caught:
        world.make_vllm(**changes)
    assert "\n" not in str(caught.value)


def test_bfloat16_holds_the_weights_exactly_too_and_float16_does_not(world):
    engine = world.make_vllm(dtype="bfloat16")
    engine.load(3, world.state.path)
    assert engine.prove() == world.digest()
    assert engine.info().dtype == "bfloat16"
    other = world.make_vllm(dtype="float16")
    write_weights(world.state.view, seed=1)
    bits = world.state.view.cast("H")
    bits[1000] = 0x0080  # the least normal number of bfloat16, none of float16
    other.load(3, world.state.path)
    assert other.prove() != world.digest()
    world.refill()


def test_a_layout_of_another_model_is_refused(world):
    other = Qwen3(layers=1).layout()
    with pytest.raises(EngineError, match="the layout is not this model's: model"):
        world.make_vllm(layout=other.table)
