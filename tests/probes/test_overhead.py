"""The probes stay cheap: how often they pass over a large tensor is counted, not timed. benchmarks/probes.py times them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.probes import LEVELS, loss_step, table, time_loss, time_toy, turns
from trl_lossplus import LossBatch, LossSpec, compute_loss
from trl_lossplus.diagnostics.probes import StepStatistics

VIEWS = {
    "aten.view",
    "aten.expand",
    "aten.detach",
    "aten.slice",
    "aten._unsafe_view",
    "aten.alias",
    "aten.unsqueeze",
    "aten.select",
}


class Passes(TorchDispatchMode):
    """Counts the operations that read a tensor of at least `size` elements, views aside."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        large = any(isinstance(x, torch.Tensor) and x.numel() >= self.size for x in args)
        name = str(func).rsplit(".", 1)[0]
        if large and name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("level", "passes"), [("off", 0), ("summary", 1), ("full", 5)])
def test_passes_over_a_large_micro_batch(level, passes):
    """Extremes of the log ratio (summary), of ratio, policy, KL and entropy too (full); no sort, no copy, no wait in a micro-batch."""
    rows, width = 32, 1024
    logps = torch.full((rows, width), -1.0, requires_grad=True)
    mask = torch.ones(rows, width, dtype=torch.bool)
    batch = LossBatch(
        logps,
        torch.full_like(logps, -1.1),
        torch.ones(rows),
        mask,
        ref_logps=torch.full_like(logps, -1.2),
        entropies=-logps.detach(),
    )
    output, statistics = compute_loss(batch, LossSpec(beta=0.1)), StepStatistics(level)
    with Passes(rows * width) as counted:
        statistics.probe(output)
        assert "aten._local_scalar_dense" not in counted.names
        statistics.pooled([statistics.take()])
    assert counted.names == ["aten.aminmax"] * passes
    with Passes(rows * width) as walked:
        output.loss.backward()
    assert walked.names.count("aten.linalg_vector_norm") == (0 if level == "off" else 2)


def test_every_level_has_its_turn_and_its_metrics():
    assert turns(3) == ["off", "summary", "full", "summary", "full", "off", "full", "off", "summary"]
    step = loss_step(rows=4, width=8)
    found = {level: {name for name in step(level) if name.startswith(("probe/", "share/grad", "ratio/"))} for level in LEVELS}
    assert not found["off"]
    assert found["summary"] < found["full"]
    assert loss_step(words=5, rows=4, width=8)("full").keys() >= found["full"]


@pytest.mark.slow
def test_the_benchmark_measures_each_level():
    """One round of each kind: as many times of each level, and a table with the bounds."""
    for seconds in (time_loss(1), time_toy(1, hidden=16)):
        assert {level: len(times) for level, times in seconds.items()} == dict.fromkeys(LEVELS, 1)
    lines = table("a step", {"off": [1.0, 2.0, 3.0], "summary": [1.1, 2.1, 3.1], "full": [1.5, 2.5, 3.4]}, {"summary": 2.0})
    assert lines[0] == "a step, 3 steps a level"
    assert "+5.00% (at most 2%)" in lines[2]
    assert "+25.00%" in lines[3]
