"""The memory formula: against measured peaks of real training on the CPU, and what it says of ZeRO, methods and critics."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from trl_lossplus import LossPlusError
from trl_lossplus.memory import BYTES, CRITICS, DEVICES, METHODS, SHAPES, Setup, Shape, estimate, main, memory_report, shape_of

ROOT = Path(__file__).parents[1]
SHAPE = Shape(512, 6, 1408, 8192, 512)
LLAMA = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
}  # fmt: skip
CPU = {"dtype": "float32", "bf16": False, "device": "cpu"}

# What is run (two AdamW steps in float32), and what the formula is asked. Nine measured peaks stand in docs/scaling.md.
RUNS = {
    "full": ({"rows": 4, "context": 32}, {"checkpointing": False, "accumulates": False}),
    "full, checkpointing": (
        {"rows": 8, "context": 256, "gradient_checkpointing": True},
        {"checkpointing": True, "accumulates": False},
    ),
    "full, no checkpointing": ({"rows": 8, "context": 256}, {"checkpointing": False, "accumulates": False}),
    "full, accumulation": (
        {"rows": 4, "context": 32, "gradient_accumulation_steps": 2},
        {"checkpointing": False, "accumulates": True},
    ),
    "full, KL": ({"rows": 4, "context": 32, "beta": 0.1}, {"checkpointing": False, "accumulates": False, "reference": True}),
    "LoRA": ({"rows": 8, "context": 256, "lora_r": 16}, {"method": "LoRA", "checkpointing": False, "accumulates": False}),
    "LoRA, checkpointing": (
        {"rows": 8, "context": 256, "lora_r": 16, "gradient_checkpointing": True},
        {"method": "LoRA", "checkpointing": True, "accumulates": False},
    ),
    "model critic": (
        {"rows": 4, "context": 64, "critic": "model"},
        {"critic": "model", "checkpointing": False, "accumulates": False},
    ),
    "adapter critic": (
        {"rows": 8, "context": 128, "lora_r": 16, "critic": "adapter"},
        {"method": "LoRA", "critic": "adapter", "checkpointing": False, "accumulates": False},
    ),
}
IN_MAKE_TEST = ("full", "LoRA, checkpointing", "model critic")


def peak(folder, settings):
    """Bytes that training added to a fresh process at its peak."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        # Freed tensors go back to the system at once, so that the peak is that of what is alive.
        "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
    }  # fmt: skip
    words = [sys.executable, str(Path(__file__).with_name("measure_memory.py")), str(folder), json.dumps(settings)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
    found = re.search(r'^{"peak": (\d+)}$', done.stdout, re.M)
    assert found, done.stderr[-2000:]
    return int(found[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    "name", [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.nightly) for name in RUNS]
)
def test_the_formula_is_within_15_percent_of_the_measured_peak(tmp_path, name):
    run, asked = RUNS[name]
    sizes = {key: run[key] for key in ("rows", "context", "lora_r") if key in run}
    expected = estimate(SHAPE, Setup(**CPU, **sizes, **asked)).peak
    assert peak(tmp_path, {"shape": LLAMA, **run}) == pytest.approx(expected, rel=0.15)


def test_parameters_are_counted_as_transformers_has_them():
    config = LlamaConfig(**{**LLAMA, "num_key_value_heads": 2}, tie_word_embeddings=True)
    assert shape_of(config).parameters == LlamaForCausalLM(config).num_parameters()
    assert SHAPES["7B"].parameters == pytest.approx(7.62e9, rel=0.01)
    assert SHAPES["70B"].parameters == pytest.approx(70.6e9, rel=0.01)


def test_an_adapter_is_counted_as_peft_makes_it():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**LLAMA)), LoraConfig(r=4, target_modules="all-linear"))
    assert SHAPE.adapter(4) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("stage", "divided"), [(1, {"optimizer"}), (2, {"optimizer", "gradients"})])
def test_zero_divides_what_it_splits(stage, divided):
    alone, split = (estimate("7B", Setup(zero_stage=s, processes=8)) for s in (0, stage))
    for name, value in alone.parts().items():
        assert split.parts()[name] == (value / 8 if name in divided else value)


def test_zero3_also_divides_weights_and_reference_and_gathers_layers():
    alone, split = (estimate("7B", Setup(zero_stage=s, processes=8, reference=True)) for s in (0, 3))
    assert (split.weights, split.reference) == (alone.weights / 8, alone.reference / 8)
    assert split.gathered > 0
    assert split.peak < alone.peak / 3


def test_the_order_of_methods_and_critics():
    method = [estimate("7B", Setup(method=name)).peak for name in ("full", "LoRA", "QLoRA")]
    critic = [estimate("7B", Setup(method="LoRA", critic=name)).peak for name in ("model", "adapter", "shared")]
    assert method == sorted(method, reverse=True)
    assert critic == sorted(critic, reverse=True)
    assert estimate("7B", Setup(reference=True)).peak - estimate("7B", Setup()).peak == pytest.approx(SHAPES["7B"].parameters * 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "lora"}, "method"),
        ({"critic": "adapter"}, "second adapter"),
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"rows": 0}, "rows=0"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(LossPlusError, match=message):
        memory_report("7B", **settings)


def test_an_unknown_model_is_refused():
    with pytest.raises(LossPlusError, match="neither a size"):
        memory_report("/no/such/model")


def test_the_command_prints_the_report(capsys):
    assert main(["--model", "7B", "--method", "QLoRA", "--rows", "2", "--checkpointing", "true"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == memory_report("7B", method="QLoRA", rows=2)
    assert main(["--model", "7B", "--method", "lora", "--critic", "Adapter"]) == 0
    assert capsys.readouterr().out.strip() == memory_report("7B", method="LoRA", critic="adapter")
    assert "peak a process" in printed


def table_of_the_documentation():
    """docs/scaling.md's rows: (size, method, critic, launch) -> GiB a process."""
    methods = (
        ("full", "none"),
        ("full", "model"),
        ("LoRA", "none"),
        ("LoRA", "adapter"),
        ("QLoRA", "none"),
        ("QLoRA", "adapter"),
    )
    launches = {"DDP": {}, "ZeRO-2": {"zero_stage": 2}, "ZeRO-3": {"zero_stage": 3}}
    lines = []
    for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "70B"):
        for method, critic in methods:
            cells = []
            for launch, changes in launches.items():
                if method == "QLoRA" and launch != "DDP":
                    cells.append("")
                    continue
                deepspeed = launch != "DDP"
                dtype = "float32" if deepspeed or method == "full" else "bfloat16"
                setup = Setup(
                    method=method, critic=critic, reference=True, rows=4, context=2048, processes=8, deepspeed=deepspeed,
                    dtype=dtype, **changes,
                )  # fmt: skip
                cells.append(f"{estimate(size, setup).peak / 2**30:.0f}")
            lines.append(f"| {size} | {method} | {critic} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_help_says_what_each_flag_means(capsys):
    """Every field of Setup with its words and default; what is told apart by name is listed."""
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for item in dataclasses.fields(Setup):
        assert f"{item.metadata['help']}; default {item.default}" in said, item.name
    assert all(name in said for name in (*METHODS, *CRITICS, *BYTES, *DEVICES))


def test_the_table_of_the_documentation_is_the_formula():
    assert table_of_the_documentation() in (ROOT / "docs" / "scaling.md").read_text()
