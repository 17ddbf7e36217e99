"""Guards: the first value that is not finite is named, the step is not taken, on every process alike."""

import json
import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from toyrun import SeeLoss, fixed_rollout, letter_reward, logged, trainer, weights

from trl_lossplus import LossBatch, LossSpec, compute_loss
from trl_lossplus.diagnostics.callback import LossDoctorCallback
from trl_lossplus.diagnostics.doctor import diagnose
from trl_lossplus.diagnostics.guards import ORDER, NonFiniteError, agree, bad_flags, first_bad
from trl_lossplus.diagnostics.runlog import read_run
from trl_lossplus.trainers.step_guard import StepGuard

NAN, INF = float("nan"), float("inf")


def outputs(**poison):
    """One micro-batch of 2 rows and 3 tokens, with values at (1, 1) replaced."""
    tensors = {
        "logps": torch.full((2, 3), -1.0), "old_logps": torch.full((2, 3), -1.0), "advantages": torch.ones(2, 3),
        "mask": torch.tensor([[True, True, False], [True, True, True]]), "ref_logps": torch.full((2, 3), -1.0),
        "values": torch.zeros(2, 3), "old_values": torch.zeros(2, 3), "returns": torch.zeros(2, 3),
    }  # fmt: skip
    for name, (place, value) in poison.items():
        tensors[name][place] = value
    tensors["logps"].requires_grad_()
    return compute_loss(LossBatch(**tensors), LossSpec(beta=0.1, vf_coef=0.5))


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("logps", NAN, "the model gave NaN"),
        ("logps", -INF, "probability 0"),
        ("old_logps", NAN, "the model gave NaN"),
        ("ref_logps", NAN, "the model gave NaN"),
        ("advantages", INF, "division by the spread"),
        ("values", NAN, "the critic diverged"),
    ],
)
def test_each_tensor_is_named_with_its_place_and_cause(name, value, cause):
    output = outputs(**{name: ((1, 1), value)})
    assert bad_flags(output).sum() >= 1
    bad = first_bad([outputs(), output], rank=3)
    assert (bad.tensor, bad.rank, bad.micro_batch, bad.row, bad.token) == (name, 3, 1, 1, 1)
    assert math.isnan(bad.value) if math.isnan(value) else bad.value == value
    assert len(bad.around) == 3
    assert cause in bad.cause
    sentence = bad.sentence(7)
    for word in ("step 7", name, "rank 3", "micro-batch 1", "row 1", "token 1"):
        assert word in sentence


def test_g3_the_first_in_the_order_of_the_data_flow():
    """G3: with several tensors bad, the first of logp, old, ref, ratio, advantage, value, loss is named."""
    order = ["logps", "old_logps", "ref_logps", "advantages", "values"]
    for i, name in enumerate(order):
        output = outputs(**{later: ((1, 2 - (j % 2)), NAN) for j, later in enumerate(order[i:])})
        assert first_bad([output], 0).tensor == name


def test_masked_positions_and_finite_batches_are_silent():
    clean = outputs(logps=((0, 2), NAN), advantages=((0, 2), INF), values=((0, 2), NAN))
    assert bad_flags(clean).sum() == 0
    assert first_bad([clean], 0) is None


def test_ranks_agree_on_the_first():
    """One rank found a bad advantage, another a bad log-prob: all name the log-prob; a rank that found nothing too."""
    advantage = first_bad([outputs(advantages=((1, 1), NAN))], 0)
    logp = first_bad([outputs(logps=((1, 1), NAN))], 1)
    assert agree([advantage, logp, None]) == logp
    assert agree([None, advantage]) == advantage


class Poison(SeeLoss):
    """Puts a NaN into the advantages of the micro-batches with the given numbers, at row 1."""

    def __init__(self, trained, where):
        super().__init__(trained)
        self.where, self.count = where, 0

    def __call__(self, model, inputs):
        if self.count in self.where:
            inputs = {**inputs, "advantages": inputs["advantages"].clone()}
            inputs["advantages"][1] = NAN
        self.count += 1
        return super().__call__(model, inputs)


def poisoned(toy, out, where, **fields):
    run = trainer(toy, out, reward=letter_reward, rollout=fixed_rollout, max_steps=6, **fields)
    Poison(run, where)
    return run


