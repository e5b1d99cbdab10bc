"""Distributions and drawing, against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.wire.messages import Sampling
from peer.engine.sampling import Distributions, Uniforms, choose

CPU = torch.device("cpu")


def sampling(temperature=1.0, top_p=1.0, top_k=0):
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k)


def oracle(logits, settings):
    """Return log-probs of one row, ``[vocabulary]``, in float64."""
    scaled = np.asarray(logits, dtype=np.float64) / settings.temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if settings.top_k:
        order = order[: settings.top_k]
    shares = np.exp(scaled[order] - scaled[order].max())
    shares /= shares.sum()
    kept, reached = [], 0.0
    for index, share in zip(order, shares, strict=True):
        kept.append(index)
        reached += share
        if settings.top_p < 1.0 and reached >= settings.top_p:
            break
    out = np.full(len(scaled), -np.inf)
    out[kept] = scaled[kept] - np.log(np.exp(scaled[kept]).sum())
    return out


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.lists(
        st.builds(
            sampling,
            temperature=st.floats(0.3, 2.0),
            top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
            top_k=st.integers(0, 14),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_each_row_has_its_own_temperature_top_k_and_top_p(seed, rows):
    logits = np.random.default_rng(seed).normal(0, 2, (len(rows), 11)).astype(np.float32)
    found = Distributions(rows, CPU).log_softmax(torch.from_numpy(logits)).numpy()
    for row, each in enumerate(rows):
        np.testing.assert_allclose(found[row], oracle(logits[row], each), rtol=1e-4, atol=1e-5)


def test_rows_that_are_kept_keep_their_settings_and_their_streams():
    rows = [sampling(0.5), sampling(2.0), sampling(1.0, top_k=1)]
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    shape = Distributions(rows, CPU)
    before = shape.log_softmax(logits)
    shape.keep([2, 0])
    torch.testing.assert_close(shape.log_softmax(logits[[2, 0]]), before[[2, 0]])
    whole, cut = Uniforms([5, 6, 7]), Uniforms([5, 6, 7])
    whole.draw()
    cut.draw()
    cut.keep([2, 0])
    for _ in range(80):
        np.testing.assert_array_equal(cut.draw(), whole.draw()[[2, 0]])


def test_a_stream_is_its_seeds_alone_and_is_as_it_was():
    draws = Uniforms([0, 2**63 - 1])
    first = np.stack([draws.draw() for _ in range(100)], axis=1)
    alone = Uniforms([2**63 - 1])
    assert [alone.draw()[0] for _ in range(100)] == first[1].tolist()
    assert first[:, :2].tolist() == [
        [0.011546754286331562, 0.24154919656271812],
        [0.9258067163090251, 0.18157025027346085],
    ]
    assert len(np.unique(first)) == 200


def test_tokens_are_drawn_as_often_as_their_probability_says():
    logprobs = torch.log(torch.tensor([[0.1, 0.0, 0.6, 0.3]])).repeat(4000, 1)
    u = (np.arange(4000) + 0.5) / 4000
    counts = torch.bincount(choose(logprobs, u), minlength=4).tolist()
    assert counts == [400, 0, 2400, 1200]


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(u):
    logprobs = torch.log(torch.tensor([[0.0, 0.7, 0.3, 0.0], [0.0, 0.0, 0.0, 1.0]]))
    tokens = choose(logprobs, np.array([u, u])).tolist()
    assert tokens[0] in {1, 2}
    assert tokens[1] == 3
