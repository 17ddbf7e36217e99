"""The KL controller of a run: built from the spec, kept in the checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import cast

from ..kl_control import AdaptiveKLController, FixedKLController, KLController
from ..spec import LossSpec
from .files import broken, read_json

logger = logging.getLogger(__name__)

FILE = "kl_controller.json"


def starting_coef(spec: LossSpec) -> float:
    """The configured coefficient that control starts from: that of the loss, else of the reward; 1 where there is no KL."""
    return (spec.beta if spec.kl_in_loss else spec.kl_reward_coef) or 1.0


def controller_for(spec: LossSpec) -> KLController:
    """The spec's controller. Raises LossPlusError for numbers that it refuses."""
    if spec.kl_controller == "fixed":
        return FixedKLController(spec.beta if spec.kl_in_loss else spec.kl_reward_coef)
    return AdaptiveKLController(starting_coef(spec), cast(float, spec.kl_target), spec.kl_horizon)


def save_controller(checkpoint: str, controller: KLController, coef: float, start: float) -> None:
    """Writes the controller's state, with `coef` as its coefficient and `start` as the configured one."""
    Path(checkpoint, FILE).write_text(json.dumps({**controller.state_dict(), "coef": coef, "start": start}))


def start_not_used(checkpoint: str, change: str) -> str:
    """The sentence for a configured coefficient that was changed (`change` has both values) where an adaptive one is restored."""
    return (
        f"{change} is not used: the adaptive controller goes on with the coefficient of {checkpoint}. To start anew from it, delete {FILE} "
        "and lossplus_state_*.pt there."
    )


def load_controller(checkpoint: str, controller: KLController) -> None:
    """
    Restores an adaptive controller; without an adaptive state there is a warning, and the coefficient stays.

    A warning also says where the coefficient that the controller starts from now is not the one that it started from then.

    Raises:
        LossPlusError: the file holds no state of a controller.
    """
    if not isinstance(controller, AdaptiveKLController):
        return
    path = Path(checkpoint, FILE)
    state = read_json(path) if path.exists() else {}
    if state.get("kind") != "adaptive":
        logger.warning("%s has no adaptive %s: the KL coefficient starts at %s.", checkpoint, FILE, controller.coef)
        return
    before, start = state.get("start", controller.coef), controller.coef
    if before != start:
        logger.warning("%s", start_not_used(checkpoint, f"the KL coefficient to start from was {before} and is {start}, which"))
    try:
        controller.load_state_dict(state)
    except (KeyError, TypeError, ValueError) as error:
        raise broken(path, f"{type(error).__name__}: {error}") from None
