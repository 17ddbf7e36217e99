"""What the recipes' tests share: running a script, what it printed and logged."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
QUICK = ["--max_steps", "2", "--per_device_train_batch_size", "16", "--disable_tqdm", "true"]
sys.path.insert(0, str(ROOT))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def launch(words, through=(), script="grpo"):
    """A recipe with `words` in a process of its own: (exit status, stdout, stderr). `through`: a launcher's words."""
    run = subprocess.run(
        [sys.executable, *through, str(ROOT / "recipes" / f"{script}.py"), *words],
        capture_output=True,
        text=True,
        timeout=240,
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
