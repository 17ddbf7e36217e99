"""The configuration fields of the added objectives, and what the trainer cannot feed (yet): refused with its reason."""

import dataclasses

import pytest
import yaml
from helpers import EVERY_OBJECTIVE
from trl import TrlParser

from trl_lossplus import GRPOPlusConfig, LossPlusError, register_advantage_estimator, register_policy_loss
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from trl_lossplus.resolve import ESTIMATOR_FIELDS, OBJECTIVE_FIELDS, PLAIN_FIELDS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
CPU = {"use_cpu": True, "bf16": False}


def make(**values):
    return GRPOPlusConfig(**CPU, **values)


# Each field: a value that is not its default, and what reads it.
VALUES = {
    "is_ratio_min": (0.5, {"policy_loss": "tis"}),
    "is_ratio_max": (3.0, {"policy_loss": "mis"}),
    "is_mode": ("mask", {"policy_loss": "rollout_is"}),
    "dppo_ratio_max": (5.0, {"policy_loss": "dppo_tv"}),
    "ipo_threshold": (0.1, {"policy_loss": "ipo"}),
    "ipo_kl_coef": (0.1, {"policy_loss": "ipo"}),
    "ipo_by_sign": (True, {"policy_loss": "ipo"}),
    "dro_beta": (0.5, {"policy_loss": "dro"}),
    "clip_cov_ratio": (0.01, {"policy_loss": "clip_cov"}),
    "clip_cov_min": (0.5, {"policy_loss": "clip_cov"}),
    "clip_cov_max": (9.0, {"policy_loss": "clip_cov"}),
    "kl_cov_ratio": (0.01, {"policy_loss": "kl_cov"}),
    "kl_cov_coef": (1.0, {"policy_loss": "kl_cov"}),
    "cov_seed": (7, {"policy_loss": "clip_cov"}),
    "fipo_decay_rate": (16.0, {"policy_loss": "fipo"}),
    "fipo_clip_range": (0.1, {"policy_loss": "fipo"}),
    "fipo_clip_high_only": (False, {"policy_loss": "fipo"}),
    "fipo_safety_threshold": (3.0, {"policy_loss": "fipo"}),
    "real_tau": (1.0, {"policy_loss": "real"}),
    "rec_clip": ("ring", {"policy_loss": "rec"}),
    "rec_ring_low": (0.5, {"policy_loss": "rec", "rec_clip": "ring"}),
    "rec_ring_high": (3.0, {"policy_loss": "rec", "rec_clip": "ring"}),
    "rec_weight": ("advantage", {"policy_loss": "rec"}),
    "rec_temperature": (2.0, {"policy_loss": "rec", "rec_weight": "advantage"}),
    "m2_threshold": (0.01, {"policy_loss": "m2po"}),
    "opmd_tau": (0.5, {"advantage_estimator": "opmd"}),
    "asymre_shift": (-0.2, {"advantage_estimator": "asymre"}),
    "gamma": (0.9, {"advantage_estimator": "remax"}),
    "f_norm": (2.0, {"advantage_estimator": "gpg"}),
    "alpha_from": ("nonzero", {"advantage_estimator": "gpg"}),
    "handle_zero_tail": (True, {"advantage_estimator": "optimal_token_baseline"}),
    "rollout_rs": ("token_k2", {"policy_loss": "rollout_is", "rollout_rs_threshold": "0.1"}),
    "rollout_rs_threshold": ("0.5_2.0", {"policy_loss": "rollout_is", "rollout_rs": "token_k1"}),
    "rollout_is_batch_normalize": (True, {"rollout_is_correction": True}),
}


@register_advantage_estimator(
    "test_reads_entropies", requires={"entropies"}, traits={"token_level"}, formula="r", source="these tests"
)
def reads_entropies(rewards, mask, entropies):
    return rewards


@register_advantage_estimator("test_by_row", requires={"group_ids", "old_logps"}, formula="s", source="these tests")
def by_row(rewards, group_ids, old_logps):
    return rewards


@register_policy_loss("test_reads_lengths", requires={"lengths"}, formula="0", source="these tests")
def reads_lengths(batch, spec):
    return None


def test_the_table_is_whole():
    assert set(PLAIN_FIELDS) <= VALUES.keys()
    assert all(hasattr(GRPOPlusConfig, name) for name in VALUES)
    options = set().union(*(POLICY_LOSSES.get(name).options for name in POLICY_LOSSES.names()))
    assert options - {"importance_sampling_level", "log_ratio_clamp", "rollout_rs", "rollout_rs_threshold"} <= set(
        OBJECTIVE_FIELDS
    )


