"""Changes made as a user makes them, in the configuration of a run: the first line of the diff names each, whatever follows from it."""

import pytest
from toyrun import fixed_rollout, letter_reward, trainer

from trl_lossplus import PPOPlusConfig, PPOPlusTrainer, Snapshot, diff

PPO = {"trainer_class": PPOPlusTrainer, "config_class": PPOPlusConfig, "critic": "shared", "num_generations": 4}
BASE = {
    "beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "advantage_normalization": "rollout",
    "max_completion_length": 4,
}  # fmt: skip


def weights(prompts, completions, completion_ids, **columns):
    return [[2.0] * len(ids) for ids in completion_ids]


# The change, the step at which it first acts, what the first line must hold.
RUNS = {
    "epsilon": ({"epsilon": 0.01}, 1, ["Only the policy term changed: epsilon 0.2 -> 0.01."]),
    "KL estimator": ({"kl_estimator": "k1"}, 0, ["kl_estimator 'k3' -> 'k1'"]),
    "advantage estimator": ({"advantage_estimator": "rloo"}, 0, ["advantages changed", "advantage_estimator 'grpo' -> 'rloo'"]),
    "KL placement": (
        {"kl_placement": "reward", "kl_reward_coef": 0.1, "beta": 0.0},
        0,
        ["kl: missing in B", "kl_placement 'loss' -> 'reward'"],
    ),
    "mask": ({"mask_truncated_completions": True}, 0, ["mask changed", "True became False, 0 False became True"]),
    "reward": (
        {"reward": lambda completions, **columns: [len(text) / 5 for text in completions]},
        0,
        ["rewards changed (times 2)"],
    ),
    "aggregation": (
        {"loss_aggregation": "token_sum"},
        0,
        ["The per-token losses are equal; what they are added up to changed: loss_aggregation 'token_mean' -> 'token_sum'"],
    ),
    "normalization place": (
        {"advantage_normalization": "learner"},
        0,
        ["advantages changed", "advantage_normalization 'rollout' -> 'learner'"],
    ),
    "token weights": ({"extra": {"token_weight_func": weights}}, 0, ["token_weights: missing in A"]),
    "dual clip": ({"clip_ratio_c": 1.01}, 1, ["Only the policy term changed: clip_ratio_c None -> 1.01."]),
    "dtype": ({"model_init_kwargs": {"dtype": "bfloat16"}}, 0, ["old_logps changed", "of the run: dtype float32 -> bfloat16."]),
    "gamma": ({**PPO, "gamma": 0.5}, 0, ["advantages changed", "gamma 1.0 -> 0.5"]),
}


def snapshot(toy, folder, step, **changes):
    fields = {"reward": letter_reward, **BASE, **changes}
    run = trainer(toy, folder, rollout=fixed_rollout, snapshot_steps=[step], max_steps=step + 1, **fields)
    run.train()
    return Snapshot.load(folder / f"snapshots/step-{step:08d}-step")


@pytest.mark.parametrize("name", RUNS)
def test_each_change_is_named_first(toy, tmp_path, name):
    """Everything else of the two runs is equal: seed, completions, rewards, weights at the step."""
    changes, step, words = RUNS[name]
    base = {key: value for key, value in changes.items() if name == "gamma" and key != "gamma"}
    found = diff(snapshot(toy, tmp_path / "a", step, **base), snapshot(toy, tmp_path / "b", step, **changes))
    for part in words:
        assert part in found.headline
    assert found.headline.count("\n") == 0
