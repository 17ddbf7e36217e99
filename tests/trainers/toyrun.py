"""Small real trainers for the tests: a tiny model, prompts, rewards, and completions that do not depend on sampling."""

import hashlib
import math

import torch
from transformers import TrainerCallback

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer
from trl_lossplus.toy import keyword_reward, save_toy, toy_dataset

SETTINGS = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
    "gradient_checkpointing": False, "num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 8,
    "max_steps": 3, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "seed": 3,
}  # fmt: skip


def toy_path(folder):
    return save_toy(str(folder), hidden_size=32, num_layers=1)


def fixed_rollout(prompts, trainer):
    """Completions that depend on the prompt and the row's place in its group alone: equal on every split of a run."""
    tokenizer, group = trainer.processing_class, trainer.num_generations
    first = trainer.accelerator.process_index * len(prompts)
    prompt_ids, completion_ids = [], []
    for i, prompt in enumerate(prompts):
        place = "greedy" if getattr(trainer, "greedy", False) else (first + i) % group
        digest = hashlib.sha256(f"{prompt} {place}".encode()).digest()
        length = 1 + digest[0] % 6
        prompt_ids.append(tokenizer(prompt)["input_ids"])
        completion_ids.append([4 + byte % (len(tokenizer) - 4) for byte in digest[1 : 1 + length]])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


fixed_rollout.supports_greedy = True


# pi_old / pi_sampler of the three tokens of each completion of a group; None: the sampler could not score the token.
RATIOS = [[1.0, 1.0, 1.0], [2.0, 1.0, 0.5], [4.0, 1.0, 1.0], [1.0, None, 3.0]]


def rollout_with_ratios(prompts, trainer):
    """Completions of three tokens, told by the prompt and the row's place in its group, and the log-probs that give `RATIOS`."""
    tokenizer, out = trainer.processing_class, {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for i, prompt in enumerate(prompts):
        digest = hashlib.sha256(f"{prompt} {i % 4}".encode()).digest()
        ids, before = [4 + byte % (len(tokenizer) - 4) for byte in digest[:3]], tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1].float()
        logps = torch.log_softmax(logits / trainer.temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        scores = [float("nan") if r is None else x - math.log(r) for x, r in zip(logps, RATIOS[i % 4], strict=True)]
        for name, value in zip(out, (before, ids, scores), strict=True):
            out[name].append(value)
    return out


def rollout_with_tools(prompts, trainer):
    """The same, and every third token of a completion of more than two is a tool's: not the model's own."""
    made = fixed_rollout(prompts, trainer)
    own = [[0 if len(ids) > 2 and t % 3 == 1 else 1 for t in range(len(ids))] for ids in made["completion_ids"]]
    return {**made, "env_mask": own}


rollout_with_tools.supports_greedy = True


def letter_reward(completions, **kwargs):
    """Any spread will do: the number of letters, over 10."""
    return [len(text) / 10 for text in completions]


def vowel_rewards(completions, completion_ids, **kwargs):
    """A reward a token: the number of vowels in its word, over 10."""
    rows = []
    for text, ids in zip(completions, completion_ids, strict=True):
        words = text.split()
        assert len(words) == len(ids)  # no special token in these completions
        rows.append([sum(letter in "aeiou" for letter in word) / 10 for word in words])
    return rows


def trainer(model, out, reward=keyword_reward, callbacks=None, rollout=None, trainer_class=GRPOPlusTrainer,
            config_class=GRPOPlusConfig, extra=None, dataset=None, **fields):  # fmt: skip
    """A trainer over the toy dataset, or another; `fields` go into its configuration."""
    args = config_class(output_dir=str(out), **{**SETTINGS, **fields})
    more = dict(extra or {})
    if rollout is not None:
        more["rollout_func"] = rollout
    dataset = toy_dataset() if dataset is None else dataset
    return trainer_class(model=model, reward_funcs=reward, args=args, train_dataset=dataset, callbacks=callbacks, **more)


def weights(trained):
    """The trainable parameters by name."""
    model = trained.accelerator.unwrap_model(trained.model)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def apart(a, b):
    """Largest difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def logged(trained, name):
    """A metric's logged values."""
    return [entry[name] for entry in trained.state.log_history if name in entry]


class StopAt(TrainerCallback):
    """Ends training after a step, as an interruption would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True
        return control


class SeeLoss:
    """Wraps a trainer's `micro_loss` and keeps what it got and gave."""

    def __init__(self, trained):
        self.inputs, self.losses, self._inner = [], [], trained.micro_loss
        trained.micro_loss = self

    def __call__(self, model, inputs):
        loss = self._inner(model, inputs)
        self.inputs.append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()})
        self.losses.append(loss.item())
        return loss
