"""Objectives that look at a whole optimizer step: every split into micro-batches is the step computed at once."""

from dataclasses import replace

import pytest
import torch
from toyrun import apart, fixed_rollout, letter_reward, logged, trainer, weights

from trl_lossplus import GRPOPlusConfig, LossPlusError, PolicyTerm, compute_loss, register_policy_loss
from trl_lossplus.over_step import join

ROWS = 16  # an optimizer step
OBJECTIVES = {
    "clip_cov": {"policy_loss": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_min": 0.05, "clip_cov_max": 9.0},
    "kl_cov": {"policy_loss": "kl_cov", "kl_cov_ratio": 0.1, "kl_cov_coef": 0.5},
    "m2po": {"policy_loss": "m2po", "m2_threshold": 0.01},
    "real": {"policy_loss": "real"},
    "real, by tokens": {"policy_loss": "real", "loss_aggregation": "token_mean", "zero_std_groups": "drop"},
}
SGD = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 1000.0}


def run_of(toy, tmp_path, accumulation, reward=letter_reward, **fields):
    """A trained run whose optimizer steps are 16 rows, with its micro-batches' loss batches, outputs and gradients."""
    settings = {"per_device_train_batch_size": ROWS // accumulation, "gradient_accumulation_steps": accumulation, **SGD, **fields}
    run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout, **settings)
    run.seen, inner = [], run.combine

    def combine(batch, spec, window):
        output = inner(batch, spec, window)
        entry = {"batch": batch, "output": output, "spec": spec, "step": run.state.global_step}
        if batch.logps.requires_grad:
            batch.logps.register_hook(lambda gradient: entry.__setitem__("gradient", gradient.detach().clone()))
        run.seen.append(entry)
        return output

    run.combine = combine
    run.train()
    return run


@pytest.mark.parametrize(("name", "iterations"), [("clip_cov", 1), ("real", 1), *((name, 2) for name in OBJECTIVES)])
def test_every_accumulation_trains_the_same(toy, tmp_path, name, iterations):
    """16 rows as 1 x 16, 2 x 8, 4 x 4: weights equal to 1e-6 after 3 steps, on- and off-policy; metrics alike."""
    accumulations = (1, 2, 4) if name in ("clip_cov", "real") else (1, 4)
    runs = [run_of(toy, tmp_path, n, num_iterations=iterations, **OBJECTIVES[name]) for n in accumulations]
    start = weights(trainer(toy, tmp_path))
    assert apart(weights(runs[0]), start) > 1e-3
    for run in runs[1:]:
        assert apart(weights(run), weights(runs[0])) < 1e-6
        for metric in ("loss", "loss/policy", "clip_cov_ratio", "kl_cov_ratio", "m2po_dropped", "real_groups"):
            assert logged(run, metric) == pytest.approx(logged(runs[0], metric), rel=1e-4, abs=1e-6), metric
    if "cov" in name:
        assert min(logged(runs[0], f"{name}_ratio")) > 0.02
    if name == "m2po":
        assert 0.02 < max(logged(runs[0], "m2po_dropped")) < 0.9


