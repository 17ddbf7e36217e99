"""Two snapshots compared, from inputs to outputs, in the order of the data flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..diagnostics.probes import with_loss_shares
from ..spec import LossSpec
from .headline import headline
from .relation import relation
from .replay import cosine, flat, ratio_quantiles
from .store import WINDOW_NUMBERS, MicroSnapshot, Snapshot

# The order of the data flow: what was generated, what the rollout fixed, what the forward pass gave, what the loss made of it.
INPUTS = (
    "prompt_ids", "completion_ids", "mask", "group_ids", "row_ids", "rollout_logps", "rollout_weights", "old_logps", "ref_logps",
    "old_values", "token_weights", "rewards", "advantages", "returns", "logps", "entropies", "values", "kl_mask", "entropy_mask",
    "selected_tokens", "row_terms",
)  # fmt: skip
WHOLE = ("prompt_ids", "completion_ids", "mask", "row_terms", "rewards")  # compared everywhere, not only where tokens count
OUTPUTS = ("log_ratio", "ratio", "policy", "kl", "entropy", "value")
RUN = ("step", "seed", "processes", "dtype", "device", "trl", "torch", "trl_lossplus")  # facts of a run that can change numbers
QUANTILES = (("ratio q05", 1), ("ratio q50", 3), ("ratio q95", 5))


@dataclass
class Change:
    """
    One tensor that differs: how (missing, shape, dtype, values), by how much, where first (micro-batch, row, token), and what turned
    A's into B's where that is simple (see `relation`).
    """

    name: str
    how: str
    largest: float = 0.0
    positions: int = 0
    where: tuple[int, ...] = ()
    relation: str = ""

    @property
    def words(self) -> str:
        """As the headline says it."""
        if self.how != "values":
            return f"{self.name}: {self.how}"
        return f"{self.name} changed ({self.relation})" if self.relation else f"{self.name} changed"


@dataclass
class Difference:
    """
    What differs between two snapshots.

    Attributes:
        headline: one line. settings: {field: (a, b)} of the specs. facts: the same of the runs (step, dtype, versions). inputs, window, outputs, gradient: in the order of the data flow.
        update: numbers of both updates: loss, terms, KL share, gradient norm, clip fractions, ratio quantiles. cosine: between the
        gradients, over all tokens; row_cosines: by row. tokens: those whose loss changed most. rows: the rows that hold the largest
        changes, each with all of its tokens.
    """

    headline: str
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    inputs: list[Change] = field(default_factory=list)
    window: list[Change] = field(default_factory=list)
    outputs: list[Change] = field(default_factory=list)
    gradient: list[Change] = field(default_factory=list)
    update: dict[str, tuple[float, float]] = field(default_factory=dict)
    cosine: float = float("nan")
    row_cosines: list[float] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing of the loss differs; the facts of the runs may."""
        numbers = [a != b and not (a != a and b != b) for a, b in self.update.values()]
        return not (self.settings or self.inputs or self.window or self.outputs or self.gradient or any(numbers))


def _change(name: str, parts: list[tuple[Tensor | None, Tensor | None]], valid: list[Tensor]) -> Change | None:
    """
    The first way in which a tensor differs over the micro-batches, or None.

    Where it has a value a token, only tokens that count in both snapshots (`valid`) are compared; the masks stand for the others.
    """
    for i, (a, b) in enumerate(parts):
        if (a is None) != (b is None):
            return Change(name, "missing in A" if a is None else "missing in B", where=(i,))
        if a is None or b is None:
            continue
        if a.shape != b.shape:
            return Change(name, f"shape {tuple(a.shape)} and {tuple(b.shape)}", where=(i,))
        if a.dtype != b.dtype:
            return Change(name, f"dtype {a.dtype} and {b.dtype}", where=(i,))
    largest, where = 0.0, ()
    moved: list[tuple[Tensor, Tensor]] = []
    for i, (a, b) in enumerate(parts):
        if a is None or b is None:
            continue
        apart = ~((a == b) | (torch.isnan(a.float()) & torch.isnan(b.float())))
        if a.shape == valid[i].shape and name not in WHOLE:
            apart &= valid[i]
        if bool(apart.any()):
            where = where or (i, *apart.nonzero()[0].tolist())
            moved.append((a[apart], b[apart]))
            largest = max(largest, float((a.float() - b.float()).abs()[apart].nan_to_num(nan=float("inf")).amax()))
    if not moved:
        return None
    before, after = torch.cat([a for a, _ in moved]), torch.cat([b for _, b in moved])
    return Change(name, "values", largest, len(before), where, relation(before, after))


def _input(part: MicroSnapshot, name: str) -> Tensor | None:
    return part.beside[name] if name in part.beside else getattr(part.batch, name, None)


