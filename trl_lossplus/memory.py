"""
How much memory a training step needs, from the model's shape: `memory_report` prints it, `estimate` gives the parts.

Counted: weights, gradients, AdamW's state, reference, critic, activations, LM head; on each process, at the step's peak. Not counted:
CUDA's context and libraries (about 1 GB), fragmentation (5 to 15%), vLLM, and what generation without vLLM holds while no activations are:
its cache, and the weights' copy of merged_generation.

    trl-lossplus memory --model 7B --method LoRA --critic adapter --rows 4 --context 2048
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from .arguments import Parser
from .functional.errors import LossPlusError, unknown_name
from .trainers.frozen_head import TILE_TOKENS, TILE_VOCABULARY, tokens_at_once

METHODS = ("full", "LoRA", "QLoRA")
CRITICS = ("none", "shared", "adapter", "model")
BYTES = {"float32": 4, "bfloat16": 2}

# Saved for the backward pass of one decoder layer, a token: numbers of the hidden size and of the intermediate size.
LAYER_HIDDEN, LAYER_INTERMEDIATE = 10, 4
# On a GPU TRL's LM head needs one tile of at most this many tokens and vocabulary entries, in float32.
GPU_TILE = (4096, 32768)
DEVICES = ("cuda", "cpu")
# bitsandbytes NF4: 4 bits, and with double quantization 0.127 for the scales.
QUANTIZED = (4 + 0.127) / 8


@dataclass(frozen=True)
class Shape:
    """
    A decoder's shape, as its configuration gives it.

    kv_size: width of keys (and of values): key-value heads times head size. tied: input and output embeddings are one.
    """

    hidden_size: int
    num_layers: int
    intermediate_size: int
    vocab_size: int
    kv_size: int
    tied: bool = False

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each linear layer of one decoder layer."""
        h, i, kv = self.hidden_size, self.intermediate_size, self.kv_size
        return [(h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h)]

    @property
    def layer(self) -> int:
        """Parameters of the linear layers of one decoder layer."""
        return sum(a * b for a, b in self.linears)

    @property
    def embedding(self) -> int:
        """Parameters of one embedding matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters of the model (norms included)."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layers * self.layer + self.embedding * (1 if self.tied else 2) + norms

    def adapter(self, rank: int) -> int:
        """Parameters of a LoRA adapter on every linear layer."""
        return self.num_layers * sum(rank * (a + b) for a, b in self.linears)


# Shapes of the sizes that the documentation's table names: those of Qwen2.5 and, from 8B, of Llama 3.
SHAPES = {
    "0.5B": Shape(896, 24, 4864, 151936, 128, tied=True),
    "1.5B": Shape(1536, 28, 8960, 151936, 256, tied=True),
    "3B": Shape(2048, 36, 11008, 151936, 256, tied=True),
    "7B": Shape(3584, 28, 18944, 152064, 512),
    "14B": Shape(5120, 48, 13824, 152064, 1024),
    "32B": Shape(5120, 64, 27648, 152064, 1024),
    "70B": Shape(8192, 80, 28672, 128256, 1024),
    "Llama-3.2-1B": Shape(2048, 16, 8192, 128256, 512, tied=True),
    "Llama-3.2-3B": Shape(3072, 28, 8192, 128256, 1024, tied=True),
    "Llama-3.1-8B": Shape(4096, 32, 14336, 128256, 1024),
}


def _known(name: str) -> str:
    """The entry of `SHAPES` that a hub name of Qwen's or Meta's stands for, or the name itself."""
    owner, _, short = name.rpartition("/")
    short = short.removesuffix("-Instruct")
    sizes = {"Qwen": short.removeprefix("Qwen2.5-"), "meta-llama": short}
    return sizes.get(owner, name) if sizes.get(owner) in SHAPES else name


def shape_of(model: str | Any) -> Shape:
    """
    The shape of a size in `SHAPES`, of a transformers configuration, or of the model at a path or hub name.

    Raises:
        LossPlusError: it is none of these, or its configuration is not a dense decoder's.
    """
    if isinstance(model, Shape):
        return model
    if isinstance(model, str):
        if _known(model) in SHAPES:
            return SHAPES[_known(model)]
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError):
            raise LossPlusError(
                f"model={model!r}: neither a size ({', '.join(SHAPES)}) nor a model with a configuration."
            ) from None
    else:
        config = model
    config = config.get_text_config()
    try:
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv = (getattr(config, "num_key_value_heads", None) or heads) * head
        return Shape(
            config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.vocab_size, kv,
            bool(config.tie_word_embeddings),
        )  # fmt: skip
    except AttributeError as error:
        raise LossPlusError(f"model={model!r}: its configuration has no {error.name}, as a dense decoder's has.") from None


def _asked(default: Any, words: str) -> Any:
    """A field with what it means: the help text of its flag."""
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True)
class Setup:
    """What the memory depends on beside the shape; each field has its meaning in its metadata."""

    method: str = _asked("full", "full, LoRA (on every linear layer, of rank lora_r) or QLoRA (the same over 4-bit weights)")
    critic: str = _asked("none", "none, shared, adapter or model (of the policy's shape)")
    reference: bool = _asked(False, "whether there is a KL; full fine-tuning then holds a second model")
    rows: int = _asked(4, "rows of a micro-batch on one process")
    context: int = _asked(2048, "tokens of a row, prompt and completion")
    accumulates: bool = _asked(True, "several micro-batches an optimizer step: gradients are then there while activations are")
    dtype: str = _asked("float32", "of the weights: float32 (TRL's default; bf16 then computes in bfloat16) or bfloat16")
    bf16: bool = _asked(True, "whether the forward pass computes in bfloat16")
    checkpointing: bool = _asked(True, "gradient_checkpointing")
    zero_stage: int = _asked(0, "0 (DDP), 1, 2 or 3 (FSDP2 too)")
    processes: int = _asked(1, "over which ZeRO splits")
    deepspeed: bool = _asked(False, "DeepSpeed, which with bf16 holds bfloat16 weights and a float32 copy of what is trained")
    offload: bool = _asked(False, "the optimizer's state is in the host's memory")
    lora_r: int = _asked(16, "rank of the LoRA adapter")
    device: str = _asked("cuda", "cuda or cpu")

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("method", self.method, METHODS),
            ("critic", self.critic, CRITICS),
            ("dtype", self.dtype, BYTES),
            ("device", self.device, DEVICES),
        ):
            if value not in allowed:
                raise unknown_name(name, value, allowed)
        if self.zero_stage not in (0, 1, 2, 3):
            raise LossPlusError(f"zero_stage={self.zero_stage}: allowed are 0 (DDP), 1, 2 and 3 (also FSDP2).")
        for name in ("rows", "context", "processes", "lora_r"):
            if getattr(self, name) < 1:
                raise LossPlusError(f"{name}={getattr(self, name)} is out of range: it must be >= 1.")
        if self.critic == "adapter" and self.method == "full":
            raise LossPlusError("critic='adapter' needs method LoRA or QLoRA: it is a second adapter.")


@dataclass(frozen=True)
class Estimate:
    """Bytes on one process. The parts are not all at their largest at once: the peak is less than their sum."""

    weights: float
    reference: float
    critic_weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    gathered: float
    peak: float

    def parts(self) -> dict[str, float]:
        """The parts by name, without the peak."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "peak"}


