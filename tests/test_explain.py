"""`trl-lossplus explain`: its sentences and numbers, each held against the code that it describes, and the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trl_lossplus
from trl_lossplus import GRPOPlusConfig, PPOPlusConfig, estimate_kl
from trl_lossplus.cli import COMMANDS, Command, main
from trl_lossplus.explain import explain
from trl_lossplus.explain_warnings import TEXTS
from trl_lossplus.functional.value import value_loss

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WHOLE = """\
The loss
  loss = policy + 0.05 KL - 0.01 entropy
  r = pi / pi_old with |log r| <= 20, A = advantage, sg = stop gradient
  Policy: ppo_clip = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
    PPO's clipped objective on the token ratio, or on the row's mean ratio with importance_sampling_level=sequence.
    one ratio a token; ratio clipped to [0.8, 1.28], clip_objective min; for A < 0 at most 3 |A| (dual clip); source: PPO, arXiv \
1707.06347
  Aggregation: token_mean = sum over tokens / number of tokens
    tokens: the valid ones of the optimizer step, over its micro-batches and all processes
  KL in the loss: beta 0.05, adaptive; k3 = exp(-d) + d - 1, d = logp - ref_logp, times the ratio; gradient: the reverse KL's
    aggregated as the policy term
  Entropy bonus: 0.01 times the mean entropy of all valid tokens, whatever the aggregation
  Auxiliary loss of a mixture of experts: stays TRL's, with the coefficient in its configuration; none for other models

The advantages
  Estimator: grpo = (s - mean of the group) / (std + eps)
    scale_rewards group; eps 0.0001; source: DeepSeekMath, arXiv 2402.03300
    s = weighted sum of a completion's rewards, reward_weights [1.0, 0.5]
  Normalization, in exactly one place: in the estimator, by the standard deviation of each group's rewards
  Groups whose rewards are all equal: kept, as TRL
  KL in the reward: kl_reward_coef 0.1, adaptive; k3 = exp(-d) + d - 1, d = old_logp - ref_logp
    level sequence: a completion's summed KL is taken off its reward s, before any advantage
  Adaptive KL control: coefficient *= 1 + clip(KL / 0.1 - 1, -0.2, 0.2) * 64 / 10000 once a rollout; KL: mean a token, \
all processes

Where each term acts
  term               reward   advantage  loss
  policy (ppo_clip)  -        -          yes
  KL                 -0.1 KL  -          +0.05 KL
  normalization      -        yes        -
  entropy bonus      -        -          -0.01 entropy

Tensors
"""
AFTER_TENSORS = """
Schedule
  Rollout: 64 completions = prompts 8 x num_generations 8; processes 1
    micro-batches a process 4, rows in each 16, uses of each 2 (num_iterations)
  Optimizer step: micro-batches a process 2, completions 32
  Optimizer steps that one rollout serves: 4
  Off-policy: changes of the weights between the first and the last use of a rollout: at most 3
  Layout: padded
  Windows: exact: each optimizer step is normalized by its own tokens and rows

Warnings
  - k3 in the reward has an expected gradient that is no KL's (docs/kl.md), and need not hold the policy near the reference at all: set kl_estimator=k1 there.
  - The KL acts in the reward and in the loss, and the two pulls towards the reference add up: keep one if that is not meant.
  - Adaptive control moves beta and kl_reward_coef by the same factor: choose their proportion in the configuration.