def test_g2_raise_stops_before_the_optimizer_step(toy, tmp_path):
    """G2: NaN at step 2 (of 2 micro-batches a step): an error with step, rank, tensor, row and texts; the weights are step 1's."""
    run = poisoned(toy, tmp_path, {3}, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    with pytest.raises(NonFiniteError, match=r"step 2: advantages is nan on rank 0, micro-batch 1, row 1, token 0") as error:
        run.train()
    assert "Prompt '" in str(error.value)
    assert "completion '" in str(error.value)
    assert "was not taken" in str(error.value)
    assert run.state.global_step == 1
    assert all(torch.isfinite(p).all() for p in weights(run).values())


def test_a_run_that_is_stopped_says_so_in_its_log(toy, tmp_path):
    """
    The counts are the last line of the log (row 1 of 8, 1 to 6 tokens), for trackers and the doctor's callback; the log lies in the output
    folder, where the doctor reads it, until the run is begun again.
    """
    doctor = LossDoctorCallback()
    run = poisoned(toy, tmp_path, {2}, callbacks=[doctor], snapshot_on=["finding", "nonfinite"])
    with pytest.raises(NonFiniteError, match="step 3: advantages is nan"):
        run.train()
    assert [entry["step"] for entry in run.state.log_history] == [1, 2, 3]
    assert "at step 3" in doctor.findings[0].seen.text
    assert json.loads((tmp_path / "stopped.json").read_text())["step"] == 3
    kept = {folder.name for folder in (tmp_path / "snapshots").iterdir()}  # these count from 0
    assert kept == {"step-00000002-finding", "step-00000002-nonfinite"}
    assert run.state.global_step == 2, "steps that were taken"
    assert logged(run, "nonfinite/advantages") == [0.0, 0.0, 1.0]  # one advantage a row
    assert logged(run, "nonfinite/logps") == [0.0, 0.0, 0.0]
    assert logged(run, "nonfinite/loss") == [0.0, 0.0, 1.0]
    assert "nonfinite/values" not in run.state.log_history[0]
    assert [finding.rule.id for finding in doctor.findings] == ["nonfinite_advantages"]
    findings = diagnose(read_run(tmp_path))
    assert [finding.rule.id for finding in findings if finding.severity == "error"] == ["nonfinite_advantages"]
    assert "row 1, token 0" in findings[0].seen.text
    again = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, max_steps=1)
    again.train()
    assert not (tmp_path / "stopped.json").exists()
    assert not (tmp_path / "trainer_state.json").exists()


def test_a_gradient_that_is_not_finite_is_named_by_the_doctor(toy, tmp_path):
    run = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout)
    with pytest.raises(NonFiniteError):
        run.guard.refuse_gradient(INF, False, 1, True)
    (finding,) = diagnose(read_run(tmp_path))
    assert finding.rule.id == "nan_logged"
    assert "the norm of the gradient is inf" in finding.seen.text


def test_finite_values_whose_sum_overflows_are_no_fault(toy, tmp_path):
    """Two ratios of 3e38: each is finite. The sum, which is what is looked at first, is not; the step is taken."""
    output = outputs()
    large = replace(output, per_token={**output.per_token, "ratio": torch.full((2, 3), 3e38)})
    assert bad_flags(large).sum() == 1
    guard = StepGuard("raise", 1)
    guard.see(large, {})
    assert guard.found
    guard.decide(True, Accelerator(cpu=True), 0, lambda mine: [mine], str)
    assert guard.counts == {f"nonfinite/{name}": 0.0 for name in ORDER}
    assert not guard.close()


def test_skip_drops_the_step_and_goes_on(toy, tmp_path, caplog):
    """skip: the poisoned step changes no weight (Adam's momentum and weight decay included), is counted and said; others train."""
    run = poisoned(toy, tmp_path, {2}, nonfinite_policy="skip", weight_decay=0.1)
    kept = []
    inner = run.training_step

    def watch(model, inputs, n=None):
        kept.append({name: tensor.clone() for name, tensor in weights(run).items()})
        return inner(model, inputs, n)

    run.training_step = watch
    run.train()
    kept.append(weights(run))
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(kept, kept[1:], strict=False)]
    assert same == [False, False, True, False, False, False]
    assert logged(run, "skipped_steps") == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert logged(run, "nonfinite/advantages") == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert sum("is dropped on every process" in record.message for record in caplog.records) == 1
    assert all(torch.isfinite(p).all() for p in weights(run).values())


def test_skip_stops_after_too_many_in_a_row(toy, tmp_path):
    run = poisoned(toy, tmp_path, {1, 2, 3}, nonfinite_policy="skip", nonfinite_max_skips=2)
    with pytest.raises(NonFiniteError, match="2 steps before it were dropped too"):
        run.train()
    apart_again = poisoned(toy, tmp_path, {1, 3, 5}, nonfinite_policy="skip", nonfinite_max_skips=1)
    apart_again.train()
    assert logged(apart_again, "skipped_steps")[-1] == 3.0


def test_what_a_run_logs_and_describes(toy, tmp_path):
    """Probes reach the log under their names; the output folder says which loss it was."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, beta=0.05, num_iterations=2, max_steps=2, probes="full"
    )
    run.train()
    first, second = run.state.log_history[:2]
    assert first["ratio/first_pass_deviation"] < 1e-5
    assert "ratio/first_pass_deviation" not in second
    assert first["mask/outside_completion"] == 0.0
    assert second["probe/log_ratio/q100"] > 0
    assert 0 < second["share/grad/kl"] < 1
    assert 0 < second["ratio/ess"] <= 1
    assert second["kl_penalty"] > 0
    described = json.loads((tmp_path / "lossplus.json").read_text())
    assert described["spec"]["beta"] == 0.05
    assert described["optimizer_steps_per_rollout"] == 2
    assert described["versions"]["trl"]
    table = run.loss_table(rows=2)
    assert len(table) == 4
    assert table[0]["policy"] >= table[-1]["policy"]
    assert table[0]["prompt"]
