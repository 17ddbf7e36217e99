"""
Switching LoRA adapters inside a forward pass, without touching requires_grad.

PEFT's `set_adapter` and `disable_adapter` flip requires_grad, which breaks the optimizer and the hooks of DDP and ZeRO; here the
layers' active adapter is set and set back. Under gradient checkpointing the forward pass is run again in the backward pass, when
another adapter may be active: the recomputation re-enters the one that was.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

State = tuple[Any, bool]


def tuner_layers(module: nn.Module) -> list[BaseTunerLayer]:
    """The PEFT layers below a module."""
    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


def adapters_of(module: nn.Module) -> list[str]:
    """Names of the adapters that act in the first PEFT layer below a module; none without PEFT layers, or where they are off."""
    layer = next((layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)), None)
    return [] if layer is None or layer.disable_adapters else list(layer.active_adapters)


def read_state(layers: Sequence[BaseTunerLayer]) -> list[State]:
    """Which adapter is active in each layer, and whether adapters are off."""
    return [(layer._active_adapter, layer._disable_adapters) for layer in layers]


@contextmanager
def in_state(layers: Sequence[BaseTunerLayer], states: Sequence[State]) -> Iterator[None]:
    """The layers in the given states; on leaving, in those they had."""
    before = read_state(layers)

    def write(new: Sequence[State]) -> None:
        for layer, (active, disabled) in zip(layers, new, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled

    write(states)
    try:
        yield
    finally:
        write(before)


def base_of(model: nn.Module) -> nn.Module:
    """The transformers model inside a PeftModel, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def by_row(model: nn.Module) -> str | None:
    """
    Why an adapter of a model (a PeftModel, or none) acts on a row as a whole, so that its padding and its neighbours count, or None.

    The comparison of layouts would not tell: an adapter that starts at 0 changes nothing at the first rollout.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if config.is_prompt_learning or config.is_adaption_prompt:
            return f"PEFT's {config.peft_type.value} (adapter {name!r}) puts tokens of its own before each row"
        if getattr(config, "alora_invocation_tokens", None):
            return f"aLoRA (adapter {name!r}) acts from the last invocation tokens of each row on"
    return None


@contextmanager
def active_adapter(module: nn.Module, name: str) -> Iterator[None]:
    """One adapter active in every layer below `module`."""
    layers = tuner_layers(module)
    with in_state(layers, [([name], False)] * len(layers)):
        yield


def keep_adapter_in_recomputation(model: nn.Module) -> None:
    """
    Makes gradient checkpointing of `model` (a transformers model) run again under the adapter of the forward pass.

    The method that sets checkpointing is replaced on the instance, since TRL turns it off and on around each generation.
    """
    inner = model._set_gradient_checkpointing

    def set_checkpointing(self: Any, enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any) -> Any:
        func = gradient_checkpointing_func or torch.utils.checkpoint.checkpoint
        return inner(enable=enable, gradient_checkpointing_func=_adapter_aware(func), **kwargs)  # type: ignore[operator]

    model._set_gradient_checkpointing = types.MethodType(set_checkpointing, model)  # type: ignore[assignment]
    for module in model.modules():  # checkpointing that is on already
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _adapter_aware(module._gradient_checkpointing_func)


def _adapter_aware(checkpoint: Any) -> Any:
    """A checkpoint function whose recomputation is in the adapters' state of the forward pass."""
    if getattr(checkpoint, "adapter_aware", False):
        return checkpoint

    def aware(function: Any, *args: Any, **kwargs: Any) -> Any:
        bound = getattr(function, "args", ())  # transformers passes partial(layer.__call__, ...) or partial(forward, layer)
        owner = next(
            (x for x in (*bound, getattr(getattr(function, "func", function), "__self__", None)) if isinstance(x, nn.Module)),
            None,
        )
        if owner is None:
            raise RuntimeError("gradient checkpointing of an unknown form: the checkpointed function is not a module's")
        layers = tuner_layers(owner)
        states = read_state(layers)

        def run(*inputs: Any, **keywords: Any) -> Any:
            with in_state(layers, states):
                return function(*inputs, **keywords)

        return checkpoint(run, *args, **kwargs)

    aware.adapter_aware = True  # type: ignore[attr-defined]
    return aware
