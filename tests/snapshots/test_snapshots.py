"""Snapshots: whole on disk, replayed bit for bit, compared in the order of the data flow."""

import time
from dataclasses import replace

import pytest
import torch
from helpers import EVERY_OBJECTIVE
from made import step
from safetensors.torch import load_file
from toyrun import fixed_rollout, letter_reward, trainer

from trl_lossplus import (
    LossBatch,
    LossPlusError,
    LossSpec,
    PPOPlusConfig,
    PPOPlusTrainer,
    Snapshot,
    Window,
    compute_loss,
    replay,
)
from trl_lossplus.cli import main
from trl_lossplus.over_step import join
from trl_lossplus.snapshots.take import take


@pytest.mark.parametrize("name", EVERY_OBJECTIVE)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_saved_and_replayed_is_bit_identical(tmp_path, name, aggregation):
    """Loss, terms, per-token values and gradients, for every objective, after a trip to the disk."""
    spec = LossSpec(policy_loss=name, loss_aggregation=aggregation, beta=0.1, entropy_coef=0.01, vf_coef=0.3)
    snapshot, grads = step(spec)
    snapshot.save(tmp_path)
    loaded = Snapshot.load(tmp_path)
    assert loaded.spec == spec
    again = replay(loaded)
    assert again.loss == snapshot.loss
    assert again.terms == snapshot.terms
    assert all(torch.equal(a, b) for a, b in zip(again.gradients, grads, strict=True))
    for part, output in zip(loaded.micro, again.outputs, strict=True):
        assert all(torch.equal(part.per_token[key], output.per_token[key]) for key in part.per_token)