@pytest.mark.parametrize("name", VALUES)
def test_yaml_command_line_and_copy(name, tmp_path):
    """All give the value, the spec has it, its help is there; an objective that does not read it is an error."""
    value, needs = VALUES[name]
    values = {**needs, name: value}
    config = make(**values)
    assert getattr(config.loss_spec(), name) == value
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    flags = [word for item in values.items() for word in (f"--{item[0]}", str(item[1]))]
    for arguments in (["--config", str(file)], flags):
        (parsed,) = TrlParser([GRPOPlusConfig]).parse_args_and_config(["--use_cpu", "--bf16", "false", *arguments])
        assert parsed.loss_spec() == config.loss_spec()
    assert dataclasses.replace(config, generation_batch_size=None).loss_spec() == config.loss_spec()
    (item,) = (item for item in dataclasses.fields(GRPOPlusConfig) if item.name == name)
    assert len(item.metadata["help"]) > 12
    if name in ESTIMATOR_FIELDS:
        assert config.estimator_options[name] == value
        with pytest.raises(LossPlusError, match=f"{name}=.*nothing reads it with advantage_estimator 'rloo'"):
            make(advantage_estimator="rloo", **{name: value})
    if name in OBJECTIVE_FIELDS:
        for other in ("gpg", "luspo"):
            with pytest.raises(LossPlusError, match=f"{name}=.*nothing reads it with policy_loss '{other}'"):
                make(policy_loss=other, **{name: value})


@pytest.mark.parametrize("name", EVERY_OBJECTIVE)
def test_every_objective_by_its_name_alone(name):
    """Its defaults are those of the spec; a draw takes the run's seed; the aggregation is its source's."""
    entry = POLICY_LOSSES.get(name)
    if "values" in entry.requires or "token_weights" in entry.requires:
        pytest.skip("not of this trainer")
    spec = make(policy_loss=name, seed=11).loss_spec()
    assert spec.policy_loss == name
    assert spec.cov_seed == (11 if "cov_seed" in entry.options else 0)
    assert spec.loss_aggregation == entry.aggregation
    with pytest.raises(LossPlusError, match="clip_ratio_c=3.0: nothing reads it"):
        make(policy_loss="reinforce", clip_ratio_c=3.0)


def test_numbers_as_thresholds():
    """YAML gives .1 as a number: taken as text."""
    spec = make(policy_loss="rollout_is", rollout_rs="token_k3", rollout_rs_threshold=0.1).loss_spec()
    assert spec.rollout_rs_threshold == "0.1"


MISALIGNED = {"gradient_accumulation_steps": 2, "steps_per_generation": 3}
REFUSED = [
    ({"rollout_is_batch_normalize": True}, ["rollout_is_batch_normalize=True", "Set rollout_is_correction=True"]),
    ({"policy_loss": "real", "steps_per_generation": 2}, ["policy_loss='real'", "whole rollout", "num_iterations"]),
    ({"policy_loss": "kl_cov", **MISALIGNED}, ["policy_loss='kl_cov'", "a whole optimizer step", "steps_per_generation (3)"]),
    ({"policy_loss": "clip_cov", **MISALIGNED}, ["policy_loss='clip_cov'", "gradient_accumulation_steps (2)"]),
    ({"advantage_estimator": "test_reads_entropies"}, ["(test_reads_entropies) reads entropies (B, T)", "does not hand it over"]),
    ({"advantage_estimator": "test_by_row"}, ["'test_by_row' reads old_logps (B, T)", "traits={'token_level'}"]),
    ({"policy_loss": "test_reads_lengths"}, ["policy (test_reads_lengths) reads lengths (B,)", "does not hand it over"]),
    ({"gamma": 0.9}, ["gamma=0.9", "nothing reads it with advantage_estimator 'grpo'"]),
    ({"advantage_estimator": "gae"}, ["old_values", "PPOPlusTrainer for a critic"]),
    ({"rollout_rs": "token_k9", "rollout_rs_threshold": "2"}, ["rollout_rs='token_k9'", "Did you mean"]),
    ({"rollout_rs_threshold": "2"}, ["rollout_rs_threshold='2'", "Set rollout_rs"]),
    ({"policy_loss": "tis", "is_ratio_min": 3.0}, ["is_ratio_min=3.0", "< is_ratio_max"]),
    ({"policy_loss": "kl_cov", "kl_cov_ratio": 1.5}, ["kl_cov_ratio=1.5", "at most 1"]),
    ({"policy_loss": "tis", "importance_sampling_level": "sequence"}, ["importance_sampling_level='sequence'", "'tis'"]),
    ({"f_norm": 2.0}, ["f_norm=2.0", "nothing reads it with advantage_estimator"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_refused(fields, words):
    """What a trainer cannot feed, or nothing reads: named with its value and the remedy (here of one that does the least)."""
    with pytest.raises(LossPlusError) as error:
        make(**fields)
    for word in words:
        assert word in str(error.value), str(error.value)


OURS = [name for name in ADVANTAGE_ESTIMATORS.names() if not name.startswith("test_")]


@pytest.mark.parametrize("name", OURS)
def test_every_estimator_is_taken_or_refused(name):
    """By its name alone: a configuration, or an error that names the tensor that is missing."""
    missing = ADVANTAGE_ESTIMATORS.get(name).requires & GRPOPlusConfig.not_supplied
    if missing:
        with pytest.raises(LossPlusError, match=f"advantage_estimator .{name}. reads ({'|'.join(missing)})"):
            make(advantage_estimator=name)
    else:
        spec = make(advantage_estimator=name).loss_spec()
        assert spec.advantage_estimator == name
        assert (spec.advantage_normalization == "rollout") == ("whitened" in ADVANTAGE_ESTIMATORS.get(name).traits)
