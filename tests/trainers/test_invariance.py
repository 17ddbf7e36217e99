"""The same weights after three optimizer steps, to 1e-5: any layout, any budget, any split, one process or two, GRPO and PPO."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from invariance import BUDGETS, EVERY, FAMILIES, LAYOUTS, SPLITS, train
from toyrun import apart
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).with_name("invariance.py")
SOME = [
    ("GRPO gspo", "padded", 18, 1), ("GRPO ppo_clip", "shared_prefix", 40, 2), ("PPO ppo_clip", "shared_prefix", 18, 2),
    ("PPO gspo", "packed", 40, 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def expected(toy, tmp_path_factory):
    """By family: one process, one padded micro-batch, no budget."""
    done = {}

    def get(family):
        if family not in done:
            done[family], _ = train(toy, tmp_path_factory.mktemp("whole"), (family, "padded", None, 1))
        return done[family]

    return get


def on_two(toy, out, cells, timeout):
    """The cells' weights from two gloo processes under DDP, all in one launch."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    start += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(SCRIPT), toy, str(out), json.dumps(cells)]
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=timeout)
    files = [out / f"{number}.pt" for number in range(len(cells))]
    assert all(file.exists() for file in files), done.stderr[-3000:]
    return [torch.load(file, weights_only=True) for file in files]


def check(expected, cells, found):
    wrong = {cell: apart(one, expected(cell[0])) for cell, one in zip(cells, found, strict=True)}
    wrong = {cell: far for cell, far in wrong.items() if not far < 1e-5}
    assert not wrong, wrong


@pytest.mark.slow
def test_two_processes(toy, tmp_path, expected):
    """Some cells; and the weights move by more than 1e-3, so that equal means something."""
    check(expected, SOME, on_two(toy, tmp_path, SOME, timeout=120))
    start = {name: p for name, p in AutoModelForCausalLM.from_pretrained(toy).named_parameters()}
    moved = expected("GRPO gspo")
    assert max((moved[name] - start[name]).abs().max().item() for name in moved) > 1e-3


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_cell_on_one_process_and_on_two(toy, tmp_path, expected):
    """The whole grid."""
    assert len(EVERY) == len(FAMILIES) * len(LAYOUTS) * len(BUDGETS) * len(SPLITS) == 72
    check(expected, EVERY, [train(toy, tmp_path / f"one{number}", cell)[0] for number, cell in enumerate(EVERY)])
    check(expected, EVERY, on_two(toy, tmp_path, EVERY, timeout=900))
