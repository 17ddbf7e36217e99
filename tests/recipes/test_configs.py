"""Every shipped YAML: what its comments claim of the loss, and its block for a real model."""

import re

import pytest
import yaml
from reciperun import CONFIGS

from recipes import arguments, grpo, ppo, report

PPO_EPOCHS = 4
PPO = {
    "policy_loss": "ppo_clip",
    "epsilon": 0.2,
    "loss_aggregation": "token_mean",
    "advantage_estimator": "gae",
    "gamma": 1.0,
    "gae_lambda": 0.8,
    "cliprange_value": 0.2,
    "kl_placement": "none",
}

# What each file's comments claim of the loss.
CLAIMS = {
    "toy": {"policy_loss": "ppo_clip", "loss_aggregation": "token_mean", "epsilon": 0.2, "kl_placement": "none"},
    "grpo": {
        "policy_loss": "ppo_clip",
        "loss_aggregation": "seq_mean_token_mean",
        "scale_rewards": "group",
        "beta": 0.04,
        "kl_estimator": "k3",
        "kl_placement": "loss",
        "use_bias_correction_kl": False,
    },
    "dapo": {
        "policy_loss": "ppo_clip",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "loss_aggregation": "token_mean",
        "zero_std_groups": "drop",
        "kl_placement": "none",
    },
    "dr_grpo": {"loss_aggregation": "seq_mean_token_sum_norm", "scale_rewards": "none", "kl_placement": "none"},
    "gspo": {
        "policy_loss": "gspo",
        "sequence_level": True,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "loss_aggregation": "seq_mean_token_mean",
        "kl_placement": "none",
    },
    "cispo": {"policy_loss": "cispo", "epsilon_high": 5.0, "loss_aggregation": "token_mean", "kl_placement": "none"},
    "kl_in_reward": {
        "kl_in_reward": True,
        "kl_in_loss": False,
        "kl_reward_coef": 0.02,
        "kl_reward_level": "sequence",
        "kl_estimator": "k1",
        "advantage_normalization": "rollout",
        "scale_rewards": "none",
    },
    "adaptive_kl": {
        "kl_in_reward": True,
        "kl_in_loss": False,
        "kl_reward_level": "token",
        "kl_controller": "adaptive",
        "kl_target": 0.5,
        "kl_horizon": 10000,
    },
    "grpo_lora": {"loss_aggregation": "seq_mean_token_mean", "beta": 0.001, "kl_placement": "loss"},
    "qlora": {"policy_loss": "ppo_clip", "loss_aggregation": "token_mean", "beta": 0.001, "kl_placement": "loss"},
    "smollm2_lora": {"epsilon_high": 0.28, "loss_aggregation": "token_mean", "beta": 0.02, "kl_placement": "loss"},
    "smollm2_grpo": {"epsilon_high": 0.28, "loss_aggregation": "token_mean", "scale_rewards": "group", "kl_placement": "none"},
    "smollm2_ppo": {**PPO, "epsilon_high": 0.28, "gae_lambda": 0.95, "advantage_normalization": "none"},
    "toy_ppo": {**PPO, "advantage_normalization": "rollout"},
    "ppo_lora": PPO,
    "ppo_full": PPO,
    "ppo_shared": PPO,
    "ppo_from_reward_model": PPO,
}
CRITICS = {
    "smollm2_ppo": "adapter",
    "toy_ppo": "model",
    "ppo_lora": "adapter",
    "ppo_full": "model",
    "ppo_shared": "shared",
    "ppo_from_reward_model": "model",
}


def recipe_of(path):
    """The recipe that a file is for, by its name."""
    return ppo.RECIPE if "ppo" in path.stem.split("_") else grpo.RECIPE


# Configurations.


def test_every_shipped_config_has_claims():
    assert {path.stem for path in CONFIGS} == set(CLAIMS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_what_its_comment_claims(path):
    _, training, model = arguments.parse(recipe_of(path), ["--config", str(path)])
    spec = training.loss_spec()
    assert {name: getattr(spec, name) for name in CLAIMS[path.stem]} == CLAIMS[path.stem]
    assert report.describe_loss(spec)
    assert getattr(training, "critic", None) == CRITICS.get(path.stem)
    off_policy = {"dapo": 4, "gspo": 4, "cispo": 4, **dict.fromkeys(CRITICS, PPO_EPOCHS)}
    off_policy |= dict.fromkeys(("smollm2_lora", "smollm2_grpo", "smollm2_ppo"), 2)
    assert training.optimizer_steps_per_rollout == off_policy.get(path.stem, 1)
    assert training.is_on_policy == (path.stem not in off_policy)
    assert model.use_peft == (path.stem.endswith("lora") or path.stem.startswith("smollm2"))
    assert model.lora_dropout == 0.0 or not model.use_peft


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_block_for_a_real_model_is_valid(path, tmp_path):
    """The commented fields of each file, with their comment signs taken away, are fields, and fit together."""
    shown, _, hidden = path.read_text().partition("# A real model (on GPUs)")
    fields = "#" + re.sub(r"^# (?=[a-z_0-9]+: )", "", hidden, flags=re.MULTILINE)
    assert (len(yaml.safe_load(fields) or {}) >= 6) == (
        path.stem not in ("toy", "toy_ppo", "qlora") and not path.stem.startswith("smollm2")
    )
    (tmp_path / "real.yaml").write_text(shown + fields)
    script, training, _ = arguments.parse(recipe_of(path), ["--config", "real.yaml"])
    assert training.loss_spec()
    assert script.reward_names()


def test_toy_ppo_is_the_toy_without_arguments():
    (path,) = (path for path in CONFIGS if path.stem == "toy_ppo")
    _, training, _ = arguments.parse(ppo.RECIPE, ["--config", str(path)])
    _, default, _ = arguments.parse(ppo.RECIPE, [])
    named = set(yaml.safe_load(path.read_text())) - {"model_name_or_path", "dataset_name", "reward_funcs", "critic"}
    same = {name for name in named if getattr(training, name) == getattr(default, name)}
    assert named - same == {"advantage_normalization", "policy_loss", "loss_aggregation"}  # which spell out what None means
    assert default.loss_spec() == training.loss_spec()


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_toy_ppo_takes_as_many_completions_as_there_are_prompts(processes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert ppo.toy_training()["per_device_train_batch_size"] * processes == 48
