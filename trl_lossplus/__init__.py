"""Losses for TRL's trainers: chosen by name, right for every split, visible, verifiable."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "LossBatch": "batch",
    "LossSpec": "spec",
    "LossOutput": "loss",
    "Window": "functional.aggregation",
    "compute_loss": "loss",
    "compute_advantages": "estimators",
    "estimate_kl": "functional.kl",
    "aggregate": "functional.aggregation",
    "AdaptiveKLController": "kl_control",
    "FixedKLController": "kl_control",
    "PolicyTerm": "functional.policy",
    "LossPlusError": "functional.errors",
    "register_policy_loss": "registry",
    "register_advantage_estimator": "registry",
    "register_kl_estimator": "functional.kl",
    "LossDoctorCallback": "diagnostics.callback",
    "GRPOPlusConfig": "config",
    "Snapshot": "snapshots.store",
    "replay": "snapshots.replay",
    "diff": "snapshots.diff",
    "GRPOPlusTrainer": "trainers.grpo",
    "PPOPlusConfig": "ppo_config",
    "PPOPlusTrainer": "trainers.ppo",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
