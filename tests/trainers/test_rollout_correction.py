"""A sampler that differs from the policy by known ratios, through the trainer: what is rejected, what is weighted, by hand."""

import math

import pytest
import torch
from toyrun import RATIOS, SeeLoss, apart, letter_reward, logged, rollout_with_ratios, trainer, weights

from trl_lossplus import GRPOPlusConfig, LossPlusError
from trl_lossplus.trainers.correct import correct

RUN = {"reward": letter_reward, "rollout": rollout_with_ratios, "max_steps": 1}
GROUP = torch.tensor([[math.nan if r is None else r for r in row] for row in RATIOS])


def seen_in(run):
    """The step's micro-batches by name, rows in the order of generation."""
    seen = SeeLoss(run)
    run.train()
    order = torch.cat([micro["row"] for micro in seen.inputs]).argsort()
    names = [name for name, x in seen.inputs[0].items() if isinstance(x, torch.Tensor) and x.dim() > 0]
    return {name: torch.cat([micro[name] for micro in seen.inputs])[order] for name in names} | {
        "window": seen.inputs[0]["window"]
    }


# Of each group: k1 = log r; k2 = log(r)^2 / 2 is 0, .240 .240, .961, .603; k3 = r - 1 - log r is 0, .307 .193, 1.614, .901. Products
# 1, 1, 4, 3; geometric means 1, 1, 1.587, 1.442. The token that was not scored counts as no difference.
KEPT = [
    ("token_k1", "0.6_2.5", [[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 1, 0]]),
    ("token_k1", "2.5", [[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 0]]),
    ("token_k2", "0.7", [[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]]),
    ("token_k3", "0.2", [[1, 1, 1], [0, 1, 1], [0, 1, 1], [1, 1, 0]]),
    ("seq_sum_k1", "0.9_1.5", [[1] * 3, [1] * 3, [0] * 3, [0] * 3]),
    ("seq_mean_k1", "0.9_1.5", [[1] * 3, [1] * 3, [0] * 3, [1] * 3]),
    ("seq_sum_k2", "0.5", [[1] * 3, [1] * 3, [0] * 3, [0] * 3]),
    ("seq_mean_k2", "0.25", [[1] * 3, [1] * 3, [0] * 3, [1] * 3]),
    ("seq_max_k2", "0.2", [[1] * 3, [0] * 3, [0] * 3, [0] * 3]),
    ("seq_sum_k3", "1.0", [[1] * 3, [1] * 3, [0] * 3, [1] * 3]),
    ("seq_mean_k3", "0.2", [[1] * 3, [1] * 3, [0] * 3, [0] * 3]),
    ("seq_max_k3", "0.25", [[1] * 3, [0] * 3, [0] * 3, [0] * 3]),
    ("token_k1,seq_mean_k1", "0.6_2.5,0.9_1.5", [[1] * 3, [1, 1, 0], [0] * 3, [1, 1, 0]]),
]


@pytest.mark.parametrize(("names", "thresholds", "kept"), KEPT)
def test_rejected_tokens_leave_the_loss_and_its_normalizer(toy, tmp_path, names, thresholds, kept):
    """Mask, counts of the step and shares, by hand; TRL's loss_type counts rows without tokens, but not rejected ones."""
    run = trainer(toy, tmp_path, rollout_rs=names, rollout_rs_threshold=thresholds, loss_type="grpo", **RUN)
    micro, kept = seen_in(run), torch.tensor(kept).bool()
    assert torch.equal(micro["loss_mask"], kept.repeat(2, 1))
    assert int(micro["window"].num_tokens) == 2 * kept.sum()
    assert int(micro["window"].num_rows) == 2 * kept.any(1).sum()
    assert logged(run, "rollout_rs/rejected") == pytest.approx([1 - kept.float().mean().item()])
    assert logged(run, "rollout_rs/rejected_rows") == pytest.approx([1 - kept.any(1).float().mean().item()])
    if "," not in names:
        assert logged(run, f"rollout_rs/{names}") == logged(run, "rollout_rs/rejected")


def masked_rollout(kept):
    """The same completions, where what is not kept is a tool's."""

    def rollout(prompts, trainer):
        return rollout_with_ratios(prompts, trainer) | {"env_mask": [kept[i % 4] for i in range(len(prompts))]}

    return rollout


