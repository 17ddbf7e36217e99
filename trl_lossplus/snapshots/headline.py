"""The first line of a difference: what changed and what only followed from it, in the order of the data flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .diff import Difference

MOST = 4  # settings that are named


def headline(found: Difference) -> str:
    """One line that ends with a full stop."""
    settings = [f"{name} {old!r} -> {new!r}" for name, (old, new) in found.settings.items()]
    named = ", ".join(settings[:MOST]) + (f" and {len(settings) - MOST} more" if len(settings) > MOST else "")
    facts = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in found.facts.items())
    of_run = f"; of the run: {facts}" if facts else ""
    if found.same:
        return f"Nothing differs: settings, inputs and outputs are equal, bit for bit{of_run}."
    if found.inputs or found.window:
        return f"{_inputs(found)}{f'; settings: {named}' * bool(named)}{of_run}."
    return f"{_outputs(found)}{f': {named}' if named else ', with equal settings and inputs'}{of_run}."


def _moved_terms(found: Difference) -> dict[str, bool]:
    """{term: whether it moved}, of the terms that are not 0 in both."""
    pairs = {name.removeprefix("term "): pair for name, pair in found.update.items() if name.startswith("term ") and any(pair)}
    return {name: a != b for name, (a, b) in pairs.items()}


def _terms(names: list[str]) -> str:
    """the kl term; the kl and policy terms."""
    return f"the {' and '.join(names)} term{'s' * (len(names) > 1)}"


def _inputs(found: Difference) -> str:
    """The first input that changed, and what did after it."""
    first, *rest = [*found.inputs, *found.window]
    if first.name == "micro-batches":
        return "The snapshots hold other rows: their micro-batches have other shapes"
    moved = [name for name, is_moved in _moved_terms(found).items() if is_moved]
    later = [change.name for change in rest if change not in found.window or not found.inputs]
    later += ["the window"] if found.inputs and found.window else []
    later += [change.name for change in found.outputs] or ([_terms(moved)] if moved else [])
    return f"{first.words}, and after it {', '.join(later)}" if later else f"{first.words}, and nothing after it did"


def _outputs(found: Difference) -> str:
    """Which outputs changed with equal inputs."""
    terms = _moved_terms(found)
    moved = [name for name, is_moved in terms.items() if is_moved]
    if not found.outputs and not moved:
        return f"Only the {found.gradient[0].words}" if found.gradient else "Only settings changed, and no output did"
    if not found.outputs and len(moved) == len(terms):
        return "The per-token losses are equal; what they are added up to changed"
    if not moved:
        return f"Per-token outputs changed ({found.outputs[0].words}), no term did"
    relations = {change.name: change.relation for change in found.outputs}
    how = f" ({relations[moved[0]]})" if len(moved) == 1 and relations.get(moved[0]) else ""
    return f"Only {_terms(moved)} changed{how}"
