"""Our KL estimators, aggregations, whitening, entropy and KL controllers against verl 0.9.1 and OpenRLHF 0.11.2, every case."""

import plain
import pytest
import torch
from helpers import difference
from plain import BATCHES, MODES, TOLERANCE, cases_of, leaf, params, reason

from trl_lossplus import AdaptiveKLController, FixedKLController, LossPlusError, Window, aggregate, estimate_kl
from trl_lossplus.functional.entropy import token_entropy
from trl_lossplus.functional.masking import moments, whiten

BF16 = "the reference computes in bf16; we in float32"
BOUND = "the reference bounds the value to +-10, where the gradient is then 0; we keep both (k3 up to a log ratio of 20)"
BIASED = "the reference weights k2's gradient with the detached ratio pi / pi_old, at most 10; our `+` forms do not"
DIFFERS = {
    r"^(kl|agg|entropy_loss|openrlhf/aggregate)\b.*\|bf16_dtype\|": BF16,
    r"^masked_whiten\|bf16_dtype\|": BF16,
    r"^kl/(low_var_kl|k3)\+?\|extreme\|": BOUND,
    r"^openrlhf/approx_kl\|extreme\|": BOUND,
    r"^openrlhf/approx_kl\|.*unbiased_gradient\": true": BIASED,
}


def settle(case: dict, ours: dict, formula: dict, right: dict) -> None:
    """Ours equals the formula always, and the reference unless the case is in DIFFERS."""
    for name, value in ours.items():
        assert difference(value, formula[name]) < TOLERANCE, name
    same = all(difference(value, right[name].float()) < TOLERANCE for name, value in ours.items())
    assert same == (reason(DIFFERS, case) is None)


def kl_formula(name: str, lp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """The estimator in float64; exp(-d) stops at d = -20, the gradient too."""
    base = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name.rstrip("+"), name.rstrip("+"))
    d = lp - ref.double()
    bounded = d.clamp(min=-20)
    value = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": (-bounded).exp() + bounded - 1}[base]
    return value.detach() + d**2 / 2 - (d**2 / 2).detach() if name.endswith("+") else value


@pytest.mark.parametrize("case", params(r"kl/.*"))
def test_kl(case):
    batch, name = BATCHES[case["batch"]], case["oracle"][3:]
    if case["error"]:  # kl/full
        with pytest.raises(LossPlusError, match="kl_estimator='full' is not known.*Allowed"):
            estimate_kl(name, batch["log_prob"], batch["ref_log_prob"])
        return
    ours, formula = {}, {}
    for result, function, dtype in ((ours, estimate_kl, torch.float32), (formula, kl_formula, torch.float64)):
        lp = leaf(batch["log_prob"], dtype)
        result["kl"] = function(name, lp, batch["ref_log_prob"])
        (result["grad"],) = torch.autograd.grad(result["kl"].sum(), lp)
    settle(case, ours, formula, case["out"] | {"grad": case["grad"]["log_prob"]})
    assert ours["kl"].dtype == torch.float32
    assert torch.isfinite(ours["grad"]).all()


@pytest.mark.parametrize("case", params("openrlhf/approx_kl"))
def test_approx_kl(case):
    batch, cfg = BATCHES[case["batch"]], case["cfg"]
    name = cfg["kl_estimator"] + "+" * cfg["unbiased_gradient"]
    ours, formula = {}, {}
    for result, function, dtype in ((ours, estimate_kl, batch["log_prob"].dtype), (formula, kl_formula, torch.float64)):
        lp = leaf(batch["log_prob"], dtype)
        result["kl"] = function(name, lp, batch["ref_log_prob"])
        # The reference too computes in float32 here; a bf16 leaf takes its gradient in bf16.
        result["grad"] = torch.autograd.grad(result["kl"].sum(), lp)[0].to(batch["log_prob"].dtype)
    right = case["out"] | {"grad": case["grad"]["log_prob"]}
    settle(case, ours, formula, right)
    if cfg["unbiased_gradient"]:  # theirs is ours, weighted
        weight = (batch["log_prob"].float() - batch["old_log_prob"].float()).exp().clamp(max=10)
        assert difference(weight * ours["grad"], right["grad"].float()) < (2**-7 if case["batch"] == "bf16_dtype" else TOLERANCE)


def check_aggregate(case: dict, mode: str, norm: float | None) -> None:
    batch, cfg = BATCHES[case["batch"]], case["cfg"]
    mask, counts = batch["response_mask"].bool(), {}
    if "dp_size" in cfg:
        counts = {
            "num_tokens": cfg.get("batch_num_tokens", 1),
            "num_rows": cfg.get("global_batch_size", 1),
            "world_size": cfg["dp_size"],
        }
    x = leaf(batch["loss_mat"], torch.float32)
    loss = aggregate(mode, x, mask, Window(**counts) if counts else None, norm_length=norm)
    y = leaf(batch["loss_mat"], torch.float64)
    right = plain.reduce([row[m] for row, m in zip(y, mask, strict=True) if m.any()], mode, norm or mask.shape[1], **counts)
    ours, formula = ({"loss": value.detach(), "grad": torch.autograd.grad(value, x0)[0]} for value, x0 in ((loss, x), (right, y)))
    settle(case, ours, formula, case["out"] | {"grad": case["grad"]["loss_mat"]})