@pytest.mark.parametrize(
    "fields",
    [
        {"policy_loss": "ppo_clip", "beta": 0.1, "entropy_coef": 0.05},
        {"policy_loss": "gspo", "advantage_normalization": "learner"},
        {"policy_loss": "gmpo", "advantage_normalization": "rollout", "loss_aggregation": "prompt_mean"},
        {"policy_loss": "kl_cov", "kl_cov_ratio": 0.2, "gradient_accumulation_steps": 2},
        {"policy_loss": "real", "gradient_accumulation_steps": 2},
        {"policy_loss": "reinforce", "kl_placement": "reward", "kl_reward_coef": 0.0001},
    ],
    ids=lambda fields: fields["policy_loss"],
)
def test_rejecting_is_masking(toy, tmp_path, fields):
    """For every term of any objective: the weights after two steps are those of a run in which the tokens were never the policy's."""
    names, thresholds, kept = KEPT[-1]
    settings = {**RUN, "max_steps": 2, "num_iterations": 2, "optim": "sgd", "learning_rate": 0.3, **fields}
    rejecting = trainer(toy, tmp_path, rollout_rs=names, rollout_rs_threshold=thresholds, **settings)
    masking = trainer(toy, tmp_path, **{**settings, "rollout": masked_rollout(kept)})
    start = weights(rejecting)
    rejecting.train()
    masking.train()
    assert apart(weights(rejecting), start) > 1e-3
    assert apart(weights(rejecting), weights(masking)) < 1e-6


WEIGHTS = [
    ("token_truncate", {"vllm_importance_sampling_clip_max": 2.5}, [[1, 1, 1], [2, 1, 0.5], [2.5, 1, 1], [1, 1, 2.5]]),
    ("token_mask", {"vllm_importance_sampling_clip_max": 2.5}, [[1, 1, 1], [2, 1, 0.5], [0, 1, 1], [1, 1, 0]]),
    ("sequence_truncate", {"vllm_importance_sampling_clip_max": 3.5}, [[1], [1], [3.5], [3]]),
    ("sequence_mask", {"vllm_importance_sampling_clip_max": 3.5}, [[1], [1], [0], [3]]),
]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("mode", "bounds", "right"), WEIGHTS)
def test_weights_against_a_rollout_func(toy, tmp_path, mode, bounds, right, normalize):
    """Truncated or masked, then over their mean; effective sample size mean(w)^2 / mean(w^2); rejection does not change them."""
    run = trainer(
        toy, tmp_path, rollout_is_correction=True, rollout_is_batch_normalize=normalize, vllm_importance_sampling_mode=mode,
        rollout_rs="token_k2", rollout_rs_threshold="0.7", **bounds, **RUN,
    )  # fmt: skip
    right = torch.tensor(right, dtype=torch.float32)
    found = seen_in(run)["importance_sampling_ratio"]
    assert torch.allclose(found, (right / right.mean() if normalize else right).repeat(2, 1), rtol=1e-4)
    assert logged(run, "rollout_corr/is_mean") == pytest.approx([right.mean().item()], rel=1e-4)
    assert logged(run, "rollout_corr/is_zero") == pytest.approx([(right == 0).float().mean().item()])
    size = (right.mean() ** 2 / (right**2).mean()).item()
    assert logged(run, "rollout_corr/is_eff_sample_size") == pytest.approx([size], rel=1e-4)
    d = GROUP.log().nan_to_num()
    assert logged(run, "rollout_corr/kl") == pytest.approx([-d.mean().item()], rel=1e-4)
    assert logged(run, "rollout_corr/k3_kl") == pytest.approx([(d.exp() - 1 - d).mean().item()], rel=1e-4)
    assert logged(run, "rollout_corr/chi2_seq") == pytest.approx([(d.sum(1).mul(2).exp() - 1).mean().item()], rel=1e-3)


def test_without_a_setting_a_rollout_func_s_log_probs_change_nothing(toy, tmp_path):
    """As TRL, which corrects for vLLM alone."""
    run = trainer(toy, tmp_path, **RUN)
    micro = seen_in(run)
    assert "importance_sampling_ratio" not in micro
    assert micro["loss_mask"].all()
    assert not [name for name in run.state.log_history[0] if name.startswith(("rollout_rs", "rollout_corr"))]


WEIGHTED = {"rollout_is_correction": True, "rollout_is_batch_normalize": True, "vllm_importance_sampling_clip_max": 3.5}


@pytest.mark.parametrize("fields", [{}, WEIGHTED], ids=["rejects", "rejects and weights"])
def test_every_split_rejects_the_same(toy, tmp_path, fields):
    """16 rows as 1 x 16 and 4 x 4: the same weights after two steps."""
    runs = []
    for n in (1, 4):
        run = trainer(
            toy, tmp_path, rollout_rs="token_k1,seq_mean_k1", rollout_rs_threshold="0.6_2.5,0.9_1.5", per_device_train_batch_size=16 // n,
            gradient_accumulation_steps=n, optim="sgd", learning_rate=0.3, **fields, **{**RUN, "max_steps": 2},
        )  # fmt: skip
        run.train()
        runs.append(weights(run))
    assert apart(*runs) < 1e-6


