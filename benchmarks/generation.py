"""
What generation of a rollout costs with compact_generation, relative to transformers' generate.

    python benchmarks/generation.py                 # SmolLM2, 4 prompts x 8 completions of at most 256 tokens
    python benchmarks/generation.py --tokens 64 --group 16

Both sample at temperature 1 from the same prompts, each from its own random stream, so that lengths differ a little: seconds are shown
in all and a token that is kept. CPU seconds on the CPU. The check before it: with the most likely token each, both give the same ids.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(HERE.parent.parent)

QUESTIONS = (
    "Why is the sky blue? Answer briefly.",
    "What is 7 + 12?",
    "Name three rivers of Europe.",
    "Explain what a gradient is to somebody who has never heard of calculus, with an example from everyday life.",
)


def rollout_of(tokenizer: Any, group: int) -> dict[str, Any]:
    """Chat prompts, `group` times each, padded on the left."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in QUESTIONS
        for _ in range(group)
    ]
    return dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False))


def timed(model: Any, given: dict[str, Any], settings: Any, way: Any, seed: int) -> tuple[float, int]:
    """Seconds, and tokens up to each row's end."""
    import torch

    gpu = torch.cuda.is_available()
    clock = time.perf_counter if gpu else time.process_time
    torch.manual_seed(seed)
    start = clock()
    with way:
        found = model.generate(**given, generation_config=settings)[:, given["input_ids"].shape[1] :]
    if gpu:
        torch.cuda.synchronize()
    seconds = clock() - start
    ended = found == settings.eos_token_id
    kept = torch.where(ended.any(1), ended.int().argmax(1) + 1, found.shape[1])
    return seconds, int(kept.sum())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="at most so many a completion")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", help="a folder; default: SmolLM2, converted once")
    words = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from recipes.smollm2 import smollm2
    from trl_lossplus.trainers.generation import compact

    path = words.model or smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device)
    given = {name: tensor.to(device) for name, tensor in rollout_of(tokenizer, words.group).items()}
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }

    def settings(**fields: Any) -> Any:
        return GenerationConfig(**special, **fields)

    same = settings(max_new_tokens=8, do_sample=False)
    plain = model.generate(**given, generation_config=same)
    with compact(model):
        if not torch.equal(plain, model.generate(**given, generation_config=same)):
            raise SystemExit("the two ways give other tokens")
    sampled = settings(max_new_tokens=words.tokens, do_sample=True, top_k=0)
    done: dict[str, list[tuple[float, int]]] = {"generate": [], "compact": []}
    for seed in range(words.rounds):
        done["generate"].append(timed(model, given, sampled, nullcontext(), seed))
        done["compact"].append(timed(model, given, sampled, compact(model), seed))
    reference = [seconds for seconds, _ in done["generate"]]
    for name, runs in done.items():
        ratio = statistics.median(seconds / other for (seconds, _), other in zip(runs, reference, strict=True))
        a_token = statistics.median(1000 * seconds / kept for seconds, kept in runs)
        seconds = statistics.median(seconds for seconds, _ in runs)
        print(f"{name:10} {seconds:7.2f} s  time {ratio:5.2f}  {a_token:6.2f} ms a token", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
