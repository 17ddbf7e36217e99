"""Every registered policy objective: its gradient, its splits, its rows, its dtype, and the tensors that it may read."""

import math

import pytest
import torch
from helpers import LENGTHS, MODES, OBJECTIVES, difference, full_spec, length_mask, rows, run, step_window, tensors

from trl_lossplus import LossBatch, LossPlusError, LossSpec, compute_loss
from trl_lossplus.batch import DeclaredView
from trl_lossplus.functional import policy
from trl_lossplus.registry import POLICY_LOSSES

MASK = length_mask(LENGTHS)
OPTIONS = {  # beside the defaults, settings under which other branches act
    "ppo_clip": [{}, {"delta": 1.5}, {"clip_ratio_c": 1.3}, {"clip_objective": "max"}, {"importance_sampling_level": "sequence"}],
    "gspo": [{}, {"epsilon": 0.05, "clip_ratio_c": 1.05}],
    "cispo": [{}, {"epsilon_high": 1.1, "cispo_ratio_min": 0.9}, {"importance_sampling_level": "sequence"}],
    "sapo": [{}, {"sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.5}, {"importance_sampling_level": "sequence"}],
    "gmpo": [{}, {"epsilon": 0.05, "epsilon_high": 0.4}],
}
VARIANTS = [(name, options) for name in OBJECTIVES for options in OPTIONS.get(name, [{}])]
FROZEN = {"cispo", "vespo", "gspo_token"}  # part of their value is held constant on purpose: closed forms below


def objective(name: str, batch: dict, logps: torch.Tensor, **options) -> torch.Tensor:
    """Per-token losses (B, T) of an objective, in the dtype of its inputs."""
    fields = {"logps", "old_logps", "advantages", "mask", "rollout_weights"}
    own = LossBatch(**{k: x for k, x in batch.items() if k in fields} | {"logps": logps})
    per_token = POLICY_LOSSES.get(name).func(own, LossSpec(policy_loss=name, **options)).per_token
    return per_token.expand(batch["mask"].shape)


def float64_batch(seed: int = 0) -> dict:
    """Clean float64 tensors: masked positions hold 0, as `LossBatch.clean` leaves them."""
    batch = tensors(seed, dtype=torch.float64)
    return {
        k: torch.where(MASK, x, x.new_tensor(float(k == "rollout_weights"))) if x.shape == MASK.shape else x
        for k, x in batch.items()
    }


@pytest.mark.parametrize(("name", "options"), [v for v in VARIANTS if v[0] not in FROZEN], ids=str)
def test_gradient_is_the_finite_difference(name, options):
    """float64 central differences of the value, with weights that differ from token to token; masked positions exactly 0."""
    batch, h = float64_batch(), 1e-6
    weights = torch.where(MASK, torch.linspace(0.5, 2.0, 48, dtype=torch.float64).view(8, 6), 0.0)
    logps = batch["logps"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((objective(name, batch, logps, **options) * weights).sum(), logps)
    numeric = torch.zeros_like(gradient)
    for i, t in MASK.nonzero().tolist():
        shift = torch.zeros_like(logps)
        shift[i, t] = h
        up, down = ((objective(name, batch, logps.detach() + s, **options) * weights).sum() for s in (shift, -shift))
        numeric[i, t] = (up - down) / (2 * h)
    assert difference(gradient, numeric) < 1e-7
    assert gradient.abs().sum() > 0
    assert torch.equal(gradient[~MASK], torch.zeros_like(gradient[~MASK]))


@pytest.mark.parametrize("options", OPTIONS["cispo"], ids=str)
def test_cispo_gradient(options):
    """-clip(r) A at each token: the weight is constant."""
    batch, spec = float64_batch(), LossSpec(policy_loss="cispo", **options)
    logps = batch["logps"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective("cispo", batch, logps, **options)[MASK].sum(), logps)
    d = batch["logps"] - batch["old_logps"]
    if options.get("importance_sampling_level") == "sequence":
        d = (d.sum(-1) / MASK.sum(-1))[:, None].expand(8, 6)
    weight = d.exp().clamp(spec.cispo_ratio_min, spec.epsilon_high or 5.0)
    assert difference(gradient, torch.where(MASK, -weight * batch["advantages"], 0.0)) < 1e-12


def test_gspo_token_gradient():
    """-A s at each token, s the row's ratio, 0 where the clip acts; the value is that of gspo."""
    batch = float64_batch()
    logps = batch["logps"].clone().requires_grad_()
    value = objective("gspo_token", batch, logps, epsilon=0.1)
    (gradient,) = torch.autograd.grad(value[MASK].sum(), logps)
    s = ((batch["logps"] - batch["old_logps"]).sum(-1) / MASK.sum(-1)).exp()[:, None].expand(8, 6)
    a = batch["advantages"]
    clipped = ((a > 0) & (s > 1.1)) | ((a < 0) & (s < 0.9))
    assert 0 < clipped[MASK].sum() < MASK.sum()
    assert difference(gradient, torch.where(MASK & ~clipped, -a * s, 0.0)) < 1e-12
    assert difference(value[MASK], objective("gspo", batch, logps, epsilon=0.1)[MASK]) < 1e-12


@pytest.mark.parametrize("weights", ["token", "row", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.5, "vespo_lambda_neg": 4.0}], ids=str
)
def test_vespo_gradient(options, weights):
    """-w^k e^(lambda (1 - w)) A at each token, w the row's product of ratios and rollout weights, constant."""
    batch, spec = float64_batch(), LossSpec(policy_loss="vespo", **options)
    batch["rollout_weights"] = {"token": batch["rollout_weights"], "row": batch["rollout_weights"][:, :1], "none": None}[weights]
    logps = batch["logps"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective("vespo", batch, logps, **options)[MASK].sum(), logps)
    w = (batch["logps"] - batch["old_logps"]).sum(-1).exp()
    w = w * (1.0 if weights == "none" else batch["rollout_weights"].prod(-1))
    a, w = batch["advantages"], w[:, None].expand(8, 6)
    k, lam = (torch.where(a >= 0, *(getattr(spec, f"vespo_{n}_{s}") for s in ("pos", "neg"))) for n in ("k", "lambda"))
    right = torch.where(MASK, -(w**k) * torch.exp(lam * (1 - w)) * a, 0.0)
    assert difference(gradient, right) < 1e-6  # k and lambda are float32 inside


def test_vespo_weight_is_one_on_policy():
    """phi(1) = 1, for either sign of A; a weight of 0 (masked by the correction) gives phi(1e-8) ~ 0, never NaN."""
    logps, mask = torch.full((2, 3), -1.0), torch.ones(2, 3, dtype=torch.bool)
    a = torch.tensor([[2.0], [-2.0]])
    term = policy.vespo(torch.zeros(2, 3), a, logps, mask)
    assert term.stats["vespo/phi_seq_mean"].tolist() == [[1.0], [1.0]]
    assert torch.equal(term.per_token, torch.tensor([[2.0], [-2.0]]).expand(2, 3))
    zero = policy.vespo(torch.zeros(2, 3), a, logps, mask, rollout_weights=torch.zeros(2, 1))
    assert zero.per_token.abs().max() < 1e-12


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_split_gives_the_same_step(name, seed):
    """Random micro-batches of random rows under one window -> loss and gradient of the whole, for each aggregation."""
    batch, g = tensors(seed), torch.Generator().manual_seed(seed)
    order, cuts = torch.randperm(8, generator=g), sorted((torch.randperm(7, generator=g)[:3] + 1).tolist())
    for mode in MODES:
        spec = full_spec(name, mode, off_policy_mask_threshold=0.1)
        whole, gradient = run(batch, spec)
        total, parts = 0.0, torch.zeros_like(gradient)
        for index in torch.tensor_split(order, cuts):
            out, own = run(rows(batch, index), spec, step_window(MASK, batch["group_ids"], index))
            total, parts[index] = total + out.loss.item(), own
        assert difference(parts, gradient) < 1e-6, mode
        assert total == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-6), mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_permuted_rows_permute(name, mode):
    """Rows in another order -> the same loss; gradient and per-token terms in that order."""
    batch, spec = tensors(5), full_spec(name, mode)
    order = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])
    (out, gradient), (moved, moved_gradient) = run(batch, spec), run(rows(batch, order), spec)
    assert difference(moved.loss, out.loss) < 1e-5
    assert difference(moved_gradient, gradient[order]) < 1e-6
    assert all(torch.allclose(moved.per_token[k], out.per_token[k][order], rtol=1e-5, atol=1e-6) for k in out.per_token)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_half_precision_is_computed_in_float32(name, dtype):
    """bf16 tensors -> bit for bit the float32 loss of the same numbers; everything returned is float32."""
    batch, spec = tensors(6, dtype=dtype), full_spec(name)
    half, gradient = run(batch, spec)
    single, single_gradient = run({k: x.float() if x.is_floating_point() else x for k, x in batch.items()}, spec)
    assert torch.equal(half.loss, single.loss)
    assert torch.equal(gradient, single_gradient.to(dtype))
    assert all(x.dtype == torch.float32 for x in [*half.terms.values(), *half.per_token.values(), *half.stats.values()])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_old_logps_none_is_on_policy(name):
    """old_logps=None equals log-probs without gradient, bit for bit; terms sum to the loss; per-token tensors are detached."""
    batch, spec = tensors(8), full_spec(name)
    none, gradient = run(batch | {"old_logps": None}, spec)
    same, same_gradient = run(batch | {"old_logps": batch["logps"].clone()}, spec)
    assert torch.equal(none.loss, same.loss)
    assert torch.equal(gradient, same_gradient)
    assert difference(torch.stack(list(none.terms.values())).sum(), none.loss) < 1e-6
    assert not any(x.requires_grad for x in [*none.per_token.values(), *none.stats.values()])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_zero_advantages_give_zero(name):
    """A=0 everywhere: policy term 0 and gradient exactly 0, also where ratios are extreme."""
    batch = tensors(9, spread=15.0)
    out, gradient = run(batch | {"advantages": torch.zeros(8)}, LossSpec(policy_loss=name))
    assert out.loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_advantages_of_a_row_are_those_of_its_tokens(name):
    """(B,), (B, 1) and (B, T) advantages of the same numbers -> the same loss and gradient."""
    batch, spec = tensors(10), full_spec(name)
    column = batch["advantages"][:, :1]
    results = [run(batch | {"advantages": a}, spec) for a in (column[:, 0], column, column.expand(8, 6).contiguous())]
    for out, gradient in results[1:]:
        assert difference(out.loss, results[0][0].loss) < 1e-6
        assert difference(gradient, results[0][1]) < 1e-6


