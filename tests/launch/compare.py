"""How far a launch's cell is from the same cell on one process."""

import json

import torch
from cells import part
from launches import LAUNCHES

TOLERANCE = 1e-4  # of the largest change of a weight in that part of the model
SPLIT = ("ZeRO-3", "FSDP2")


def weights(path):
    return torch.load(path, weights_only=True)


def relative(a, b, start):
    """
    Largest difference of two sets of weights over the largest change since `start`, the larger of policy's and critic's.

    What did not change must be equal: there any difference counts whole.
    """
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:4]
    if not all(value.isfinite().all() for value in (*a.values(), *b.values())):
        return float("inf")
    worst = 0.0
    for which in {part(name) for name in b}:
        names = [name for name in b if part(name) == which]
        difference = max((a[name] - b[name]).abs().max().item() for name in names)
        moved = max((b[name] - start[name]).abs().max().item() for name in names)
        worst = max(worst, difference / (moved or 1.0))
    return worst


def metrics_apart(log, reference):
    """Largest difference of a logged value, relative to the value (at least to 0.001)."""
    assert [entry["step"] for entry in log] == [entry["step"] for entry in reference]
    return max(
        abs(a[name] - b[name]) / max(abs(b[name]), 1e-3)
        for a, b in zip(log, reference, strict=True)
        for name in b
        if name != "step" and isinstance(b[name], float)
    )


def judge(launch, name, folder):
    """A cell's numbers, or `error`: why there are none."""
    path, error = folder / launch / f"{name}.json", folder / launch / f"{name}.error"
    if not path.exists():
        return {"error": error.read_text() if error.exists() else "not run"}
    result = json.loads(path.read_text())
    reference = json.loads((folder / "single" / f"{name}.json").read_text())
    if result["processes"] != 2 or not result["wrapped"].startswith(LAUNCHES[launch][1]):
        return {"error": f"{result['processes']} processes, model wrapped in {result['wrapped']}"}
    if launch in SPLIT and not result["is_split"]:
        return {"error": "the parameters are not split over the processes"}
    mine, single = folder / launch / name, folder / "single" / name
    start, one, two = weights(single / "start.pt"), weights(single / "weights.pt"), weights(mine / "weights.pt")
    row = {
        "apart": relative(two, one, start),
        "metrics": metrics_apart(result["log"], reference["log"]),
        "moved": reference["moved"],
        "coefs": set(result["coefs"]) | set(result.get("resumed", result)["coefs"]),
    }
    if "resumed" in result:
        assert result["resumed"]["steps"] == result["steps"]
        row["resume"] = relative(weights(mine / "resumed.pt"), two, start)
        saved = weights(mine / "saved.pt")
        missing = [name for name in two if name not in saved]
        row["saved"] = relative({name: saved[name] for name in two}, two, start) if not missing else f"lacks {missing[0]}"
    return row


def faults(row):
    """What is wrong with a row, in words; empty where all is right."""
    if "error" in row:
        return [row["error"]]
    found = [
        f"{name}: {row[name]}"
        for name in ("apart", "resume", "saved")
        if name in row and not (isinstance(row[name], float) and row[name] < TOLERANCE)
    ]
    if row["metrics"] > 1e-3:
        found.append(f"metrics: {row['metrics']:.1e}")
    if len(row["coefs"]) != 1:
        found.append(f"KL coefficients: {sorted(row['coefs'])}")
    if row["moved"] < 1e-3:
        found.append("the weights did not move")
    return found
