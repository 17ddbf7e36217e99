"""recipes/holdout.py: which problems are kept out, and what is measured on them."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from reciperun import QUICK, ROOT, launch, logged_steps, one_error, own_lines, two_processes

from recipes import arguments, grpo, holdout, ppo
from trl_lossplus import LossPlusError
from trl_lossplus.toy import toy_dataset

LENGTH = "def length(completions, keyword, **kwargs):\n    return [float(len(word)) for word in keyword]\n"


def by_hand(problems, seed=0):
    """The mean length of the held-out prompts' keywords."""
    kept = holdout.hold_out(toy_dataset(), problems, seed)[1]["keyword"]
    return sum(map(len, kept)) / problems


def test_no_prompt_is_on_both_sides_and_no_row_is_lost():
    rows = [{"prompt": f"{i % 7} + 1 =", "row": i} for i in range(20)]
    train, out = holdout.hold_out(Dataset.from_list(rows), 3, seed=1)
    assert len(set(out["prompt"])) == len(out) == 3
    assert not set(train["prompt"]) & set(out["prompt"])
    assert [row["row"] for row in train] == [row["row"] for row in rows if row["prompt"] not in set(out["prompt"])]
    assert holdout.hold_out(Dataset.from_list(rows), 3, seed=1)[1]["row"] == out["row"]
    assert {tuple(holdout.hold_out(Dataset.from_list(rows), 3, seed)[1]["row"]) for seed in range(5)} != {tuple(out["row"])}


def test_conversations_are_told_apart_by_their_words():
    chats = [[{"role": "user", "content": text}] for text in ("a", "b", "a", "c")]
    train, out = holdout.hold_out(Dataset.from_dict({"prompt": chats}), 2)
    assert {holdout.key_of(chat) for chat in train["prompt"]}.isdisjoint(map(holdout.key_of, out["prompt"]))
    assert len(out) == 2


@pytest.mark.parametrize("config", ["smollm2_grpo", "smollm2_ppo"])
def test_the_sums_of_the_shipped_configs_are_disjoint(config):
    pytest.importorskip("reasoning_gym", reason="draws the sums: make real")
    path = ROOT / "recipes" / "configs" / f"{config}.yaml"
    script, training, _ = arguments.parse((grpo if "grpo" in config else ppo).RECIPE, ["--config", str(path)])
    train, out = holdout.hold_out(script.source().load("train"), script.eval_holdout, training.seed)
    texts = [rows["prompt"] for rows in (train, out)]
    assert len(set(texts[1])) == len(texts[1]) == 64
    assert not set(texts[0]) & set(texts[1])
    assert len(set(texts[0])) > 100


@pytest.mark.parametrize(
    ("rows", "rank", "processes", "mine"),
    [(5, 0, 2, [0, 1, 2]), (5, 1, 2, [3, 4, 0]), (4, 1, 2, [2, 3]), (2, 2, 3, [0]), (3, 0, 1, [0, 1, 2])],
)
def test_shares_are_equal_and_filled_up_from_the_beginning(rows, rank, processes, mine):
    assert holdout.share(range(rows), rank, processes) == mine


def test_what_is_measured_is_the_mean_reward_of_the_held_out_rows(tmp_path, capsys):
    (tmp_path / "own.py").write_text(LENGTH)
    words = ["--reward_funcs", "own.py:length", "--eval_holdout", "5", "--num_generations_eval", "2", *QUICK]
    assert grpo.main([*words, "--output_dir", "out"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held out")]
    kept = json.loads(Path("out/holdout.json").read_text())
    assert kept["measured"] == {"0": {"length": pytest.approx(by_hand(5))}, "2": {"length": pytest.approx(by_hand(5))}}
    assert (kept["problems"], kept["completions_each"], kept["temperature"]) == (5, 2, 1.0)
    assert [line.split(" (")[0] for line in told] == [
        f"held out, {when} training: length {by_hand(5):.3f}" for when in ("before", "after")
    ]
    assert "5 problems that are not trained on, 2 completions of each at temperature 1, at most 4 tokens" in told[0]


def test_measuring_does_not_change_the_training(monkeypatch):
    words = [*QUICK, "--eval_holdout", "6", "--output_dir"]
    assert grpo.main([*words, "measured"]) == 0
    monkeypatch.setattr(holdout.Holdout, "rewards", lambda self: {})
    assert grpo.main([*words, "not"]) == 0
    one, other = ([(step["loss"], step["reward"]) for step in logged_steps(folder)] for folder in ("measured", "not"))
    assert one == other
    assert len(one) == 2


@pytest.mark.slow
def test_two_processes_measure_the_same_rows(tmp_path):
    (tmp_path / "own.py").write_text(LENGTH)
    words = ["--use_cpu", "true", "--reward_funcs", "own.py:length", "--eval_holdout", "5", "--output_dir", "out", *QUICK]
    _, out, err = launch([*words, "--max_steps", "1"], two_processes())
    assert own_lines(out)[:1] == ["processes: 2 (MULTI_CPU, device cpu)"], out + err
    assert json.loads(Path("out/holdout.json").read_text())["measured"]["1"]["length"] == pytest.approx(by_hand(5))


@pytest.mark.parametrize(
    ("number", "message"),
    [("0", "eval_holdout=0: it must be at least 1"), ("48", "eval_holdout=48: the dataset has 48 different prompts")],
)
def test_what_cannot_be_held_out_is_refused(number, message, capsys):
    assert message in one_error(grpo.main, ["--eval_holdout", number], capsys)


def test_a_dataset_without_prompts_is_refused():
    with pytest.raises(LossPlusError, match="no 'prompt' column"):
        holdout.hold_out(Dataset.from_dict({"text": ["a", "b"]}), 1)
