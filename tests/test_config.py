"""GRPOPlusConfig: every field has its help and is read from YAML and command line, None means TRL's, and conflicts are errors."""

import ast
import dataclasses
import traceback
from pathlib import Path

import pytest
import yaml
from test_config_more import REFUSED
from test_config_more import VALUES as ELSEWHERE
from trl import GRPOConfig, TrlParser

from trl_lossplus import GRPOPlusConfig, LossPlusError, LossSpec, PPOPlusConfig, register_advantage_estimator
from trl_lossplus import config as config_module
from trl_lossplus import ppo_config as ppo_module
from trl_lossplus import resolve as resolve_module
from trl_lossplus import spec as spec_module

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

THEIRS = {item.name: item for item in dataclasses.fields(GRPOConfig)}
NEW = {
    item.name: item
    for item in dataclasses.fields(GRPOPlusConfig)
    if item.name not in ELSEWHERE and (item.name not in THEIRS or item.metadata != THEIRS[item.name].metadata)
}
PPO_NEW = {
    item.name: item
    for item in dataclasses.fields(PPOPlusConfig)
    if item.name not in {*NEW, *ELSEWHERE} and (item.name not in THEIRS or item.metadata != THEIRS[item.name].metadata)
}
CPU = {"use_cpu": True, "bf16": False}


def make(**values):
    return GRPOPlusConfig(**CPU, **values)


def make_ppo(**values):
    return PPOPlusConfig(**CPU, **values)


def parse(*arguments, kind=GRPOPlusConfig):
    (config,) = TrlParser([kind]).parse_args_and_config(["--use_cpu", "--bf16", "false", *arguments])
    return config


# Each new field: a value that is not its default, and what it needs beside it.
LOSS_KL, REWARD_KL = {"beta": 0.1}, {"kl_placement": "reward", "kl_reward_coef": 0.1}
ADAPTIVE = {**LOSS_KL, "kl_controller": "adaptive", "kl_target": 0.1}
RESAMPLE = {"zero_std_groups": "resample"}
VALUES = {
    "loss_type": ("grpo", {}),
    "scale_rewards": ("batch", {}),
    "use_bias_correction_kl": (False, LOSS_KL),
    "policy_loss": ("gspo", {}),
    "clip_objective": ("max", {}),
    "clip_ratio_c": (3.0, {}),
    "log_ratio_clamp": (10.0, {}),
    "cispo_ratio_min": (0.5, {"policy_loss": "cispo"}),
    "loss_aggregation": ("prompt_mean", {}),
    "advantage_estimator": ("rloo", {}),
    "advantage_normalization": ("learner", {}),
    "advantage_norm_scope": ("group", {"advantage_normalization": "rollout"}),
    "kl_estimator": ("k3+", LOSS_KL),
    "kl_placement": ("both", {"beta": 0.1, "kl_reward_coef": 0.2}),
    "kl_reward_coef": (0.2, {"kl_placement": "reward"}),
    "kl_reward_level": ("token", REWARD_KL),
    "kl_controller": ("adaptive", {**LOSS_KL, "kl_target": 0.1}),
    "kl_target": (0.2, {**LOSS_KL, "kl_controller": "adaptive"}),
    "kl_horizon": (100.0, ADAPTIVE),
    "zero_std_groups": ("drop", {}),
    "resample_max_tries": (3, RESAMPLE),
    "resample_exhausted": ("raise", RESAMPLE),
    "rollout_is_correction": (True, {}),
    "microbatch_layout": ("packed", {}),
    "max_tokens_per_microbatch": (4096, {}),
    "skip_still_rows": (True, {}),
    "compact_generation": (True, {}),
    "merged_generation": (True, {}),
    "probes": ("full", {}),
    "nonfinite_policy": ("skip", {}),
    "nonfinite_max_skips": (5, {"nonfinite_policy": "skip"}),
    "loss_table_rows": (2, {}),
    "snapshot_steps": ([3], {}),
    "snapshot_on": (["nonfinite", "finding"], {}),
    "snapshot_dir": ("some/where", {}),
    "snapshot_rows": (64, {}),
}
HUBER, SHARED = {"value_loss": "huber"}, {"critic": "shared"}
PPO_VALUES = {
    "num_generations": (4, {}),
    "critic": ("shared", {}),
    "critic_model_name_or_path": ("some/where", {}),
    "critic_learning_rate": (1e-5, {}),
    "critic_lr_scheduler_type": ("constant", {}),
    "critic_warmup_steps": (20, {}),
    "critic_gradient_checkpointing": (False, {}),
    "critic_detach": (True, SHARED),
    "gae_lambda": (0.9, {}),
    "gae_lambda_critic": (1.0, {}),
    "vf_coef": (0.5, {}),
    "value_loss": ("huber", {}),
    "huber_delta": (0.5, HUBER),
    "cliprange_value": (0.5, {}),
    "whiten_rewards": (True, {}),
    "truncated_completions": ("bootstrap", {}),
    "missing_eos_penalty": (1.0, {}),
}


