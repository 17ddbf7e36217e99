"""
Rollout correction and rewards with a KL in them, against verl 0.9.1 and OpenRLHF 0.11.2, every case.

How theirs map to ours: a threshold u is a truncation at u, "l_u" (IcePop) a mask; rejection by k1 is inverted (theirs bounds
pi_sampler / pi_old), so `l_u` of theirs is `1/u_1/l` of ours. Their weights are 0 on masked positions, ours mean nothing there.
"""

import plain
import pytest
import torch
from helpers import difference
from plain import BATCHES, TOLERANCE, params, reason

from trl_lossplus import AdaptiveKLController, LossPlusError, estimate_kl
from trl_lossplus.functional.advantages import token_rewards
from trl_lossplus.functional.correction import (
    correction_statistics,
    effective_sample_size,
    normalize_weights,
    parse_rejection,
    rejection_keep,
    rollout_importance_weights,
    weight_totals,
)
from trl_lossplus.functional.masking import masked_mean, row_means, select

BF16 = "the reference computes in bf16; we in float32"
K1 = "the reference bounds pi_sampler / pi_old in k1; we pi_old / pi_sampler, as everywhere"
CORR_DIFFERS = {
    r"^rollout_corr\|bf16_dtype\|.*\"rollout_is\"": BF16,
    r"^rollout_corr\|bf16_dtype\|.*(seq_sum_k3|(seq_mean|token)_k3.*0\.001)": BF16 + ", which decides otherwise near a bound",
    r"^rollout_corr\|(base|ragged|zero_adv|bf16_dtype)\|.*\"token_k1\".*0\.9_1\.3": K1,
    r"^rollout_corr\|(?!extreme).*seq_sum_k1\".*0\.9_1\.3": K1,
}
REWARD_DIFFERS = {
    r"^apply_kl_penalty\|bf16_dtype\|": BF16,
    r"^apply_kl_penalty\|extreme\|.*low_var_kl": "the reference bounds the value to +-10; we keep it (up to a log ratio of 20)",
}


def inverted(thresholds: str, names: str) -> str:
    """verl's thresholds with its sign of k1 turned round."""
    texts, wanted = str(thresholds).split(","), names.split(",")
    texts = texts * len(wanted) if len(texts) == 1 else texts
    pairs = (text.split("_") for text in texts)
    return ",".join(f"{1 / float(p[1])}_{1 / float(p[0])}" if len(p) == 2 else p[0] for p in pairs)


def logps(case: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = BATCHES[case["batch"]]
    return batch["old_log_prob"], batch["rollout_log_prob"], batch["response_mask"].bool()


def our_weights(case: dict) -> torch.Tensor | None:
    cfg = case["cfg"]
    if cfg.get("rollout_is") is None:
        return None
    old, sampler, mask = logps(case)
    bounds = [float(x) for x in str(cfg["rollout_is_threshold"]).split("_")]
    mode = f"{cfg['rollout_is']}_{'mask' if len(bounds) == 2 else 'truncate'}"
    low = bounds[0] if len(bounds) == 2 else None
    weights = rollout_importance_weights(old, sampler, mask, mode=mode, clip_min=low, clip_max=bounds[-1])
    return normalize_weights(weights, weight_totals(weights, mask)) if cfg.get("rollout_is_batch_normalize") else weights


def formula_weights(case: dict) -> torch.Tensor:
    """The same in float64, row by row: (rows with tokens, tokens) as a list of vectors put together."""
    cfg = case["cfg"]
    old, sampler, mask = logps(case)
    bounds = [float(x) for x in str(cfg["rollout_is_threshold"]).split("_")]
    rows = []
    for i, m in enumerate(mask):
        if m.any():
            d = (old[i, m].float() - sampler[i, m].float()).double()
            d = d if cfg["rollout_is"] == "token" else d.sum().expand(len(d))
            w = d.clamp(-20, 20).exp()
            rows.append(w.clamp(max=bounds[0]) if len(bounds) == 1 else w * ((w >= bounds[0]) & (w <= bounds[1])))
    every = torch.cat(rows)
    mean = every.mean() if cfg["rollout_is"] == "token" else torch.stack([row[0] for row in rows]).mean()
    return every / mean if cfg.get("rollout_is_batch_normalize") and mean > 1e-8 else every


@pytest.mark.parametrize("case", params("rollout_corr"))
def test_rollout_correction(case):
    """Weights and kept tokens; where the reference has a fault of its own, ours are finite and right."""
    cfg, why = case["cfg"], reason(CORR_DIFFERS, case)
    names, thresholds = cfg.get("rollout_rs"), cfg.get("rollout_rs_threshold")
    if case["error"] and "ZeroDivision" not in case["error"]:
        with pytest.raises(LossPlusError, match="needs rollout_rs_threshold|'geometric' is not known"):
            parse_rejection(names, thresholds)
        return
    old, sampler, mask = logps(case)
    weights = our_weights(case)
    same = True
    if weights is not None:
        ours = weights.expand(mask.shape)[mask]
        assert difference(ours, formula_weights(case)) < TOLERANCE
        if case["error"]:
            assert weights.expand(mask.shape)[mask].abs().sum() == 0
            assert effective_sample_size(weights, mask) == 0
            return
        same &= difference(ours, case["out"]["rollout_is_weights"][mask].float()) < TOLERANCE
    if names is not None:
        kept = case["out"]["response_mask"].bool()
        keep = rejection_keep(old, sampler, mask, parse_rejection(names, thresholds))[0] & mask
        same &= torch.equal(keep, kept)
        if case["batch"] != "bf16_dtype":
            as_theirs = rejection_keep(old, sampler, mask, parse_rejection(names, inverted(thresholds, names)))[0] & mask
            assert torch.equal(as_theirs, kept), "with the sign of k1 turned round"
    assert same == (why is None), "matches" if same else "differs"
    if why is None:
        check_statistics(case)


def check_statistics(case: dict) -> None:
    """Those of the reference's metrics that are not made of clamped weights, where the batch has no row without tokens."""
    old, sampler, mask = logps(case)
    if not mask.any(-1).all() or case["batch"] == "extreme":
        return
    ours = correction_statistics(old, sampler, mask)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "ppl_ratio"):
        key = f"rollout_corr/{name}"
        if key in case["metrics"]:
            assert ours[key].item() == pytest.approx(case["metrics"][key], rel=2e-4, abs=2e-6), name