def test_integer_advantages():
    """[1, -1] as integers, 2 x 2 tokens, ratio 1 -> rows of -1 and +1, as with floats."""
    batch = {"logps": torch.full((2, 2), -1.0), "advantages": torch.tensor([1, -1]), "mask": torch.ones(2, 2, dtype=torch.bool)}
    assert run(batch, LossSpec())[0].per_token["policy"].tolist() == [[-1.0, -1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "pair", "loss"),
    [
        ("gspo", (-60.0, 59.8), -0.904837),  # mean -.1
        ("gspo_token", (-60.0, 59.8), -0.904837),
        ("luspo", (-60.0, 59.8), -0.904837),
        ("gmpo", (-30.0, 59.8), -3.380744e-7),  # mean of -30 and the clipped .2: -14.9
    ],
)
def test_sequence_ratio_of_a_row_with_far_tokens(name, pair, loss):
    """Log-ratios -60 and 59.8, A=1: the row's ratio is e^-.1 = .904837 (bounding each to +-20 first gives 1) -> loss -.904837."""
    batch = {"old_logps": torch.full((1, 2), -1.0), "advantages": torch.ones(1), "mask": torch.ones(1, 2, dtype=torch.bool)}
    out, _ = run(batch | {"logps": torch.tensor([pair]) - 1}, LossSpec(policy_loss=name, loss_aggregation="seq_mean_token_mean"))
    assert out.loss.item() == pytest.approx(loss, rel=1e-4)


