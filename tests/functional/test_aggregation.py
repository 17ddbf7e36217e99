"""Aggregations: weights of each token, empty masks, windows, and what is refused."""

import pytest
import torch
from helpers import GROUPS, LENGTHS, MODES, length_mask, step_window

from trl_lossplus import LossPlusError, Window, aggregate

MASK, IDS = length_mask(LENGTHS), torch.tensor(GROUPS)
N, ROWS = sum(LENGTHS), len(LENGTHS)
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
GROUP_TOKENS = [sum(n for n, g in zip(LENGTHS, GROUPS, strict=True) if g == own) for own in GROUPS]


def weight(mode: str, row: int) -> float:
    """What one valid token of a row weighs."""
    return {
        "token_mean": 1 / N,
        "token_sum": 1.0,
        "seq_mean_token_mean": 1 / LENGTHS[row] / ROWS,
        "seq_mean_token_sum": 1 / ROWS,
        "seq_mean_token_sum_norm": 1 / ROWS / 16,
        "prompt_mean": 1 / GROUP_TOKENS[row] / 3,
    }[mode]


@pytest.mark.parametrize("mode", MODES)
def test_token_weights(mode):
    """The gradient is each token's weight; masked tokens weigh exactly 0."""
    x = X.clone().requires_grad_()
    loss = aggregate(mode, x, MASK, norm_length=16, group_ids=IDS)
    (gradient,) = torch.autograd.grad(loss, x)
    right = torch.tensor([[weight(mode, i) * float(m) for m in row] for i, row in enumerate(MASK)])
    assert torch.allclose(gradient, right, rtol=1e-6, atol=0)
    assert loss.item() == pytest.approx((right * x).sum().item(), rel=1e-5, abs=1e-6)
    assert torch.equal(loss, aggregate(mode, x.detach().masked_fill(~MASK, float("nan")), MASK, norm_length=16, group_ids=IDS))


@pytest.mark.parametrize("mode", MODES)
def test_one_value_a_row_counts_for_each_of_its_tokens(mode):
    """(B, 1) equals the same value at every token."""
    x = X[:, :1]
    args = {"norm_length": 16, "group_ids": IDS}
    assert torch.equal(aggregate(mode, x, MASK, **args), aggregate(mode, x.expand(8, 6).contiguous(), MASK, **args))


@pytest.mark.parametrize("mode", MODES)
def test_row_without_tokens_counts_only_in_the_window(mode):
    """Without a window a fully masked row changes nothing; a window's num_rows is the caller's count."""
    x, args = X, {"norm_length": 16, "group_ids": IDS}
    gone = MASK & (torch.arange(8) != 3)[:, None]
    keep = torch.tensor([i for i in range(8) if i != 3])
    right = aggregate(mode, x[keep], MASK[keep], norm_length=16, group_ids=IDS[keep])
    assert aggregate(mode, x, gone, **args).item() == pytest.approx(right.item(), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "window", [None, Window(0, 0, 0), Window(9, 4, 2), Window(torch.tensor(0), torch.tensor(0), torch.tensor(0))]
)
def test_empty_mask_is_a_connected_zero(mode, window):
    """No valid token, even counts of 0: loss 0, gradient 0, never 0/0."""
    x = X[:2, :3].clone().requires_grad_()
    loss = aggregate(mode, x, torch.zeros(2, 3, dtype=torch.bool), window, group_ids=torch.tensor([0, 0]))
    assert loss.item() == 0.0
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.zeros(2, 3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_world_size_and_tensor_counts(mode, world_size):
    """The share of one of n processes, whose gradients are averaged, is n times larger; counts may be tensors."""
    x, part = X, [1, 4]
    args = {"norm_length": 16, "group_ids": IDS[part]}
    one = aggregate(mode, x[part], MASK[part], step_window(MASK, IDS, part), **args)
    window = step_window(MASK, IDS, part, world_size)
    assert aggregate(mode, x[part], MASK[part], window, **args).item() == pytest.approx(world_size * one.item(), rel=1e-6)
    counts = [torch.tensor(c) for c in (window.num_tokens, window.num_rows, window.num_prompts)]
    on_device = Window(*counts, world_size, window.group_tokens)
    assert aggregate(mode, x[part], MASK[part], on_device, **args).item() == pytest.approx(world_size * one.item(), rel=1e-6)


def test_default_norm_is_the_padded_length():
    """seq_mean_token_sum_norm without norm_length: T = 6."""
    x, mode = X, "seq_mean_token_sum_norm"
    assert torch.equal(aggregate(mode, x, MASK), aggregate(mode, x, MASK, norm_length=6))


@pytest.mark.parametrize("name", ["token-mean", "mean", "seq_mean", "", None])
def test_unknown_modes_and_missing_groups(name):
    """Unknown: lists the names; prompt_mean without ids: says what is missing."""
    with pytest.raises(LossPlusError, match="loss_aggregation=.*Allowed: .*prompt_mean.*token_sum"):
        aggregate(name, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(LossPlusError, match="prompt_mean.*group_ids"):
        aggregate("prompt_mean", torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_is_summed_in_float32(mode):
    """600 tokens of bf16 1.0078125 -> that value exactly, in float32 (in bf16 a sum of 1000 has steps of 4)."""
    x, mask = torch.full((2, 300), 1.0078125, dtype=torch.bfloat16), torch.ones(2, 300, dtype=torch.bool)
    loss = aggregate(mode, x, mask, group_ids=torch.tensor([0, 1]), norm_length=300)
    right = {"token_sum": 604.6875, "seq_mean_token_sum": 302.34375}.get(mode, 1.0078125)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(right, rel=1e-6)
