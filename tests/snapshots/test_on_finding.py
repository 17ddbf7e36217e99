"""snapshot_on=finding: the step at which the doctor finds something new, once a finding, on every process, so many a run."""

from dataclasses import replace

import pytest
from test_two_processes import launch
from toyrun import fixed_rollout, letter_reward, trainer

from recipes.break_it import PromptInMask
from trl_lossplus import Snapshot
from trl_lossplus.diagnostics.callback import LossDoctorCallback
from trl_lossplus.diagnostics.rule import Finding
from trl_lossplus.diagnostics.rules import RULES
from trl_lossplus.diagnostics.view import Seen


def folders(out):
    return sorted(folder.name for folder in (out / "snapshots").iterdir()) if (out / "snapshots").exists() else []


def test_an_event_is_kept_at_its_step(toy, tmp_path):
    """A mask that reaches into the prompt shows in step 0: that step is kept, once, and the finding stands in it."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, trainer_class=PromptInMask, snapshot_on="finding", max_steps=3
    )
    run.train()
    assert folders(tmp_path) == ["step-00000000-finding"]
    snapshot = Snapshot.load(tmp_path / "snapshots" / "step-00000000-finding")
    assert snapshot.facts["step"] == 0
    assert snapshot.loss == pytest.approx(run.state.log_history[0]["loss"], rel=1e-5)
    (told,) = snapshot.facts["findings"]
    assert told.startswith("error: The loss reads prompt or padding tokens (step 1)")
    assert snapshot.replay().loss == snapshot.loss


def test_nothing_is_kept_without_the_word(toy, tmp_path):
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, trainer_class=PromptInMask, snapshot_on="nonfinite",
        callbacks=[LossDoctorCallback()], max_steps=2,
    )  # fmt: skip
    run.train()
    assert folders(tmp_path) == []
    assert [one for one in run.callback_handler.callbacks if isinstance(one, LossDoctorCallback)][0].findings


class Alarmist(LossDoctorCallback):
    """Finds something new at every logged step, and once more what it has found before."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            seen = Seen(first=state.global_step, last=state.global_step, numbers={}, text="all")
            rules = [replace(RULES[0], id=f"made up {step}") for step in (state.global_step, 1)]
            self.on_findings([Finding(rule, "warning", seen) for rule in rules])

    def on_train_end(self, args, state, control, **kwargs):
        pass


def test_eight_a_run_and_the_users_own_doctor_is_heard(toy, tmp_path):
    doctor = Alarmist()
    run = trainer(
        toy,
        tmp_path,
        reward=letter_reward,
        rollout=fixed_rollout,
        snapshot_on=["nonfinite", "finding"],
        callbacks=[doctor],
        max_steps=11,
    )
    run.train()
    assert folders(tmp_path) == [f"step-{step:08d}-finding" for step in range(8)]
    assert [one for one in run.callback_handler.callbacks if isinstance(one, LossDoctorCallback)] == [doctor]


@pytest.mark.slow
def test_both_processes_write_their_part(toy, tmp_path):
    """All completions are cut off, which is found at the twentieth logged step, while training, and not kept a second time."""
    settings = {"snapshot_on": "finding", "max_steps": 22, "num_iterations": 2}
    _, facts = launch(2, toy, tmp_path / "two", settings)
    assert facts["processes"] == 2
    assert folders(tmp_path / "two")[0] == "step-00000019-finding"
    kept = [Snapshot.load(tmp_path / "two" / "snapshots" / name) for name in folders(tmp_path / "two")]
    assert sum("cut off" in told for one in kept for told in one.facts["findings"]) == 1
    snapshot = Snapshot.load(tmp_path / "two" / "snapshots" / "step-00000019-finding")
    assert snapshot.processes == 2
    assert snapshot.rows == 16
    assert any("cut off" in told for told in snapshot.facts["findings"])
    assert snapshot.replay().loss == snapshot.loss
    assert snapshot.loss == pytest.approx(facts["log"][19]["loss"], rel=1e-4, abs=1e-6)
