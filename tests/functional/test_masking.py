"""Masked reductions against plain ones over the selected values."""

import pytest
import torch
from helpers import LENGTHS, difference, length_mask

from trl_lossplus.functional import masking

MASK = length_mask(LENGTHS)
HOLES = MASK & (torch.arange(6) != 1) & (torch.arange(8) != 5)[:, None]
JUNK = [0.0, 1e30, float("nan"), float("inf"), float("-inf")]


def values(seed: int = 0, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    return shift + scale * torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("mask", [MASK, HOLES], ids=["ragged", "holes"])
def test_reductions_are_those_of_the_valid_values(mask, junk):
    """Sums, means, quantiles, moments, whitening: as torch on the valid values, whatever stands elsewhere."""
    x = values().masked_fill(~mask, junk)
    valid, per_row = x[mask].double(), [row[m].double() for row, m in zip(x, mask, strict=True)]
    assert difference(masking.masked_sum(x, mask), valid.sum()) < 1e-6
    assert difference(masking.masked_mean(x, mask), valid.mean()) < 1e-6
    assert difference(masking.row_sums(x, mask), torch.stack([row.sum() for row in per_row])) < 1e-6
    means = [row.mean() if len(row) else torch.zeros((), dtype=torch.float64) for row in per_row]
    assert difference(masking.row_means(x, mask), torch.stack(means)) < 1e-6
    q = (0.0, 0.05, 0.3, 0.5, 1.0)
    assert difference(masking.masked_quantiles(x, mask, q), torch.quantile(valid, torch.tensor(q, dtype=torch.float64))) < 1e-6
    own = masking.moments(x, mask)
    assert [own[0].item(), own.mean.item()] == pytest.approx([len(valid), valid.mean().item()], rel=1e-5)
    for ddof in (0, 1):
        assert own.variance(ddof).item() == pytest.approx(valid.var(correction=ddof).item(), rel=1e-5)
    white = masking.whiten(x, mask)
    assert difference(white[mask], (valid - valid.mean()) / (valid.var() + 1e-8).sqrt()) < 1e-5
    assert torch.equal(white[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("function", ["masked_sum", "masked_mean", "row_sums", "row_means", "whiten", "variance"])
def test_gradient_at_masked_positions_is_exactly_zero(function, junk):
    """And nowhere NaN, though the junk is."""
    functions = {"variance": lambda x, m: masking.moments(x, m).variance()}
    x = values().masked_fill(~HOLES, junk).requires_grad_()
    result = functions.get(function, getattr(masking, function, None))(x, HOLES)
    (gradient,) = torch.autograd.grad((result * result.detach()).sum(), x)
    assert torch.isfinite(gradient).all()
    assert torch.equal(gradient[~HOLES], torch.zeros(int((~HOLES).sum())))
    assert gradient[HOLES].abs().sum() > 0


def test_empty_masks():
    """Sums and means 0, quantiles NaN, variance 0 and whitening 0 for none or one valid value: defined, never an error."""
    x, none, one = values(), torch.zeros_like(MASK), torch.zeros_like(MASK)
    one[3, 2] = True
    assert masking.masked_sum(x, none).item() == masking.masked_mean(x, none).item() == 0.0
    assert torch.equal(masking.row_means(x, none), torch.zeros(8))
    assert torch.isnan(masking.masked_quantiles(x, none)).all()
    for mask in (none, one):
        assert masking.moments(x, mask).variance().item() == 0.0
        assert torch.equal(masking.whiten(x, mask), torch.zeros(8, 6))
    assert masking.whiten(x, one, shift_mean=False)[3, 2].item() == pytest.approx(x[3, 2].item())


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-2, 100.0), (50.0, -3.0)])
def test_whitening(scale, shift):
    """Mean 0 and std 1 over the valid tokens; shift_mean=False keeps the mean; unchanged by a shift and a scale of the input."""
    x = values(1, scale, shift)
    white = masking.whiten(x, HOLES)[HOLES].double()
    assert white.mean().abs() < 1e-3
    assert white.std() == pytest.approx(1.0, rel=1e-4)
    kept = masking.whiten(x, HOLES, shift_mean=False)[HOLES].double()
    assert kept.mean().item() == pytest.approx(x[HOLES].double().mean().item(), rel=1e-4, abs=1e-4)
    assert difference(masking.whiten(3 * values(1) + 5, HOLES), masking.whiten(values(1), HOLES)) < 1e-5


