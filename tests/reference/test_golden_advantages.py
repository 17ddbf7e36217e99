"""
Our advantage estimators against verl 0.9.1 and OpenRLHF 0.11.2, every case (GAE: see test_golden_critic.py).

How theirs map to ours: verl sums token rewards over the whole row, masked positions too, so its scores are given to ours as they
are; its whitening (ddof 1) and OpenRLHF's (ddof 0) stand outside of our estimators; OpenRLHF shapes the score by the group and then
takes the KL of every token off (`token_kl_advantages` of the trainer). A group of one keeps its raw score in verl, and has no
advantage here. Masked positions are 0 here; in verl's remax they are not. Its gdpo whitens over tokens,
ours (TRL's) over rows, so its cases are put together from our grpo.
"""

import plain
import pytest
import torch
from helpers import difference
from plain import BATCHES, TOLERANCE, cases_of, params, reason

from trl_lossplus import compute_advantages
from trl_lossplus.functional.advantages import reward_to_go
from trl_lossplus.functional.masking import moments, select, whiten

VERL = (
    "adv/(grpo|grpo_vectorized|gdpo|grpo_passk|reinforce_plus_plus|reinforce_plus_plus_baseline|rloo|rloo_vectorized|opo|remax|gpg|"
    "optimal_token_baseline|tir_optimal_token_baseline)"
)
NOT_GAE = r'"estimator": "(?!gae)'
BF16 = "the reference computes in bf16; we in float32"
ONE = "the reference leaves a group of one its raw score; ours is 0"
TAIL = "the reference starts the tail of the longest row at the second longest's number of tokens, which is no position in rows with holes"
DIFFERS = {
    r"^adv/(?!grpo_vectorized|rloo_vectorized|gdpo).*\|bf16_dtype\|": BF16,
    r"^adv/gdpo\|bf16_dtype\|(?!.*use_components)": BF16,
    r"^adv/(grpo|grpo_vectorized|rloo|opo|gdpo)\|groups\|": ONE,
    r"^adv/(reinforce_plus_plus_baseline|gpg|optimal_token_baseline|tir_optimal_token_baseline)\|groups\|": ONE,
    r"^adv/optimal_token_baseline\|multiturn\|(?!.*zero_tail)": TAIL,
}
WHITENED = ("gdpo", "reinforce_plus_plus_baseline")


def group_ids(batch: dict) -> torch.Tensor:
    names = sorted(set(batch["index"]))
    return torch.tensor([names.index(name) for name in batch["index"]])


def whitened(x: torch.Tensor, mask: torch.Tensor, ddof: int = 1) -> torch.Tensor:
    return whiten(x, mask, variance=moments(select(x, mask), mask).variance(ddof))


def ours(case: dict) -> torch.Tensor:
    """What we give for a case of verl's: (B, T) advantages."""
    name, cfg, batch = case["oracle"].split("/")[1], case["cfg"], BATCHES[case["batch"]]
    mask, ids = batch["response_mask"].bool(), group_ids(batch)
    tokens = batch["token_level_rewards"].float()
    scores = tokens.sum(-1)
    scale = {"scale_rewards": "group" if cfg.get("norm_adv_by_std_in_grpo", True) else "none"}
    if name == "gdpo":
        if cfg.get("use_components"):
            columns = torch.stack([batch["gdpo_fmt"].float(), batch["gdpo_acc"].float()], 1)
        else:
            columns = scores.unsqueeze(1)
        weights = torch.tensor(cfg.get("gdpo_reward_weights", [1.0] * columns.shape[1]))
        parts = [compute_advantages("grpo", c, mask, ids, **scale).advantages for c in columns.unbind(1)]
        return whitened(sum(w * part for w, part in zip(weights, parts, strict=True)), mask)
    if name in ("grpo", "grpo_vectorized", "grpo_passk"):
        return compute_advantages(name.removesuffix("_vectorized"), scores, mask, ids, **scale).advantages
    if name == "reinforce_plus_plus":
        return whitened(compute_advantages(name, tokens, mask, ids, gamma=cfg.get("gamma", 1.0)).advantages, mask)
    if name == "reinforce_plus_plus_baseline":
        return whitened(compute_advantages(name, scores, mask, ids).advantages, mask)
    if name == "remax":
        return compute_advantages(name, tokens, mask, ids, reward_baselines=batch["reward_baselines"].float()).advantages
    if name == "gpg":
        return compute_advantages(name, scores, mask, ids, alpha_from="nonzero").advantages
    if name.endswith("optimal_token_baseline"):
        weights = batch["rollout_is_weights"] if cfg.get("use_is") else None
        more = {"old_logps": batch["old_log_prob"], "sum_pi_squared": batch["sum_pi_squared"], "rollout_weights": weights}
        tail = cfg.get("handle_zero_tail", True)
        return compute_advantages(name, tokens, mask, ids, handle_zero_tail=tail, **more).advantages
    return compute_advantages(name.removesuffix("_vectorized"), scores, mask, ids).advantages


