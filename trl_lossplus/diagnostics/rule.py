"""A health rule and what it finds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .checks import Check
from .view import Seen

SEVERITIES = ("info", "warning", "error")
DOCS = "docs/diagnosis.md"


@dataclass(frozen=True)
class Rule:
    """
    One row.

    Attributes:
        id: its name in --json. reads: the metrics (with * for any part) and, after @, the settings that it looks at.
        band: (low, high) between which all is well; the check compares with them. severity: info, warning, error; a check may
            lower or raise it for what it saw. event: one step is enough, so it is looked at after every step while training.
        title: the finding in a few words. means, change: sentences. fields: (setting, value) pairs to change. anchor: in the docs.
    """

    id: str
    check: Check
    severity: str
    title: str
    means: str
    change: str
    fields: tuple[tuple[str, str], ...]
    anchor: str
    reads: tuple[str, ...]
    band: tuple[float, float] = (-math.inf, math.inf)
    event: bool = False


@dataclass(frozen=True)
class Finding:
    """A rule that was tripped: what was seen, in which steps, and the numbers."""

    rule: Rule
    severity: str
    seen: Seen
