"""Every health rule: a run that trips it, and one that nearly does."""

import math
from pathlib import Path

import numpy as np
import pytest
from synthetic import STEPS, at, healthy, ramp, run

from trl_lossplus.diagnostics.doctor import diagnose
from trl_lossplus.diagnostics.rules import READS, RULES, SEVERITIES, apply
from trl_lossplus.diagnostics.view import View

FLAT_REWARD = {"reward": ramp(0.3, 0.3), "group_reward/std": ramp(0.3, 0.3)}
ON = {"is_on_policy": True}
NO_FLAT = {"group_reward/frac_flat": np.full(STEPS, 1.0), "frac_reward_zero_std": np.full(STEPS, 1.0)}
EXACT = {
    name: np.zeros(STEPS)
    for name in ("probe/log_ratio/q00", "probe/log_ratio/q50", "probe/log_ratio/q100", "clip_ratio/region_mean")
}
EXACT |= {"clip_ratio/low_mean": np.zeros(STEPS), "clip_ratio/high_mean": np.zeros(STEPS)}
RNG = np.random.default_rng(1)
BOTH_WAYS = {"probe/log_ratio/q50": RNG.normal(size=STEPS) * 0.01}
DRIFT = {"ratio/first_pass_deviation": at(5, 0.5), "probe/log_ratio/q50": 0.05 + RNG.normal(size=STEPS) * 0.01}
NO_COUNTS = {f"nonfinite/{n}": None for n in ("logps", "old_logps", "ref_logps", "ratio", "advantages", "values", "loss")}
LENGTHY = {
    "generation_batch_size": 64,
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
    "loss_aggregation": "token_mean",
}
TENSORS = ("logps", "old_logps", "ref_logps", "ratio", "advantages", "values", "loss")

