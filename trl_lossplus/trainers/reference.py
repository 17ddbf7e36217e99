"""
The reference of a LoRA policy: the base model, a frozen copy of the adapter that training starts from, or an adapter that follows.

TRL evaluates a LoRA policy's reference with the adapter switched off (a new adapter), or with an adapter named "ref" (a PeftModel
that was passed in: a copy of its adapter). For `sync_ref_model`, which TRL refuses with LoRA, the "ref" adapter is made in both
cases, and mixed towards the policy's every `ref_model_sync_steps` steps. A new LoRA adapter changes nothing, so its copy is the base.

Both factors are mixed, parameter by parameter, as TRL does with a whole model: with alpha 1 the reference becomes the policy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback

from ..config import GRPOPlusConfig
from ..config_checks import check_reference
from ..functional.errors import LossPlusError
from ..spec import LossSpec
from .files import read_tensors
from .sharded import modified, restore, whole

logger = logging.getLogger(__name__)

POLICY, REFERENCE = "default", "ref"  # TRL's names
FILE = "reference_adapter.safetensors"


def check_trainable(model: Any) -> None:
    """Raises LossPlusError for a model passed in without anything to train."""
    if not isinstance(model, nn.Module) or any(parameter.requires_grad for parameter in model.parameters()):
        return
    hint = "."
    if is_peft_model(model):
        hint = ": PeftModel.from_pretrained loads an adapter for inference unless is_trainable=True is passed."
    raise LossPlusError(
        f"model is a {type(model).__name__} in which no parameter has requires_grad, so nothing would be trained{hint}"
    )


@contextmanager
def lora_sync(args: GRPOPlusConfig, model: Any, peft_config: Any, spec: LossSpec) -> Iterator[bool]:
    """
    Hides `sync_ref_model` from TRL, which refuses it with LoRA, while the trainer is built; gives whether it is ours to do.

    Raises:
        LossPlusError: there is no reference to follow the policy.
    """
    check_reference(args, spec)
    ours = bool(args.sync_ref_model) and (peft_config is not None or (not isinstance(model, str) and is_peft_model(model)))
    if ours:
        args.sync_ref_model = False
    try:
        yield ours
    finally:
        if ours:
            args.sync_ref_model = True


def pairs(model: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    """The reference adapter's parameters: (name, parameter, the policy's)."""
    found = []
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if REFERENCE in parts:
            found.append((name, parameter, model.get_parameter(".".join(POLICY if p == REFERENCE else p for p in parts))))
    return found


class ReferenceAdapter(TrainerCallback):
    """
    Mixes the "ref" adapter towards the policy's, and saves it with each checkpoint.

    `model` is the trainer's PeftModel; the adapter is made here where TRL has not made it. Add to the trainer as a callback.
    """

    def __init__(self, model: Any):
        if REFERENCE not in model.peft_config:
            model.add_adapter(REFERENCE, model.peft_config[POLICY])
            with torch.no_grad():
                for _, parameter, policy in pairs(model):
                    parameter.data = policy.detach().clone()  # PEFT may have made it of another dtype
        for _, parameter, _ in pairs(model):
            parameter.requires_grad_(False)
        self.model = model

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reference = (1 - alpha) * reference + alpha * policy, every `ref_model_sync_steps` steps."""
        if state.global_step % args.ref_model_sync_steps:
            return
        found = pairs(self.model)
        shards = [parameter for _, ref, policy in found for parameter in (ref, policy)]
        with modified(shards) as mine, torch.no_grad():
            if mine:
                for _, reference, policy in found:
                    reference.lerp_(policy.to(reference.dtype), args.ref_model_mixup_alpha)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the reference beside the checkpoint's files; every process takes part in gathering it."""
        tensors = {name: whole(parameter).cpu().contiguous() for name, parameter, _ in pairs(self.model)}
        if args.should_save:
            save_file(tensors, Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE)

    def load(self, checkpoint: str) -> None:
        """Restores what `on_save` wrote; without it the reference stays as it was made, with a warning."""
        path = Path(checkpoint, FILE)
        if not path.exists():
            logger.warning("%s has no %s: the reference starts as at the beginning of training.", checkpoint, FILE)
            return
        saved = read_tensors(path)
        for name, parameter, _ in pairs(self.model):
            restore(parameter, saved, name, path)