def test_whitening_with_the_statistics_of_more():
    """Statistics over a whole window whiten its parts as the whole: (x - 2) / sqrt(4 + 1e-8)."""
    whole = values(2)
    own = masking.moments(whole, MASK)
    parts = [
        masking.whiten(x, m, mean=own.mean, variance=own.variance()) for x, m in zip(whole.chunk(4), MASK.chunk(4), strict=True)
    ]
    assert torch.equal(torch.cat(parts), masking.whiten(whole, MASK))
    ones = torch.ones(1, 2, dtype=torch.bool)
    white = masking.whiten(torch.tensor([[4.0, -2.0]]), ones, mean=torch.tensor(2.0), variance=torch.tensor(4.0))
    assert white.tolist() == [[1.0, -2.0]]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_merged_moments_are_those_of_the_union(parts, scale):
    """Disjoint parts, one of them empty, around a mean of 1000 -> torch's mean and variance of all values (to 1e-3 of E[x^2])."""
    x = values(3, scale, 1000.0)
    own = [masking.moments(a, m) for a, m in zip(x.chunk(parts), HOLES.chunk(parts), strict=True)]
    merged = masking.merge_moments(masking.Moments(*(torch.stack(column) for column in zip(*own, strict=True))))
    valid = x[HOLES].double()
    assert merged[0].item() == len(valid)
    assert merged.mean.item() == pytest.approx(valid.mean().item(), rel=1e-6)
    assert merged.variance().item() == pytest.approx(valid.var().item(), rel=1e-4 if scale == 1 else 0.2)
    doubled = masking.merge_moments(masking.Moments(*(torch.stack([a, a]) for a in (merged[0], merged.mean, merged.m2))))
    assert doubled.m2.item() == pytest.approx(2 * merged.m2.item(), rel=1e-6)


@pytest.mark.parametrize("constant", [0.35, 0.1, 1.3, -2.7, 1e6 + 0.1, 0.0])
@pytest.mark.parametrize("n", [1, 3, 7, 31])
def test_constant_groups_have_exactly_no_spread(constant, n):
    """A constant group beside another -> its value is its mean and its sum of squares exactly 0."""
    x = torch.tensor([constant] * n + [0.0, 1.0])
    groups = masking.group_rows(torch.tensor([9] * n + [4, 4]))
    stats = masking.group_moments(x, torch.ones(n + 2, dtype=torch.bool), groups)
    assert stats[0].tolist() == [2.0, n]
    assert stats.mean.tolist() == [0.5, x[0].item()]
    assert stats.m2.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("n", [7, 8, 31])
def test_constant_values_have_exactly_no_spread(n):
    """n x .35 (as the docstring of `moments` promises) -> variance exactly 0, whitened exactly 0."""
    x, mask = torch.full((1, n), 0.35), torch.ones(1, n, dtype=torch.bool)
    assert masking.moments(x, mask).m2.item() == 0.0
    assert torch.equal(masking.whiten(x, mask), torch.zeros(1, n))


def test_group_moments_against_torch():
    """By group over the valid rows, in any order, NaN where not valid; a group with no valid row has count 0 and spread 0."""
    ids = torch.tensor([5, -1, 5, 8, -1, 5, 8, 5])
    x = values(4)[:, 0]
    valid = torch.tensor([True, True, True, False, True, True, False, False])
    x[~valid] = float("nan")
    stats = masking.group_moments(x, valid, masking.group_rows(ids))
    for g, i in enumerate((-1, 5)):
        own = x[(ids == i) & valid].double()
        assert stats[0][g].item() == len(own)
        assert stats.mean[g].item() == pytest.approx(own.mean().item(), rel=1e-5)
        assert stats.variance()[g].item() == pytest.approx(own.var().item(), rel=1e-5)
    assert [stats[0][2].item(), stats.m2[2].item()] == [0.0, 0.0]
    assert torch.isfinite(stats.mean).all()


def test_group_rows_numbers_by_value():
    """Ids 40, -2, 40, 7 -> groups 2, 0, 2, 1 of 3; sums by group."""
    groups = masking.group_rows(torch.tensor([40, -2, 40, 7]))
    assert (groups[0].tolist(), groups.num) == ([2, 0, 2, 1], 3)
    assert masking.group_sums(torch.tensor([1.0, 2.0, 3.0, 4.0]), groups).tolist() == [2.0, 4.0, 4.0]


def test_what_is_known_of_a_mask_follows_it():
    """A mask that is written to, one that takes the place of another that is gone, and one made for inference: their own counts."""
    x = torch.ones(1, 3)
    mask = torch.tensor([[True, False, True]])
    assert masking.count(mask) == 2
    mask[0, 1] = True
    assert (masking.count(mask), masking.masked_sum(x, mask)) == (3, 3)
    mask.zero_()
    assert not masking.nonempty(mask).any()
    for valid in (1, 2, 3) * 20:  # ids come again
        assert masking.count(torch.arange(3)[None] < valid) == valid
    del mask
    kept = {id(known.mask()) for known in masking._KNOWN.values()}
    assert id(None) not in kept  # nothing is held of masks that are gone
    with torch.inference_mode():
        mask = torch.tensor([[True, False, True]])
        assert masking.masked_sum(x, mask) == 2
        mask[0, 1] = True
        assert masking.masked_sum(x, mask) == 3
