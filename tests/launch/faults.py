"""What goes wrong in test_endings.py: rewards and objectives for a recipe's command line, and in which step and process."""

import math
import os

import torch

from trl_lossplus import PolicyTerm, register_policy_loss

READS = {"old_logps", "advantages"}
LAST = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
calls = {"loss": 0}


def letters(completions, **kwargs):
    return [len(text) / 10 for text in completions]


def infinite(completions, trainer_state=None, **kwargs):
    """An infinite reward on the last process in the second step."""
    bad = LAST and trainer_state.global_step == 1
    return [math.inf if bad and i == 1 else reward for i, reward in enumerate(letters(completions))]


def raising(completions, trainer_state=None, **kwargs):
    """A bug on the last process in the second step."""
    if LAST and trainer_state.global_step == 1:
        raise KeyError("the column is not there")
    return letters(completions)


async def raising_later(completions, trainer_state=None, **kwargs):
    """The same, asynchronous, and on every process."""
    if trainer_state.global_step == 1:
        raise KeyError("the column is not there")
    return letters(completions)


def too_few(completions, trainer_state=None, **kwargs):
    """A list of the wrong length on every process."""
    return letters(completions)[: -trainer_state.global_step or None]


@register_policy_loss("nan_there", requires=READS, formula="NaN on the last process in the second step", source="these tests")
def nan_there(batch, spec):
    """NaN in the second micro-batch, which is the second step."""
    calls["loss"] += torch.is_grad_enabled()
    factor = math.nan if LAST and calls["loss"] == 2 else 1.0
    return PolicyTerm(plain(batch, spec) * factor)


def plain(batch, spec):
    return -batch.advantages * batch.ratio(spec.log_ratio_clamp)


def slope(batch):
    """0, with an infinite slope."""
    return (batch.logps - batch.logps.detach()).abs().sqrt()


@register_policy_loss("steep", requires=READS, formula="an infinite slope in the second step", source="these tests")
def steep(batch, spec):
    calls["loss"] += torch.is_grad_enabled()
    return PolicyTerm(plain(batch, spec) + (slope(batch) if calls["loss"] == 2 else 0.0))


@register_policy_loss("steep_at_once", requires=READS, formula="an infinite slope in every step", source="these tests")
def steep_at_once(batch, spec):
    return PolicyTerm(plain(batch, spec) + slope(batch))


@register_policy_loss("buggy_there", requires=READS, formula="a bug on the last process", source="these tests")
def buggy_there(batch, spec):
    calls["loss"] += torch.is_grad_enabled()
    if LAST and calls["loss"] == 2:
        raise KeyError("a bug in the objective")
    return PolicyTerm(plain(batch, spec))
