"""Snapshots on two processes: each one's part, and both together, replayed bit for bit; together they are the step of one process."""

import pytest
import torch
from cells import KL, LEARNER, PPO, TWO, case
from launches import run_cells

from trl_lossplus import Snapshot, diff
from trl_lossplus.cli import main
from trl_lossplus.snapshots.testing import assert_unchanged

STEP = 1
TWICE = {"num_iterations": 2, "gradient_accumulation_steps": 2, "snapshot_steps": [STEP], "logging_steps": 1}
CELLS = [
    {**case("snapshot_GRPO", **TWICE, **KL, entropy_coef=0.01), "gradients": True},
    {**case("snapshot_GSPO", **TWICE, **LEARNER, policy_loss="gspo"), "gradients": True},
    {**case("snapshot_packed", **TWICE, **KL, loss_aggregation="prompt_mean", microbatch_layout="packed"), "gradients": True},
    {**case("snapshot_PPO", lora=True, **TWICE, **{k: v for k, v in PPO.items() if k != "lora"}), "gradients": True},
    {**case("snapshot_masked", **{**TWO, "snapshot_steps": [STEP]}, mask_truncated_completions=True), "gradients": True},
]
NAMES = [cell["name"] for cell in CELLS]


@pytest.fixture(scope="module")
def runs(toy, tmp_path_factory):
    """{launch: {cell: what the worker wrote}} and the folder."""
    folder = tmp_path_factory.mktemp("snapshots")
    found = {launch: run_cells(launch, CELLS, folder / launch, toy) for launch in ("single", "DDP")}
    assert not [result for results in found.values() for result in results.values() if "error" in result], found
    return found, folder


def snapshots(runs, launch, name):
    return runs[1] / launch / name / "snapshots" / f"step-{STEP:08d}-step"


def trained(runs, launch, name, rank, micro_batches):
    """The gradients of the step's backward passes."""
    kept = torch.load(runs[1] / launch / name / f"gradients-{rank}.pt", weights_only=True)
    return kept[STEP * micro_batches : (STEP + 1) * micro_batches]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_process_and_both_together(runs, name, capsys):
    """Loss, terms, per-token values and gradients: equal to the bit after a trip to the disk, for each part and for both."""
    folder = snapshots(runs, "DDP", name)
    parts = [Snapshot.load(folder, rank) for rank in (0, 1)]
    whole = Snapshot.load(folder)
    assert [part.facts["rank"] for part in parts] == [0, 1]
    assert (whole.processes, whole.rows, whole.facts["rank"]) == (2, sum(part.rows for part in parts), "all")
    for snapshot in (*parts, whole):
        again = snapshot.replay()
        assert (again.loss, again.terms) == (snapshot.loss, snapshot.terms)
        for part, output, gradient in zip(snapshot.micro, again.outputs, again.gradients, strict=True):
            assert torch.equal(gradient, part.gradient)
            assert all(torch.equal(output.per_token[key], part.per_token[key]) for key in part.per_token)
        assert diff(snapshot, again.as_snapshot(snapshot)).headline.startswith("Nothing differs")
    assert whole.loss == sum(part.loss for part in parts) / 2
    assert_unchanged(folder)
    assert main(["snapshot", "diff", str(folder), str(folder)]) == 0
    assert "Nothing differs" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_one_that_trained(runs, name):
    """What the backward pass gave each process's log-probs, bit for bit."""
    assert Snapshot.load(snapshots(runs, "DDP", name)).replay().gradient_norm > 1e-4
    for rank in (0, 1):
        snapshot = Snapshot.load(snapshots(runs, "DDP", name), rank)
        gradients = trained(runs, "DDP", name, rank, len(snapshot.micro))
        for part, gradient in zip(snapshot.micro, gradients, strict=True):
            assert torch.equal(part.gradient, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_both_together_are_the_step_of_one_process(runs, name):
    """The same rows on one process: loss, terms, the gradient's norm, and what was logged."""
    one, two = (Snapshot.load(snapshots(runs, launch, name)) for launch in ("single", "DDP"))
    assert one.rows == two.rows
    assert two.loss == pytest.approx(one.loss, rel=1e-4, abs=1e-6)
    assert two.terms == pytest.approx(one.terms, rel=1e-4, abs=1e-6)
    assert two.replay().gradient_norm == pytest.approx(one.replay().gradient_norm, rel=1e-4)
    assert two.replay().stats == pytest.approx(one.replay().stats, rel=1e-3, abs=1e-5, nan_ok=True)
    logged = runs[0]["DDP"][name]["log"][STEP]
    assert two.loss == pytest.approx(logged["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_the_batches_are_padded_and_trimmed(runs):
    """Rows that end before their micro-batch does, and micro-batches of different widths, on each process."""
    for name in NAMES[:4]:
        for rank in (0, 1):
            micro = Snapshot.load(snapshots(runs, "DDP", name), rank).micro
            assert not all(bool(part.batch.mask.all()) for part in micro)
    widths = {part.batch.mask.shape[1] for name in NAMES for part in Snapshot.load(snapshots(runs, "DDP", name)).micro}
    assert len(widths) > 1
    masked = [Snapshot.load(snapshots(runs, "DDP", "snapshot_masked"), rank).micro[0].batch.mask for rank in (0, 1)]
    assert sorted(int(mask.sum()) > 0 for mask in masked) == [False, True]  # one process has nothing to learn from