@pytest.mark.parametrize("case", params(r"agg/.*"))
def test_aggregate(case):
    cfg = case["cfg"]
    if case["error"]:  # several processes, and no global count: ours cannot even be written down
        with pytest.raises(TypeError, match="num_tokens.*num_rows"):
            Window(world_size=cfg["dp_size"])
        return
    check_aggregate(case, MODES[case["oracle"][4:]], cfg.get("loss_scale_factor"))


@pytest.mark.parametrize("case", params("openrlhf/aggregate"))
def test_openrlhf_aggregate(case):
    check_aggregate(case, "token_mean" if case["cfg"].get("token_level_loss", True) else "seq_mean_token_mean", None)


@pytest.mark.parametrize("case", params("masked_whiten"))
def test_whiten(case):
    """On valid tokens as the reference (ddof 1); on masked ones 0, where the reference leaves numbers."""
    batch, right = BATCHES[case["batch"]], case["out"]
    mask, x = batch["response_mask"].bool(), batch["advantages"].float()
    valid = batch["advantages"].double()[mask]
    keep = valid.mean() if case["cfg"].get("shift_mean") is False else 0
    formula = (valid - valid.mean()) / (valid.var() + 1e-8).sqrt() + keep
    white = whiten(x, mask, **case["cfg"])
    own = moments(x, mask)
    ours = {"whitened": white[mask], "mean": own.mean, "var": own.variance()}
    want = {"whitened": formula, "mean": valid.mean(), "var": valid.var()}
    settle(case, ours, want, right | {"whitened": right["whitened"][mask]})
    assert torch.equal(white[~mask], torch.zeros_like(white[~mask]))
    if not mask.all():
        assert (right["whitened"][~mask] != 0).any()


@pytest.mark.parametrize("case", params("entropy_loss"))
def test_entropy(case):
    batch, mode = BATCHES[case["batch"]], MODES[case["cfg"].get("loss_agg_mode", "token-mean")]
    mask, z = batch["response_mask"].bool(), leaf(batch["logits"], torch.float32)
    loss = aggregate(mode, token_entropy(z), mask)
    y = leaf(batch["logits"], torch.float64)
    entropies = -(y.log_softmax(-1) * y.softmax(-1)).sum(-1)
    right = plain.reduce([row[m] for row, m in zip(entropies, mask, strict=True) if m.any()], mode, 1)
    ours, formula = ({"loss": value.detach(), "grad": torch.autograd.grad(value, x0)[0]} for value, x0 in ((loss, z), (right, y)))
    settle(case, ours, formula, case["out"] | {"grad": case["grad"]["logits"]})


# The inputs are not in the data; the outputs fix on which side of the bounds each lay, and 0.05, 0.1 and 0.11 exactly.
KLS = (0.01, 0.05, 0.1, 0.11, 0.5, 2.0)


@pytest.mark.parametrize("case", params(r".*kl_controller.*"))
def test_kl_controller(case):
    cfg = {"kl_coef": 1e-3, "target_kl": 0.1, "horizon": 10000} | case["cfg"]
    if case["oracle"].endswith("fixed"):
        controller = FixedKLController(cfg["kl_coef"])
    else:
        controller = AdaptiveKLController(cfg["kl_coef"], cfg["target_kl"], cfg["horizon"])
    ours = []
    for kl in KLS:
        controller.update(kl, n_rows=8)
        ours.append(controller.coef)
    assert ours == pytest.approx(case["out"]["values"].tolist(), rel=1e-12)


def test_no_case_is_lost():
    """(match, differ, refused alike) for each oracle; a case that moves from one to another must be named here."""
    plain_kl = dict.fromkeys([f"kl/{name}{plus}" for name in ("kl", "k1", "mse", "k2", "abs") for plus in ("", "+")], (6, 1, 0))
    bounded = dict.fromkeys([f"kl/{name}{plus}" for name in ("low_var_kl", "k3") for plus in ("", "+")], (5, 2, 0))
    modes = dict.fromkeys([f"agg/{mode}" for mode in MODES if mode != "token-sum"], (12, 2, 7))
    expected = (
        plain_kl
        | bounded
        | modes
        | {
            "kl/full": (0, 0, 7),
            "agg/token-sum": (18, 3, 0),
            "agg/seq-mean-token-sum-norm": (18, 3, 7),
            "openrlhf/aggregate": (24, 4, 0),
            "openrlhf/approx_kl": (18, 24, 0),
            "masked_whiten": (12, 2, 0),
            "entropy_loss": (12, 2, 0),
            "kl_controller/adaptive": (14, 0, 0),
            "kl_controller/fixed": (7, 0, 0),
            "openrlhf/kl_controller": (7, 0, 0),
        }
    )
    pattern = r"kl/.*|agg/.*|openrlhf/aggregate|openrlhf/approx_kl|masked_whiten|entropy_loss|.*kl_controller.*"
    assert plain.census(pattern, DIFFERS) == expected
    assert len(cases_of(pattern)) == sum(map(sum, expected.values())) == 343
