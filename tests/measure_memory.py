"""Run by test_memory.py: trains a Llama of hidden size 256 or more for two steps and prints the peak of what it added to memory."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "trainers"))

import torch
from peft import LoraConfig
from toyrun import letter_reward, trainer
from transformers import LlamaConfig, LlamaForCausalLM

from trl_lossplus import PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.toy import toy_tokenizer


def status(name):
    """A field of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def rollout_of(length):
    def rollout(prompts, trainer):
        tokenizer = trainer.processing_class
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        done = [[4 + (i + k) % 20 for k in range(length - len(prompt))] for i, prompt in enumerate(ids)]
        return {"prompt_ids": ids, "completion_ids": done, "logprobs": None}

    return rollout


def run(folder, shape, rows, context, lora_r=None, **settings):
    config = LlamaConfig(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    path = Path(folder) / "model"
    LlamaForCausalLM(config).save_pretrained(path)
    toy_tokenizer().save_pretrained(path)
    extra = {} if lora_r is None else {"peft_config": LoraConfig(r=lora_r, target_modules="all-linear")}
    classes = {"trainer_class": PPOPlusTrainer, "config_class": PPOPlusConfig} if settings.get("critic") else {}
    fields = {"learning_rate": 1e-6, "max_steps": 2, "max_completion_length": context, "per_device_train_batch_size": rows}
    return trainer(
        str(path), folder, reward=letter_reward, rollout=rollout_of(context), extra=extra, **classes, **{**fields, **settings}
    )


def main():
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    os.makedirs(folder, exist_ok=True)
    torch.set_num_threads(1)
    # One small run first: libraries load, and allocate, on first use.
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    run(
        folder + "/small",
        small,
        rows=4,
        context=16,
        **{k: v for k, v in settings.items() if k not in ("shape", "rows", "context")},
    ).train()
    import gc

    gc.collect()
    before = status("VmRSS")
    trained = run(folder + "/large", **settings)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on: building the model is not part of training
    trained.train()
    print(json.dumps({"peak": status("VmHWM") - before}))


main()
