"""
The seam's third part: TRL's LM head where its Triton kernel does not run.

There TRL scores prompts and padding too, in nine tiles of 4096 tokens x 32768 vocabulary entries, and computes each logit twice. Within
`scoring` it scores what is asked alone, as it does with Triton, in small tiles; and a frozen head gives its gradient in the forward pass
(frozen_head.py). With Triton nothing is changed. Like trl_seam.py this file names TRL's private API.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl
from torch import Tensor
from transformers.utils import is_triton_available
from trl.trainer import utils

from . import frozen_head
from .frozen_head import TILE_TOKENS, TILE_VOCABULARY
from .seam_check import SUPPORTED, TRLVersionError, compare

HEAD, COMPACT, OURS = "_ChunkedLogProbFunction", "_use_triton", ("log_probs", "entropy")
SEAM = {
    "add_fused_lm_head": (("model", "temperature", "cast_lm_head_to_fp32", "outputs"), frozenset({"422d009f04b6"})),
}
KERNEL = {"ChunkedLogProbFunction": ((), frozenset({"3661e8975a9f"}))}


def kernel() -> Any:
    """TRL's module of the head, which some versions cannot import without Triton."""
    from trl.kernels import chunked_logprob

    return chunked_logprob


def has_triton(device: torch.device) -> bool:
    """Whether TRL's head runs in Triton on a device."""
    return is_triton_available() and device.type in ("cuda", "xpu")


def check_head(device: torch.device) -> list[str]:
    """
    Compares TRL's head with what `scoring` replaces, where it replaces anything; see `seam_check.compare`.

    Raises:
        TRLVersionError: a name is missing, or takes other arguments.
    """
    if has_triton(device):
        return []
    lacking = [f"{module.__name__}.{name}" for module, name in _replaced() if not hasattr(module, name)]
    if lacking:
        raise TRLVersionError(f"TRL {trl.__version__} has no {', '.join(lacking)}. Install '{SUPPORTED}'.")
    return compare(utils, trl.__version__, SEAM) + compare(kernel(), trl.__version__, KERNEL)


def _replaced() -> list[tuple[Any, str]]:
    return [(utils, HEAD), (utils, COMPACT), (kernel(), "TOKEN_CHUNK_SIZE")]


@contextmanager
def replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """Other values of attributes, while it is open."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class SmallTiles(torch.autograd.Function):
    """TRL's function, its tiles of few tokens in both passes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """As TRL's."""
        with replaced(kernel(), {"TOKEN_CHUNK_SIZE": TILE_TOKENS}):
            return kernel().ChunkedLogProbFunction.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """As TRL's."""
        with replaced(kernel(), {"TOKEN_CHUNK_SIZE": TILE_TOKENS}):
            return kernel().ChunkedLogProbFunction.backward(ctx, *grads)


@contextmanager
def scoring(device: torch.device, *, entropy: bool = True, entropy_has_gradient: bool = False) -> Iterator[None]:
    """
    Within it TRL's fused LM head scores on a device without Triton as this module's docstring says.

    Args:
        entropy: whether entropies are read. entropy_has_gradient: whether they are differentiated.
    """
    if has_triton(device):
        yield
        return

    class Head:
        @staticmethod
        def apply(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int,
                  softcap: float | None, logit_scale: float, outputs: tuple[str, ...]) -> Any:  # fmt: skip
            wanted = tuple(name for name in outputs if entropy or name != "entropy")
            trained = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
            differentiated = entropy_has_gradient and torch.is_grad_enabled() and "entropy" in wanted
            if trained or differentiated or set(wanted) - set(OURS):
                chunk = min(chunk, TILE_VOCABULARY)
                return SmallTiles.apply(hidden, weight, bias, targets, temperature, chunk, softcap, logit_scale, wanted)
            scored = frozen_head.apply(hidden, weight, bias, targets, temperature, softcap, logit_scale, "entropy" in wanted)
            return *scored, None, None, None

    with replaced(utils, {HEAD: Head, COMPACT: lambda device: True}):
        yield
