"""What processes tell each other: objects in one collective, rows of a table, and whitening from them."""

import pytest
import torch
from harness import OneProcess, forward_from, plus_trainer, rollout
from processes import Processes

from trl_lossplus.trainers.exchange import Exchange
from trl_lossplus.trainers.minibatch import cut_windows, normalize, row_table
from trl_lossplus.trainers.rollout import share_rows


def test_objects_of_every_process_in_one_collective():
    """Different objects of three processes, in order, on each; one collective."""
    processes = Processes(3)
    mine = [{"kl": 1.5}, None, ["a", float("inf")]]
    results = processes.run(lambda i, gather: Exchange(gather, 3, torch.device("cpu"))(mine[i]))
    assert results == [mine] * 3
    assert processes.calls == 1


def test_the_buffer_grows_once():
    """A first object of 10000 bytes needs a second try; the next of that size does not, nor a small one after it."""
    processes = Processes(2)
    objects = ["x", "y" * 10000, "z" * 10000, "short"]

    def work(process, gather):
        exchange, counts = Exchange(gather, 2, torch.device("cpu"), size=64), []
        for one in objects:
            assert exchange(one if process else "mine") == ["mine", one]
            counts.append(processes.calls)
        return counts

    assert processes.run(work) == [[1, 3, 4, 5]] * 2


def test_one_process_gathers_nothing():
    def gather(x):
        raise AssertionError

    assert Exchange(gather, 1, torch.device("cpu"))("alone") == ["alone"]


def micro(rows, advantages, lengths, groups, scored=None, flat=None):
    """A micro-batch as the cut reads it."""
    advantages = torch.as_tensor(advantages)
    return {
        "row": torch.as_tensor(rows),
        "advantages": advantages,
        "completion_mask": torch.arange(advantages.shape[1]) < torch.tensor(lengths).unsqueeze(1),
        "group_ids": torch.as_tensor(groups),
        "flat": torch.zeros(len(rows), dtype=torch.bool) if flat is None else torch.tensor(flat),
        "scored": torch.ones(len(rows), dtype=torch.bool) if scored is None else torch.tensor(scored),
    }


def cut(micro_batches, normalization, scope, *, per_window, process=0, processes=1, gather=lambda x: x, drop=False):
    kind = {"normalization": normalization}
    table = row_table(
        micro_batches, per_window=per_window, process=process, gather=gather, empty_rows=True, drop_flat=drop, **kind
    )
    cut_windows(micro_batches, table, per_window=per_window, world_size=processes)
    return normalize(micro_batches, table, scope=scope, **kind)


