"""The loss against an oracle that loops over tokens in plain Python, and its gradient."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.learner.loss import LossSettings, token_loss
from echo2p2p.errors import ConfigError
from echo2p2p.rollouts.trajectory import LOGPROB_MIN


def make_settings(correction="none", cap=2.0):
    return LossSettings(clip_low=0.2, clip_high=0.28, correction=correction, correction_cap=cap)


def make_case(seed, rows=5, n=7):
    rng = np.random.default_rng(seed)
    logprobs = -3 * rng.random((rows, n))
    behaviour = logprobs + 0.5 * rng.normal(size=(rows, n))
    lengths = rng.integers(1, n + 1, rows)
    return logprobs, behaviour, rng.normal(size=rows), np.arange(n)[None] < lengths[:, None]


def oracle(logprobs, behaviour, advantages, mask, total, how):
    """Return loss, d loss / d logprobs, and the three metrics, token by token."""
    loss, gradient = 0.0, np.zeros_like(logprobs)
    ratios, bounded, kl = 0.0, 0, 0.0
    for i, j in zip(*np.nonzero(mask), strict=True):
        ratio, a = math.exp(logprobs[i, j] - behaviour[i, j]), advantages[i]
        ratios += ratio
        kl += ratio - 1 - math.log(ratio)
        weight = min(ratio, how.correction_cap) if how.correction == "tis" else ratio
        clipped = min(max(ratio, 1 - how.clip_low), 1 + how.clip_high)
        outside = clipped * a < weight * a
        bounded += outside or weight < ratio
        loss -= (clipped if outside else weight) * a / total
        gradient[i, j] = 0.0 if outside else -weight * a / total
    return loss, gradient, (ratios, bounded, kl)


def run(case, total, how):
    logprobs, behaviour, advantages, mask = (torch.tensor(array) for array in case)
    logprobs.requires_grad_()
    sums = token_loss(
        logprobs, behaviour, advantages, mask, tokens_total=total, settings=how
    )  # fmt: skip
    sums.loss.backward()
    return sums, logprobs.grad.numpy()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(["none", "tis"]), st.integers(1, 200))
def test_loss_gradient_and_metrics_equal_the_oracle(seed, correction, total):
    case, how = make_case(seed), make_settings(correction, cap=1.4)
    sums, gradient = run(case, total, how)
    loss, wanted, (ratios, bounded, kl) = oracle(*case, total, how)
    assert sums.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-9, atol=1e-12)
    assert (sums.tokens, sums.bounded) == (case[3].sum(), bounded)
    assert sums.ratio == pytest.approx(ratios)
    assert sums.kl == pytest.approx(kl)


def test_the_gradient_of_the_clipped_loss_is_the_one_of_finite_differences():
    logprobs, behaviour, advantages, mask = (torch.tensor(array) for array in make_case(3))

    def loss(x):
        return token_loss(
            x, behaviour, advantages, mask, tokens_total=10, settings=make_settings()
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(loss, logprobs.requires_grad_())


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_on_policy_the_gradient_is_the_policy_gradient(correction):
    logprobs, _, advantages, mask = make_case(4)
    _, gradient = run((logprobs, logprobs, advantages, mask), 9, make_settings(correction))
    np.testing.assert_allclose(gradient, -advantages[:, None] * mask / 9, atol=1e-12)


@pytest.mark.parametrize("correction", ["none", "tis"])
@pytest.mark.parametrize("rubbish", [math.nan, -math.inf, math.inf])
def test_padding_contributes_nothing_whatever_it_holds(correction, rubbish):
    logprobs, behaviour, advantages, mask = make_case(5)
    how = make_settings(correction)
    clean, gradient = run((logprobs, behaviour, advantages, mask), 9, how)
    dirty = np.where(mask, behaviour, rubbish)
    again, gradient_again = run((logprobs, dirty, advantages, mask), 9, how)
    assert again.loss.item() == clean.loss.item()
    assert again.kl == clean.kl
    np.testing.assert_array_equal(gradient_again, gradient)


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_micro_batches_add_up_to_the_batch(correction):
    case, how = make_case(6, rows=6), make_settings(correction)
    whole, gradient = run(case, 30, how)
    parts = [run(tuple(array[rows] for array in case), 30, how)
             for rows in (slice(0, 2), slice(2, 3), slice(3, 6))]  # fmt: skip
    assert sum(part.loss.item() for part, _ in parts) == pytest.approx(whole.loss.item())
    assert sum(part.bounded for part, _ in parts) == whole.bounded
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), gradient)


def test_an_unknown_correction_is_a_wrong_setting():
    with pytest.raises(ConfigError, match="none of none, tis"):
        make_settings("magic")


@pytest.mark.parametrize("correction", ["none", "tis"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_no_log_prob_that_a_stranger_may_report_makes_the_step_infinite(correction, advantage):
    logprobs = np.zeros((2, 400), np.float32)
    behaviour = np.full_like(logprobs, LOGPROB_MIN)
    advantages = np.full(2, advantage, np.float32)
    case = (logprobs, behaviour, advantages, np.ones_like(logprobs, bool))
    sums, gradient = run(case, 800, make_settings(correction))
    assert np.isfinite(gradient).all()
    assert np.isfinite([sums.loss.item(), sums.ratio, sums.kl]).all()