def _changes(a: Snapshot, b: Snapshot, names: tuple[str, ...], of: Callable[[MicroSnapshot, str], Tensor | None]) -> list[Change]:
    pairs = list(zip(a.micro, b.micro, strict=True))
    valid = [x.batch.mask & y.batch.mask for x, y in pairs]
    found = (_change(name, [(of(x, name), of(y, name)) for x, y in pairs], valid) for name in names)
    return [change for change in found if change is not None]


def _window_changes(a: Snapshot, b: Snapshot) -> list[Change]:
    """The optimizer step's counts that differ."""

    def of(part: MicroSnapshot, name: str) -> Tensor | None:
        value = None if part.window is None else getattr(part.window, name)
        return value if value is None or isinstance(value, Tensor) else torch.tensor(float(value))

    names = (*WINDOW_NUMBERS, "group_tokens")
    changes = _changes(a, b, names, lambda part, name: None if (x := of(part, name)) is None else x.float().reshape(-1))
    for change in changes:
        change.name = f"window {change.name}"
    return changes


def _widened(part: MicroSnapshot, other: MicroSnapshot) -> MicroSnapshot:
    """
    A micro-batch that was trimmed more than the other's, with masked columns up to its width. What the other holds there in token
    ids is taken over: behind the end stands padding, or what the mask left out.
    """
    rows, width = part.batch.mask.shape
    more = other.batch.mask.shape[1] - width
    if more <= 0 or len(other.batch.mask) != rows:
        return part

    def wide(x: Tensor | None, like: Tensor | None) -> Tensor | None:
        return x if x is None or like is None or x.shape == like.shape else torch.nn.functional.pad(x, (0, more))

    names = [item.name for item in fields(part.batch) if item.name != "group_ids"]
    given: dict[str, Any] = {name: wide(getattr(part.batch, name), getattr(other.batch, name)) for name in names}
    batch = replace(part.batch, **given)
    beside, ids = dict(part.beside), other.beside.get("completion_ids")
    if "completion_ids" in beside and ids is not None:
        beside["completion_ids"] = torch.cat([beside["completion_ids"], ids[:, width:]], 1)
    per_token = {name: torch.nn.functional.pad(x, (0, more)) for name, x in part.per_token.items()}
    gradient = torch.nn.functional.pad(part.gradient, (0, more))
    return replace(part, batch=batch, per_token=per_token, gradient=gradient, beside=beside)


def _aligned(a: Snapshot, b: Snapshot) -> tuple[Snapshot, Snapshot]:
    """Both with micro-batches of equal width, where they have as many rows."""
    pairs = list(zip(a.micro, b.micro, strict=False))
    if len(a.micro) != len(b.micro):
        return a, b
    return replace(a, micro=[_widened(x, y) for x, y in pairs]), replace(b, micro=[_widened(y, x) for x, y in pairs])


def diff(a: Snapshot, b: Snapshot, tokens: int = 10, rows: int = 8) -> Difference:
    """
    What differs between two snapshots of the same rows, and what it does to the update.

    Everything is as it was when the snapshots were taken: nothing is computed again, so a change of the code shows too.

    Args:
        tokens: how many of the tokens whose loss changed most are listed. rows: how many rows are shown whole.
    """
    mine, theirs = asdict(a.spec), asdict(b.spec)
    settings = {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
    facts = {name: (a.facts.get(name), b.facts.get(name)) for name in RUN if a.facts.get(name) != b.facts.get(name)}
    result = Difference("", settings, facts, update=_updates(a, b))
    a, b = _aligned(a, b)
    shapes = [[tuple(part.batch.logps.shape) for part in snapshot.micro] for snapshot in (a, b)]
    if shapes[0] != shapes[1]:
        result.inputs = [Change("micro-batches", f"shapes {shapes[0]} and {shapes[1]}")]
        result.headline = headline(result)
        return result
    result.inputs = _changes(a, b, INPUTS, _input)
    result.window = _window_changes(a, b)
    names = {name for part in (*a.micro, *b.micro) for name in part.per_token}
    outputs = (*OUTPUTS, *sorted(names - set(OUTPUTS)))
    result.outputs = _changes(a, b, outputs, lambda part, name: part.per_token.get(name))
    result.gradient = _changes(a, b, ("gradient",), lambda part, name: part.gradient)
    result.cosine = cosine(flat([part.gradient for part in a.micro]), flat([part.gradient for part in b.micro]))
    _compare_tokens(result, a, b, tokens, rows)
    result.headline = headline(result)
    return result


def _updates(a: Snapshot, b: Snapshot) -> dict[str, tuple[float, float]]:
    """The numbers of both updates."""
    norms = [float(flat([part.gradient for part in s.micro]).norm()) / s.processes for s in (a, b)]
    numbers = {"loss": (a.loss, b.loss), "gradient norm": (norms[0], norms[1])}
    for name in sorted(a.terms.keys() | b.terms.keys()):
        numbers[f"term {name}"] = (a.terms.get(name, 0.0), b.terms.get(name, 0.0))
    shares = [with_loss_shares({f"loss/{name}": value for name, value in s.terms.items()}) for s in (a, b)]
    for name in sorted({key.removeprefix("share/loss/") for share in shares for key in share if key.startswith("share/")}):
        pair = [share.get(f"share/loss/{name}", 1.0 if f"loss/{name}" in share else 0.0) for share in shares]
        numbers[f"share {name}"] = (pair[0], pair[1])
    for name in sorted(a.stats.keys() & b.stats.keys()):
        if name.startswith("clip_ratio") or name == "cispo_clip_ratio":
            numbers[name] = (a.stats[name], b.stats[name])
    pairs = [[(part.per_token["ratio"], part.batch.mask) for part in s.micro if "ratio" in part.per_token] for s in (a, b)]
    quantiles = [ratio_quantiles(pair) for pair in pairs]
    return numbers | {label: (quantiles[0][i], quantiles[1][i]) for label, i in QUANTILES}


def token_losses(part: MicroSnapshot, spec: LossSpec) -> Tensor:
    """The loss of each token before it is added up, all terms with their coefficients: (B, T)."""
    coefficients = {"policy": 1.0, "kl": spec.beta, "entropy": -spec.entropy_coef, "value": spec.vf_coef}
    total = torch.zeros_like(part.batch.logps)
    for name, coefficient in coefficients.items():
        if name in part.terms and name in part.per_token:
            share = coefficient * part.per_token[name]
            acts = part.batch.kl_mask if name == "kl" else None
            total = total + (share if acts is None else torch.where(acts, share, torch.zeros_like(share)))
    return torch.where(part.batch.mask, total, torch.zeros_like(total))


def row_cosines(a: Tensor, b: Tensor) -> Tensor:
    """Cosines (B,) between the rows of two (B, T), whatever their size; 1 where they are equal, also as zeros."""
    x, y = (rows / rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny) for rows in (a, b))
    return torch.where((a == b).all(1), 1.0, torch.nn.functional.cosine_similarity(x, y, dim=1))


