"""The doctor while training: each finding once, at its step, at no cost that grows."""

import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic import STEPS, at, healthy
from toyrun import toy_path, trainer

from trl_lossplus.diagnostics.callback import LossDoctorCallback


class Settings:
    """A configuration with nothing of ours."""

    def __init__(self, **fields):
        vars(self).update(fields)


def play(callback, columns, steps=STEPS, main=True, settings=None):
    """Logs the columns step by step."""
    state = SimpleNamespace(log_history=[], is_world_process_zero=main, global_step=0)
    args = settings or Settings(is_on_policy=False, epsilon=0.2)
    callback.on_train_begin(args, state, None)
    for i in range(steps):
        state.global_step = i + 1
        callback.on_log(args, state, None, logs={name: float(v[i]) for name, v in columns.items() if not np.isnan(v[i])})
    callback.on_log(args, state, None, logs={"train_runtime": 1.0, "train_loss": 0.0})
    callback.on_log(args, state, None, logs={"eval_reward": 0.5})
    callback.on_train_end(args, state, None)
    return callback


def test_events_are_told_at_their_step_and_once(caplog):
    columns = {**healthy(), "nonfinite/ratio": at(70, 3.0), "mask/outside_completion": at(90, 2.0)}
    with caplog.at_level(logging.WARNING):
        callback = play(LossDoctorCallback(), columns)
    assert [(f.rule.id, f.seen.first) for f in callback.findings] == [("nonfinite_ratio", 70), ("mask_outside", 90)]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all(message.startswith("loss doctor: error: ") and "\n" not in message for message in messages)
    assert "log_ratio_clamp: 20" in messages[0]


def test_trends_are_told_while_training():
    columns = {**healthy(), "loss/kl": -0.04 * healthy()["kl"]}
    callback = LossDoctorCallback()
    play(callback, columns, steps=40)
    assert [f.rule.id for f in callback.findings] == ["kl_sign"]


def test_healthy_run_is_silent(caplog):
    with caplog.at_level(logging.INFO):
        assert play(LossDoctorCallback(), healthy()).findings == []
    assert not caplog.records


def test_notes_on_request():
    assert [f.severity for f in play(LossDoctorCallback(least="info"), healthy()).findings] == ["info"]
    with pytest.raises(ValueError, match="least='loud'"):
        LossDoctorCallback(least="loud")


def test_only_the_main_process_speaks():
    assert play(LossDoctorCallback(), {**healthy(), "nonfinite/ratio": at(70, 3.0)}, main=False).findings == []


def test_a_resumed_run_goes_on():
    """The log before the checkpoint counts, and what it told is told again only by its trend at the end."""
    columns = healthy()
    callback = LossDoctorCallback()
    history = [{"step": i + 1, "epoch": 0.1} | {k: float(v[i]) for k, v in columns.items()} for i in range(100)]
    history.insert(50, {"step": 50, "eval_loss": 1.0})
    state = SimpleNamespace(log_history=history, is_world_process_zero=True, global_step=100)
    callback.on_train_begin(Settings(), state, None)
    callback.on_log(Settings(), state, None, logs={"loss": 0.0, "grad_norm": float("nan"), "step": 101})
    assert [f.rule.id for f in callback.findings] == ["nan_logged"]


def test_dropout_is_read_from_the_model():
    from torch import nn

    columns = {**healthy(), "ratio/first_pass_deviation": at(5, 0.5), "probe/log_ratio/q50": np.full(STEPS, 0.05)}
    callback = LossDoctorCallback()
    state = SimpleNamespace(log_history=[], is_world_process_zero=True, global_step=0)
    callback.on_train_begin(Settings(), state, None, model=nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    for i in range(60):
        state.global_step = i + 1
        callback.on_log(None, state, None, logs={name: float(v[i]) for name, v in columns.items()})
    assert callback.findings[0].rule.id == "ratio_first_pass"
    assert "dropout acts in 1" in callback.findings[0].seen.text


def test_cost_a_step():
    """Below 5 ms a logged step of processor time, over 2,500 steps with 50 metrics."""
    n = 2500
    columns = healthy(n)
    start = time.process_time()
    callback = play(LossDoctorCallback(keep=1000), columns, steps=n)
    assert (time.process_time() - start) / n < 5e-3
    assert len(callback._entries) <= 1000
    assert callback.findings == []


@pytest.mark.slow
def test_in_a_real_run(tmp_path, caplog):
    """On a trainer of ours whose settings are wrong, with the settings read from its configuration."""
    callback = LossDoctorCallback()
    fields = {"clip_objective": "max", "num_iterations": 2, "max_steps": 4}
    with caplog.at_level(logging.ERROR):
        trainer(toy_path(tmp_path / "toy"), tmp_path / "out", callbacks=[callback], **fields).train()
    assert "clip_wrong_side" in {f.rule.id for f in callback.findings}
    assert any("loss doctor: error: The clip acts on the wrong side" in record.getMessage() for record in caplog.records)
