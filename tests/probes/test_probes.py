"""Statistics of an optimizer step: pooled exactly, quantiles, shares of loss and gradient, sample size."""

import math

import pytest
import torch

from trl_lossplus import LossBatch, LossSpec, Window, compute_loss
from trl_lossplus.diagnostics import quantiles
from trl_lossplus.diagnostics.probes import StepStatistics, mask_statistics
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
    return statistics.pooled([statistics.take()]) | statistics.close()


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


def test_gradient_shares_of_several_processes_come_with_the_next_step():
    """Squares of both processes over their number: norms 3 and 4 of two processes make (9 + 16)^0.5 / 2, one step later."""
    both = []
    for norm in (3.0, 4.0):
        statistics = StepStatistics("summary")
        statistics._saw_gradient("policy", torch.tensor([norm]))
        assert statistics.take(2).squares == {}
        assert statistics.close(2) == {}
        both.append(statistics.take(2))
        assert statistics.take(2).squares == {}
    assert StepStatistics("summary").pooled(both)["grad_logp/policy"] == pytest.approx(2.5)


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


def stepped(item, level="full", first_pass=None):
    """The statistics of a step of one micro-batch, and its spread."""
    statistics = StepStatistics(level)
    statistics.probe(compute_loss(item, LossSpec(beta=0.1)), first_pass)
    return statistics.pooled([statistics.take()])


@pytest.mark.parametrize(("level", "taken"), [("summary", 256), ("full", 512)])
def test_a_large_micro_batch_is_sampled_and_a_small_one_is_not(level, taken):
    """Of more than WHOLE positions at least TAKEN are taken, from every column; medians stay near, extremes are those of all tokens."""
    item = batch(5, rows=64, width=512)
    with torch.no_grad():
        item.logps[7, 300], item.old_logps[7, 300], item.mask[7, 300] = -0.5, -9.5, True  # one token in 32768
    output = compute_loss(item, LossSpec(beta=0.1))
    part = quantiles.sample(output, level)
    assert taken <= len(part.rows[0]) <= 1.1 * taken
    assert len({i % 512 for i in range(0, 64 * 512, part.stride)}) >= 200
    values = stepped(item, level)
    assert values["probe/log_ratio/q100"] == 9.0
    ratios = (item.logps.detach() - item.old_logps)[item.mask]
    assert values["probe/log_ratio/q00"] == pytest.approx(ratios.min().item(), abs=1e-7)
    if level == "full":
        assert values["probe/ratio/q100"] == pytest.approx(torch.tensor(9.0).exp().item(), rel=1e-6)
        assert values["probe/advantage/q100"] == item.advantages[item.mask].max().item()
        assert values["probe/kl/q100"] == output.per_token["kl"].max().item()
        assert values["probe/kl/q00"] > 0.0  # not the 0 of masked positions
        assert values["probe/entropy/q00"] > 0.0
    assert values["probe/advantage/q50"] == pytest.approx(torch.quantile(item.advantages[item.mask], 0.5).item(), abs=0.2)
    assert len(quantiles.sample(compute_loss(batch(5), LossSpec()), level).rows[0]) == 48


def test_advantages_of_rows_are_taken_by_row():
    """(B, 1) advantages: each position taken has its row's."""
    item = batch(5, rows=64, width=512)
    item = LossBatch(item.logps, item.old_logps, torch.arange(64.0), torch.ones(64, 512).bool(), ref_logps=item.ref_logps)
    values = stepped(item)
    assert (values["probe/advantage/q00"], values["probe/advantage/q100"]) == (0.0, 63.0)
    assert values["probe/advantage/q50"] == pytest.approx(31.5, abs=1.0)


def test_micro_batches_of_unequal_size_count_by_their_tokens():
    """A micro-batch of 32768 tokens with ratio e^1 and one of 16384 with ratio 1, of which each position is taken: two thirds are e^1."""
    one = torch.zeros(64, 512, requires_grad=True)
    many = LossBatch(one, torch.full((64, 512), -1.0), torch.ones(64), torch.ones(64, 512).bool())
    two = torch.zeros(32, 512, requires_grad=True)
    few = LossBatch(two, torch.zeros(32, 512), torch.ones(32), torch.ones(32, 512).bool())
    statistics = StepStatistics("full")
    for item in (many, few):
        statistics.probe(compute_loss(item, LossSpec()))
    values = statistics.pooled([statistics.take()])
    assert values["probe/log_ratio/q25"] == 0.0
    assert values["probe/log_ratio/q50"] == 1.0
    e = torch.tensor(1.0).exp().item()
    assert values["ratio/ess"] == pytest.approx(((2 * e + 1) / 3) ** 2 / ((2 * e**2 + 1) / 3), rel=1e-2)


