"""
What PPO adds, against verl 0.9.1 and OpenRLHF 0.11.2, every case: GAE with whitening, and the value loss.

How theirs map to ours: verl's gae is ours with its advantages whitened (ddof 1); OpenRLHF whitens with ddof 0, and its `no_std_norm`
only takes off the mean. Both keep numbers on masked positions, where ours are 0, so what is compared are the valid ones.
"""

import plain
import pytest
import torch
from helpers import difference
from plain import BATCHES, MODES, TOLERANCE, cases_of, leaf, params, reason

from trl_lossplus import LossBatch, LossSpec, Window, compute_advantages, compute_loss
from trl_lossplus.functional.advantages import gae
from trl_lossplus.functional.masking import moments, whiten

GAE = r'"estimator": "gae"'
BF16 = "the reference computes in bf16; we in float32"
DIFFERS = {
    r"^adv/gae\|bf16_dtype\|": BF16,
    r"^(value_loss|openrlhf/value)\|bf16_dtype\|": BF16,
    r"^openrlhf/adv\|bf16_dtype\|.*gamma": BF16 + " (with gamma 1 its values are exact in the sums)",
    r"^openrlhf/adv\|multiturn\|.*gamma": "the reference does not pass over masked tokens inside a row: it discounts them and "
    "bootstraps from value 0 there (with gamma = lambda = 1 the values cancel)",
}


def settle(case: dict, ours: dict, formula: dict, right: dict) -> None:
    """Ours equals the formula in float64 always, and the reference unless the case is in DIFFERS."""
    for name, value in ours.items():
        assert difference(value, formula[name]) < TOLERANCE, name
    same = all(difference(value, right[name].float()) < TOLERANCE for name, value in ours.items())
    assert same == (reason(DIFFERS, case) is None)


def settle_gae(case: dict, rewards: torch.Tensor, lam: float, normalize) -> None:
    """`normalize(advantages, mask, moments)` as the reference does it, of tensors (B, T) and of valid ones in float64."""
    batch, gamma = BATCHES[case["batch"]], case["cfg"].get("gamma", 1.0)
    mask, values = batch["response_mask"].bool(), batch["values"]
    own = gae(rewards, values, mask, gamma=gamma, gae_lambda=lam)
    advantages, returns = plain.gae(rewards, values, mask, gamma, lam)
    ours = {"advantages": normalize(own.advantages, mask)[mask], "returns": own.returns[mask]}
    want = {"advantages": normalize(advantages, torch.ones_like(advantages, dtype=torch.bool)), "returns": returns}
    settle(case, ours, want, {name: case["out"][name][mask] for name in ours})
    for x in own:
        assert x.dtype == torch.float32
        assert torch.equal(x[~mask], torch.zeros_like(x[~mask]))
    by_name = compute_advantages(
        "gae", rewards, mask, torch.arange(len(mask)), values=values, gamma=gamma, gae_lambda=lam, gae_lambda_critic=lam
    )
    assert torch.equal(by_name.advantages, own.advantages)
    assert torch.equal(by_name.returns, own.returns)


@pytest.mark.parametrize("case", params("adv/gae"))
def test_gae(case):
    """verl: whitened with ddof 1; on masked positions it leaves numbers."""
    batch = BATCHES[case["batch"]]
    settle_gae(case, batch["token_level_rewards"], case["cfg"].get("lam", 1.0), whiten)
    mask = batch["response_mask"].bool()
    assert mask.all() or (case["out"]["advantages"][~mask] != 0).any()


