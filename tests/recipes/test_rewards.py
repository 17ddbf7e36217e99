"""recipes/rewards.py, answers.py, shapes.py: numbers by hand, settings, and what is said of wrong names."""

import math
import pickle
import threading

import pytest
from reciperun import QUICK, ROOT, one_error, write_jsonl

from recipes import answers, arguments, data, grpo, rewards, shapes
from trl_lossplus import LossPlusError
from trl_lossplus.trainers.reward_functions import RewardBook, checked_reward


def one(name, settings=None, length=100):
    """The reward function of that name, with settings."""
    return rewards.reward_functions([name], length, {name: settings} if settings else None)[0]


# Answers.


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("The answer is 18.", "She sold 16 - 3 - 4 = 9 eggs, 9 * 2 = 18.\n#### 18", 1.0),
        ("18 then 17", "#### 18", 0.0),
        (r"so it is \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"$\frac{2}{4}$", "$0.5$", 1.0),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        (r"\boxed{(2,1)}", "(1,2)", 0.0),
        ("<think>4 or 5</think><answer>4</answer> 5", "4", 1.0),
        ("1,234 apples", "#### 1,234", 1.0),
        ("nothing", "3", 0.0),
        ("3", "", None),
        (r"\boxed{B}", "B", 1.0),
        (r"\boxed{A}", "B", 0.0),
        ([{"role": "assistant", "content": r"\boxed{-4}"}], -4, 1.0),
    ],
)
def test_math_accuracy(completion, answer, reward):
    pytest.importorskip("math_verify", reason="compares formulas: make real")
    assert answers.math_accuracy([completion], answer=[answer]) == [reward]
    assert answers.math_accuracy([completion], solution=[answer]) == [reward]


def test_math_accuracy_works_in_another_thread():
    pytest.importorskip("math_verify", reason="compares formulas: make real")
    found = []
    thread = threading.Thread(target=lambda: found.append(answers.math_accuracy(["7", "8"], answer=["7", "7"])))
    thread.start()
    thread.join()
    assert found == [[1.0, 0.0]]


def test_math_accuracy_needs_a_column():
    pytest.importorskip("math_verify", reason="compares formulas: make real")
    with pytest.raises(LossPlusError, match="neither an 'answer' nor a 'solution' column"):
        answers.math_accuracy(["1"], question=["?"])


@pytest.mark.parametrize(
    ("text", "inner"), [("a", "a"), (" <answer> 1 </answer> <answer>2\n</answer>x", "2"), ("</answer>", "</answer>")]
)
def test_what_is_tagged(text, inner):
    assert answers.tagged(text) == inner


# Form and length.


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        (" <think></think><answer></answer> ", 1.0),
        ("<think>a</think><answer>c</answer>d", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>c</answer><answer>d</answer>", 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
        ([{"role": "assistant", "content": "<think>a</think> <answer>c</answer>"}], 1.0),
    ],
)
def test_format(completion, reward):
    assert one("format")([completion]) == [reward]


def test_format_by_a_pattern_of_ones_own():
    reward = one("format", {"pattern": r"-?\d+\."})
    assert reward(completions=["-4.", "4", "4. 5."], pattern=["a column", "of that", "name"]) == [1.0, 0.0, 0.0]


def test_length_target():
    reward = one("length_target", {"tokens": 10})
    assert reward(completion_ids=[[0] * n for n in (10, 5, 12, 20, 100, 0)]) == [0.0, -0.5, -0.2, -1.0, -1.0, -1.0]


def test_soft_overlong_punishment_is_that_of_dapo():
    """Equation 13: 0 up to L - C, then (L - C - n) / C, below L; -1 beyond."""
    lengths = [[0] * n for n in (80, 81, 90, 100, 101)]
    by_hand = [0.0, -1 / 20, -10 / 20, -1.0, -1.0]
    assert one("soft_overlong")(completion_ids=lengths) == by_hand
    assert one("get_soft_overlong_punishment")(completion_ids=lengths) == by_hand
    wider = one("soft_overlong", {"soft_punish_cache": 40})
    assert wider(completion_ids=lengths) == [-20 / 40, -21 / 40, -30 / 40, -1.0, -1.0]
    assert one("soft_overlong", {"max_completion_len": 50}, None)(completion_ids=[[0] * 45]) == [-5 / 10]


def test_repetition_and_cosine_by_short_names():
    assert one("repetition", {"ngram_size": 2})(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]]) == [0.0, -0.75]
    pytest.importorskip("math_verify", reason="TRL's cosine reward compares formulas: make real")
    right = [[{"role": "assistant", "content": r"\boxed{3}"}]]
    cosine = one("cosine_length")(completions=right, completion_ids=[[0] * 50], solution=["$3$"])
    assert cosine == pytest.approx([0.5 + 0.5 * 0.5 * (1 + math.cos(math.pi / 2))])


@pytest.mark.parametrize("name", [*rewards.MADE, *rewards.SHORT, *rewards.MADE_BY_TRL])
def test_a_made_reward_has_a_name_and_survives_pickling(name):
    made = one(name, {"tokens": 3} if name == "length_target" else None)
    assert made.__name__
    again = pickle.loads(pickle.dumps(made))
    texts = [[{"role": "assistant", "content": "<think>1</think> <answer>$2$</answer>"}]]
    given = {"completions": texts, "completion_ids": [[1, 1, 1, 1]], "solution": ["$2$"]}
    if name not in ("cosine_length", "get_cosine_scaled_reward"):
        assert again(**given) == made(**given)


