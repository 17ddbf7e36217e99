"""zero_std_groups=resample: which groups are kept, what is logged, that nothing else of the run changes, and how it ends."""

import json

import pytest
import torch
from datasets import Dataset
from toyrun import SETTINGS, SeeLoss, StopAt, apart, fixed_rollout, logged, trainer, weights

from trl_lossplus import LossPlusError, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.toy import toy_dataset
from trl_lossplus.trainers.drawn import as_generated, as_rows
from trl_lossplus.trainers.resample import PromptStream, Resampler, draw_size, fill, left

F, S = True, False  # flat, with spread
GROUPS = {"num_generations": 4, "per_device_train_batch_size": 16, "shuffle_dataset": False}  # 4 prompts a rollout, in order
RESAMPLE = {"zero_std_groups": "resample", **GROUPS}


# The decisions, by hand.


def test_fill():
    """A flat place gets the first group with spread that is left, by draw and in the draw; the others keep theirs."""
    assert fill([[S, S]]) == [(0, 0), (0, 1)]
    assert fill([[F, S, F], [F, S], [S]]) == [(1, 1), (0, 1), (2, 0)]
    assert fill([[F, S, F], [F, S]]) == [(1, 1), (0, 1), (0, 2)]
    assert fill([[F, F], [S, S, S]]) == [(1, 0), (1, 1)]
    assert [left(flat) for flat in ([[S, S]], [[F, S, F], [F, S]], [[F, F], [F, F]], [[F, F], [S, S, S]])] == [0, 1, 2, 0]


def test_draw_size():
    """Missing places over the share of groups with spread so far: rounded up, in units, at most a rollout."""
    assert draw_size([[F, S, S, S]], 1) == 2  # 1 missing, 3 of 4 have spread: 1.33
    assert draw_size([[F, F, S, S]], 1) == 4  # 2 missing, half of them
    assert draw_size([[F, F, F, S]], 1) == 4  # 12, but a rollout has 4
    assert draw_size([[F, F, F, F]], 1) == 4  # no group with spread yet
    assert draw_size([[F, F, S, S], [S, F, F, F]], 1) == 3  # 1 missing, 3 of 8: 2.67
    assert draw_size([[F, F, S, S], [S, F, F, F]], 2) == 4


def test_the_stream_of_further_prompts():
    """Each round holds every row once, in an order of its own; it is told by the seed and the position alone; rows are copies."""
    rows = [{"prompt": str(i)} for i in range(20)]
    stream = PromptStream(rows, seed=3)
    drawn = [stream.row(i)["prompt"] for i in range(60)]
    rounds = [drawn[:20], drawn[20:40], drawn[40:]]
    assert all(sorted(one) == sorted(str(i) for i in range(20)) for one in rounds)
    main = torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()  # TRL's sampler under this seed
    assert len({tuple(one) for one in [*rounds, [str(i) for i in main], [str(i) for i in range(20)]]}) == 5
    assert [PromptStream(rows, seed=3).row(i)["prompt"] for i in (45, 3)] == [drawn[45], drawn[3]]
    assert [PromptStream(rows, seed=4).row(i)["prompt"] for i in range(20)] != rounds[0]
    stream.row(0)["prompt"] = "changed"
    assert drawn[0] == stream.row(0)["prompt"]


# Through the trainer. Completions depend on the prompt alone; a reward makes some prompts flat.

FLAT_WORDS = ("apple", "stone", "tiger")  # of 8 keywords: 3 of 8 prompts


def some_flat(prompts, completions, keyword, **kwargs):
    """The number of letters over 10; 0.5 for the prompts of three keywords. `keyword` must be the prompt's own."""
    assert all(word in prompt.split() for word, prompt in zip(keyword, prompts, strict=True))
    return [0.5 if word in FLAT_WORDS else len(text) / 10 for word, text in zip(keyword, completions, strict=True)]


def is_flat(prompt):
    return any(word in prompt.split() for word in FLAT_WORDS)


class SeePrompts:
    """Keeps the prompts of each rollout, one a group, as TRL's table of completions has them; each rollout logs once."""

    def __init__(self, run):
        self.prompts, self.tables, self._inner = [], [], run.make_rollout
        self.run = run
        run.make_rollout = self

    def __call__(self, out, rewards):
        rows = len(rewards)
        table = {name: list(self.run._logs[name])[-rows:] for name in ("prompt", "completion", "advantages")}
        table |= {name: list(values)[-rows:] for name, values in self.run._logs["rewards"].items()}
        table |= {name: list(values)[-rows:] for name, values in self.run._logs["extra"].items()}
        self.tables.append(table)
        self.prompts.append(table["prompt"][:: self.run.num_generations])
        return self._inner(out, rewards)


def trained(toy, folder, callbacks=None, reward=some_flat, rollout=fixed_rollout, resume=None, **fields):
    run = trainer(toy, folder, reward=reward, rollout=rollout, callbacks=callbacks, **fields)
    seen = SeePrompts(run)
    run.train(resume_from_checkpoint=resume)
    return run, seen