"""
FULL = {
    "epsilon_high": 0.28,
    "clip_ratio_c": 3.0,
    "beta": 0.05,
    "kl_placement": "both",
    "kl_reward_coef": 0.1,
    "kl_controller": "adaptive",
    "kl_target": 0.1,
    "entropy_coef": 0.01,
    "reward_weights": [1.0, 0.5],
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
}
OFF_POLICY = {"num_iterations": 2}
KL, REWARD_KL = {"beta": 0.1}, {"kl_placement": "reward", "kl_reward_coef": 0.1}


PPO = {"trainer": "ppo"}


def make(trainer="grpo", **fields):
    kind = {"grpo": GRPOPlusConfig, "ppo": PPOPlusConfig}[trainer]
    return kind(use_cpu=True, bf16=False, **fields)


def sections(**fields):
    """{headline: its lines}"""
    parts = [part.splitlines() for part in explain(make(**fields)).strip().split("\n\n")]
    return {lines[0]: [line.removeprefix("  ") for line in lines[1:]] for lines in parts}


def warnings(**fields):
    return [line.removeprefix("- ") for line in sections(**fields)["Warnings"] if line != "none"]


def tensors(**fields):
    """{tensor: its readers}"""
    head, *rows = sections(**fields)["Tensors"]
    return {row.split()[0]: set(row[head.index("read by") :].split(", ")) for row in rows}


def test_whole_text():
    """Every section of one configuration, word by word (the tensors below)."""
    text = explain(make(**FULL))
    before, _, after = text.partition("Tensors\n")
    assert before + "Tensors\n" == WHOLE
    assert after.partition("\n\n")[2] == AFTER_TENSORS.lstrip()
    assert all(line == line.rstrip() for line in text.splitlines())


def test_tensors_of_the_whole():
    """Who reads what, at the rollout too: the KL in the reward and its control read old and reference log-probs."""
    assert tensors(**FULL) == {
        "rewards": {"estimator (grpo)"},
        "logps": {"KL in the loss", "policy (ppo_clip)"},
        "mask": {"KL control", "KL in the reward", "aggregation (token_mean)", "policy (ppo_clip)"},
        "old_logps": {"KL control", "KL in the loss", "KL in the reward", "policy (ppo_clip)"},
        "advantages": {"policy (ppo_clip)"},
        "ref_logps": {"KL control", "KL in the loss", "KL in the reward"},
        "entropies": {"entropy bonus"},
        "group_ids": {"estimator (grpo)"},
    }
    row = next(line for line in sections(**FULL)["Tensors"] if line.startswith("ref_logps"))
    assert " ".join(row.split()) == (
        "ref_logps (B, T) the reference model, at the rollout KL control, KL in the loss, KL in the reward"
    )


READERS = [
        ({}, {"ref_logps": None, "entropies": None, "rollout_weights": None}),
        ({"policy_loss": "vespo"}, {"rollout_weights": None}),
        (
            {"policy_loss": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            {"rollout_weights": {"policy (vespo)"}, "rollout_logps": {"vLLM correction"}},
        ),
        (
            {"use_vllm": True, "off_policy_mask_threshold": 0.5},
            {"rollout_weights": {"policy (ppo_clip)"}, "rollout_logps": {"off-policy mask", "vLLM correction"}},
        ),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, {"rollout_weights": None, "rollout_logps": None}),
        ({"loss_aggregation": "prompt_mean"}, {"group_ids": {"aggregation (prompt_mean)", "estimator (grpo)"}}),
        (
            {"advantage_normalization": "learner", "advantage_norm_scope": "group"},
            {"advantages": {"normalization", "policy (ppo_clip)"}, "group_ids": {"estimator (grpo)", "normalization"}},
        ),
        (REWARD_KL, {"ref_logps": {"KL in the reward"}}),
        ({**KL, "kl_controller": "adaptive", "kl_target": 0.1}, {"ref_logps": {"KL control", "KL in the loss"}}),
        ({"use_adaptive_entropy": True}, {"entropies": {"entropy bonus"}}),
        ({"top_entropy_quantile": 0.2}, {"entropies": {"high-entropy selection"}}),
        ({"advantage_estimator": "torch:atan2"}, {"rewards": {"estimator (torch:atan2)"}, "group_ids": {"estimator (torch:atan2)"}}),
        (PPO, {
            "rewards": {"estimator (gae)"}, "values": {"value loss"}, "returns": {"value loss"},
            "old_values": {"estimator (gae)", "value loss"}, "advantages": {"normalization", "policy (ppo_clip)"},
            "mask": {"aggregation (token_mean)", "estimator (gae)", "normalization", "policy (ppo_clip)"},
            "group_ids": None, "ref_logps": None,
        }),
        ({**PPO, "cliprange_value": 0}, {"old_values": {"estimator (gae)"}}),
        ({**PPO, "whiten_rewards": True}, {"rewards": {"estimator (gae)", "reward whitening"}}),
        ({**PPO, "advantage_norm_scope": "group"}, {"group_ids": {"normalization"}}),
        ({**PPO, **REWARD_KL}, {"ref_logps": {"KL in the reward"}}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), READERS, ids=[str(fields) for fields, _ in READERS])
def test_readers(fields, expected):
    """Who reads a tensor; None: it is not in the table, for nothing reads it."""
    readers = tensors(**fields)
    assert {name: readers.get(name) for name in expected} == expected


LINES = [
    ({"policy_loss": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4}, "The loss",
     "  one ratio a row, exp of its mean log ratio; ratio clipped to [0.9997, 1.0004], clip_objective min; "
     "source: GSPO, arXiv 2507.18071"),
    ({"delta": 4.0, "clip_objective": "max"}, "The loss",
     "  one ratio a token; ratio clipped to [0.8, 1.2], clip_objective max; unclipped ratio at most 4 (delta); "
     "source: PPO, arXiv 1707.06347"),
    ({"policy_loss": "cispo"}, "The loss", "  one ratio a token; ratio clipped to [0, 5]; source: MiniMax-M1, arXiv 2506.13585"),
    ({"loss_type": "cispo"}, "The loss", "  one ratio a token; ratio clipped to [0, 0.2]; source: MiniMax-M1, arXiv 2506.13585"),
    ({"policy_loss": "cispo", "cispo_ratio_min": 0.5}, "The loss",
     "  one ratio a token; ratio clipped to [0.5, 5]; source: MiniMax-M1, arXiv 2506.13585"),
    ({"policy_loss": "gmpo", "epsilon": 0.4}, "The loss",
     "  one ratio a row, exp of its mean log ratio; log ratio clipped to [-0.4, 0.4], one-sided by the sign of A; "
     "source: GMPO, arXiv 2507.20673"),
    ({"policy_loss": "dppo_kl", "epsilon": 0.05}, "The loss",
     "  thresholds 0.05 for A < 0 and 0.05 for A > 0; dppo_ratio_max 20; source: DPPO, arXiv 2602.04879"),
    ({"policy_loss": "clip_cov", "seed": 3}, "The loss",
     "  ratio clipped to [0.8, 1.2]; clip_cov_max 5; clip_cov_min 1; clip_cov_ratio 0.0002; cov_seed 3; source: Clip-Cov, arXiv 2505.22617"),
    ({"policy_loss": "rec", "rec_clip": "ring", "rec_weight": "importance"}, "The loss",
     "  one ratio a token; trained on where the ratio is in [0.8, 1.2], or A > 0 and it is at most 0.4, or A < 0 and it is at least 3; rec_clip ring; rec_ring_high 2; rec_ring_low 0.6; "
     "rec_weight importance; source: REC and RED-Weight, arXiv 2509.24203"),
    ({"policy_loss": "rec", "rec_clip": "none", "rec_weight": "advantage"}, "The loss",
     "  rec_clip none; rec_temperature 1; rec_weight advantage; source: REC and RED-Weight, arXiv 2509.24203"),
    ({"policy_loss": "rec", "rec_clip": "none", "rec_weight": "importance"}, "The loss",
     "  one ratio a token; rec_clip none; rec_weight importance; source: REC and RED-Weight, arXiv 2509.24203"),
    ({"policy_loss": "sppo", "epsilon": 0.25}, "The loss",
     "  trained on where the ratio is in [0.8, 1.25]; source: sPPO, arXiv 2108.05828"),
    ({"policy_loss": "m2po"}, "The loss", "  m2_threshold 0.04; source: M2PO, arXiv 2510.01161"),
    ({"loss_type": "sapo"}, "The loss",
     "  one ratio a token; sapo_temperature_neg 1.05; sapo_temperature_pos 1; source: SAPO, arXiv 2511.20347"),
    ({"log_ratio_clamp": 10.0}, "The loss", "r = pi / pi_old with |log r| <= 10, A = advantage, sg = stop gradient"),
    ({"policy_loss": "torch:atan2"}, "The loss",
     "  source: torch:atan2"),
    # aggregation
    ({"loss_type": "grpo"}, "The loss",
     "  rows: those of the optimizer step, over its micro-batches and all processes; "
     "rows without valid tokens count too (as TRL)"),
    ({"loss_aggregation": "seq_mean_token_mean"}, "The loss",
     "  rows: those of the optimizer step, over its micro-batches and all processes; rows without valid tokens do not count"),
    ({"loss_type": "dr_grpo", "max_completion_length": 300}, "The loss",
     "  norm_length: max_completion_length, 300 tokens"),
    ({"loss_aggregation": "prompt_mean"}, "The loss",
     "  prompts: the valid ones of the optimizer step, over its micro-batches and all processes"),
    ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "The loss",
     "  tokens: the valid ones of the rollout over all processes, as a mean a micro-batch, "
     "times the step's micro-batches (as TRL)"),
    # the KL
    ({**KL, "kl_estimator": "k1+"}, "The loss",
     "KL in the loss: beta 0.1, fixed; k1+ = d with the gradient of d^2 / 2, d = logp - ref_logp, not times the ratio; "
     "gradient: the reverse KL's"),
    ({**KL, "zero_std_groups": "no_kl"}, "The loss",
     "  aggregated as the policy term, without groups whose rewards are all equal"),
    ({**REWARD_KL, "kl_reward_level": "token"}, "The advantages",
     "  level token: each token's advantage loses the KL from there to the end; no group comparison sees it"),
    (REWARD_KL, "The advantages", "KL in the reward: kl_reward_coef 0.1, fixed; k1 = d, d = old_logp - ref_logp"),
    (REWARD_KL, "The advantages",
     "  the rollout's KL needs old_logps, which nothing else does here: one more forward pass a rollout"),
    (REWARD_KL, "Where each term acts", "KL                 -0.1 KL  -          -"),
    ({**REWARD_KL, "kl_reward_level": "token"}, "Where each term acts", "KL                 -       -0.1 KL    -"),
    # entropy, masks, weights
    ({"use_adaptive_entropy": True, "entropy_target": 2.0}, "The loss",
     "  adaptive: +-0.005 a step within [0, 1], towards 2 nats"),
    ({"entropy_coef": 0.01, "top_entropy_quantile": 0.2}, "The loss",
     "Entropy bonus: 0.01 times the mean entropy of the high-entropy tokens, whatever the aggregation"),
    ({"top_entropy_quantile": 0.2}, "The loss",
     "High-entropy selection: the policy term keeps the top 0.2 of the tokens by entropy"),
    ({"off_policy_mask_threshold": 0.5}, "The loss",
     "Off-policy mask: the policy term leaves out rows with A < 0 and a mean drift from their sampler above 0.5 nats a token"),
    ({"use_vllm": True}, "The loss",
     "vLLM correction: weights pi_old / pi_sampler, sequence_mask within [none, 3], multiply the policy term"),
    ({"use_vllm": True, "loss_type": "vespo"}, "The loss",
     "vLLM correction: weights pi_old / pi_sampler, sequence_mask within [none, 3], are part of w"),
    ({"rollout_is_correction": True, "rollout_is_batch_normalize": True}, "The loss",
     "rollout_func correction: weights pi_old / pi_sampler, sequence_mask within [none, 3], divided by their mean over the rollout, "
     "multiply the policy term"),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}, "The loss",
     "Rejection: what differs from the sampler by token_k1 beyond 0.5_2 is left out"),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}, "The loss",
     "  at the rollout, by old_logps: out of every term and of the aggregation's normalizer"),
    ({"policy_loss": "rollout_is", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}, "The loss",
     "  in the loss, by logps; it still counts in the aggregation's normalizer"),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}, "Where each term acts", "rejection          -       -          yes"),
    ({"policy_loss": "kl_cov", "gradient_accumulation_steps": 2}, "Schedule",
     "At the start of a step: selected_tokens, over the rows of all its micro-batches and processes"),
    ({"policy_loss": "real", "gradient_accumulation_steps": 2}, "Schedule",
     "  by a forward pass without gradient more, where the log-probs are not those of the rollout"),
    ({"router_aux_loss_coef": 0.01}, "The loss",
     "Auxiliary loss of a mixture of experts: stays TRL's, with router_aux_loss_coef 0.01; none for other models"),
    # advantages
    ({"scale_rewards": "none"}, "The advantages", "  scale_rewards none: not divided; source: DeepSeekMath, arXiv 2402.03300"),
    ({"scale_rewards": "none"}, "The advantages", "Normalization, in exactly one place: nowhere"),
    ({"scale_rewards": "batch"}, "The advantages",
     "Normalization, in exactly one place: in the estimator, "
     "by the standard deviation of the rollout's rewards on all processes"),
    ({"advantage_normalization": "rollout"}, "The advantages",
     "Normalization, in exactly one place: rollout-side: whitened over the rollout's tokens on all processes, "
     "all tokens together"),
    ({"advantage_normalization": "learner", "advantage_norm_scope": "group"}, "The advantages",
     "Normalization, in exactly one place: learner-side: whitened over each optimizer step's tokens on all processes, "
     "each prompt's completions together"),
    ({"advantage_estimator": "gdpo"}, "The advantages",
     "Normalization, in exactly one place: in the estimator, over the rollout on all processes"),
    ({"advantage_estimator": "maxrl"}, "The advantages", "  source: MaxRL, arXiv 2602.02710"),
    ({"zero_std_groups": "drop"}, "The advantages", "Groups whose rewards are all equal: out of the loss and its normalizer"),
    ({"zero_std_groups": "resample"}, "The advantages",
     "Groups whose rewards are all equal: replaced by groups of further prompts, before log-probs are taken; evaluation keeps them"),
    ({"zero_std_groups": "resample", "resample_max_tries": 3}, "The advantages",
     "  at most 3 further draws a rollout (resample_max_tries); flat groups that are left: kept, with a warning "
     "(resample_exhausted keep)"),
    ({"zero_std_groups": "resample", "resample_exhausted": "raise"}, "The advantages",
     "  at most 8 further draws a rollout (resample_max_tries); flat groups that are left: an error (resample_exhausted raise)"),
    ({"zero_std_groups": "resample"}, "The advantages",
     "  reward and group_reward/* are of the kept completions, resample/* of all draws, completions/* of the first draw"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "section", "line"), LINES, ids=lambda x: str(x)[:60])
def test_lines(fields, section, line):
    """One line as it stands."""
    assert line in sections(**fields)[section]


PPO_LINES = [
    (PPO, "The loss", "loss = policy + 0.1 value"),
    ({**PPO, **KL, "entropy_coef": 0.01, "vf_coef": 0.5}, "The loss", "loss = policy + 0.1 KL - 0.01 entropy + 0.5 value"),
    (PPO, "The loss",
     "Value loss: vf_coef 0.1, mse = 0.5 max((v - R)^2, (clip(v, V - 0.2, V + 0.2) - R)^2), v = value, R = return, V = old value"),
    ({**PPO, "vf_coef": 1.0, "cliprange_value": 0}, "The loss",
     "Value loss: vf_coef 1, mse = 0.5 (v - R)^2, v = value, R = return, no clipping"),
    ({**PPO, "value_loss": "huber", "huber_delta": 0.5}, "The loss",
     "Value loss: vf_coef 0.1, huber = 0.5 max(h(v - R), h(clip(v, V - 0.2, V + 0.2) - R)), v = value, R = return, V = old value"),
    ({**PPO, "value_loss": "huber", "huber_delta": 0.5}, "The loss",
     "  h(x) = x^2 for |x| <= 0.5, else 1 |x| - 0.25 (huber_delta 0.5)"),
    (PPO, "The loss", "  aggregated as the policy term, over the same tokens"),
    # the advantages
    (PPO, "The advantages", "Estimator: gae = A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t"),
    (PPO, "The advantages", "  gamma 1; gae_lambda 0.95; gae_lambda_critic as gae_lambda; source: GAE, arXiv 1506.02438"),
    ({**PPO, "gamma": 0.999, "gae_lambda": 0.9, "gae_lambda_critic": 1.0}, "The advantages",
     "  gamma 0.999; gae_lambda 0.9; gae_lambda_critic 1; source: GAE, arXiv 1506.02438"),
    (PPO, "The advantages", "  token rewards: s at a completion's last token, 0 elsewhere; returns R = advantage + old value"),
    (PPO, "The advantages", "Completions that were cut off: terminal: the value after them is 0"),
    ({**PPO, "truncated_completions": "bootstrap"}, "The advantages",
     "Completions that were cut off: bootstrap: the value after them is the critic's"),
    ({**PPO, "missing_eos_penalty": 0.5}, "The advantages", "  and 0.5 is taken off s (missing_eos_penalty)"),
    (PPO, "The advantages", "Reward whitening: none"),
    ({**PPO, "whiten_rewards": True}, "The advantages",
     "Reward whitening: token rewards, less any KL, divided by their standard deviation over the rollout on all processes; "
     "the mean stays"),
    ({**PPO, **REWARD_KL}, "The advantages", "  level token: each token's reward loses its KL, before any advantage"),
    ({**PPO, **REWARD_KL, "kl_reward_level": "sequence"}, "The advantages",
     "  level sequence: a completion's summed KL is taken off its reward s, before any advantage"),
    ({**PPO, "num_generations": 4}, "The advantages", "Groups whose rewards are all equal: kept, as TRL"),
    # the critic
    (PPO, "The critic",
     "Kind: not set: adapter (a second LoRA adapter and a scalar head) with LoRA, else model (a model of its own)"),
    (PPO, "The critic", "  starts from: the policy, with a new head"),
    ({**PPO, "critic": "adapter"}, "The critic", "Kind: adapter: a second LoRA adapter and a scalar head on the policy's base model"),
    ({**PPO, "critic": "model", "critic_model_name_or_path": "some/reward"}, "The critic",
     "Kind: model: a model of its own with a scalar head"),
    ({**PPO, "critic": "model", "critic_model_name_or_path": "some/reward"}, "The critic", "  starts from: some/reward"),
    ({**PPO, "critic": "shared"}, "The critic",
     "Kind: shared: a scalar head on the policy's hidden states, without a forward pass of its own"),
    ({**PPO, "critic": "shared"}, "The critic", "  starts from: a new head"),
    ({**PPO, "critic": "shared"}, "The critic", "  the value loss's gradient reaches the policy's trunk as well"),
    ({**PPO, "critic": "shared", "critic_detach": True}, "The critic",
     "  the value loss's gradient stops at the head (critic_detach)"),
    (PPO, "The critic", "Learning rate: 1e-06, as the policy"),
    ({**PPO, "critic_learning_rate": 1e-5}, "The critic", "Learning rate: 1e-05 (critic_learning_rate); the policy: 1e-06"),
    (PPO, "The critic", "Scheduler: linear, as the policy"),
    ({**PPO, "critic_lr_scheduler_type": "constant", "lr_scheduler_type": "cosine"}, "The critic",
     "Scheduler: constant (critic_lr_scheduler_type); the policy: cosine"),
    (PPO, "The critic", "Warm-up: none (critic_warmup_steps 0)"),
    ({**PPO, "critic_warmup_steps": 20}, "The critic",
     "Warm-up: the first 20 optimizer steps train the critic alone; the policy's learning rate is 0 in them"),
    ({**PPO, **REWARD_KL}, "The advantages",
     "  the rollout's KL needs old_logps, which nothing else does here: those of the loss's own forward pass, taken at the rollout"),
    ({**PPO, **REWARD_KL, "gradient_accumulation_steps": 2}, "The advantages",
     "  the rollout's KL needs old_logps, which nothing else does here: one more forward pass a rollout"),
    (PPO, "The critic", "Old values: the forward pass of the loss, taken at the rollout"),
    ({**PPO, "num_iterations": 2}, "The critic", "Old values: a pass without gradient"),
    ({**PPO, "num_iterations": 2, "critic": "shared"}, "The critic",
     "Old values: the pass that takes old_logps; without one, a pass without gradient"),
    (PPO, "The critic", "The critic's activations: all layers but the last are recomputed (critic_gradient_checkpointing)"),
    ({**PPO, "critic_gradient_checkpointing": True}, "The critic",
     "The critic's activations: all layers are recomputed (critic_gradient_checkpointing)"),
    ({**PPO, "critic_gradient_checkpointing": False}, "The critic",
     "The critic's activations: none is recomputed (critic_gradient_checkpointing)"),
    # where, and when
    ({**PPO, **REWARD_KL}, "Where each term acts", "KL                 -0.1 KL  -          -"),
    ({**PPO, "missing_eos_penalty": 0.5}, "Where each term acts", "missing end token  -0.5    -          -"),
    ({**PPO, "whiten_rewards": True}, "Where each term acts", "reward whitening   yes     -          -"),
    (PPO, "Where each term acts", "value loss         -       -          +0.1 value"),
    (PPO, "Where each term acts", "normalization      -       yes        -"),
    ({**PPO, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 3}, "Schedule",
     "Optimizer steps that one rollout serves: 6"),
    ({**PPO, "gradient_accumulation_steps": 2, "steps_per_generation": 4}, "Schedule",
     "Rollout: 32 completions = prompts 32 x num_generations 1; processes 1"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "section", "line"), PPO_LINES, ids=lambda x: str(x)[:60])
def test_lines_of_ppo(fields, section, line):
    """As above, for PPO; and GRPO has neither a critic nor a word about it."""
    assert line in sections(**fields)[section]
    grpo = explain(make())
    assert "The critic" not in grpo
    assert "value" not in grpo.lower()


@pytest.mark.parametrize(
    ("side", "words"),
    [
        (None, "rollout-side: whitened over the rollout's tokens on all processes, all tokens together"),
        ("rollout", "rollout-side: whitened over the rollout's tokens on all processes, all tokens together"),
        ("learner", "learner-side: whitened over each optimizer step's tokens on all processes, all tokens together"),
        ("none", "nowhere"),
    ],
)
def test_ppo_whitens_advantages_in_one_place(side, words):
    """Said once, and the table of terms has a row for it where it acts; one completion a prompt makes no group to be flat."""
    parts = sections(**PPO, advantage_normalization=side)
    said = [line for line in parts["The advantages"] if line.startswith("Normalization")]
    assert said == [f"Normalization, in exactly one place: {words}"]
    assert sum("whitened" in line for line in parts["The advantages"]) == (side != "none")
    assert any(row.startswith("normalization") for row in parts["Where each term acts"]) == (side != "none")
    assert not any(line.startswith("Groups") for line in parts["The advantages"])


@pytest.mark.parametrize("clip", [0, 0.2, 0.5])
@pytest.mark.parametrize(("kind", "delta"), [("mse", 1.0), ("huber", 0.5), ("huber", 2.0)])
def test_value_loss_is_what_is_said(kind, delta, clip):
    """The printed formula, worked out as it stands, is functional.value.value_loss."""
    lines = sections(**PPO, value_loss=kind, huber_delta=delta, cliprange_value=clip, num_iterations=2)["The loss"]
    at = next(i for i, line in enumerate(lines) if line.startswith("Value loss"))
    formula = lines[at].partition(" = ")[2].partition(", v = value")[0].replace("0.5 ", "0.5 * ", 1).replace("^", "**")

    def h(x):
        inner, _, outer = lines[at + 1].strip().removeprefix("h(x) = x^2 for |x| <= ").partition(", else ")
        slope, _, rest = outer.partition(" |x| - ")
        return x**2 if abs(x) <= float(inner) else float(slope) * abs(x) - float(rest.split()[0])

    names = {"h": h, "max": max, "clip": lambda x, low, high: min(max(x, low), high)}
    for v, old, target in ((1.0, 0.0, 0.3), (1.0, 0.0, 2.0), (-3.0, -2.9, 1.0), (0.4, 2.0, 0.1), (5.0, 1.0, -5.0)):
        said = eval(formula, {**names, "v": v, "V": old, "R": target})
        ours = value_loss(*(torch.tensor([[x]]) for x in (v, target, old)), kind=kind, huber_delta=delta, cliprange=clip or None)[
            0
        ]
        assert said == pytest.approx(ours.item(), rel=1e-5)


def test_terms_that_do_not_act_have_no_row():
    """The table of the defaults: the policy in the loss, the group's spread in the advantage."""
    assert sections()["Where each term acts"] == [
        "term               reward  advantage  loss",
        "policy (ppo_clip)  -       -          yes",
        "normalization      -       yes        -",
    ]
    assert [line.split()[0] for line in sections(scale_rewards="none")["Where each term acts"]] == ["term", "policy"]
    rows = sections(use_vllm=True, off_policy_mask_threshold=0.5, top_entropy_quantile=0.5)["Where each term acts"][3:]
    assert [row.split("  ")[0] for row in rows] == ["high-entropy selection", "off-policy mask", "vLLM correction"]
    assert all(row.endswith("-       -          policy term") for row in rows)