@pytest.mark.parametrize(
    ("name", "layout", "accumulation"),
    [*((name, "shared_prefix", 4) for name in OBJECTIVES), ("clip_cov", "packed", 2), ("real", "packed", 1)],
)
def test_packed_rows_are_the_same_step(toy, tmp_path, name, layout, accumulation):
    """Rows that are laid out without padding, and dealt anew within the step: the weights of the padded step to 1e-6."""
    padded = run_of(toy, tmp_path, 2, num_iterations=2, **OBJECTIVES[name])
    packed = run_of(toy, tmp_path, accumulation, num_iterations=2, microbatch_layout=layout, **OBJECTIVES[name])
    assert apart(weights(padded), weights(trainer(toy, tmp_path))) > 1e-3
    assert apart(weights(packed), weights(padded)) < 1e-6
    for metric in ("loss", "clip_cov_ratio", "kl_cov_ratio", "real_groups"):
        assert logged(packed, metric) == pytest.approx(logged(padded, metric), rel=1e-4, abs=1e-6), metric


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_without_advantage_stay(toy, tmp_path, name):
    """They are part of what an objective computes over the step: leaving them out is refused before training."""
    with pytest.raises(
        LossPlusError, match="skip_still_rows=True would change the gradient: .* compares the rows of an optimizer step"
    ):
        trainer(toy, tmp_path, skip_still_rows=True, **OBJECTIVES[name])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_is_the_tensor_api_over_the_step(toy, tmp_path, name):
    """Each step's loss, and its gradient by the log-probs, are compute_loss's on all its rows at once: in each of 3 steps."""
    run = run_of(toy, tmp_path, 4, num_iterations=2, max_steps=3, **OBJECTIVES[name])
    for step in range(3):
        parts = [entry for entry in run.seen if entry["step"] == step]
        assert len(parts) == 4
        whole = join([replace(p["batch"], logps=p["batch"].logps.detach(), selected_tokens=None, row_terms=None) for p in parts])
        whole = replace(whole, logps=whole.logps.requires_grad_())
        output = compute_loss(whole, parts[0]["spec"])
        (right,) = torch.autograd.grad(output.loss, whole.logps)
        ours = join([replace(p["batch"], logps=p["gradient"]) for p in parts], ()).logps
        assert (ours - right).abs().max() <= 1e-6 * max(right.abs().max(), 1.0)
        assert right.abs().max() > 1e-3
        assert sum(p["output"].loss.item() for p in parts) == pytest.approx(output.loss.item(), abs=1e-6)
        if "cov" in name:
            chosen = join([replace(p["batch"], old_logps=p["batch"].selected_tokens) for p in parts], ("old_logps",)).old_logps
            assert torch.equal(chosen.bool(), output.inputs.selected_tokens)
            assert chosen.sum() == max(1, int(0.1 * whole.mask.sum()))


@pytest.mark.parametrize(
    ("name", "accumulation", "iterations", "fields", "passes"),
    [
        ("kl_cov", 1, 2, {}, [0, 0]),  # the micro-batch is the step
        ("kl_cov", 2, 1, {}, [2, 2]),  # the log-probs are nowhere yet
        ("kl_cov", 2, 1, {"kl_placement": "reward", "kl_reward_coef": 0.1}, [0, 0]),  # taken for the KL at the rollout
        ("kl_cov", 2, 2, {}, [0, 2]),  # old log-probs are current ones until the first update
        ("real", 2, 1, {}, [0, 0]),  # every ratio is 1
        ("real", 2, 2, {}, [0, 2]),
    ],
)
def test_a_pass_is_paid_only_where_the_values_are_not_at_hand(toy, tmp_path, name, accumulation, iterations, fields, passes):
    """Forward passes without gradient beside the rollout's, in each of two optimizer steps."""
    settings = OBJECTIVES.get(name, {"policy_loss": name})
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, max_steps=2, num_iterations=iterations,
        per_device_train_batch_size=8, gradient_accumulation_steps=accumulation, **settings, **fields,
    )  # fmt: skip
    counts, inner, forward = [], run.micro_loss, run.policy_forward
    inside = [False]

    def policy_forward(*args, **kwargs):
        if inside[0] and not torch.is_grad_enabled():
            counts[-1] += 1
        return forward(*args, **kwargs)

    def micro_loss(model, inputs):
        if len(counts) == run.state.global_step:
            counts.append(0)
        inside[0] = True
        try:
            return inner(model, inputs)
        finally:
            inside[0] = False

    run.policy_forward, run.micro_loss = policy_forward, micro_loss
    run.train()
    assert counts == passes


