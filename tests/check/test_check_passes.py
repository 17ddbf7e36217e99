"""The check agrees with the trainer: every objective, each with another aggregation, estimator, placement and normalization."""

import itertools

import pytest

from trl_lossplus.check import plain, plain_advantages, plain_batch, run
from trl_lossplus.check.record import Rollout
from trl_lossplus.check.sampler import letters_reward
from trl_lossplus.check.settings import build_config
from trl_lossplus.cli import quiet
from trl_lossplus.functional.aggregation import AGGREGATIONS
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

OURS = [name for name in POLICY_LOSSES.names() if POLICY_LOSSES.get(name).func.__module__.startswith("trl_lossplus")]
ESTIMATORS = [name for name in ADVANTAGE_ESTIMATORS.names() if "old_values" not in ADVANTAGE_ESTIMATORS.get(name).requires]
SMALL = ["--per_device_train_batch_size", 8, "--max_completion_length", 5]

# Settings under which an objective's bounds are reached by the toy.
REACHED = {
    "cispo": "--epsilon_high 1.1 --cispo_ratio_min 0.9",
    "tis": "--is_ratio_max 1.2",
    "mis": "--is_ratio_max 1.2 --is_ratio_min 0.8",
    "rollout_is": "--is_ratio_max 1.2 --is_mode mask --rollout_rs token_k1,seq_mean_k3 --rollout_rs_threshold 0.8_1.3,0.1",
    "rollout_ppo": "--rollout_rs seq_max_k2 --rollout_rs_threshold 0.05",
    "dppo_tv": "--epsilon 0.01",
    "dppo_kl": "--epsilon 0.001",
    "ipo": "--ipo_threshold 0.02 --ipo_by_sign true",
    "rec": "--rec_clip ring --rec_ring_low 0.25 --rec_ring_high 0.3 --rec_weight importance",
    "sppo": "--epsilon 0.05",
    "m2po": "--m2_threshold 0.003",
    "clip_cov": "--clip_cov_ratio 0.1 --clip_cov_min 0.05",
    "kl_cov": "--kl_cov_ratio 0.1",
    "fipo": "--delta 1.5",
    "ppo_clip": "--clip_ratio_c 1.1 --delta 1.5 --epsilon_high 0.28",
}
KL = itertools.cycle(
    [
        "--beta 0.1 --kl_estimator k1",
        "--kl_placement reward --kl_reward_coef 0.2 --kl_reward_level token",
        "--kl_placement both --beta 0.1 --kl_reward_coef 0.2 --kl_reward_level token --kl_estimator k3+",
        "",
        "--beta 0.1 --kl_estimator k2 --zero_std_groups no_kl",
        "--beta 0.1 --kl_estimator abs --kl_controller adaptive --kl_target 0.01 --kl_horizon 100",
        "--beta 0.1 --kl_estimator low_var_kl --zero_std_groups drop",
    ]
)
NORMALIZATIONS = itertools.cycle(["", "--advantage_normalization learner", "", "--advantage_normalization rollout"])
MORE = itertools.cycle(["", "--entropy_coef 0.01", "--off_policy_mask_threshold 0.05", "--top_entropy_quantile 0.5", ""])


def spread():
    """One run for each objective."""
    ways = zip(itertools.cycle(AGGREGATIONS), itertools.cycle(ESTIMATORS), KL, NORMALIZATIONS, MORE, strict=False)
    for name, (aggregation, estimator, kl, normalization, more) in zip(OURS, ways, strict=False):
        normalization = "" if estimator == "gdpo" else normalization
        words = f"--policy_loss {name} --loss_aggregation {aggregation} --advantage_estimator {estimator} {REACHED.get(name, '')}"
        yield pytest.param(f"{words} {kl} {normalization} {more}".split(), id=name)


@pytest.mark.parametrize("words", list(spread()))
def test_objectives(checked, words):
    code, last, text = checked(*SMALL, *words)
    assert code == 0, text
    assert last.startswith("ok: ")
    assert "no plain version" not in text
    hits = text.split("ratio other than 1 ")[1].split("/")[0]
    assert int(hits) > 5  # off-policy, or there is nothing to see


