"""The KL coefficient over the run: fixed, or pulled towards a target."""

from __future__ import annotations

from typing import Any

from .functional.errors import LossPlusError


class FixedKLController:
    """A coefficient that stays as it is. Raises LossPlusError for a negative one."""

    def __init__(self, init_coef: float):
        if not 0 <= init_coef < float("inf"):
            raise LossPlusError(f"the KL coefficient is {init_coef}: it must be a finite number >= 0.")
        self.coef = float(init_coef)

    def update(self, kl: float, n_rows: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """{"kind", "coef"}."""
        return {"kind": "fixed", "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the coefficient of `state_dict`."""
        self.coef = float(state["coef"])


class AdaptiveKLController:
    """
    Raises the coefficient while the KL is above its target, lowers it while it is below.

        coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n_rows / horizon)

    Args:
        init_coef: > 0 (a coefficient of 0 could never move). target: KL in nats a token, > 0. horizon: rows, > 0.

    Raises:
        LossPlusError: one of them is not.

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (1909.08593), section 2.2.
    """

    def __init__(self, init_coef: float, target: float, horizon: float):
        fields = (("the initial KL coefficient", init_coef), ("kl_target", target), ("kl_horizon", horizon))
        for name, value in fields:
            if not 0 < value < float("inf"):
                raise LossPlusError(f"{name} is {value}: adaptive KL control needs a finite number > 0.")
        self.coef, self.target, self.horizon = float(init_coef), float(target), float(horizon)

    def update(self, kl: float, n_rows: int) -> None:
        """
        One update.

        Args:
            kl: mean KL in nats a token over the whole rollout, all processes. n_rows: rows of the rollout, all processes.

        Raises:
            LossPlusError: `kl` is not a finite number; a horizon so short that the coefficient would turn negative.
        """
        if not abs(kl) < float("inf"):
            raise LossPlusError(f"adaptive KL control got a KL of {kl}: a log-prob of the policy or the reference is not finite.")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        factor = 1.0 + error * n_rows / self.horizon
        if factor <= 0:
            raise LossPlusError(
                f"kl_horizon={self.horizon} is too short for {n_rows} rows an update: the coefficient would turn negative. Set it to "
                f"more than {n_rows * 0.2:g}; 10000 is usual."
            )
        self.coef *= factor

    def state_dict(self) -> dict[str, Any]:
        """{"kind", "coef"}; floats survive JSON bit for bit."""
        return {"kind": "adaptive", "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the coefficient of `state_dict`."""
        self.coef = float(state["coef"])


KLController = FixedKLController | AdaptiveKLController
