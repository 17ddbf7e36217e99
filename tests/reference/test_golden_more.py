"""
The other policy losses of verl 0.9.1: loss and gradient of every measured case (see test_golden_policy.py for the first ones).

How theirs map to ours: clip_ratio_low and clip_ratio_high hold the thresholds of dppo_*; its clip_ratio_c (3 unless set) is our
`dppo_ratio_max`; bypass_mode is our `rollout_ppo` (loss_type ppo_clip, with a dual clip of 3) and `rollout_is` (reinforce), its
rollout_is_threshold our `is_ratio_min`, `is_ratio_max` and `is_mode`, its level our `importance_sampling_level`.
"""

import plain
import pytest
import torch
from helpers import difference
from plain import BATCHES, MODES, TOLERANCE, leaf, params, reason
from test_golden_policy import window

from trl_lossplus import LossBatch, LossPlusError, LossSpec, compute_loss
from trl_lossplus.functional.correction import parse_rejection, rejection_keep
from trl_lossplus.functional.policy_covariance import clip_cov_tokens, covariance, kl_cov_tokens

NAMES = "policy/(dppo_tv|dppo_kl|gpg|clip_cov|kl_cov|dro)"
BYPASS = "policy/bypass_mode"
BF16 = "the reference computes in bf16; we in float32"
DIFFERS = {
    r"^policy/.*\|bf16_dtype\|": BF16,
    r"^policy/(clip_cov|kl_cov|dro)\|extreme\|": "the reference does not bound the log ratio; we do, at 20",
    r"^policy/clip_cov\|(?!zero_adv).*\"seed\"": "the reference draws tokens from the global generator; we by a hash of their data",
    r"^policy/clip_cov\|(groups\||multiturn\|.*0\.3)": "as above, one token of the several between the bounds",
    r"^policy/kl_cov\|zero_adv\|": "every covariance is 0: the reference takes whichever tokens topk gives, we draw by a hash",
}
BYPASS_DIFFERS = {
    r"^policy/bypass_mode\|bf16_dtype\|": BF16,
    r"^policy/bypass_mode\|(ragged|multiturn|groups|extreme)\|.*seq_mean_k1": "the reference bounds pi_sampler / pi in k1; we pi / pi_sampler, as everywhere",
    r"^policy/bypass_mode\|(?!zero_adv).*token_k3": "the reference takes rejected tokens out of the normalizer; ours is the step's, "
    "and its batch normalization of weights needs the whole step's, so we have none in the loss",
}


def spec_of(case: dict) -> LossSpec:
    """Our spec for a case of verl's."""
    name, cfg = case["oracle"].split("/")[1], case["cfg"]
    mode = MODES[cfg.get("loss_agg_mode", "token-mean")]
    clip = {"epsilon": cfg.get("clip_ratio_low", 0.2), "epsilon_high": cfg.get("clip_ratio_high", 0.2)}
    options = {
        "dppo_tv": {**clip, "dppo_ratio_max": cfg.get("clip_ratio_c", 3.0)},
        "dppo_kl": {**clip, "dppo_ratio_max": cfg.get("clip_ratio_c", 3.0)},
        "gpg": {},
        "clip_cov": {
            **clip,
            "clip_cov_ratio": cfg.get("clip_cov_ratio", 2e-4),
            "clip_cov_min": cfg.get("clip_cov_lb", 1.0),
            "clip_cov_max": cfg.get("clip_cov_ub", 5.0),
            "cov_seed": cfg.get("seed", 0),
        },
        "kl_cov": {"kl_cov_ratio": cfg.get("kl_cov_ratio", 2e-4), "kl_cov_coef": cfg.get("ppo_kl_coef", 0.1)},
        "dro": {"dro_beta": cfg.get("dro_beta", 0.0)},
    }[name]
    return LossSpec(policy_loss=name, loss_aggregation=mode, **options)