def by_hand(steps, places=4, seed=SETTINGS["seed"]):
    """[kept prompts, prompts drawn in all, flat among them] of each rollout, from the dataset, the order and the stream alone."""
    rows = [row["prompt"] for row in toy_dataset()]
    stream, position, found = PromptStream(toy_dataset(), seed), 0, []
    for step in range(steps):
        own = [rows[(step * places + i) % len(rows)] for i in range(places)]
        flat, drawn = [[is_flat(prompt) for prompt in own]], [own]
        while left(flat):
            start = position + sum(len(draw) for draw in drawn[1:])
            drawn.append([stream.row(start + i)["prompt"] for i in range(draw_size(flat, 1))])
            flat.append([is_flat(prompt) for prompt in drawn[-1]])
        new = iter([prompt for draw in drawn[1:] for prompt in draw if not is_flat(prompt)])
        kept = [next(new) if is_flat(prompt) else prompt for prompt in own]
        whole = [prompt for draw in drawn for prompt in draw]
        found.append((kept, len(whole), sum(map(is_flat, whole)), len(drawn)))
        if kept != own:  # up to the last prompt that was taken; what was drawn beyond it comes again
            last = [prompt for prompt, before in zip(kept, own, strict=True) if is_flat(before)][-1]
            position += [prompt for draw in drawn[1:] for prompt in draw].index(last) + 1
    return found


def test_flat_groups_are_replaced_by_hand(toy, tmp_path, capsys):
    """Kept prompts, number of draws and prompts, and the flat share of all, as the dataset's order and the stream's give them."""
    run, seen = trained(toy, tmp_path, **RESAMPLE)
    expected = by_hand(3)
    assert [kept for kept, *_ in expected] == seen.prompts
    assert not any(is_flat(prompt) for kept in seen.prompts for prompt in kept)
    assert logged(run, "resample/prompts") == [drawn for _, drawn, _, _ in expected]
    assert logged(run, "resample/frac_flat_all") == pytest.approx([flat / drawn for _, drawn, flat, _ in expected])
    assert logged(run, "resample/draws") == [draws for *_, draws in expected]
    assert max(logged(run, "resample/draws")) > 1
    assert logged(run, "group_reward/frac_flat") == [0.0, 0.0, 0.0]
    assert logged(run, "frac_reward_zero_std") == [0.0, 0.0, 0.0]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resample: step 1")]
    flat = sum(map(is_flat, [row["prompt"] for row in toy_dataset()][:4]))
    assert lines[0].startswith(f"resample: step 1, {4 - flat} of 4 groups have spread; further draw 1 of at most 8: ")


def test_the_table_and_the_rewards_are_those_of_the_kept_rows(toy, tmp_path):
    """
    By hand for each row: the completion is its prompt's, the reward its letters, the advantage (r - mean) / (std + 1e-4); the logged
    reward is the kept rows', resample/reward_all that of all draws.
    """
    run, seen = trained(toy, tmp_path, **RESAMPLE, max_steps=1)
    table = seen.tables[0]
    prompts = [prompt for prompt in seen.prompts[0] for _ in range(4)]
    assert table["prompt"] == prompts
    tokenizer = run.processing_class
    ids = [fixed_rollout(prompts, run)["completion_ids"][i] for i in range(16)]
    assert table["completion"] == tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = torch.tensor([len(text) / 10 for text in table["completion"]]).view(4, 4)
    assert table["some_flat"] == pytest.approx(rewards.flatten().tolist())
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    assert table["advantages"] == pytest.approx(advantages.flatten().tolist(), rel=1e-4)
    assert logged(run, "reward") == pytest.approx([rewards.mean().item()])
    assert logged(run, "resample/reward_kept") == pytest.approx([rewards.mean().item()])
    assert logged(run, "rewards/some_flat/mean") == pytest.approx([rewards.mean().item()])
    stream = PromptStream(toy_dataset(), SETTINGS["seed"])
    drawn = [toy_dataset()[i] for i in range(4)] + [stream.row(i) for i in range(int(logged(run, "resample/prompts")[0]) - 4)]
    repeated = [row for row in drawn for _ in range(4)]
    texts = tokenizer.batch_decode(fixed_rollout([row["prompt"] for row in repeated], run)["completion_ids"])
    every = some_flat([row["prompt"] for row in repeated], texts, [row["keyword"] for row in repeated])
    assert logged(run, "resample/reward_all") == pytest.approx([sum(every) / len(every)])
    assert logged(run, "resample/reward_all")[0] < logged(run, "resample/reward_kept")[0] - 0.05