def test_everything_rejected(toy, tmp_path):
    """Loss 0 and weights that stay, no division by zero; the share says why."""
    run = trainer(toy, tmp_path, rollout_rs="seq_sum_k1", rollout_rs_threshold="50_60", beta=0.1, **{**RUN, "max_steps": 2})
    before = weights(run)
    run.train()
    assert apart(before, weights(run)) == 0.0
    assert logged(run, "rollout_rs/rejected") == [1.0, 1.0]
    assert logged(run, "loss") == [0.0, 0.0]


def test_where_the_policy_is_the_sampler_s_own_objective(toy, tmp_path):
    """rollout_is rejects inside the loss, by the policy of each step: the mask and the step's counts stay."""
    run = trainer(toy, tmp_path, policy_loss="rollout_is", rollout_rs="token_k1", rollout_rs_threshold="0.6_2.5", **RUN)
    micro = seen_in(run)
    assert micro["loss_mask"].all()
    assert logged(run, "rollout_rs/rejected") == pytest.approx([0.25])


def test_vllm_weights_are_made_anew(tmp_path):
    """What TRL puts in for vLLM is replaced, with its fields' mode and bounds; old log-probs are those of the rollout."""
    args = GRPOPlusConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.5, rollout_is_batch_normalize=True, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.9_1.5",
    )  # fmt: skip
    old, mask = torch.full((4, 3), -1.0), torch.ones(4, 3, dtype=torch.bool)
    out = {"sampling_per_token_logps": old - GROUP.log(), "importance_sampling_ratio": torch.full((4, 3), 7.0)}
    metrics = correct(out, mask, args, args.loss_spec(), lambda: old, lambda table, reduction: 2 * table)
    right = GROUP.nan_to_num(1.0).clamp(max=2.5)
    assert torch.allclose(out["importance_sampling_ratio"], right / right.mean())
    assert out["sampler_keep"].tolist() == [[True] * 3] * 2 + [[False] * 3] * 2
    assert metrics["rollout_rs/rejected_rows"] == 0.5


NO_SAMPLER = [
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "2"},
    {"rollout_is_correction": True},
    {"policy_loss": "rollout_is"},
]


@pytest.mark.parametrize("fields", NO_SAMPLER, ids=str)
def test_a_sampler_without_log_probs_is_refused(toy, tmp_path, fields):
    """At construction where nothing can give them, at the first rollout where the rollout_func gives none."""
    name = next(iter(fields))
    with pytest.raises(LossPlusError, match=f"{name}=.* reads the sampler's log-probs, and there are none: set use_vllm=True"):
        trainer(toy, tmp_path, **fields)

    def silent(prompts, trainer):
        return rollout_with_ratios(prompts, trainer) | {"logprobs": None}

    with pytest.raises(LossPlusError, match=f"rollout_func 'silent' returned no logprobs, which {name}="):
        trainer(toy, tmp_path, rollout=silent, **fields).train()


def test_a_rollout_func_of_the_wrong_form(toy, tmp_path):
    def short(prompts, trainer):
        out = rollout_with_ratios(prompts, trainer)
        out["logprobs"][5] = out["logprobs"][5][:-1]
        return out

    def few(prompts, trainer):
        return {name: rows[:-1] for name, rows in rollout_with_ratios(prompts, trainer).items()}

    for rollout, words in (
        (short, "returned 2 logprobs for the 3 tokens of completion 5"),
        (few, "returned 7 rows of prompt_ids for 8 prompts"),
        (lambda prompts, trainer: None, "returned a NoneType, not a dictionary"),
    ):
        with pytest.raises(LossPlusError, match=words):
            trainer(toy, tmp_path, **{**RUN, "rollout": rollout}).train()


CONTRADICTIONS = [
    ({"rollout_is_batch_normalize": True}, "nothing reads it. Set rollout_is_correction=True"),
    (
        {"rollout_is_correction": True, "use_vllm": True, "vllm_importance_sampling_correction": False},
        "rollout_is_correction=True with vllm_importance_sampling_correction=False",
    ),
    ({"rollout_is_correction": True, "policy_loss": "rollout_ppo"}, "nothing reads it with policy_loss 'rollout_ppo'"),
    ({"rollout_rs": "token_k9", "rollout_rs_threshold": "2"}, "rollout_rs='token_k9' is not known"),
    ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
]


@pytest.mark.parametrize(("fields", "message"), CONTRADICTIONS)
def test_contradictions(tmp_path, fields, message):
    with pytest.raises(LossPlusError, match=message):
        GRPOPlusConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **fields)
