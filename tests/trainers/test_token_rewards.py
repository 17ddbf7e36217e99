"""Token rewards: what a reward function may return, where each part goes, and the advantages that come of it."""

import asyncio

import numpy as np
import pytest
import torch
from toyrun import (
    SeeLoss,
    apart,
    fixed_rollout,
    letter_reward,
    logged,
    rollout_with_tools,
    trainer,
    vowel_rewards,
    weights,
)

from trl_lossplus import LossPlusError, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.check.plain_advantages import generalized, reward_to_go, whitened
from trl_lossplus.trainers.reward_functions import RewardBook, checked_reward
from trl_lossplus.trainers.token_rewards import credited, spread, turns
from trl_lossplus.trainers.token_weights import token_at

WORDS = {1: "red", 2: "blue", 3: "green"}


def decode(ids):
    return " ".join(WORDS[i] for i in ids if i in WORDS)


def read(*values):
    """The sums that TRL gets, and the parts that are kept, of a function that returns these."""
    book = RewardBook()

    def paint(completions, **kwargs):
        return list(values)

    return checked_reward(paint, book, 0)(completions=["x"] * len(values)), book.take(len(values))


def test_sums_and_parts():
    """Numbers, None, lists, arrays and dictionaries: TRL gets the sum."""
    sums, parts = read(
        0.5, None, [0.25, 0.5], np.array([1.0, 2.0]), torch.tensor([0.5]), np.float32(3), torch.tensor(2.0), {},
        {"token": {3: 0.5, -1: 1}, "char": {17: np.float64(1.0)}, "turn": {np.int64(0): 0.25}}, (1, 2),
    )  # fmt: skip
    assert sums == [0.5, None, 0.75, 3.0, 0.5, 3.0, 2.0, 0.0, 2.75, 3.0]
    assert parts[0] == parts[1] == parts[5] == parts[6] == {}
    assert parts[2] == {0: [0.25, 0.5]}
    assert parts[8] == {0: {"token": {3: 0.5, -1: 1.0}, "char": {17: 1.0}, "turn": {0: 0.25}}}
    assert read(0.5, None)[1] == [{}, {}]


WRONG = [
    ("good", "'paint' returned 'good' for completion 1"),
    ([0.5, "x"], "'paint', completion 1: 'x' for token 1 is no number"),
    ([0.5, float("nan")], "completion 1: nan for token 1: a token's reward must be finite"),
    ([[0.5]], r"completion 1: \[0.5\] for token 0 is no number"),
    ({"tokens": {0: 1.0}}, "'paint', completion 1: key='tokens' .*Did you mean 'token'"),
    ({3: 1.0}, "completion 1: key=3 .*char, token, turn"),
    ({"token": [1.0]}, r"completion 1: 'token' holds \[1.0\]; it must map indexes to rewards"),
    ({"token": {"3": 1.0}}, "completion 1: '3' is no index of a token"),
    ({"turn": {0.5: 1.0}}, "completion 1: 0.5 is no index of a turn"),
    ({"char": {True: 1.0}}, "completion 1: True is no index of a char"),
    ({"char": {2: float("inf")}}, "completion 1: inf for char 2"),
    ({"char": {2: None}}, "completion 1: None for char 2 is no number"),
]


@pytest.mark.parametrize(("value", "words"), WRONG)
def test_what_no_reward_is(value, words):
    """Named: function, completion, value."""
    with pytest.raises(LossPlusError, match=words) as error:
        read(1.0, value)
    assert "\n" not in str(error.value)


def test_where_the_parts_go():
    """red blue <eos> green with a tool's token in the middle: indexes from both ends, characters by the text, turns by their last token."""
    ids, own = [1, 2, 9, 3], [1, 1, 1, 1]
    place = lambda parts, own=own: spread("f", 0, parts, ids, own, decode)  # noqa: E731
    assert place([1.0, 2.0, 3.0, 4.0]) == [1.0, 2.0, 3.0, 4.0]
    assert place({"token": {0: 1.0, -1: 2.0}, "turn": {0: 0.5}}) == [1.0, 0.0, 0.0, 2.5]
    assert decode(ids) == "red blue green"
    assert place({"char": {0: 1.0, 2: 1.0, 3: 5.0, 7: 7.0, -1: 9.0, 8: 10.0}}) == [2.0, 12.0, 0.0, 19.0]
    tool = [1, 0, 1, 1]
    assert (turns(tool), credited(tool)) == ([0, 3], [0, 0, 2, 3])
    assert place({"turn": {0: 1.0, 1: 2.0, -2: 4.0}}, tool) == [5.0, 0.0, 0.0, 2.0]
    assert place([1.0, 2.0, 3.0, 4.0], tool) == [3.0, 0.0, 3.0, 4.0]
    assert place({"char": {5: 1.0}}, tool) == [1.0, 0.0, 0.0, 0.0]
    assert credited([0, 0, 1, 0]) == [2, 2, 2, 2]
    assert credited([0, 0]) == [0, 1]
    assert turns([1, 1, 0, 0, 1, 0]) == [1, 4]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([1.0], "'f', completion 7: 1 rewards for a completion of 2 tokens"),
        ({"token": {2: 0.5}}, "completion 7: token 2 is out of range: the completion has 2 tokens .reward 0.5"),
        ({"token": {-3: 0.5}}, "token -3 is out of range"),
        ({"char": {8: 0.5}}, "char 8 is out of range: the completion has 8 chars"),
        ({"turn": {1: 0.5}}, "turn 1 is out of range: the completion has 1 turns"),
    ],
)
def test_out_of_range(parts, words):
    with pytest.raises(LossPlusError, match=words):
        spread("f", 7, parts, [1, 2], [1, 1], decode)


