"""docs/migrating.md: every field that a table names on our side is one, and on the other side one that was read off its sources."""

import dataclasses
import re

import pytest
import torch
from docpages import PAGES
from trl import ModelConfig

from trl_lossplus import GRPOPlusConfig, LossBatch, PPOPlusConfig, compute_loss

TEXT = PAGES["docs/migrating.md"].read_text()
TRAINER_ARGUMENTS = {"reward_funcs", "model"}

# Prefixes as on the page: actor, rollout and model stand for actor_rollout_ref.*; verl/trainer/config, b178a3cd5 (2026-01-29).
VERL = """
    algorithm: gamma lam adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon
        kl_ctrl.target_kl filter_groups.enable filter_groups.max_num_gen_batches rollout_correction.rollout_is
        rollout_correction.rollout_is_threshold rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold
        rollout_correction.bypass_mode rollout_correction.loss_type rollout_correction.rollout_is_batch_normalize
    actor: ppo_mini_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu clip_ratio clip_ratio_low
        clip_ratio_high tau_pos tau_neg policy_loss.loss_mode policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub
        policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff use_kl_loss
        kl_loss_coef kl_loss_type ppo_epochs shuffle grad_clip optim.lr optim.lr_warmup_steps_ratio optim.lr_warmup_steps
        optim.weight_decay
    model: path lora_rank lora_alpha target_modules enable_gradient_checkpointing use_remove_padding
    rollout: n temperature top_p top_k name mode gpu_memory_utilization tensor_model_parallel_size
    data: train_files prompt_key train_batch_size max_response_length max_prompt_length filter_overlong_prompts
    custom_reward_function: path name
    trainer: total_epochs total_training_steps save_freq test_freq logger project_name resume_mode nnodes n_gpus_per_node
"""
# openrlhf/cli/train_ppo_ray.py, 3c3be623 (2026-08-13).
OPENRLHF = """
    algo: advantage.estimator advantage.gamma advantage.lambd advantage.no_std_norm advantage.is_correction_enable
        advantage.is_correction_type advantage.is_correction_threshold kl.init_coef kl.use_loss kl.estimator kl.target kl.horizon
        dynamic_filtering_enable dynamic_filtering_range
    actor: policy_loss_type eps_clip eps_clip_low_high dual_clip entropy_coef aux_loss_coef adam.lr max_norm
        gradient_checkpointing_enable
    critic: value_clip freezing_steps model_name_or_path save_value_network adam.lr
    rollout: n_samples_per_prompt batch_size max_new_tokens temperature top_p micro_batch_size
    train: batch_size micro_batch_size max_epochs num_episodes dynamic_batch_enable max_tokens_per_gpu async_enable
        partial_rollout_enable
    reward: remote_url model_name_or_path clip_range normalize_enable overlong_buffer_len overlong_penalty_factor
        stop_properly_penalty_coef
    data: prompt_dataset input_key label_key apply_chat_template max_len
    ds: packing_samples lora.rank lora.alpha lora.target_modules lora.dropout load_in_4bit zero_stage adam_offload param_dtype
    vllm: num_engines tensor_parallel_size gpu_memory_utilization
    ckpt: save_steps output_dir load_enable
"""


def full(names):
    """{prefix.name}, from lines of `prefix: names`."""
    found, prefix = set(), ""
    for word in names.split():
        if word.endswith(":"):
            prefix = word
        else:
            found.add(f"{prefix[:-1]}.{word}")
    return found


def table(heading):
    """The cells of the first table below a heading, without its head."""
    below = TEXT.split(f"\n## {heading}\n", 1)[1]
    rows = [line for line in below.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


@pytest.fixture(scope="module")
def known():
    """Every name that a recipe's YAML or a trainer takes."""
    from recipes.arguments import RecipeArguments

    kinds = (GRPOPlusConfig, PPOPlusConfig, ModelConfig, RecipeArguments)
    return {item.name for kind in kinds for item in dataclasses.fields(kind)} | TRAINER_ARGUMENTS


@pytest.mark.parametrize(("heading", "theirs"), [("From verl", VERL), ("From OpenRLHF", OPENRLHF)])
def test_tables_name_fields(heading, theirs, known):
    """Theirs: all that the list holds and nothing else. Ours: fields, and the defaults' column is there."""
    rows = table(heading)
    assert {len(row) for row in rows} == {4}
    assert {name for row in rows for name in re.findall(r"`([\w.]+)`", row[0])} == full(theirs)
    assert {name for row in rows for name in re.findall(r"`([\w.]+)`", row[2])} <= known
    assert all(row[2] or row[3] for row in rows)


def test_unsloth_and_trl_name_fields(known):
    for row in table("From unsloth"):
        assert set(re.findall(r"`(\w+)`", row[1])) <= known
    for row in table("From TRL's GRPOTrainer"):
        assert {name for cell in row for name in re.findall(r"`(\w+)(?::[^`]*)?`", cell)} <= known | {"sapo", "vespo"} | {
            "gspo_token",
            "luspo",
            "gmpo",
        }


def settings(cell, **shared):
    """The fields that a cell of the TRL table sets."""
    return {**dict(re.findall(r"`(\w+): (\w+)`", cell)), **shared}


TRL_ROWS = [row for row in table("From TRL's GRPOTrainer") if "loss_type" in row[0]]
TRL_PAIRS = [
    (f"{found}{row[0].partition(' with ')[2]}", row[1]) for row in TRL_ROWS for found in re.findall(r"`loss_type: \w+`", row[0])
]


@pytest.mark.parametrize(("theirs", "ours"), TRL_PAIRS, ids=[pair[0] for pair in TRL_PAIRS])
def test_trl_rows_are_one_loss(theirs, ours, tmp_path):
    """Both sides of each row give the same number and gradient, to the bit, off-policy and on rows of unequal length."""
    shared = {"output_dir": str(tmp_path), "report_to": "none", "bf16": False, "max_completion_length": 6}
    bound = {"epsilon_high": 3.0} if "epsilon_high" in ours else {}
    left = settings(theirs, **shared, **bound)
    same_name = {"policy_loss": left["loss_type"]} if "of the same name" in ours else {}
    right = settings(ours, **shared, **bound, **same_name)
    assert "policy_loss" in right
    random = torch.Generator().manual_seed(3)
    logps, moved, advantages = (torch.randn(shape, generator=random) for shape in ((4, 6), (4, 6), (4,)))
    mask = torch.arange(6) < torch.tensor([[6], [3], [5], [1]])
    seen = []
    for values in (left, right):
        leaf = logps.clone().requires_grad_()
        loss = compute_loss(LossBatch(leaf, logps + 0.3 * moved, advantages, mask), GRPOPlusConfig(**values).loss_spec()).loss
        loss.backward()
        seen.append((loss.item(), leaf.grad))
    assert seen[0][0] == seen[1][0] != 0
    assert torch.equal(seen[0][1], seen[1][1])
    assert seen[0][1].abs().max() > 0
