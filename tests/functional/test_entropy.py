"""Entropy and the selection of high-entropy tokens."""

import math

import pytest
import torch
from helpers import full_spec, length_mask, run, tensors

from trl_lossplus import LossBatch, LossSpec, Window, compute_loss
from trl_lossplus.functional.entropy import entropy_threshold, high_entropy_mask, token_entropy

MASK = length_mask((4, 2))
H = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.5, 0.6, 9.0, float("nan")]])  # valid: .1 .2 .3 .4 .5 .6


def test_entropy_of_known_distributions():
    """Uniform over 5: log 5; certain: 0; (1/2, 1/4, 1/4): 1.5 log 2; shifted logits alike; bf16 in, float32 out."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert token_entropy(torch.zeros(2, 5)).tolist() == pytest.approx([math.log(5)] * 2)
    assert token_entropy(torch.tensor([[500.0, 0.0, -500.0]])).item() == 0.0
    for shift in (0.0, 80.0, -80.0):
        assert token_entropy(logits + shift).item() == pytest.approx(1.5 * math.log(2), rel=1e-4)
    assert token_entropy(torch.zeros(2, 5).bfloat16()).dtype == torch.float32


def test_entropy_gradient():
    """dH/dz_i = -p_i (log p_i + H)."""
    z = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    h = token_entropy(z)
    p = z.softmax(-1)
    right = -p * (p.log() + h[:, None])
    assert torch.allclose(torch.autograd.grad(h.sum(), z)[0], right, atol=1e-6)


@pytest.mark.parametrize(
    ("quantile", "kept"),
    [
        (1.0, [1, 1, 1, 1, 1, 1]),
        (0.5, [0, 1, 0, 0, 1, 1]),  # threshold .35
        (0.2, [0, 0, 0, 0, 1, 1]),  # threshold .5, the 80 % quantile of six values
        (0.0, [0, 0, 0, 0, 0, 1]),
    ],
)
def test_selection(quantile, kept):
    """Of .1 .2 .3 .4 .5 .6 the top share by linear quantiles; masked 9 and NaN are no candidates."""
    selected = high_entropy_mask(H, MASK, quantile)
    assert selected[MASK].int().tolist() == kept
    assert not selected[~MASK].any()


def test_selection_by_a_given_threshold_and_of_nothing():
    """A threshold over more tokens than the batch holds; an empty mask selects nothing."""
    assert high_entropy_mask(H, MASK, 0.2, torch.tensor(0.25))[MASK].int().tolist() == [0, 1, 0, 1, 1, 1]
    none = torch.zeros_like(MASK)
    assert entropy_threshold(H, none, 0.2).item() == math.inf
    assert not high_entropy_mask(H, none, 0.2).any()


BATCH = {"logps": torch.full((2, 4), -1.0), "entropies": H, "advantages": torch.ones(2), "mask": MASK}


def test_only_selected_tokens_have_a_policy_gradient():
    """top_entropy_quantile .5, A=1, ratio 1, token mean over 6: -1/6 at the three selected, 0 elsewhere; KL acts everywhere."""
    out, gradient = run(BATCH, LossSpec(top_entropy_quantile=0.5))
    assert gradient[MASK].tolist() == pytest.approx([0, -1 / 6, 0, 0, -1 / 6, -1 / 6])
    assert out.loss.item() == pytest.approx(-0.5)
    ref = {"ref_logps": torch.full((2, 4), -2.0)}
    with_kl = run(BATCH | ref | {"advantages": torch.zeros(2)}, LossSpec(top_entropy_quantile=0.5, beta=1.0, kl_estimator="k1"))[
        1
    ]
    assert with_kl[MASK].tolist() == pytest.approx([1 / 6] * 6)


@pytest.mark.parametrize(("quantile", "bonus"), [(1.0, 0.35), (0.5, 0.5), (0.0, 0.6)])
def test_entropy_bonus(quantile, bonus):
    """-coef times the mean entropy of the valid, or of the selected tokens: .35; (.4+.5+.6)/3; .6."""
    out, _ = run(BATCH, LossSpec(entropy_coef=0.1, top_entropy_quantile=quantile))
    assert out.terms["entropy"].item() == pytest.approx(-0.1 * bonus, rel=1e-6)
    assert out.stats["entropy"].item() == pytest.approx(0.35, rel=1e-6)


def test_entropy_bonus_of_micro_batches():
    """Rows of 4 and 2 tokens, selected means .35 and .5 -> shares 4 * .35 / 6 and 2 * .5 / 6 of the bonus."""
    chosen, spec = torch.tensor([[False, True, False, True], [True, False, False, False]]), LossSpec(entropy_coef=1.0)
    parts = [{k: x[i : i + 1] for k, x in (BATCH | {"entropy_mask": chosen}).items()} for i in (0, 1)]
    for world_size in (1, 2):
        bonus = [run(part, spec, Window(6, 2, world_size=world_size))[0].terms["entropy"].item() / world_size for part in parts]
        assert bonus == pytest.approx([-4 * 0.35 / 6, -2 * 0.5 / 6], rel=1e-6)


def test_entropy_bonus_gradient_and_none_without_coefficient():
    """Gradient -coef / N at valid tokens, 0 at masked; with coefficient 0 no term, and no graph kept (K1)."""
    entropies = H.nan_to_num(0.0).requires_grad_()
    logps = torch.full((2, 4), -1.0, requires_grad=True)
    batch = LossBatch(logps, None, torch.ones(2), MASK, entropies=entropies)
    (gradient,) = torch.autograd.grad(compute_loss(batch, LossSpec(entropy_coef=0.3)).loss, entropies)
    assert torch.allclose(gradient, -0.05 * MASK)
    out = compute_loss(batch, LossSpec())
    assert "entropy" not in out.terms
    assert torch.autograd.grad(out.loss, entropies, allow_unused=True)[0] is None


def test_entropy_mask_is_bounded_by_the_mask():
    """Entropies 1, 3 valid, the second selected; entropy_mask also True where masked -> mean 3, not 1."""
    batch = {"logps": torch.full((1, 4), -1.0), "entropies": torch.tensor([[1.0, 3.0, 5.0, 5.0]]), "advantages": torch.zeros(1)}
    batch |= {"mask": length_mask((2,), 4), "entropy_mask": torch.tensor([[False, True, True, True]])}
    assert run(batch, LossSpec(entropy_coef=1.0))[0].terms["entropy"].item() == -3.0


def test_selection_given_from_outside():
    """entropy_mask (selected over more than this batch) replaces the batch's own selection."""
    chosen = torch.tensor([[True, False, False, False], [False, True, False, False]])
    gradient = run(BATCH | {"entropy_mask": chosen}, LossSpec(top_entropy_quantile=0.2))[1]
    assert torch.equal(gradient != 0, chosen)
    batch = tensors()
    own = high_entropy_mask(batch["entropies"], batch["mask"], 0.5)
    spec = full_spec(top_entropy_quantile=0.5)
    assert torch.equal(run(batch | {"entropy_mask": own}, spec)[1], run(batch, spec)[1])
