"""What there is to choose from, as text: `listing` for the terminal, `markdown` for docs/losses.md and docs/advantages.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

from .elsewhere import ELSEWHERE, Elsewhere, written
from .functional.aggregation import AGGREGATIONS
from .functional.correction import CORRECTION_MODES, REJECTIONS
from .functional.errors import unknown_name
from .functional.kl import KL_ALIASES, KL_ESTIMATORS, KL_FORMULAS
from .registry import ADVANTAGE_ESTIMATORS, ALWAYS, POLICY_LOSSES, TENSORS, TRAITS, Entry
from .spec import LossSpec


class Row(NamedTuple):
    """One thing to choose: its name, formula, the tensors that it needs, the settings that it reads, and where it is from."""

    name: str
    formula: str
    needs: str = ""
    options: str = ""
    source: str = ""


PACKAGE = f"{__name__.partition('.')[0]}."  # the pages hold ours; a listing also what a user has registered
KL_GRADIENTS = {
    "k1": "unbiased value; in the loss it needs use_bias_correction_kl, without which its expected gradient is 0",
    "k2": "biased value; in the loss the reverse KL's gradient",
    "k3": "unbiased value, never negative; in the loss the forward KL's gradient, with use_bias_correction_kl the reverse KL's",
    "abs": "how far, in either direction",
}
OWN_GRADIENT = "registered by you; in the loss its own gradient"
CORRECTIONS = {
    "token_truncate": "w = min(r, clip_max) a token, r = pi_old / pi_sampler (TIS)",
    "token_mask": "w = r within [clip_min, clip_max], else 0 (MIS, IcePop)",
    "sequence_truncate": "w = min(product of the row's r, clip_max), one a row",
    "sequence_mask": "w = the row's product within [clip_min, clip_max], else 0",
}
STATISTICS = {"k1": "log r", "k2": "(log r)^2 / 2", "k3": "r - 1 - log r"}
LEVELS = {
    "token": "of the token",
    "seq_sum": "summed over the row",
    "seq_mean": "mean over the row",
    "seq_max": "largest of the row",
}


def _entry_row(entry: Entry) -> Row:
    needs = sorted(entry.requires - ALWAYS) + [f"[{name}]" for name in sorted(entry.optional)]
    return Row(entry.name, " ".join(entry.formula.split()), ", ".join(needs), ", ".join(sorted(entry.options)), entry.source)


def _kl_rows() -> list[Row]:
    aliases: dict[str, list[str]] = {}
    for alias, name in KL_ALIASES.items():
        aliases.setdefault(name, []).append(alias)
    rows = []
    for name in KL_ESTIMATORS:
        formula = KL_FORMULAS[name]
        also = f" (also {', '.join(aliases[name])})" if name in aliases else ""
        rows.append(
            Row(
                name,
                f"{formula}, d = logp - ref_logp: {KL_GRADIENTS.get(name, OWN_GRADIENT)}{also}",
                "ref_logps",
                "log_ratio_clamp",
                "Schulman, 2020" if name in KL_GRADIENTS else "registered",
            )
        )
    plus = "the value of k1, k3 or abs with the gradient of k2 (straight-through)"
    return [*rows, Row("k1+, k3+, abs+", plus, "ref_logps", "log_ratio_clamp", "verl's kl_penalty")]


def _correction_rows() -> list[Row]:
    bounds = "vllm_importance_sampling_clip_min, vllm_importance_sampling_clip_max, rollout_is_batch_normalize"
    needs = "old_logps, rollout_logps"
    rows = [Row(name, CORRECTIONS[name], needs, bounds, "TRL's vllm_importance_sampling_mode") for name in CORRECTION_MODES]
    for name in REJECTIONS:
        level, _, kind = name.rpartition("_")
        kept = "within log of [low, high]" if kind == "k1" else "<= high"
        formula = f"rollout_rs: kept where {STATISTICS[kind]} {LEVELS[level]} is {kept}"
        rows.append(Row(name, formula, needs, "rollout_rs_threshold", "verl's rollout_rs (there k1 is of 1 / r)"))
    return rows


def _here(there: Elsewhere) -> str:
    """Our settings for something of another framework, or that there are none; and the note."""
    ours = "not here" if there.settings is None else written(there.settings)
    return f"{ours} ({there.note})" if there.note else ours


KINDS: dict[str, Callable[[], list[Row]]] = {
    "policy": lambda: [_entry_row(POLICY_LOSSES.get(name)) for name in POLICY_LOSSES.names()],
    "advantages": lambda: [_entry_row(ADVANTAGE_ESTIMATORS.get(name)) for name in ADVANTAGE_ESTIMATORS.names()],
    "kl": _kl_rows,
    "aggregation": lambda: [Row(name, formula) for name, formula in AGGREGATIONS.items()],
    "correction": _correction_rows,
    "elsewhere": lambda: [Row(f"{there.framework}: {there.name}", _here(there)) for there in ELSEWHERE],
}


def rows(kind: str) -> list[Row]:
    """
    Everything of one kind.

    Raises:
        LossPlusError: the kind is not policy, advantages, kl, aggregation, correction or elsewhere.
    """
    if kind not in KINDS:
        raise unknown_name("list", kind, KINDS)
    return KINDS[kind]()


def listing(kind: str) -> str:
    """
    One paragraph each: the name and its formula, what it needs, the settings that it reads, and its source.

    Args:
        kind: policy, advantages, kl, aggregation, correction or elsewhere.

    Raises:
        LossPlusError: another kind.
    """
    table = rows(kind)
    width = max(len(row.name) for row in table)
    lines = []
    for row in table:
        lines.append(f"{row.name.ljust(width)}  {row.formula}")
        details = (("needs", row.needs), ("options", row.options), ("source", row.source))
        lines += [f"{' ' * width}    {word}: {text}" for word, text in details if text]
    return "\n".join(lines) + "\n"


def default_of(option: str) -> str:
    """The default of a spec's field, as it is written; empty for what is no field (an estimator's own keyword)."""
    return next((f"`{item.default}`" for item in fields(LossSpec) if item.name == option), "")


def _table_of_elsewhere() -> list[str]:
    """What other frameworks call it: one table a framework."""
    lines = [
        "## Where is it?",
        "",
        "What other frameworks call a loss or an estimator, and the settings that give it here (`trl-lossplus list elsewhere`).",
    ]
    frameworks = list(dict.fromkeys(there.framework for there in ELSEWHERE))
    for framework in frameworks:
        lines += ["", f"### {framework}", "", "| there | here | |", "|---|---|---|"]
        for there in (there for there in ELSEWHERE if there.framework == framework):
            ours = "not here" if there.settings is None else f"`{written(there.settings)}`"
            lines.append(f"| {there.name} | {ours} | {there.note} |")
    return lines


def _section(entry: Entry, image: str | None) -> list[str]:
    row, text = _entry_row(entry), inspect.cleandoc(entry.func.__doc__ or "")
    options = ", ".join(f"`{name}`" + (f" ({default_of(name)})" if default_of(name) else "") for name in sorted(entry.options))
    facts = [
        f"- needs: {', '.join(f'`{name}` {TENSORS[name][0]}' for name in sorted(entry.requires)) or 'rewards alone'}"
        + (f"; takes `{'`, `'.join(sorted(entry.optional))}` where given" if entry.optional else ""),
        f"- options: {options or 'none'}",
        f"- source: {row.source}",
        *([f"- loss_aggregation unless set: `{entry.aggregation}`"] if image else []),
    ]
    marks = [f"`{name}` ({TRAITS[name].split(': ', 1)[1]})" for name in sorted(entry.traits) if name in TRAITS]
    facts += [f"- marks: {'; '.join(marks)}"] if marks else []
    picture = ["", f"![{entry.name}](img/{image})"] if image else []
    return [f"## {entry.name}", "", f"    {row.formula}", "", *text.splitlines(), "", *facts, *picture, ""]


def markdown(kind: str) -> str:
    """
    A page with every objective (kind policy, with its picture in img/) or every estimator (kind advantages).

    Raises:
        LossPlusError: another kind.
    """
    if kind not in ("policy", "advantages"):
        raise unknown_name("markdown", kind, ("policy", "advantages"))
    registry = POLICY_LOSSES if kind == "policy" else ADVANTAGE_ESTIMATORS
    head = {
        "policy": "# Policy objectives\n\n`policy_loss` by name. r = pi / pi_old of a token, A its advantage, sg = no gradient. Each "
        "picture shows the loss of a token and its gradient by the log-prob against the ratio, for A = +1 and A = -1 (p_old = .25). What verl, OpenRLHF, NeMo-RL, SkyRL, ms-swift, prime-rl, AReaL, slime, ROLL and Trinity-RFT "
        "call it: [Where is it?](#where-is-it)",
        "advantages": "# Advantage estimators\n\n`advantage_estimator` by name. s = a completion's reward, r_t a token's. A row that "
        "is not scored, or has nothing to be compared with, gets 0. What becomes of groups whose rewards are all equal: "
        "[zero_spread.md](zero_spread.md). What other frameworks call it: [losses.md](losses.md#where-is-it).",
    }[kind]
    lines = [head, "", "Made by `python docs/make_catalog.py` from the registry; not to be edited by hand.", ""]
    entries = [entry for entry in map(registry.get, registry.names()) if entry.func.__module__.startswith(PACKAGE)]
    lines += ["| name | formula |", "|---|---|"]
    lines += [f"| [{e.name}](#{e.name}) | {_entry_row(e).formula.replace('|', chr(92) + '|')} |" for e in entries] + [""]
    for entry in entries:
        lines += _section(entry, f"{entry.name}.svg" if kind == "policy" else None)
    lines += _table_of_elsewhere() if kind == "policy" else []
    return "\n".join(lines).rstrip() + "\n"
