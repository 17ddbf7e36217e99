"""zero_std_groups=resample: what rides along with a row, evaluation, resuming, the end of the draws, and what is refused."""

import json

import pytest
import torch
from datasets import Dataset
from resample_run import RESAMPLE, SeePrompts, by_hand, is_flat, some_flat, trained
from toyrun import SeeLoss, StopAt, apart, fixed_rollout, logged, trainer, weights

from trl_lossplus import LossPlusError
from trl_lossplus.toy import toy_dataset
from trl_lossplus.trainers.drawn import as_generated, as_rows
from trl_lossplus.trainers.resample import Resampler

# What rides along with a row.


def scored_rollout(prompts, run):
    """Also log-probs of a sampler, tokens that are not the policy's, and a column of its own, each told by the completion."""
    out = fixed_rollout(prompts, run)
    out["logprobs"] = [[-token / 10 for token in ids] for ids in out["completion_ids"]]
    out["env_mask"] = [[int(token % 3 > 0) for token in ids] for ids in out["completion_ids"]]
    out["first_token"] = [ids[0] for ids in out["completion_ids"]]
    return out


def test_everything_of_a_row_follows_it(toy, tmp_path):
    """Sampler's log-probs, tool mask, token weights, a rollout function's column and a logged one: all those of the kept rows."""
    asked = []

    def reward(prompts, completions, completion_ids, keyword, first_token, log_extra, **kwargs):
        assert first_token == [ids[0] for ids in completion_ids]
        log_extra("text", list(completions))
        return some_flat(prompts, completions, keyword)

    def token_weights(prompts, completions, completion_ids, keyword, first_token, **columns):
        asked.append(list(prompts))
        return [[first + token / 100 for token in ids] for ids, first in zip(completion_ids, first_token, strict=True)]

    run = trainer(
        toy, tmp_path, reward=reward, rollout=scored_rollout, extra={"token_weight_func": token_weights}, max_steps=1,
        log_completions=False, **RESAMPLE,
    )  # fmt: skip
    seen, table = SeeLoss(run), SeePrompts(run)
    run.train()
    assert [prompts[::4] for prompts in asked] == table.prompts
    assert table.tables[0]["text"] == table.tables[0]["completion"]
    inputs = seen.inputs[0]
    ids, mask = inputs["completion_ids"], inputs["completion_mask"].bool()
    assert torch.allclose(inputs["sampling_per_token_logps"], torch.where(mask, -ids / 10, 0.0))
    assert torch.equal(inputs["tool_mask"].bool(), (ids % 3 > 0) | ~mask)
    assert torch.equal(inputs["loss_mask"], mask & (ids % 3 > 0))
    assert torch.allclose(inputs["token_weights"], torch.where(mask, ids[:, :1] + ids / 100, 1.0))
    texts = run.processing_class.batch_decode(ids, skip_special_tokens=True)
    order = inputs["row"].argsort()
    assert [texts[i] for i in order] == table.tables[0]["completion"]


def test_what_reward_functions_leave_beside_their_rewards(toy, tmp_path):
    """A trainer that keeps something of its own for each completion gets back what belongs to the kept rows."""
    left, got = [], []

    def reward(prompts, completions, **kwargs):
        left[:] = completions
        return some_flat(prompts, completions, **kwargs)

    run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout, max_steps=1, **RESAMPLE)
    run.take_beside = lambda rows: [f"of {text}" for text in left]
    run.put_beside = got.extend
    table = SeePrompts(run)
    run.train()
    assert got == [f"of {text}" for text in table.tables[0]["completion"]]


def test_unscored_completions(toy, tmp_path):
    """A group with fewer than two scored completions has nothing to compare, and is replaced; None elsewhere stays None."""

    def reward(prompts, completions, **kwargs):
        return [None if is_flat(prompt) or i % 4 == 0 else i % 4 + 0.0 for i, prompt in enumerate(prompts)]

    run, seen = trained(toy, tmp_path, reward=reward, max_steps=1, **RESAMPLE)
    assert [kept for kept, *_ in by_hand(1)] == seen.prompts
    assert logged(run, "group_reward/unscored") == [4.0]
    assert logged(run, "resample/reward_all") == pytest.approx([2.0])