def test_the_trainer_takes_rewards_with_settings():
    """The wrapper that checks what a reward function returns keeps the name that is logged."""
    wrapped = checked_reward(one("length_target", {"tokens": 4}), RewardBook(), 0)
    assert wrapped.__name__ == "length_target"


# The user's own.

OWN = "def near(completions, target, scale=1.0, **kwargs):\n    return [-scale * abs(len(c) - target) for c in completions]\n"


def test_own_reward_with_settings_that_go_before_columns(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    reward = one("own.py:near", {"target": 3, "scale": 0.5})
    assert reward.__name__ == "near"
    assert reward(completions=["abc", "a"], target=["a column"] * 2) == [0.0, -1.0]


def test_settings_from_yaml_and_from_the_command_line(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "c.yaml").write_text("reward_funcs: [own.py:near, keyword]\nreward_kwargs: {own.py:near: {target: 2}}\n")
    script = arguments.parse(grpo.RECIPE, ["--config", "c.yaml"])[0]
    assert script.reward_kwargs == {"own.py:near": {"target": 2}}
    script = arguments.parse(grpo.RECIPE, ["--config", "c.yaml", "--reward_kwargs", '{"own.py:near": {"target": 4}}'])[0]
    near, keyword = rewards.reward_functions(script.reward_funcs, 4, script.reward_kwargs)
    assert near(completions=["abcd"]) == [0.0]
    assert keyword is rewards.keyword_reward


def test_trains_with_two_rewards_and_settings(capsys):
    words = ["--reward_funcs", "keyword", "length_target", "--reward_kwargs", '{"length_target": {"tokens": 3}}']
    assert grpo.main([*words, "--reward_weights", "1.0", "0.1", "--output_dir", "out", *QUICK]) == 0
    assert "done: reward" in capsys.readouterr().out


# What is refused, and the list of names.

WRONG = {
    "unknown": (
        ["--reward_funcs", "math_acuracy"],
        "Did you mean 'math_accuracy'? Allowed: accuracy_reward, cosine_length, exact_match",
    ),
    "unknown setting": (
        ["--reward_funcs", "format", "--reward_kwargs", '{"format": {"patern": "x"}}'],
        "Did you mean 'pattern'?",
    ),
    "no pattern": (["--reward_funcs", "format", "--reward_kwargs", '{"format": {"pattern": "("}}'], "is no regular expression"),
    "no target": (["--reward_funcs", "length_target"], "tokens=None of length_target must be a whole number of at least 1"),
    "not chosen": (["--reward_kwargs", '{"format": {}}'], "reward_kwargs for a reward that is not in reward_funcs"),
    "takes none": (
        ["--reward_kwargs", '{"keyword": {"word": "a"}}', "--reward_funcs", "keyword"],
        "keyword takes no settings, and got word",
    ),
    "no mapping": (["--reward_kwargs", '{"keyword": 3}', "--reward_funcs", "keyword"], "keyword=3 is not a mapping"),
    "refused by TRL": (
        ["--reward_funcs", "repetition", "--reward_kwargs", '{"repetition": {"max_penalty": 1}}'],
        "reward_kwargs of get_repetition_penalty_reward: max_penalty 1 should not be positive",
    ),
    "not JSON": (["--reward_kwargs", "{a: 1}"], "reward_kwargs='{a: 1}' is not JSON"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case, capsys):
    words, expected = WRONG[case]
    assert expected in one_error(grpo.main, words, capsys)


def test_help_lists_every_name():
    text = arguments.RecipeArguments.__dataclass_fields__["reward_funcs"].metadata["help"]
    listed = text.removeprefix("Reward functions, one or more of ").split(", ")
    assert listed[: len(rewards.names())] == rewards.names()
    assert all(rewards.READY[name].__doc__ for name in rewards.READY)


def test_the_page_names_every_reward():
    page = (ROOT / "docs" / "reward_functions.md").read_text()
    assert [name for name in rewards.names() if f"`{name}`" not in page] == []


# Columns.


@pytest.mark.parametrize(
    ("row", "source", "right", "wrong"),
    [
        ({"question": "2 + 2?", "answer": "2 + 2 is 4.\n#### 4"}, {"prompt_column": "question"}, "It is 4.", "It is 5."),
        (
            {"problem": "Half?", "final_answer": r"\frac{1}{2}", "answer": "another column"},
            {"prompt_column": "problem", "answer_column": "final_answer"},
            r"\boxed{0.5}",
            r"\boxed{2}",
        ),
        ({"prompt": "Half?", "solution": r"$\frac{1}{2}$"}, {}, r"\boxed{0.5}", r"\boxed{2}"),
    ],
    ids=["GSM8K", "DeepMath", "trl-lib/DeepMath-103K"],
)
def test_columns_of_the_usual_datasets(tmp_path, row, source, right, wrong):
    pytest.importorskip("math_verify", reason="compares formulas: make real")
    loaded = data.DataSource(write_jsonl(tmp_path / "d.jsonl", [row, row]), as_chat=True, **source).load("train")
    assert loaded["prompt"][0] == [{"role": "user", "content": next(iter(row.values()))}]
    columns = {name: loaded[name] for name in loaded.column_names if name != "prompt"}
    assert answers.math_accuracy(completions=[right, wrong], **columns) == [1.0, 0.0]


def test_an_answer_column_that_is_not_there(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "final": "b"}])
    with pytest.raises(LossPlusError, match=r"dataset_answer_column='finl'.*Did you mean 'final'"):
        data.DataSource(path, answer_column="finl").load("train")


def test_shapes_have_defaults_only_where_one_is_right():
    assert shapes.Format().pattern == shapes.THINK_ANSWER
    with pytest.raises(LossPlusError, match="tokens=0"):
        shapes.LengthTarget(0)
