"""What the recipes' tests share: running a script, what it printed and logged."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
QUICK = ["--max_steps", "2", "--per_device_train_batch_size", "16", "--disable_tqdm", "true"]
sys.path.insert(0, str(ROOT))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def launch(words, through=(), script="grpo", timeout=240):
    """A recipe with `words` in a process of its own: (exit status, stdout, stderr). `through`: a launcher's words."""
    run = subprocess.run(
        [sys.executable, *through, str(ROOT / "recipes" / f"{script}.py"), *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    return run.returncode, run.stdout, run.stderr


def own_lines(out):
    """What the recipe printed, without what the libraries did."""
    return [line for line in out.splitlines() if re.match("processes: |loss: |critic: |step |done: |error", line)]


def logged_steps(folder):
    """The logged steps of a finished run."""
    history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


def two_processes():
    """The words of `accelerate launch` for two CPU processes; writes its configuration into the current folder."""
    config = yaml.safe_load((ROOT / "accelerate_configs" / "multi_gpu.yaml").read_text()) | {"num_processes": 2}
    Path("two.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return ["-m", "accelerate.commands.launch", "--config_file", "two.yaml", "--main_process_port", port]


def check_resumed(main, words, capsys):
    """Four steps at once, and two steps resumed from the second step's checkpoint, print the same lines."""
    assert main([*words, "--save_strategy", "steps", "--save_steps", "2", "--output_dir", "whole"]) == 0
    whole = own_lines(capsys.readouterr().out)
    assert main([*words, "--resume_from_checkpoint", "whole/checkpoint-2", "--output_dir", "rest"]) == 0
    rest = own_lines(capsys.readouterr().out)
    assert [line for line in rest if line.startswith("step")] == [line for line in whole if re.match("step [34]", line)]


def one_error(main, words, capsys):
    """What a run that is refused with exit status 2 says, in its one line."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    (error,) = (line for line in err.splitlines() if line.startswith("error: "))
    return error
