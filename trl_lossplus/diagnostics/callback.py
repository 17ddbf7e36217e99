"""LossDoctorCallback: the doctor while training. Each finding is told once, in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from transformers import TrainerCallback

from .doctor import line
from .rules import READS, RULES, SEVERITIES, Finding, apply
from .runlog import RunLog, columns_of, matches
from .view import View

logger = logging.getLogger(__name__)

EVENTS = tuple(rule for rule in RULES if rule.event)
FIRST = 20  # logged steps before anything but an event is judged


class LossDoctorCallback(TrainerCallback):
    """
    Looks at the metrics as they are logged, and tells each finding once, through `logging`, on the main process.

    A NaN, a dropped step, a mask that covers the prompt are told at their step. What needs a trend is judged at growing distances
    (after 20 logged steps, then whenever the log is a quarter longer), so that the cost does not grow with the run.

    Args:
        least: the least severity that is told: info, warning or error.
        keep: how many logged steps are looked back at; older ones are thinned out.

    Attributes:
        findings: what was found so far, in the order in which it was found.
        on_findings: called with what is found at a logged step, on every process alike (they log the same numbers); None: only the main
            process looks.
    """

    def __init__(self, least: str = "warning", keep: int = 4000):
        if least not in SEVERITIES:
            raise ValueError(f"least={least!r}: it must be one of {', '.join(SEVERITIES)}.")
        self.least, self.keep = SEVERITIES.index(least), keep
        self.findings: list[Finding] = []
        self.on_findings: Callable[[list[Finding]], None] | None = None
        self._told: dict[str, int] = {}
        self._entries: list[dict[str, Any]] = []
        self._next = FIRST
        self._settings: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reads the settings, and the log of a run that is resumed."""
        self._settings = {name: value for name, value in vars(args).items() if not name.startswith("_")}
        if hasattr(args, "loss_spec"):
            self._settings |= asdict(args.loss_spec())
            self._settings |= {name: getattr(args, name) for name in ("is_on_policy", "optimizer_steps_per_rollout")}
        model = kwargs.get("model")
        if model is not None:
            self._settings["active_dropout"] = [
                name for name, part in model.named_modules() if "Dropout" in type(part).__name__ and part.p
            ]
        self._entries = [self._kept(entry, entry["step"]) for entry in state.log_history if self._is_training(entry)]
        self._next = max(FIRST, len(self._entries) + 1)

    @staticmethod
    def _is_training(logs: dict[str, Any]) -> bool:
        return "step" in logs and not any(name.startswith(("eval_", "train_")) for name in logs)

    @staticmethod
    def _kept(logs: dict[str, Any], step: int) -> dict[str, Any]:
        return {"step": step} | {name: value for name, value in logs.items() if matches(name, READS)}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Takes in one logged step."""
        if not logs or not self._looks(state) or not self._is_training({"step": 0, **logs}):
            return
        self._entries.append(self._kept(logs, state.global_step))
        if len(self._entries) > self.keep:
            self._entries = [*self._entries[: self.keep // 2 : 2], *self._entries[self.keep // 2 :]]
        found = self._judge(self._entries[-1:], EVENTS, state)
        if len(self._entries) >= self._next:
            self._next = len(self._entries) + max(5, len(self._entries) // 4)
            self._next = min(self._next, self.keep)
            found += self._judge(self._entries, RULES, state)
        self._hand_on(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judges the whole run."""
        if self._looks(state) and self._entries:
            self._hand_on(self._judge(self._entries, RULES, state))

    def _looks(self, state: Any) -> bool:
        return state.is_world_process_zero or self.on_findings is not None

    def _hand_on(self, found: list[Finding]) -> None:
        if found and self.on_findings is not None:
            self.on_findings(found)

    def _judge(self, entries: list[dict[str, Any]], rules: tuple[Any, ...], state: Any) -> list[Finding]:
        run = RunLog("", "", "trl-lossplus", *columns_of(entries), settings=self._settings)
        if not np.size(run.steps):
            return []
        new = []
        for finding in apply(View(run), rules):
            rank = SEVERITIES.index(finding.severity)
            if rank < self.least or rank <= self._told.get(finding.rule.id, -1):
                continue
            self._told[finding.rule.id] = rank  # again only if it gets worse
            new.append(finding)
            if state.is_world_process_zero:
                logger.log(logging.WARNING if rank < 2 else logging.ERROR, "loss doctor: %s", line(finding))
        self.findings += new
        return new
