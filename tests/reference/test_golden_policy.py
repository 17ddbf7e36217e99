"""
Our policy losses against verl 0.9.1 and OpenRLHF 0.11.2: loss and gradient of every measured case.

How their names map to ours: verl's vanilla is ppo_clip with a dual clip of 3; its gspo gives each token its own gradient, our
`gspo_token`, while OpenRLHF's goes through the mean, our `gspo`; its cispo clips to [1 - lo, 1 + hi], our `cispo_ratio_min` and
`epsilon_high`, which bound the ratio itself; its sapo is always seq-mean-token-mean and geo_mean (our gmpo) always a mean over
rows, whatever the caller asks. `Window` holds its batch_num_tokens, global_batch_size and dp_size.
"""

import plain
import pytest
import torch
from helpers import difference
from plain import BATCHES, MODES, TOLERANCE, leaf, params, reason

from trl_lossplus import LossBatch, LossPlusError, LossSpec, Window, compute_loss

VERL = "policy/(vanilla|gspo|sapo|cispo|geo_mean)"
OPENRLHF = "openrlhf/policy"
BF16 = "the reference computes in bf16, also the decision whether a ratio is clipped; we compute in float32"
# Patterns of case ids. What we give in these cases is asserted against the formula in float64 (plain.py).
DIFFERS = {
    r"^policy/.*\|bf16_dtype\|": BF16,
    r"^openrlhf/policy\|bf16_dtype\|(?!.*\"tv\".*\"seq\")": BF16,  # (this gate leaves nothing: both give 0)
    r"^policy/geo_mean\|(ragged)\|": "the reference averages over all rows, fully masked ones included; we over rows with tokens",
    r"^policy/geo_mean\|(?!zero_adv).*global_batch_info": "the reference ignores global_batch_info; we honour it",
    r"^policy/geo_mean\|(?!zero_adv).*use_is": "the reference takes the geometric mean of a row's weights; we weight each token",
    r"^openrlhf/policy\|(base|multiturn|groups)\|.*binary_kl.*\"token\"": "a binary KL of 3e-8 is below 0 in "
    "the reference's float32, outside its range [0, .002], so it drops that token",
}


def close(ours, right) -> bool:
    """To 1e-5, relative to the largest entry (why not entry by entry: see `difference`)."""
    return difference(ours, right) < TOLERANCE


def window(cfg: dict) -> Window | None:
    info = cfg.get("global_batch_info")
    counts = {"num_tokens": "batch_num_tokens", "num_rows": "global_batch_size", "world_size": "dp_size"}
    if info and cfg["loss_agg_mode"] == "token-mean":
        info = info | {"global_batch_size": 1}  # not read
    return Window(**{ours: info[theirs] for ours, theirs in counts.items() if theirs in info}) if info else None


def verl_spec(case: dict) -> tuple[LossSpec, str, dict]:
    """Our spec, the name in plain.py, and plain.py's options."""
    name, cfg = case["oracle"].split("/")[1], case["cfg"]
    lo, hi = cfg.get("clip_ratio_low", 0.2), cfg.get("clip_ratio_high", 0.2)
    if lo is None:  # `clip_ratio` alone acts only where the two others are null
        lo = hi = cfg["clip_ratio"]
    mode = "seq_mean_token_mean" if name in ("sapo", "geo_mean") else MODES[cfg.get("loss_agg_mode", "token-mean")]
    tau = {"tau_pos": cfg.get("tau_pos", 1.0), "tau_neg": cfg.get("tau_neg", 1.05)}
    ours, options = {
        "vanilla": ("ppo_clip", {"epsilon": lo, "epsilon_high": hi, "clip_ratio_c": cfg.get("clip_ratio_c", 3.0)}),
        "gspo": ("gspo_token", {"epsilon": lo, "epsilon_high": hi}),
        "sapo": ("sapo", {"sapo_temperature_pos": tau["tau_pos"], "sapo_temperature_neg": tau["tau_neg"]}),
        "cispo": ("cispo", {"epsilon_high": 1 + hi, "cispo_ratio_min": 1 - lo}),
        "geo_mean": ("gmpo", {"epsilon": lo, "epsilon_high": hi}),
    }[name]
    plain_name = "gspo_token" if name == "gspo" else name
    plain_options = tau | {"lo": lo, "hi": hi, "c": options.get("clip_ratio_c")}
    return LossSpec(policy_loss=ours, loss_aggregation=mode, **options), plain_name, plain_options