def test_reported_log_ratios_are_raw():
    """Log-ratios 31 and -40 are reported as such, before any bound (case L3); their ratios are those of +-20, and finite."""
    batch = {"logps": torch.tensor([[30.0, -41.0]]), "old_logps": torch.full((1, 2), -1.0), "advantages": torch.ones(1)}
    out, _ = run(batch | {"mask": torch.ones(1, 2, dtype=torch.bool)}, LossSpec())
    assert out.per_token["log_ratio"].tolist() == [[31.0, -40.0]]
    assert out.per_token["ratio"][0].tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_reported_losses_are_zero_at_masked_positions(name):
    """per_token['policy'] is 0 where the mask is not, also for losses of one value a row, and sums to the loss elsewhere."""
    out, _ = run(tensors(13), LossSpec(policy_loss=name, loss_aggregation="token_sum"))
    reported = out.per_token["policy"]
    assert reported.shape == MASK.shape
    assert torch.equal(reported[~MASK], torch.zeros(int((~MASK).sum())))
    assert difference(reported.sum(), out.loss) < 1e-5


@pytest.mark.parametrize("name", ["validate", "clean", "logprobs", "mask_", "_batch_"])
def test_a_users_loss_sees_tensors_and_ratios_alone(name):
    """Anything but a tensor of a batch, log_ratio() and ratio() is an AttributeError, as on any object."""
    view = DeclaredView(LossBatch(**tensors()).clean(), "my_loss", frozenset({"old_logps"}))
    with pytest.raises(AttributeError, match=f"log_ratio\\(\\) and ratio\\(\\), not '{name}'"):
        getattr(view, name)
    assert not hasattr(view, name)
    assert torch.equal(view.ratio(), LossBatch(**tensors()).clean().ratio())


