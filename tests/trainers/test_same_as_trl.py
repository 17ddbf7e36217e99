"""With TRL's fields alone GRPOPlusTrainer trains to the weights of TRL's GRPOTrainer."""

import pytest
from peft import LoraConfig
from toyrun import apart, letter_reward, logged, trainer, weights
from trl import GRPOConfig, GRPOTrainer

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer
from trl_lossplus.toy import keyword_reward, toy_dataset

CASES = {
    "default": {},
    "kl": {"beta": 0.05},
    "two passes": {"num_iterations": 2, "loss_type": "grpo", "scale_rewards": "batch"},
    "accumulation": {"loss_type": "dr_grpo", "scale_rewards": "none", "gradient_accumulation_steps": 2},
    "several rewards": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.3], "beta": 0.02},
    "entropy": {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 3.4, "top_entropy_quantile": 0.5},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "luspo", "num_iterations": 2},
}


RUNS = [(name, False) for name in CASES] + [(name, True) for name in ("default", "kl", "two passes")]


@pytest.mark.parametrize(("name", "lora"), RUNS)
def test_five_steps(toy, tmp_path, name, lora):
    """
    Weights equal to 1e-5 after 5 steps; every metric that TRL logs is logged and equal.

    With accumulation TRL averages per-token metrics over micro-batches, ours pool them over the step's tokens: left to J6.
    """
    reward = [keyword_reward, letter_reward] if name == "several rewards" else letter_reward

    def train(trainer_class, config_class):
        extra = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)} if lora else {}
        run = trainer(
            toy, tmp_path, reward=reward, trainer_class=trainer_class, config_class=config_class, extra=extra,
            max_steps=5, **CASES[name],
        )  # fmt: skip
        start = weights(run)
        run.train()
        return run, start

    theirs, start = train(GRPOTrainer, GRPOConfig)
    ours, _ = train(GRPOPlusTrainer, GRPOPlusConfig)
    assert apart(weights(theirs), start) > 1e-3
    assert apart(weights(theirs), weights(ours)) < 1e-5
    for metric in theirs.state.log_history[0]:
        if "time" not in metric and not (name == "accumulation" and metric == "entropy"):
            assert logged(ours, metric) == pytest.approx(logged(theirs, metric), rel=1e-4, abs=2e-6), metric


def test_evaluation(toy, tmp_path):
    """The same eval loss and metrics, at the same generation seed."""
    results = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (GRPOPlusTrainer, GRPOPlusConfig)):
        run = trainer(
            toy, tmp_path, reward=letter_reward, trainer_class=trainer_class, config_class=config_class, beta=0.05,
            extra={"eval_dataset": toy_dataset().select(range(4))}, per_device_eval_batch_size=8,
        )  # fmt: skip
        results.append(run.evaluate())
    theirs, ours = results
    for metric in theirs:
        if not any(word in metric for word in ("time", "runtime", "per_second")):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=2e-6), metric
