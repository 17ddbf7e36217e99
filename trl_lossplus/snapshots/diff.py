"""Two snapshots compared, from inputs to outputs, in the order of the data flow."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .replay import Replay, replay
from .store import Snapshot

# The order of the data flow: what the rollout fixed, what the forward pass gave, then what the loss made of it.
INPUTS = (
    "mask", "group_ids", "rollout_logps", "rollout_weights", "old_logps", "ref_logps", "old_values", "token_weights", "advantages",
    "returns", "logps", "entropies", "values", "kl_mask", "entropy_mask",
)  # fmt: skip
OUTPUTS = ("log_ratio", "ratio", "policy", "kl", "entropy", "value")


@dataclass
class Change:
    """One tensor that differs: how (missing, shape, dtype, values), by how much, and where first (micro-batch, row, token)."""

    name: str
    how: str
    largest: float = 0.0
    positions: int = 0
    where: tuple[int, ...] = ()


@dataclass
class Difference:
    """
    What differs between two snapshots.

    Attributes:
        headline: one line. settings: {field: (a, b)} of the specs. inputs, outputs: tensors in the order of the data flow.
        update: numbers of both updates: loss, terms, gradient norm, cosine over all tokens, clip fraction.
        row_cosines: the gradient's cosine by row. tokens: the tokens whose loss changed most.
    """

    headline: str
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    inputs: list[Change] = field(default_factory=list)
    outputs: list[Change] = field(default_factory=list)
    update: dict[str, tuple[float, float]] = field(default_factory=dict)
    cosine: float = float("nan")
    row_cosines: list[float] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs at all."""
        return not (self.settings or self.inputs or self.outputs)


def _change(name: str, parts: list[tuple[Tensor | None, Tensor | None]]) -> Change | None:
    """The first way in which a tensor differs over the micro-batches, or None."""
    for i, (a, b) in enumerate(parts):
        if (a is None) != (b is None):
            return Change(name, "missing in A" if a is None else "missing in B", where=(i,))
        if a is None or b is None:
            continue
        if a.shape != b.shape:
            return Change(name, f"shape {tuple(a.shape)} and {tuple(b.shape)}", where=(i,))
        if a.dtype != b.dtype:
            return Change(name, f"dtype {a.dtype} and {b.dtype}", where=(i,))
    largest, positions, where = 0.0, 0, ()
    for i, (a, b) in enumerate(parts):
        if a is None or b is None:
            continue
        apart = ~((a == b) | (torch.isnan(a.float()) & torch.isnan(b.float())))
        count = int(apart.sum())
        if count:
            first = apart.nonzero()[0].tolist()
            where = where or (i, *first)
            positions += count
            largest = max(largest, float((a.float() - b.float()).abs()[apart].nan_to_num(nan=float("inf")).amax()))
    return Change(name, "values", largest, positions, where) if positions else None


def _tensors(snapshot: Snapshot, name: str, kind: str) -> list[Tensor | None]:
    if kind == "inputs":
        return [getattr(part.batch, name) for part in snapshot.micro]
    return [part.per_token.get(name) for part in snapshot.micro]


def _changes(a: Snapshot, b: Snapshot, kind: str) -> list[Change]:
    names = INPUTS if kind == "inputs" else OUTPUTS
    pairs = ((name, list(zip(_tensors(a, name, kind), _tensors(b, name, kind), strict=False))) for name in names)
    return [change for name, parts in pairs if (change := _change(name, parts)) is not None]


def diff(a: Snapshot, b: Snapshot, tokens: int = 10) -> Difference:
    """
    What differs between two snapshots of the same rows, and what it does to the update.

    Args:
        tokens: how many of the tokens whose loss changed most are listed.
    """
    mine, theirs = asdict(a.spec), asdict(b.spec)
    settings = {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
    if [part.batch.logps.shape for part in a.micro] != [part.batch.logps.shape for part in b.micro]:
        shapes = [[tuple(part.batch.logps.shape) for part in s.micro] for s in (a, b)]
        change = Change("micro-batches", f"shapes {shapes[0]} and {shapes[1]}")
        return Difference("The snapshots hold other rows: their micro-batches have other shapes.", settings, [change])
    result = Difference("", settings, _changes(a, b, "inputs"), _changes(a, b, "outputs"))
    first, second = replay(a), replay(b)
    _compare_updates(result, a, first, second, tokens)
    result.headline = _headline(result, first, second)
    return result


def _compare_updates(result: Difference, a: Snapshot, first: Replay, second: Replay, tokens: int) -> None:
    numbers = {"loss": (first.loss, second.loss), "gradient norm": (first.gradient_norm, second.gradient_norm)}
    for name in sorted(first.terms.keys() | second.terms.keys()):
        numbers[f"term {name}"] = (first.terms.get(name, 0.0), second.terms.get(name, 0.0))
    for name in sorted(first.stats.keys() & second.stats.keys()):
        if name.startswith("clip_ratio") or name == "cispo_clip_ratio":
            numbers[name] = (first.stats[name], second.stats[name])
    for label, i in (("ratio q05", 1), ("ratio q50", 3), ("ratio q95", 5)):
        numbers[label] = (first.ratio_quantiles()[i], second.ratio_quantiles()[i])
    result.update = numbers
    result.cosine = first.cosine(second)
    row = 0
    for i, (x, y) in enumerate(zip(first.gradients, second.gradients, strict=True)):
        cosines = torch.nn.functional.cosine_similarity(x, y, dim=1)
        result.row_cosines += cosines.tolist()
        change = (second.outputs[i].per_token["policy"] - first.outputs[i].per_token["policy"]).abs()
        ids = a.micro[i].beside.get("completion_ids")
        for flat in change.flatten().topk(min(tokens, change.numel())).indices.tolist():
            r, t = divmod(flat, change.shape[1])
            if change[r, t] > 0:
                entry = {"row": row + r, "token": t, "change": float(change[r, t])}
                if ids is not None:
                    entry["id"] = int(ids[r, t])
                if "completion" in a.texts and row + r < len(a.texts["completion"]):
                    entry["completion"] = a.texts["completion"][row + r]
                result.tokens.append(entry)
        row += len(change)
    result.tokens = sorted(result.tokens, key=lambda entry: -entry["change"])[:tokens]


def _headline(result: Difference, first: Replay, second: Replay) -> str:
    if result.same:
        return "Nothing differs: settings, inputs and outputs are equal, bit for bit."
    settings = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in list(result.settings.items())[:4])
    if result.inputs:
        change = result.inputs[0]
        later = [c.name for c in (*result.inputs[1:], *result.outputs)]
        what = f"{change.name} changed" if change.how == "values" else f"{change.name}: {change.how}"
        effect = f", and after it {', '.join(later)}" if later else ", and nothing after it did"
        return f"{what}{effect}" + (f"; settings: {settings}." if settings else ".")
    terms = [n for n in sorted({*first.terms, *second.terms}) if first.terms.get(n, 0.0) != second.terms.get(n, 0.0)]
    if not result.outputs and not terms:
        return f"Only settings changed, and no output did: {settings}."
    only = (
        f"Only the {' and '.join(terms)} term{'s' if len(terms) > 1 else ''} changed"
        if terms
        else "Per-token outputs changed, no term did"
    )
    if not result.outputs and len(terms) == len({*first.terms, *second.terms}):
        only = "The per-token losses are equal; what they are added up to changed"
    return f"{only}: {settings}." if settings else f"{only}, with equal settings and inputs."