@pytest.mark.parametrize("case", params(VERL))
def test_verl_estimators(case):
    batch = BATCHES[case["batch"]]
    mask = batch["response_mask"].bool()
    result = ours(case)
    assert result.dtype == torch.float32
    assert torch.equal(result[~mask], torch.zeros(int((~mask).sum())))
    if case["error"]:
        assert "at least 2 samples" in case["error"], "a group of one: 0 here"
        ids = group_ids(batch)
        alone = torch.tensor([(ids == i).sum() == 1 for i in ids])
        assert (result[alone] == 0).all()
        return
    right = case["out"]["advantages"].float()
    same = difference(result[mask], right[mask]) < TOLERANCE
    assert same == (reason(DIFFERS, case) is None), "matches" if same else "differs"
    if reason(DIFFERS, case) == ONE and case["oracle"].split("/")[1] not in WHITENED:
        ids = group_ids(batch)
        alone = torch.tensor([(ids == i).sum() == 1 for i in ids])
        assert (result[alone] == 0).all()
        assert difference(result[~alone], torch.where(mask, right, 0.0)[~alone]) < TOLERANCE, "the other groups are alike"


@pytest.mark.parametrize("case", params("openrlhf/adv", NOT_GAE))
def test_openrlhf_estimators(case):
    """The score shaped by the group, the KL of every token taken off, the reward from each token on; some whiten (ddof 0)."""
    batch, name = BATCHES[case["batch"]], case["cfg"]["estimator"]
    mask = batch["response_mask"].bool()
    ids = torch.arange(8) // 4
    scores = batch["token_level_rewards"].float().sum(-1).clamp(-10, 10)
    kl = select((batch["old_log_prob"].float() - batch["ref_log_prob"].float()).clamp(-10, 10), mask)
    shaped = {
        "reinforce": lambda: scores,
        "rloo": lambda: compute_advantages("rloo", scores, mask, ids).advantages,
        "reinforce_baseline": lambda: compute_advantages("reinforce_plus_plus_baseline", scores, mask, ids).advantages,
        "group_norm": lambda: compute_advantages("grpo", scores, mask, ids, eps=1e-9).advantages,
        "dr_grpo": lambda: compute_advantages("grpo", scores, mask, ids, scale_rewards="none").advantages,
        "flash_reinforce": lambda: compute_advantages("grpo", scores, mask, ids * 0, scale_rewards="none").advantages,
    }[name]()
    shaped = shaped.unsqueeze(-1).expand(mask.shape) if shaped.dim() == 1 else shaped
    result = select(shaped - 0.01 * reward_to_go(kl, mask), mask)
    result = whitened(result, mask, ddof=0) if name in ("reinforce", "reinforce_baseline") else result
    same = difference(result[mask], case["out"]["advantages"].float()[mask]) < TOLERANCE
    assert same == (reason(DIFFERS, case) is None), "matches" if same else "differs"


@pytest.mark.parametrize("batch", ["base", "ragged", "multiturn", "groups"])
@pytest.mark.parametrize("packed", [False, True], ids=["position", "number"])
@pytest.mark.parametrize("tail", [False, True])
def test_optimal_token_baseline_by_the_definition(batch, packed, tail):
    """Float64, one token at a time: the weighted mean return of the group's rows that have a token there."""
    data, name = BATCHES[batch], "tir_optimal_token_baseline" if packed else "optimal_token_baseline"
    mask, ids = data["response_mask"].bool(), group_ids(data)
    old, square, rewards = (data[key].double() for key in ("old_log_prob", "sum_pi_squared", "token_level_rewards"))
    place = mask.long().cumsum(-1) if packed else torch.arange(12).expand(8, 12)
    right = torch.zeros(8, 12, dtype=torch.float64)
    weight = (torch.where(mask, 1 - 2 * old.exp() + square, 0.0)).cumsum(-1)
    returns = torch.where(mask, rewards, 0.0).flip(-1).cumsum(-1).flip(-1)
    for i, t in mask.nonzero().tolist():
        mates = [j for j in range(8) if ids[j] == ids[i] and mask[j].any()]
        here = [(j, s) for j in mates for s in range(12) if mask[j, s] and place[j, s] == place[i, t]]
        total = sum(weight[j, s] for j, s in here)
        base = sum(weight[j, s] * returns[j, s] for j, s in here) / (total + 1e-8)
        going_on = [j for j in mates if mask[j].any() and place[j][mask[j]].max() >= place[i, t]]
        base = 0.0 if tail and len(going_on) == 1 else base
        right[i, t] = returns[i, t] - base if len(mates) > 1 else 0.0
    more = {"old_logps": data["old_log_prob"], "sum_pi_squared": data["sum_pi_squared"], "handle_zero_tail": tail}
    got = compute_advantages(name, data["token_level_rewards"], mask, ids, **more).advantages
    assert difference(got, right) < TOLERANCE


def test_no_case_is_lost():
    """(match, differ, refused alike) for each oracle; a case that moves from one to another must be named here."""
    assert plain.census(VERL, DIFFERS) == {
        "adv/grpo": (10, 4, 0),
        "adv/grpo_vectorized": (12, 2, 0),
        "adv/gdpo": (22, 6, 0),
        "adv/grpo_passk": (10, 2, 2),
        "adv/reinforce_plus_plus": (12, 2, 0),
        "adv/reinforce_plus_plus_baseline": (5, 2, 0),
        "adv/rloo": (5, 2, 0),
        "adv/rloo_vectorized": (7, 0, 0),
        "adv/opo": (5, 2, 0),
        "adv/remax": (6, 1, 0),
        "adv/gpg": (5, 2, 0),
        "adv/optimal_token_baseline": (13, 8, 0),
        "adv/tir_optimal_token_baseline": (15, 6, 0),
    }
    assert plain.census("openrlhf/adv", DIFFERS, NOT_GAE) == {"openrlhf/adv": (42, 0, 0)}
    assert len(cases_of("adv/.*")) == 189