@pytest.mark.parametrize("case", params("openrlhf/adv", GAE))
def test_openrlhf_gae(case):
    """OpenRLHF: of its own token rewards (score at the end, less .01 KL); whitened with ddof 0, or only centred."""
    (reward,) = [other for other in cases_of("openrlhf/reward") if other["batch"] == case["batch"]]

    def normalize(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        stats = moments(x, mask)
        if case["cfg"].get("no_std_norm"):
            return x - stats.mean
        assert difference(whiten(x, mask)[mask], (x - stats.mean)[mask] / (stats.variance() + 1e-8).sqrt()) < TOLERANCE
        return whiten(x, mask, variance=stats.variance(0))

    settle_gae(case, reward["out"]["reward"].float(), case["cfg"].get("lambd", 1.0), normalize)


def check_value(case: dict, mode: str, clip: float | None, window: Window | None) -> None:
    """Loss, gradient and clip fraction of the value term, through compute_loss."""
    batch, right = BATCHES[case["batch"]], {"grad": case["grad"]["vpreds"], **case["out"]}
    mask, nothing = batch["response_mask"].bool(), torch.zeros(8, 12)
    v = leaf(batch["vpreds"], batch["vpreds"].dtype)
    critic = {"values": v, "old_values": batch["values"], "returns": batch["returns"]}
    spec = LossSpec(vf_coef=1.0, cliprange_value=clip, loss_aggregation=mode)
    out = compute_loss(LossBatch(nothing.clone().requires_grad_(), None, nothing, mask, **critic), spec, window)
    x = leaf(batch["vpreds"], torch.float64)
    counts = {} if window is None else {"num_tokens": window.num_tokens, "num_rows": window.num_rows}
    counts |= {} if window is None else {"world_size": window.world_size}
    losses, fraction = plain.value_rows(x, batch["values"], batch["returns"], mask, clip)
    loss = plain.reduce(losses, mode, mask.shape[1], **counts)
    bf16 = v.dtype == torch.bfloat16
    grad, want = (torch.autograd.grad(y, z)[0] for y, z in ((out.terms["value"], v), (loss, x)))
    # The gradient of a bf16 leaf is rounded to bf16's 8 bits on its way out.
    assert difference(grad, want) < (2**-8 if bf16 else TOLERANCE)
    assert torch.equal(grad[~mask], torch.zeros_like(grad[~mask]))
    ours = {"loss": out.terms["value"].detach(), "clipfrac": out.stats["value/clip_ratio"]}
    formula = {"loss": loss.detach(), "clipfrac": torch.tensor(fraction, dtype=torch.float64)}
    if not bf16:
        ours, formula = ours | {"grad": grad}, formula | {"grad": want}
    if "clipfrac" not in right:  # OpenRLHF reports it not
        assert difference(ours.pop("clipfrac"), formula.pop("clipfrac")) < TOLERANCE
    settle(case, ours, formula, right)
    assert torch.equal(out.loss, out.terms["policy"] + out.terms["value"])


@pytest.mark.parametrize("case", params("value_loss"))
def test_value_loss(case):
    """verl: clipped, within .5 unless it says otherwise."""
    cfg = case["cfg"]
    window = Window(cfg["batch_num_tokens"], 1, world_size=cfg["dp_size"]) if "dp_size" in cfg else None
    check_value(case, MODES[cfg.get("loss_agg_mode", "token-mean")], cfg.get("cliprange_value", 0.5), window)


@pytest.mark.parametrize("case", params("openrlhf/value"))
def test_openrlhf_value(case):
    """OpenRLHF: clipped only where it is asked for."""
    mode = "token_mean" if case["cfg"]["token_level_loss"] else "seq_mean_token_mean"
    check_value(case, mode, case["cfg"].get("clip_eps"), None)


def test_no_case_is_lost():
    """(match, differ, refused alike) for each oracle; a case that moves from one to another must be named here."""
    assert plain.census("adv/gae|value_loss|openrlhf/value", DIFFERS) == {
        "adv/gae": (18, 3, 0),
        "value_loss": (42, 7, 0),
        "openrlhf/value": (24, 4, 0),
    }
    assert plain.census("openrlhf/adv", DIFFERS, GAE) == {"openrlhf/adv": (19, 2, 0)}
    assert len(cases_of("openrlhf/adv")) == 63, "the other 42 are of estimators without a critic"