def test_every_new_field_is_in_the_table_of_values():
    """The tables above are whole, so what the tests below say of them holds of every field."""
    assert VALUES.keys() == NEW.keys()
    assert PPO_VALUES.keys() == PPO_NEW.keys()


@pytest.mark.parametrize("item", [*NEW.values(), *PPO_NEW.values()], ids=lambda item: item.name)
def test_help(item):
    """Help text: there, one paragraph, and safe for argparse, which formats it."""
    text = item.metadata["help"]
    assert len(text) > (20 if item.name in NEW else 12)
    assert "\n" not in text
    assert text % {} == text


@pytest.mark.parametrize(
    ("kind", "name"), [*((GRPOPlusConfig, name) for name in NEW), *((PPOPlusConfig, name) for name in PPO_NEW)]
)
def test_yaml_and_command_line(kind, name, tmp_path):
    """Both give the value, the spec has it, and the command line wins over the file."""
    value, needs = (VALUES if kind is GRPOPlusConfig else PPO_VALUES)[name]
    values = {**needs, name: value}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    words = {key: [str(part) for part in (given if isinstance(given, list) else [given])] for key, given in values.items()}
    flags = [word for key, given in words.items() for word in (f"--{key}", *given)]
    spec = kind(**CPU, **values).loss_spec()
    assert getattr(spec, name, value) == value
    others = {float: 1.5 if name != "gae_lambda" else 0.5, bool: not value, int: 8}
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**values, name: others.get(type(value))}))
    for config in (
        parse("--config", str(file), kind=kind),
        parse(*flags, kind=kind),
        parse("--config", str(other), f"--{name}", *words[name], kind=kind),
    ):
        assert getattr(config, name) == value
        assert config.loss_spec() == spec


@pytest.mark.parametrize(("written", "meant"), [("false", "none"), ("true", "group"), ("none", "none"), ("null", "group")])
def test_scale_rewards_as_trl_writes_it(written, meant, tmp_path):
    """TRL's booleans and names, from YAML; null is the default."""
    file = tmp_path / "config.yaml"
    file.write_text(f"scale_rewards: {written}\n")
    assert parse("--config", str(file)).loss_spec().scale_rewards == meant


def test_numbers_that_yaml_takes_for_text(tmp_path):
    """`1e-3` is text to YAML 1.1; the parser makes it a number."""
    file = tmp_path / "config.yaml"
    file.write_text("beta: 1e-3\nepsilon: 3e-4\n")
    assert (parse("--config", str(file)).beta, parse("--config", str(file)).epsilon) == (1e-3, 3e-4)


# TRL's loss_type -> objective, aggregation, upper clip bound; the level is the configuration's.
TRL = {
    "grpo": ("ppo_clip", "seq_mean_token_mean", None, None),
    "bnpo": ("ppo_clip", "token_mean", None, None),
    "dr_grpo": ("ppo_clip", "seq_mean_token_sum_norm", None, 512),
    "dapo": ("ppo_clip", "token_mean", None, None),
    "cispo": ("cispo", "token_mean", 0.2, None),
    "sapo": ("sapo", "seq_mean_token_mean", None, None),
    "luspo": ("ppo_clip", "seq_mean_token_sum", None, None),
    "vespo": ("vespo", "token_mean", None, None),
    None: ("ppo_clip", "token_mean", None, None),
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TRL)
def test_none_means_trls(loss_type, level):
    """
    TRL's fields alone: its objective, aggregation and KL (k3 in the loss, times the ratio).

    vespo at sequence level is read by the KL's ratio alone, as in TRL, so without a KL it is refused.
    """
    objective, aggregation, epsilon_high, norm_length = TRL[loss_type]
    expected = LossSpec(
        policy_loss=objective,
        loss_aggregation=aggregation,
        epsilon_high=epsilon_high,
        norm_length=norm_length,
        importance_sampling_level=level,
        beta=0.05,
        use_bias_correction_kl=True,
    )
    config = make(loss_type=loss_type, importance_sampling_level=level, beta=0.05)
    assert config.loss_spec() == expected
    assert config.counts_empty_rows
    assert (config.loss_type, config.scale_rewards, config.use_bias_correction_kl) == (loss_type, None, None), "as written"
    if (loss_type, level) == ("vespo", "sequence"):
        with pytest.raises(LossPlusError, match="importance_sampling_level='sequence'"):
            make(loss_type=loss_type, importance_sampling_level=level)
        return
    without = make(loss_type=loss_type, importance_sampling_level=level).loss_spec()
    assert without == dataclasses.replace(
        expected, beta=0.0, kl_placement="none", use_bias_correction_kl=False, kl_estimator=without.kl_estimator
    )


