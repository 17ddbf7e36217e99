"""zero_std_groups=resample: which groups are kept, what is logged, and that nothing else of the run changes."""

import pytest
import torch
from datasets import Dataset
from resample_run import GROUPS, RESAMPLE, by_hand, is_flat, some_flat, trained
from toyrun import SETTINGS, apart, fixed_rollout, logged, trainer, weights

from trl_lossplus import PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.toy import toy_dataset
from trl_lossplus.trainers.resample import PromptStream, draw_size, fill, left

F, S = True, False  # flat, with spread


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


# Through the trainer. Completions depend on the prompt alone.


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
