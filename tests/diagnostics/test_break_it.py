"""Real runs on the toy, broken on purpose, and the doctor's word about each. recipes/break_it.py runs all of them and the healthy ones."""

import contextlib
import logging
import math

import pytest
import torch
from toyrun import SETTINGS, toy_path
from trl import GRPOConfig, GRPOTrainer

from recipes import break_it
from recipes.break_it import RUNS, execute, verdict
from trl_lossplus.diagnostics.doctor import diagnose
from trl_lossplus.diagnostics.runlog import read_run
from trl_lossplus.toy import keyword_reward, toy_dataset

FAULTS = {"reward_hacking", "nan_ratio", "nan_flat_group", "double_normalization", "prompt_in_mask", "dropout", "stale_old_logps",
          "homogeneous", "min_max_swapped", "min_max_setting", "kl_flipped"}  # fmt: skip
QUICK = ("nan_ratio", "nan_flat_group", "double_normalization", "dropout", "homogeneous", "min_max_swapped", "kl_flipped")


@pytest.fixture(scope="module", autouse=True)
def quiet():
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    yield
    logging.disable(level)
    torch.set_num_threads(threads)


def test_every_fault_of_the_list_is_there():
    assert {name for name, run in RUNS.items() if run.rule is not None} == FAULTS
    assert len([run for run in RUNS.values() if run.rule is None]) >= 5


def test_the_list_and_a_wrong_name(capsys):
    assert break_it.main(["--list"]) == 0
    assert "kl_flipped" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        break_it.main(["--only", "nothing"])


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_doctor_names_the_fault_first(name, tmp_path):
    findings = diagnose(read_run(execute(RUNS[name], tmp_path / name)))
    assert verdict(RUNS[name], findings), [finding.rule.id for finding in findings]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["healthy_on_policy", "healthy_lora"])
def test_a_healthy_run_has_no_warning(name, tmp_path):
    findings = diagnose(read_run(execute(RUNS[name], tmp_path / name)))
    assert verdict(RUNS[name], findings), [finding.rule.id for finding in findings]


def plain_trl(folder, **fields):
    """TRL's own trainer, and the trainer_state.json that it leaves in a checkpoint."""
    args = GRPOConfig(
        output_dir=str(folder / "run"), **{**SETTINGS, "max_steps": 16, "save_strategy": "steps", "save_steps": 16, **fields}
    )
    trainer = GRPOTrainer(model=toy_path(folder / "toy"), reward_funcs=keyword_reward, args=args, train_dataset=toy_dataset())
    trainer.train()
    return read_run(folder / "run")


@pytest.mark.slow
def test_a_plain_trl_run(tmp_path):
    """TRL's trainer with greedy sampling: no signal; on-policy, clipping cannot act."""
    run = plain_trl(tmp_path, top_k=1)
    assert run.kind == "trl"
    ids = [finding.rule.id for finding in diagnose(run)]
    assert ids[0] == "no_signal"
    assert "on_policy" in ids


class Broken(GRPOTrainer):
    """TRL's trainer with a loss that is NaN from the third step on."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        return loss * math.nan if self.state.global_step >= 2 else loss


@pytest.mark.slow
def test_a_nan_in_a_plain_trl_run(tmp_path):
    """G2: TRL logs loss 0.0, writes NaN weights and fails at the next rollout; its log names the step."""
    args = GRPOConfig(output_dir=str(tmp_path / "run"), **{**SETTINGS, "max_steps": 6})
    trainer = Broken(model=toy_path(tmp_path / "toy"), reward_funcs=keyword_reward, args=args, train_dataset=toy_dataset())
    with contextlib.suppress(RuntimeError, ValueError):  # sampling from NaN weights fails
        trainer.train()
    trainer.state.save_to_json(str(tmp_path / "trainer_state.json"))
    first = diagnose(read_run(tmp_path / "trainer_state.json"))[0]
    assert (first.rule.id, first.seen.first) == ("nan_logged", 3)
    assert "grad_norm" in first.seen.text