def test_the_draw_follows_the_seed(toy, tmp_path):
    """cov_seed, or the run's seed, decides which tokens are drawn; the same seed draws the same, another step others."""

    def chosen(**fields):
        run = run_of(toy, tmp_path, 2, max_steps=2, **{**OBJECTIVES["clip_cov"], "clip_cov_ratio": 0.05}, **fields)
        found = []
        for step in (0, 1):
            parts = [entry["batch"] for entry in run.seen if entry["step"] == step]
            ids = torch.cat([b.row_ids for b in parts]) - step * ROWS
            flags = join([replace(b, old_logps=b.selected_tokens) for b in parts], ("old_logps",), 6).old_logps
            found.append(flags[ids.argsort()].bool())
        return found

    first, again, other = chosen(cov_seed=3), chosen(), chosen(cov_seed=2)  # the run's seed is 3
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@register_policy_loss(
    "test_mean_of_the_step",
    requires={"old_logps", "advantages", "row_terms", "group_ids"},
    over_step=lambda batch, spec: {"row_terms": batch.advantages.mean().expand(len(batch.mask), 1)},
    traits={"whole_groups"},
    formula="-(A - mean of A over the step) r",
    source="these tests",
)
def mean_of_the_step(batch, spec):
    return PolicyTerm(-(batch.advantages - batch.row_terms) * batch.ratio(spec.log_ratio_clamp))


def test_an_objective_of_ones_own(toy, tmp_path):
    """What a user's over_step gives reaches every micro-batch, also where a row has as many numbers as a completion has tokens."""
    runs = [
        run_of(toy, tmp_path, n, policy_loss="test_mean_of_the_step", scale_rewards="none", advantage_estimator="maxrl")
        for n in (1, 4)
    ]
    assert apart(weights(runs[0]), weights(runs[1])) < 1e-6
    terms = torch.cat([entry["batch"].row_terms for entry in runs[1].seen[:4]])
    assert len(terms) == ROWS
    assert terms.unique().numel() == 1


def test_what_over_step_may_give():
    register_policy_loss(
        "test_wrong_over_step", requires={"old_logps", "advantages"}, over_step=lambda batch, spec: {"mine": batch.logps},
        formula="x", source="these tests", replace=True,
    )(lambda batch, spec: PolicyTerm(-batch.ratio(20.0)))  # fmt: skip
    from helpers import run as run_loss
    from helpers import tensors

    from trl_lossplus import LossSpec

    with pytest.raises(LossPlusError, match=r"over_step gave mine .*selected_tokens, row_terms"):
        run_loss(tensors(), LossSpec(policy_loss="test_wrong_over_step"))


REFUSED = [
    ({"policy_loss": "kl_cov", "gradient_accumulation_steps": 2, "steps_per_generation": 3}, "looks at a whole optimizer step"),
    (
        {"policy_loss": "real", "steps_per_generation": 2},
        "an optimizer step must be the whole rollout, steps_per_generation .2. = ",
    ),
    ({"policy_loss": "test_groups_at_once", "gradient_accumulation_steps": 2}, "register it with over_step=, or set"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refused(fields, message, tmp_path):
    """Steps that are not known when they begin, steps without whole groups, and groups that nothing could put together."""
    register_policy_loss(
        "test_groups_at_once", requires={"advantages", "group_ids"}, traits={"whole_groups"}, formula="x", source="these tests",
        replace=True,
    )(lambda batch, spec: PolicyTerm(-batch.logps))  # fmt: skip
    with pytest.raises(LossPlusError, match=message):
        GRPOPlusConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=4, **fields)


def test_evaluation(toy, tmp_path):
    """An evaluation is one micro-batch a step."""
    from trl_lossplus.toy import toy_dataset

    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, extra={"eval_dataset": toy_dataset().select(range(4))},
        per_device_eval_batch_size=8, gradient_accumulation_steps=2, policy_loss="real",
    )  # fmt: skip
    assert run.evaluate()["eval_loss"] == pytest.approx(2 * torch.log(torch.tensor(3.0)).item(), abs=1.2)
