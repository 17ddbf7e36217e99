"""Whatever can be chosen has a plain version: a newcomer without one fails here, by its name."""

from dataclasses import asdict, replace

import pytest

from trl_lossplus import LossSpec
from trl_lossplus.check import plain, plain_advantages, plain_batch, plain_terms
from trl_lossplus.functional.aggregation import AGGREGATIONS
from trl_lossplus.functional.kl import canonical_kl, kl_names
from trl_lossplus.functional.value import VALUE_LOSSES
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from trl_lossplus.spec import CHOICES

SMALL = ["--per_device_train_batch_size", 8, "--max_completion_length", 5]
PLAIN_OBJECTIVES = {**plain.OBJECTIVES, **plain_batch.BATCH_OBJECTIVES}
PLAIN_ESTIMATORS = {
    **plain_advantages.SEQUENCE_ESTIMATORS, **plain_advantages.TOKEN_ESTIMATORS, **plain_advantages.GROUP_TOKEN_ESTIMATORS,
}  # fmt: skip
# How each placement is chosen on the command line.
PLACEMENTS = {
    "none": [],
    "loss": ["--beta", 0.1],
    "reward": ["--kl_placement", "reward", "--kl_reward_coef", 0.1],
    "both": ["--kl_placement", "both", "--beta", 0.1, "--kl_reward_coef", 0.1],
}


def ours(registry):
    """Names that the package itself registers; other tests register some of their own."""
    return [name for name in registry.names() if registry.get(name).func.__module__.startswith("trl_lossplus")]


@pytest.mark.parametrize("name", ours(POLICY_LOSSES))
def test_objective(name):
    assert name in PLAIN_OBJECTIVES


@pytest.mark.parametrize("name", ours(ADVANTAGE_ESTIMATORS))
def test_estimator(name):
    assert name in PLAIN_ESTIMATORS


@pytest.mark.parametrize("name", kl_names())
def test_kl_estimator(name):
    """Its values where logp - ref_logp is 1 and -1; aliases and + forms have those of what they stand for."""
    values = {"k1": [1, -1], "abs": [1, 1], "k2": [0.5, 0.5], "k3": [0.367879, 0.718282]}[canonical_kl(name).removesuffix("+")]
    assert plain_terms.kl_estimates(name, [-1.0, -2.0], [-2.0, -1.0], 20) == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation(name):
    counts = {"tokens": 3, "rows": 2, "prompts": 1, "group_tokens": {0: 3}}
    value = {"token_sum": 6.0, "seq_mean_token_sum": 3.0, "seq_mean_token_sum_norm": 1.5}.get(name, 2.0)
    assert plain_terms.aggregate(name, [[2.0, 2.0], [2.0]], [0, 0], counts, 2) == pytest.approx(value)


@pytest.mark.parametrize("name", VALUE_LOSSES)
def test_value_loss(name):
    spec = asdict(LossSpec(vf_coef=1.0, value_loss=name, huber_delta=0.5, cliprange_value=None))
    row = {"values": [0.0], "old_values": [0.0], "returns": [2.0]}
    assert plain_terms.value_losses(row, spec) == [{"mse": 2.0, "huber": 0.875}[name]]


@pytest.mark.parametrize("level", CHOICES["kl_reward_level"])
@pytest.mark.parametrize("name", CHOICES["kl_placement"])
def test_placement_through_the_trainer(checked, name, level):
    words = [*PLACEMENTS[name], *(["--kl_reward_level", level] if name in ("reward", "both") else [])]
    code, last, text = checked(*SMALL, *words)
    assert code == 0, text
    assert last.startswith("ok: ")


def test_a_newcomer_without_one_fails_by_name(monkeypatch, checked):
    """The tests above name it; and the check itself says that it is not checked, with exit status 2."""
    entry = replace(POLICY_LOSSES.get("ppo_clip"), name="newcomer")
    monkeypatch.setitem(POLICY_LOSSES.entries, "newcomer", entry)
    assert "newcomer" in ours(POLICY_LOSSES)
    with pytest.raises(AssertionError, match="newcomer"):
        test_objective("newcomer")
    code, last, _ = checked(*SMALL, "--policy_loss", "newcomer")
    assert code == 2
    assert "NOT CHECKED: policy_loss 'newcomer' has no plain version" in last
