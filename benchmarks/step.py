"""
What a whole GRPO step costs, generation included, relative to the installed TRL's GRPOTrainer.

    python benchmarks/step.py                  # SmolLM2, 4 prompts x 8 completions of at most 256 tokens
    python benchmarks/step.py --tokens 64 --rounds 1

Ours runs with `compact_generation`, `merged_generation` and `microbatch_layout: shared_prefix`; KL 0, LoRA r=16, float32, no vLLM, without checkpointing. Each variant
runs in a fresh process and draws from its own random stream, so that lengths differ a little: seconds are shown in all and a generated
token. What is timed is from the start of the first optimizer step to its end, four micro-batches of 8; CPU seconds on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(HERE.parent.parent)

GROUP, MICRO = 8, 8


def measure(variant: str, tokens: int, seed: int, model: str) -> dict[str, float]:
    """Seconds of a whole step of a variant (trl or ours), those of its generation, and the tokens that it generated."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.generation import QUESTIONS
    from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer

    gpu, stock = torch.cuda.is_available(), variant == "trl"
    found: dict[str, float] = {}

    def now() -> float:
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() if gpu else time.process_time()

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = now()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            found["seconds"] = now() - self.start

    def lengths(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        found["generation"] = now() - clock.start
        found["tokens"] = float(sum(map(len, completion_ids)))
        return [row % 3 + 0.1 * len(ids) for row, ids in enumerate(completion_ids)]

    clock = Clock()
    ours = {} if stock else {"microbatch_layout": "shared_prefix", "compact_generation": True, "merged_generation": True}
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "output_dir": folder, "use_cpu": not gpu, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
            "seed": seed, "num_generations": GROUP, "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": len(QUESTIONS),
            "max_completion_length": tokens, "max_steps": 1, "learning_rate": 1e-6, "gradient_checkpointing": False,
            "model_init_kwargs": {"dtype": "float32"}, **ours,
        }  # fmt: skip
        trainer = (GRPOTrainer if stock else GRPOPlusTrainer)(
            model=model,
            reward_funcs=lengths,
            args=(GRPOConfig if stock else GRPOPlusConfig)(**config),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in QUESTIONS]}),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[clock],
        )
        trainer.train()
    return found


def in_a_process(*words: Any) -> dict[str, float]:
    """`measure` in a fresh process."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    command = [sys.executable, str(HERE), "--worker", json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="at most so many a completion")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", help="a folder; default: SmolLM2, converted once")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.worker:
        print(json.dumps(measure(*json.loads(words.worker))))
        return 0
    from recipes.smollm2 import smollm2

    model = words.model or smollm2()
    runs = [{v: in_a_process(v, words.tokens, seed, model) for v in ("trl", "ours")} for seed in range(words.rounds)]
    for variant in ("trl", "ours"):
        own = [run[variant] for run in runs]
        seconds, generation, tokens = (
            statistics.median(run[name] for run in own) for name in ("seconds", "generation", "tokens")
        )
        ratio = statistics.median(run[variant]["seconds"] / run["trl"]["seconds"] for run in runs)
        a_token = 1000 * statistics.median(run["seconds"] / run["tokens"] for run in own)
        print(
            f"{variant:5} {seconds:7.1f} s  time {ratio:5.2f}  of it generation {generation:7.1f} s  {tokens:6.0f} tokens  {a_token:6.2f} ms a token",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
