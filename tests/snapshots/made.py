"""An optimizer step of two micro-batches, made without a trainer."""

from dataclasses import replace

import torch

from trl_lossplus import LossBatch, Window, compute_loss
from trl_lossplus.snapshots.take import take


def rows(seed, n=4, width=6):
    g = torch.Generator().manual_seed(seed)
    logps = -torch.rand(n, width, generator=g)
    return LossBatch(
        logps=logps.requires_grad_(), old_logps=logps.detach() + 0.3 * torch.randn(n, width, generator=g),
        advantages=torch.randn(n, width, generator=g), mask=torch.rand(n, width, generator=g) > 0.2,
        ref_logps=logps.detach() + 0.3 * torch.randn(n, width, generator=g), entropies=torch.rand(n, width, generator=g),
        values=torch.randn(n, width, generator=g).requires_grad_(), old_values=torch.randn(n, width, generator=g),
        returns=torch.randn(n, width, generator=g), rollout_weights=0.5 + torch.rand(n, width, generator=g),
        rollout_logps=logps.detach() + 0.1 * torch.randn(n, width, generator=g), group_ids=torch.arange(n) // 2,
    )  # fmt: skip


def step(spec, change=None, world_size=1, seed=0, max_rows=100):
    """An optimizer step of two micro-batches: its snapshot and the gradients that it had."""
    batches = [rows(seed), rows(seed + 1, n=2)]
    if change is not None:
        batches = [change(batch) for batch in batches]
    tokens = sum(batch.mask.sum() for batch in batches)
    window = Window(tokens * world_size, torch.tensor(6 * world_size), torch.tensor(3 * world_size), world_size)
    outputs = []
    for i, batch in enumerate(batches):
        same = batch.group_ids[:, None] == batch.group_ids
        window = replace(window, group_tokens=(same * batch.mask.sum(1)).sum(1))
        output = compute_loss(batch, spec, window)
        output.loss.backward()
        ids = torch.arange(batch.mask.numel()).view(batch.mask.shape) + 100 * i
        outputs.append((output, {"window": window, "completion_ids": ids}))
    texts = {"prompt": [f"prompt {i}" for i in range(6)], "completion": [f"row {i}" for i in range(6)]}
    names = {i: f" t{i}" for i in range(200)}
    facts = {"step": 3, "processes": world_size}
    snapshot = take(spec, outputs, facts=facts, texts=texts, max_rows=max_rows, tokens=names)
    return snapshot, [batch.logps.grad for batch in batches]
