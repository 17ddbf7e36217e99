"""Snapshots: whole on disk, replayed bit for bit, compared in the order of the data flow."""

import json
import time
from dataclasses import replace

import pytest
import torch
from helpers import EVERY_OBJECTIVE
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
    diff,
    replay,
)
from trl_lossplus.cli import main
from trl_lossplus.snapshots.store import snapshot_folder, take


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


def step(spec, change=None):
    """An optimizer step of two micro-batches: its snapshot and the gradients that it had."""
    batches = [rows(0), rows(1, n=2)]
    if change is not None:
        batches = [change(batch) for batch in batches]
    tokens = sum(batch.mask.sum() for batch in batches)
    window = Window(tokens, torch.tensor(6), torch.tensor(3))
    outputs = []
    for batch in batches:
        output = compute_loss(batch, spec, window)
        output.loss.backward()
        outputs.append((output, {"window": window}))
    texts = {"prompt": ["p"] * 6, "completion": [f"row {i}" for i in range(6)]}
    snapshot = take(spec, outputs, facts={"step": 3}, texts=texts, max_rows=100)
    return snapshot, [batch.logps.grad for batch in batches]


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


CHANGES = {
    "epsilon": (LossSpec(epsilon=0.1), None, "Only the policy term changed: epsilon 0.2 -> 0.1."),
    "estimator": (LossSpec(beta=0.1, kl_estimator="k2"), None, "Only the kl term changed: kl_estimator 'k3' -> 'k2'."),
    "kl sign": (
        LossSpec(beta=0.1),
        lambda b: replace(b, ref_logps=2 * b.logps.detach() - b.ref_logps),
        "ref_logps changed, and after it kl",
    ),
    "mask": (LossSpec(), lambda b: replace(b, mask=b.mask & (torch.arange(6) < 4)), "mask changed, and after it"),
    "aggregation": (
        LossSpec(loss_aggregation="token_sum"),
        None,
        "The per-token losses are equal; what they are added up to changed: loss_aggregation",
    ),
    "normalization": (LossSpec(), lambda b: replace(b, advantages=b.advantages / 2), "advantages changed, and after it policy"),
    "token weights": (
        LossSpec(),
        lambda b: replace(b, token_weights=torch.full((len(b.mask), 6), 2.0)),
        "token_weights: missing in A",
    ),
    "gamma": (LossSpec(vf_coef=0.3), lambda b: replace(b, returns=0.9 * b.returns), "returns changed, and after it value"),
    "dual clip": (LossSpec(clip_ratio_c=1.01), None, "Only the policy term changed: clip_ratio_c None -> 1.01."),
    "dtype": (LossSpec(), lambda b: replace(b, group_ids=b.group_ids.int()), "group_ids: dtype torch.int64 and torch.int32"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_headline_names_what_was_changed(tmp_path, capsys, name):
    """Ten kinds of change: each is named in the first line; the update's numbers and the moved tokens follow."""
    spec, change, words = CHANGES[name]
    before = LossSpec(beta=spec.beta, vf_coef=spec.vf_coef)
    step(before)[0].save(tmp_path / "a")
    step(spec, change)[0].save(tmp_path / "b")
    found = diff(Snapshot.load(tmp_path / "a"), Snapshot.load(tmp_path / "b"))
    assert found.headline.startswith(words), found.headline
    assert main(["snapshot", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == found.headline
    assert "gradient cosine" in printed


def test_diff_of_the_same(tmp_path, capsys):
    step(LossSpec())[0].save(tmp_path)
    assert main(["snapshot", "diff", str(tmp_path), str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["headline"].startswith("Nothing differs")
    assert found["cosine"] == pytest.approx(1.0, abs=1e-6)


def test_diff_places_and_sizes(tmp_path):
    """One advantage moved by 3 in the second micro-batch: tensor, size, place and the token whose loss moved."""

    def move(batch):
        if len(batch.mask) == 2:
            advantages = batch.advantages.clone()
            advantages[1, 2] += 3
            return replace(batch, advantages=advantages, mask=torch.ones(2, 6, dtype=torch.bool))
        return batch

    def widen(batch):
        return replace(batch, mask=torch.ones(2, 6, dtype=torch.bool)) if len(batch.mask) == 2 else batch

    a, b = step(LossSpec(), widen)[0], step(LossSpec(), move)[0]
    found = diff(a, b)
    (change,) = found.inputs
    assert (change.name, change.positions, change.where) == ("advantages", 1, (1, 1, 2))
    assert change.largest == pytest.approx(3.0)
    assert [(entry["row"], entry["token"]) for entry in found.tokens] == [(5, 2)]
    assert found.tokens[0]["completion"] == "row 5"
    assert len(found.row_cosines) == 6


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


def test_what_a_replay_cannot_redo_is_refused(tmp_path, capsys):
    step(LossSpec())[0].save(tmp_path)
    assert main(["replay", str(tmp_path), "--advantage_estimator", "rloo"]) == 2
    assert "advantage_estimator='rloo': it acted at the rollout" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--epsilom", "0.1"]) == 2
    assert "Did you mean 'epsilon'" in capsys.readouterr().err


def test_64_rows_of_2048_tokens_in_under_a_second(tmp_path):
    g = torch.Generator().manual_seed(0)
    logps = -torch.rand(64, 2048, generator=g)
    batch = LossBatch(logps, logps + 0.1 * torch.randn(64, 2048, generator=g), torch.randn(64), torch.ones(64, 2048).bool())
    output = compute_loss(batch, LossSpec())
    snapshot = take(LossSpec(), [(output, {"window": None})], facts={}, texts={}, max_rows=64)
    before = time.process_time()
    replay(snapshot, LossSpec(policy_loss="gspo"))
    assert time.process_time() - before < 1.0


def test_bounded_size():
    spec = LossSpec()
    batches = [rows(0), rows(1)]
    outputs = [(compute_loss(batch, spec), {"window": None}) for batch in batches]
    snapshot = take(spec, outputs, facts={}, texts={"completion": list("abcdefgh")}, max_rows=5)
    assert snapshot.rows == 5
    assert snapshot.facts["rows_left_out"] == 3
    assert snapshot.texts["completion"] == list("abcde")


def test_damaged_foreign_and_newer_files(tmp_path):
    """One clear line each; nothing is executed on load (safetensors and JSON only)."""
    step(LossSpec())[0].save(tmp_path)
    good, tensors = (tmp_path / "rank-0.json").read_text(), (tmp_path / "rank-0.safetensors").read_bytes()
    with pytest.raises(LossPlusError, match="no snapshot here"):
        Snapshot.load(tmp_path / "nowhere")
    for text, words in (
        (good[: len(good) // 2], "truncated"),
        ('{"a": 1}', "not a snapshot of trl-lossplus"),
        (json.dumps({**json.loads(good), "format": 99}), "format 99 is newer"),
        (json.dumps({**json.loads(good), "spec": {"policy_los": "x"}}), "policy_los"),
    ):
        (tmp_path / "rank-0.json").write_text(text)
        with pytest.raises(LossPlusError, match=words) as error:
            Snapshot.load(tmp_path)
        assert "\n" not in str(error.value)
    (tmp_path / "rank-0.json").write_text(good)
    (tmp_path / "rank-0.safetensors").write_bytes(tensors[: len(tensors) // 2])
    with pytest.raises(LossPlusError, match="cannot be read"):
        Snapshot.load(tmp_path)


def test_a_name_that_would_leave_the_folder_is_refused(tmp_path):
    with pytest.raises(LossPlusError, match="only letters, digits"):
        snapshot_folder(tmp_path, 1, "../elsewhere")
    assert snapshot_folder(tmp_path, 12, "step") == tmp_path / "step-00000012-step"


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
