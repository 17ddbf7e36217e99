"""
Every registered policy objective, by what its entry declares: a newcomer is tested here without a test of its own.

An objective is called on float64 tensors whose masked positions hold 0, as `LossBatch.clean` leaves them, or through
`compute_loss`. Its `traits` say where it may differ (`registry.TRAITS`); a stop-gradient must be spelled `.detach()`.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from helpers import EVERY_OBJECTIVE, GROUPS, LENGTHS, difference, length_mask, rows, run, step_window, tensors

from trl_lossplus import LossBatch, LossPlusError, LossSpec, Window, compute_loss
from trl_lossplus.batch import DeclaredView
from trl_lossplus.over_step import completed, over_step
from trl_lossplus.registry import POLICY_LOSSES, STEP_TENSORS, TENSORS, TRAITS

MASK = length_mask(LENGTHS)
IDS = torch.tensor(GROUPS)
# Beside the defaults, settings under which other branches act; a newcomer is tested with its defaults alone.
OPTIONS = {
    "ppo_clip": [{"clip_objective": "max"}, {"delta": 1.5, "clip_ratio_c": 1.3}, {"importance_sampling_level": "sequence"}],
    "cispo": [{"epsilon_high": 1.1, "cispo_ratio_min": 0.9}, {"importance_sampling_level": "sequence"}],
    "sapo": [{"sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.5}],
    "gmpo": [{"epsilon": 0.05, "epsilon_high": 0.4}],
    "tis": [{"is_ratio_min": 0.9, "is_ratio_max": 1.1}, {"is_ratio_max": None}],
    "mis": [{"is_ratio_min": 0.9, "is_ratio_max": 1.1}],
    "rollout_is": [
        {"importance_sampling_level": "sequence", "is_ratio_max": 1.5},
        {"is_mode": "mask", "is_ratio_min": 0.7, "is_ratio_max": 1.4},
        {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_1.5,0.3"},
    ],
    "rollout_ppo": [{"clip_ratio_c": 1.3}, {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": "0.08"}],
    "dppo_tv": [{"epsilon": 0.05, "epsilon_high": 0.08, "dppo_ratio_max": 1.2}],
    "dppo_kl": [{"epsilon": 0.02, "epsilon_high": 0.03, "dppo_ratio_max": 1.2}],
    "ipo": [{"ipo_threshold": 0.05, "ipo_kl_coef": 0.5}, {"ipo_threshold": 0.05, "ipo_by_sign": True}],
    "dro": [{"dro_beta": 3.0}],
    "clip_cov": [{"clip_cov_ratio": 0.3, "clip_cov_min": -5.0, "clip_cov_max": 5.0}],
    "kl_cov": [{"kl_cov_ratio": 0.3, "kl_cov_coef": 1.0}],
    "fipo": [
        {"fipo_clip_high_only": False, "fipo_decay_rate": 2.0},
        {"fipo_clip_range": None, "fipo_safety_threshold": 1.2, "delta": 1.5},
    ],
    "real": [{"real_tau": 2.0}],
    "rec": [
        {"rec_clip": "two_side", "rec_weight": "importance", "epsilon": 0.3, "epsilon_high": 0.1},
        {"rec_clip": "ring", "rec_ring_low": 0.3, "rec_ring_high": 0.4, "importance_sampling_level": "token"},
        {"rec_clip": "none", "rec_weight": "advantage", "rec_temperature": 0.5},
        {"rec_clip": "one_side", "rec_weight": "importance", "importance_sampling_level": "sequence"},
    ],
    "sppo": [{"epsilon": 0.1, "epsilon_high": 0.5}],
    "m2po": [{"m2_threshold": 0.01}, {"m2_threshold": 10.0}],
}
VARIANTS = [(name, options) for name in EVERY_OBJECTIVE for options in [{}, *OPTIONS.get(name, [])]]
FIELDS = set(LossBatch.__dataclass_fields__)
each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)


def float64_batch(seed: int = 0) -> dict:
    """Clean float64 tensors: masked positions hold 0 (1 for weights)."""
    batch = tensors(seed, dtype=torch.float64)
    fill = {k: float(k == "rollout_weights") for k in batch}
    return {k: torch.where(MASK, x, fill[k]) if x.is_floating_point() else x for k, x in batch.items()}


def viewed(name: str, batch: dict, logps: torch.Tensor, **options):
    """What the objective returns for a batch of which it sees the tensors that it declares."""
    entry = POLICY_LOSSES.get(name)
    own = LossBatch(**{k: x for k, x in batch.items() if k in FIELDS} | {"logps": logps})
    return entry.func(DeclaredView(own, name, entry.requires), LossSpec(policy_loss=name, **options))


def objective(name: str, batch: dict, logps: torch.Tensor, **options) -> torch.Tensor:
    """Its per-token losses (B, T), 0 on masked positions."""
    return torch.where(MASK, viewed(name, batch, logps, **options).per_token.expand(MASK.shape), 0.0)


@contextmanager
def recorded(values: list | None):
    """Within: every `.detach()` is noted in the list that this gives, or (with values) answered by those, in turn."""
    plain, noted, calls = torch.Tensor.detach, [], iter(values or [])

    def detach(self):
        value = plain(self) if values is None else next(calls)
        noted.append(plain(value).clone())
        return value

    torch.Tensor.detach = detach
    try:
        yield noted
    finally:
        torch.Tensor.detach = plain


def selection(name: str, batch: dict, **options) -> dict:
    """The batch with what the objective computes over a whole step, where it computes anything."""
    own = LossBatch(**{"old_logps": None} | {k: x for k, x in batch.items() if k in FIELDS})
    return batch | over_step(own if batch["logps"].dtype == torch.float64 else own.clean(), LossSpec(policy_loss=name, **options))


@each_variant
def test_gradient_is_the_finite_difference(name, options):
    """Central differences in float64 of the value with its stopped parts held; weights differ by token; masked ones exactly 0."""
    batch, h = selection(name, float64_batch(), **options), 1e-6
    weights = torch.linspace(0.5, 2.0, 48, dtype=torch.float64).view(8, 6)
    weights = weights[:, :1].expand(8, 6) if name == "real" else weights  # one value a row
    logps = batch["logps"].clone().requires_grad_()
    with recorded(None) as held:
        value = objective(name, batch, logps, **options)
    (gradient,) = torch.autograd.grad((value * weights).sum(), logps)
    numeric = torch.zeros_like(gradient)

    def at(shift: torch.Tensor) -> torch.Tensor:
        moved = batch["logps"] + shift
        with recorded(held):
            return (objective(name, batch, moved, **options) * weights).sum()

    for i, t in MASK.nonzero().tolist():
        shift = torch.zeros_like(gradient)
        shift[i, t] = h
        numeric[i, t] = (at(shift) - at(-shift)) / (2 * h)
    assert difference(gradient, numeric) < 2e-7
    assert gradient.abs().sum() > 0
    assert torch.equal(gradient[~MASK], torch.zeros_like(gradient[~MASK]))


@pytest.mark.parametrize("name", EVERY_OBJECTIVE)
def test_gradient_at_ratio_one(name):
    """Policy, old policy and sampler alike: -A a token (advantages constant over a row); or a trait says that it is not."""
    batch, entry = float64_batch(), POLICY_LOSSES.get(name)
    same = {k: batch["logps"] for k in ("old_logps", "rollout_logps")}
    batch |= same | {"advantages": torch.where(MASK, batch["advantages"][:, :1].expand(8, 6), 0.0)}
    batch["rollout_weights"] = torch.ones_like(batch["logps"])
    logps, batch = batch["logps"].clone().requires_grad_(), selection(name, batch)
    (gradient,) = torch.autograd.grad(objective(name, batch, logps).sum(), logps)
    right = torch.where(MASK, -batch["advantages"], 0.0)
    if "gradient_at_one" not in entry.traits:
        assert difference(gradient, right) < 1e-12
    else:
        assert "ratio 1" in entry.func.__doc__
        nonzero = gradient != 0
        assert name == "real" or difference(gradient[nonzero], right[nonzero]) < 1e-12


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@each_variant
def test_masked_positions_change_nothing(name, options, junk):
    """Anything at a masked position of any tensor: the same loss, gradient and statistics, bit for bit."""
    batch = tensors()
    dirty = {k: x.masked_fill(~MASK, junk) if x.is_floating_point() else x for k, x in batch.items()}
    spec = LossSpec(policy_loss=name, **options)
    out, gradient = run(batch, spec)
    other, dirty_gradient = run(dirty, spec)
    assert torch.equal(out.loss, other.loss)
    assert torch.equal(gradient, dirty_gradient)
    assert torch.equal(gradient[~MASK], torch.zeros(int((~MASK).sum())))
    assert all(torch.equal(out.stats[k], other.stats[k]) for k in out.stats)


@each_variant
def test_a_batch_without_tokens(name, options):
    """Fully masked: loss 0, gradient 0, a connected graph, also with NaN everywhere."""
    for fill in (None, math.nan):
        batch = tensors() | {"mask": torch.zeros_like(MASK)}
        if fill is not None:
            batch = {k: torch.full_like(x, fill) if x.is_floating_point() else x for k, x in batch.items()}
        out, gradient = run(batch, LossSpec(policy_loss=name, **options), Window(30, 8, 3))
        assert out.loss.item() == 0.0
        assert out.loss.requires_grad
        assert torch.equal(gradient, torch.zeros_like(gradient))


@each_variant
def test_permuting_rows_permutes(name, options):
    """The same rows in another order: the same loss, the gradient's rows in that order."""
    batch, spec = tensors(3), LossSpec(policy_loss=name, **options)
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    out, gradient = run(batch, spec)
    other, permuted = run(rows(batch, order), spec)
    assert difference(other.loss, out.loss) < 1e-5
    assert difference(permuted, gradient[order]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_variant
def test_half_precision_is_computed_in_float32(name, options, dtype):
    """Half inputs: loss and gradient of their float32 copies, bit for bit (the leaf's gradient rounded)."""
    batch = {k: x.to(dtype) if x.is_floating_point() else x for k, x in tensors().items()}
    single = {k: x.float() if x.is_floating_point() else x for k, x in batch.items()}
    spec = LossSpec(policy_loss=name, **options)
    out, gradient = run(batch, spec)
    right, right_gradient = run(single, spec)
    assert torch.equal(out.loss, right.loss)
    assert out.loss.dtype == torch.float32
    assert torch.equal(gradient, right_gradient.to(dtype))


SPLITS = {
    "rows": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "uneven": [[4, 0, 7], [2], [1, 3, 5, 6]],
    "halves": [[7, 6, 5, 4], [3, 2, 1, 0]],
    "groups": [[0, 1, 4], [2, 3, 7], [5, 6]],
    "two groups": [[5, 0, 1, 6, 4], [2, 3, 7]],
}


@pytest.mark.parametrize("split", SPLITS)
@each_variant
def test_every_split_gives_the_same_gradient(name, options, split):
    """Micro-batches in any order and of any size, given what is computed over the step: the whole step's gradient."""
    entry = POLICY_LOSSES.get(name)
    if "whole_groups" in entry.traits and entry.over_step is None and "groups" not in split:
        pytest.skip("needs whole groups")
    batch = selection(name, tensors(4), **options)
    spec = LossSpec(policy_loss=name, loss_aggregation=entry.aggregation, **options)
    out, gradient = run(batch, spec)
    total, parts = 0.0, torch.zeros_like(gradient)
    for index in SPLITS[split]:
        part, part_gradient = run(rows(batch, index), spec, step_window(MASK, IDS, index))
        total += part.loss.item()
        parts[index] = part_gradient
    assert total == pytest.approx(out.loss.item(), rel=1e-5, abs=1e-6)
    assert difference(parts, gradient) < 1e-6


def both(entry, view, spec):
    """The objective, and what it computes over a step."""
    if entry.over_step is not None:
        entry.over_step(view, spec)
    entry.func(view, spec)


@pytest.mark.parametrize("name", EVERY_OBJECTIVE)
def test_nothing_undeclared_is_read(name):
    """It works on the tensors that it declares alone, and without any one of them it is an error that names loss and tensor."""
    entry, spec = POLICY_LOSSES.get(name), LossSpec(policy_loss=name)
    assert entry.requires <= TENSORS.keys()
    assert entry.traits <= TRAITS.keys()
    assert bool(entry.requires & set(STEP_TENSORS)) == (entry.over_step is not None)
    batch = completed(LossBatch(**tensors()).clean(), spec)
    entry.func(DeclaredView(batch, name, entry.requires), spec)
    for tensor in entry.requires:
        with pytest.raises(LossPlusError, match=f"policy_loss '{name}' reads {tensor}.*requires="):
            both(entry, DeclaredView(batch, name, entry.requires - {tensor}), spec)


@pytest.mark.parametrize("name", EVERY_OBJECTIVE)
def test_options_are_the_fields_that_it_reads(name):
    """Every declared option is a field of the spec and of the configuration; the function reads no other."""
    entry = POLICY_LOSSES.get(name)
    fields = set(LossSpec.__dataclass_fields__)
    assert entry.options <= fields
    spec, read = LossSpec(policy_loss=name), set()

    class Watched:
        def __getattr__(self, field):
            read.add(field)
            return getattr(spec, field)

    batch = LossBatch(**tensors()).clean()
    if entry.over_step is not None:
        entry.over_step(batch, Watched())
    entry.func(completed(batch, spec), Watched())
    derived = {"clip_high": "epsilon_high", "sequence_level": "importance_sampling_level"}
    sequence = {"importance_sampling_level"} if "sequence_level" in entry.traits else set()
    assert {derived.get(field, field) for field in read} - sequence <= entry.options
    assert ("no_options" in entry.traits) == (not entry.options)


@each_variant
def test_zero_advantages_and_far_ratios(name, options):
    """A=0 everywhere: policy term and gradient exactly 0 (but for regularized ones); ratios of e^+-30 stay finite."""
    batch, entry = tensors(9, spread=15.0), POLICY_LOSSES.get(name)
    spec = LossSpec(policy_loss=name, **options)
    out, gradient = run(batch, spec)
    assert torch.isfinite(out.loss)
    assert torch.isfinite(gradient).all()
    out, gradient = run(batch | {"advantages": torch.zeros(8)}, spec)
    if "regularized" not in entry.traits:
        assert out.loss.item() == 0.0
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", EVERY_OBJECTIVE)
def test_old_logps_none_is_on_policy(name):
    """old_logps=None equals log-probs without gradient, bit for bit; terms sum to the loss; what is reported is detached."""
    batch, spec = tensors(8), LossSpec(policy_loss=name)
    none, gradient = run(batch | {"old_logps": None}, spec)
    same, same_gradient = run(batch | {"old_logps": batch["logps"].clone()}, spec)
    assert torch.equal(none.loss, same.loss)
    assert torch.equal(gradient, same_gradient)
    assert not any(x.requires_grad for x in [*none.per_token.values(), *none.stats.values()])


@pytest.mark.parametrize("name", [n for n in EVERY_OBJECTIVE if "rollout_logps" in POLICY_LOSSES.get(n).requires])
def test_tokens_that_the_sampler_could_not_score(name):
    """NaN log-probs of the sampler: as if it agreed there (gradient -A), nowhere NaN; without any it is an error."""
    batch = tensors()
    batch["rollout_logps"][0, 2] = math.nan
    spec = LossSpec(policy_loss=name, loss_aggregation="token_sum")
    out, gradient = run(batch, spec)
    assert torch.isfinite(out.loss)
    right = -batch["advantages"][0, 2] * batch["token_weights"][0, 2]
    assert gradient[0, 2].item() == pytest.approx(right.item(), rel=1e-5)
    with pytest.raises(LossPlusError, match="reads rollout_logps .*sampler.*None"):
        compute_loss(LossBatch(**batch | {"rollout_logps": None}), spec)
