"""loss_table_rows: which rows have the largest and the smallest policy loss, by hand, on one and two processes, and in the report."""

import json
from types import SimpleNamespace

import pytest
import torch
from test_two_processes import launch
from toyrun import fixed_rollout, letter_reward, trainer

from trl_lossplus import LossBatch, LossSpec, compute_loss
from trl_lossplus.diagnostics.report import report
from trl_lossplus.diagnostics.runlog import read_run
from trl_lossplus.trainers.loss_table import FILE, LogLossTable, loss_table


def step(advantages, mask):
    """One micro-batch in which every ratio is 1: the policy loss is minus the advantage."""
    mask = torch.tensor(mask, dtype=torch.bool)
    logps = torch.full(mask.shape, -1.0)
    batch = LossBatch(logps, logps, torch.tensor(advantages), mask)
    ids = torch.arange(len(mask)).unsqueeze(1)
    return compute_loss(batch, LossSpec()), {"prompt_ids": ids, "completion_ids": ids + 10}


def test_rows_by_hand():
    """Losses 1, -2, 3 and, without a token, none; 0.5 from a second micro-batch; worst first, ends only."""
    whole = [step([-1.0, 2.0, -3.0, 9.0], [[1, 1], [1, 0], [1, 1], [0, 0]]), step([-0.5], [[0, 1]])]
    table = loss_table(whole, lambda ids: f"text {int(ids)}", rows=1)
    assert [(row["policy"], row["advantage"], row["tokens"], row["prompt"], row["completion"]) for row in table] == [
        (3.0, -3.0, 2, "text 2", "text 12"),
        (-2.0, 2.0, 1, "text 1", "text 11"),
    ]
    assert [row["policy"] for row in loss_table(whole, str, rows=5)] == [3.0, 1.0, 0.5, -2.0]
    assert loss_table([], str) == []


def test_what_is_not_finite_stands_first_and_is_written_as_null(tmp_path):
    rows = loss_table([step([1.0, float("nan"), -1.0], [[1], [1], [1]])], str, rows=1)
    assert [str(row["policy"]) for row in rows] == ["nan", "-1.0"]
    accelerator = SimpleNamespace(gather=None, num_processes=1, device="cpu")
    callback = LogLossTable(SimpleNamespace(accelerator=accelerator, loss_table=lambda n: rows))
    args = SimpleNamespace(loss_table_rows=1, should_save=True, output_dir=str(tmp_path))
    for logs in (None, {"eval_loss": 1.0}, {"train_loss": 1.0}, {"loss": 1.0}):
        callback.on_log(args, SimpleNamespace(global_step=3), None, logs=logs)
    written = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(row["step"], row["process"], row["policy"]) for row in written] == [(3, 0, None), (3, 0, -1.0)]


def read(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_run_writes_it_and_the_report_shows_it(toy, tmp_path):
    """Each logged step's rows are what trainer.loss_table gives; a second run begins the file again."""
    run = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, loss_table_rows=2, max_steps=3)
    for _ in range(2):
        run.state.global_step = 0
        run.train()
        rows = read(tmp_path)
        assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 4
    last = run.loss_table(2)
    assert [row["completion"] for row in rows[-4:]] == [row["completion"] for row in last]
    assert rows[-4]["policy"] == pytest.approx(-rows[-4]["advantage"], rel=1e-5)
    run.state.save_to_json(str(tmp_path / "trainer_state.json"))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"torn\n[]\n{"step": "x"}\n{"prompt": 1}\n')
    page = report(read_run(tmp_path))
    section = page[page.index("smallest policy loss") :].split("</section>")[0]
    assert section.count("<tr>") == 1 + 12
    assert last[0]["completion"] in section


def test_nothing_is_written_without_being_asked_for(toy, tmp_path):
    trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, max_steps=1).train()
    assert not (tmp_path / FILE).exists()


@pytest.mark.slow
def test_two_processes_give_the_rows_of_one(toy, tmp_path):
    """The same rows, whichever process held them; both held some."""
    one, two = (tmp_path / name for name in ("one", "two"))
    launch(1, toy, one, {"loss_table_rows": 4, "max_steps": 2})
    launch(2, toy, two, {"loss_table_rows": 4, "max_steps": 2})
    losses = [sorted(row["step"] * 100 + row["policy"] for row in read(folder)) for folder in (one, two)]
    assert len(losses[0]) == 16
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert {row["process"] for row in read(two)} == {0, 1}