LOSSES = {
    "plain": {},
    "KL, adaptive": {"beta": 0.1, "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 50.0},
    "KL in the reward, two uses": {"kl_placement": "reward", "kl_reward_coef": 0.2, "num_iterations": 2},
    "windows, learner": {"steps_per_generation": 2, "per_device_train_batch_size": 8, "advantage_normalization": "learner"},
    "ppo": {"critic": "shared", "vf_coef": 0.5, "beta": 0.05},
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_weights_are_those_of_a_dataset_without_the_flat_prompts(toy, tmp_path, name):
    """The prompts that were kept, as a dataset of their own with zero_std_groups=keep: the same weights, bit for bit."""
    fields = {**GROUPS, **LOSSES[name]}
    ppo = {"trainer_class": PPOPlusTrainer, "config_class": PPOPlusConfig} if name == "ppo" else {}
    run, seen = trained(toy, tmp_path / "a", **{**fields, **ppo, "zero_std_groups": "resample"})
    kept = [prompt for prompts in seen.prompts for prompt in prompts]
    assert any(map(is_flat, [row["prompt"] for row in toy_dataset()][: len(kept)]))
    words = {row["prompt"]: row["keyword"] for row in toy_dataset()}
    chosen = Dataset.from_list([{"prompt": prompt, "keyword": words[prompt]} for prompt in kept])
    other, again = trained(toy, tmp_path / "b", dataset=chosen, **fields, **ppo)
    assert again.prompts == seen.prompts
    assert apart(weights(run), weights(other)) == 0.0
    assert apart(weights(run), weights(trainer(toy, tmp_path / "c", **fields, **ppo))) > 1e-3
    for metric in ("loss", "reward", "kl_rollout", "kl_coef", "mask/valid_tokens", "grad_norm"):
        assert logged(run, metric) == logged(other, metric), metric


def test_without_flat_groups_nothing_changes(toy, tmp_path):
    """Completions sampled by the model, rewards all different: weights and metrics of keep, bit for bit."""

    def reward(completion_ids, **kwargs):
        return [sum(ids) + i / 100 for i, ids in enumerate(completion_ids)]

    runs = [trained(toy, tmp_path / mode, reward=reward, rollout=None, zero_std_groups=mode)[0] for mode in ("keep", "resample")]
    assert apart(*map(weights, runs)) == 0.0
    keep, resample = (
        [{k: v for k, v in entry.items() if "time" not in k} for entry in run.state.log_history[:3]] for run in runs
    )
    for before, after in zip(keep, resample, strict=True):
        assert {k: after[k] for k in before} == before
        assert after.keys() - before.keys() == {
            f"resample/{name}" for name in ("draws", "prompts", "frac_flat_all", "reward_all", "reward_kept")
        }
        assert after["resample/draws"] == 1.0
        assert after["resample/reward_all"] == pytest.approx(after["reward"], rel=1e-6)


def test_the_order_of_the_dataset_is_not_disturbed(toy, tmp_path):
    """With the sampler shuffling: the first draw of every rollout holds the prompts of keep, in their order."""
    firsts = {}
    for mode in ("keep", "resample"):
        calls = []

        def rollout(prompts, run, calls=calls):
            calls.append((run.state.global_step, prompts[::4]))
            return fixed_rollout(prompts, run)

        trained(toy, tmp_path / mode, rollout=rollout, **{**GROUPS, "shuffle_dataset": True, "zero_std_groups": mode})
        firsts[mode] = [next(prompts for at, prompts in calls if at == step) for step in range(3)]
    assert firsts["keep"] == firsts["resample"]


def test_completions_metrics_are_of_the_rollouts_own_prompts(toy, tmp_path):
    """Lengths are measured on the first draw, as keep would; the tokens of every draw are counted."""
    keep, _ = trained(toy, tmp_path / "a", **GROUPS)
    run, _ = trained(toy, tmp_path / "b", **RESAMPLE)
    for name in ("completions/mean_length", "completions/max_length", "completions/clipped_ratio"):
        assert logged(run, name) == logged(keep, name)
    assert logged(run, "num_tokens")[0] > logged(keep, "num_tokens")[0]


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
    again = 1 if fields else 0  # the rollout in use is made anew
    assert before.prompts[: len(before.prompts) - again] + after.prompts[: len(seen.prompts)] == seen.prompts
    if not fields:
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
        as_rows([{}], ([[1]], [[2]], None, ["x"], None, {}, [["picture"]], []), {})
    with pytest.raises(LossPlusError, match="log_extra: column 'text' got 2 values for 1 completions"):
        as_rows([{}], ([[1]], [[2]], None, ["x"], None, {}, None, []), {"text": ["a", "b"]})


def test_a_rollout_function_gives_logprobs_always_or_never():
    rows = [as_rows([{}], ([[1]], [[2]], None, ["x"], logprobs, {}, None, []), {})[0] for logprobs in (None, [[-1.0]])]
    assert as_generated(rows[:1]) == ([[1]], [[2]], None, ["x"], None, {}, None, [None])
    assert as_generated(rows[1:]) == ([[1]], [[2]], None, ["x"], [[-1.0]], {}, None, [None])
    with pytest.raises(LossPlusError, match="rollout_func gave logprobs in some of its calls and none in others"):
        as_generated(rows)
