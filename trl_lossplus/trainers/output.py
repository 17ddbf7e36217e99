"""Whether a run will be able to write what it makes: found out before it trains."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from ..functional.errors import LossPlusError

PROBE = bytes(1 << 16)


def check_output(folder: str | None) -> Path:
    """
    The output folder, made and tried: something is really written, so that a full disk shows.

    Raises:
        LossPlusError: it cannot be made or written to.
    """
    path = Path(folder or "")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(PROBE)
            file.flush()
    except OSError as error:
        raise LossPlusError(f"output_dir={folder!r} cannot be written ({error.strerror}).") from None
    return path


def check_space(args: Any, model: nn.Module) -> Path:
    """
    The output folder of the training arguments, with room for a checkpoint where one is to be written.

    The trained weights are counted alone, once; the optimizer's state comes on top (for AdamW twice as much, in float32).

    Raises:
        LossPlusError: its disk has less room than that.
    """
    path = Path(str(args.output_dir))
    if not args.should_save or args.save_strategy == "no":
        return path
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    needed = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trained)  # ds_numel: ZeRO-3 holds a part
    free = shutil.disk_usage(path).free
    if free < needed:
        raise LossPlusError(
            f"output_dir={str(path)!r}: {free / 2**20:.1f} MiB are free on its disk, and a checkpoint takes more than {needed / 2**20:.1f} "
            "MiB, the trained weights alone. Free some, choose another folder, or set save_strategy='no'."
        )
    return path
