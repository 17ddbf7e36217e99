"""The plain versions against numbers worked out by hand (the ids are those of the list of cases), and what they may import."""

import ast
import math
from dataclasses import asdict
from pathlib import Path

import pytest

import trl_lossplus.check
from trl_lossplus.check import plain, plain_advantages, plain_terms
from trl_lossplus.spec import LossSpec

FOLDER = Path(trl_lossplus.check.__file__).parent


def spec(**values):
    return asdict(LossSpec(**values))


def row(ratios, advantages, old=-5.0, **more):
    return {
        "logps": [old + math.log(r) for r in ratios],
        "old_logps": [old] * len(ratios),
        "advantages": list(advantages),
        **more,
    }


@pytest.mark.parametrize("path", sorted(FOLDER.glob("plain*.py")), ids=lambda path: path.name)
def test_plain_means_plain(path):
    """math, typing and each other: no torch, no numpy, nothing of what is checked."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module}"]
        for name in names:
            assert name in {"math", "typing", "collections.abc", "__future__"} or name.startswith(".plain"), name


def test_clipping():
    """B1, B2."""
    six = row([0.5, 0.5, 1.5, 1.5, 1, 1], [1, -1] * 3)
    assert plain.ppo_clip(six, spec()) == pytest.approx([-0.5, 0.8, -1.2, 1.5, -1, 1])
    low, high = plain.clip_flags(six, spec())
    assert (sum(low), sum(high)) == (1, 1)
    assert plain.ppo_clip(row([10, 10], [-1, 1]), spec(clip_ratio_c=3.0)) == pytest.approx([3.0, -1.2])
    swapped = plain.ppo_clip(six, spec(clip_objective="max"))
    assert swapped == pytest.approx([-0.8, 0.5, -1.5, 1.2, -1, 1])


def test_other_objectives():
    """B5, B7, B8."""
    three = row([math.exp(3), math.exp(-3), math.exp(0.6)], [1, 1, 1])
    assert plain.sequence_ratio(three, spec()) == pytest.approx(1.221403, abs=1e-6)
    assert plain.gspo(three, spec(policy_loss="gspo")) == pytest.approx([-1.2] * 3)
    one = row([10], [1])
    assert plain.cispo(one, spec(policy_loss="cispo", epsilon_high=5.0)) == pytest.approx([-5 * one["logps"][0]])
    gmpo = spec(policy_loss="gmpo")
    assert plain.gmpo(row([math.exp(3)], [-1]), gmpo) == pytest.approx([math.exp(3)])
    assert plain.gmpo(row([math.exp(3)], [1]), gmpo) == pytest.approx([-math.exp(0.2)])


def test_aggregation():
    """A4, A5, A6, E8."""
    losses = [[1.0] * 10, [3.0] * 100]
    counts = {"tokens": 110, "rows": 2, "prompts": 2, "group_tokens": {0: 10, 1: 100}}
    expected = {"token_mean": 2.818182, "seq_mean_token_mean": 2.0, "seq_mean_token_sum": 155, "seq_mean_token_sum_norm": 0.775}
    for mode, value in expected.items():
        assert plain_terms.aggregate(mode, losses, [0, 1], counts, 200) == pytest.approx(value, abs=1e-6)
    masked = [{"logps": [0.0] * 10, "group": 0}, {"logps": [], "group": 0}]
    assert plain_terms.window_counts(masked, False) == {"tokens": 10, "rows": 1, "prompts": 1, "group_tokens": {0: 10}}
    assert plain_terms.window_counts(masked, True)["rows"] == 2
    assert plain_terms.aggregate("token_mean", [[1.0] * 10, []], [0, 0], plain_terms.window_counts(masked, False), None) == 1.0
    prompts = [[1.0] * 10, [3.0] * 100, [1.0] * 10, [3.0] * 100]
    counts = {"tokens": 220, "rows": 4, "prompts": 2, "group_tokens": {0: 20, 1: 200}}
    assert plain_terms.aggregate("prompt_mean", prompts, [0, 1, 0, 1], counts, None) == pytest.approx(2.0)


def test_kl():
    """C2, C5, D3."""
    values = {"k1": [1, -1], "abs": [1, 1], "k2": [0.5, 0.5], "k3": [0.367879, 0.718282]}
    for name, expected in values.items():
        assert plain_terms.kl_estimates(name, [1, -1], [0, 0], 20) == pytest.approx(expected, abs=1e-6)
        assert plain_terms.kl_estimates(f"{name}+", [1, -1], [0, 0], 20) == pytest.approx(expected, abs=1e-6)
    assert math.isfinite(plain_terms.kl_estimates("k3", [0], [100], 20)[0])
    settings = {"kl_target": 0.1, "kl_horizon": 1e4}
    coef, seen = 0.1, []
    for kl in (1.0, 0.0, 0.105):
        coef = plain_terms.adaptive_coefficient(coef, kl, 100, settings)
        seen.append(coef)
    assert seen == pytest.approx([0.1002, 0.0999996, 0.1000495998], abs=1e-9)


def test_kl_in_reward():
    """C10."""
    assert plain_advantages.token_rewards(1.0, [0.5, 0.5, 1.0], 0.1, 3) == pytest.approx([-0.05, -0.05, 0.9])
    assert plain_advantages.less_kl_to_go([1.0] * 3, [0.5, 0.5, 1.0], 0.1) == pytest.approx([0.8, 0.85, 0.9])


def test_group_estimators():
    """E1, E2, E5."""
    options = {"scale_rewards": "group", "eps": 1e-6}
    one = [0] * 4
    assert plain_advantages.grpo([1, 0, 0, 0], one, options) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert plain_advantages.rloo([1, 0, 0, 0], one, options) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert plain_advantages.grpo([2.0], [0], options) == [0.0]
    assert plain_advantages.grpo([0.35] * 8, [0] * 8, options) == [0.0] * 8
    assert all(abs(a) < 10 for a in plain_advantages.grpo([0.35] * 7 + [0.95], [0] * 8, options))
    negative = plain_advantages.maxrl([-1, -2, -3, -6], one, options)
    assert [math.copysign(1, a) for a in negative if a] == [1, 1, -1]
    assert negative[2] == 0.0


def test_critic():
    """F1, F2, F5: masked tokens are left out of the lists."""
    assert plain_advantages.generalized([0, 1], [0, 0], 1.0, 0.95, 0.0) == pytest.approx([0.95, 1])
    assert plain_advantages.generalized([0, 1], [0.5, 0.2], 1.0, 0.95, 0.0) == pytest.approx([0.46, 0.8])
    values = {"values": [1.0, 1.0], "old_values": [0.0, 0.0], "returns": [0.3, 2.0]}
    assert plain_terms.value_losses(values, spec(vf_coef=1.0)) == pytest.approx([0.245, 1.62])


def test_whitening():
    """Mean 0 and variance 1 (ddof 1) over all tokens; a row without key stays out."""
    white = plain_advantages.whitened([[1.0, 2.0], [4.0], [9.0]], [0, 0, None])
    everything = [*white[0], *white[1]]
    assert sum(everything) == pytest.approx(0, abs=1e-9)
    assert sum(x * x for x in everything) / 2 == pytest.approx(1, abs=1e-6)
    assert white[2] == [0.0]
