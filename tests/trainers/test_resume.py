"""A run that is interrupted anywhere and resumed ends bit for bit as one that was not: weights, optimizer, prompts, metrics."""

import logging

import pytest
import torch
from resume_run import CLOCKS, KL, build, copied, resumed

from trl_lossplus import LossPlusError
from trl_lossplus.toy import toy_dataset


def everything(run):
    """Weights and the optimizer's state by name, and the logged metrics but for clocks."""
    tensors = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    for i, state in run.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer {i} {name}": torch.as_tensor(x).clone() for name, x in state.items()}
    log = [{name: x for name, x in entry.items() if not any(word in name for word in CLOCKS)} for entry in run.state.log_history]
    return tensors, log


def check(toy, tmp_path, steps, **fields):
    """Trains once in one go, then again from the checkpoints of `steps`; returns the uninterrupted run."""
    whole = build(toy, tmp_path / "whole", **fields)
    whole.train()
    tensors, log = everything(whole)
    for step in steps:
        again = resumed(toy, tmp_path / "whole", step, **fields)
        ours, entries = everything(again)
        assert ours.keys() == tensors.keys()
        assert [name for name in tensors if not torch.equal(ours[name], tensors[name])] == [], step
        assert entries == log, step
        assert again.kl_controller.coef == whole.kl_controller.coef
        assert again.rollouts == whole.rollouts[-(-step // 4) :]  # none made again
    return whole


@pytest.mark.parametrize(
    ("steps", "fields"),
    [
        pytest.param((3, 6, 8), {}, id="GRPO"),
        pytest.param((3, 6), {"critic": "adapter", **KL}, id="adapter critic, adaptive KL"),
        pytest.param((6,), {"critic": "shared"}, id="shared critic"),
        pytest.param((3,), {"critic": "model"}, id="model critic"),
    ],
)
def test_resumed_is_uninterrupted(toy, tmp_path, steps, fields):
    """Inside a rollout, and after a whole number of passes: prompts, metrics, policy, critic, optimizer and coefficient are the same."""
    whole = check(toy, tmp_path, steps, **fields)
    assert len({str(rollout) for rollout in whole.rollouts}) == 3  # each pass has an order of its own


@pytest.mark.parametrize(
    ("steps", "fields"),
    [
        pytest.param((3,), {"microbatch_layout": "shared_prefix", "skip_still_rows": True}, id="packed, still rows skipped"),
        pytest.param((3,), {"max_tokens_per_microbatch": 16}, id="micro-batches in parts"),
        pytest.param(
            (6,), {"critic": "shared", "microbatch_layout": "packed", "max_tokens_per_microbatch": 16}, id="PPO, packed in parts"
        ),
        pytest.param((7,), {"zero_std_groups": "resample", "scale_rewards": "none"}, id="resampled"),
        pytest.param((2,), {"policy_loss": "kl_cov", "gradient_accumulation_steps": 2, "num_iterations": 4}, id="whole steps"),
    ],
)
def test_what_a_rollout_carries(toy, tmp_path, steps, fields):
    """Packed rows, the stream of further prompts, and what an objective computes over a step of two micro-batches go on too."""
    check(toy, tmp_path, steps, max_steps=8, **fields)


@pytest.mark.nightly
@pytest.mark.parametrize("critic", [None, "adapter", "shared", "model"])
@pytest.mark.parametrize("kl", [{}, KL], ids=["no KL", "KL"])
def test_from_every_step(toy, tmp_path, critic, kl):
    check(toy, tmp_path, range(1, 10), **kl, **({} if critic is None else {"critic": critic}))


def test_what_was_not_logged_yet_is_kept(toy, tmp_path, monkeypatch):
    """Metrics of the steps since the last log, the rows of the completions table, and the entropy bonus's coefficient."""
    tables = []
    monkeypatch.setattr("trl.trainer.grpo_trainer.print_prompt_completions_sample", lambda *args, **kw: tables.append(args[:4]))
    fields = {
        "logging_steps": 2, "log_completions": True, "use_adaptive_entropy": True, "entropy_coef": 0.01, "max_steps": 6,
        "entropy_coef_delta": 0.001,
    }  # fmt: skip
    whole = build(toy, tmp_path / "whole", **fields)
    whole.train()
    seen = [[list(column) if not isinstance(column, dict) else dict(column) for column in table] for table in tables]
    tables.clear()
    again = resumed(toy, tmp_path / "whole", 3, **fields)
    assert [[list(c) if not isinstance(c, dict) else dict(c) for c in table] for table in tables] == seen[1:]
    assert len(seen) == 4  # after steps 2, 4, 6, and at the end
    assert again.entropy_coef == whole.entropy_coef != 0.01
    left_out = (*CLOCKS, "loss", "grad_norm")  # what transformers logs: of the steps since the resume alone
    (ours,), (theirs,) = ([e for e in run.state.log_history if e["step"] == 4] for run in (again, whole))
    assert {k: v for k, v in ours.items() if k.split("/")[0] not in left_out} == {
        k: v for k, v in theirs.items() if k.split("/")[0] not in left_out
    }


@pytest.fixture(scope="module")
def cut(toy, tmp_path_factory):
    """The folder of an uninterrupted run of 5 steps, and that run."""
    folder = tmp_path_factory.mktemp("cut") / "whole"
    run = build(toy, folder, max_steps=5)
    run.train()
    return folder, run


def test_a_checkpoint_without_the_rollout(toy, cut, tmp_path, caplog):
    """Of an older version or TRL's: said in one line; the rollout is made anew from its prompts, for what is left of its use."""
    folder, whole = cut
    checkpoint = copied(folder, tmp_path, 3)
    (checkpoint / "lossplus_state_0.pt").unlink()
    with caplog.at_level(logging.WARNING):
        again = resumed(toy, checkpoint.parent, 3, max_steps=5)
    (line,) = [record.message for record in caplog.records if "lossplus_state" in record.message]
    assert "was taken inside a rollout and has no lossplus_state_*.pt" in line
    assert again.rollouts == whole.rollouts  # the first again, and after one step the second
    caplog.clear()
    checkpoint = copied(folder, tmp_path, 4)
    (checkpoint / "lossplus_state_0.pt").unlink()
    again = resumed(toy, checkpoint.parent, 4, max_steps=5)
    assert not [record for record in caplog.records if "lossplus_state" in record.message]
    assert again.rollouts == whole.rollouts[1:]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_iterations": 3}, "num_iterations was 2 and is 3"),
        ({"microbatch_layout": "packed"}, "microbatch_layout was 'padded' and is 'packed'"),
        ({"policy_loss": "cispo"}, "policy_loss was 'ppo_clip' and is 'cispo'"),
        ({"temperature": 0.5}, "temperature was 1.0 and is 0.5"),
    ],
)
def test_a_rollout_of_another_form_is_refused(toy, cut, tmp_path, fields, words):
    with pytest.raises(LossPlusError, match="was taken inside a rollout, and what is left of it cannot be used: ") as error:
        resumed(toy, cut[0], 3, max_steps=5, **fields)
    assert f"{words}. Set that as it was, take a checkpoint between two rollouts" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_iterations": 1}, "The prompts do not come in the order of the run that wrote"),
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"dataset": toy_dataset().select(range(5))}, "rows of train_dataset was 6 and is 5"),
    ],
)
def test_what_changes_the_order_of_prompts_is_said(toy, cut, tmp_path, caplog, fields, words):
    run = resumed(toy, cut[0], 4, max_steps=5, **fields)
    assert run.state.global_step == 5
    assert [record for record in caplog.records if words in record.message]


