"""What a cell of the matrix is: its settings, its rewards, and how its weights are compared."""

import contextlib
import hashlib
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file
from toyrun import fixed_rollout
from trl import GRPOConfig, GRPOTrainer

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.toy import KEYWORDS, toy_dataset

STEPS, RESUME = 3, 2
# An optimizer step is 16 rows (of one process; 8 on each of two) in two micro-batches, and a rollout serves two steps: the second
# is off-policy. SGD and no clipping of the gradient: a wrong factor in it shows in the weights.
SETTINGS = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "num_generations": 4,
    "max_completion_length": 6, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": STEPS, "optim": "sgd",
    "learning_rate": 0.3, "lr_scheduler_type": "linear", "max_grad_norm": 1000.0, "seed": 3, "gradient_checkpointing": True,
    "ddp_find_unused_parameters": False, "save_strategy": "steps", "save_steps": RESUME,
}  # fmt: skip
ROWS = 8  # a micro-batch on all processes
KL = {"beta": 0.05, "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 200.0}
ALGORITHMS = {
    "GRPO": {},
    "PPO adapter critic": {"critic": "adapter", "vf_coef": 0.5, "critic_learning_rate": 0.2},
    "PPO model critic": {"critic": "model", "vf_coef": 0.5, "critic_learning_rate": 0.2},
}


def cell(algorithm, lora, kl):
    """One cell by its place in the matrix."""
    name = f"{algorithm} {'LoRA' if lora else 'full'} {'KL' if kl else 'beta0'}".replace(" ", "_")
    settings = {**ALGORITHMS[algorithm], **(KL if kl else {"beta": 0.0})}
    return {"name": name, "algorithm": algorithm, "lora": lora, "kl": kl, "settings": settings, "resume": RESUME}


def all_cells():
    """Every cell; an adapter critic needs LoRA."""
    return [
        cell(algorithm, lora, kl)
        for algorithm in ALGORITHMS
        for lora in (False, True)
        for kl in (False, True)
        if lora or algorithm != "PPO adapter critic"
    ]


def case(name, rows=ROWS, lora=False, data="toy", reward="letters", steps=STEPS, **settings):
    """A cell of its own: `rows` a micro-batch on all processes; one rollout an optimizer step unless said otherwise."""
    base = {"num_iterations": 1, "max_steps": steps, "save_strategy": "no", "beta": 0.0}
    return {"name": name, "lora": lora, "rows": rows, "data": data, "reward": reward, "settings": {**base, **settings}}


TWO = {
    "rows": 4,
    "data": "two",
    "num_generations": 2,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 9,
    "shuffle_dataset": False,
}
NO_DROP = {"loss_type": "dr_grpo", "num_generations": 4}
LEARNER = {"advantage_normalization": "learner", "loss_aggregation": "token_mean"}
PPO = {"critic": "adapter", "lora": True, "vf_coef": 0.5, "critic_learning_rate": 0.2}

SIDED = {
    "rows": 8, "data": "sided", "reward": "flat_for_some", "zero_std_groups": "resample", "gradient_accumulation_steps": 1,
    "shuffle_dataset": False,
}  # fmt: skip
# One micro-batch a rollout, used once: the loss's forward passes are taken at the rollout.
ONE_PASS = {**PPO, **KL, "gradient_accumulation_steps": 1, "kl_horizon": 40.0}

# The cases of docs that are about several processes; two of them hold one prompt each where data is "two".
CASES = {
    "A3": [case("A3", **TWO, loss_aggregation="token_mean")],
    "A7": [case(f"A7_{rows}x{n}", rows=rows, **NO_DROP, gradient_accumulation_steps=n) for rows, n in ((16, 1), (8, 2), (4, 4))],
    "A9": [case("A9", rows=4, num_generations=2, gradient_accumulation_steps=4, steps=1)],
    "D1": [{**case("D1", steps=6, gradient_accumulation_steps=1, **{**KL, "kl_horizon": 40.0}), "resume": 5}],
    "D5": [case("D5", **TWO, **{**KL, "kl_horizon": 8.0 * 4})],
    "E7": [case(f"E7_{rows}x{n}", rows=rows, gradient_accumulation_steps=n, **LEARNER) for rows, n in ((16, 1), (8, 2), (4, 4))],
    "F9": [case("F9", **PPO, steps=1)],
    "one_pass": [case("one_pass_adapter", **ONE_PASS), case("one_pass_shared", **ONE_PASS | {"critic": "shared"})],
    "I6": [
        {
            **case("I6", lora=True, steps=4, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5, **KL),
            "resume": 3,
        }
    ],
    # A rollout serves two steps and a pass over the eight prompts four: step 5 is inside a rollout of the second pass.
    "inside_a_rollout": [{**case("inside_a_rollout", steps=7, data="few", **PPO, **KL | {"num_iterations": 2}), "resume": 5}],
    "masked": [case("masked", **TWO, mask_truncated_completions=True, loss_aggregation="token_mean")],
    "flat": [case("flat", **TWO, reward="flat_for_long", loss_aggregation="prompt_mean")],
    "flat_dropped": [case("flat_dropped", **TWO, reward="flat_for_long", zero_std_groups="drop")],
    "metric_on_one": [case("metric_on_one", reward="metric_on_rank_0")],
    # Every group of the first process flat and none of the second's; three groups of which the middle one lies across the two.
    "resampled": [
        {**case("resampled_one_sided", **SIDED), "resume": 2},
        case("resampled_across", **{**SIDED, "rows": 12}, beta=0.05, kl_controller="adaptive", kl_target=0.01),
    ],
}
# NaN on the last process in the second of three steps, which is dropped on all.
SKIP = {**case("G2_skip", nonfinite_policy="skip"), "nan": 1}
for _cells in CASES.values():
    for _cell in _cells:
        if "resume" in _cell:
            _cell["settings"] |= {"save_strategy": "steps", "save_steps": _cell["resume"]}


def config(cell, launch, folder):
    """Trainer class and configuration of a cell."""
    ppo = "critic" in cell["settings"]
    processes = 1 if launch == "single" else 2
    settings = {
        **SETTINGS,
        "per_device_train_batch_size": cell.get("rows", ROWS) // processes,
        "output_dir": str(folder),
        **cell["settings"],
    }
    if cell.get("stock"):
        return GRPOTrainer, GRPOConfig(**settings)
    args = (PPOPlusConfig if ppo else GRPOPlusConfig)(**settings)
    if launch == "ZeRO-3":  # the toy's parameters are so small that DeepSpeed would keep each whole
        zero = args.deepspeed_plugin.hf_ds_config.config["zero_optimization"]
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    if cell.get("unchecked"):
        args.deepspeed_plugin.hf_ds_config.config["bf16"]["check_grad_overflow"] = False
    return (PPOPlusTrainer if ppo else GRPOPlusTrainer), args


def letters(prompts, completions, **kwargs):
    """Any spread will do: the number of letters, over 10."""
    return [len(text) / 10 for text in completions]


def flat_for_long(prompts, completions, **kwargs):
    """All the signal for one of the two prompts, and zero spread for the other."""
    return [0.5 if "long" in prompt else i % 2 for i, prompt in enumerate(prompts)]


def flat_for_some(prompts, completions, **kwargs):
    """Zero spread for the prompts of `sided` at even places, and letters for the others."""
    return [0.5 if flat_prompt(prompt) else len(text) / 10 for prompt, text in zip(prompts, completions, strict=True)]


def rank():
    """This process's number."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def metric_on_rank_0(prompts, completions, log_metric=None, **kwargs):
    """Logs a metric on one process only."""
    if rank() == 0:
        log_metric("only_here", 1.0)
    return letters(prompts, completions)


REWARDS = {
    "letters": letters,
    "flat_for_long": flat_for_long,
    "flat_for_some": flat_for_some,
    "metric_on_rank_0": metric_on_rank_0,
}


def two_prompts():
    """One prompt for each of two processes."""
    return Dataset.from_list([{"prompt": "say short"}, {"prompt": "say long"}] * 8)


def few():
    """Eight prompts: two rollouts of four."""
    return toy_dataset().select(range(8))


def two_lengths(prompts, trainer):
    """For a short prompt a completion of one token and one that only ends; for a long one two of nine tokens, cut off."""
    tokenizer = trainer.processing_class
    completions = [
        [4 + (i % 2 + k) % 20 for k in range(9)] if "long" in prompt else [tokenizer.eos_token_id if i % 2 else 4]
        for i, prompt in enumerate(prompts)
    ]
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": None,
    }


def flat_prompt(prompt):
    """Whether a prompt is one of those that `flat_for_some` gives no spread."""
    return any(word in prompt.split() for word in KEYWORDS[:4])


def sided():
    """The toy's prompts, one that is flat and one that is not by turns."""
    rows = sorted(toy_dataset(), key=lambda row: flat_prompt(row["prompt"]))
    return Dataset.from_list([row for pair in zip(rows[24:], rows[:24], strict=True) for row in pair])


def across(prompts, trainer):
    """As `fixed_rollout`, where groups may begin and end in the middle of a process's rows."""
    group, first = trainer.num_generations, rank() * len(prompts)
    whole = [fixed_rollout([prompt] * group, trainer) for prompt in prompts]
    return {
        name: None if name == "logprobs" else [out[name][(first + i) % group] for i, out in enumerate(whole)] for name in whole[0]
    }


def data(cell):
    """Dataset and completions of a cell."""
    known = {
        "two": (two_prompts, two_lengths),
        "toy": (toy_dataset, fixed_rollout),
        "few": (few, fixed_rollout),
        "sampled": (few, None),
        "sided": (sided, across),
    }
    dataset, rollout = known[cell.get("data", "toy")]
    return dataset(), rollout


def reward(name):
    """A reward function by name."""
    return REWARDS[name]


def is_zero3(parameter):
    return hasattr(parameter, "ds_id")


def gathered(parameters, modifier_rank=None):
    """A context in which ZeRO-3's parameters are whole."""
    shards = [p for p in parameters if is_zero3(p)]
    if not shards:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(shards, modifier_rank=modifier_rank)


def draw_by_name(model):
    """
    Draws the parameters that start at random (LoRA's, heads) from their names alone, B not zero.

    The order in which they are made, and so the random numbers they get, differs between launches.
    """
    for name, parameter in model.named_parameters():
        if "lora_" not in name and "score" not in name:
            continue
        if parameter.is_meta:  # FSDP2's other processes get theirs from the first
            continue
        with gathered([parameter], modifier_rank=0), torch.no_grad():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.05
            parameter.copy_(drawn)


def whole_weights(trainer):
    """The trainable parameters by name, whole, on every process."""
    found = {}
    for name, parameter in trainer.accelerator.unwrap_model(trainer.model_wrapped).named_parameters():
        if not parameter.requires_grad:
            continue
        with gathered([parameter]):
            value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found[name] = value.detach().float().clone()
    return found


def is_split(trainer):
    """Whether each process holds a part of every trainable parameter only."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return all(p.ds_tensor.ds_numel < p.ds_numel if is_zero3(p) else hasattr(p, "full_tensor") for p in parameters)


def saved_weights(folder):
    """What `save_model` wrote, under the names that the parameters have in the trainer's model."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if path.parent.name == "ref":
                continue
            critic = path.parent.name == "critic"
            if path.name.startswith("adapter_model"):
                parts = name.split(".")
                name = ".".join([*parts[:-1], "critic" if critic else "default", parts[-1]])
            elif path.name.startswith("value_head"):
                name = f"lora_value_head.{name}"
            elif critic:
                name = f"critic_model.{name}"
            found[name] = tensor.float()
    return found


def part(name):
    """Whose parameter it is: the policy's or the critic's."""
    return "critic" if "critic" in name or "value_head" in name else "policy"


# Those that do something; a gather of objects is made of two of them. DDP's of the gradients and FSDP's are C++ and not seen.
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor", "barrier",
    "gather", "scatter", "all_to_all", "all_to_all_single", "send", "recv",
)  # fmt: skip


def count_collectives(trainer):
    """
    Counts torch.distributed's collectives by optimizer step and by who asked for them: ours, or another's.

    The asker is the nearest caller that is neither torch nor accelerate.
    """
    counts = {"ours": {}, "others": {}}

    def asker():
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if not any(part in file for part in ("/torch/", "/accelerate/", "cells.py", "contextlib.py")):
                return file
            frame = frame.f_back
        return ""

    def counted(name, inner):
        def call(*args, **kwargs):
            file = asker()
            of = counts["ours" if "trl_lossplus" in file else "others"].setdefault(str(trainer.state.global_step), [])
            of.append(f"{name} {Path(file).name}")
            return inner(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        call = counted(name, getattr(torch.distributed, name))
        setattr(torch.distributed, name, call)
        setattr(torch.distributed.distributed_c10d, name, call)
    return counts


def apart(a, b):
    """Largest difference between two sets of weights."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:4]
    return max((a[name] - b[name]).abs().max().item() for name in a)