# id: (columns, settings, bad) that trip it, then those that nearly do.
CASES = {
    "mask_outside": (({"mask/outside_completion": at(50, 3.0)}, {}, {}), ({}, {}, {})),
    "eos_left_out": (({"mask/eos_in_loss": np.zeros(STEPS)}, {}, {}), ({"mask/eos_in_loss": np.full(STEPS, 0.995)}, {}, {})),
    **{f"nonfinite_{n}": (({f"nonfinite/{n}": at(80, 2.0)}, {}, {}), ({f"nonfinite/{n}": np.zeros(STEPS)}, {}, {})) for n in TENSORS},
    "ratio_first_pass": (
        ({"ratio/first_pass_deviation": np.full(STEPS, 0.2)}, {}, {}), ({"ratio/first_pass_deviation": np.full(STEPS, 0.01)}, {}, {}),
    ),
    "stale_old_logps": ((DRIFT, {}, {}), ({**DRIFT, "ratio/first_pass_deviation": at(190, 0.5)}, {}, {})),
    "clip_wrong_side": (
        ({"probe/policy/q00": ramp(-9, -9)}, {}, {}), ({"probe/policy/q00": np.full(STEPS, -2.4)}, {}, {}),
    ),
    "ratio_extreme": (({"probe/log_ratio/q100": ramp(9.0, 9.0)}, {}, {}), ({"probe/log_ratio/q100": np.full(STEPS, 6.5)}, {}, {})),
    "ess_low": (({"ratio/ess": ramp(0.9, 0.1)}, {}, {}), ({"ratio/ess": ramp(0.9, 0.4)}, {}, {})),
    "ratio_never_moves": ((EXACT, {}, {}), ({**EXACT, "probe/log_ratio/q100": at(100, 1e-3)}, {}, {})),
    "clip_high": (
        ({"clip_ratio/region_mean": ramp(0.3, 0.55)}, {}, {}), ({"clip_ratio/region_mean": ramp(0.3, 0.38)}, {}, {}),
    ),
    "clip_low": (({"clip_ratio/region_mean": ramp(0.02, 0.02)}, {}, {}), ({"clip_ratio/region_mean": ramp(0.07, 0.07)}, {}, {})),
    "on_policy": ((EXACT, ON, {}), ({}, {}, {})),
    "no_signal": (({**FLAT_REWARD, **NO_FLAT}, {}, {}), ({**FLAT_REWARD, "group_reward/frac_flat": np.full(STEPS, 0.99)}, {}, {})),
    "policy_vanishes": (
        ({"share/grad/policy": np.full(STEPS, 0.004), "share/grad/kl": np.full(STEPS, 0.996)}, {}, {}),
        ({"share/grad/policy": np.full(STEPS, 0.05), "share/grad/kl": np.full(STEPS, 0.95)}, {}, {}),
    ),
    "groups_flat": (
        ({**FLAT_REWARD, "group_reward/frac_flat": ramp(0.5, 0.9)}, {}, {}), ({**FLAT_REWARD, "group_reward/frac_flat": ramp(0.5, 0.75)}, {}, {}),
    ),
    "spread_collapse": (
        ({"reward": ramp(0.3, 0.3), "group_reward/std": ramp(0.4, 0.01)}, {}, {}), ({"reward": ramp(0.3, 0.3), "group_reward/std": ramp(0.4, 0.2)}, {}, {}),
    ),
    "advantage_extreme": (({"probe/advantage/q100": at(100, 40.0, otherwise=2.0)}, {}, {}), ({"probe/advantage/q100": np.full(STEPS, 9.0)}, {}, {})),
    "one_sign": (({"probe/advantage/q00": np.full(STEPS, 0.1)}, {}, {}), ({"probe/advantage/q00": at(150, 0.1, otherwise=-1.0)}, {}, {})),
    "kl_sign": (({"loss/kl": -0.04 * healthy()["kl"]}, {}, {}), ({"loss/kl": np.where(np.arange(STEPS) < 20, -1e-4, 0.01)}, {}, {})),
    "reward_hacking": (
        ({"rewards/form/mean": ramp(0.9, 0.2)}, {}, {}), ({"rewards/form/mean": ramp(0.9, 0.8)}, {}, {}),
    ),
    "kl_explodes": (({"kl": ramp(0.05, 5.0), "reward": ramp(0.3, 0.3)}, {}, {}), ({"kl": ramp(0.2, 1.5), "reward": ramp(0.3, 0.3)}, {}, {})),
    "kl_dominates": (
        ({"share/grad/kl": np.full(STEPS, 0.95), "share/grad/policy": np.full(STEPS, 0.05), "reward": ramp(0.3, 0.3)}, {}, {}),
        ({"share/grad/kl": np.full(STEPS, 0.85), "share/grad/policy": np.full(STEPS, 0.15), "reward": ramp(0.3, 0.3)}, {}, {}),
    ),
    "kl_flat": (({"kl": ramp(1e-5, 2e-5), "reward": ramp(0.3, 0.3)}, {}, {}), ({"kl": ramp(1e-5, 2e-5)}, {}, {})),
    "kl_share": (({}, {}, {}), ({"kl": None, "loss/kl": None, "share/loss/kl": None}, {}, {})),
    "nan_logged": (({}, {}, {"grad_norm": 120}), ({}, {"fp16": True}, {"grad_norm": 120})),
    "skipped_steps": (({"skipped_steps": at(60, 1.0)}, {}, {}), ({}, {}, {})),
    "value_diverges": (({"loss/value": ramp(0.02, 2.0), "value/explained_variance": ramp(0.2, 0.0)}, {}, {}), ({"loss/value": ramp(0.02, 2.0)}, {}, {})),
    "variance_negative": (
        ({"value/explained_variance": np.full(STEPS, -0.5)}, {}, {}),
        ({"value/explained_variance": at(90, -9.0, otherwise=0.3), "reward_std": at(90, 0.05, otherwise=0.5)}, {}, {}),
    ),
    "loss_zero": (({"loss/policy": np.full(STEPS, 1e-9), **EXACT}, ON, {}), ({"loss/policy": np.full(STEPS, 1e-9)}, {}, {})),
    "entropy_collapse": (
        ({"entropy": ramp(2.0, 0.02), "reward": ramp(0.3, 0.3)}, {}, {}), ({"entropy": ramp(2.0, 0.5), "reward": ramp(0.3, 0.3)}, {}, {}),
    ),
    "truncated": (({"completions/clipped_ratio": np.full(STEPS, 0.99)}, {}, {}), ({"completions/clipped_ratio": np.full(STEPS, 0.9)}, {}, {})),
    "length_growth": (
        ({"completions/mean_length": ramp(50, 150), "reward": ramp(0.3, 0.3)}, {}, {}), ({"completions/mean_length": ramp(50, 150)}, {}, {}),
    ),
    "reward_falls": (({"reward": ramp(0.7, 0.3)}, {}, {}), ({"reward": ramp(0.7, 0.69, noise=0.1)}, {}, {})),
}  # fmt: skip


def made(case):
    columns, settings, bad = case
    return run(columns, settings, bad)


def found(case):
    return {finding.rule.id: finding for finding in apply(View(made(case)))}


