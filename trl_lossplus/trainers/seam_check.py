"""Whether the installed TRL is one that the seam knows: methods by name, arguments and a fingerprint of their source."""

from __future__ import annotations

import hashlib
import inspect
import logging
import textwrap
from collections.abc import Mapping
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

SUPPORTED = "trl>=1.15,<1.17"
Seam = Mapping[str, tuple[tuple[str, ...], frozenset[str]]]


class TRLVersionError(ImportError):
    """The installed TRL has not what this package needs."""


def fingerprint(method: Any) -> str:
    """The first 12 hex digits of a hash of a method's source, indentation aside."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(method)))
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def compare(trainer: type | ModuleType, version: str, seam: Seam) -> list[str]:
    """
    Compares a trainer class, or a module, with what the seam relies on.

    Args:
        seam: {method: (the arguments that we pass or take, fingerprints of its source in the versions that were tested)}.

    Returns:
        The methods whose body is unknown but whose arguments fit (one warning names them).

    Raises:
        TRLVersionError: a method is missing or does not take our arguments; names the method and the version.
    """
    unknown = []
    for name, (arguments, known) in seam.items():
        method = getattr(trainer, name, None)
        if method is None:
            raise TRLVersionError(
                f"TRL {version} has no {trainer.__name__}.{name}, which trl-lossplus overrides or calls. Install a TRL in "
                f"the range that trl-lossplus declares (pip install '{SUPPORTED}')."
            )
        parameters = inspect.signature(method).parameters
        missing = [argument for argument in arguments if argument not in parameters]
        if missing:
            raise TRLVersionError(
                f"TRL {version}: {trainer.__name__}.{name} does not take {', '.join(missing)}, which trl-lossplus passes. "
                f"Install a TRL in the range that trl-lossplus declares (pip install '{SUPPORTED}')."
            )
        if fingerprint(method) not in known:
            unknown.append(name)
    if unknown:
        logger.warning(
            "TRL %s is not a tested version: %s differ from what trl-lossplus knows. Run its mirror tests before you rely on it.",
            version,
            ", ".join(unknown),
        )
    return unknown
