"""recipes/ppo.py: the toy with each critic, what it prints and saves, a critic to start from, wrong input, two processes."""

import math
import re
from pathlib import Path

import pytest
from peft import PeftModel
from reciperun import CONFIGS, QUICK, check_resumed, launch, logged_steps, one_error, own_lines, two_processes
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from recipes import ppo, report, toy_reward_model
from trl_lossplus.toy import KEYWORDS, keyword_reward, save_toy, toy_tokenizer

CONFIG = {path.stem: str(path) for path in CONFIGS}
NUMBER = r"-?(?:\d+\.\d+|nan)"


def test_toy_without_arguments(capsys):
    assert ppo.main(["--max_steps", "5", "--output_dir", "out"]) == 0
    lines = own_lines(capsys.readouterr().out)
    assert lines[0] == "processes: 1 (NO, device cpu)"
    assert re.search(
        "advantages gae, whitened \\(rollout\\); no KL; value loss 0.5 x half the squared error, clipped at 0.2$", lines[1]
    )
    assert re.fullmatch(r"critic: model, \d+ parameters of its own, learning rate [\d.]+", lines[2])
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split("  ")[:2] for line in steps][3:] == [["step 4/5", "rollout 1"], ["step 5/5", "rollout 2"]]
    assert all(re.search(rf" value \+[\d.]+ .* explained variance {NUMBER} ", line) for line in steps)
    assert re.fullmatch(
        r"done: reward 0\.\d+ before, 0\.\d+ after \(.*\), 5 optimizer steps, [\d.]+ s of training, model in out, explained variance "
        rf"{NUMBER} at first, {NUMBER} at most \(mean of 10 logged steps\), critic in out/critic",
        lines[-1],
    )
    assert AutoModelForCausalLM.from_pretrained("out").lm_head.weight.shape[0] > 0
    assert AutoModelForSequenceClassification.from_pretrained("out/critic").score.weight.shape[0] == 1
    assert all(math.isfinite(entry["grad_norm"]) for entry in logged_steps("out"))


@pytest.mark.parametrize("name", ["ppo_lora", "ppo_shared"])
def test_critic_is_saved_and_can_be_started_from(name, capsys):
    words = ["--config", CONFIG[name], *QUICK]
    assert ppo.main([*words, "--output_dir", "first"]) == 0
    assert Path("first/critic/value_head.safetensors").is_file()
    if name == "ppo_lora":
        base = AutoModelForCausalLM.from_pretrained("first/toy_base")
        assert list(PeftModel.from_pretrained(base, "first").peft_config) == ["default"]
    capsys.readouterr()
    assert ppo.main([*words, "--critic_model_name_or_path", "first/critic", "--output_dir", "second"]) == 0
    assert " from first/critic, " in next(line for line in own_lines(capsys.readouterr().out) if line.startswith("critic"))


def test_critic_from_a_reward_model_knows_the_reward_at_once(capsys):
    words = ["--config", CONFIG["ppo_from_reward_model"], "--max_steps", "2"]
    assert ppo.main([*words, "--learning_rate", "0", "--critic_learning_rate", "0", "--output_dir", "out"]) == 0
    kept = AutoModelForSequenceClassification.from_pretrained("out/toy_reward_model").score.weight
    assert kept.equal(AutoModelForSequenceClassification.from_pretrained("out/critic").score.weight)
    with_head = logged_steps("out")[0]["value/explained_variance"]
    words = ["--critic_model_name_or_path", "out/toy_base", "--learning_rate", "0", "--max_steps", "1", "--output_dir", "new"]
    assert ppo.main(words) == 0
    assert with_head > logged_steps("new")[0]["value/explained_variance"] + 0.1


def test_toy_reward_model(tmp_path, monkeypatch):
    folder = toy_reward_model.toy_reward_model(save_toy(tmp_path / "base"), tmp_path / "scorer")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    prompts = [f"please say {word}" for word in KEYWORDS for _ in KEYWORDS]
    texts = [f"{said} to" for _ in KEYWORDS for said in KEYWORDS]
    rewards = keyword_reward(texts, [word for word in KEYWORDS for _ in KEYWORDS])
    inputs = toy_tokenizer()([f"{a} {b}" for a, b in zip(prompts, texts, strict=True)], return_tensors="pt", padding=True)
    scores = model(**inputs).logits.squeeze(-1)
    right = [(score > 0.5) == (reward > 0.5) for score, reward in zip(scores.tolist(), rewards, strict=True)]
    assert sum(right) >= 60  # of 64
    monkeypatch.setattr(toy_reward_model, "keyword_reward", None)  # a second call does not train
    assert toy_reward_model.toy_reward_model(str(tmp_path / "base"), folder) == folder


def test_resumed_run_goes_on(capsys):
    """Saved after two of the four steps that a rollout serves."""
    check_resumed(ppo.main, [*QUICK, "--max_steps", "4"], capsys)


def test_two_processes_share_the_toy_s_prompts():
    # The exit status is not judged: torch's rank 1 sometimes dies after its work is done.
    _, out, err = launch(["--use_cpu", "true", "--output_dir", "out", "--max_steps", "2"], two_processes(), "ppo")
    lines = own_lines(out)
    assert lines[:1] == ["processes: 2 (MULTI_CPU, device cpu)"], out + err
    kinds = [line.split(":")[0].split("  ")[0] for line in lines[1:]]
    assert kinds == ["loss", "critic", "step 1/2", "step 2/2", "done"], out + err


WRONG = {
    "unknown critic": (["--critic", "adaptor"], "Did you mean 'adapter'?"),
    "adapter without LoRA": (["--critic", "adapter"], "needs a policy with a LoRA adapter"),
    "no such critic": (["--critic_model_name_or_path", "./nowhere"], "critic_model_name_or_path='./nowhere' cannot be loaded"),
    "no such head": (["--critic", "shared", "--critic_model_name_or_path", "."], "there is no value_head.safetensors in it"),
    "unread": (["--critic_detach", "true"], "only critic='shared' reads it"),
    "too few prompts": (["--per_device_train_batch_size", "64"], "has 48 prompts, and one rollout takes 64"),
    "field of GRPO's": (["--scale_rewards", "group"], "the estimator does not scale"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_and_status_2(case, capsys):
    words, expected = WRONG[case]
    assert expected in one_error(ppo.main, words, capsys)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (math.nan, math.nan)),
        ([None, math.nan], (math.nan, math.nan)),
        ([0.1, None, 0.3], (0.1, 0.2)),
        ([0.0] * 10 + [0.5] * 10 + [-90.0] * 5, (0.0, 0.5)),
    ],
)
def test_explained_variance_at_first_and_at_most(values, expected):
    history = [{"value/explained_variance": value} for value in values] + [{"train_runtime": 1.0}]
    assert report.explained_variance(history) == pytest.approx(expected, nan_ok=True)