def test_flatness_by_column_for_gdpo(toy, tmp_path):
    """An estimator that reads each reward function alone: a group is flat only if it is flat in every one."""

    def up(completions, **kwargs):
        return [float(i % 4) for i in range(len(completions))]

    def down(completions, **kwargs):
        return [3.0 - i % 4 for i in range(len(completions))]

    fields = {**RESAMPLE, "max_steps": 1, "reward": [up, down]}
    run, _ = trained(toy, tmp_path / "gdpo", advantage_estimator="gdpo", **fields)
    assert logged(run, "resample/draws") == [1.0]
    run, _ = trained(toy, tmp_path / "grpo", resample_max_tries=2, **fields)  # the sums are all 3
    assert logged(run, "resample/draws") == [3.0]


def test_eval_never_resamples(toy, tmp_path):
    """Evaluation scores the prompts that it is given: one call of the rollout function a batch, flat or not."""
    calls = []

    def rollout(prompts, run):
        calls.append((run.model.training, len(prompts)))
        return fixed_rollout(prompts, run)

    run = trainer(toy, tmp_path, reward=lambda completions, **kw: [0.5] * len(completions), rollout=rollout, **RESAMPLE)
    entry = run.evaluate(eval_dataset=toy_dataset().select(range(4)))
    assert calls == [(False, 8), (False, 8)]
    assert entry["eval_reward"] == pytest.approx(0.5)
    assert not any("resample" in name for name in entry)


# Resuming.


@pytest.mark.parametrize("fields", [{}, {"num_iterations": 2}], ids=["between rollouts", "in the middle of one"])
def test_resumed_is_uninterrupted(toy, tmp_path, fields):
    """Stopped at 3 of 6 steps and resumed: the same further prompts and weights, bit for bit, as if it had not been."""
    settings = {
        **RESAMPLE,
        **fields,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "sgd",
        "learning_rate": 0.3,
    }
    whole, seen = trained(toy, tmp_path / "whole", **settings)
    _, before = trained(toy, tmp_path / "cut", callbacks=[StopAt(3)], **settings)
    resumed, after = trained(toy, tmp_path / "cut", resume=str(tmp_path / "cut" / "checkpoint-3"), **settings)
    assert before.prompts + after.prompts == seen.prompts
    assert apart(weights(whole), weights(resumed)) == 0.0
    assert resumed.resampler.position == whole.resampler.position > 0


def test_a_checkpoint_without_the_stream(toy, tmp_path, caplog):
    """Said, and the stream starts anew."""
    run = trainer(toy, tmp_path, reward=some_flat, rollout=fixed_rollout, **RESAMPLE)
    run.resampler.position = 7
    run.save_plus_state(str(tmp_path))
    assert json.loads((tmp_path / "resample.json").read_text()) == {"position": 7}
    run.resampler.position = 0
    run.load_plus_state(str(tmp_path))
    assert run.resampler.position == 7
    (tmp_path / "resample.json").unlink()
    run.load_plus_state(str(tmp_path))
    assert any("resample.json" in record.message and "starts anew" in record.message for record in caplog.records)


# The end of the draws.


def all_flat(completions, **kwargs):
    return [1.0] * len(completions)


RARE = ("say river again", "now write cloud")


def rarely(prompts, completions, **kwargs):
    """Spread for two prompts of the 48."""
    return [i % 2 if prompt in RARE else 0.0 for i, prompt in enumerate(prompts)]