@pytest.mark.parametrize("text", ["naïve café", "ab", "x"])
def test_token_at_is_the_token_whose_bytes_end_the_character(text):
    """Over bytes as tokens (a character may take two): every character's token is the one with which its text is complete."""
    ids = list(text.encode())
    whole = lambda ids: bytes(ids).decode(errors="ignore")  # noqa: E731
    for c in range(len(text)):
        assert token_at(c, ids, whole) == len(text[: c + 1].encode()) - 1


# Through the trainer.


def placed_by_hand(micro, rewards):
    """{own column: reward} of each row, from rewards by row of the rollout and column."""
    out = []
    for i, mask in enumerate(micro["loss_mask"]):
        own = mask.nonzero().flatten().tolist()
        row = dict.fromkeys(own, 0.0)
        for t, value in enumerate(rewards[int(micro["row"][i])]):
            row[max([place for place in own if place <= t])] += value
        out.append(row)
    return out


def train(toy, tmp_path, reward, rollout=rollout_with_tools, **fields):
    """The first micro-batch, and the completions' tokens by row of the rollout."""
    seen, run = {}, None

    def watching(completion_ids, completions, **kwargs):
        seen.setdefault("ids", completion_ids)
        seen.setdefault("texts", completions)
        return [0.0] * len(completions)

    funcs = [*(reward if isinstance(reward, list) else [reward]), watching]
    run = trainer(toy, tmp_path, reward=funcs, rollout=rollout, **{"max_steps": 1, **fields})
    see = SeeLoss(run)
    run.train()
    return run, see.inputs[0], seen


def test_reinforce_plus_plus_by_hand(toy, tmp_path):
    """Two functions by token and one by completion, with weights: discounted sums of what is to come, whitened over the tokens."""

    async def last(completions, **kwargs):
        await asyncio.sleep(0)
        return [{"token": {-1: 1.0, 0: 0.5}} if i % 3 else None for i in range(len(completions))]

    run, micro, seen = train(
        toy, tmp_path, [vowel_rewards, last, letter_reward], advantage_estimator="reinforce_plus_plus", gamma=0.9,
        reward_weights=[2.0, -1.0, 0.5, 1.0],
    )  # fmt: skip
    vowels, letters = vowel_rewards(seen["texts"], seen["ids"]), letter_reward(seen["texts"])
    rewards = []
    for i, row in enumerate(vowels):
        given = [2 * r for r in row]
        if i % 3:
            given[-1] -= 1.0
            given[0] -= 0.5
        rewards.append(given)
    rows = placed_by_hand(micro, rewards)
    for i, row in enumerate(rows):
        row[max(row)] += 0.5 * letters[int(micro["row"][i])]
    expected = whitened([reward_to_go(list(row.values()), 0.9) for row in rows], [0] * len(rows))
    for i, row in enumerate(rows):
        assert micro["advantages"][i, list(row)].tolist() == pytest.approx(expected[i], abs=1e-5)
    assert logged(run, "rewards/vowel_rewards/mean") == pytest.approx([sum(map(sum, vowels)) / 8], abs=1e-6)
    assert logged(run, "rewards/last/mean") == [1.5]
    totals = [2 * sum(v) - 1.5 * (i % 3 > 0) + 0.5 * s for i, (v, s) in enumerate(zip(vowels, letters, strict=True))]
    assert logged(run, "reward") == pytest.approx([sum(totals) / 8], abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gdpo"])
def test_estimators_by_completion_read_the_sums(toy, tmp_path, estimator):
    """Token rewards train as their sums do, to the bit."""

    def summed(**kwargs):
        return [sum(row) for row in vowel_rewards(**kwargs)]

    runs = []
    for reward in (vowel_rewards, summed):
        run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout, advantage_estimator=estimator)
        start = weights(run)
        run.train()
        assert apart(weights(run), start) > 1e-3
        runs.append(weights(run))
    assert apart(*runs) < 1e-6


PPO = {"trainer_class": PPOPlusTrainer, "config_class": PPOPlusConfig, "critic": "model", "num_generations": 4}


