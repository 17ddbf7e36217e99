"""Rejection of tokens, normalization of weights and their statistics, by hand. Ratios pi_old / pi_sampler: 2, 1/2, 4 | 1, 1, masked."""

import math

import pytest
import torch
from helpers import tensors

from trl_lossplus import LossPlusError
from trl_lossplus.functional.correction import (
    REJECTIONS,
    correction_statistics,
    effective_sample_size,
    normalize_weights,
    parse_rejection,
    rejection_keep,
    weight_totals,
)

OLD = torch.full((2, 3), -1.0)
RATIOS = torch.tensor([[2.0, 0.5, 4.0], [1.0, 1.0, 77.0]])
SAMPLER = OLD - RATIOS.log()
MASK = torch.tensor([[True, True, True], [True, True, False]])
L2 = math.log(2)


@pytest.mark.parametrize(
    ("name", "threshold", "first_row"),
    [
        ("token_k1", "0.4_3", [1, 1, 0]),  # low_high bound pi_old / pi_sampler
        ("token_k1", "0.6_5", [1, 0, 1]),
        ("token_k1", 2.5, [1, 1, 0]),  # 1/2.5 to 2.5
        ("token_k2", 0.5 * L2**2 + 1e-6, [1, 1, 0]),
        ("token_k3", 1 - L2 + 1e-6, [1, 1, 0]),  # 2 - 1 - log 2 = .307; .5 - 1 + log 2 = .193; 4 - 1 - log 4 = 1.61
        ("token_k3", 0.2, [0, 1, 0]),
        ("seq_sum_k1", "1_4.1", [1, 1, 1]),  # the product is 4
        ("seq_sum_k1", "1_3.9", [0, 0, 0]),
        ("seq_sum_k2", 3 * L2**2 + 1e-6, [1, 1, 1]),  # (1 + 1 + 4) / 2 log^2 2
        ("seq_sum_k2", 3 * L2**2 - 1e-3, [0, 0, 0]),
        ("seq_sum_k3", 3.5 - 2 * L2 + 1e-6, [1, 1, 1]),
        ("seq_mean_k1", f"1_{4 ** (1 / 3) + 1e-6}", [1, 1, 1]),  # the geometric mean, 1.587
        ("seq_mean_k1", "1_1.58", [0, 0, 0]),
        ("seq_mean_k2", L2**2 + 1e-6, [1, 1, 1]),
        ("seq_mean_k3", (3.5 - 2 * L2) / 3 - 1e-3, [0, 0, 0]),
        ("seq_max_k2", 2 * L2**2 + 1e-6, [1, 1, 1]),
        ("seq_max_k3", 3 - 2 * L2 - 1e-3, [0, 0, 0]),
        ("token_k1,seq_max_k3", "0.4_3,9", [1, 1, 0]),
        ("token_k1,token_k2", "0.6_5,0.3", [1, 0, 0]),  # both must pass
    ],
)
def test_rejection_by_hand(name, threshold, first_row):
    keep, stats = rejection_keep(OLD, SAMPLER, MASK, parse_rejection(name, threshold))
    assert keep[0].int().tolist() == first_row
    assert keep[1].all(), "ratio 1 is always kept, and masked positions are not asked"
    assert keep.dtype == torch.bool
    if "," not in name:
        assert stats[f"rollout_rs/{name}"].item() == pytest.approx((3 - sum(first_row)) / 5)


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection_of_unscored_masked_and_far_tokens(name):
    """NaN of the sampler: no difference. Junk at masked positions: the same. e^+-1000: rejected. Empty mask: nothing to reject."""
    rules = parse_rejection(name, "1.5")
    unscored = rejection_keep(OLD, torch.full_like(OLD, math.nan), MASK, rules)[0]
    assert unscored.all()
    right = rejection_keep(OLD, SAMPLER, MASK, rules)[0]
    for junk in (math.nan, math.inf, -math.inf):
        assert torch.equal(rejection_keep(OLD.masked_fill(~MASK, junk), SAMPLER, MASK, rules)[0], right)
    for far in (1000.0, -1000.0):
        assert not rejection_keep(OLD, OLD + far, MASK, rules)[0][MASK].any()
    keep, stats = rejection_keep(OLD, SAMPLER, torch.zeros_like(MASK), rules)
    assert keep.all()
    assert all(value == 0 for value in stats.values())


