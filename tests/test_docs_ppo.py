"""docs/ppo.md: every code block runs or parses, every field that a table names is one, and the tables are complete."""

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch
from docpages import blocks
from docrun import PageRun

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import ppo_cost  # noqa: E402
from trl_lossplus import PPOPlusConfig  # noqa: E402

PAGE = (ROOT / "docs" / "ppo.md").read_text()
TRAINER_ARGUMENTS = {"model", "reward_funcs", "processing_class", "peft_config"}

# Fields of trl 1.12.0's trl/experimental/ppo/ppo_config.py, and what its trainer took beside the usual.
TRL_FIELDS = """
    learning_rate dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size num_sample_generations
    response_length stop_token stop_token_id temperature missing_eos_penalty sft_model_path world_size num_total_batches
    micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size push_to_hub reward_model_path
    model_adapter_name ref_adapter_name num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma
    lam ds3_gather_for_generation model ref_model reward_model value_model peft_config processing_class
"""
VERL_FIELDS = """
    algorithm.adv_estimator algorithm.gamma algorithm.lam algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl.type
    algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl trainer.critic_warmup critic.rollout_n
    critic.strategy critic.enable critic.optim.lr critic.optim.lr_warmup_steps_ratio critic.optim.lr_warmup_steps
    critic.optim.total_training_steps critic.optim.weight_decay critic.model.path critic.model.tokenizer_path
    critic.ppo_mini_batch_size critic.ppo_micro_batch_size_per_gpu critic.use_dynamic_bsz critic.ppo_max_token_len_per_gpu
    critic.ppo_epochs critic.shuffle critic.cliprange_value critic.loss_agg_mode critic.checkpoint critic.grad_clip
"""


def table(heading):
    """The cells of the first table below a heading, without its head."""
    below = PAGE.split(f"\n## {heading}\n", 1)[1]
    rows = [line for line in below.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_blocks_run(tmp_path, monkeypatch, capsys):
    """The example prints an explained variance for each step; `explain` says what the critic is; all of it is about PPO."""
    run = PageRun("docs/ppo.md", tmp_path, monkeypatch).run()
    assert run.ran == len(blocks("docs/ppo.md"))
    (line,) = [line for line in run.printed.splitlines() if line.startswith("adapter [")]
    assert len(ast.literal_eval(line.split(" ", 1)[1])) == 8
    assert "The critic" in run.printed


@pytest.mark.parametrize(("heading", "theirs"), [("From TRL 1.12's PPOTrainer", TRL_FIELDS), ("From verl's PPO", VERL_FIELDS)])
def test_table_is_complete_and_names_fields(heading, theirs):
    rows = table(heading)
    assert all(len(row) == 4 for row in rows)
    assert set(theirs.split()) <= {name for row in rows for name in re.findall(r"`([\w.]+)`", row[0])}
    fields = {item.name for item in dataclasses.fields(PPOPlusConfig)} | TRAINER_ARGUMENTS
    assert {name for row in rows for name in re.findall(r"`([\w.]+)`", row[2])} <= fields


def test_a_step_costs_what_the_page_says(monkeypatch):
    """
    TRL's defaults, in multiplications, which no other work on the machine disturbs: forward, recomputation and backward are 3 for
    GRPO; the critic adds 2, and 1 for what it recomputes (3 of 4 layers unless asked otherwise); its head adds next to nothing.
    """
    monkeypatch.setattr(ppo_cost, "WARM", 1)
    monkeypatch.setattr(ppo_cost, "TIMED", 2)
    threads = torch.get_num_threads()
    variants = ("trl", "grpo", "adapter", "kept", "shared")
    done = {variant: ppo_cost.measure(variant, {"gradient_checkpointing": True}) for variant in variants}
    torch.set_num_threads(threads)
    grpo = done["grpo"]
    assert {run["frozen"] for run in done.values()} == {2646272}  # the base, once
    assert done["adapter"]["trained"] == done["kept"]["trained"] == 2 * grpo["trained"] + 256  # a second adapter, and a head
    assert done["shared"]["trained"] == grpo["trained"] + 256
    flops = {variant: run["flops"] / grpo["flops"] for variant, run in done.items()}
    assert flops["adapter"] == pytest.approx((3 + 2 + 3 / 4) / 3, rel=0.02)
    assert flops["kept"] == pytest.approx((3 + 2) / 3, rel=0.02)
    assert flops["shared"] == pytest.approx(1, rel=0.001)
    memory = {variant: run["memory"] / grpo["memory"] for variant, run in done.items()}
    expected = {"trl": 4.1, "grpo": 1, "adapter": 1.31, "kept": 2.64, "shared": 1.0}
    assert memory == pytest.approx(expected, rel=0.03)
    assert max(memory.values()) == memory["trl"]
    assert grpo["kept"] < done["shared"]["kept"] < done["adapter"]["kept"] < done["kept"]["kept"]
    lines = ppo_cost.table("a setting", [done])
    assert [line.split()[0] for line in lines[2:]] == list(variants)


def test_defaults_that_the_page_names():
    config = {item.name: item.default for item in dataclasses.fields(PPOPlusConfig)}
    assert (config["num_generations"], config["gae_lambda"], config["cliprange_value"], config["vf_coef"]) == (1, 0.95, 0.2, 0.1)
    assert (config["temperature"], config["learning_rate"], config["num_iterations"]) == (1.0, 1e-6, 1)
    assert (config["truncated_completions"], config["max_grad_norm"], config["clip_ratio_c"]) == ("terminal", 1.0, None)
