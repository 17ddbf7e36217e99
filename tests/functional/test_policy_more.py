"""The added policy objectives by hand: small numbers, one rule at a time, and the draw among tokens."""

import math

import pytest
import torch
from helpers import difference, run, tensors

from trl_lossplus import LossPlusError, LossSpec
from trl_lossplus.functional import policy_covariance as cov
from trl_lossplus.functional import policy_credit as credit
from trl_lossplus.functional import policy_importance as importance
from trl_lossplus.functional import policy_trust_region as region

PLUS, MINUS = torch.tensor([[1.0]]), torch.tensor([[-1.0]])
RATIOS = torch.tensor([[0.25, 0.5, 1.0, 2.0, 4.0]])
LOGPS = torch.full((1, 5), -2.0)


def gradient(term_of, logps: torch.Tensor) -> torch.Tensor:
    logps = logps.clone().requires_grad_()
    return torch.autograd.grad(term_of(logps).per_token.sum(), logps)[0]


@pytest.mark.parametrize(
    ("mode", "low", "high", "right"),
    [
        ("truncate", None, 2.0, [0.25, 0.5, 1, 2, 2]),
        ("truncate", 0.5, 2.0, [0.5, 0.5, 1, 2, 2]),
        ("truncate", None, None, [0.25, 0.5, 1, 2, 4]),
        ("mask", None, 2.0, [0.25, 0.5, 1, 2, 0]),
        ("mask", 0.5, 2.0, [0, 0.5, 1, 2, 0]),
        ("mask", 0.6, None, [0, 0, 1, 2, 4]),
    ],
)
def test_importance_weights(mode, low, high, right):
    """Ratios 1/4, 1/2, 1, 2, 4: the gradient is -w A; a ratio on a bound is inside."""
    d = RATIOS.log()
    for a in (PLUS, MINUS):
        got = gradient(lambda lp, a=a: importance.importance_weighted(d, a, lp, mode=mode, low=low, high=high), LOGPS)
        assert torch.allclose(got, -a * torch.tensor([right]), rtol=1e-5)


def test_topr():
    """Ratios 1/4 .. 4: weight 1 for A=+1; 1/4, 1/2, 1, 1, 1 for A=-1 and for A=0."""
    assert gradient(lambda lp: importance.topr(RATIOS, PLUS, lp), LOGPS).tolist() == [[-1.0] * 5]
    assert gradient(lambda lp: importance.topr(RATIOS, MINUS, lp), LOGPS).tolist() == [[0.25, 0.5, 1, 1, 1]]


def test_row_weight_against_the_sampler():
    """Log ratios .1, .2 and one not scored: the row's weight is e^.3; by token e^.1, e^.2, 1."""
    rollout = torch.tensor([[-1.1, -1.2, math.nan]])
    logps, mask = torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool)
    token = importance.sampler_log_ratio(logps, rollout, mask)
    row = importance.sampler_log_ratio(logps, rollout, mask, level="sequence")
    assert torch.allclose(token, torch.tensor([[0.1, 0.2, 0.0]]), atol=1e-6)
    assert torch.allclose(row, torch.tensor([[0.3]]), atol=1e-6)


# probabilities of a token before and after: (old, new)
MOVES = torch.tensor([[0.5, 0.75], [0.5, 0.3], [0.5, 0.65], [0.5, 0.375], [0.01, 0.03]])


@pytest.mark.parametrize(("a", "kept"), [(1.0, [0, 1, 1, 1, 1]), (-1.0, [1, 1, 1, 1, 1]), (-1.0, [1, 0, 1, 1, 1])])
def test_dppo_tv(a, kept):
    """Moves +.25, -.2, +.15, -.125, +.02 with thresholds .2 (and .15 below in the last row): A>0 drops +.25, A<0 drops -.2."""
    old, new = MOVES.log().T[:, None]
    low = 0.15 if kept == [1, 0, 1, 1, 1] else 0.2001
    got = gradient(lambda lp: region.dppo_tv(lp - old, torch.tensor([[a]]), lp, old, threshold_low=low), new)
    assert torch.allclose(got, -a * (new - old).exp() * torch.tensor([kept]), rtol=1e-5)


