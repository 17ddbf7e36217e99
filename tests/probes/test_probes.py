"""Statistics of an optimizer step: pooled exactly, quantiles, shares of loss and gradient, sample size."""

import pytest
import torch

from trl_lossplus import LossBatch, LossSpec, Window, compute_loss
from trl_lossplus.diagnostics import quantiles
from trl_lossplus.diagnostics.probes import StepStatistics, first_pass_deviation, mask_statistics
from trl_lossplus.loss import Statistic


def batch(seed=0, rows=6, width=8, **more):
    g = torch.Generator().manual_seed(seed)
    logps = (-torch.rand(rows, width, generator=g)).requires_grad_()
    old = logps.detach() + 0.3 * torch.randn(rows, width, generator=g)
    ref = logps.detach() + 0.3 * torch.randn(rows, width, generator=g)
    mask = torch.rand(rows, width, generator=g) > 0.3
    advantages = torch.randn(rows, width, generator=g)
    return LossBatch(logps, old, advantages, mask, ref_logps=ref, entropies=torch.rand(rows, width, generator=g), **more)


def measured(batches, level, window=None, **spec):
    statistics = StepStatistics(level)
    for item in batches:
        output = compute_loss(item, LossSpec(**spec), window)
        statistics.add(output.statistics)
        statistics.add_terms(output, len(batches))
        statistics.probe(output)
        output.loss.backward()
    return statistics.pooled([statistics.take()])


def test_quantiles_of_the_valid_tokens():
    """Seven quantiles of each quantity over the tokens of two micro-batches: those of torch.quantile over all of them."""
    items = [batch(0), batch(1, rows=3)]
    values = measured(items, "full", beta=0.1)
    mask = [item.mask for item in items]
    ratio = torch.cat([(b.logps.detach() - b.old_logps)[m].exp() for b, m in zip(items, mask, strict=True)])
    advantage = torch.cat([b.advantages[m] for b, m in zip(items, mask, strict=True)])
    for name, x in (("ratio", ratio), ("log_ratio", ratio.log()), ("advantage", advantage)):
        for q in (0, 5, 25, 50, 75, 95, 100):
            expected = torch.quantile(x, q / 100).item()
            assert values[f"probe/{name}/q{q:02d}"] == pytest.approx(expected, rel=1e-4, abs=1e-6), (name, q)
    assert {name.split("/")[1] for name in values if name.startswith("probe/")} == {
        "ratio", "log_ratio", "advantage", "policy", "kl", "entropy",
    }  # fmt: skip


def test_levels():
    """summary: extremes and medians; off: none of it, but still terms and clip fractions."""
    summary, off = measured([batch()], "summary", beta=0.1), measured([batch()], "off", beta=0.1)
    assert {name.rsplit("/", 1)[1] for name in summary if name.startswith("probe/")} == {"q00", "q50", "q100"}
    assert not any(name.startswith(("probe/", "grad_logp/", "share/grad/", "ratio/ess")) for name in off)
    assert off["loss/policy"] == summary["loss/policy"]
    assert off["clip_ratio/region_mean"] == summary["clip_ratio/region_mean"]


def test_l3_the_raw_log_ratio_is_shown():
    """L3: log ratios of +-30 are shown as they are, while the ratio that the loss used is bounded."""
    item = LossBatch(
        torch.tensor([[-1.0, -31.0]], requires_grad=True), torch.tensor([[-31.0, -1.0]]), torch.ones(1), torch.ones(1, 2).bool()
    )
    values = measured([item], "full")
    assert values["probe/log_ratio/q00"] == -30.0
    assert values["probe/log_ratio/q100"] == 30.0
    assert values["probe/ratio/q100"] == pytest.approx(torch.tensor(20.0).exp().item(), rel=1e-6)


def test_gradient_shares_are_the_norms_of_the_terms_gradients():
    """Against autograd of each term alone, over two micro-batches of one window."""
    items = [batch(0), batch(1)]
    tokens = sum(int(item.mask.sum()) for item in items)
    window = Window(tokens, 12)
    squares = {"policy": 0.0, "kl": 0.0}
    for seed in (0, 1):
        item = batch(seed)
        output = compute_loss(item, LossSpec(beta=0.3, use_bias_correction_kl=True), window)
        for name in squares:
            (grad,) = torch.autograd.grad(output.terms[name], item.logps, retain_graph=True)
            squares[name] += (grad**2).sum().item()
    values = measured(items, "summary", window, beta=0.3, use_bias_correction_kl=True)
    norms = {name: square**0.5 for name, square in squares.items()}
    for name, norm in norms.items():
        assert values[f"grad_logp/{name}"] == pytest.approx(norm, rel=1e-5)
        assert values[f"share/grad/{name}"] == pytest.approx(norm / sum(norms.values()), rel=1e-5)