def test_every_rule_has_its_cases():
    assert {rule.id for rule in RULES} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_trips(name):
    """The rule sees it, gives numbers and steps, and says what to change."""
    finding = found(CASES[name][0])[name]
    assert finding.severity in SEVERITIES
    assert 1 <= finding.seen.first <= finding.seen.last <= STEPS
    assert len(finding.seen.text) > 10
    assert "nan" not in finding.seen.text.lower().replace("nan or", "").replace("a nan", "")
    assert all(math.isfinite(value) for value in finding.seen.numbers.values())
    if finding.severity != "info":
        assert finding.rule.fields
    assert finding.rule.means.endswith(".")
    assert finding.rule.change.endswith(".")


@pytest.mark.parametrize("name", CASES)
def test_near_miss(name):
    assert name not in found(CASES[name][1])


@pytest.mark.parametrize("name", [rule.id for rule in RULES if rule.severity == "error"])
def test_errors_come_first(name):
    """A fault that is an error is at the top, before what follows from it."""
    first = diagnose(made(CASES[name][0]))[0]
    assert first.severity == "error"
    assert first.rule.id == name


def test_a_healthy_run_has_no_warning():
    assert {finding.severity for finding in diagnose(run())} <= {"info"}


@pytest.mark.parametrize("n", [1, 2, 5, 9, 30])
def test_short_runs_are_not_judged_by_noise(n):
    assert {finding.severity for finding in diagnose(run(base=healthy(n), n=n))} <= {"info"}


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_trips_nothing(seed):
    """A reward that goes nowhere, and noise in everything: no warning about trends."""
    noisy = {name: ramp(float(v.mean()), float(v.mean()), noise=0.3, seed=seed + i) for i, (name, v) in enumerate(healthy().items())
             if name in ("reward", "kl", "entropy", "completions/mean_length", "loss/value", "share/grad/kl", "rewards/form/mean")}  # fmt: skip
    assert {finding.severity for finding in diagnose(run(noisy))} <= {"info"}


def test_the_chain_orders_equal_findings():
    """mask, ratio, advantages, KL: in this order where all are errors."""
    broken = {"mask/outside_completion": at(1, 1.0), "loss/kl": -0.04 * healthy()["kl"], "nonfinite/ratio": at(20, 1.0), **DRIFT}
    ids = [finding.rule.id for finding in diagnose(run(broken)) if finding.severity == "error"]
    assert ids == ["mask_outside", "stale_old_logps", "nonfinite_ratio", "kl_sign"]


def test_the_first_bad_tensor_is_named():
    """G3: of several bad tensors the one that comes first in the data flow, at the step at which it was first."""
    bad = {f"nonfinite/{name}": at(40, 5.0) for name in ("ratio", "advantages", "loss")}
    ids = [finding.rule.id for finding in diagnose(run(bad)) if finding.rule.id.startswith("nonfinite")]
    assert ids == ["nonfinite_ratio"]


def test_bad_values_without_counts():
    """A log that has no counts still tells which tensor it was, by its probe at a dropped step."""
    columns = {**NO_COUNTS, "skipped_steps": at(60, 1.0)}
    only = np.zeros(STEPS, dtype=bool)
    only[59] = True
    log = run(columns)
    log.bad["probe/advantage/q100"] = only
    first = diagnose(log)[0]
    assert (first.rule.id, first.seen.first) == ("nonfinite_advantages", 60)


def test_flat_group_is_named_as_the_cause():
    columns = {"nonfinite/advantages": at(80, 6.0), "group_reward/frac_flat": np.full(STEPS, 0.4)}
    assert "40% of its groups had no spread" in diagnose(run(columns))[0].seen.text


def test_dropout_from_the_first_update_on():
    """LoRA starts at 0, so dropout shows only after the first update: told by noise that goes both ways, or by the settings."""
    columns = {**DRIFT, **BOTH_WAYS}
    assert diagnose(run(columns, {"active_dropout": None}))[0].rule.id == "ratio_first_pass"
    named = diagnose(run(DRIFT, {"active_dropout": ["base.q_proj.lora_dropout"]}))[0]
    assert named.rule.id == "ratio_first_pass"
    assert "q_proj" in named.seen.text


def test_rounding_of_bf16_is_no_mismatch():
    deviation = {"ratio/first_pass_deviation": np.full(STEPS, 0.1)}
    assert diagnose(run(deviation))[0].rule.id == "ratio_first_pass"
    assert not [f for f in diagnose(run(deviation, {"bf16": True})) if f.severity != "info"]


def test_the_setting_max_is_named():
    first = diagnose(run({}, {"clip_objective": "max"}))[0]
    assert (first.rule.id, first.rule.fields) == ("clip_wrong_side", (("clip_objective", "min"),))


