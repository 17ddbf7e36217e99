"""
How a micro-batch's rows are laid out for the model: padded, packed, or packed with a group's prompt once.

A layout changes no number: log-probs come back as (B, T), and at the first rollout they are compared with the padded forward's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..functional.errors import LossPlusError
from ..loss import Statistic
from .adapters import base_of
from .checks import has_rotary_positions
from .dealing import deal_windows
from .minibatch import MicroBatch, trim
from .packing import Packing, pack
from .segment_attention import OURS, REPLACED, install, packed_rows
from .still_rows import what_moves_still_rows

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer

logger = logging.getLogger(__name__)

ATTENDS = ("full_attention", "sliding_attention")
# How far log-probs may be apart on average, by the width of the numbers that the model computes in.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


class PackedForward:
    """
    The forward pass over packed rows of a policy and its reference.

    Args:
        share_prefix: whether neighbours with the same prompt have it once.
    """

    def __init__(self, share_prefix: bool):
        self.share_prefix = share_prefix
        self.proven = False
        self._states: Tensor | None = None

    def attach(self, model: nn.Module) -> None:
        """Prepares a transformers model (not wrapped): attention by segments, and only the hidden states that are read."""
        install(model)
        model.base_model.register_forward_hook(self._pick)  # type: ignore[union-attr]

    def _pick(self, trunk: nn.Module, args: Any, output: Any) -> None:
        if self._states is not None:
            output.last_hidden_state = output.last_hidden_state[:, self._states]

    @contextmanager
    def reading(self, states: Tensor) -> Iterator[None]:
        """Within it the trunk gives the hidden states at these places of the packed row only: (1, n, H)."""
        self._states = states
        try:
            with packed_rows():
                yield
        finally:
            self._states = None

    def score(self, model: nn.Module, packing: Packing) -> tuple[Tensor, Tensor | None]:
        """Log-probs and, where the model gives them, entropies (B, T) of packed rows, through the wrapped `model` with TRL's head."""
        with self.reading(packing.states):
            outputs = model(
                input_ids=packing.input_ids,
                position_ids=packing.position_ids,
                segments=packing.segments,
                shift_labels=packing.labels.unsqueeze(0),
                fused_lm_head=True,
            )
        entropy = outputs.entropy
        return packing.scatter(outputs.log_probs[0]), None if entropy is None else packing.scatter(entropy[0])

    def chunks(self, ids: Tensor, mask: Tensor, completion: int, rows: int) -> Iterator[Packing]:
        """Rows (B, P + T) whose last `completion` columns are the completion, packed `rows` at a time."""
        split = ids.shape[1] - completion
        for part, seen in zip(ids.split(rows), mask.split(rows), strict=True):
            yield pack(part[:, :split], seen[:, :split], part[:, split:], seen[:, split:], share_prefix=self.share_prefix)

    def pack(self, inputs: dict[str, Any]) -> Packing:
        """A micro-batch's rows, packed."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return pack(*(inputs[name] for name in names), share_prefix=self.share_prefix)


def why_not(model: nn.Module, *, is_vision: bool, auxiliary_loss: bool, any_length: bool) -> str | None:
    """
    Why rows of a model cannot be packed, or None where they can.

    Args:
        model: a transformers model, not wrapped.
        auxiliary_loss: whether a router's loss over all tokens is part of the loss.
        any_length: also name what is exact for short rows only (a sliding window; a longer row is refused when it comes).
    """
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTENDS))
    window = (
        getattr(config, "sliding_window", None) if "sliding_attention" in (getattr(config, "layer_types", None) or ()) else None
    )
    dropout = max((getattr(config, name, None) or 0.0) for name in ("attention_dropout", "attn_pdrop"))
    reasons = (
        (is_vision, "a vision-language model's rows carry images"),
        (auxiliary_loss, "the router's auxiliary loss depends on how rows are split"),
        (not has_rotary_positions(model), f"{config.model_type} has no rotary positions: padding moves its positions"),
        (bool(others), f"{config.model_type} has layers of kind {', '.join(others)}, which carry state from row to row"),
        (
            any_length and window is not None,
            f"{config.model_type} has a sliding window of {window} tokens, and a row may be longer",
        ),
        (dropout > 0, f"attention dropout of {dropout:g} acts (disable_dropout, or set it to 0 in model_init_kwargs)"),
        (
            config._attn_implementation not in (REPLACED, OURS),
            f"attn_implementation is {config._attn_implementation!r}; packed rows are computed with {REPLACED!r}",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)


def choose(asked: str, reason: str | None) -> PackedForward | None:
    """
    The packed forward of a layout, or None for padded; says in one line what `auto` took.

    Raises:
        LossPlusError: a layout asked for by name that the model does not allow.
    """
    if asked == "padded":
        return None
    if reason is None:
        if asked == "auto":
            logger.info("microbatch_layout: auto takes shared_prefix.")
        return PackedForward(share_prefix=asked != "packed")
    if asked == "auto":
        logger.warning("microbatch_layout: auto takes padded, since %s.", reason)
        return None
    raise LossPlusError(f"microbatch_layout={asked!r} is not exact here: {reason}. Take padded, or auto.")


def difference(
    packed: Tensor, padded: Tensor, mask: Tensor, dtype: torch.dtype, largest: Callable[[Tensor], Tensor]
) -> str | None:
    """
    Compares one micro-batch's log-probs (B, T) in both layouts; one line in the log.

    Args:
        mask: (B, T), the completion tokens.
        dtype: what the model computes in.
        largest: the maximum of a tensor over processes.

    Returns:
        What is wrong, or None.
    """
    apart = torch.where(mask, packed.float() - padded.float(), 0.0).abs()
    mean = largest(apart.sum() / mask.sum().clamp(min=1)).item()
    allowed = TOLERANCE.get(dtype, 1e-4)
    if not mean <= allowed:
        return f"its log-probs are {mean:.2g} from the padded ones on average, over {allowed:g}"
    logger.info("microbatch_layout: log-probs are within %.1e of the padded layout's on average.", mean)
    return None


def prepare(trainer: GRPOPlusTrainer) -> None:
    """
    Sets how a trainer packs rows, from its configuration and its model.

    Raises:
        LossPlusError: a layout that is not exact for this model, or rows to be skipped that move the weights.
    """
    args, auxiliary = trainer.args, trainer.aux_loss_enabled
    if args.skip_still_rows:
        reason = what_moves_still_rows(trainer.spec)
        if auxiliary or trainer.entropy_bonus_enabled:
            reason = f"the {'auxiliary loss of the router' if auxiliary else 'entropy bonus'} acts on every row"
        if reason is not None:
            raise LossPlusError(f"skip_still_rows=True would change the gradient: {reason}. Set it to False.")
    asked, policy = args.microbatch_layout, base_of(trainer.model)
    unfit = why_not(policy, is_vision=trainer.is_vision, auxiliary_loss=auxiliary, any_length=asked == "auto")
    trainer.packed = choose(asked, trainer.packs_no_rows or unfit)
    if trainer.packed is not None:
        for model in (policy, trainer.reference_model):
            if model is not None:
                trainer.packed.attach(model)


def lay_out(trainer: GRPOPlusTrainer, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """
    A rollout's micro-batches as they are run: without rows that move no weight, balanced, trimmed, packed.

    Rows change their micro-batch only within an optimizer step, and not where something is taken over each micro-batch alone.

    Raises:
        LossPlusError: at the first rollout, a layout whose log-probs are not the padded ones.
    """
    args = trainer.args
    deals = args.windows_are_exact and args.top_entropy_quantile == 1.0
    per_window = args.gradient_accumulation_steps if deals else 1
    train, packed, skip = trainer.mode == "train", trainer.packed, args.skip_still_rows
    if train and (packed is not None or skip):
        rows = sum(len(micro["prompt_ids"]) for micro in micro_batches)
        shares = packed is not None and packed.share_prefix
        micro_batches = deal_windows(micro_batches, per_window=per_window, drop_still=skip, share_prefix=shares)
        for micro in micro_batches:
            micro["rows_dealt"] = rows / len(micro_batches)
    trim(micro_batches, left=trainer.trims_left, multiple=trainer.padded_multiple)
    if packed is None:
        return micro_batches
    for micro in micro_batches:
        micro["packing"] = packed.pack(micro)
    if train and not packed.proven:
        _prove(trainer, packed, micro_batches[0])
    return micro_batches


def computed_rows(micro: MicroBatch) -> dict[str, Statistic]:
    """`frac_rows_computed`: rows that are in the loss, over those that were dealt to a micro-batch on average."""
    computed = micro["loss_mask"].any(1).sum().float()
    return {"frac_rows_computed": Statistic("mean", computed, torch.full_like(computed, micro["rows_dealt"]))}


def _prove(trainer: GRPOPlusTrainer, packed: PackedForward, micro: MicroBatch) -> None:
    packed.proven = True
    with trainer.for_rollout_pass():
        ours = trainer.policy_forward(trainer.model, micro)[0]
        trainer.packed = None
        theirs = trainer.policy_forward(trainer.model, {**micro, "packing": None})[0]
        trainer.packed = packed
    gather, dtype = trainer.accelerator.gather, trainer.compute_dtype
    wrong = difference(ours, theirs, micro["completion_mask"].bool(), dtype, lambda x: gather(x.reshape(1)).amax())
    if wrong is not None:
        asked = trainer.args.microbatch_layout
        raise LossPlusError(f"microbatch_layout={asked!r} is not exact for this model: {wrong}. Take padded.")
