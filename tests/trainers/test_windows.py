"""Windows: every split of an optimizer step gives the same gradient, and what is logged is the optimizer step's."""

import pytest
import torch
from harness import forward_from, plus_loss, plus_trainer, rollout

from trl_lossplus.trainers.minibatch import trim

AGGREGATIONS = [
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum", "prompt_mean",
]  # fmt: skip
LENGTHS = [6, 0, 3, 1, 6, 4, 2, 5]


def split(whole, parts, order=None):
    """One rollout of 8 rows as several micro-batches, each with leaves of its own."""
    logps, entropies, inputs = whole
    rows = order if order is not None else torch.arange(8)
    out = []
    for index in rows.chunk(parts):
        out.append(
            (
                logps.detach()[index].requires_grad_(),
                entropies.detach()[index].requires_grad_(),
                {k: v if v.dim() == 0 else v[index] for k, v in inputs.items()},
            )
        )
    return out, rows


def gradient(fields, parts, order=None):
    batches, rows = split(rollout(seed=11, lengths=LENGTHS), parts, order)
    losses, metrics = plus_loss({**fields, "gradient_accumulation_steps": parts}, batches)
    sum(losses).backward()
    grads = torch.zeros(8, 6)
    entropy_grads = torch.zeros(8, 6)
    grads[rows] = torch.cat([batch[0].grad for batch in batches])
    if fields.get("entropy_coef"):
        entropy_grads[rows] = torch.cat([batch[1].grad for batch in batches])
    return sum(losses).item(), grads, entropy_grads, metrics


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a1_a6_a7_a8_every_split_gives_the_same_gradient(aggregation, parts):
    """A1, A6, A7, A8: 8 ragged rows as 1x8, 2x4, 4x2, 8x1, in order and shuffled, with KL and entropy terms."""
    fields = {"loss_aggregation": aggregation, "beta": 0.05, "entropy_coef": 0.02}
    loss, grads, entropy_grads, metrics = gradient(fields, 1)
    assert grads.abs().max() > 1e-3
    for order in (None, torch.randperm(8, generator=torch.Generator().manual_seed(parts))):
        again = gradient(fields, parts, order)
        assert again[0] == pytest.approx(loss, rel=1e-6, abs=1e-7)
        assert (again[1] - grads).abs().max() <= 1e-6 * grads.abs().max()
        assert (again[2] - entropy_grads).abs().max() <= 1e-6 * entropy_grads.abs().max()
        for name in ("loss/policy", "loss/kl", "loss/entropy", "kl", "entropy", "clip_ratio/region_mean"):
            assert again[3][name] == pytest.approx(metrics[name], rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize("scope", ["batch", "group"])
def test_e7_learner_normalization_is_the_step_s(scope):
    """E7: mean 0 and variance 1 over the valid tokens of the optimizer step, whatever the number of micro-batches."""
    fields = {"advantage_normalization": "learner", "advantage_norm_scope": scope}
    results = []
    for parts in (1, 2, 8):
        batches, _ = split(rollout(seed=11, lengths=LENGTHS, wide=True), parts)
        trainer = plus_trainer({**fields, "gradient_accumulation_steps": parts})
        cut = trainer.cut([dict(inputs) for _, _, inputs in batches])
        padded = [torch.nn.functional.pad(m["advantages"], (0, 6 - m["advantages"].shape[1])) for m in cut]
        results.append(torch.cat(padded))
    mask = torch.arange(6) < torch.tensor(LENGTHS).unsqueeze(1)
    for rows in [slice(0, 8)] if scope == "batch" else [slice(0, 4), slice(4, 8)]:
        used = results[0][rows][mask[rows]]
        assert used.mean().item() == pytest.approx(0, abs=1e-6)
        assert used.var().item() == pytest.approx(1, rel=1e-5)
    for again in results[1:]:
        assert torch.allclose(again, results[0], atol=2e-6)
    assert (results[0][~mask] == 0).all()


def test_unscored_rows_stay_at_zero_under_normalization():
    """A row that no reward function scored keeps advantage 0 and stays out of the statistics of the others."""
    logps, entropies, inputs = rollout(seed=2, lengths=[6] * 8)
    inputs["advantages"] = torch.tensor([1.0, -1.0, 2.0, 0.0, 3.0, -2.0, 0.5, 0.5])
    inputs["scored"][3] = False
    trainer = plus_trainer({"advantage_normalization": "learner"})
    (cut,) = trainer.cut([inputs])
    kept = cut["advantages"][[0, 1, 2, 4, 5, 6, 7]]
    assert (cut["advantages"][3] == 0).all()
    assert kept.mean().item() == pytest.approx(0, abs=1e-6)
    assert kept.var().item() == pytest.approx(1, rel=1e-5)


def test_j6_logged_means_are_over_optimizer_steps():
    """J6: windows of 3 micro-batches then 1, values 1, 1, 1 and 5: the logged mean is 3, not 2."""
    trainer = plus_trainer({"gradient_accumulation_steps": 3, "steps_per_generation": 4, "beta": 0.0})
    values = [1.0, 1.0, 1.0, 5.0]
    batches = []
    for value in values:
        logps, entropies, inputs = rollout(seed=0, rows=4, lengths=[6] * 4)
        batches.append((logps, torch.full_like(entropies, value).detach().requires_grad_(), inputs))
    trainer._get_per_token_logps_and_entropies = forward_from([(a, b) for a, b, _ in batches])
    cut = trainer.cut([dict(inputs) for _, _, inputs in batches])
    for i, (steps, last) in enumerate([(3, False), (3, False), (3, True), (1, True)]):
        trainer.current_gradient_accumulation_steps = steps
        trainer.accelerator.sync_gradients = last
        trainer.micro_loss(None, cut[i])
        if last:
            trainer.end_step()
    entropy = trainer._metrics["train"]["entropy"]
    assert entropy == pytest.approx([1.0, 5.0])
    assert sum(entropy) / len(entropy) == pytest.approx(3.0)


def test_windows_across_rollouts_use_the_rollout_s_mean():
    """steps_per_generation 4, accumulation 3: a step of k micro-batches is normalized by k mean micro-batches, as in TRL."""
    trainer = plus_trainer({"gradient_accumulation_steps": 3, "steps_per_generation": 4})
    batches, _ = split(rollout(seed=1, lengths=[6, 6, 1, 1, 2, 2, 3, 3]), 4)
    cut = trainer.cut([dict(inputs) for _, _, inputs in batches])
    assert [float(micro["window"].num_tokens) for micro in cut] == [6.0] * 4
    for _, _, inputs in batches:
        inputs["advantages"] = torch.ones(2)
    trainer._get_per_token_logps_and_entropies = forward_from([(a, b) for a, b, _ in batches])
    for micro in cut:
        micro["advantages"] = torch.ones(2)
        micro["old_per_token_logps"] = None
    losses = []
    for micro, steps in zip(cut, [3, 3, 3, 1], strict=True):
        trainer.current_gradient_accumulation_steps = steps
        losses.append(trainer.micro_loss(None, micro).item())
    assert losses == pytest.approx([-12 / 18, -2 / 18, -4 / 18, -6 / 6])


def test_a4_masked_rows():
    """A4: 2 rows of 10 tokens, loss 1 a token, row 2 truncated and masked: token mean 1; all masked: loss 0, gradient 0."""

    def run(lengths):
        batch = rollout(seed=1, rows=2, width=10, lengths=lengths, old=False)
        batch[2]["advantages"] = -torch.ones(2)
        (loss,), _ = plus_loss({"num_generations": 2}, [batch])
        loss.backward()
        return loss.item(), batch[0].grad

    assert run([10, 0])[0] == pytest.approx(1.0)
    loss, grad = run([0, 0])
    assert loss == 0.0
    assert torch.equal(grad, torch.zeros(2, 10))


def test_rows_without_tokens_count_as_trl_counts_them_or_not_at_all():
    """seq means: with TRL's loss_type a fully masked row counts as a row (loss 0.5), with loss_aggregation it does not (1.0)."""

    def run(fields):
        batch = rollout(seed=1, rows=2, width=10, lengths=[10, 0], old=False)
        batch[2]["advantages"] = -torch.ones(2)
        (loss,), _ = plus_loss({"num_generations": 2, **fields}, [batch])
        return loss.item()

    assert run({"loss_type": "grpo"}) == pytest.approx(0.5)
    assert run({"loss_aggregation": "seq_mean_token_mean"}) == pytest.approx(1.0)


def test_k3_trimming_changes_nothing_but_the_width():
    """K3: each micro-batch is cut to its own longest row on both sides; what is cut off was padding."""
    _, _, inputs = rollout(seed=1, rows=4, width=6, lengths=[2, 3, 1, 0], tool=True)
    inputs["prompt_mask"] = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]])
    inputs["prompt_ids"] = torch.arange(16).view(4, 4)
    inputs["token_type_ids"] = torch.arange(40).view(4, 10)
    whole = dict(inputs)
    trim([inputs], left=True)
    assert inputs["prompt_ids"].tolist() == whole["prompt_ids"][:, 1:].tolist()
    for name in ("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps"):
        assert torch.equal(inputs[name], whole[name][:, :3]), name
    assert inputs["token_type_ids"].tolist() == whole["token_type_ids"][:, 1:7].tolist()
    left = dict(whole)
    trim([left], left=False)
    assert left["prompt_ids"].shape == (4, 4)
    empty = dict(whole, completion_mask=torch.zeros(4, 6, dtype=torch.long))
    trim([empty], left=True)
    assert empty["completion_ids"].shape == (4, 1)


