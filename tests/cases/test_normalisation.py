"""Cases A: the loss is divided by the counts of the whole optimizer step, so that no split changes it."""

import pytest
import torch
from helpers import MODES, difference, full_spec, length_mask, rows, run, step_window, tensors

from trl_lossplus import LossSpec, Window, aggregate

SPLITS = {"1x8": 1, "2x4": 2, "4x2": 4, "8x1": 8}


def split_run(batch, spec, parts, order=None, world_size=1):
    """(loss, {term: sum}, gradient) of a step whose rows, in `order`, are cut into `parts` micro-batches, each trimmed."""
    order = torch.arange(len(batch["mask"])) if order is None else order
    loss, terms, gradient = torch.zeros(()), {}, torch.zeros_like(batch["logps"])
    for index in order.chunk(parts):
        width = int(batch["mask"][index].sum(-1).max().clamp(min=1))
        part = {name: x if x.dim() == 1 else x[:, :width] for name, x in rows(batch, index).items()}
        out, grad = run(part, spec, step_window(batch["mask"], batch["group_ids"], index, world_size))
        loss = loss + out.loss.detach() / world_size
        terms = {name: terms.get(name, 0) + term.detach() / world_size for name, term in out.terms.items()}
        gradient[index, :width] += grad / world_size
    return loss, terms, gradient


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", MODES)
def test_a1_a8_every_split_gives_the_same_loss_gradient_and_terms(mode, split):
    """8 rows of 6,3,1,5,2,6,4,3 tokens as 1x8, 2x4, 4x2, 8x1, trimmed -> one gradient, to 1e-6; KL and entropy alike (A8)."""
    batch, spec = tensors(), full_spec(aggregation=mode)
    out, gradient = run(batch, spec, step_window(batch["mask"], batch["group_ids"], list(range(8))))
    loss, terms, split_gradient = split_run(batch, spec, SPLITS[split])
    assert difference(split_gradient, gradient) < 1e-6
    assert difference(loss, out.loss) < 1e-6
    assert terms.keys() == out.terms.keys() == {"policy", "kl", "entropy"}
    assert all(difference(terms[name], out.terms[name]) < 1e-5 for name in terms)
    assert difference(gradient, run(batch, spec)[1]) < 1e-6, "without a window the batch is the whole step"


def test_a2_window_is_the_optimizer_step_not_the_generation_batch():
    """Micro-batches of 1,1,9,9 tokens, 4 steps per generation, accumulation 2, A=1, ratio 1 -> both steps' losses -1."""
    spec, losses = LossSpec(loss_aggregation="token_mean"), []
    for step in ((1, 1), (9, 9)):
        total = 0.0
        for length in step:
            batch = {"logps": torch.full((1, length), -2.0), "advantages": torch.ones(1), "mask": length_mask((length,))}
            total += run(batch, spec, Window(num_tokens=sum(step), num_rows=2))[0].loss.item()
        losses.append(total)
    assert losses == pytest.approx([-1.0, -1.0], abs=1e-6)  # TRL's dapo: -0.2, -1.8


@pytest.mark.parametrize("mode", MODES)
def test_a3_two_processes_equal_one(mode):
    """2 processes of 2 and 18 tokens -> the gradients' average is the gradient of one process."""
    mask = length_mask((2, 18))
    batch, spec = tensors(3, mask) | {"group_ids": torch.tensor([5, 5])}, full_spec(aggregation=mode)
    whole_out, whole = run(batch, spec, step_window(mask, batch["group_ids"], [0, 1]))
    halves = [run(rows(batch, [i]), spec, step_window(mask, batch["group_ids"], [i], world_size=2)) for i in (0, 1)]
    assert difference(torch.cat([gradient for _, gradient in halves]) / 2, whole) < 1e-6
    assert difference(sum(out.loss for out, _ in halves) / 2, whole_out.loss) < 1e-6


def test_a4_masked_rows_do_not_dilute_the_mean():
    """2 rows x 10 tokens, loss 1 each, row 2 masked -> token mean 1.0, not 0.5; all rows masked -> 0, gradient 0."""
    batch = {
        "logps": torch.full((2, 10), -1.0),
        "advantages": -torch.ones(2),
        "mask": torch.tensor([[True], [False]]).expand(2, 10),
    }
    assert run(batch, LossSpec(loss_aggregation="token_mean"))[0].loss.item() == 1.0
    for mode in ("token_mean", "seq_mean_token_mean"):
        out, gradient = run(batch | {"mask": torch.zeros(2, 10, dtype=torch.bool)}, LossSpec(loss_aggregation=mode))
        assert out.loss.item() == 0.0
        assert torch.equal(gradient, torch.zeros(2, 10))


A5 = {
    "token_mean": 310 / 110,
    "seq_mean_token_mean": 2.0,
    "seq_mean_token_sum": 155.0,
    "seq_mean_token_sum_norm": 0.775,
    "token_sum": 310.0,
}


@pytest.mark.parametrize("mode", A5)
def test_a5_aggregations(mode):
    """Lengths 10 and 100, losses 1 and 3 -> token mean 2.818182, row mean of means 2, of sums 155, sums over 200: 0.775."""
    x = torch.tensor([[1.0], [3.0]]).expand(2, 100)
    loss = aggregate(mode, x, length_mask((10, 100)), norm_length=200 if mode == "seq_mean_token_sum_norm" else None)
    assert loss.item() == pytest.approx(A5[mode], rel=1e-6)


@pytest.mark.parametrize(("parts", "world_size"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 1, 0, 2)], ids=str)
def test_a6_prompt_mean_also_with_shuffled_groups(order, parts, world_size):
    """Prompt A: 2 x 10 tokens, loss 1; prompt B: 2 x 100, loss 3 -> 2.0, however rows lie in micro-batches and ranks."""
    lengths = torch.tensor([10, 10, 100, 100])
    mask, ids = length_mask((10, 10, 100, 100)), torch.tensor([41, 41, 8, 8])
    loss = torch.tensor([1.0, 1.0, 3.0, 3.0])[:, None].expand(4, 100)
    total = 0.0
    for index in torch.tensor(order).chunk(parts):
        group_tokens = torch.stack([lengths[ids == ids[i]].sum() for i in index])
        window = Window(220, 4, num_prompts=2, world_size=world_size, group_tokens=group_tokens)
        total += aggregate("prompt_mean", loss[index], mask[index], window, group_ids=ids[index]) / world_size
    assert total.item() == pytest.approx(2.0, rel=1e-6)
    assert aggregate("prompt_mean", loss, mask, group_ids=ids).item() == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a7_constant_norm(size, world_size):
    """dr_grpo's constant norm, micro-batches of 1, 2, 4 rows on 1 and 2 processes -> the same gradient."""
    batch, spec = tensors(7), full_spec(aggregation="seq_mean_token_sum_norm", norm_length=6.0)
    whole = run(batch, spec)[1]
    gradient = split_run(batch, spec, 8 // size, world_size=world_size)[2]
    assert difference(gradient, whole) < 1e-6