def formula(case: dict, lp: torch.Tensor, spec: LossSpec, selected: torch.Tensor | None) -> torch.Tensor:
    """The loss once more, float64, row by row over the valid tokens; `selected` (B, T) for the objectives that choose tokens."""
    batch, cfg, name = BATCHES[case["batch"]], case["cfg"], spec.policy_loss
    mask, losses = batch["response_mask"].bool(), []
    for i, m in enumerate(mask):
        if not m.any():
            continue
        x, old, a = lp[i, m], batch["old_log_prob"][i, m].double(), batch["advantages"][i, m].double()
        d = x - old
        d = torch.maximum(torch.minimum(d, torch.tensor(20.0).double()), torch.tensor(-20.0).double())
        r = d.exp()
        if name.startswith("dppo"):
            p, q = x.detach().exp(), old.exp()
            if name == "dppo_tv":
                keep = torch.where(a > 0, p - q <= spec.clip_high, q - p <= spec.epsilon)
            else:
                p = p.clamp(max=1.0)  # (`extreme` holds log-probs above 0)
                kl = q * (old - p.log()) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
                keep = torch.where(a > 0, (kl <= spec.clip_high) | (p <= q), (kl <= spec.epsilon) | (p >= q))
            loss = -a * r.detach().clamp(max=spec.dppo_ratio_max) * x * keep
        elif name == "gpg":
            loss = -a * x
        elif name == "dro":
            loss = -a * x + spec.dro_beta / 2 * d**2
        elif name == "clip_cov":
            plain_, clipped = -a * r, -a * r.clamp(1 - spec.epsilon, 1 + spec.clip_high)
            loss = torch.maximum(plain_, clipped) * ~(selected[i, m] & (plain_ >= clipped))
        else:
            loss = -a * r + spec.kl_cov_coef * d.abs() * selected[i, m]
        weight = batch["rollout_is_weights"][i, m].double() if cfg.get("use_is") else 1.0
        losses.append(loss * weight)
    w = window(cfg)
    counts = {} if w is None else {"num_tokens": w.num_tokens, "num_rows": w.num_rows, "world_size": w.world_size}
    return plain.reduce(losses, spec.loss_aggregation, mask.shape[1], **counts)


def chosen(case: dict, spec: LossSpec) -> torch.Tensor | None:
    """The tokens that our clip_cov and kl_cov choose, by their own functions; checked against the rule in float64 below."""
    batch = BATCHES[case["batch"]]
    lp, a, mask = batch["log_prob"].float(), batch["advantages"].float(), batch["response_mask"].bool()
    if spec.policy_loss == "kl_cov":
        return kl_cov_tokens(lp, a, mask, ratio=spec.kl_cov_ratio, seed=spec.cov_seed)
    if spec.policy_loss == "clip_cov":
        r = (lp - batch["old_log_prob"].float()).clamp(-20, 20).exp()
        clipped = (-a * r.clamp(1 - spec.epsilon, 1 + spec.clip_high)) > -a * r
        bounds = {"ratio": spec.clip_cov_ratio, "low": spec.clip_cov_min, "high": spec.clip_cov_max}
        return clip_cov_tokens(lp, a, mask, seed=spec.cov_seed, exclude=clipped, **bounds)
    return None


def check(case: dict, out, logps: torch.Tensor, lp: torch.Tensor, right_loss: torch.Tensor, differs: dict[str, str]) -> None:
    """Ours equals the formula in float64 always, and the reference unless the case is listed."""
    right = {"loss": case["out"]["loss"], "grad": case["grad"]["log_prob"]}
    out.loss.backward()
    right_loss.backward()
    bf16 = logps.dtype == torch.bfloat16
    assert difference(out.loss.detach(), right_loss.detach()) < TOLERANCE
    assert difference(logps.grad, lp.grad) < (2**-8 if bf16 else TOLERANCE)
    same = difference(out.loss.detach(), right["loss"]) < TOLERANCE and difference(logps.grad, right["grad"]) < TOLERANCE
    assert same == (reason(differs, case) is None), "matches" if same else "differs"