def test_a_streamed_dataset(toy, tmp_path, caplog):
    """Within its first pass a run goes on as it would have; a later pass is begun again, and that is said."""
    fields = {"max_steps": 9, "num_iterations": 1}  # a pass is 4 steps
    whole = build(toy, tmp_path / "whole", dataset=toy_dataset().select(range(8)).to_iterable_dataset(), **fields)
    whole.train()
    for step, said in ((3, False), (7, True)):
        caplog.clear()
        streamed = toy_dataset().select(range(8)).to_iterable_dataset()
        again = resumed(toy, tmp_path / "whole", step, dataset=streamed, **fields)
        assert bool([record for record in caplog.records if "transformers cannot find the place" in record.message]) == said
        assert (everything(again)[1] == everything(whole)[1]) != said


def test_an_adaptive_coefficient_goes_on(toy, tmp_path, caplog):
    """Another beta neither scales nor replaces the restored coefficient, inside a rollout and between two, and that is said."""
    fields = {"beta": 0.05, "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 30.0, "max_steps": 5}
    whole = build(toy, tmp_path / "whole", **fields)
    whole.train()
    for step in (3, 4):
        caplog.clear()
        again = resumed(toy, tmp_path / "whole", step, **fields | {"beta": 0.5})
        assert again.spec.beta * again.kl_factor == pytest.approx(whole.spec.beta * whole.kl_factor, rel=1e-9)
        assert again.kl_controller.coef == pytest.approx(whole.kl_controller.coef, rel=1e-6)
        lines = [r.message for r in caplog.records if "beta was" in r.message]
        assert [line.split(":")[0] for line in lines] == ["beta was 0.05 and is 0.5 is not used"]


@pytest.mark.parametrize("content", [b"", None])
def test_a_file_that_is_not_a_state_is_one_line(toy, cut, tmp_path, content):
    checkpoint = copied(cut[0], tmp_path, 3)
    path = checkpoint / "lossplus_state_0.pt"
    path.write_bytes(content) if content is not None else torch.save({"x": 1}, path)
    with pytest.raises(LossPlusError, match=r"lossplus_state_0.pt cannot be read \(") as error:
        resumed(toy, checkpoint.parent, 3, max_steps=5)
    assert "\n" not in str(error.value)


def test_a_broken_file_is_one_line(toy, cut, tmp_path):
    checkpoint = copied(cut[0], tmp_path, 3)
    path = checkpoint / "lossplus_state_0.pt"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(
        LossPlusError, match=r"lossplus_state_0.pt cannot be read \(.*\). Take another checkpoint, or delete"
    ) as error:
        resumed(toy, checkpoint.parent, 3, max_steps=5)
    assert "\n" not in str(error.value)