def test_replay_of_another_loss_and_a_sweep(tmp_path, capsys):
    """A variant is what compute_loss gives; a sweep prints a row each; the plot is an image."""
    step(LossSpec(beta=0.1))[0].save(tmp_path)
    snapshot = Snapshot.load(tmp_path)
    other = replay(snapshot, LossSpec(beta=0.1, policy_loss="gspo"))
    tokens = sum(int(part.batch.mask.sum()) for part in snapshot.micro)
    expected = sum(
        compute_loss(part.batch, LossSpec(beta=0.1, policy_loss="gspo"), Window(tokens, 6)).loss.item() for part in snapshot.micro
    )
    assert other.loss == pytest.approx(expected, rel=1e-6)
    pytest.importorskip("matplotlib", reason="the plot needs the extra `report`")
    plot = tmp_path / "sweep.png"
    assert main(["replay", str(tmp_path), "--epsilon", "0.05,0.1,0.3", "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[1].startswith("as it was")
    clipped = [float(line.split("%")[0].split()[-1]) for line in lines[2:]]
    assert clipped == sorted(clipped, reverse=True)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert main(["replay", str(tmp_path), "--policy_loss", "gspo"]) == 0
    assert "gain: row" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["kl_cov", "real"])
def test_what_an_objective_computes_over_the_step_is_made_anew(tmp_path, name):
    """Under another loss the choice is that of all rows of the step at once; of a part of them there is none, and that is said."""
    step(LossSpec(beta=0.1), lambda b: replace(b, row_ids=torch.arange(len(b.mask)) + 10 * len(b.mask)))[0].save(tmp_path)
    snapshot = Snapshot.load(tmp_path)
    spec = LossSpec(beta=0.1, policy_loss=name, kl_cov_ratio=0.3, kl_cov_coef=2.0)
    again = replay(snapshot, spec)
    whole = join([part.batch for part in snapshot.micro])
    output = compute_loss(
        replace(whole, logps=whole.logps.requires_grad_()), spec, Window(int(whole.mask.sum()), len(whole.mask))
    )
    (gradient,) = torch.autograd.grad(output.loss, whole.logps)
    assert again.loss == pytest.approx(output.loss.item(), rel=1e-6)
    assert torch.allclose(torch.cat(again.gradients), gradient, atol=1e-7)
    with pytest.raises(LossPlusError, match=f"policy_loss='{name}' looks at all rows .*: 1 of 2 processes' are here"):
        replay(replace(snapshot, facts={"processes": 2}), spec)
    with pytest.raises(LossPlusError, match="3 rows were left out"):
        replay(replace(snapshot, facts={"rows_left_out": 3}), spec)


def test_what_a_replay_cannot_redo_is_refused(tmp_path, capsys):
    step(LossSpec())[0].save(tmp_path)
    assert main(["replay", str(tmp_path), "--advantage_estimator", "rloo"]) == 2
    assert (
        "advantage_estimator='rloo': it acted at the rollout, and the snapshot does not hold the rewards"
        in capsys.readouterr().err
    )
    assert main(["replay", str(tmp_path), "--rollout_rs", "token_k2", "--rollout_rs_threshold", "0.1"]) == 2
    assert "rollout_rs='token_k2': it acted at the rollout" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--epsilom", "0.1"]) == 2
    assert "Did you mean 'epsilon'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--epsilon", ""], "--epsilon '': a value is empty"),
        (["--epsilon", "0.1,,0.2"], "--epsilon '0.1,,0.2': a value is empty"),
        (["--epsilon", "null"], "epsilon=None"),
        (["--config", "[1, 2]"], "it must map fields of the loss to values, and holds a list"),
        (["--config", "a: [1"], "is not YAML"),
        (["--config", "learning_rate: 1"], "'learning_rate' is not known"),
    ],
)
def test_unusual_words_of_a_replay_are_one_line_of_error(tmp_path, capsys, words, why):
    step(LossSpec())[0].save(tmp_path / "kept")
    if words[0] == "--config":
        (tmp_path / "config.yaml").write_text(words[1])
        words = ["--config", str(tmp_path / "config.yaml")]
    assert main(["replay", str(tmp_path / "kept"), *words]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


def test_a_replay_under_a_file_of_fields(tmp_path, capsys):
    """--config is the base, flags go over it."""
    step(LossSpec(beta=0.1))[0].save(tmp_path / "kept")
    (tmp_path / "config.yaml").write_text("policy_loss: gspo\nepsilon: 0.1\n")
    outs = []
    for words in (
        ["--config", str(tmp_path / "config.yaml"), "--beta", "0.2"],
        ["--policy_loss", "gspo", "--epsilon", "0.1", "--beta", "0.2"],
    ):
        assert main(["replay", str(tmp_path / "kept"), *words]) == 0
        outs.append(capsys.readouterr().out.splitlines()[2].split()[-7:])
    assert outs[0] == outs[1]


def test_64_rows_of_2048_tokens_in_under_a_second():
    """CPU seconds of one variant, for the objectives that take longest (benchmarks/replay.py has them all)."""
    g = torch.Generator().manual_seed(0)
    logps = -torch.rand(64, 2048, generator=g)
    batch = LossBatch(logps, logps + 0.1 * torch.randn(64, 2048, generator=g), torch.randn(64), torch.ones(64, 2048).bool())
    snapshot = take(LossSpec(), [(compute_loss(batch, LossSpec()), {"window": None})], facts={}, texts={}, max_rows=64)
    for name in ("gspo", "fipo", "clip_cov", "kl_cov", "gmpo"):
        before = time.process_time()
        replay(snapshot, LossSpec(policy_loss=name))
        assert time.process_time() - before < 1.0, name


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_the_trainer_writes_the_steps_that_are_asked_for(toy, tmp_path, kind):
    """Step 1's snapshot replays to the logged loss; an adaptive coefficient is the one that was used; texts are there."""
    fields = {"snapshot_steps": [1], "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 2}
    if kind == "grpo":
        fields |= {"beta": 0.1, "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 50.0}
        run = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, **fields)
    else:
        run = trainer(
            toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, trainer_class=PPOPlusTrainer, config_class=PPOPlusConfig,
            critic="shared", **fields,
        )  # fmt: skip
    run.train()
    (folder,) = (tmp_path / "snapshots").iterdir()
    assert folder.name == "step-00000001-step"
    snapshot = Snapshot.load(folder)
    assert snapshot.facts["step"] == 1
    assert snapshot.rows == 8
    assert len(snapshot.texts["completion"]) == 8
    assert replay(snapshot).loss == pytest.approx(run.state.log_history[1]["loss"], rel=1e-5, abs=1e-7)
    assert replay(snapshot).terms == snapshot.terms
    if kind == "grpo":
        assert snapshot.spec.beta == pytest.approx(run.state.log_history[1]["kl_coef"], rel=1e-9)
    names = load_file(folder / "rank-0.safetensors").keys()
    assert "0/batch/logps" in names
    assert ("0/batch/values" in names) == (kind == "ppo")


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_a_trainers_step_is_bit_identical_in_every_layout(toy, tmp_path, layout):
    """Loss, per-token values and gradient of an off-policy step, from the disk."""
    fields = {"snapshot_steps": [1], "num_iterations": 2, "beta": 0.1, "max_steps": 2, "microbatch_layout": layout}
    trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, **fields).train()
    snapshot = Snapshot.load(tmp_path / "snapshots" / "step-00000001-step")
    again = snapshot.replay()
    assert (again.loss, again.terms) == (snapshot.loss, snapshot.terms)
    assert again.gradient_norm > 1e-4
    for part, output, gradient in zip(snapshot.micro, again.outputs, again.gradients, strict=True):
        assert torch.equal(gradient, part.gradient)
        assert all(torch.equal(output.per_token[key], part.per_token[key]) for key in part.per_token)


def test_a_step_that_is_not_finite_is_kept(toy, tmp_path):
    from trl_lossplus.diagnostics.guards import NonFiniteError

    run = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, snapshot_on="nonfinite", max_steps=3)
    inner = run.micro_loss

    def poison(model, inputs):
        inputs["advantages"][0] = float("nan")
        return inner(model, inputs)

    run.micro_loss = poison
    with pytest.raises(NonFiniteError):
        run.train()
    snapshot = Snapshot.load(tmp_path / "snapshots" / "step-00000000-nonfinite")
    assert torch.isnan(snapshot.micro[0].batch.advantages[0]).all()