@pytest.mark.parametrize("case", params(NAMES))
def test_verl_policy(case):
    if case["error"]:  # dro without a beta: ours has a default, and refuses what theirs refuses
        with pytest.raises(LossPlusError, match="dro_beta=0.0 is out of range: it must be > 0"):
            spec_of(case)
        return
    batch, spec = BATCHES[case["batch"]], spec_of(case)
    logps, lp = leaf(batch["log_prob"], batch["log_prob"].dtype), leaf(batch["log_prob"], torch.float64)
    weights = batch["rollout_is_weights"] if case["cfg"].get("use_is") else None
    mask = batch["response_mask"].bool()
    own = LossBatch(logps, batch["old_log_prob"], batch["advantages"], mask, rollout_weights=weights)
    out = compute_loss(own, spec, window(case["cfg"]))
    check(case, out, logps, lp, formula(case, lp, spec, chosen(case, spec)), DIFFERS)


@pytest.mark.parametrize("case", params("policy/(clip_cov|kl_cov)", '(?<!use_is": true})$'))
def test_chosen_tokens(case):
    """As many as the reference takes, all within its bounds, or of its highest covariances (in float64)."""
    batch, spec = BATCHES[case["batch"]], spec_of(case)
    mask, selected = batch["response_mask"].bool(), chosen(case, spec)
    lp, a = batch["log_prob"].double()[mask], batch["advantages"].double()[mask]
    cov = (a - a.mean()) * (lp - lp.mean())
    assert difference(covariance(batch["log_prob"], batch["advantages"], mask)[mask], cov) < 1e-5
    if spec.policy_loss == "kl_cov":
        k = max(1, int(spec.kl_cov_ratio * len(cov)))
        assert selected.sum() == k
        assert cov[selected[mask]].min() >= cov.topk(k).values[-1] - 1e-6
    else:
        inside = ((cov > spec.clip_cov_min) & (cov < spec.clip_cov_max)).sum()
        assert selected.sum() <= max(1, int(spec.clip_cov_ratio * len(cov)))
        assert ((cov > spec.clip_cov_min - 1e-6) & (cov < spec.clip_cov_max + 1e-6))[selected[mask]].all()
        assert selected.any() <= (inside > 0)  # (none where the clip acts on all of them)
    assert not (selected & ~mask).any()


def bypass_spec(cfg: dict) -> LossSpec:
    """verl's bypass_mode as a spec of ours; its k1 bounds as they are written."""
    rc = cfg["rollout_correction"]
    bound = str(rc.get("rollout_is_threshold", 2.0)).split("_")
    rejection = {"rollout_rs": rc.get("rollout_rs"), "rollout_rs_threshold": rc.get("rollout_rs_threshold")}
    rejection = {k: None if v is None else str(v) for k, v in rejection.items()}
    if rc["loss_type"] == "ppo_clip":
        return LossSpec(policy_loss="rollout_ppo", clip_ratio_c=3.0, **rejection)
    level = rc.get("rollout_is", "sequence")
    weights = {"is_ratio_min": float(bound[0]) if len(bound) == 2 else None, "is_ratio_max": float(bound[-1])}
    weights["is_mode"] = "mask" if len(bound) == 2 else "truncate"
    if level is None:  # no weights at all: both bounds at 1
        return LossSpec(policy_loss="rollout_is", is_ratio_min=1 - 1e-9, is_ratio_max=1.0, **rejection)
    return LossSpec(policy_loss="rollout_is", importance_sampling_level=level, **weights, **rejection)


