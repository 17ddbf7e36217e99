"""
What the learner of one GRPO step costs in time and memory, relative to the installed TRL's GRPOTrainer.

    python benchmarks/learner.py                          # the tables of docs/performance.md; about an hour on one core
    python benchmarks/learner.py --lengths real --rounds 1 --layouts shared_prefix

The model is SmolLM2-135M-Instruct (or --model PATH) under LoRA r=16 on all linear layers, in float32 on the CPU, or on the GPU if there is
one. A rollout of 32 completions in groups of 8 is given, not generated: its lengths come from --lengths, its tokens are drawn. What is
timed is everything from the start to the end of an optimizer step of four micro-batches of 8: the passes of the rollout that the setting
needs, forward and backward. Each variant runs in a fresh process, the variants take turns, and what is shown is the median over rounds of
the ratio to TRL within a round; CPU seconds on the CPU. Memory is the growth of the process's peak over what it held before training (on
a GPU, the peak of what torch allocated). `gradient` is the norm of the difference from TRL's gradient over the norm of TRL's.
`limit` is the time of the products that a step cannot do without (each prompt once a group, each completion token once through the layers
and the LM head, forward and backward), at this machine's measured rate; `reached` is that over the time that was taken.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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

GROUP, ROWS, MICRO = 8, 32, 8
LENGTHS = ("real", "lognormal", "uniform", "long_prompt")
LAYOUTS = ("padded", "packed", "shared_prefix")
SETTINGS: dict[str, dict[str, Any]] = {"KL 0": {}, "KL": {"beta": 0.04}, "checkpointing": {"gradient_checkpointing": True}}


def rows_of(name: str) -> list[tuple[int, int]]:
    """(prompt tokens, completion tokens) of 32 rows in groups of 8."""
    import torch

    if name == "real":
        groups = json.loads((HERE.parent / "lengths.json").read_text())
        return [(group["prompt"], length) for group in groups for length in group["completions"]]
    if name == "uniform":
        return [(16, 256)] * ROWS
    if name == "long_prompt":
        return [(512, 64)] * ROWS
    draw = torch.Generator().manual_seed(0)
    lengths = torch.exp(4.0 + 0.8 * torch.randn(ROWS, generator=draw)).round().clamp(4, 256).long().tolist()
    prompts = torch.randint(24, 96, (ROWS // GROUP,), generator=draw).tolist()
    return [(prompts[row // GROUP], length) for row, length in enumerate(lengths)]


def rollout_of(rows: list[tuple[int, int]], vocabulary: int) -> dict[str, Any]:
    """Drawn tokens of these lengths; a group has one prompt."""
    import torch

    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, vocabulary, (rows[i][0],), generator=draw).tolist() for i in range(0, len(rows), GROUP)]
    return {
        "prompt_ids": [prompts[row // GROUP] for row in range(len(rows))],
        "completion_ids": [torch.randint(5, vocabulary, (length,), generator=draw).tolist() for _, length in rows],
        "logprobs": None,
    }


def measure(variant: str, lengths: str, settings: dict[str, Any], model: str, flat: bool, gradient: str) -> dict[str, float]:
    """Time and peak of one step of a variant (trl, or a layout, with + for skip_still_rows); its gradient goes to a file."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer

    gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rollout = rollout_of(rows_of(lengths), len(tokenizer) - 10)
    rewards = [row % 3 * float(not flat or row // GROUP % 2) + 0.125 * (row // GROUP) for row in range(ROWS)]
    stock = variant == "trl"
    ours = {} if stock else {"microbatch_layout": variant.rstrip("+"), "skip_still_rows": variant.endswith("+"), "probes": "off"}
    spent: list[float] = []

    class Clock(TrainerCallback):
        def now(self) -> float:
            if gpu:
                torch.cuda.synchronize()
            return time.perf_counter() if gpu else time.process_time()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = self.now()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            spent.append(self.now() - self.start)
            if len(spent) == 1:
                torch.save({n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}, gradient)

    with tempfile.TemporaryDirectory() as folder:
        config = {
            "output_dir": folder, "use_cpu": not gpu, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
            "seed": 0, "num_generations": GROUP, "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ROWS // MICRO,
            "max_completion_length": 256, "max_steps": 2, "learning_rate": 0.0, "gradient_checkpointing": False, "max_grad_norm": 0.0,
            "model_init_kwargs": {"dtype": "float32"}, **settings, **ours,
        }  # fmt: skip
        trainer = (GRPOTrainer if stock else GRPOPlusTrainer)(
            model=model,
            reward_funcs=lambda completions, **kwargs: rewards,
            args=(GRPOConfig if stock else GRPOPlusConfig)(**config),
            train_dataset=Dataset.from_dict({"prompt": [f"{i}" for i in range(ROWS)]}),
            rollout_func=lambda prompts, trainer: rollout,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Clock()],
        )
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.train()
        peak = torch.cuda.max_memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": min(spent), "peak": peak - before}


def products(rows: list[tuple[int, int]], config: Any, skipped: bool) -> float:
    """
    The least that a step multiplies and adds, in FLOP, attention's own products aside.

    Forward and backward are 2 FLOP each a token and frozen weight (no gradient of the weight), 6 a token and adapter weight.
    `skipped`: half of the groups are not computed.
    """
    kv = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    linears = [(hidden, hidden)] * 2 + [(hidden, kv)] * 2 + [(hidden, inner)] * 2 + [(inner, hidden)]
    weights = config.num_hidden_layers * sum(a * b for a, b in linears)
    adapter = config.num_hidden_layers * 16 * sum(a + b for a, b in linears)
    groups = [rows[i : i + GROUP] for i in range(0, len(rows), GROUP) if not skipped or i // GROUP % 2]
    scored = sum(length for group in groups for _, length in group)
    tokens = scored + sum(group[0][0] for group in groups)
    return tokens * (4 * weights + 6 * adapter) + scored * 4 * config.vocab_size * hidden


def rate(config: Any) -> float:
    """FLOP a second (a CPU second on the CPU) of products of 1024 tokens with the LM head, in float32; the best of five."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    hidden, head = (
        torch.randn(1024, config.hidden_size, device=device),
        torch.randn(config.hidden_size, config.vocab_size, device=device),
    )
    taken = []
    for _ in range(6):
        start = time.perf_counter() if device == "cuda" else time.process_time()
        hidden @ head
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() if device == "cuda" else time.process_time()) - start)
    return 2 * 1024 * head.numel() / min(taken[1:])


def in_a_process(*words: Any) -> dict[str, float]:
    """`measure` in a fresh process."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    command = [sys.executable, str(HERE), "--worker", json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def gradient_difference(one: str, other: str) -> float:
    """Norm of the difference of two saved gradients over the norm of the first."""
    import torch

    a, b = torch.load(one, weights_only=True), torch.load(other, weights_only=True)
    if a.keys() != b.keys():
        raise SystemExit(f"the gradients are of other parameters: {sorted(a.keys() ^ b.keys())[:3]}")
    norm = sum(x.double().pow(2).sum() for x in a.values()) ** 0.5
    return float(sum((a[name].double() - b[name].double()).pow(2).sum() for name in a) ** 0.5 / norm)


def compare(lengths: str, setting: str, flat: bool, words: argparse.Namespace) -> list[str]:
    """The lines of one table."""
    from transformers import AutoConfig

    variants = ["trl", *words.layouts]
    with tempfile.TemporaryDirectory() as folder:
        files = {variant: f"{folder}/{number}.pt" for number, variant in enumerate(variants)}
        rounds = [
            {v: in_a_process(v, lengths, SETTINGS[setting], words.model, flat, files[v]) for v in variants}
            for _ in range(words.rounds)
        ]
        config = AutoConfig.from_pretrained(words.model)
        speed = rate(config)
        lines = [f"{lengths}, {setting}{', half of the groups flat' if flat else ''}; products at {speed / 1e9:.0f} GFLOP/s"]
        for variant in variants:
            time_, peak = (statistics.median(done[variant][k] / done["trl"][k] for done in rounds) for k in ("seconds", "peak"))
            seconds = statistics.median(done[variant]["seconds"] for done in rounds)
            apart = gradient_difference(files["trl"], files[variant])
            line = f"  {variant:15} {seconds:7.2f} s  time {time_:5.2f}  peak {peak:5.2f}  gradient {apart:.1e}"
            if setting == "KL 0":  # more passes than one have another limit
                limit = products(rows_of(lengths), config, variant.endswith("+") and flat) / speed
                line += f"  limit {limit:6.2f} s  reached {limit / seconds:4.2f}"
            lines.append(line)
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--settings", nargs="+", default=["KL 0"], choices=SETTINGS)
    parser.add_argument(
        "--layouts", nargs="+", default=LAYOUTS, help="padded, packed, shared_prefix; with + also skip_still_rows"
    )
    parser.add_argument("--flat", action="store_true", help="half of the groups have equal rewards")
    parser.add_argument("--model", help="a folder; default: SmolLM2, converted once")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.worker:
        print(json.dumps(measure(*json.loads(words.worker))))
        return 0
    if words.model is None:
        from recipes.smollm2 import smollm2

        words.model = smollm2()
    for lengths in words.lengths:
        for setting in words.settings:
            print("\n".join(compare(lengths, setting, words.flat, words)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