def test_normalized_twice_without_kl():
    """Without a KL to compare with, the size of the gradient tells."""
    gone = {name: None for name in ("kl", "loss/kl", "share/loss/kl", "share/grad/kl", "kl_coef")}
    tiny = {**gone, "grad_logp/policy": np.full(STEPS, 1e-6), "share/grad/policy": np.ones(STEPS)}
    assert diagnose(run(tiny, LENGTHY))[0].rule.id == "policy_vanishes"
    right = {**gone, "grad_logp/policy": np.full(STEPS, 0.018), "share/grad/policy": np.ones(STEPS)}
    assert not [f for f in diagnose(run(right, LENGTHY)) if f.severity != "info"]


def test_flat_because_learned():
    """All groups flat at one high reward after it rose: said, but no warning."""
    learned = {"reward": np.minimum(ramp(0.1, 1.6), 1.0), "group_reward/frac_flat": at(130, 1.0, otherwise=0.2),
               "group_reward/std": at(130, 0.0, otherwise=0.3), "group_reward/mean_min": ramp(0.0, 1.0), "entropy": ramp(2.0, 0.05)}  # fmt: skip
    findings = diagnose(run(learned))
    assert {finding.severity for finding in findings} <= {"info"}
    assert "the task is learned" in next(f for f in findings if f.rule.id == "groups_flat").seen.text


def test_kl_that_pays_is_a_note():
    paid = diagnose(run({"kl": ramp(0.05, 5.0)}))
    assert {finding.severity for finding in paid} <= {"info"}
    assert "kl_explodes" in {finding.rule.id for finding in paid}


def test_docs_hold_every_anchor():
    text = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text()
    anchors = {
        line.lstrip("# ").strip().lower().replace(" ", "-").replace(",", "").replace("`", "")
        for line in text.splitlines()
        if line.startswith("#")
    }
    assert {rule.anchor for rule in RULES} <= anchors


def test_reads_names_every_metric_that_is_read():
    """What long logs are read for: a view over these columns alone comes to the same findings."""
    from trl_lossplus.diagnostics.runlog import matches

    for case, _ in CASES.values():
        log = made(case)
        whole = [(f.rule.id, f.seen.text) for f in diagnose(log)]
        for name in [name for name in log.columns if not matches(name, READS)]:
            del log.columns[name]
        assert [(f.rule.id, f.seen.text) for f in diagnose(log)] == whole


def test_single_extreme_advantages():
    """A rare failure among successes, whitened, is 12 standard deviations out; one in a thousand is a number gone wrong."""

    def once(value):
        return run({"probe/advantage/q00": np.where(np.arange(STEPS) % 40 == 0, -value, -1.0)})

    assert "advantage_extreme" not in {finding.rule.id for finding in diagnose(once(12.0))}
    assert "advantage_extreme" in {finding.rule.id for finding in diagnose(once(1000.0))}


def test_three_steps_tell_no_state():
    """Flat groups, missing end tokens, cut-off completions in three steps: too few to call it the run's state."""
    few = {
        "frac_reward_zero_std": np.ones(3),
        "group_reward/frac_flat": np.ones(3),
        "mask/eos_in_loss": np.zeros(3),
        "reward": np.zeros(3),
    }
    few |= {
        "completions/clipped_ratio": np.ones(3),
        "share/grad/policy": np.zeros(3),
        "share/grad/kl": np.ones(3),
        "ratio/ess": np.zeros(3),
    }
    assert diagnose(run(few, base={}, n=3)) == []


def test_a_run_that_resamples_is_judged_by_all_of_its_draws():
    """Kept groups always have spread and a middling reward: what the policy does shows in resample/* alone."""
    kept = {"reward": ramp(0.5, 0.5), "group_reward/frac_flat": np.zeros(STEPS), "frac_reward_zero_std": np.zeros(STEPS)}
    kept["group_reward/std"] = ramp(0.4, 0.4)

    def found(flat, reward):
        drawn = {"resample/frac_flat_all": np.full(STEPS, flat), "resample/reward_all": reward}
        return {finding.rule.id for finding in diagnose(run({**kept, **drawn}))}

    assert "groups_flat" in found(0.9, ramp(0.3, 0.3))
    assert "groups_flat" not in found(0.5, ramp(0.3, 0.3))
    assert "reward_falls" in found(0.5, ramp(0.6, 0.1))
    assert "reward_falls" not in found(0.5, ramp(0.3, 0.3))
    assert View(run({**kept, "resample/reward_all": ramp(0.2, 1.0)})).reward_rises
    assert not View(run(kept)).reward_rises
