"""`trl-lossplus new`: what it writes passes its own test and trains; what is there is left alone."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from trl_lossplus import LossPlusError
from trl_lossplus.cli import main as cli
from trl_lossplus.diagnostics.runlog import read_run
from trl_lossplus.new import new_project
from trl_lossplus.toy import toy_dataset

ROOT = Path(__file__).parents[1]
FILES = {"README.md", "accelerate.yaml", "config.yaml", "data.jsonl", "losses.py", "rewards.py", "test_rewards.py", "train.py"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here") / "my_project"
    assert {path.name for path in new_project(folder)} == FILES
    return folder


def run(words, folder):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
    }
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_its_own_test_passes_and_can_fail(project):
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rewards.py"], project)
    assert re.search(r"^7 passed", done.stdout, re.M), done.stdout + done.stderr
    reward = project / "rewards.py"
    text = reward.read_text()
    try:
        reward.write_text(text.replace("right in text_of(done).split()", "right in text_of(done)"))
        broken = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rewards.py"], project)
    finally:
        reward.write_text(text)
    assert "1 failed, 6 passed" in broken.stdout


def test_it_trains_through_accelerate_with_a_loss_of_its_own(project):
    launch = ["-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "train.py", "--config", "config.yaml"]
    done = run([*launch, "--max_steps", "2", "--policy_loss", "losses:capped"], project)
    assert re.search(r"^done: reward 0\.\d{3} at first, 0\.\d{3} at last, model in run$", done.stdout, re.M), done.stderr[-2000:]
    log = read_run(project / "run")
    assert log.steps.tolist() == [1, 2]
    assert log.settings["policy_loss"] == "losses:capped"
    assert (project / "run" / "model.safetensors").is_file()


def test_wrong_input_is_one_line(project):
    done = run(["train.py", "--config", "config.yaml", "--policy_loss", "ppo_clop"], project)
    assert done.returncode == 1
    assert "Did you mean 'ppo_clip'?" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_configuration_says_what_its_comments_say(project, capsys):
    values = yaml.safe_load((project / "config.yaml").read_text())
    assert values["per_device_train_batch_size"] * values["steps_per_generation"] == 64
    assert cli(["explain", "--config", str(project / "config.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "Optimizer steps that one rollout serves: 2" in printed
    assert "Rollout: 64 completions = prompts 8 x num_generations 8" in printed
    assert "not part of the loss: model_name_or_path, data" in printed
    config = load_config_from_file(str(project / "accelerate.yaml"))
    assert (config.distributed_type.value, config.use_cpu, config.num_processes) == ("NO", True, 1)


def test_files_name_the_project_and_each_other(project):
    texts = {path.name: path.read_text() for path in project.iterdir() if path.name in FILES}
    assert not [name for name, text in texts.items() if re.search(r"\bNAME\b", text)]
    assert [name for name, text in texts.items() if "my_project" in text] != []
    assert set(re.findall(r"`(\w+\.\w+)`", texts["README.md"])) == FILES - {"README.md"}
    rows = [json.loads(line) for line in texts["data.jsonl"].splitlines()]
    assert rows == [{"prompt": row["prompt"], "answer": row["keyword"]} for row in toy_dataset()]


def test_scripts_are_in_the_house_style(project):
    words = ["-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache", "--select", "E,F,W,B,UP,SIM,PT", "."]
    done = run(words, project)
    assert done.returncode == 0, done.stdout


def test_an_empty_folder_will_do(tmp_path):
    assert {path.name for path in new_project(tmp_path)} == FILES


def test_what_is_there_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert cli(["new", str(tmp_path)]) == 2
    assert "exists and is not empty; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(LossPlusError, match="is a file"):
        new_project(tmp_path / "mine.txt")


def test_the_command_says_what_it_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli(["new", "fresh"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"fresh: {', '.join(sorted(FILES))}"
    assert second.startswith("next: cd fresh && pytest test_rewards.py && accelerate launch")


@pytest.mark.parametrize("name", ["bad name!", "it's; touch oops", "$HOME & co", "deep er/a b"])
def test_the_command_that_is_printed_goes_there(name, tmp_path, monkeypatch, capsys):
    """Pasted into a shell it changes into the folder, whatever its name; the scripts in it, which hold the name, are Python."""
    monkeypatch.chdir(tmp_path)
    assert cli(["new", name]) == 0
    change = capsys.readouterr().out.splitlines()[1].removeprefix("next: ").partition(" && pytest ")[0]
    done = subprocess.run(["sh", "-c", f"{change} && pwd"], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n") == str(tmp_path / name)
    for file in (tmp_path / name).glob("*.py"):
        compile(file.read_text(), file.name, "exec")
    assert not (tmp_path / "oops").exists()


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\tb"])
def test_a_name_that_would_break_the_scripts_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli(["new", name]) == 2
    assert capsys.readouterr().err == (
        f"error: {name!r}: the project's name stands in its scripts, so it may hold no double quote, backslash or unprintable character.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_templates_are_packaged():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["trl_lossplus"]
    found = {path for pattern in packaged for path in (ROOT / "trl_lossplus").glob(pattern)}
    assert {path.name.removesuffix(".tmpl") for path in found} == FILES - {"data.jsonl"}