def bypass_formula(case: dict, lp: torch.Tensor, spec: LossSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss in float64 over the step's tokens, and which tokens stay."""
    batch = BATCHES[case["batch"]]
    mask, losses = batch["response_mask"].bool(), []
    old = batch["old_log_prob"].double()
    keep = torch.ones_like(mask)
    if spec.rollout_rs:
        (rule,) = parse_rejection(spec.rollout_rs, spec.rollout_rs_threshold)
        lr = (batch["log_prob"].double() - old).clamp(-20, 20)
        for i, m in enumerate(mask):
            value = lr[i, m].mean().exp() if rule.name == "seq_mean_k1" else lr[i].exp() - 1 - lr[i]
            keep[i] = (value <= rule.high) & (value >= (rule.low or -1.0)) if m.any() else True
    for i, m in enumerate(mask):
        if not m.any():
            continue
        x, a, d = lp[i, m], batch["advantages"][i, m].double(), (lp[i, m] - old[i, m])
        if spec.policy_loss == "rollout_ppo":
            r = d.clamp(-20, 20).exp()
            loss = torch.maximum(-a * r, -a * r.clamp(0.8, 1.2))
            loss = torch.where(a < 0, torch.minimum(loss, -3 * a), loss)
        else:
            d = d if spec.importance_sampling_level == "token" else d.sum()
            w = d.detach().clamp(-20, 20).exp()
            low, high = spec.is_ratio_min or 0.0, spec.is_ratio_max
            w = w.clamp(low, high) if spec.is_mode == "truncate" else w * ((w >= low) & (w <= high))
            loss = -a * w * x
        losses.append(loss * keep[i, m])
    return plain.reduce(losses, spec.loss_aggregation, mask.shape[1]), keep


@pytest.mark.parametrize("case", params(BYPASS))
def test_bypass_mode(case):
    """The sampler is the reference's old policy; nothing reads old log-probs. Its rejection with its own sign gives its own loss."""
    assert case["error"] is None
    batch, spec = BATCHES[case["batch"]], bypass_spec(case["cfg"])
    logps, lp = leaf(batch["log_prob"], batch["log_prob"].dtype), leaf(batch["log_prob"], torch.float64)
    mask = batch["response_mask"].bool()
    own = LossBatch(logps, None, batch["advantages"], mask, rollout_logps=batch["old_log_prob"])
    out = compute_loss(own, spec)
    loss, keep = bypass_formula(case, lp, spec)
    # (Values at a bound of the rejection differ in bf16's log-probs; the formula reads the same ones.)
    check(case, out, logps, lp, loss, BYPASS_DIFFERS)
    if "token_k3" in case["id"] and not case["id"].startswith("policy/bypass_mode|bf16") and spec.policy_loss == "rollout_ppo":
        share = (keep & mask).sum() / mask.sum()
        theirs = case["out"]["loss"] * share  # their normalizer counts the tokens that stay
        assert torch.isnan(theirs) if share == 0 else difference(out.loss.detach(), theirs) < TOLERANCE


def test_bypass_rejection_with_the_references_sign():
    """seq_mean_k1 with bounds .9_1.2 of theirs is 1/1.2_1/.9 of ours: then the kept rows are the same."""
    batch = BATCHES["base"]
    mask, lp, old = batch["response_mask"].bool(), batch["log_prob"], batch["old_log_prob"]
    inverted = parse_rejection("seq_mean_k1", f"{1 / 1.2}_{1 / 0.9}")
    keep = rejection_keep(lp, old, mask, inverted)[0]
    k1 = -torch.where(mask, lp - old, 0.0).sum(-1) / mask.sum(-1)
    assert torch.equal(keep[:, 0], (k1.exp() >= 0.9) & (k1.exp() <= 1.2))


def test_no_case_is_lost():
    """(match, differ, refused alike) for each oracle; a case that moves from one to another must be named here."""
    assert plain.census(NAMES, DIFFERS) == {
        "policy/dppo_tv": (60, 10, 0),
        "policy/dppo_kl": (60, 10, 0),
        "policy/gpg": (48, 8, 0),
        "policy/clip_cov": (36, 34, 0),
        "policy/kl_cov": (36, 27, 0),
        "policy/dro": (40, 16, 7),
    }
    assert plain.census(BYPASS, BYPASS_DIFFERS) == {"policy/bypass_mode": (42, 28, 0)}
