"""
Generation through transformers that computes a group's prompt once and leaves out rows that have ended.

transformers' `generate` takes a decoding function of one's own (`custom_generate`) and prepares everything for it: logits processors,
stopping criteria, the cache. `compact_sampling` is one: the loop of `generate` over the rows that still grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..config_checks import OTHER_WAYS, check_generation
from ..functional.errors import LossPlusError
from .adapters import base_of
from .merged import merged, why_not_merged
from .roomy_cache import make_room

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer

PER_ROW = ("attention_mask", "position_ids", "token_type_ids")  # what `generate` keeps a row of for each row of ids
KINDS = ("full_attention", "sliding_attention")  # of layers whose cache rows can be chosen from
LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def prepare(trainer: GRPOPlusTrainer, rollout_func: Any) -> Callable[[], AbstractContextManager[Any]]:
    """
    What a trainer generates within, from its configuration and its model.

    Raises:
        LossPlusError: compact_generation where completions do not come from `generate` row by row; merged_generation where the adapters
            cannot be added to a copy of the weights.
    """
    check_generation(trainer.args)
    policy, func = base_of(trainer.model), rollout_func is not None
    sharded = trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled()
    ways = {
        "compact_generation": (
            partial(why_not_compact, policy, is_vision=trainer.is_vision, rollout_func=func),
            partial(compact, policy),
        ),
        "merged_generation": (
            partial(why_not_merged, trainer.model, sharded=sharded, rollout_func=func),
            partial(merged, trainer.model),
        ),
    }
    chosen = []
    for name, (why_not, way) in ways.items():
        if getattr(trainer.args, name):
            if (reason := why_not()) is not None:
                raise LossPlusError(f"{name}=True: {reason}. Set it to False.")
            chosen.append(way)

    def around() -> AbstractContextManager[Any]:
        with ExitStack() as stack:
            for way in chosen:
                stack.enter_context(way())
            return stack.pop_all()

    return around


def why_not_compact(model: nn.Module, *, is_vision: bool, rollout_func: bool) -> str | None:
    """Why a transformers model (not wrapped) cannot generate so, or None where it can."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(KINDS))
    saved = {name: getattr(model.generation_config, name, None) for name in OTHER_WAYS}  # what generation_kwargs does not set
    ways = [f"{name}={value!r}" for name, value in saved.items() if value is not None and value != OTHER_WAYS[name]]
    reasons = (
        (rollout_func, "rollout_func makes the completions"),
        (is_vision, "a vision-language model's prompts carry images"),
        (bool(others), f"{config.model_type} has layers of kind {', '.join(others)}, whose cache is not chosen from by row"),
        (bool(ways), f"the model's generation_config has {', '.join(ways)}, which it does not take"),
    )
    return next((reason for holds, reason in reasons if holds), None)


@contextmanager
def compact(model: nn.Module) -> Iterator[None]:
    """Within it `model.generate` of a transformers model (not wrapped) samples by `compact_sampling`."""
    plain: Callable[..., Any] = model.generate  # type: ignore[assignment]
    model.generate = partial(plain, custom_generate=compact_sampling)  # type: ignore[assignment]
    try:
        yield
    finally:
        del model.generate


def compact_sampling(
    model: Any,
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Callable[[Tensor, Any], Tensor],
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **kwargs: Any,
) -> Tensor:
    """
    Samples completions; the tokens of each row have the distribution that `generate` gives them, from another random stream.

    Args:
        model: a causal language model of transformers.
        input_ids: (B, P), padded on the left; rows that are the same are computed once.
        logits_processor: of (n, L) ids and (n, V) logits.
        stopping_criteria: of (n, L) ids, True for each row that has ended.
        generation_config: as `generate` prepared it.
        synced_gpus: whether every process must run as many forward passes as the longest (ZeRO-3, FSDP).
        streamer: not read; `generate` takes one from nobody here.
        kwargs: what `generate` prepared for the model.

    Returns:
        (B, P + T) ids, padded after a row's end.

    Raises:
        LossPlusError: a model whose cache is not of keys and values by row.
    """
    first, same = _distinct(input_ids, kwargs.get("attention_mask"))
    outputs = model._prefill(input_ids[first], generation_config, _rows(kwargs, first))
    cache = outputs.get("cache", outputs.get("past_key_values"))
    _check_layers(cache)
    cache.batch_select_indices(same)
    make_room(cache)
    logits, ids, sampled, ended = outputs.logits[:, -1][same], input_ids, [], False
    live = torch.arange(len(ids), device=ids.device)
    padding = torch.full_like(
        input_ids[:, 0], 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
    )
    while True:
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        if not ended:
            token = _draw(logits_processor(ids, logits.float()), generation_config.do_sample)
            ids = torch.cat([ids, token.unsqueeze(1)], 1)
            sampled.append(padding.index_copy(0, live, token))
            growing = (~stopping_criteria(ids, None)).nonzero().squeeze(1)
            ended = len(growing) == 0
            if len(growing) < len(live):
                growing = growing.new_zeros(1) if ended else growing  # one row to go on with, where other processes do
                live, ids, kwargs = live[growing], ids[growing], _rows(kwargs, growing)
                cache.batch_select_indices(growing)
        if not model._has_unfinished_sequences(ended, synced_gpus, device=ids.device):
            return torch.cat([input_ids, torch.stack(sampled, 1)], 1)
        outputs = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs), return_dict=True)
        logits = outputs.logits[:, -1]


def _check_layers(cache: Any) -> None:
    for layer in cache.layers:
        if type(layer) not in LAYERS:
            raise LossPlusError(
                f"compact_generation=True: the model has layers whose cache is a {type(layer).__name__}, not chosen from by row. "
                "Set it to False."
            )


def _distinct(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Numbers of the rows that differ (U,), and which of these each row is (B,)."""
    rows = ids if mask is None else torch.cat([ids, mask.to(ids)], 1)
    same = torch.unique(rows, dim=0, return_inverse=True)[1]
    number = torch.arange(len(ids), device=ids.device)
    return torch.full_like(number[: int(same.max()) + 1], len(ids)).scatter_reduce(0, same, number, "amin"), same


def _rows(kwargs: dict[str, Any], index: Tensor) -> dict[str, Any]:
    return {name: value[index] if name in PER_ROW and value is not None else value for name, value in kwargs.items()}


def _draw(scores: Tensor, sample: bool) -> Tensor:
    """
    One token (n,) a row of scores (n, V).

    Sampled by one uniform number a row: the first token at which the sum of probabilities is over it. torch.multinomial draws V numbers a
    row, which on a CPU takes longer than the model's layers.
    """
    if not sample:
        return scores.argmax(-1)
    sums = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    below = sums[:, -1:].nextafter(sums.new_zeros(()))  # the sum of all may be rounded to a little over or under 1
    at = (torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]).minimum(below)
    return torch.searchsorted(sums, at, right=True).squeeze(1)