def test_dppo_kl():
    """KL of (.5 -> .75) .1438, (.5 -> .3) .0872, (.5 -> .65) .0472: thresholds .1 drop the first for A>0, .05 the second for A<0."""
    old, new = MOVES.log().T[:, None]
    kl = region.binary_kl(old, new)
    p, q = MOVES[:, 0].double(), MOVES[:, 1].double()
    assert difference(kl[0], p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()) < 1e-6
    assert kl[0, :3].tolist() == pytest.approx([0.14384, 0.08718, 0.04716], abs=1e-5)
    options = {"threshold_low": 0.05, "threshold_high": 0.1}
    up = gradient(lambda lp: region.dppo_kl(lp - old, PLUS, lp, old, **options), new)
    down = gradient(lambda lp: region.dppo_kl(lp - old, MINUS, lp, old, **options), new)
    assert (up != 0).tolist() == [[False, True, True, True, True]]
    assert (down != 0).tolist() == [[True, False, True, True, True]]


def test_binary_kl_near_one():
    """p_old = 1 - 2e-7, p = 1 - 1e-3: the complement keeps its digits."""
    old, new = torch.log1p(torch.tensor([-2e-7])), torch.log1p(torch.tensor([-1e-3]))
    o, n = old.double(), new.double()
    right = o.exp() * (o - n) - torch.expm1(o) * torch.log((-torch.expm1(o) + 1e-8) / (-torch.expm1(n) + 1e-8))
    assert difference(region.binary_kl(old, new), right) < 1e-5


def test_ipo():
    """Moves +.25, -.2, +.15, -.125, +.02, threshold .14: the first three are dropped for either sign; the penalty's gradient stays."""
    old, new = MOVES.log().T[:, None]
    for a in (PLUS, MINUS):
        got = gradient(lambda lp, a=a: region.ipo(lp - old, a, lp, old, threshold=0.14, kl_coef=0.5), new)
        right = -a * (new - old).exp() * torch.tensor([0, 0, 0, 1, 1]) + (new - old)
        assert torch.allclose(got, right, rtol=1e-5)


def test_dro():
    """logp -2, log r .5, A=3, beta .4: -(3 * -2 - .2 * .25) = 6.05; gradient -3 + .4 * .5 = -2.8."""
    old = torch.tensor([[-2.5]])
    term = credit.dro(torch.tensor([[0.5]]), 3 * PLUS, torch.tensor([[-2.0]]), beta=0.4)
    assert term.per_token.item() == pytest.approx(6.05)
    assert gradient(lambda lp: credit.dro(lp - old, 3 * PLUS, lp, beta=0.4), torch.tensor([[-2.0]])).item() == pytest.approx(-2.8)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.1, 1e-6])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 33])
def test_discounted_tail(length, gamma):
    """Against the double sum over valid tokens, float64, with holes; also where a row falls into many stretches."""
    g = torch.Generator().manual_seed(length)
    x, mask = torch.randn(4, length, generator=g).double(), torch.rand(4, length, generator=g) > 0.3
    right = torch.zeros_like(x)
    for i in range(4):
        valid = mask[i].nonzero()[:, 0].tolist()
        for n, t in enumerate(valid):
            right[i, t] = sum(gamma ** (m - n) * x[i, s] for m, s in enumerate(valid) if m >= n)
    junk = x.masked_fill(~mask, math.nan)
    assert difference(credit.discounted_tail(junk, mask, gamma)[mask], right[mask]) < 1e-12
    assert difference(credit.discounted_tail(junk.float(), mask, gamma)[mask], right[mask]) < 1e-5


def test_fipo_weights():
    """
    Log ratios log 1.1, log 1.3, log 5, A=-1, half-life 1 (discount 1/2). F of the last is log 5, so its weight is 1.2 at most; above
    the safety threshold 4 it is 1 at most. delta 3 leaves it out of F: F_2 = log 1.3, F_1 = log 1.1 + log 1.3 / 2.
    """
    d, mask = torch.tensor([[1.1, 1.3, 5.0]]).log(), torch.ones(1, 3, dtype=torch.bool)
    assert credit.future_weights(d, MINUS, mask, decay_rate=1.0)[0].tolist() == pytest.approx([1.2, 1.2, 1.0])
    assert credit.future_weights(d, PLUS, mask, decay_rate=1.0)[0].tolist() == pytest.approx([1.2, 1.2, 1.2])
    free = credit.future_weights(d, PLUS, mask, decay_rate=1.0, clip_range=None, delta=3.0)[0]
    assert free.tolist() == pytest.approx([1.1 * 1.3**0.5, 1.3, 1.0])
    low = credit.future_weights(-d, PLUS, mask, decay_rate=1.0, clip_high_only=False)[0]
    assert low.tolist() == pytest.approx([0.8, 0.8, 0.8])
    assert credit.future_weights(-d, PLUS, mask, decay_rate=1.0)[0].tolist() == [1.0, 1.0, 1.0]