@pytest.mark.parametrize(
    ("names", "thresholds", "message"),
    [
        ("geometric", "1", "rollout_rs='geometric' is not known"),
        ("seq_max_k1", "1", "'seq_max_k1' is not known. Did you mean"),
        ("", "1", "names no statistic"),
        ("token_k1", None, "needs rollout_rs_threshold"),
        ("token_k1,token_k2,token_k3", "1,2", "holds 2 thresholds; rollout_rs names 3"),
        ("token_k2", "0.1_0.2", "must be one number, the largest"),
        ("token_k1", "2_0.5", "low_high with low <= high"),
        ("token_k1", "-1", "one or two numbers > 0"),
        ("token_k1", "a_b", "one or two numbers > 0"),
        ("token_k3", "inf", "one or two numbers > 0"),
    ],
)
def test_bad_rules(names, thresholds, message):
    with pytest.raises(LossPlusError, match=message):
        parse_rejection(names, thresholds)


def test_rules_from_text():
    """A name twice counts once; one threshold serves all; two numbers may stand with a space; u alone is 1/u to u."""
    rules = parse_rejection("token_k1, token_k1,seq_mean_k1", "0.5 2")
    assert [(rule.name, rule.low, rule.high) for rule in rules] == [("token_k1", 0.5, 2.0), ("seq_mean_k1", 0.5, 2.0)]
    assert parse_rejection("token_k1", 4)[0][1:] == (0.25, 4.0)


def test_normalized_weights():
    """Token weights 1, 2, 3 and 2, 2 (mean 2); row weights 1 and 3 (mean 2); over two processes: one mean; all 0: stay 0."""
    token = torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 50.0]])
    assert normalize_weights(token, weight_totals(token, MASK))[MASK].tolist() == pytest.approx([0.5, 1, 1.5, 1, 1])
    row = torch.tensor([[1.0], [3.0]])
    assert normalize_weights(row, weight_totals(row, MASK))[:, 0].tolist() == [0.5, 1.5]
    assert weight_totals(row, MASK & torch.tensor([[True], [False]])).tolist() == [1.0, 1.0]
    both = sum(weight_totals(part, m) for part, m in zip(token.split(1), MASK.split(1), strict=True))
    assert torch.equal(both, weight_totals(token, MASK))
    zero = torch.zeros(2, 3)
    assert torch.equal(normalize_weights(zero, weight_totals(zero, MASK)), zero)
    nothing = weight_totals(token, torch.zeros_like(MASK))
    assert torch.equal(normalize_weights(token, nothing), token)


def test_effective_sample_size():
    """Equal weights: 1. One of five: 1/5. All 0 or no tokens: 0 (the reference divides by zero)."""
    assert effective_sample_size(torch.full((2, 3), 0.3), MASK).item() == pytest.approx(1.0)
    single = torch.zeros(2, 3)
    single[0, 1] = 7.0
    assert effective_sample_size(single, MASK).item() == pytest.approx(0.2)
    assert effective_sample_size(torch.zeros(2, 3), MASK).item() == 0.0
    assert effective_sample_size(torch.ones(2, 3), torch.zeros_like(MASK)).item() == 0.0
    assert effective_sample_size(torch.tensor([[2.0], [0.0]]), MASK).item() == pytest.approx(0.5)


def test_statistics_by_hand():
    """KL(sampler || policy) -(2 log 2) / 5, k3 (3.5 - 2 log 2) / 5, chi2 of tokens (4 + .25 + 16 + 1 + 1) / 5 - 1, of rows (16 + 1) / 2 - 1."""
    stats = correction_statistics(OLD, SAMPLER, MASK, torch.tensor([[4.0], [1.0]]))
    right = {
        "kl": -2 * L2 / 5,
        "k3_kl": (3.5 - 2 * L2) / 5,
        "chi2_token": 22.25 / 5 - 1,
        "chi2_seq": 17 / 2 - 1,
        "ppl_ratio": (4 ** (-1 / 3) + 1) / 2,
        "is_mean": 2.5,
        "is_min": 1.0,
        "is_max": 4.0,
        "is_zero": 0.0,
        "is_eff_sample_size": 25 / 34,
    }
    assert stats.keys() == {f"rollout_corr/{name}" for name in right}
    for name, value in right.items():
        assert stats[f"rollout_corr/{name}"].item() == pytest.approx(value, rel=1e-5), name
    dirty = correction_statistics(OLD.masked_fill(~MASK, math.nan), SAMPLER, MASK)
    assert all(torch.equal(dirty[name], stats[name]) for name in dirty)
    batch = tensors(spread=500.0)
    far = correction_statistics(batch["old_logps"], batch["rollout_logps"], batch["mask"])
    assert all(torch.isfinite(value) for value in far.values())
