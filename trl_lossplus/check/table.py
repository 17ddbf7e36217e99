"""Two columns of numbers beside each other, the trainer's and the one by hand, and where they first differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TOLERANCE = 1e-5
"""Numbers are equal where they differ by at most this, or this times their size: the trainer computes in float32."""

Rows = list[list[float]]


class Place(NamedTuple):
    """Where a number stands: a row of the rollout and a column of its completion; None: it belongs to all of them."""

    row: int | None = None
    column: int | None = None


@dataclass
class Line:
    """One quantity of one rollout or optimizer step: the numbers that differ most."""

    section: str
    quantity: str
    numbers: int = 0
    worst: float = -1.0
    theirs: float = math.nan
    mine: float = math.nan
    place: Place = Place()
    ok: bool = True


@dataclass
class Table:
    """
    Compares quantity by quantity, in the order of the data flow.

    Each comparison returns the numbers to go on with: the trainer's where they are right (so that rounding does not add up), the
    ones by hand where they are not (so that what follows is seen to differ too).
    """

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    first: Line | None = None
    missing: dict[str, str] = field(default_factory=dict)  # what has no plain version: how to give one
    given: list[str] = field(default_factory=list)  # what is taken from the trainer as it is
    reached: dict[str, tuple[int, int]] = field(default_factory=dict)  # of how many numbers something was true

    @property
    def numbers(self) -> int:
        """How many numbers were compared."""
        return sum(line.numbers for line in self.lines.values())

    def _entry(self, section: str, quantity: str) -> Line:
        return self.lines.setdefault((section, quantity), Line(section, quantity))

    def _one(self, line: Line, theirs: float, mine: float, place: Place, scale: float) -> bool:
        line.numbers += 1
        gap = 0.0 if theirs == mine else abs(theirs - mine)
        gap = math.inf if math.isnan(gap) else gap
        right = gap <= TOLERANCE * max(scale, abs(mine))
        if (not right, gap) > (not line.ok, line.worst):
            line.worst, line.theirs, line.mine, line.place = gap, theirs, mine, place
        return right

    def _close(self, line: Line, ok: bool, at: Line | None) -> bool:
        line.ok = line.ok and ok
        if not ok and self.first is None:
            self.first = at
        return ok

    def one(self, section: str, quantity: str, theirs: float, mine: float, scale: float = 1.0) -> float:
        """A single number; `scale` is the size of what it was summed from."""
        line = self._entry(section, quantity)
        ok = self._one(line, theirs, mine, Place(), scale)
        first = Line(section, quantity, 1, abs(theirs - mine), theirs, mine, Place(), False)
        return theirs if self._close(line, ok, first) else mine

    def rows(
        self, section: str, quantity: str, theirs: Sequence[float], mine: Sequence[float], ids: Sequence[int]
    ) -> list[float]:
        """One number a row; `ids` are the rows' numbers in the rollout."""
        columns = [[None] for _ in ids]
        wrapped = self._tokens(section, quantity, [[float(x)] for x in theirs], [[float(x)] for x in mine], ids, columns)
        return [row[0] for row in wrapped]

    def tokens(
        self, section: str, quantity: str, theirs: Rows, mine: Rows, ids: Sequence[int], columns: Sequence[Sequence[int]]
    ) -> Rows:
        """A list of numbers a row; `columns` are the tokens' places in their completions."""
        return self._tokens(section, quantity, theirs, mine, ids, columns)

    def _tokens(
        self, section: str, quantity: str, theirs: Rows, mine: Rows, ids: Sequence[int], columns: Sequence[Sequence[int | None]]
    ) -> Rows:
        line, ok, first = self._entry(section, quantity), True, None
        for their_row, my_row, row, places in zip(theirs, mine, ids, columns, strict=True):
            for a, b, column in zip(their_row, my_row, places, strict=True):
                right = self._one(line, float(a), float(b), Place(row, column), 1.0)
                if not right and first is None:
                    first = Line(section, quantity, 1, abs(a - b), float(a), float(b), Place(row, column), False)
                ok = ok and right
        return theirs if self._close(line, ok, first) else mine

    def reach(self, what: str, flags: Sequence[bool]) -> None:
        """Counts how often something that a check should see was seen."""
        hits, total = self.reached.get(what, (0, 0))
        self.reached[what] = (hits + sum(flags), total + len(flags))

    def text(self) -> list[str]:
        """The table, one block a rollout or optimizer step."""
        width = max((len(line.quantity) for line in self.lines.values()), default=8)
        out, section = [], ""
        for line in self.lines.values():
            if line.section != section:
                section = line.section
                out += ["", section.ljust(width + 2) + f"{'numbers':>8}{'trainer':>15}{'by hand':>15}{'difference':>12}"]
            if not line.numbers:
                continue
            where = "" if line.place.row is None else f"  row {line.place.row}"
            where += "" if line.place.column is None else f", token {line.place.column}"
            verdict = "ok" if line.ok else f"DIFFERS{where}"
            numbers = f"{line.numbers:>8}{line.theirs:>15.7g}{line.mine:>15.7g}{line.worst:>12.1e}"
            out.append(f"  {line.quantity.ljust(width)}{numbers}  {verdict}")
        return out