def estimate(model: str | Shape | Any, setup: Setup) -> Estimate:
    """
    The memory of one process at a training step's peak.

    weights + reference + critic + optimizer + gathered layers + gradients + working, where working is the larger of all activations
    and the policy's with the LM head's tiles; without accumulation the larger of working and of the gradients with one layer's
    activations, since one grows as the other is freed. ZeRO divides the optimizer's state (stage 1), gradients (2), weights, critic and reference (3) by the processes.
    """
    shape = shape_of(model)
    size = BYTES[setup.dtype]
    mixed = setup.deepspeed and setup.bf16  # DeepSpeed's own: weights and gradients in bfloat16, a float32 copy in the optimizer
    size = 2 if mixed else size
    full = setup.method == "full"
    adapter = 0 if full else shape.adapter(setup.lora_r)
    adapter_size = 4 if setup.method == "QLoRA" or (setup.zero_stage < 3 and not mixed) else size  # PEFT keeps them in float32
    base: float = shape.parameters * size
    if setup.method == "QLoRA":
        linears = shape.num_layers * shape.layer
        base = linears * QUANTIZED + (shape.parameters - linears) * 2
    critic = {"model": shape.parameters - (0 if shape.tied else shape.embedding), "adapter": adapter}.get(setup.critic, 0)
    critic_size = size if setup.critic == "model" else adapter_size
    trained = shape.parameters if full else adapter
    trained_size = size if full else adapter_size

    split = setup.processes
    weights = (base + adapter * adapter_size) / (split if setup.zero_stage == 3 else 1)
    reference = base / (split if setup.zero_stage == 3 else 1) if full and setup.reference else 0.0
    critic_weights = critic * critic_size / (split if setup.zero_stage == 3 else 1)
    gradients = (trained * trained_size + critic * critic_size) / (split if setup.zero_stage >= 2 else 1)
    state = sum(n * (12 if mixed else 2 * each) for n, each in ((trained, trained_size), (critic, critic_size)))
    optimizer = 0.0 if setup.offload else state / (split if setup.zero_stage >= 1 else 1)
    gathered = (2 * shape.layer + shape.embedding) * size if setup.zero_stage == 3 else 0.0

    tokens = setup.rows * setup.context
    number = 2 if setup.bf16 else 4
    one_layer: float = tokens * (LAYER_HIDDEN * shape.hidden_size + LAYER_INTERMEDIATE * shape.intermediate_size) * number
    if setup.bf16 and size == 4 and full:  # autocast's bfloat16 copies of the weights
        one_layer += shape.layer * 2
    kept = shape.num_layers * (tokens * shape.hidden_size * number if setup.checkpointing else one_layer)
    recomputed = one_layer if setup.checkpointing else 0.0
    head = head_bytes(shape, tokens, full, setup.device)
    # A critic's forward pass comes after the policy's, and its backward pass before: the head's tiles meet the policy's alone.
    passes = 2 if setup.critic in ("adapter", "model") else 1
    activations = passes * kept + recomputed
    working = max(activations, kept + max(recomputed, head))
    moving = gradients + working if setup.accumulates else max(gradients + one_layer, working)
    peak = weights + reference + critic_weights + optimizer + gathered + moving
    return Estimate(weights, reference, critic_weights, gradients, optimizer, activations, head, gathered, peak)