def test_c8_flat_groups():
    """C8: a group without spread, beta .1, d = [1, -1]: its KL gradient stays by default; no_kl and drop leave it out."""

    def run(**fields):
        logps = torch.tensor([[1.0], [-1.0]]).sub(2).requires_grad_()
        batch = rollout(seed=0, rows=2, width=1, lengths=[1, 1], old=False)
        inputs = {**batch[2], "advantages": torch.zeros(2), "flat": torch.ones(2, dtype=torch.bool)}
        inputs["ref_per_token_logps"] = torch.full((2, 1), -2.0)
        inputs["group_ids"] = torch.zeros(2, dtype=torch.long)
        fields = {"beta": 0.1, "num_generations": 2, "kl_estimator": "k1", "use_bias_correction_kl": False, **fields}
        (loss,), _ = plus_loss(fields, [(logps, batch[1][:, :1], inputs)])
        loss.backward()
        return logps.grad.flatten().tolist()

    assert run() == pytest.approx([0.05, 0.05])
    assert run(zero_std_groups="no_kl") == [0.0, 0.0]
    assert run(zero_std_groups="drop") == [0.0, 0.0]


def test_k1_no_graph_for_an_entropy_that_nothing_differentiates():
    """K1: with entropy coefficient 0 the loss does not reach the entropies; with one it does."""
    for coef, reaches in ((0.0, False), (0.01, True)):
        batch = rollout(seed=1)
        (loss,), _ = plus_loss({"entropy_coef": coef}, [batch])
        loss.backward()
        assert (batch[1].grad is not None) == reaches
