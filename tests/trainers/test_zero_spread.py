"""C8 through the trainer: keep, no_kl, drop and resample by hand, with the normalizer, on one process and on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zero_spread_run import AGGREGATIONS, MODES, measure

SCRIPT = Path(__file__).with_name("zero_spread_run.py")
ROOT = SCRIPT.parents[2]

# Group 1: 2 and 2 tokens, rewards 1 and 0, so A = +-0.5; group 2: 3 and 1 tokens, rewards 1 and 1, so A = 0. beta 0.1 with k1, whose
# gradient by the log-prob is 1, and ratio 1: a token's gradient is (-A + 0.1) over the normalizer, -0.4 and 0.6 in group 1, 0.1 in
# group 2. What takes group 2's place under resample: 1 and 1 tokens, rewards 1 and 0.
# {mode: {aggregation: (tokens, rows of the window, gradient of every token of each of the four rows)}}
EXPECTED = {
    "keep": {
        "token_mean": (8, 4, (-0.4 / 8, 0.6 / 8, 0.1 / 8, 0.1 / 8)),
        "seq_mean_token_mean": (8, 4, (-0.4 / 2 / 4, 0.6 / 2 / 4, 0.1 / 3 / 4, 0.1 / 1 / 4)),
        "prompt_mean": (8, 4, (-0.4 / 4 / 2, 0.6 / 4 / 2, 0.1 / 4 / 2, 0.1 / 4 / 2)),
    },
    "no_kl": {
        "token_mean": (8, 4, (-0.4 / 8, 0.6 / 8, 0.0, 0.0)),
        "seq_mean_token_mean": (8, 4, (-0.4 / 2 / 4, 0.6 / 2 / 4, 0.0, 0.0)),
        "prompt_mean": (8, 4, (-0.4 / 4 / 2, 0.6 / 4 / 2, 0.0, 0.0)),
    },
    "drop": {
        "token_mean": (4, 2, (-0.4 / 4, 0.6 / 4, 0.0, 0.0)),
        "seq_mean_token_mean": (4, 2, (-0.4 / 2 / 2, 0.6 / 2 / 2, 0.0, 0.0)),
        "prompt_mean": (4, 2, (-0.4 / 4 / 1, 0.6 / 4 / 1, 0.0, 0.0)),
    },
    "resample": {
        "token_mean": (6, 4, (-0.4 / 6, 0.6 / 6, -0.4 / 6, 0.6 / 6)),
        "seq_mean_token_mean": (6, 4, (-0.4 / 2 / 4, 0.6 / 2 / 4, -0.4 / 1 / 4, 0.6 / 1 / 4)),
        "prompt_mean": (6, 4, (-0.4 / 4 / 2, 0.6 / 4 / 2, -0.4 / 2 / 2, 0.6 / 2 / 2)),
    },
}
LENGTHS = {mode: (2, 2, *((1, 1) if mode == "resample" else (3, 1))) for mode in MODES}


def judge(mode, aggregation, tokens, rows, gradient):
    """`gradient`: {row: the gradient of each column}; columns after a row's end have none."""
    expected_tokens, expected_rows, by_row = EXPECTED[mode][aggregation]
    assert (tokens, rows) == (expected_tokens, expected_rows)
    for row, found in gradient.items():
        length = LENGTHS[mode][row]
        assert found == pytest.approx([by_row[row]] * length + [0.0] * (len(found) - length), abs=1e-7), row


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_c8_on_one_process(toy, tmp_path, mode, aggregation):
    found = measure(toy, tmp_path, mode, aggregation)
    assert sorted(found["gradient"]) == [0, 1, 2, 3]
    judge(mode, aggregation, **found)


@pytest.mark.slow
def test_c8_on_two_processes(toy, tmp_path):
    """The flat group alone on the second process: the same numbers, times 2 (the processes' gradients are averaged)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU"):
        environment.pop(name, None)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    start += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(SCRIPT), toy, str(tmp_path)]
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=240)
    files = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), done.stderr[-3000:]
    ranks = [json.loads(file.read_text()) for file in files]
    for mode in MODES:
        for aggregation in AGGREGATIONS:
            for rank, found in enumerate(results[f"{mode} {aggregation}"] for results in ranks):
                gradient = {int(row): [x / 2 for x in values] for row, values in found["gradient"].items()}
                assert sorted(gradient) == [2 * rank, 2 * rank + 1]
                judge(mode, aggregation, found["tokens"], found["rows"], gradient)