@pytest.mark.parametrize("case", params("apply_kl_penalty"))
def test_kl_in_the_reward(case):
    """score - coef KL on every token; the mean KL that moves the controller is the mean over rows there, over tokens here."""
    batch, name = BATCHES[case["batch"]], case["cfg"]["kl_penalty"]
    mask = batch["response_mask"].bool()
    kl = estimate_kl(name, batch["old_log_prob"].float(), batch["ref_log_prob"].float())
    ours = batch["token_level_rewards"].float() - 0.001 * select(kl, mask)
    right = case["out"]["token_level_rewards"].float()
    assert (difference(ours, right) < TOLERANCE) == (reason(REWARD_DIFFERS, case) is None)
    if reason(REWARD_DIFFERS, case) is None:
        rows = row_means(kl, mask).mean()
        assert rows.item() == pytest.approx(case["metrics"]["current_kl"], rel=1e-4, abs=1e-6)
        controller = AdaptiveKLController(0.001, 0.1, 10000)
        controller.update(rows.item(), len(mask))
        assert controller.coef == pytest.approx(case["metrics"]["beta_next"], rel=1e-9)
        assert masked_mean(kl, mask).isfinite()


@pytest.mark.parametrize("case", params("openrlhf/reward"))
def test_openrlhf_reward(case):
    """
    The score, within +-10, on the last valid token, less .01 KL (k1) on every valid one.

    Theirs has numbers on masked positions too, and puts the score of a row without tokens on its last position; ours are 0 there.
    """
    batch = BATCHES[case["batch"]]
    mask = batch["response_mask"].bool()
    scores = select(batch["token_level_rewards"].float(), mask).sum(-1).clamp(-10, 10)
    kl = batch["old_log_prob"].float() - batch["ref_log_prob"].float()
    ours = token_rewards(scores, mask) - 0.01 * select(kl.clamp(-10, 10), mask)
    right = case["out"]["reward"].float()
    assert (difference(ours[mask], right[mask]) < TOLERANCE) == (reason(REWARD_DIFFERS, case) is None)
    assert torch.equal(ours[~mask], torch.zeros(int((~mask).sum())))


def test_no_case_is_lost():
    """(match, differ, refused alike) for each oracle; a case that moves from one to another must be named here."""
    assert plain.census("rollout_corr", CORR_DIFFERS) == {"rollout_corr": (259, 29, 20)}
    assert plain.census("apply_kl_penalty|openrlhf/reward", REWARD_DIFFERS) == {
        "apply_kl_penalty": (23, 5, 0),
        "openrlhf/reward": (7, 0, 0),
    }