# H3: (steps_per_generation, gradient_accumulation_steps, num_iterations): optimizer steps, changes of the weights, exact windows.
SCHEDULES = {
    (1, 1, 1): ("1", 0, True),
    (4, 4, 1): ("1", 0, True),
    (2, 1, 1): ("2", 1, True),
    (4, 2, 1): ("2", 1, True),
    (1, 1, 3): ("3", 2, True),
    (4, 4, 2): ("2", 1, True),
    (8, 2, 4): ("16", 15, True),
    (2, 4, 1): ("1/2", 0, False),
    (2, 4, 2): ("1", 0, False),
    (1, 3, 1): ("1/3", 0, False),
    (3, 2, 1): ("3/2", 1, False),
    (5, 3, 1): ("5/3", 2, False),
    (4, 3, 1): ("4/3", 1, False),
    (3, 2, 2): ("3", 2, False),
}


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES.items(), ids=str)
def test_h3(schedule, expected):
    """Optimizer steps that one rollout serves, and whether that is off-policy: as a run of micro-batches counts them."""
    micro, accumulation, iterations = schedule
    steps, changes, exact = expected
    uses = micro * iterations
    runs = [range(start, start + uses) for start in range(0, uses * accumulation, uses)]
    counted = max(run[-1] // accumulation - run[0] // accumulation for run in runs)
    assert counted == changes
    fields = dict(steps_per_generation=micro, gradient_accumulation_steps=accumulation, num_iterations=iterations)
    lines = sections(**fields)["Schedule"]
    assert f"Optimizer steps that one rollout serves: {steps}" in lines
    on, off = "On-policy: each step uses completions of the very weights that it changes", "Off-policy: changes of the weights"
    assert (on in lines) == (changes == 0)
    assert any(line.startswith(off) and line.endswith(f"at most {changes}") for line in lines) == (changes > 0)
    assert ("Windows: exact: each optimizer step is normalized by its own tokens and rows" in lines) == exact
    assert ("Windows: not exact: the mean of the rollout is taken instead, as TRL" in lines) != exact


def test_b4_and_l1():
    """On-policy, the two sentences that answer "clip fraction 0" and "loss 0"; off-policy neither."""
    assert warnings() == [
        "On-policy: the ratio is exactly 1 (with vLLM up to rounding), so clipping cannot act and the clip fractions are 0. For "
        "clipping to act, raise num_iterations or steps_per_generation until one rollout serves more than one optimizer step.",
        "Loss 0 is expected (or near 0, where long rows weigh more): at ratio 1 the policy term is minus the mean advantage, and "
        "advantages are centred on 0. It does not tell whether the policy learns: watch the gradient and the reward.",
    ]
    assert warnings(**OFF_POLICY) == []
    assert sections(**OFF_POLICY)["Warnings"] == ["none"]


# Each warning: fields that give it, fields as near as may be that do not, and a piece of the sentence with its numbers.
CISPO, SEQUENCE, DR = {"policy_loss": "cispo"}, {"importance_sampling_level": "sequence"}, {"loss_type": "dr_grpo"}
WARNINGS = {
    "on_policy": ({**CISPO}, {**CISPO, "num_iterations": 2}, "clipping cannot act"),
    "idle_region": (
        {"policy_loss": "m2po"},
        {"policy_loss": "m2po", "num_iterations": 2},
        "so m2_threshold cannot act and the gradient is -A a token",
    ),
    "loss_0": ({"advantage_estimator": "rloo"}, {"loss_type": "cispo"}, "Loss 0 is expected"),
    "policy_0": (PPO, {**PPO, "num_iterations": 2}, "The policy term (loss/policy) is expected to be near 0"),
    "value_clip": (PPO, {**PPO, "cliprange_value": 0}, "cliprange_value cannot act and value/clip_ratio is 0."),
    "no_sampler": (
        {"policy_loss": "rollout_ppo"},
        {"policy_loss": "rollout_ppo", "use_vllm": True},
        "policy_loss='rollout_ppo' reads the sampler's log-probs, which the trainer's own generation does not keep: set use_vllm=True",
    ),
    "windows": (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        {"gradient_accumulation_steps": 3, "steps_per_generation": 3},
        "set steps_per_generation (3) to a multiple of gradient_accumulation_steps (2).",
    ),
    "idle_mask": (
        {"off_policy_mask_threshold": 0.5},
        {"off_policy_mask_threshold": 0.5, "use_vllm": True},
        "remove off_policy_mask_threshold.",
    ),
    "clip_max": ({"clip_objective": "max"}, {"clip_objective": "min"}, "train with min."),
    "cispo_unset": ({"loss_type": "cispo"}, CISPO, "bounds the ratio at epsilon, 0.2, as TRL does: set epsilon_high=5."),
    "cispo_low": (
        {**CISPO, "epsilon_high": 0.28},
        {**CISPO, "epsilon_high": 5.0},
        "epsilon_high=0.28 bounds CISPO's ratio itself",
    ),
    "wide": ({"policy_loss": "gspo"}, {"policy_loss": "gspo", "epsilon": 3e-4}, "a range of 0.2 hardly clips"),
    "delta": ({"delta": 1.1}, {"delta": 1.2}, "delta=1.1 is below 1 + epsilon_high"),
    "bnpo": ({"loss_type": "bnpo"}, {"loss_type": "dapo"}, "loss_type=bnpo is normalized over the whole optimizer step"),
    "luspo": ({"loss_type": "luspo"}, {"loss_type": "luspo", **SEQUENCE}, "loss_type=luspo with one ratio a token"),
    "by_length": (SEQUENCE, {**SEQUENCE, "loss_type": "grpo"}, "loss_aggregation=token_mean weighs each row by its length"),
    "token_sum": ({"loss_aggregation": "token_sum"}, {}, "divided by nothing"),
    "top_entropy": ({"top_entropy_quantile": 0.2}, {}, "keep per_device_train_batch_size fixed"),
    "k1": (
        {**KL, "kl_estimator": "kl", "use_bias_correction_kl": False},
        {**KL, "kl_estimator": "k1+"},
        "kl in the loss without the ratio has an expected gradient of 0",
    ),
    "k3": ({**KL, "use_bias_correction_kl": False}, KL, "k3 in the loss without the ratio has the forward KL's gradient"),
    "abs": ({**KL, "kl_estimator": "abs"}, {**KL, "kl_estimator": "abs+"}, "The gradient of abs in the loss is no KL's"),
    "kl_reward": (
        {"kl_placement": "reward", "kl_reward_coef": 0.1, "kl_estimator": "k3"},
        {"kl_placement": "reward", "kl_reward_coef": 0.1, "kl_estimator": "kl"},
        "k3 in the reward has an expected gradient that is no KL's",
    ),
    "kl_by_row": ({**KL, "policy_loss": "gspo"}, {**KL, "policy_loss": "gspo", "kl_estimator": "k2"}, "approximately unbiased"),
    "both": ({**KL, "kl_placement": "both", "kl_reward_coef": 0.1}, KL, "the two pulls towards the reference add up"),
    "adaptive_both": (FULL, {**FULL, "kl_controller": "fixed", "kl_target": None}, "beta and kl_reward_coef by the same factor"),
    "length_std": (DR, {**DR, "scale_rewards": "none"}, "set scale_rewards=none."),
    "row_scope": (
        {**PPO, "advantage_norm_scope": "sequence"},
        {**PPO, "advantage_norm_scope": "group"},
        "takes off each row's mean advantage",
    ),
    "truncated": (
        {"mask_truncated_completions": True, "loss_type": "grpo"},
        {"mask_truncated_completions": True, "loss_aggregation": "seq_mean_token_mean"},
        "set loss_aggregation=seq_mean_token_mean to count rows with tokens only.",
    ),
    "cut_off": (
        {**PPO, "mask_truncated_completions": True, "missing_eos_penalty": 1.0},
        {**PPO, "mask_truncated_completions": True},
        "mask_truncated_completions leaves out the completions that truncated_completions",
    ),
    "discount": (
        {**PPO, "gamma": 0.99},
        PPO,
        "gamma=0.99 is a discount a token: of a reward after max_completion_length=512 tokens 0.0058 of it reaches the first",
    ),
    "warmup": (
        {**PPO, "critic_warmup_steps": 20, "max_steps": 20},
        {**PPO, "critic_warmup_steps": 20, "max_steps": 21},
        "critic_warmup_steps=20 is not below max_steps=20, so the policy is never trained",
    ),
    "flat_critic": (
        {**PPO, "num_generations": 4, "zero_std_groups": "drop"},
        {"num_generations": 4, "zero_std_groups": "drop"},
        "have advantages too, and zero_std_groups=drop leaves them out",
    ),
}


def test_every_warning_is_in_the_table():
    """And no sentence is without a test."""
    assert list(WARNINGS) == list(TEXTS)


def test_warnings_of_ppo():
    """On-policy PPO: the policy term, not the loss, is near 0, and neither clip acts; off-policy none of it."""
    first = [text.split(":")[0] for text in warnings(**PPO)]
    assert first == [
        "On-policy",
        "The policy term (loss/policy) is expected to be near 0",
        "On-policy the values are the rollout's (up to rounding), so cliprange_value cannot act and value/clip_ratio is 0.",
    ]
    assert warnings(**PPO, **OFF_POLICY) == []
    bootstrap = {"mask_truncated_completions": True, "truncated_completions": "bootstrap", **OFF_POLICY}
    assert [text.split()[0] for text in warnings(**PPO, **bootstrap)] == ["mask_truncated_completions"]


@pytest.mark.parametrize("name", WARNINGS)
def test_warning(name):
    """It is given where it holds, once, as one sentence or more with a full stop, and not next to it."""
    given, not_given, words = WARNINGS[name]
    (warning,) = [text for text in warnings(**given) if words in text]
    assert warning.endswith(".")
    assert "{" not in warning
    assert not [text for text in warnings(**not_given) if words in text]


def kl_gradient(estimator, corrected):
    """The exact expected gradient of the estimate over a categorical distribution, as in case C1, in the words of explain."""
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    logps, ref = logits.log_softmax(-1), torch.tensor([-0.4, 0.5, 0.2], dtype=torch.float64).log_softmax(-1)
    estimate = estimate_kl(estimator, logps[None], ref[None])[0].double()
    weight = (logps - logps.detach()).exp() if corrected else 1.0
    (gradient,) = torch.autograd.grad((logps.detach().exp() * estimate * weight).sum(), logits, retain_graph=True)
    reverse = (logps.exp() * (logps - ref)).sum()
    forward = (ref.exp() * (ref - logps)).sum()
    names = {"the reverse KL's": reverse, "the forward KL's": forward, "0 in expectation": 0 * reverse}
    for name, value in names.items():
        if torch.allclose(gradient, torch.autograd.grad(value, logits, retain_graph=True)[0], atol=1e-6):
            return name
    return "no KL's"


PLAIN = ("k1", "k3", "abs")  # those that the ratio may multiply


@pytest.mark.parametrize(
    ("estimator", "corrected"),
    [*((name, False) for name in (*PLAIN, "k2", "k1+", "k3+", "abs+")), *((name, True) for name in PLAIN)],
)
def test_gradient_of_the_kl_is_what_is_said(estimator, corrected):
    """k1, k2, k3, abs and the straight-through forms, with and without the ratio where that is allowed."""
    lines = sections(**KL, kl_estimator=estimator, use_bias_correction_kl=corrected)["The loss"]
    (line,) = [line for line in lines if line.startswith("KL in the loss")]
    assert line.endswith(f"gradient: {kl_gradient(estimator, corrected)}")


# The command line.

RECIPE = """\
# what recipes/grpo.py takes: of TRL's model and script arguments, its own, and the configuration's
model_name_or_path: smollm2
use_peft: true
lora_r: 16
dataset_name: reasoning_gym:chain_sum
reward_funcs: [right_number]
bf16: true
deepspeed: no/such/file.json
policy_loss: gspo
epsilon: 3e-4
beta: 1e-3
gradient_accumulation_steps: 4
per_device_train_batch_size: 2
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return str(file)


def test_command(recipe, tmp_path):
    """A process of its own, for a GPU's configuration on any machine: the text, nothing on stderr, no file or folder made."""
    path = {"PYTHONPATH": str(Path(trl_lossplus.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "trl_lossplus.cli", "explain", "--config", recipe, "--num_iterations", "3"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **path}, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    left, *text = done.stdout.splitlines()
    assert left == "not part of the loss: model_name_or_path, use_peft, lora_r, dataset_name, reward_funcs"
    assert text[:2] == ["The loss", "  loss = policy + 0.001 KL"]
    assert "  Optimizer steps that one rollout serves: 3" in text
    assert "    micro-batches a process 4, rows in each 2, uses of each 3 (num_iterations)" in text
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


def test_same_text_as_in_python(capsys):
    """The command prints what `explain` returns."""
    flags = [word for name, value in FULL.items() if name != "reward_weights" for word in (f"--{name}", str(value))]
    assert main(["explain", *flags, "--reward_weights", "1.0", "0.5"]) == 0
    assert capsys.readouterr().out == explain(make(**FULL))


def first_lines(capsys, *arguments, count=3):
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out.splitlines()[:count]


def test_trainer(tmp_path, capsys):
    """grpo unless named, or where the file or the flags hold a field that only PPO has: then a line says so."""
    file = tmp_path / "recipe.yaml"
    file.write_text("model_name_or_path: x\nnum_generations: 1\ncritic: shared\nbeta: 0.1\n")
    config = ["--config", str(file)]
    grpo, ppo = "  loss = policy", "  loss = policy + 0.1 value"
    assert first_lines(capsys, count=2) == ["The loss", grpo]
    assert first_lines(capsys, "--trainer", "ppo", count=2) == ["The loss", ppo]
    assert first_lines(capsys, "--gae-lambda=0.9", "--vf_coef", "0.1") == [
        "trainer: ppo, for only PPO has gae_lambda, vf_coef", "The loss", ppo
    ]  # fmt: skip
    with_kl = ["not part of the loss: model_name_or_path", "The loss", "  loss = policy + 0.1 KL + 0.1 value"]
    assert first_lines(capsys, *config, "--gamma", "1", count=4) == ["trainer: ppo, for only PPO has critic", *with_kl]
    assert first_lines(capsys, *config, "--trainer=ppo") == with_kl
    assert first_lines(capsys, *config, "--trainer=grpo", "--num_generations", "2") == [
        "not part of the loss: model_name_or_path, critic", "The loss", "  loss = policy + 0.1 KL"
    ]  # fmt: skip


def test_a_recipe_of_the_toy(tmp_path, capsys):
    """A file without a model: a recipe takes the toy's batch size then, and this command TRL's, which is said."""
    file = tmp_path / "recipe.yaml"
    for text, said in (
        ("critic: shared\n", True),
        ("model_name_or_path: x\n", False),
        ("per_device_train_batch_size: 4\n", False),
    ):
        file.write_text(text)
        assert main(["explain", "--config", str(file), "--trainer", "ppo"]) == 0
        assert ("no model_name_or_path: a recipe then trains the toy" in capsys.readouterr().out) == said


def test_misspelt_ppo_keys_of_a_file(tmp_path, capsys):
    """Asked about also where nothing else tells that PPO is meant."""
    file = tmp_path / "recipe.yaml"
    file.write_text("critik: shared\nvf_coeff: 0.1\n")
    assert first_lines(capsys, "--config", str(file)) == [
        "not part of the loss: critik, vf_coeff",
        "warning: critik is not a field of the loss, did you mean critic?",
        "warning: vf_coeff is not a field of the loss, did you mean vf_coef?",
    ]


def test_command_line_over_the_file(recipe, capsys):
    assert main(["explain", f"--config={recipe}", "--epsilon", "0.5", "--beta", "0"]) == 0
    out = capsys.readouterr().out
    assert "\n  loss = policy\n" in out
    assert "ratio clipped to [0.5, 1.5]" in out


def test_processes(recipe, capsys):
    """The completions of a launch are those of all its processes; one process alone may be too few for a group."""
    assert main(["explain", "--config", recipe, "--num_processes", "8"]) == 0
    assert "  Rollout: 64 completions = prompts 8 x num_generations 8; processes 8\n" in capsys.readouterr().out
    assert main(["explain", "--config", recipe, "--gradient_accumulation_steps", "1"]) == 2
    assert capsys.readouterr().err == (
        "error: num_generations=8 does not divide the 2 completions of a rollout (per_device_train_batch_size 2 x steps_per_generation 1 x "
        "processes 1). Allowed with these: 2. "
        "With more than 1 process, say --num_processes.\n"
    )
    few = ["--gradient_accumulation_steps", "1", "--num_processes", "4"]
    assert main(["explain", "--config", recipe, *few]) == 0


def test_misspelt_keys_of_a_file(tmp_path, capsys):
    """Listed, and asked about; TRL's own model arguments are not (trl.ModelConfig.lora_alpha is near no field)."""
    file = tmp_path / "recipe.yaml"
    file.write_text("polcy_loss: gspo\nkl_coef: 0.1\nkl-placement: loss\nlora_alpha: 8\ndataset_config: x\n")
    assert main(["explain", "--config", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "not part of the loss: polcy_loss, kl_coef, kl-placement, lora_alpha, dataset_config",
        "warning: polcy_loss is not a field of the loss, did you mean policy_loss?",
        "warning: kl_coef is not a field of the loss, did you mean kl_cov_coef?",
        "warning: kl-placement is not a field of the loss, did you mean kl_placement?",
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["explan"],
            "command='explan' is not known. Did you mean 'explain'? Allowed: check, doctor, explain, list, memory, new, replay, report, snapshot.",
        ),
        (["explain", "--kl_reward_coeff", "1"], "--kl_reward_coeff is not known. Did you mean --kl_reward_coef? `trl-lossplus "),
        (["explain", "--polisy-loss=gspo"], "--polisy-loss is not known. Did you mean --policy_loss?"),
        (["explain", "gspo"], "'gspo' follows no --field."),
        (["explain", "--epsilon", "wide"], "argument --epsilon: invalid float value: 'wide'."),
        (["explain", "--kl_placement", "lss"], "kl_placement='lss' is not known. Did you mean 'loss'?"),
        (["explain", "--kl_target", "0.1"], "kl_target=0.1: nothing reads it."),
        (["explain", "--advantage_estimator", "gae"], "advantage_estimator (gae) reads old_values (B, T)"),
        (["explain", "--trainer", "pppo"], "trainer='pppo' is not known. Did you mean 'ppo'? Allowed: grpo, ppo."),
        (["explain", "--trainer=grpo", "--vf-coef", "1"], "--vf_coef is a field of PPO alone: it needs --trainer ppo."),
        (["explain", "--vf_coeff", "1"], "--vf_coeff is not known. Did you mean --vf_coef?"),
        (["explain", "--trainer", "ppo", "--advantage_estimator", "rloo"], "advantage_estimator='rloo' does not read values"),
        (["explain", "--config"], "--config needs a value after it."),
        (["explain", "--config", "no/such.yaml"], "--config=no/such.yaml: No such file or directory."),
        (["explain", "--num_processes", "0"], "--num_processes=0: it must be a whole number of at least 1."),
        (["snapshot", "foo", "x"], "argument action: invalid choice: 'foo' (choose from 'show', 'diff')."),
        (["snapshot"], "the following arguments are required: action, folders."),
        (["memory"], "the following arguments are required: --model."),
        (["memory", "--model", "7B", "--rows", "x"], "argument --rows: invalid int value: 'x'."),
        (
            ["memory", "--model", "7B", "--method", "lor"],
            "method='lor' is not known. Allowed: LoRA, QLoRA, full.",
        ),
        (["report"], "the following arguments are required: run."),
        (["doctor", "a", "b"], "unrecognized arguments: b."),
        (["replay"], "the following arguments are required: snapshot."),
        (
            ["explain", "--skip_still_rows", "true", "--beta", "0.1"],
            "skip_still_rows=True would change the gradient: the kl term acts",
        ),
        (
            ["explain", "--compact_generation", "true", "--use_vllm", "true"],
            "compact_generation=True: completions come from vLLM",
        ),
        (
            ["explain", "--microbatch_layout", "packed", "--model_init_kwargs", '{"attn_implementation": "eager"}'],
            "microbatch_layout='packed' is not exact here: attn_implementation is 'eager'",
        ),
        (
            ["explain", "--microbatch_layout", "shared_prefix", "--router_aux_loss_coef", "0.01"],
            "microbatch_layout='shared_prefix' is not exact here: the router's auxiliary loss",
        ),
        (["explain", "--trainer", "ppo", "--sync_ref_model", "true"], "sync_ref_model=True: there is no KL, so no reference."),
        (["explain", "--num_generations", "1"], "GRPO requires at least 2 generations per prompt"),
    ],
)
def test_errors(arguments, error, capsys):
    """Exit 2 and one line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {error}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("beta: [1", "no valid YAML"),
        ("- beta", "it must hold `field: value` lines."),
        ("", "it must hold `field: value` lines."),
        ("beta: [1]", "beta=[1]: it must be a number."),
        ("num_generations: [2]", "num_generations=[2]: it must be a whole number."),
        ("vf_coef: x", "argument --vf_coef/--vf-coef: invalid float value: 'x'."),
        ("critic: sharred", "critic='sharred' is not known. Did you mean 'shared'?"),
        ("epsilon: wide", "argument --epsilon: invalid float value: 'wide'."),
        ("kl_placement: no", "kl_placement=False is not known."),
    ],
)
def test_errors_in_a_file(text, error, tmp_path, capsys):
    """As above, for files that are no YAML, no mapping, or hold values of the wrong type."""
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert main(["explain", "--config", str(file)]) == 2
    captured = capsys.readouterr()
    assert error in captured.err
    assert captured.err.count("\n") == 1


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trl-lossplus {trl_lossplus.__version__}\n"
    assert main(["--help"]) == 0
    assert "  explain   the loss of a configuration in words, with every warning\n" in capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: trl-lossplus COMMAND ...\n")


def test_help_of_explain(capsys):
    """The fields of ours with their help, and every objective and estimator with formula, source and options."""
    assert main(["explain", "--help"]) == 0
    out = capsys.readouterr().out
    assert "\n  --kl_target  Target of adaptive control: KL in nats a token.\n" in out
    assert "\nFields of PPO (--trainer ppo):\n  --num_generations  Completions a prompt, from 1.\n" in out
    assert out.count("\n  --vf_coef  ") == out.count("\n  --kl_target  ") == 1
    assert "\n  --per_device_train_batch_size" not in out
    assert (
        "\n  ppo_clip  -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) (PPO, arXiv 1707.06347); options clip_objective,"
        in out
    )
    assert "\n  rloo  s - mean of the group's other rewards (RLOO, arXiv 2402.14740)\n" in out


def test_adding_a_command(monkeypatch, capsys):
    """A later command is an entry of the table."""
    monkeypatch.setitem(COMMANDS, "later", Command("comes later", lambda arguments: len(arguments)))
    assert main(["later", "a", "b"]) == 2
    assert main(["--help"]) == 0
    assert "  later     comes later\n" in capsys.readouterr().out