# --- what an objective may read


@pytest.mark.parametrize("name", OBJECTIVES)
def test_reading_an_undeclared_tensor_is_an_error(name):
    """Each objective with one declared tensor taken from its declaration -> an error that names loss, tensor and remedy."""
    entry, spec = POLICY_LOSSES.get(name), LossSpec(policy_loss=name)
    batch = LossBatch(**tensors()).clean()
    entry.func(DeclaredView(batch, name, entry.requires), spec)
    assert {"old_logps", "advantages"} <= entry.requires
    for tensor in entry.requires:
        with pytest.raises(LossPlusError, match=f"policy_loss '{name}' reads {tensor}.*requires="):
            entry.func(DeclaredView(batch, name, entry.requires - {tensor}), spec)


@pytest.mark.parametrize("tensor", ["advantages", "ref_logps", "entropies", "group_ids"])
def test_missing_tensors_are_named(tensor):
    """A tensor that the spec reads and the batch lacks -> an error that names it, its shape and its maker."""
    spec = full_spec(aggregation="prompt_mean")
    with pytest.raises(LossPlusError, match=rf"reads {tensor} \(.*made by.*None"):
        compute_loss(LossBatch(**tensors() | {tensor: None}), spec)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("old_logps", (8, 5)),
        ("advantages", (6,)),
        ("ref_logps", (8, 1)),
        ("rollout_weights", (8,)),
        ("group_ids", (8, 1)),
        ("mask", (8, 1)),
    ],
)
def test_wrong_shapes_are_named(tensor, shape):
    """The tensor, its shape and the shapes that would do."""
    wrong = {"group_ids": torch.int64, "mask": torch.bool}.get(tensor, torch.float32)
    with pytest.raises(LossPlusError, match=f"{tensor} has shape .*must be"):
        compute_loss(LossBatch(**tensors() | {tensor: torch.ones(shape, dtype=wrong)}), full_spec())


@pytest.mark.parametrize("mask", [torch.ones(8, 6), torch.ones(8, 6, dtype=torch.int64)])
def test_masks_are_bool(mask):
    """A float or integer mask is an error that says how to convert it."""
    with pytest.raises(LossPlusError, match=r"mask has dtype .*mask\.bool\(\)"):
        compute_loss(LossBatch(**tensors() | {"mask": mask}), LossSpec())


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"vespo"}))
def test_token_weights_multiply_the_policy_term_alone(name):
    """Weights 0 and 2 by token: the policy's losses 0 and doubled; the KL term keeps its value."""
    batch = tensors(11) | {"token_weights": None, "rollout_weights": None}
    weights = 2.0 * (torch.arange(6) % 2).expand(8, 6)
    spec = LossSpec(policy_loss=name, beta=0.1)
    plain, weighted = (run(batch | {"token_weights": w}, spec)[0] for w in (None, weights))
    assert torch.allclose(weighted.per_token["policy"][MASK], (plain.per_token["policy"] * weights)[MASK])
    assert weighted.terms["kl"].item() == plain.terms["kl"].item()


def test_statistics_of_rows():
    """Lowest and highest row means among rows with tokens: 2 of 4 tokens, 0 of 1, and a fully masked row that does not count."""
    logps = torch.zeros(3, 4)
    ratios = torch.tensor([[0.5, 0.5, 1.0, 1.0], [1.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    batch = {"logps": logps + ratios.log(), "old_logps": logps, "mask": length_mask((4, 1, 0), 4)}
    low = run(batch | {"advantages": -torch.ones(3)}, LossSpec())[0].stats
    assert [low[f"clip_ratio/low_{k}"].item() for k in ("mean", "min")] == pytest.approx([0.4, 0.0])
    high = run(batch | {"advantages": torch.ones(3), "logps": logps - ratios.log()}, LossSpec())[0].stats
    assert [high[f"clip_ratio/high_{k}"].item() for k in ("mean", "max")] == pytest.approx([0.4, 0.5])
    assert high["clip_ratio/low_min"].item() == 0.0
    without = {k: x[[0, 2]] if k != "advantages" else -torch.ones(2) for k, x in batch.items()}
    assert (
        run(without | {"advantages": -torch.ones(2)}, LossSpec())[0].stats["clip_ratio/low_min"].item() == 0.5
    )  # not the masked row's 0