@pytest.mark.parametrize(
    "words",
    [
        "--trainer ppo",
        "--trainer ppo --kl_placement reward --kl_reward_coef 0.1 --critic shared --truncated_completions bootstrap "
        "--gae_lambda_critic 0.8 --gamma 0.9 --whiten_rewards true --missing_eos_penalty 0.3",
        "--trainer ppo --critic adapter --beta 0.1 --value_loss huber --huber_delta 0.2 --num_generations 4 "
        "--advantage_normalization learner --advantage_norm_scope group --loss_aggregation seq_mean_token_mean",
        "--trainer ppo --critic_warmup_steps 1 --cliprange_value 0",
        "--loss_type dr_grpo --mask_truncated_completions true",
        "--loss_aggregation seq_mean_token_mean --steps_per_generation 3",
        "--importance_sampling_level sequence --beta 0.1 --clip_objective max",
        "--reward_weights 1.0 0.5 2.0 --scale_rewards batch --num_iterations 1",
        "--use_adaptive_entropy true --entropy_coef 0.01",
        "--rollout_rs token_k1,seq_max_k3 --rollout_rs_threshold 0.85_1.2,0.02 --advantage_normalization rollout --advantage_norm_scope group "
        "--loss_type grpo --zero_std_groups drop",
        "--rollout_rs seq_sum_k1 --rollout_rs_threshold 0.8_1.25 --loss_type grpo --rollout_is_correction true --num_iterations 1 "
        "--vllm_importance_sampling_mode token_mask --vllm_importance_sampling_clip_max 1.15 --rollout_is_batch_normalize true",
        "--trainer ppo --rollout_rs token_k2 --rollout_rs_threshold 0.01 --rollout_is_correction true --rollout_is_batch_normalize true "
        "--vllm_importance_sampling_mode sequence_truncate --vllm_importance_sampling_clip_min 0.9 --beta 0.1",
        "--rollout_rs token_k3 --rollout_rs_threshold 0.01 --steps_per_generation 3 --kl_placement reward --kl_reward_coef 0.1",
        "--policy_loss kl_cov --kl_cov_ratio 0.2 --rollout_rs token_k2 --rollout_rs_threshold 0.01 --gradient_accumulation_steps 4",
        "--zero_std_groups resample --beta 0.1 --kl_controller adaptive --kl_target 0.01 --kl_horizon 100",
        "--zero_std_groups resample --advantage_estimator gdpo",
        "--advantage_estimator asymre --asymre_shift -0.3 --policy_loss rec --rec_weight advantage --rec_clip none",
        "--advantage_estimator opmd --opmd_tau 0.3 --policy_loss rec --rec_clip two_side --importance_sampling_level sequence",
        "--zero_std_groups resample --trainer ppo --num_generations 4",
    ],
)
def test_trainers_and_schedules(checked, words):
    code, _, text = checked(*SMALL, *words.split())
    assert code == 0, text


def sometimes(completions, **kwargs):
    """A reward for most completions; none for every seventh, and for one whole prompt."""
    return [None if i % 7 == 3 or i // 4 == 1 else float(len(text) % 3) for i, text in enumerate(completions)]


@pytest.mark.parametrize(
    "words",
    [
        "--advantage_normalization learner --loss_aggregation seq_mean_token_mean",
        "--advantage_estimator gdpo",
        "--advantage_estimator reinforce_plus_plus_baseline --kl_placement reward --kl_reward_coef 0.1",
        "--trainer ppo --kl_placement reward --kl_reward_coef 0.1",
    ],
)
def test_rewards_that_are_not_there(words, tmp_path):
    """Rows that no function scored have no advantage, and stay out of every mean."""
    with quiet():
        config = build_config([*map(str, SMALL), *words.split()], None, None, str(tmp_path), print)
    recorder = run.trained(config, str(tmp_path), [sometimes, letters_reward] if "gdpo" in words else [sometimes])
    settings = run.described(recorder, None, None)
    lines, code = run.report(recorder, settings, run.by_hand(recorder, settings))
    assert code == 0, "\n".join(lines)
    unscored = [not x for event in recorder.events if isinstance(event, Rollout) for x in event.tensors["scored"]]
    assert any(unscored) or "gdpo" in words


def test_what_was_not_seen_is_said(checked):
    code, _, text = checked(*SMALL, "--num_iterations", 1)
    assert code == 0
    assert "not seen, so this says nothing about it: ratio other than 1, clipped below 0.8, clipped above 1.2" in text


def test_every_objective_and_estimator_has_a_plain_version():
    assert set(OURS) <= plain.OBJECTIVES.keys() | plain_batch.BATCH_OBJECTIVES.keys()
    known = (plain_advantages.SEQUENCE_ESTIMATORS, plain_advantages.TOKEN_ESTIMATORS, plain_advantages.GROUP_TOKEN_ESTIMATORS)
    ours = [name for name in ADVANTAGE_ESTIMATORS.names() if ":" not in name]
    assert {name for name in ours if ADVANTAGE_ESTIMATORS.get(name).func.__module__.startswith("trl_lossplus")} <= set().union(
        *known
    )