def test_probing_changes_no_gradient():
    """With and without probes the gradient is the same, bit for bit."""
    plain, probed = batch(3), batch(3)
    compute_loss(plain, LossSpec(beta=0.1)).loss.backward()
    measured([probed], "full", beta=0.1)
    assert torch.equal(plain.logps.grad, probed.logps.grad)


def test_l2_share_of_the_loss():
    """L2: beta KL / (|policy| + beta KL)."""
    values = measured([batch()], "summary", beta=0.2)
    expected = values["loss/kl"] / (abs(values["loss/policy"]) + values["loss/kl"])
    assert values["share/loss/kl"] == pytest.approx(expected, rel=1e-6)
    assert values["share/loss/kl"] + values["share/loss/policy"] == pytest.approx(1.0)


def test_effective_sample_size_by_hand():
    """Ratios 1, 1, 2: mean 4/3, mean of squares 2, ess = (16/9) / 2 = 8/9."""
    item = LossBatch(torch.tensor([[0.0, 0.0, 2.0]]).log1p(), None, torch.ones(1), torch.ones(1, 3).bool())
    item = LossBatch(
        torch.tensor([[1.0, 1.0, 2.0]]).log().requires_grad_(), torch.zeros(1, 3), torch.ones(1), torch.ones(1, 3).bool()
    )
    assert measured([item], "summary")["ratio/ess"] == pytest.approx(8 / 9, rel=1e-6)


def test_explained_variance_is_pooled_over_the_window():
    """returns 0, 1, 2, 3 against values 0, 1, 2, 2 in two micro-batches: 1 - Var(0, 0, 0, 1) / Var(returns) = 1 - .1875 / 1.25."""
    mask = torch.ones(1, 2).bool()
    items = []
    for returns, values in (([0.0, 1.0], [0.0, 1.0]), ([2.0, 3.0], [2.0, 2.0])):
        value = torch.tensor([values], requires_grad=True)
        items.append(
            LossBatch(
                torch.zeros(1, 2, requires_grad=True),
                torch.zeros(1, 2),
                torch.ones(1),
                mask,
                values=value,
                old_values=value.detach(),
                returns=torch.tensor([returns]),
            )  # fmt: skip
        )
    values = measured(items, "summary", vf_coef=0.5)
    assert values["value/explained_variance"] == pytest.approx(1 - 0.1875 / 1.25, rel=1e-6)
    assert values["probe/value_error/q100"] == 1.0


def test_a_large_micro_batch_is_sampled_and_a_small_one_is_not(monkeypatch):
    """Beyond WHOLE positions at least SAMPLE of them are taken; quantiles stay near the true ones."""
    item = batch(5, rows=64, width=512)
    output = compute_loss(item, LossSpec())
    taken = quantiles.sample(output)
    assert taken.values.shape[1] >= quantiles.SAMPLE
    assert taken.values.shape[1] < item.mask.numel() / 10
    true = torch.quantile(item.advantages[item.mask], 0.5).item()
    names = list(taken.names)
    got = torch.quantile(taken.values[names.index("advantage")][taken.valid], 0.5).item()
    assert got == pytest.approx(true, abs=0.2)
    assert quantiles.sample(compute_loss(batch(5), LossSpec())).values.shape[1] == 48


def test_one_sided_names_over_ranks():
    """A statistic that only one rank has is pooled over that rank; extremes and means combine as they must (D5)."""
    ranks = []
    for totals in ({"kl": (3.0, 12.0), "only": (5.0, 1.0)}, {"kl": (3.0, 4.0)}):
        statistics = StepStatistics()
        statistics.add({name: Statistic("mean", torch.tensor(a), torch.tensor(b)) for name, (a, b) in totals.items()})
        ranks.append(statistics.take())
    values = StepStatistics().pooled(ranks)
    assert values["kl"] == pytest.approx(0.375)
    assert values["only"] == 5.0


def test_mask_statistics_by_hand():
    """A loss token in the padding is counted; of two ended rows one has its end token in the loss."""
    completion = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    loss = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    found = mask_statistics(loss, completion, torch.tensor([True, True, False]))
    assert found["mask/outside_completion"].value.item() == 1.0
    assert found["mask/eos_in_loss"].value.item() == 0.5


def test_first_pass_deviation():
    item = batch(2)
    output = compute_loss(item, LossSpec())
    expected = ((item.logps - item.old_logps).exp() - 1)[item.mask].abs().max().item()
    assert first_pass_deviation(output).value.item() == pytest.approx(expected, rel=1e-6)
    same = LossBatch(item.logps, item.logps.detach(), item.advantages, item.mask)
    assert first_pass_deviation(compute_loss(same, LossSpec())).value.item() == 0.0