def test_quantiles_of_two_processes_are_those_of_all_tokens():
    """Two processes of 4 and 9 rows, masked by chance: every quantile as torch.quantile over the tokens of both."""
    items = [batch(1, rows=4), batch(2, rows=9)]
    sent = []
    for item in items:
        statistics = StepStatistics("full")
        statistics.probe(compute_loss(item, LossSpec()))
        sent.append(statistics.take(2))
    values = StepStatistics("full").pooled(sent)
    everything = torch.cat([(item.logps.detach() - item.old_logps)[item.mask] for item in items])
    for q in (0, 5, 25, 50, 75, 95, 100):
        assert values[f"probe/log_ratio/q{q:02d}"] == pytest.approx(torch.quantile(everything, q / 100).item(), abs=1e-6)
    square = (everything.exp() ** 2).mean()
    assert values["ratio/ess"] == pytest.approx((everything.exp().mean() ** 2 / square).item(), rel=1e-5)


def test_weighted_quantiles_by_hand():
    """Values 0 and 10 that stand for 3 and 1 tokens, middles at 1.5 and 3.5: the median lies half of the way between them at 2.5."""
    import numpy as np

    assert quantiles.quantiles([np.array([[0.0]]), np.array([[10.0]])], [3.0, 1.0], (0.0, 0.5, 1.0)) == [[0.0, 5.0, 10.0]]
    assert quantiles.quantiles([np.array([[1.0, 2.0, 4.0]])], [7.0], (0.0, 0.5, 0.75, 1.0)) == [[1.0, 2.0, 3.0, 4.0]]
    thinned = quantiles.thinned(
        quantiles.Spread(("a",), np.arange(10000.0)[None], 2.0, {}, (1.0, 1.0, 1.0)), quantiles.SENT // 128
    )
    assert thinned.values.shape == (1, 128)
    assert thinned.weight * 128 == 2.0 * 10000
    assert (thinned.values[0, 0], thinned.values[0, -1]) == (0.0, 9999.0)


def test_a_nan_shows_in_the_quantiles():
    """A NaN or an infinity among the valid tokens is seen; one at a masked position is not."""
    item = batch(5)
    item.advantages[0, 0], item.mask[0, 0] = float("nan"), True
    item.advantages[1, 1], item.mask[1, 1] = float("nan"), False
    assert torch.tensor([v for k, v in stepped(item).items() if k.startswith("probe/advantage")]).isnan().all()
    item.mask[0, 0] = False
    assert torch.tensor([v for k, v in stepped(item).items() if k.startswith("probe/")]).isfinite().all()
    item.mask[0, 0], item.advantages[0, 0] = True, float("inf")
    assert stepped(item)["probe/advantage/q100"] == float("inf")


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


@pytest.mark.parametrize("rows", [2, 400])
@pytest.mark.parametrize(("clamp", "expected"), [(20.0, math.exp(20) - 1), (0.5, math.exp(0.5) - 1), (1e4, math.inf)])
def test_a_first_pass_far_from_one(clamp, expected, rows):
    """One token at 100 nats: the ratio that the loss used, bounded by the clamp, infinite in float32 without; also where ratios are sampled."""
    logps = torch.zeros(rows, 50)
    old = logps.clone()
    old[1, 7] = -100.0
    item = LossBatch(logps=logps, old_logps=old, advantages=torch.ones(rows, 50), mask=torch.ones(rows, 50, dtype=torch.bool))
    statistics = StepStatistics("summary")
    statistics.probe(compute_loss(item, LossSpec(log_ratio_clamp=clamp)), clamp)
    assert statistics.pooled([statistics.take()])["ratio/first_pass_deviation"] == pytest.approx(expected, rel=1e-6)


def test_first_pass_deviation():
    """max |ratio - 1| of a step that no update came before; of later ones nothing."""
    item = batch(2)
    expected = ((item.logps - item.old_logps).exp() - 1)[item.mask].abs().max().item()
    assert stepped(item, first_pass=20.0)["ratio/first_pass_deviation"] == pytest.approx(expected, rel=1e-6)
    assert "ratio/first_pass_deviation" not in stepped(item)
    same = LossBatch(item.logps, item.logps.detach(), item.advantages, item.mask, ref_logps=item.ref_logps)
    assert stepped(same, "summary", 20.0)["ratio/first_pass_deviation"] == 0.0
    none = LossBatch(item.logps, item.old_logps, item.advantages, torch.zeros_like(item.mask), ref_logps=item.ref_logps)
    assert "ratio/first_pass_deviation" not in stepped(none, first_pass=20.0)