@pytest.mark.parametrize("normalization", ["rollout", "learner"])
@pytest.mark.parametrize("scope", ["batch", "group", "sequence"])
def test_whitening_over_processes_and_micro_batches(normalization, scope):
    """
    8 rows of two processes and two windows, values 1000 +- 1, against torch in double on the tokens of each set: rollout or window,
    by batch, group or row. E[x^2] - E[x]^2 in float32 would be off by .1.
    """
    g = torch.Generator().manual_seed(1)
    whole = 1000 + torch.randn(8, 5, generator=g)
    lengths, groups, order = [5, 3, 1, 4, 2, 5, 5, 3], [0, 0, 1, 1, 2, 2, 3, 3], [0, 5, 3, 6, 7, 1, 4, 2]
    expected = torch.zeros(8, 5)
    window_of = {row: (i // 2) % 2 for i, row in enumerate(order)}  # each process has two windows of two rows

    def key(row):
        own = {"batch": 0, "group": groups[row], "sequence": row}[scope]
        return own if normalization == "rollout" else (own, window_of[row])

    for row in range(8):
        members = [other for other in range(8) if key(other) == key(row)]
        values = torch.cat([whole[other, : lengths[other]] for other in members]).double()
        if len(values) > 1:
            expected[row, : lengths[row]] = ((whole[row, : lengths[row]] - values.mean()) / values.std()).float()

    def work(process, gather):
        mine = torch.tensor(order).chunk(2)[process]
        parts = [micro(part, whole[part], [lengths[i] for i in part], [groups[i] for i in part]) for part in mine.chunk(2)]
        shown = cut(parts, normalization, scope, per_window=1, process=process, processes=2, gather=gather)
        return mine, torch.cat([part["advantages"] for part in parts]), shown

    processes = Processes(2)
    for mine, got, shown in processes.run(work):
        assert torch.allclose(got, expected[mine], atol=2e-3)  # float32 holds 1000.xxx to 6e-5
        means = torch.stack([row[:n].mean() for row, n in zip(expected, lengths, strict=True)])
        assert torch.allclose(shown.float(), means, atol=2e-3)
    assert processes.calls == 1


def test_windows_over_processes_by_hand():
    """Tokens 2+1 and 3+0 in the first window, 1+1 and 2+2 in the second; group 1 has none of its tokens in the first."""

    def work(process, gather):
        lengths = [[[2, 1], [1, 1]], [[3, 0], [2, 2]]][process]
        parts = [micro([0, 1], torch.zeros(2, 3), own, [0, 1] if process else [0, 0]) for own in lengths]
        cut(parts, "none", "batch", per_window=1, process=process, processes=2, gather=gather)
        return [(w.num_tokens.item(), w.num_rows.item(), w.num_prompts.item(), w.group_tokens.tolist(), w.world_size) for w in
                (part["window"] for part in parts)]  # fmt: skip

    first, second = Processes(2).run(work)
    assert first == [(6, 4, 1, [6, 6], 2), (6, 4, 2, [4, 4], 2)]
    assert second == [(6, 4, 1, [6, 0], 2), (6, 4, 2, [4, 2], 2)]


def test_dropped_rows_are_whitened_with_the_rollout_but_not_with_the_step():
    """Values 1, 3 and, in a group that is dropped, 8: mean 4 over the rollout, 2 over the step; dropped rows are shown as 0."""
    for normalization, expected in (("rollout", [-3 / 13**0.5, -1 / 13**0.5]), ("learner", [-1 / 2**0.5, 1 / 2**0.5])):
        rows = micro([0, 1, 2], torch.tensor([[1.0], [3.0], [8.0]]), [1, 1, 1], [0, 0, 1], flat=[False, False, True])
        shown = cut([rows], normalization, "batch", per_window=1, drop=True)
        assert rows["advantages"].flatten()[:2].tolist() == pytest.approx(expected, rel=1e-5)
        assert shown.tolist() == pytest.approx([*expected, 0.0], rel=1e-5)
        assert rows["window"].num_tokens == 2


def test_shared_rows_by_hand():
    """The KL's mean is pooled over tokens (1 nat over 4 and 4 over 1 make 1; a mean of means 2.125), rewards are scaled over all."""
    rewards = torch.tensor([[[1.0, 3.0], [5.0, 7.0]], [[9.0, 9.0], [100.0, 2.0]]])
    lengths = [[2, 2], [1, 0]]

    def work(process, gather):
        mask = torch.arange(2) < torch.tensor(lengths[process]).unsqueeze(1)
        kl = torch.full((2, 2), 0.25 if process == 0 else 4.0)
        shared = share_rows(kl, torch.tensor([0.5, 1.5]) * (process + 1), rewards[process], mask, gather)
        return shared, shared.whitened(rewards[process], mask, process)

    processes = Processes(2)
    (first, a), (second, b) = processes.run(work)
    assert processes.calls == 1
    assert first.kl.tolist() == second.kl.tolist() == [0.5, 0.5, 4.0, 0.0]
    assert first.penalty.tolist() == [0.5, 1.5, 1.0, 3.0]
    assert first.mean_kl == pytest.approx(1.0)
    std = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0]).std()  # mean 5
    assert torch.allclose(a, (rewards[0] - 5) / std + 5, atol=1e-5)
    assert torch.allclose(b, torch.tensor([[4 / std + 5, 0.0], [0.0, 0.0]]), atol=1e-5)


class TwoAlike(OneProcess):
    """Two processes that do the same, as far as one can tell them apart: counts collectives."""

    num_processes = 2

    def __init__(self):
        self.calls = 0

    def gather(self, x):
        self.calls += 1
        return torch.cat([x, x])


@pytest.mark.parametrize("normalization", ["none", "rollout", "learner"])
@pytest.mark.parametrize("parts", [1, 4])
def test_two_collectives_a_step(parts, normalization):
    """One where the rollout is cut, whitened or not, into one window or four; one a step for finiteness and statistics together."""
    accelerator = TwoAlike()
    fields = {"gradient_accumulation_steps": 2, "steps_per_generation": 2 * parts, "advantage_normalization": normalization}
    trainer = plus_trainer(fields, accelerator=accelerator)
    trainer._exchange = Exchange(accelerator.gather, 2, torch.device("cpu"))
    whole = rollout(seed=1, lengths=[6, 0, 3, 1, 6, 4, 2, 5])
    rows = torch.arange(8).chunk(2 * parts)
    inputs = [{name: x if x.dim() == 0 else x[index] for name, x in whole[2].items()} for index in rows]
    micro_batches = trainer.cut(inputs)
    assert accelerator.calls == 1
    trainer._get_per_token_logps_and_entropies = forward_from([(whole[0][i], whole[1][i]) for i in rows])
    for i, one in enumerate(micro_batches):
        accelerator.sync_gradients = i % 2 == 1
        trainer.micro_loss(None, one)
        if accelerator.sync_gradients:
            trainer.end_step()
    assert accelerator.calls == 1 + parts
