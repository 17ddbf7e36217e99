"""
How a micro-batch's rows are laid out for the model: padded, packed, or packed with a group's prompt once.

A layout changes no number: log-probs come back as (B, T), and at the first rollout they are compared with the padded forward's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..config_checks import check_still_rows
from ..functional.errors import LossPlusError
from ..layout_rules import AUXILIARY, IMAGES, attention_fault, check_budget, inexact, layout_fault
from ..loss import Statistic
from ..registry import POLICY_LOSSES
from .adapters import base_of, by_row
from .budget import Packed, cost, least, row_facts, too_large
from .checks import has_rotary_positions
from .dealing import deal, deal_windows
from .minibatch import PARTS, MicroBatch, RowTable, trim
from .packing import Packing, pack
from .rollout_pass import ROWS
from .segment_attention import install, is_flash, packed_rows

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer
    from .ppo import PPOPlusTrainer

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
                **packing.inputs,
                shift_labels=packing.labels.unsqueeze(0),
                fused_lm_head=True,
            )
        entropy = outputs.entropy
        return packing.scatter(outputs.log_probs[0]), None if entropy is None else packing.scatter(entropy[0])

    def pack(self, inputs: dict[str, Any]) -> Packing:
        """A micro-batch's rows, packed."""
        return pack(*(inputs[name] for name in ROWS), share_prefix=self.share_prefix)


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
        (is_vision, IMAGES),
        (auxiliary_loss, AUXILIARY),
        (not has_rotary_positions(model), f"{config.model_type} has no rotary positions: padding moves its positions"),
        (bool(others), f"{config.model_type} has layers of kind {', '.join(others)}, which carry state from row to row"),
        (
            any_length and window is not None,
            f"{config.model_type} has a sliding window of {window} tokens, and a row may be longer",
        ),
        (dropout > 0, f"attention dropout of {dropout:g} acts (disable_dropout, or set it to 0 in model_init_kwargs)"),
    )
    return next((reason for holds, reason in reasons if holds), attention_fault(config._attn_implementation))


def choose(asked: str, reason: str | None, flash: bool = False) -> PackedForward | None:
    """
    The packed forward of a layout, or None for padded; says in one line what `auto` took.

    `flash`: the model attends by flash attention, which computes no prompt once for several rows.

    Raises:
        LossPlusError: a layout asked for by name that the model does not allow.
    """
    if asked == "padded":
        return None
    reason = layout_fault(asked, reason, flash)
    if reason is None:
        if asked == "auto":
            logger.info(
                "microbatch_layout: auto takes %s.",
                "packed, since the model attends by flash attention" if flash else "shared_prefix",
            )
        return PackedForward(share_prefix=asked != "packed" and not flash)
    if asked == "auto":
        logger.warning("microbatch_layout: auto takes padded, since %s.", reason)
        return None
    raise inexact(asked, reason)


def difference(
    name: str, packed: Tensor, padded: Tensor, mask: Tensor, dtype: torch.dtype, largest: Callable[[Tensor], Tensor]
) -> str | None:
    """
    Compares one micro-batch's log-probs or values (B, T) in both layouts; one line in the log.

    Args:
        mask: (B, T), the completion tokens.
        dtype: what the model computes in.
        largest: the maximum of a tensor over processes.

    Returns:
        What is wrong, or None.
    """
    apart = torch.where(mask, packed.float() - padded.float(), 0.0).abs()
    count, size = mask.sum().clamp(min=1), torch.where(mask, padded.float().abs(), 0.0).sum()
    if name == "values":  # which may be of any size
        apart = apart / (size / count).clamp(min=1)
    mean = largest(apart.sum() / count).item()
    allowed = TOLERANCE.get(dtype, 1e-4)
    if not mean <= allowed:
        return f"its {name} are {mean:.2g} from the padded ones on average, over {allowed:g}"
    logger.info("microbatch_layout: %s are within %.1e of the padded layout's on average.", name, mean)
    return None


def prepare(trainer: GRPOPlusTrainer) -> None:
    """
    Sets how a trainer packs rows, from its configuration and its model.

    Raises:
        LossPlusError: a layout that is not exact for this model, or rows to be skipped that move the weights.
    """
    args, auxiliary = trainer.args, trainer.aux_loss_enabled
    reads_entropy = "entropies" in POLICY_LOSSES.get(trainer.spec.policy_loss).requires
    trainer.entropy_has_gradient = reads_entropy or trainer.entropy_bonus_enabled
    check_still_rows(args, trainer.spec, auxiliary=auxiliary)
    check_budget(args, auxiliary=auxiliary, is_vision=trainer.is_vision)
    trainer.token_budget = args.max_tokens_per_microbatch
    asked, policy = args.microbatch_layout, base_of(trainer.model)
    unfit = by_row(trainer.model) or why_not(
        policy, is_vision=trainer.is_vision, auxiliary_loss=auxiliary, any_length=asked == "auto"
    )
    trainer.packed = choose(asked, unfit, is_flash(policy))
    if trainer.packed is not None:
        for model in (policy, trainer.reference_model):
            if model is not None:
                trainer.packed.attach(model)