def check(
    case: dict, spec: LossSpec, name: str, options: dict, old: torch.Tensor, weights: torch.Tensor | None, w: Window | None
):
    """Ours equals the formula in float64 always, and the reference unless the case is in DIFFERS."""
    batch, right = BATCHES[case["batch"]], {"loss": case["out"]["loss"], "grad": case["grad"]["log_prob"]}
    mask = batch["response_mask"].bool()
    logps = leaf(batch["log_prob"], batch["log_prob"].dtype)
    out = compute_loss(LossBatch(logps, old, batch["advantages"], mask, rollout_weights=weights), spec, w)
    out.loss.backward()
    lp = leaf(batch["log_prob"], torch.float64)
    counts = {} if w is None else {"num_tokens": w.num_tokens, "num_rows": w.num_rows, "world_size": w.world_size}
    loss = plain.policy(name, lp, old, batch["advantages"], mask, weights, spec.loss_aggregation, **options, **counts)
    loss.backward()
    # The gradient of a bf16 leaf is rounded to bf16's 8 bits on its way out.
    leaf_tolerance = 2**-8 if logps.dtype == torch.bfloat16 else TOLERANCE
    assert close(out.loss.detach(), loss.detach())
    assert difference(logps.grad, lp.grad) < leaf_tolerance
    assert torch.equal(logps.grad[~mask], torch.zeros_like(logps.grad[~mask]))
    assert torch.allclose(torch.stack(list(out.terms.values())).sum(), out.loss)
    if reason(DIFFERS, case):
        same = close(out.loss.detach(), right["loss"]) and close(logps.grad, right["grad"])
        assert not same, "listed in DIFFERS, but it matches"
    else:
        assert close(out.loss.detach(), right["loss"])
        assert close(logps.grad, right["grad"])


@pytest.mark.parametrize("case", params(VERL))
def test_verl_policy(case):
    batch, cfg = BATCHES[case["batch"]], case["cfg"]
    if "clip_ratio_c" in (case["error"] or ""):
        with pytest.raises(LossPlusError, match="clip_ratio_c=1.0.*must be > 1"):
            verl_spec(case)
    elif case["error"]:  # sapo over processes without the number of rows
        info = cfg["global_batch_info"]
        with pytest.raises(TypeError, match="num_rows"):
            Window(num_tokens=info["batch_num_tokens"], world_size=info["dp_size"])
    else:
        check(
            case, *verl_spec(case), batch["old_log_prob"], batch["rollout_is_weights"] if cfg.get("use_is") else None, window(cfg)
        )


def openrlhf_weights(batch: dict, cfg: dict) -> torch.Tensor | None:
    """OpenRLHF's correction as rollout weights: pi_old / pi_rollout, truncated, or 0 where the gate closes."""
    level = cfg.get("is_correction_level")
    if not level:
        return None
    low, high = cfg["is_correction_threshold"]
    p, q = batch["old_log_prob"].double(), batch["rollout_log_prob"].double()
    ratio, mask = (p - q).clamp(-20, 20).exp(), batch["response_mask"].bool()
    if cfg.get("is_correction_mode") == "clip":
        return ratio.clamp(low, high).to(torch.float32)
    gate = cfg.get("is_correction_gating", "ratio")
    statistic = {
        "ratio": p - q,
        "tv": (p.exp() - q.exp()).abs(),
        "binary_kl": p.exp() * (p - q) + (1 - p.exp()) * (torch.log1p(-p.exp()) - torch.log1p(-q.exp())),
    }[gate]
    if level == "seq":
        statistic = torch.where(mask, statistic, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    statistic = statistic.exp() if gate == "ratio" else statistic
    return (ratio * ((statistic >= low) & (statistic <= high))).to(torch.float32)


@pytest.mark.parametrize("case", params(OPENRLHF))
def test_openrlhf_policy(case):
    batch, cfg = BATCHES[case["batch"]], case["cfg"]
    gspo = cfg.get("policy_loss_type") == "gspo"
    lo, hi, c = cfg.get("clip_eps_low", 0.2), cfg.get("clip_eps_high", 0.2), cfg.get("dual_clip")
    mode = "token_mean" if cfg.get("token_level_loss", True) and not gspo else "seq_mean_token_mean"
    spec = LossSpec("gspo" if gspo else "ppo_clip", lo, hi, clip_ratio_c=c, loss_aggregation=mode)
    # With gspo and a correction OpenRLHF measures the ratio from the sampler itself.
    old = batch["rollout_log_prob" if gspo and "is_correction_level" in cfg else "old_log_prob"]
    weights = None if gspo else openrlhf_weights(batch, cfg)
    check(case, spec, "gspo" if gspo else "vanilla", {"lo": lo, "hi": hi, "c": c}, old, weights, None)


def test_no_case_is_lost():
    """(match, differ, refused alike) for each oracle; a case that moves from one to another must be named here."""
    assert plain.census(f"{VERL}|{OPENRLHF}", DIFFERS) == {
        "policy/vanilla": (72, 12, 7),
        "policy/gspo": (54, 9, 0),
        "policy/sapo": (48, 8, 7),
        "policy/cispo": (54, 9, 0),
        "policy/geo_mean": (33, 30, 0),
        "openrlhf/policy": (76, 15, 0),
    }
