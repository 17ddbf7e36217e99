"""Two real gloo processes give the weights, the coefficient and the logged terms of one process over the same rollouts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).with_name("two_processes.py")
ROOT = SCRIPT.parents[2]

# Named settings; batch sizes are of one process and halved for two, so that the optimizer step holds the same rows.
RUNS = {
    "token mean, KL, adaptive": {"beta": 0.1, "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 40.0},
    "prompt mean, learner norm, accumulation": {
        "loss_aggregation": "prompt_mean", "advantage_normalization": "learner", "gradient_accumulation_steps": 2,
        "entropy_coef": 0.01, "optim": "sgd", "learning_rate": 0.3,
    },
    "gspo, KL in the reward, two passes": {
        "policy_loss": "gspo", "kl_placement": "reward", "kl_reward_coef": 0.2, "kl_reward_level": "token",
        "advantage_normalization": "rollout", "num_iterations": 2, "optim": "sgd",
        "learning_rate": 0.3,
    },
    "packed, KL, rows balanced over two micro-batches": {
        "microbatch_layout": "shared_prefix", "beta": 0.1, "gradient_accumulation_steps": 2, "num_iterations": 2, "optim": "sgd",
        "learning_rate": 0.3,
    },
    "clip_cov, accumulation": {
        "policy_loss": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_min": 0.05, "clip_cov_max": 9.0, "gradient_accumulation_steps": 2,
        "num_iterations": 2, "optim": "sgd", "learning_rate": 0.3,
    },
    "kl_cov, on-policy": {"policy_loss": "kl_cov", "kl_cov_ratio": 0.1, "kl_cov_coef": 0.5, "optim": "sgd", "learning_rate": 0.3},
    "rejection, normalized weights": {
        "ratios": True, "rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.6_2.5,0.9_1.5", "rollout_is_correction": True,
        "rollout_is_batch_normalize": True, "vllm_importance_sampling_clip_max": 3.5, "num_iterations": 2, "optim": "sgd",
        "learning_rate": 0.3, "policy_loss": "kl_cov", "kl_cov_ratio": 0.2,
    },
    "real, two passes": {"policy_loss": "real", "num_iterations": 2, "optim": "sgd", "learning_rate": 0.3},
    # Groups of 16: each lies on both processes. One prompt, so the second process has none of its own.
    "optimal token baseline": {
        "advantage_estimator": "optimal_token_baseline", "by_token": True, "tools": True, "num_generations": 16, "optim": "sgd",
        "learning_rate": 0.3,
    },
    "remax": {"advantage_estimator": "remax", "by_token": True, "reward_weights": [1.0, 0.5], "optim": "sgd", "learning_rate": 0.3},
    "remax, one prompt": {"advantage_estimator": "remax", "num_generations": 16, "num_iterations": 2, "optim": "sgd",
        "learning_rate": 0.3},
    "opo": {"advantage_estimator": "opo", "tools": True, "num_generations": 16, "optim": "sgd", "learning_rate": 0.3},
}  # fmt: skip


def launch(processes, toy, out, settings):
    out.mkdir()
    rows = 16 // processes
    settings = {**settings, "per_device_train_batch_size": rows, "ddp_find_unused_parameters": False}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU"):
        environment.pop(name, None)
    start = [sys.executable]
    if processes > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
        start += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command = [*start, str(SCRIPT), toy, str(out), json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    facts = out / "facts.json"
    assert facts.exists(), done.stderr[-3000:]
    return torch.load(out / "weights.pt", weights_only=True), json.loads(facts.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a3_e7_d5_two_processes_are_one(toy, tmp_path, name):
    """A3, E7, D5: equal to 1e-5 after 3 steps; the processes are two, and the model is wrapped for them."""
    one, facts_one = launch(1, toy, tmp_path / "one", RUNS[name])
    two, facts_two = launch(2, toy, tmp_path / "two", RUNS[name])
    assert facts_one["processes"] == 1
    assert facts_two["processes"] == 2
    assert facts_two["wrapped"] == "DistributedDataParallel"
    assert one.keys() == two.keys()
    assert max((one[key] - two[key]).abs().max().item() for key in one) < 1e-5
    start = {key: value for key, value in AutoModelForCausalLM.from_pretrained(toy).named_parameters() if key in one}
    assert max((one[key] - start[key]).abs().max().item() for key in one) > 1e-3
    assert facts_two["coef"] == pytest.approx(facts_one["coef"], rel=1e-6)
    for entry_one, entry_two in zip(facts_one["log"][:3], facts_two["log"][:3], strict=True):
        for metric, value in entry_one.items():
            if metric.startswith(
                ("loss", "kl", "entropy", "clip_ratio/region", "group_reward", "reward", "clip_cov", "real", "rollout_")
            ):
                assert entry_two[metric] == pytest.approx(value, rel=1e-4, abs=2e-6), metric


PPO = {
    "critic": "adapter", "lora": True, "num_generations": 4, "beta": 0.05, "gradient_accumulation_steps": 2, "optim": "sgd",
    "learning_rate": 0.3, "vf_coef": 0.5, "gradient_checkpointing": True,
}  # fmt: skip
ZERO2 = {
    "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_allow_untested_optimizer": True,
}  # fmt: skip


WAYS = {
    "as above": {},
    # The rollout's passes are the loss's own, once an optimizer step, and twice an optimizer step.
    "a micro-batch a step": {"gradient_accumulation_steps": 1},
    "two rollouts a step": {"steps_per_generation": 1, "learning_rate": 0.6},
    "reentrant, accumulation 4": {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "gradient_accumulation_steps": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "zero2"])
@pytest.mark.parametrize("way", WAYS)
def test_ppo_with_an_adapter_critic_on_two_processes(toy, tmp_path, backend, way):
    """Adapter critic, checkpointing, accumulation, KL with the base as reference: the weights of one process, to 1e-5."""
    settings = {**PPO, **WAYS[way]}
    one, _ = launch(1, toy, tmp_path / "one", settings)
    two, facts = launch(2, toy, tmp_path / "two", {**settings, "deepspeed": ZERO2} if backend == "zero2" else settings)
    assert facts["processes"] == 2
    assert facts["wrapped"] == {"ddp": "DistributedDataParallel", "zero2": "DeepSpeedEngine"}[backend]
    assert one.keys() == two.keys()
    for part in ("lora_B.default", "lora_B.critic", "lora_value_head"):
        names = [name for name in one if part in name]
        assert names
        assert max(one[name].abs().max().item() for name in names) > 1e-3, part
        assert max((one[name] - two[name]).abs().max().item() for name in names) < 1e-5, part


@pytest.mark.slow
def test_one_rank_without_signal_finishes(toy, tmp_path):
    """One process with zero-spread groups only, the other with all the signal: no hang, and the weights move."""
    weights, facts = launch(2, toy, tmp_path / "two", {"one_sided": True, "loss_aggregation": "prompt_mean"})
    assert facts["processes"] == 2
    assert [entry["group_reward/frac_flat"] for entry in facts["log"][:3]] == [0.5, 0.5, 0.5]
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert facts["log"][0]["grad_norm"] > 0


@pytest.mark.slow
def test_one_process_has_all_the_rows_that_move(toy, tmp_path):
    """The other's rows are all flat: both run each micro-batch, the weights are those of computing every row, and half is said to be computed."""
    settings = {"one_sided": True, "gradient_accumulation_steps": 2, "num_iterations": 2, "optim": "sgd", "learning_rate": 0.3}
    every, _ = launch(2, toy, tmp_path / "every", settings)
    some, facts = launch(2, toy, tmp_path / "some", {**settings, "microbatch_layout": "shared_prefix", "skip_still_rows": True})
    assert max((every[key] - some[key]).abs().max().item() for key in every) < 1e-5
    assert [entry["frac_rows_computed"] for entry in facts["log"] if "loss" in entry] == [0.5] * 3
