"""What a recipe's YAML needs of one GPU: the training step's estimate, and the share that vLLM takes beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .arguments import Parser
from .functional.errors import LossPlusError
from .memory import BYTES, QUANTIZED, Estimate, Setup, Shape, estimate, gib, memory_report, shape_of

# TRL's defaults of what decides, and ours of a critic.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_completion_length": 256, "gradient_checkpointing": True,
    "beta": 0.0, "lora_r": 16, "use_peft": False, "load_in_4bit": False, "use_vllm": False, "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1,
}  # fmt: skip
CONTEXT, SPARE = 2**30, 0.1  # what CUDA's context takes, and what fragmentation adds to the training step


@dataclass(frozen=True)
class Need:
    """
    Bytes on one GPU.

    Attributes:
        training: the step's estimate. vllm: what vLLM takes of the GPU for itself (0: no vLLM, or it runs elsewhere).
        vllm_weights: of the model inside vLLM's share. gpu: the GPU's size.
    """

    training: Estimate
    vllm: float
    vllm_weights: float
    gpu: float

    @property
    def together(self) -> float:
        """Training's peak and vLLM's share."""
        return self.training.peak + self.vllm

    @property
    def fits(self) -> bool:
        """Whether they leave room for CUDA's context and for fragmentation, and vLLM's share for its weights."""
        room = self.gpu - CONTEXT - SPARE * self.training.peak
        return self.together <= room and self.vllm_weights < 0.8 * self.vllm + (not self.vllm)


def read(path: str | Path) -> dict[str, Any]:
    """A recipe's YAML. Raises LossPlusError for a file that cannot be read or holds no mapping."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise LossPlusError(f"--config={path}: cannot be read ({' '.join(str(error).split())}).") from None
    if not isinstance(values, dict):
        raise LossPlusError(f"--config={path}: it must hold `field: value` lines.")
    return values


def setup_of(values: Mapping[str, Any], prompt: int, **launch: Any) -> Setup:
    """
    What decides of a recipe's fields.

    Args:
        values: of the YAML. prompt: tokens of the longest prompt. launch: `Setup`'s zero_stage, processes, deepspeed, offload.
    """
    get = {**DEFAULTS, **values}.__getitem__
    peft, is_ppo = bool(get("use_peft")), any(name in values for name in ("critic", "vf_coef", "gae_lambda"))
    method = "QLoRA" if get("load_in_4bit") else "LoRA" if peft else "full"
    critic = values.get("critic") or ("adapter" if peft else "model") if is_ppo else "none"
    has_kl = bool(get("beta")) or values.get("kl_placement") in ("reward", "loss", "both")
    return Setup(
        method=method,
        critic=critic,
        reference=has_kl,
        rows=get("per_device_train_batch_size"),
        context=prompt + get("max_completion_length"),
        accumulates=get("gradient_accumulation_steps") > 1,
        dtype=values.get("dtype") or "float32",
        bf16=values.get("bf16", True),
        checkpointing=get("gradient_checkpointing"),
        lora_r=get("lora_r"),
        **launch,
    )


def need(values: Mapping[str, Any], gpu: float, prompt: int, **launch: Any) -> Need:
    """
    What a recipe needs of a GPU of `gpu` GiB; see `setup_of` for the others.

    Raises:
        LossPlusError: no model is named, or it is not known (see `shape_of`).
    """
    shape, setup = _shape(values), setup_of(values, prompt, **launch)
    get = {**DEFAULTS, **values}.__getitem__
    beside = bool(get("use_vllm")) and get("vllm_mode") == "colocate"
    linears = shape.num_layers * shape.layer
    size = (
        linears * QUANTIZED + (shape.parameters - linears) * 2
        if setup.method == "QLoRA"
        else shape.parameters * BYTES["bfloat16"]
    )
    share = get("vllm_gpu_memory_utilization") * gpu * 2**30 if beside else 0.0
    return Need(estimate(shape, setup), share, size / get("vllm_tensor_parallel_size") if beside else 0.0, gpu * 2**30)


def _shape(values: Mapping[str, Any]) -> Shape:
    if not values.get("model_name_or_path"):
        raise LossPlusError("--config: it names no model (model_name_or_path).")
    return shape_of(str(values["model_name_or_path"]))


def in_a_line(found: Need) -> str:
    """The need as one line."""
    vllm = f" + vLLM {found.vllm / 2**30:.1f}" if found.vllm else ""
    verdict = "fits" if found.fits else "does not fit"
    return (
        f"training {found.training.peak / 2**30:.1f} GiB{vllm} = {found.together / 2**30:.1f} of {found.gpu / 2**30:.0f} GiB: {verdict} "
        f"(with {CONTEXT / 2**30:.0f} GiB for CUDA's context and {SPARE:.0%} of training's for fragmentation)"
    )


def main(arguments: Sequence[str]) -> int:
    """`trl-lossplus memory --config FILE --gpu GIB`: prints the report of a recipe. Returns the exit status."""
    parser = Parser(prog="trl-lossplus memory", description="What a recipe's YAML needs of one GPU.")
    parser.add_argument("--config", required=True, help="a recipe's YAML; it must name a model")
    parser.add_argument("--gpu", type=float, required=True, help="the GPU's memory in GiB")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the longest prompt; default 256")
    asked = {item.name: item.metadata["help"] for item in fields(Setup)}
    for name in ("zero_stage", "processes"):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(Setup(), name), help=f"{asked[name]}; default {getattr(Setup(), name)}"
        )
    for name in ("deepspeed", "offload"):
        parser.add_argument(f"--{name}", action="store_true", help=asked[name])
    words = vars(parser.parse_args(arguments))
    values, gpu, prompt = read(words.pop("config")), words.pop("gpu"), words.pop("prompt")
    found = need(values, gpu, prompt, **words)
    print(memory_report(str(values["model_name_or_path"]), **vars(setup_of(values, prompt, **words))))
    if found.vllm:
        print(f"  {'vLLM':<17}{gib(found.vllm)}, {found.vllm_weights / 2**30:.2f} of them its weights, the rest its cache")
    print(in_a_line(found))
    return 0