@pytest.mark.parametrize("eos", [None, 0.25])
def test_ppo_with_token_rewards_is_gae_over_them(toy, tmp_path, eos):
    """Advantages and returns by the recursion; a missing end is taken off the last token, a number is put on it."""
    _, micro, seen = train(
        toy, tmp_path, [vowel_rewards, letter_reward], advantage_normalization="none", gamma=0.9, gae_lambda=0.8,
        missing_eos_penalty=eos, **PPO,
    )  # fmt: skip
    rows = placed_by_hand(micro, vowel_rewards(seen["texts"], seen["ids"]))
    letters = letter_reward(seen["texts"])
    for i, row in enumerate(rows):
        row[max(row)] += letters[int(micro["row"][i])] - (eos or 0.0)  # none of these completions ends
        values = micro["old_values"][i, list(row)].tolist()
        expected = generalized(list(row.values()), values, 0.9, 0.8, 0.0)
        assert micro["advantages"][i, list(row)].tolist() == pytest.approx(expected, abs=1e-5)
        returns = [a + v for a, v in zip(expected, values, strict=True)]
        assert micro["returns"][i, list(row)].tolist() == pytest.approx(returns, abs=1e-5)
    assert not micro["ended"].any()


def test_turns_are_told_by_the_tool_mask(toy, tmp_path):
    """A turn's reward lies on its last token; the number of turns is that of the stretches of own tokens."""

    def by_turn(completion_ids, **kwargs):
        return [{"turn": {0: 1.0, -1: 2.0}} for _ in completion_ids]

    _, micro, _ = train(toy, tmp_path, by_turn, advantage_estimator="reinforce_plus_plus", advantage_normalization="none")
    several = 0
    for i, mask in enumerate(micro["loss_mask"]):
        own = mask.nonzero().flatten().tolist()
        first = next((t for t in own if t + 1 not in own), own[-1])
        expected = [(1.0 if t <= first else 0.0) + 2.0 for t in own]
        several += first != own[-1]
        assert micro["advantages"][i, own].tolist() == pytest.approx(expected)
    assert several > 2


@pytest.mark.parametrize(
    "fields",
    [
        {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.95},
        {"advantage_estimator": "remax"},
        {"advantage_estimator": "optimal_token_baseline", "num_iterations": 2},
        {"advantage_estimator": "opo"},
        PPO,
    ],
    ids=lambda fields: fields.get("advantage_estimator", "ppo"),
)
def test_every_split_is_the_same(toy, tmp_path, fields):
    """Sixteen rows at once, in four micro-batches, and in eight: the weights after two steps are the same."""
    ends = []
    for rows, steps in ((16, 1), (4, 4), (2, 8)):
        run = trainer(
            toy, tmp_path, reward=vowel_rewards, rollout=rollout_with_tools, max_steps=2, optim="sgd", learning_rate=0.3,
            **{**fields, "per_device_train_batch_size": rows, "gradient_accumulation_steps": steps},
        )  # fmt: skip
        start = weights(run)
        run.train()
        ends.append(weights(run))
        assert apart(ends[-1], start) > 1e-3
    assert apart(ends[0], ends[1]) < 1e-5
    assert apart(ends[0], ends[2]) < 1e-5


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda completions, **kw: [[0.5] * 7] * 8, "'<lambda>', completion 0: 7 rewards for a completion of 3 tokens"),
        (lambda completions, **kw: [0.0] * 7 + [{"token": {6: 1.0}}], "completion 7: token 6 is out of range"),
    ],
)
def test_refused_through_the_trainer(toy, tmp_path, reward, words):
    run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout)
    with pytest.raises(LossPlusError, match=words):
        run.train()


def test_nan_is_told_once(toy, tmp_path, caplog):
    """It counts as not scored, as in TRL; a warning names the function, None does not warn."""

    def division(completions, **kwargs):
        return [float("nan") if i == 5 else float(i) for i in range(len(completions))]

    def silent(completions, **kwargs):
        return [None] * len(completions)

    run = trainer(toy, tmp_path, reward=[division, silent], rollout=fixed_rollout, max_steps=3)
    run.train()
    told = [record.getMessage() for record in caplog.records if "counts as not scored" in record.getMessage()]
    assert len(told) == 1
    assert "'division' returned nan for completion 5 of 8" in told[0]
    assert logged(run, "group_reward/unscored") == [1.0] * 3


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "remax"])
def test_whitening_a_row_alone_needs_something_that_varies_along_it(toy, tmp_path, estimator):
    """Rewards by completion with gamma 1 are refused at the first rollout; gamma, a token KL or rewards by token make it a choice."""
    row = {
        "advantage_estimator": estimator,
        "advantage_normalization": "rollout",
        "advantage_norm_scope": "sequence",
        "max_steps": 1,
    }
    with pytest.raises(LossPlusError, match=f"'sequence': with advantage_estimator='{estimator}' .* Set batch or group"):
        trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, **row).train()
    token_kl = {"kl_placement": "reward", "kl_reward_coef": 0.1, "kl_reward_level": "token", "learning_rate": 0.1, "max_steps": 2}
    for reward, fields in ((letter_reward, {"gamma": 0.9}), (vowel_rewards, {}), (letter_reward, token_kl)):
        settings = row | fields
        run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout, **settings)
        run.train()
        assert run.state.global_step == settings["max_steps"]
