"""The KL controller of a run: built from the spec, kept in the checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import cast

from ..functional.errors import LossPlusError
from ..kl_control import AdaptiveKLController, FixedKLController, KLController
from ..spec import LossSpec

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


def save_controller(checkpoint: str, controller: KLController, coef: float) -> None:
    """Writes the controller's state, with `coef` as its coefficient."""
    Path(checkpoint, FILE).write_text(json.dumps({**controller.state_dict(), "coef": coef}))


def load_controller(checkpoint: str, controller: KLController) -> None:
    """
    Restores an adaptive controller; without an adaptive state there is a warning, and the coefficient stays.

    Raises:
        LossPlusError: the file is not JSON.
    """
    if not isinstance(controller, AdaptiveKLController):
        return
    path = Path(checkpoint, FILE)
    try:
        state = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise LossPlusError(f"{path} cannot be read ({error}). Take another checkpoint.") from None
    if state.get("kind") == "adaptive":
        controller.load_state_dict(state)
    else:
        logger.warning("%s has no adaptive %s: the KL coefficient starts at %s.", checkpoint, FILE, controller.coef)