def test_every_group_flat_ends_training_with_a_message(toy, tmp_path, caplog):
    """keep: two rollouts are gone through, the third in a row ends training; the weights are as they were."""
    run = trainer(toy, tmp_path, reward=all_flat, rollout=fixed_rollout, max_steps=20, resample_max_tries=2, **RESAMPLE)
    start = weights(run)
    run.train()
    assert run.state.global_step == 3
    assert apart(start, weights(run)) == 0.0
    assert logged(run, "resample/draws") == [3.0, 3.0, 3.0]
    assert logged(run, "resample/prompts") == [12.0, 12.0, 12.0]
    messages = [record.message for record in caplog.records if "resample" in record.message]
    assert len(messages) == 3
    assert (
        "4 of 4 groups of the rollout have no spread after 3 draws (12 prompts, of which 0 had spread; mean reward 1)"
        in messages[0]
    )
    assert "They stay, as with zero_std_groups='keep'." in messages[0]
    assert "In 3 rollouts in a row no group had any, so training ends after this step." in messages[2]
    assert "raise num_generations (4) or temperature (1)" in messages[2]


def test_every_group_flat_with_raise(toy, tmp_path):
    run = trainer(toy, tmp_path, reward=all_flat, rollout=fixed_rollout, resample_exhausted="raise", **RESAMPLE)
    with pytest.raises(
        LossPlusError, match="4 of 4 groups .* after 9 draws .*36 prompts.* resample_max_tries .8.; or set resample_ex"
    ):
        run.train()
    assert run.state.global_step == 0


def test_some_places_are_left_flat(toy, tmp_path, caplog):
    """keep: the few groups that were found are trained on, the rest stays and is counted; training goes on."""
    run, seen = trained(toy, tmp_path, reward=rarely, max_steps=4, **RESAMPLE)
    assert run.state.global_step == 4
    found = [sum(prompt in RARE for prompt in kept) for kept in seen.prompts]
    assert any(0 < number < 4 for number in found)
    assert logged(run, "group_reward/frac_flat") == [1 - number / 4 for number in found]
    messages = [record.message for record in caplog.records if "zero_std_groups='resample'" in record.message]
    short = [number for number in found if number < 4]
    for number, message in zip(short, messages, strict=True):
        assert f"{4 - number} of 4 groups" in message
        assert f"of which {number} had spread" in message
        assert "They stay" in message
    assert [norm > 0 for norm in logged(run, "grad_norm")] == [number > 0 for number in found]
    with pytest.raises(LossPlusError, match=r"of 4 groups of the rollout have no spread"):
        trained(toy, tmp_path / "raise", reward=rarely, resample_max_tries=1, resample_exhausted="raise", **RESAMPLE)


# What is refused.


def test_what_cannot_be_resampled(toy, tmp_path):
    stream = toy_dataset().to_iterable_dataset()
    with pytest.raises(LossPlusError, match="train_dataset .IterableDataset. has no length: load it without streaming"):
        trainer(toy, tmp_path, rollout=fixed_rollout, dataset=stream, **RESAMPLE)
    pictures = Dataset.from_list([{"prompt": "say apple", "image": 1}] * 8)
    with pytest.raises(LossPlusError, match="prompts with images .column 'image'"):
        trainer(toy, tmp_path, rollout=fixed_rollout, dataset=pictures, **RESAMPLE)
    with pytest.raises(LossPlusError, match="does not take environment_factory"):
        Resampler(None, [{"prompt": "x"}], environments=True)
    with pytest.raises(LossPlusError, match="prompts with images"):
        as_rows([{}], ([[1]], [[2]], None, ["x"], None, {}, [["picture"]], []), {}, [None])
    with pytest.raises(LossPlusError, match="log_extra: column 'text' got 2 values for 1 completions"):
        as_rows([{}], ([[1]], [[2]], None, ["x"], None, {}, None, []), {"text": ["a", "b"]}, [None])


def test_a_rollout_function_gives_logprobs_always_or_never():
    rows = [as_rows([{}], ([[1]], [[2]], None, ["x"], logprobs, {}, None, []), {}, [None])[0] for logprobs in (None, [[-1.0]])]
    assert as_generated(rows[:1]) == ([[1]], [[2]], None, ["x"], None, {}, None, [None])
    assert as_generated(rows[1:]) == ([[1]], [[2]], None, ["x"], [[-1.0]], {}, None, [None])
    with pytest.raises(LossPlusError, match="rollout_func gave logprobs in some of its calls and none in others"):
        as_generated(rows)
