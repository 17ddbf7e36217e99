"""What `trl-lossplus explain` says cannot act on-policy, held against every objective's gradient at ratio 1."""

import pytest
from helpers import EVERY_OBJECTIVE, difference, run, tensors

from trl_lossplus import GRPOPlusConfig, LossSpec, aggregate
from trl_lossplus.explain_warnings import Facts, warnings
from trl_lossplus.registry import POLICY_LOSSES

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def explained(**fields):
    return warnings(Facts(GRPOPlusConfig(use_cpu=True, bf16=False, **fields)))


# What of an objective acts where its ratio is 1 although it bounds the ratio, and so is not warned of.
ACT_AT_ONE = [
    {"policy_loss": "rec", "rec_clip": "none", "rec_weight": "importance"},
    {"policy_loss": "tis", "is_ratio_max": 0.5},
    {"policy_loss": "mis", "is_ratio_min": 1.5},
    {"policy_loss": "tis", "is_ratio_max": None},
    {"policy_loss": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
    {"policy_loss": "rollout_ppo", "rollout_is_correction": False},
    {"policy_loss": "real"},
    {"policy_loss": "reinforce"},
]


@pytest.mark.parametrize("fields", ACT_AT_ONE, ids=str)
def test_no_warning_of_what_acts_on_policy(fields):
    assert not [text for text in explained(**fields) if "cannot act" in text]
    assert not [text for text in explained(**fields, num_iterations=2) if "cannot act" in text]


@pytest.mark.parametrize("name", [name for name in EVERY_OBJECTIVE if "old_logps" in POLICY_LOSSES.get(name).requires])
def test_every_objective_that_is_idle_on_policy_is_warned_of(name):
    """
    One whose gradient at ratio 1 is -A a token, but is not where the ratio moved: its clip, mask, gate or penalty cannot act there.
    The warning says so, for each of ours, and the loss is then expected at 0 where the value is minus the mean advantage too.
    """
    spec, batch = GRPOPlusConfig(use_cpu=True, bf16=False, policy_loss=name).loss_spec(), tensors(2)
    batch |= {"advantages": batch["advantages"][:, 0], "token_weights": None, "rollout_weights": None}
    plain = run(batch, LossSpec(policy_loss="reinforce", loss_aggregation=spec.loss_aggregation))[1]
    moved = run(batch, spec)[1]
    output, at_one = run(batch | {"old_logps": batch["logps"].detach().clone()}, spec)
    idle = difference(at_one, plain) < 1e-6 < difference(moved, plain)
    given = explained(policy_loss=name)
    assert bool([text for text in given if "cannot act" in text]) == idle or name == "clip_cov"  # what it draws acts
    minus_mean = aggregate(spec.loss_aggregation, -batch["advantages"][:, None].expand(batch["mask"].shape), batch["mask"])
    expected_0 = abs(output.loss.item() - minus_mean.item()) < 1e-5
    assert bool([text for text in given if "Loss 0 is expected" in text]) == expected_0