def head_bytes(shape: Shape, tokens: int, trained: bool, device: str) -> float:
    """
    What scoring `tokens` tokens holds beside the model, in float32, with a gradient of their hidden states.

    Without Triton a trained head makes nine small tiles, and a frozen one (LoRA) the logits and the powers of a few tokens at a time.
    """
    if device == "cuda":
        tiles = min(tokens, GPU_TILE[0]) * min(shape.vocab_size, GPU_TILE[1])
    elif trained:
        tiles = 9 * min(tokens, TILE_TOKENS) * min(shape.vocab_size, TILE_VOCABULARY)
    else:
        tiles = 2 * min(tokens, tokens_at_once(shape.vocab_size)) * shape.vocab_size
    return 4 * (tiles + tokens * shape.hidden_size)


def memory_report(model: str | Shape | Any, **settings: Any) -> str:
    """
    The estimate as text, one part a line.

    Args:
        model: a size in `SHAPES`, a path, a hub name, a transformers configuration, or a `Shape`.
        settings: fields of `Setup`.
    """
    shape, setup = shape_of(model), Setup(**settings)
    result = estimate(shape, setup)
    named = model if isinstance(model, str) else "model"
    trained = shape.parameters if setup.method == "full" else shape.adapter(setup.lora_r)
    stage = "DDP" if setup.zero_stage == 0 else f"ZeRO-{setup.zero_stage}{' or FSDP2' if setup.zero_stage == 3 else ''}"
    lines = [
        f"{named}: {shape.parameters / 1e9:.2f}B parameters, {trained / 1e9:.3f}B trained ({setup.method}); critic {setup.critic}; "
        f"{setup.rows} rows of {setup.context} tokens; weights {setup.dtype}, computing in {'bfloat16' if setup.bf16 else 'float32'}; "
        f"{stage} on {setup.processes} process{'es' if setup.processes > 1 else ''}"
    ]
    names = {
        "weights": "weights", "reference": "reference model", "critic_weights": "critic's weights", "gradients": "gradients",
        "optimizer": "AdamW's state", "activations": "activations", "head": "LM head", "gathered": "gathered layers",
    }  # fmt: skip
    lines += [f"  {names[name]:<17}{gib(value)}" for name, value in result.parts().items() if value]
    lines.append(f"  {'peak a process':<17}{gib(result.peak)}")
    lines.append("Not counted: CUDA's context (about 1 GiB), fragmentation (5 to 15%), vLLM or the cache of generation.")
    return "\n".join(lines)


def gib(size: float) -> str:
    """Bytes as GiB, right-aligned."""
    return f"{size / 2**30:9.2f} GiB" if size >= 2**30 / 100 else f"{size / 2**20:9.2f} MiB"


SPELLINGS = {"method": METHODS, "critic": CRITICS, "dtype": BYTES, "device": DEVICES}


def _spelled(allowed: Iterable[str], word: str) -> str:
    """The allowed name that a word is but for upper and lower case, else the word."""
    return next((name for name in allowed if name.lower() == word.lower()), word)


def main(arguments: Sequence[str]) -> int:
    """`trl-lossplus memory`: prints the report, or with --config that of a recipe. Returns the exit status."""
    if any(word.split("=")[0] == "--config" for word in arguments):
        from .memory_config import main as of_a_recipe

        return of_a_recipe(arguments)
    parser = Parser(
        prog="trl-lossplus memory",
        description="The memory of a training step, by parts; with --config that of a recipe (--config FILE --help).",
    )
    parser.add_argument("--model", required=True, help=f"{', '.join(SHAPES)}, a path or a hub name")
    for item in fields(Setup):
        name, value = item.name, item.default
        kind: Any = (lambda word: word.lower() in ("true", "1", "yes")) if isinstance(value, bool) else type(value)
        kind = partial(_spelled, SPELLINGS[name]) if name in SPELLINGS else kind
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"{item.metadata['help']}; default {value}")
    words = vars(parser.parse_args(arguments))
    print(memory_report(words.pop("model"), **words))
    return 0