def test_real():
    """
    Two rows of a group, s = .5 (good) and -.3 (bad), tau .5: log(1 + e^-1) + log(1 + e^-.6). A third one without a bad mate: 0.
    Scores of +-1000: finite. Each row's gradient is its own: 2 rows times -+1.
    """
    d = torch.tensor([[0.7, 0.3], [-0.3, 9.0], [0.4, 0.4]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    a, ids = torch.tensor([[1.0], [-2.0], [3.0]]), torch.tensor([4, 4, 7])
    term = credit.real(d, a, mask, credit.real_terms(d, a, mask, ids, tau=0.5), tau=0.5)
    right = math.log1p(math.exp(-1)) + math.log1p(math.exp(-0.6))
    assert term.per_token[:, 0].tolist() == pytest.approx([right, right, 0.0])
    far = torch.tensor([[-1000.0], [1000.0]]).requires_grad_()
    one = torch.ones(2, 1, dtype=torch.bool)
    loss = credit.real(far, a[:2], one, credit.real_terms(far, a[:2], one, ids[:2], tau=1.0), tau=1.0).per_token
    assert loss[0].item() == pytest.approx(2000.0)
    (slope,) = torch.autograd.grad(loss[:1].sum(), far, retain_graph=True)
    assert slope[:, 0].tolist() == pytest.approx([-2.0, 0.0])
    (slope,) = torch.autograd.grad(loss.sum(), far)
    assert slope[:, 0].tolist() == pytest.approx([-2.0, 2.0])


def test_real_has_the_gradient_of_its_formula():
    """Equal weights: the sum over rows has the gradient of sum over groups of N (log(..) + log(..)), by autograd in float64."""
    g = torch.Generator().manual_seed(5)
    d = torch.randn(7, 4, generator=g, dtype=torch.float64).requires_grad_()
    a = torch.tensor([1.0, -1, -2, 3, -1, 2, 2]).double()[:, None]
    mask, ids = torch.rand(7, 4, generator=g) > 0.3, torch.tensor([0, 0, 0, 1, 1, 1, 2])
    mask[:, 0] = True
    s = torch.where(mask, d, 0.0).sum(1) / mask.sum(1) / 0.5
    total = torch.zeros((), dtype=torch.float64)
    for members in (ids == 0, ids == 1):
        good, bad = s[members & (a[:, 0] > 0)], s[members & (a[:, 0] <= 0)]
        total = total + 3 * (torch.log1p(torch.exp(-good).sum()) + torch.log1p(torch.exp(bad).sum()))
    (right,) = torch.autograd.grad(total, d)
    value = credit.real(d, a, mask, credit.real_terms(d, a, mask, ids)).per_token.sum()
    (ours,) = torch.autograd.grad(value, d)
    assert difference(value, total) < 1e-12
    assert difference(ours, right) < 1e-12


# --- the choice of tokens


def data(seed: int = 0, shape: tuple[int, int] = (64, 256)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logps = -torch.rand(shape, generator=g).mul(5)
    return logps, torch.randn(shape[0], 1, generator=g).expand(shape), torch.rand(shape, generator=g) > 0.2


def test_the_hash_is_uniform_and_depends_on_seed_and_token():
    """Mean and deciles of a uniform variable; another seed, another draw; neither the row nor padding plays a part."""
    logps, _, mask = data()
    u = cov.token_hash(logps, mask).double()[mask] / 2**62
    assert u.mean().item() == pytest.approx(0.5, abs=0.01)
    assert torch.histc(u, 10, 0, 1).div(len(u)).sub(0.1).abs().max() < 0.01
    other = cov.token_hash(logps, mask, 1).double()[mask] / 2**62
    assert torch.corrcoef(torch.stack([u, other]))[0, 1].abs() < 0.02
    order = torch.randperm(64)
    assert torch.equal(cov.token_hash(logps[order], mask[order]), cov.token_hash(logps, mask)[order])
    wider = (torch.nn.functional.pad(x, (3, 5), value=v) for x, v in ((logps, math.nan), (mask, False)))
    assert torch.equal(cov.token_hash(*wider)[:, 3:-5][mask], cov.token_hash(logps, mask)[mask])
    ids = torch.arange(64) * 3 + 5
    by_row = cov.token_hash(logps, mask, 0, ids)
    assert torch.equal(cov.token_hash(logps + 1, mask, 0, ids), by_row)
    assert torch.equal(cov.token_hash(logps[order], mask[order], 0, ids[order]), by_row[order])
    assert (cov.token_hash(logps, mask, 0, ids + 64 * 3)[mask] == by_row[mask]).sum() == 0
    assert (by_row.double()[mask] / 2**62).mean().item() == pytest.approx(0.5, abs=0.01)
    assert torch.histc(by_row.double()[mask] / 2**62, 10, 0, 1).div(len(u)).sub(0.1).abs().max() < 0.01
    noisy = logps + 1e-7 * torch.randn(logps.shape)
    assert (cov.token_hash(noisy, mask) == cov.token_hash(logps, mask))[mask].float().mean() > 0.999


def test_the_draw_is_a_function_of_the_step():
    """The same tokens in any order of rows, whatever the global generator holds; k of them, between the bounds; all by seed."""
    logps, a, mask = data()
    options = {"ratio": 0.01, "low": 0.5, "high": 3.0}
    torch.manual_seed(0)
    chosen = cov.clip_cov_tokens(logps, a, mask, **options)
    torch.manual_seed(1)
    order = torch.randperm(64)
    assert torch.equal(cov.clip_cov_tokens(logps[order], a[order], mask[order], **options), chosen[order])
    assert chosen.sum() == int(0.01 * mask.sum())
    c = cov.covariance(logps, a, mask)[chosen]
    assert (c > 0.5).all()
    assert (c < 3.0).all()
    assert not torch.equal(cov.clip_cov_tokens(logps, a, mask, seed=1, **options), chosen)


def test_the_highest_covariances():
    """The top 1 % by covariance; among equal ones the hash decides, so that never more than k are taken."""
    logps, a, mask = data()
    chosen = cov.kl_cov_tokens(logps, a, mask, ratio=0.01)
    c, k = cov.covariance(logps, a, mask), int(0.01 * mask.sum())
    assert chosen.sum() == k
    assert c[chosen].min() >= c[mask & ~chosen].max()
    flat = cov.kl_cov_tokens(logps, torch.zeros(64, 1), mask, ratio=0.01)
    assert flat.sum() == k
    assert not torch.equal(flat, cov.kl_cov_tokens(logps, torch.zeros(64, 1), mask, ratio=0.01, seed=5))
    assert cov.kl_cov_tokens(logps, a, torch.zeros_like(mask)).sum() == 0
    assert torch.equal(cov.kl_cov_tokens(logps, a, mask, ratio=1.0), mask)


def test_given_tokens_are_taken():
    """kl_cov with tokens handed to it: the penalty acts there alone; clip_cov: those lose their gradient."""
    batch = tensors() | {"token_weights": None, "rollout_weights": None}
    selected = batch["mask"] & (torch.arange(6) == 0)
    spec = LossSpec(policy_loss="kl_cov", kl_cov_coef=0.5, loss_aggregation="token_sum")
    out, gradient_ = run(batch | {"selected_tokens": selected}, spec)
    none, plain = run(batch | {"selected_tokens": torch.zeros_like(selected)}, spec)
    d = batch["logps"] - batch["old_logps"]
    assert torch.allclose(gradient_ - plain, 0.5 * d.sign() * selected, atol=1e-5)
    assert (out.loss - none.loss).item() == pytest.approx(0.5 * d.abs()[selected].sum().item(), rel=1e-4)
    clipped = run(batch | {"selected_tokens": selected}, LossSpec(policy_loss="clip_cov"))[1]
    assert (clipped[selected] == 0).all()
    assert (clipped[batch["mask"] & ~selected] != 0).any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dro_beta": 0.0}, "dro_beta=0.0 is out of range: it must be > 0"),
        ({"is_ratio_min": 3.0}, "is_ratio_min=3.0 is out of range: it must be < is_ratio_max, 2.0"),
        ({"is_ratio_max": 0.0}, "is_ratio_max=0.0"),
        ({"is_mode": "clip"}, "is_mode='clip' is not known"),
        ({"ipo_threshold": 1.5}, r"ipo_threshold=1.5 .*in \[0, 1\]"),
        ({"clip_cov_ratio": 2.0}, "clip_cov_ratio=2.0 .*at most 1"),
        ({"clip_cov_min": 5.0}, "clip_cov_min=5.0 .*< clip_cov_max"),
        ({"fipo_clip_range": -0.1}, "fipo_clip_range=-0.1"),
        ({"real_tau": 0.0}, "real_tau=0.0"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": "1"}, "rollout_rs='token_k4' is not known"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs_threshold": "1"}, "rollout_rs_threshold='1': nothing reads it"),
    ],
)
def test_ranges(fields, message):
    """A number out of its range, or a setting without its other half, names the field, the value and what is allowed."""
    with pytest.raises(LossPlusError, match=message):
        LossSpec(**fields)