@pytest.mark.parametrize("loss_type", [name for name in TRL if name not in ("sapo", "vespo")])
def test_trls_epsilon_high_is_taken_as_it_is(loss_type):
    assert make(loss_type=loss_type, epsilon_high=0.28).loss_spec().epsilon_high == 0.28


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"policy_loss": "gspo"}, "seq_mean_token_mean"),
        ({"policy_loss": "gspo", "loss_type": "dapo"}, "token_mean"),
        ({"policy_loss": "luspo"}, "seq_mean_token_sum"),
        ({"policy_loss": "gspo", "loss_aggregation": "token_sum"}, "token_sum"),
        ({"loss_type": "grpo", "loss_aggregation": "token_mean"}, "token_mean"),
    ],
)
def test_aggregation_named_by_the_user_or_the_source(fields, expected):
    """A chosen objective brings its source's aggregation; loss_type, then loss_aggregation, overrule it."""
    config = make(**fields)
    assert config.loss_spec().loss_aggregation == expected
    assert not config.counts_empty_rows


@pytest.mark.parametrize(
    ("estimator", "in_loss", "corrected"),
    [
        (None, "k3", True), ("k1", "k1", True), ("low_var_kl", "low_var_kl", True), ("kl", "kl", True),
        ("abs", "abs", False), ("k2", "k2", False), ("mse", "mse", False), ("k1+", "k1+", False), ("k3+", "k3+", False),
        ("abs+", "abs+", False),
    ],
)  # fmt: skip
def test_bias_correction_left_at_none(estimator, in_loss, corrected):
    """On for the estimators that it makes right, off for those that it would make wrong, and for abs, which it leaves wrong."""
    config = make(beta=0.1, kl_estimator=estimator)
    spec = config.loss_spec()
    assert (spec.kl_estimator, spec.use_bias_correction_kl) == (in_loss, corrected)
    assert config.use_bias_correction_kl is None
    if in_loss in ("k1", "k3", "abs"):
        for asked in (True, False):
            assert make(beta=0.1, kl_estimator=in_loss, use_bias_correction_kl=asked).loss_spec().use_bias_correction_kl is asked
    assert make(**REWARD_KL).loss_spec().kl_estimator == "k1"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"policy_loss": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "cispo", "beta": 0.1},
        {"advantage_normalization": "rollout"},
        {"kl_placement": "reward", "kl_reward_coef": 0.1, "kl_reward_level": "token"},
        {"loss_aggregation": "seq_mean_token_mean", "advantage_estimator": "rloo"},
    ],
    ids=str,
)
def test_fields_stay_as_they_were_written(fields):
    """Nothing of ours is filled in, so a copy by dataclasses.replace means the same loss; None stays None."""
    config = make(**fields)
    for name, item in NEW.items():
        assert getattr(config, name) == fields.get(name, item.default), name
    copy = dataclasses.replace(config, generation_batch_size=None)
    assert copy.loss_spec() == config.loss_spec()
    assert copy.counts_empty_rows == config.counts_empty_rows
    other = dataclasses.replace(
        config, generation_batch_size=None, loss_type=None, policy_loss="sapo", epsilon=0.2, epsilon_high=None
    )
    assert other.loss_spec().policy_loss == "sapo"


def test_ppo_defaults():
    """
    PPO: gae, whitened once and over the rollout, a value loss, token-level KL in the reward, one completion a prompt; a
    cliprange_value of 0 means none. A copy means the same loss.
    """
    config = make_ppo(kl_placement="reward", kl_reward_coef=0.05)
    spec = config.loss_spec()
    assert spec == LossSpec(
        advantage_estimator="gae", scale_rewards="none", advantage_normalization="rollout", vf_coef=0.1, kl_estimator="k1",
        kl_placement="reward", kl_reward_coef=0.05, kl_reward_level="token",
    )  # fmt: skip
    assert config.estimator_options == {"gamma": 1.0, "gae_lambda": 0.95, "gae_lambda_critic": None}
    assert (config.num_generations, config.generation_batch_size, config.prompts_per_rollout) == (1, 8, 8)
    assert make_ppo(cliprange_value=0).loss_spec().cliprange_value is None
    assert dataclasses.replace(config, generation_batch_size=None).loss_spec() == spec
    for scope in ("batch", "group", "sequence"):  # the advantages vary along a row
        assert make_ppo(advantage_norm_scope=scope).loss_spec().advantage_norm_scope == scope
    assert make_ppo(advantage_normalization="none").loss_spec().advantage_normalization == "none"


