"""Files of ours in a checkpoint: read, or one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..functional.errors import LossPlusError


def broken(path: Path, reason: object) -> LossPlusError:
    """The error for a file that does not hold what it should."""
    first = (str(reason).strip().splitlines() or ["it is empty"])[0]
    return LossPlusError(f"{path} cannot be read ({first}). Take another checkpoint.")


def read_json(path: Path) -> dict[str, Any]:
    """An object of JSON. Raises LossPlusError for a file that holds none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise broken(path, error) from None
    if not isinstance(found, dict):
        raise broken(path, f"it holds a {type(found).__name__}, not an object")
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file. Raises LossPlusError for a file that is none, or is cut off."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise broken(path, error) from None


def broken_tensors(folder: Path, error: SafetensorError) -> LossPlusError:
    """What to raise for an error of someone else's reading in a folder: names the first safetensors file in it that is broken."""
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as reason:
            return broken(path, reason)
    return broken(folder, error)
