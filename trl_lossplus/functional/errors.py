"""The one error that bad user input raises, and the sentence that names the nearest allowed value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LossPlusError(ValueError):
    """Bad input from the user: the message names the field, the value and what is allowed."""


def unknown_name(what: str, value: object, allowed: Iterable[str], unlikely: Iterable[str] = ()) -> LossPlusError:
    """
    The error for a name that is not in a list of names.

    Args:
        what: the field or kind of thing that was asked for, as the user writes it.
        value: what the user wrote.
        allowed: the names that exist.
        unlikely: those that are not offered as what was meant.

    Returns:
        A `LossPlusError` (to be raised by the caller) that lists the allowed names and the nearest match.
    """
    names = sorted(str(name) for name in allowed)
    close = difflib.get_close_matches(str(value), [name for name in names if name not in {*unlikely}], n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return LossPlusError(f"{what}={value!r} is not known.{hint} Allowed: {', '.join(names)}.")