def prepare_critic(trainer: PPOPlusTrainer) -> None:
    """Sets whether a critic's rows are packed with the policy's: a model of its own may not allow it, which is said in one line."""
    args, critic = trainer.args, getattr(trainer.critic, "model", None)
    if critic is not None:  # its rows are trimmed as the policy's
        trainer.trims_left = trainer.trims_left and has_rotary_positions(critic)
    if trainer.packed is None:
        return
    auto, shares = args.microbatch_layout == "auto", trainer.packed.share_prefix

    def unfit(model: nn.Module) -> str | None:
        if shares and is_flash(model):
            return "it attends by flash attention, which has no rows that share a prompt"
        return why_not(model, is_vision=False, auxiliary_loss=False, any_length=auto)

    reason = trainer.critic.fit(unfit)
    trainer.packs_critic = reason is None
    if reason is not None:
        logger.warning("microbatch_layout: the critic's rows are padded, since %s.", reason)


def told_beside(trainer: GRPOPlusTrainer) -> Callable[[MicroBatch], Tensor]:
    """What every process tells of its rows for `lay_out`: (B, 3), see `budget.row_facts`. Whitening may move a row that was still."""
    exact = trainer.token_budget is None or trainer.spec.advantage_normalization == "none"
    return row_facts(
        trainer.trims_left or isinstance(trainer.load, Packed), trainer.mode == "train" and trainer.args.skip_still_rows and exact
    )


def lay_out(trainer: GRPOPlusTrainer, micro_batches: list[MicroBatch], table: RowTable) -> list[MicroBatch]:
    """
    A rollout's micro-batches as they are run: without rows that move no weight, balanced, cut by the budget, trimmed, packed.

    Rows change their micro-batch only within an optimizer step, and not where something is taken over each micro-batch alone.

    Raises:
        LossPlusError: at the first rollout, a layout whose log-probs are not the padded ones.
    """
    args = trainer.args
    deals = args.windows_are_exact and args.top_entropy_quantile == 1.0
    per_window = args.gradient_accumulation_steps if deals else 1
    train, packed, budget = trainer.mode == "train", trainer.packed, trainer.token_budget
    skip = train and args.skip_still_rows
    parts = [[micro] for micro in micro_batches]
    if budget is not None or skip or train and packed is not None:
        rows = sum(len(micro["prompt_ids"]) for micro in micro_batches)
        parts = deal_windows(
            micro_batches,
            per_window=per_window,
            facts=told_beside(trainer),
            drop_still=skip,
            load=trainer.load,
            cuts=None if budget is None else _cuts(trainer, budget, table, len(micro_batches), per_window),
            budget=budget,
        )
        for micro in parts:
            for part in micro:
                part["rows_dealt"] = rows / len(parts) / len(micro)
    every = [part for micro in parts for part in micro]
    trim(every, left=trainer.trims_left, multiple=trainer.padded_multiple)
    if packed is not None:
        for part in every:
            part["packing"] = packed.pack(part)
        if train and not packed.proven:
            _prove(trainer, packed, every[0])
    return [micro[0] if len(micro) == 1 else {PARTS: micro} for micro in parts]


def _cuts(trainer: GRPOPlusTrainer, budget: int, table: RowTable, micro_batches: int, per_window: int) -> list[int]:
    """
    Into how many parts each micro-batch of a window is cut, by window: as few as keep every part of every process within the budget.

    So every process runs as many, without a word more to the others.
    """
    prompt, completion, counts = cast(Tensor, table.more).unbind(1)
    rows = torch.stack([prompt, completion, table.group, counts], 1).tolist()
    load, processes = trainer.load, trainer.accelerator.num_processes
    each, size = len(rows) // processes, per_window * (len(rows) // processes // micro_batches)
    longest = max((cost(rows, [row], load) for row in range(len(rows))), default=0)
    if longest > budget and trainer.accelerator.is_main_process:
        trainer.warn_once(f"max_tokens_per_microbatch={budget}: some rows are longer; each of them is run alone.")

    def window(first: int) -> int:
        of_all = [rows[at + first : at + first + size] for at in range(0, len(rows), each)]
        return least(
            lambda n: not any(too_large(some, deal(some, n * per_window, load, budget), budget, load) for some in of_all)
        )

    return [window(first) for first in range(0, each, size)]


def computed_rows(micro: MicroBatch) -> dict[str, Statistic]:
    """`frac_rows_computed`: rows that are in the loss, over those that were dealt to a micro-batch on average."""
    computed = micro["loss_mask"].any(1).sum().float()
    return {"frac_rows_computed": Statistic("mean", computed, torch.full_like(computed, micro["rows_dealt"]))}


def _prove(trainer: GRPOPlusTrainer, packed: PackedForward, micro: MicroBatch) -> None:
    packed.proven = True
    width = micro["prompt_ids"].shape[1] + micro["completion_ids"].shape[1]
    some = slice(0, None if trainer.token_budget is None else max(trainer.token_budget // width, 1))
    with trainer.for_rollout_pass():
        ours = trainer.passes(trainer.model, micro)
        trainer.packed = None
        theirs = trainer.passes(trainer.model, {name: micro[name][some] for name in ROWS})
        trainer.packed = packed
    gather, dtype, mask = trainer.accelerator.gather, trainer.compute_dtype, micro["completion_mask"][some].bool()
    for name, words in (("logps", "log-probs"), ("values", "values")):
        if name not in ours:
            continue
        wrong = difference(words, ours[name][some], theirs[name], mask, dtype, lambda x: gather(x.reshape(1)).amax())
        if wrong is None:
            continue
        asked = trainer.args.microbatch_layout
        raise LossPlusError(f"microbatch_layout={asked!r} is not exact for this model: {wrong}. Take padded.")
