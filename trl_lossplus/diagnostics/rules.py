"""
The health rules: one row a rule, in rules_tensors.py and rules_learning.py.

A row says what is read, the band inside which all is well, how bad it is outside, what that means, and what to change. The rows stand in
the order of the chain mask -> log-probs -> ratio -> advantage -> KL -> loss -> outcome, and findings are reported in it: of two findings
that are equally bad the one further up comes first, since it may cause the other.
"""

from __future__ import annotations

from .rule import DOCS, SEVERITIES, Finding, Rule
from .rules_learning import ADVANTAGE_RULES, KL_RULES, LOSS_RULES, OUTCOME_RULES
from .rules_tensors import LOGP_RULES, MASK_RULES, RATIO_RULES
from .view import View

__all__ = ["DOCS", "READS", "RULES", "SEVERITIES", "Finding", "Rule", "apply"]

RULES: tuple[Rule, ...] = (*MASK_RULES, *LOGP_RULES, *RATIO_RULES, *ADVANTAGE_RULES, *KL_RULES, *LOSS_RULES, *OUTCOME_RULES)
READS: tuple[str, ...] = tuple(dict.fromkeys(name for rule in RULES for name in rule.reads if not name.startswith("@")))


def apply(view: View, rules: tuple[Rule, ...] = RULES) -> list[Finding]:
    """The findings in a run: the worst first, and of those that are equally bad the cause before its symptom."""
    found = []
    for rule in rules:
        seen = rule.check(view, *rule.band)
        if seen is not None:
            found.append(Finding(rule, seen.severity or rule.severity, seen))
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))