def _compare_tokens(result: Difference, a: Snapshot, b: Snapshot, tokens: int, rows: int) -> None:
    """Cosines by row, the tokens whose loss changed most, and the rows that hold them."""
    first, listed, whole = 0, [], []
    for x, y in zip(a.micro, b.micro, strict=True):
        before, after = token_losses(x, a.spec), token_losses(y, b.spec)
        change = (after - before).nan_to_num(nan=float("inf"))
        size = change.abs()
        result.row_cosines += row_cosines(x.gradient, y.gradient).tolist()
        for flat_index in size.flatten().topk(min(tokens, size.numel())).indices.tolist():
            r, t = divmod(flat_index, size.shape[1])
            if size[r, t] > 0:
                entry = {"row": first + r, "token": t, "a": float(before[r, t]), "b": float(after[r, t])}
                listed.append({**entry, "change": float(change[r, t]), **_texts(a, x, first + r, r, t)})
        largest = size.amax(1)
        for r in largest.topk(min(rows, len(largest))).indices.tolist():
            if largest[r] > 0:
                whole.append((float(largest[r]), _row(a, x, first, r, before, after)))
        first += len(size)
    result.tokens = sorted(listed, key=lambda entry: -abs(entry["change"]))[:tokens]
    result.rows = [row for _, row in sorted(whole, key=lambda pair: -pair[0])[:rows]]
    for row in result.rows:
        row["cosine"] = result.row_cosines[row["row"]]


def _texts(a: Snapshot, part: MicroSnapshot, row: int, r: int, t: int) -> dict[str, Any]:
    """A token's id and text, and its completion, where the snapshot holds them."""
    found: dict[str, Any] = {}
    ids, completions = part.beside.get("completion_ids"), a.texts.get("completion", [])
    if ids is not None and ids.dim() == 2 and t < ids.shape[1]:
        found["id"] = int(ids[r, t])
        if found["id"] in a.tokens:
            found["text"] = a.tokens[found["id"]]
    return found | ({"completion": completions[row]} if row < len(completions) else {})


def _row(a: Snapshot, part: MicroSnapshot, first: int, r: int, before: Tensor, after: Tensor) -> dict[str, Any]:
    """A row with all of its tokens: text, loss in A and in B, whether it counts."""
    mask, prompts = part.batch.mask[r], a.texts.get("prompt", [])
    last = int(mask.nonzero()[-1]) + 1 if bool(mask.any()) else 0
    tokens = []
    for t in range(last):
        text = _texts(a, part, first + r, r, t)
        shown = text.get("text", f"[{text.get('id', t)}]")
        tokens.append({"text": shown, "a": float(before[r, t]), "b": float(after[r, t]), "counts": bool(mask[t])})
    return {"row": first + r, "prompt": prompts[first + r] if first + r < len(prompts) else "", "tokens": tokens}
