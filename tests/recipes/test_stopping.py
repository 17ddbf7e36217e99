"""What a recipe says when it ends before its time: one line, or a traceback for a bug, and when a process gives way to another."""

import json

import pytest
import torch
from reciperun import QUICK, one_error
from transformers import AutoConfig

from recipes import grpo, stopping
from trl_lossplus import LossPlusError
from trl_lossplus.diagnostics.guards import NonFiniteError
from trl_lossplus.trainers.failures import StoppedElsewhere

# What TRL, transformers and their friends refuse themselves: the words, and what the line holds.
REFUSED = {
    "vLLM": (["--use_vllm", "true"], r"vLLM is not available", "ImportError in trl/generation/vllm_generation.py:"),
    "no checkpoint": (["--resume_from_checkpoint", "empty"], "Can't find a valid checkpoint", "ValueError in transformers/trainer.py:"),
    "target modules": (
        ["--use_peft", "--lora_target_modules", "nowhere"],
        "Target modules nowhere not found in the base model",
        "Error in peft/tuners/",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_library_refuses_is_one_line_that_says_where(case, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "trainer_state.json").write_text("{}")
    words, what, where = REFUSED[case]
    line = one_error(grpo.main, [*QUICK, *words], capsys)
    assert what in line
    assert where in line


def test_a_folder_that_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / "runs" / "checkpoint-2").mkdir(parents=True)
    line = one_error(grpo.main, [*QUICK, "--resume_from_checkpoint", "runs"], capsys)
    assert line.endswith("resume_from_checkpoint='runs' is no checkpoint: it has no trainer_state.json; inside are checkpoint-2.")


def test_a_run_that_a_guard_stops_is_one_line_and_status_1(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bad_loss.py").write_text(
        "from trl_lossplus import PolicyTerm\n\ndef bad(batch, spec):\n    return PolicyTerm(batch.logps * float('nan'))\n"
    )
    assert grpo.main(["--policy_loss", "bad_loss:bad", *QUICK]) == 1
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert "step 1: loss is nan on rank 0" in line
    assert "Traceback" not in out + err


def test_a_bug_in_a_library_or_of_the_user_is_none(tmp_path):
    """A ValueError that python or torch raises, and one that the user's own file raises, keep their traceback."""
    for func in (lambda: int("x"), lambda: torch.zeros(2).view(3), lambda: json.loads("{"), lambda: [].remove(1)):
        with pytest.raises((ValueError, RuntimeError)) as raised, stopping.refusals(stopping.LIBRARIES):
            func()
        assert not isinstance(raised.value, LossPlusError)
    with pytest.raises(LossPlusError, match="in transformers/"), stopping.refusals(stopping.LIBRARIES):
        AutoConfig.for_model("no such kind")
    with pytest.raises(ValueError, match="no such kind") as raised, stopping.refusals(stopping.TRAINERS):
        AutoConfig.for_model("no such kind")  # once it trains, only the trainers' files are about what the user gave
    assert not isinstance(raised.value, LossPlusError)


@pytest.fixture
def waits(monkeypatch):
    """Two processes; how long each would have waited."""
    found = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(stopping.time, "sleep", found.append)
    return found


def test_who_speaks_and_who_waits(waits, monkeypatch, capsys):
    """The main process at once; another after it, unless all know that it has the word; one that only heard of it never."""
    told = KeyError("x")
    told.told_here = True
    cases = [
        ("0", LossPlusError("a b"), [], "error: a b\n", 2),
        ("1", LossPlusError("a b"), [stopping.WAIT], "error (process 1): a b\n", 2),
        ("0", NonFiniteError("step 1"), [], "error: step 1\n", 1),
        ("1", StoppedElsewhere("process 0"), [stopping.LAST], "", 1),
        ("0", StoppedElsewhere("process 1"), [stopping.LAST], "", 1),
        ("0", RuntimeError("gloo/transport: Connection closed by peer"), [stopping.LAST],
         "process 0: another process has gone; what it printed says why.\n", 1),
    ]  # fmt: skip
    for rank, error, waited, line, status in cases:
        waits.clear()
        monkeypatch.setenv("RANK", rank)
        assert stopping.end(error) == status
        assert waits == waited
        assert capsys.readouterr().err == line
    for rank, error, waited in (("0", KeyError("x"), []), ("1", KeyError("x"), [stopping.WAIT]), ("1", told, [])):
        waits.clear()
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(KeyError):
            stopping.end(error)
        assert waits == waited


def test_one_process_waits_for_none(monkeypatch, capsys):
    monkeypatch.setattr(stopping.time, "sleep", lambda seconds: pytest.fail("waited"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert stopping.end(LossPlusError("a")) == 2
    with pytest.raises(RuntimeError, match="Broken pipe"):
        stopping.end(RuntimeError("Broken pipe"))
