"""Generation by a model whose LoRA adapters are, for that time, in a copy of the weights that they act on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .adapters import adapters_of, base_of, tuner_layers


def why_not_merged(model: nn.Module, *, sharded: bool, rollout_func: bool = False) -> str | None:
    """
    Why the adapters of a model (a PeftModel, unwrapped) cannot be merged for generation, or None where they can.

    Args:
        sharded: whether a process holds a part of each weight only (ZeRO-3, FSDP).
        rollout_func: whether completions come from a function of the user's.
    """
    if rollout_func:
        return "rollout_func makes the completions"
    layers = tuner_layers(model)
    others = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, LoraLayer)})
    if not layers or not adapters_of(model):
        return "the model has no LoRA adapter"
    if others:
        return f"the model has layers of PEFT's kind {', '.join(others)}, not LoRA's"
    if sharded:
        return "each process holds a part of each weight only (ZeRO-3, FSDP)"
    if getattr(base_of(model), "is_quantized", False):
        return "the weights are quantized: with a product added they would be rounded again"
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    names = {id(p): name for name, p in model.named_parameters()}
    shared = [names[id(p)] for p in _under(layers) if owners[id(p)] > 1]
    if shared:
        return f"{shared[0]}, which an adapter acts on, is another layer's weight too (tied)"
    return _tried(layers)


def _tried(layers: Sequence[BaseTunerLayer]) -> str | None:
    """What PEFT says where it cannot merge a layer, each tried alone (aLoRA, a bias of LoRA's beside none of the layer's), or None."""
    for layer in layers:
        try:
            with _merged([layer]):
                pass
        except (ValueError, RuntimeError) as error:  # NotImplementedError is one
            return f"PEFT does not merge these adapters ({str(error).rstrip('.')})"
    return None


def _under(layers: Sequence[BaseTunerLayer]) -> list[nn.Parameter]:
    """The parameters that the layers' adapters act on, each once."""
    found = {id(p): p for layer in layers for p in layer.get_base_layer().parameters(recurse=False)}
    return list(found.values())


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """
    Within it a model (one that `why_not_merged` finds nothing against) computes with the active adapters added to its weights.

    The weights are copies, made by PEFT's `merge`, and the kept ones are put back after: bit for bit, which adding and taking off
    again would not give. LoRA's dropout does not act within. Not differentiable: for generation alone.
    """
    with _merged(tuner_layers(model)):
        yield


@contextmanager
def _merged(layers: Sequence[BaseTunerLayer]) -> Iterator[None]:
    kept = [(parameter, parameter.data) for parameter in _under(layers)]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.merge(safe_merge=True)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
        for layer in layers:
            layer.merged_adapters.clear()