@pytest.mark.parametrize(
    "fields",
    [
        {"microbatch_layout": "auto", "router_aux_loss_coef": 0.1},
        {"microbatch_layout": "packed", "router_aux_loss_coef": 0.0},
        {"microbatch_layout": "packed", "model_init_kwargs": {"attn_implementation": "flash_attention_2"}},
        {"microbatch_layout": "shared_prefix", "model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "float32"}},
        {"sync_ref_model": True, "kl_placement": "reward", "kl_reward_coef": 0.1},
        {"skip_still_rows": True, "router_aux_loss_coef": 0.0},
    ],
    ids=str,
)
def test_what_the_model_may_allow_is_allowed(fields):
    assert make(**fields).loss_spec()


def test_rec_without_a_clip_reads_a_ratio_for_its_weight():
    """rec_clip none: the level of the ratio is read by an importance weight, and by a KL that is multiplied by the ratio."""
    none = {"policy_loss": "rec", "rec_clip": "none", "importance_sampling_level": "sequence"}
    assert make(**none, rec_weight="importance").loss_spec().sequence_level
    assert make(**none, beta=0.1).loss_spec().sequence_level
    assert make(policy_loss="rec", rec_clip="none", epsilon=0.2).loss_spec().epsilon == 0.2  # its default: not set


# Conflicts: fields, and what the message must name: the field, its value, what to do.
SPLIT = {"gradient_accumulation_steps": 2, "steps_per_generation": 3}
CONFLICTS = [
    ({"policy_loss": "rec", "rec_ring_low": 0.5}, ["rec_ring_low=0.5", "rec_clip='one_side'", "nothing reads it", "Set rec_clip='ring'"]),
    ({"policy_loss": "rec", "rec_clip": "ring", "epsilon": 0.7}, ["rec_ring_low=0.6", "epsilon=0.7", "it must be > epsilon"]),
    *(
        ({"policy_loss": "rec", "rec_clip": "none", name: 0.3}, [f"{name}=0.3 with rec_clip='none'", "nothing reads it", "Set rec_clip to one of one_side, two_side, ring, or remove it"])
        for name in ("epsilon", "epsilon_high")
    ),
    ({"policy_loss": "rec", "rec_clip": "none", "importance_sampling_level": "sequence"}, ["importance_sampling_level='sequence' with rec_clip='none' and rec_weight='none'", "nothing reads it", "or rec_weight='importance', or remove it"]),
    # a KL coefficient that nothing reads, KL in two places (C7)
    ({"kl_reward_coef": 0.1}, ["kl_reward_coef=0.1", "nothing reads it", "kl_placement='reward'"]),
    ({"kl_reward_coef": 0.1, "beta": 0.2}, ["kl_reward_coef=0.1", "nothing reads it", "kl_placement='both'"]),
    ({"beta": 0.1, "kl_placement": "none"}, ["beta=0.1", "kl_placement='none'", "Set it to 0"]),
    ({"kl_reward_coef": 0.1, "kl_placement": "none"}, ["kl_reward_coef=0.1", "kl_placement='none'", "Set it to 0"]),
    ({"beta": 0.1, "kl_placement": "reward", "kl_reward_coef": 0.1}, ["beta=0.1", "'reward'", "kl_placement='both'"]),
    ({"beta": 0.1, "kl_placement": "loss", "kl_reward_coef": 0.2}, ["kl_reward_coef=0.2", "'loss'", "kl_placement='both'"]),
    ({"kl_placement": "loss"}, ["kl_placement='loss'", "beta > 0"]),
    ({"kl_placement": "reward"}, ["kl_placement='reward'", "kl_reward_coef > 0"]),
    ({"kl_placement": "both", "beta": 0.1}, ["kl_placement='both'", "kl_reward_coef > 0"]),
    # settings of a KL that is not there
    ({"kl_estimator": "k2"}, ["kl_estimator='k2'", "nothing reads it", "kl_placement", "remove it"]),
    ({"kl_controller": "adaptive"}, ["kl_controller='adaptive'", "nothing reads it", "kl_placement"]),
    ({"kl_reward_level": "token", "beta": 0.1}, ["kl_reward_level='token'", "nothing reads it", "kl_placement"]),
    ({"kl_target": 0.1, "beta": 0.1}, ["kl_target=0.1", "nothing reads it", "kl_controller='adaptive'"]),
    ({"kl_horizon": 10.0, "beta": 0.1}, ["kl_horizon=10.0", "nothing reads it", "kl_controller='adaptive'"]),
    ({"use_bias_correction_kl": True}, ["use_bias_correction_kl=True", "nothing reads it", "kl_placement"]),
    ({"use_bias_correction_kl": True, **REWARD_KL}, ["use_bias_correction_kl=True", "nothing reads it"]),
    # bias correction that would be wrong
    *(
        ({"beta": 0.1, "use_bias_correction_kl": True, "kl_estimator": name}, ["use_bias_correction_kl=True", f"'{name}'", "Set"])
        for name in ("k2", "mse", "biased_kl", "k2+", "k1+", "k3+", "abs+", "low_var_kl+")
    ),
    # adaptive control (D2)
    ({"beta": 0.1, "kl_controller": "adaptive"}, ["kl_controller='adaptive'", "needs kl_target"]),
    ({**ADAPTIVE, "kl_target": 0.0}, ["kl_target=0.0", "> 0"]),
    ({**ADAPTIVE, "kl_target": -1.0}, ["kl_target=-1.0", "> 0"]),
    ({**ADAPTIVE, "kl_horizon": 0.0}, ["kl_horizon=0.0", "> 0"]),
    ({**ADAPTIVE, "kl_horizon": -5.0}, ["kl_horizon=-5.0", "> 0"]),
    ({**ADAPTIVE, "kl_horizon": 1.6}, ["kl_horizon=1.6", "rollouts of 8 completions", "10000 is usual"]),
    ({**ADAPTIVE, "beta": 0.0}, ["kl_controller='adaptive'", "nothing reads it"]),
    ({**ADAPTIVE, "beta": 0.0, "kl_placement": "loss"}, ["kl_placement='loss'", "beta > 0"]),
    # normalization twice, or of nothing
    *(
        ({"scale_rewards": scale, "advantage_normalization": side}, [f"scale_rewards='{scale}'", f"'{side}'", "twice", "Set"])
        for scale in ("group", "batch") for side in ("rollout", "learner")
    ),
    ({"scale_rewards": "group", "advantage_estimator": "rloo"}, ["scale_rewards='group'", "'rloo'", "Set"]),
    ({"advantage_estimator": "gdpo", "advantage_normalization": "learner"}, ["'learner'", "gdpo", "twice", "Remove"]),
    ({"advantage_estimator": "gdpo", "advantage_normalization": "none"}, ["advantage_normalization='none'", "gdpo", "Remove"]),
    ({"advantage_estimator": "gdpo", "scale_rewards": "none"}, ["scale_rewards='none'", "gdpo", "Remove scale_rewards"]),
    ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"}, ["scale_rewards='batch'", "'gdpo'"]),
    (
        {"multi_objective_aggregation": "normalize_then_sum", "advantage_estimator": "rloo"},
        ["multi_objective_aggregation='normalize_then_sum'", "'rloo'", "Set advantage_estimator='gdpo'"],
    ),
    ({"advantage_estimator": "gdpo", **REWARD_KL}, ["kl_placement='reward'", "'gdpo'", "Set kl_reward_level='token'"]),
    ({"advantage_norm_scope": "group"}, ["advantage_norm_scope='group'", "nothing reads it", "Set advantage_normalization"]),
    *(
        (
            {"advantage_norm_scope": "sequence", "advantage_normalization": side, "advantage_estimator": name},
            ["advantage_norm_scope='sequence'", "constant", "Set batch or group"],
        )
        for side in ("rollout", "learner") for name in ("grpo", "rloo", "maxrl")
    ),
    (
        {"advantage_norm_scope": "sequence", "advantage_normalization": "rollout", **REWARD_KL, "kl_reward_level": "token"},
        ["advantage_norm_scope='sequence'", "constant", "Set batch or group"],
    ),
    # what the objective does not read
    ({"policy_loss": "sapo", "delta": 4.0}, ["delta=4.0", "'sapo'", "Remove it"]),
    ({"policy_loss": "sapo", "epsilon_high": 0.3}, ["epsilon_high=0.3", "'sapo'", "Remove it"]),
    ({"loss_type": "cispo", "clip_ratio_c": 3.0}, ["clip_ratio_c=3.0", "'cispo'", "Remove it"]),
    ({"policy_loss": "vespo", "clip_objective": "max"}, ["clip_objective='max'", "'vespo'", "Remove it"]),
    ({"policy_loss": "sapo", "epsilon": 0.3}, ["epsilon=0.3", "nothing reads it", "'sapo'", "Read: ", "sapo_temperature_pos"]),
    ({"policy_loss": "cispo", "epsilon": 0.3}, ["epsilon=0.3", "nothing reads it", "'cispo'", "Read: cispo_ratio_min"]),
    *(({name: 9.0}, [f"{name}=9.0", "'ppo_clip'", "Remove it"]) for name in
      ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
    *(({name: 0.5}, [f"{name}=0.5", "nothing reads it"]) for name in
      ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")),
    ({"loss_type": "grpo", "policy_loss": "gspo", "loss_aggregation": "token_mean"}, ["loss_type='grpo'", "Remove it"]),
    ({"kl_placement": "reward", "kl_reward_coef": 0.1, "kl_estimator": "k3+"},
     ["kl_estimator='k3+'", "kl_placement='reward'", "Set kl_estimator='k3'"]),
    ({"cispo_ratio_min": 0.5}, ["cispo_ratio_min=0.5", "'ppo_clip'", "Remove it"]),
    ({"policy_loss": "gmpo", "importance_sampling_level": "sequence"}, ["importance_sampling_level='sequence'", "'gmpo'"]),
    ({"zero_std_groups": "no_kl"}, ["zero_std_groups='no_kl'", "no KL in the loss"]),
    ({"resample_max_tries": 3}, ["resample_max_tries=3", "nothing reads it", "zero_std_groups='resample'"]),
    ({"resample_exhausted": "raise", "zero_std_groups": "drop"}, ["resample_exhausted='raise'", "nothing reads it"]),
    ({**RESAMPLE, "resample_max_tries": 0}, ["resample_max_tries=0", ">= 1"]),
    ({**RESAMPLE, "resample_exhausted": "rise"}, ["resample_exhausted='rise'", "Did you mean 'raise'"]),
    ({"loss_type": "sapo", "policy_loss": "gspo"}, ["loss_type='sapo'", "policy_loss='gspo'", "Remove loss_type"]),
    ({"loss_type": "dr_grpo", "max_completion_length": None}, ["'seq_mean_token_sum_norm'", "None", "set it to a token count"]),
    ({"advantage_estimator": "gae"}, ["advantage_estimator (gae)", "old_values", "PPOPlusConfig"]),
    # windows
    ({"advantage_normalization": "learner", **SPLIT}, ["advantage_normalization='learner'", "(3)", "(2)", "multiple"]),
    ({"loss_aggregation": "prompt_mean", **SPLIT}, ["loss_aggregation='prompt_mean'", "(3)", "(2)", "multiple"]),
    # numbers out of their range
    ({"clip_ratio_c": 1.0}, ["clip_ratio_c=1.0", "must be > 1"]),
    ({"clip_ratio_c": 0.5}, ["clip_ratio_c=0.5", "must be > 1"]),
    ({"epsilon": -0.1}, ["epsilon=-0.1", ">= 0"]),
    ({"epsilon_high": -0.1}, ["epsilon_high=-0.1", ">= 0"]),
    ({"beta": -0.1}, ["beta=-0.1", ">= 0"]),
    ({"beta": float("nan")}, ["beta=nan", ">= 0"]),
    ({"kl_placement": "reward", "kl_reward_coef": -0.1}, ["kl_reward_coef=-0.1", ">= 0"]),
    ({"top_entropy_quantile": 1.5}, ["top_entropy_quantile=1.5", "in [0, 1]"]),
    ({"log_ratio_clamp": 0.0}, ["log_ratio_clamp=0.0", "> 0"]),
    ({"delta": 0.0}, ["delta=0.0", "> 0"]),
    ({"loss_type": "sapo", "sapo_temperature_pos": 0.0}, ["sapo_temperature_pos=0.0", "> 0"]),
    ({"policy_loss": "cispo", "epsilon_high": 1.2, "cispo_ratio_min": 2.0}, ["cispo_ratio_min=2.0", "<= epsilon_high, 1.2"]),
    ({"entropy_coef": float("nan")}, ["entropy_coef=nan", "must be a number"]),
    ({"num_iterations": 0}, ["num_iterations=0", ">= 1"]),
    # unknown names, with the nearest
    ({"loss_type": "dpao"}, ["loss_type='dpao'", "'dapo'", "Allowed: bnpo"]),
    ({"policy_loss": "ppo_clipp"}, ["policy_loss='ppo_clipp'", "Did you mean 'ppo_clip'", "package.module:function"]),
    ({"policy_loss": "no_such_module:f"}, ["policy_loss='no_such_module:f'", "cannot be imported"]),
    ({"clip_objective": "mim"}, ["clip_objective='mim'", "Did you mean 'min'", "Allowed: max, min"]),
    ({"importance_sampling_level": "tokens"}, ["importance_sampling_level='tokens'", "Did you mean 'token'"]),
    ({"loss_aggregation": "token_meen"}, ["loss_aggregation='token_meen'", "Did you mean 'token_mean'"]),
    ({"advantage_estimator": "rlo"}, ["advantage_estimator='rlo'", "Did you mean 'rloo'"]),
    ({"scale_rewards": "groups"}, ["scale_rewards='groups'", "Did you mean 'group'"]),
    ({"advantage_normalization": "learners"}, ["advantage_normalization='learners'", "Did you mean 'learner'"]),
    (
        {"advantage_norm_scope": "groop", "advantage_normalization": "rollout"},
        ["advantage_norm_scope='groop'", "Did you mean 'group'"],
    ),
    ({"kl_estimator": "k4", "beta": 0.1}, ["kl_estimator='k4'", "Did you mean 'k3'?", "Allowed: abs, abs+", "low_var_kl"]),
    ({"kl_placement": "rewards"}, ["kl_placement='rewards'", "Did you mean 'reward'"]),
    ({"kl_controller": "adaptiv", "beta": 0.1}, ["kl_controller='adaptiv'", "Did you mean 'adaptive'"]),
    ({"kl_reward_level": "tokn", **REWARD_KL}, ["kl_reward_level='tokn'", "Did you mean 'token'"]),
    ({"zero_std_groups": "dropp"}, ["zero_std_groups='dropp'", "Did you mean 'drop'"]),
    ({"multi_objective_aggregation": "normalise_then_sum"}, ["='normalise_then_sum'", "Did you mean 'normalize_then_sum'"]),
    ({"vllm_importance_sampling_mode": "token_mas"}, ["vllm_importance_sampling_mode='token_mas'", "Did you mean 'token_mask'"]),
    # '' and false are no choices (None is the default's name)
    *(
        ({**(VALUES[name][1]), name: wrong}, [f"{name}={wrong!r} is not known", "Allowed"])
        for name in ("loss_type", "policy_loss", "loss_aggregation", "advantage_normalization", "advantage_norm_scope",
                     "kl_estimator", "kl_placement", "kl_controller", "kl_reward_level", "clip_objective", "zero_std_groups",
                     "advantage_estimator")
        for wrong in ("", False)
    ),
    ({"scale_rewards": ""}, ["scale_rewards='' is not known", "Allowed"]),
    ({"probes": "al"}, ["probes='al'", "Allowed: full, off, summary"]),
    ({"nonfinite_policy": "skipp"}, ["nonfinite_policy='skipp'", "Did you mean 'skip'"]),
    ({"nonfinite_max_skips": 0}, ["nonfinite_max_skips=0", ">= 1"]),
    ({"snapshot_rows": 0}, ["snapshot_rows=0", ">= 1"]),
    ({"loss_table_rows": -1}, ["loss_table_rows=-1", ">= 0"]),
    *(
        ({"snapshot_on": wrong}, ["snapshot_on='nonfinit'", "Did you mean 'nonfinite'", "finding"])
        for wrong in ("nonfinit", "finding,nonfinit", ["finding", "nonfinit"], ["finding, nonfinit"])
    ),
    *(({"snapshot_on": wrong}, [f"snapshot_on={word!r} is not known", "Allowed"]) for wrong, word in (("", ""), ([], ""), (True, True))),
    *(({"snapshot_steps": wrong}, [f"snapshot_steps={wrong!r}", "a list of whole numbers >= 0, or None"])
      for wrong in ("abc", 3, [1.5], [True], [-1], ["a"])),
    ({"skip_still_rows": True, "beta": 0.1}, ["skip_still_rows=True would change the gradient", "the kl term acts", "Set it to False"]),
    # what a router's coefficient, the attention or the reference rule out whatever the model
    ({"skip_still_rows": True, "router_aux_loss_coef": 0.1}, ["skip_still_rows=True", "the auxiliary loss of the router acts"]),
    ({"max_tokens_per_microbatch": 99, "router_aux_loss_coef": 0.1}, ["max_tokens_per_microbatch=99", "router", "Leave it unset"]),
    *(
        ({"microbatch_layout": layout, **more}, [f"microbatch_layout={layout!r} is not exact here", word, "Take padded, or auto"])
        for layout, more, word in (
            ("packed", {"router_aux_loss_coef": 0.1}, "the router's auxiliary loss"),
            ("shared_prefix", {"router_aux_loss_coef": 0.1}, "the router's auxiliary loss"),
            ("packed", {"model_init_kwargs": {"attn_implementation": "eager"}}, "attn_implementation is 'eager'"),
            ("shared_prefix", {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}, "no rows that share a prompt"),
        )
    ),
    # types that a field does not take
    *(({"snapshot_steps": value}, [f"snapshot_steps={value!r}", "a list of whole numbers >= 0, or None"])
      for value in (5, "5", {"a": 1}, [1, "x"], [True], [[1]])),
    *(({"snapshot_dir": value}, [f"snapshot_dir={value!r}", "a path or a name, or None"]) for value in (5, ["x"], "")),
    *(({name: value}, [f"{name}={value!r} is not known", "Allowed: "])
      for name in ("snapshot_on", "kl_estimator", "rollout_rs", "loss_type") for value in (5, {"a": 1})),
    ({"sync_ref_model": True}, ["sync_ref_model=True", "there is no KL", "Set beta > 0"]),
    ({"skip_still_rows": True, "entropy_coef": 0.1}, ["skip_still_rows=True", "the entropy bonus acts on every row"]),
    *(({"compact_generation": True, name: value}, ["compact_generation=True", word, "Set it to False"])
      for name, value, word in (("use_vllm", True, "vLLM"), ("generation_kwargs", {"num_beams": 2}, "num_beams"))),
    ({"merged_generation": True, "use_vllm": True}, ["merged_generation=True", "to which TRL sends merged weights", "Set it to False"]),
    ({"num_generations": 5}, ["num_generations=5 does not divide the 8 completions", "Allowed with these: 2, 4, 8."]),
    ({"critic": "adapter"}, ["critic='adapter'", "GRPOPlusConfig has no critic", "PPOPlusConfig and PPOPlusTrainer"]),
    ({"gae_lambda": 0.9}, ["gae_lambda=0.9", "PPOPlusConfig"]),
    ({"nonfinite_policy": "skip", "fp16": True}, ["nonfinite_policy='skip'", "Set it to raise"]),
]  # fmt: skip


register_advantage_estimator("test_by_token", requires={"old_values"}, traits={"token_level"}, formula="r", source="these tests")(
    lambda r, v, m: r
)

# The same for PPO's own fields.
PPO_CONFLICTS = [
    ({"critic": "adaptor"}, ["critic='adaptor'", "Did you mean 'adapter'", "Allowed: adapter, model, shared"]),
    ({"truncated_completions": "terminate"}, ["truncated_completions='terminate'", "Did you mean 'terminal'"]),
    ({"vf_coef": 0.0}, ["vf_coef=0.0", "must be > 0"]),
    ({"vf_coef": float("nan")}, ["vf_coef=nan", "must be > 0"]),
    ({"critic_warmup_steps": -1}, ["critic_warmup_steps=-1", ">= 0"]),
    ({"critic_learning_rate": -1e-5}, ["critic_learning_rate=-1e-05", ">= 0"]),
    ({"missing_eos_penalty": -1.0}, ["missing_eos_penalty=-1.0", ">= 0"]),
    ({"critic_lr_scheduler_type": "cosin"}, ["critic_lr_scheduler_type='cosin'", "Did you mean 'cosine'"]),
    *(({"critic_model_name_or_path": wrong}, [f"critic_model_name_or_path={wrong!r}", "a path or a name, or None"]) for wrong in (5, "", True)),
    ({"critic_detach": True}, ["critic_detach=True", "critic='shared'", "critic is None"]),
    ({"critic_detach": True, "critic": "model"}, ["critic_detach=True", "critic is 'model'"]),
    ({"critic_gradient_checkpointing": False, "critic": "shared"},
     ["critic_gradient_checkpointing=False", "no pass of its own", "Allowed with adapter and model"]),
    ({"critic_gradient_checkpointing": True, "gradient_checkpointing": False},
     ["critic_gradient_checkpointing=True", "gradient_checkpointing=True"]),
    ({"huber_delta": 0.5}, ["huber_delta=0.5", "nothing reads it", "value_loss='huber'"]),
    ({"value_loss": "hubert"}, ["value_loss='hubert'", "Did you mean 'huber'"]),
    ({"value_loss": "huber", "huber_delta": 0.0}, ["huber_delta=0.0", "> 0"]),
    ({"cliprange_value": -0.2}, ["cliprange_value=-0.2", "> 0"]),
    ({"gamma": 1.1}, ["gamma=1.1", "in [0, 1]"]),
    ({"gae_lambda": -0.1}, ["gae_lambda=-0.1", "in [0, 1]"]),
    ({"gae_lambda_critic": 2.0}, ["gae_lambda_critic=2.0", "in [0, 1]"]),
    ({"zero_std_groups": "drop"}, ["zero_std_groups='drop'", "num_generations=1", "flat"]),
    (RESAMPLE, ["zero_std_groups='resample'", "num_generations=1", "flat"]),
    ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}, ["rollout of one completion", "raise"]),
    ({"advantage_estimator": "grpo", "num_generations": 4}, ["advantage_estimator='grpo'", "does not read values", "GRPOPlusTrainer"]),
    ({"scale_rewards": "group"}, ["scale_rewards='group'", "'gae'", "the estimator does not scale"]),
    ({"multi_objective_aggregation": "normalize_then_sum"}, ["advantage_estimator='gdpo'", "does not read values"]),
    ({"sapo_temperature_pos": 2.0}, ["sapo_temperature_pos=2.0", "'ppo_clip'"]),
    ({"missing_eos_penalty": float("nan")}, ["missing_eos_penalty=nan", ">= 0"]),
    ({"advantage_estimator": "test_by_token", "gamma": 0.9}, ["gamma=0.9", "'test_by_token'", "nothing reads it"]),
    ({"advantage_estimator": "test_by_token", "truncated_completions": "bootstrap"}, ["truncated_completions='bootstrap'"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), PPO_CONFLICTS, ids=lambda x: str(x)[:70] if isinstance(x, dict) else "")
def test_ppo_conflicts(fields, words):
    """As below, for a PPOPlusConfig."""
    with pytest.raises(LossPlusError) as error:
        make_ppo(**fields)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("fields", "words"), CONFLICTS, ids=lambda x: str(x)[:70] if isinstance(x, dict) else "")
def test_conflicts(fields, words):
    """One line that names the field, the value and what to do, at construction."""
    with pytest.raises(LossPlusError) as error:
        make(**fields)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def raising_lines(*modules):
    """(file name, first line) of every `raise` in these modules."""
    trees = {Path(module.__file__): ast.parse(Path(module.__file__).read_text()) for module in modules}
    skipped = {
        id(node)
        for tree in trees.values()
        for other in ast.walk(tree)
        if isinstance(other, ast.ClassDef) and other.name not in ("GRPOPlusConfig", "PPOPlusConfig", "LossSpec")
        for node in ast.walk(other)
    }
    return {
        (path.name, node.lineno)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and id(node) not in skipped
    }


def test_no_conflict_is_untested():
    """
    Every `raise` of the two configurations, resolve.py and LossSpec is reached by a case above, or by one below that only a
    LossSpec of one's own can meet (a new one needs its case).
    """
    modules = (config_module, ppo_module, resolve_module, spec_module)
    names = {Path(module.__file__).name for module in modules}
    own = ({"beat": 0.1}, {"beta": "high"}, {"kl_reward_coef": 0.1}, {"kl_controller": "adaptive", "kl_target": 0.1})
    cases = [(make, fields) for fields, _ in (*CONFLICTS, *REFUSED)] + [(make_ppo, fields) for fields, _ in PPO_CONFLICTS]
    reached = set()
    for build, fields in [*cases, *((lambda **x: LossSpec.from_dict(x), fields) for fields in own)]:
        try:
            build(**fields)
        except LossPlusError as error:
            reached |= {(Path(frame.filename).name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)}
    assert {line for line in raising_lines(*modules) if line[0] in names} - reached == set()
