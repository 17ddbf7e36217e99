"""
What a replay costs: CPU seconds of one variant on 64 rows of 2048 tokens, for every objective with all terms, on one thread.

    python benchmarks/replay.py
"""

import tempfile
import time

import torch
from objectives import tensors

from trl_lossplus import LossBatch, LossSpec, Snapshot, Window, compute_loss, replay
from trl_lossplus.registry import POLICY_LOSSES
from trl_lossplus.snapshots.take import take

ROWS, LENGTH = 64, 2048
TERMS = {"beta": 0.1, "entropy_coef": 0.01, "vf_coef": 0.1}


def snapshot() -> Snapshot:
    """A whole step with everything that a loss can read."""
    given, g = tensors(ROWS, LENGTH), torch.Generator().manual_seed(1)
    more = {name: torch.randn(ROWS, LENGTH, generator=g) for name in ("values", "old_values", "returns")}
    more |= {"ref_logps": given["old_logps"] - 0.1, "entropies": torch.rand(ROWS, LENGTH, generator=g)}
    batch, spec = LossBatch(**{**given, **more}), LossSpec(**TERMS)
    window = Window(int(batch.mask.sum()), ROWS, ROWS // 8)
    return take(spec, [(compute_loss(batch, spec, window), {"window": window})], facts={}, texts={}, max_rows=ROWS)


def seconds(run) -> float:
    """CPU seconds of a call, the least of three."""
    times = []
    for _ in range(3):
        before = time.process_time()
        run()
        times.append(time.process_time() - before)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    whole = snapshot()
    with tempfile.TemporaryDirectory() as folder:
        print(f"save {seconds(lambda: whole.save(folder)):.2f} s, load {seconds(lambda: Snapshot.load(folder)):.2f} s")
    found = {}
    for name in POLICY_LOSSES.names():
        spec = LossSpec(policy_loss=name, **TERMS)
        found[name] = seconds(lambda spec=spec: replay(whole, spec))
    for name, cost in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{name:12} {cost:.3f} s")
    print(f"{len(found)} objectives, {ROWS} x {LENGTH} tokens: at most {max(found.values()):.2f} s a variant")


if __name__ == "__main__":
    main()
