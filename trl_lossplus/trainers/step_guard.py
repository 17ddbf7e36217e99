"""Keeps an optimizer step's micro-batches until it is known that all of them are finite, on every process."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from accelerate import Accelerator
from torch import Tensor

from ..diagnostics.guards import BadValue, NonFiniteError, agree, bad_counts, bad_flags, first_bad, tensors_of
from ..loss import LossOutput
from .failures import told_once
from .minibatch import MicroBatch

logger = logging.getLogger(__name__)

NOT_TAKEN = "The optimizer step was not taken."
TAKEN = (
    "DeepSpeed has taken the optimizer step with it, so the weights are lost: go on from the last checkpoint. With "
    "bf16: {check_grad_overflow: true} in its configuration it would not take such a step."
)


def gradient_fault(norm: float | None, engine: Any, fp16: bool) -> tuple[float, bool] | None:
    """
    What is wrong with the gradient of the optimizer step, if anything.

    DeepSpeed steps inside the backward pass. A gradient that is not finite makes it leave the step out and keep the norm of the step
    before (ZeRO-3); ZeRO-1 and 2 with `bf16: {check_grad_overflow: false}` take the step and show a norm of -1.

    Args:
        norm: as transformers has it, None where it has none. engine: DeepSpeed's, or None.
        fp16: half precision's loss scaler drops such steps itself and goes on with a smaller scale: nothing is wrong.

    Returns:
        The norm (NaN where DeepSpeed does not tell it) and whether the step was taken; None: the gradient is finite.
    """
    if fp16:
        return None
    shown = math.nan if norm is None or norm < 0 else norm
    if engine is None:
        return None if norm is None or math.isfinite(norm) else (norm, False)
    taken = engine.was_step_applied()
    if taken and (norm is None or math.isfinite(shown)):
        return None
    return (math.nan if math.isfinite(shown) else shown), taken


class StepGuard:
    """
    Stops or drops an optimizer step in which something is not finite.

    Args:
        policy: raise or skip. max_skips: steps in a row that may be dropped. folder: where `stopped.json` says why a run ended.
        on_stop: called with `counts` on every process before a run is stopped.

    Attributes:
        counts: `nonfinite/TENSOR` of the step under way: how many values are not finite, on all processes.
        stopped: whether the step under way has ended the run.
    """

    def __init__(
        self,
        policy: str,
        max_skips: int,
        folder: Path | None = None,
        on_stop: Callable[[dict[str, float]], None] = lambda counts: None,
    ):
        self.policy, self.max_skips, self.folder, self.on_stop = policy, max_skips, folder, on_stop
        self.counts: dict[str, float] = {}
        self.skipped = 0
        self.stopped = False
        self._in_a_row = 0
        self._drop = False
        self._gradient_was_bad = False
        self._flags: Tensor | None = None
        self._seen: list[tuple[LossOutput, MicroBatch]] = []
        self.last: list[tuple[LossOutput, MicroBatch]] = []

    def see(self, output: LossOutput, inputs: MicroBatch) -> None:
        """Takes in one micro-batch; keeps no graph, and waits for no device."""
        flags = bad_flags(output)
        terms = {name: term.detach() for name, term in output.terms.items()}
        self._flags = flags if self._flags is None else self._flags + flags
        self._seen.append((replace(output, loss=output.loss.detach(), terms=terms, sources={}), inputs))

    @property
    def found(self) -> bool:
        """Whether this process has seen something that is not finite in the step under way. Waits for the device."""
        assert self._flags is not None
        return bool(self._flags.any())

    def decide(
        self,
        found: bool,
        accelerator: Accelerator,
        step: int,
        exchange: Callable[[Any], list[Any]],
        decode: Callable[[Tensor], str],
        on_bad: Callable[[], None] = lambda: None,
    ) -> None:
        """
        What becomes of the step, before its last backward pass: nothing, unless something was `found` on some process.

        Then `exchange` tells all what each has, and `on_bad` is called on every process before anything is raised.

        Args:
            step: its number as the log counts, from 1.

        Raises:
            NonFiniteError: on every process alike, naming the first bad value; under skip after `max_skips` in a row.
        """
        agreed = self._first_of_all(found, accelerator, exchange, decode)
        if agreed is None:
            self._in_a_row = self._in_a_row if self._gradient_was_bad else 0
            self._gradient_was_bad = False
            return
        on_bad()
        sentence = agreed.sentence(step)
        self._in_a_row += 1
        if self.policy == "raise":
            self._stop(step, agreed.tensor, f"{sentence} {NOT_TAKEN}", accelerator.is_main_process)
        if self._in_a_row > self.max_skips:
            told = f"{sentence} {self.max_skips} steps before it were dropped too (nonfinite_max_skips)."
            self._stop(step, agreed.tensor, told, accelerator.is_main_process)
        self.skipped += 1
        self._drop = True
        if accelerator.is_main_process:
            logger.warning("%s The optimizer step is dropped on every process (%d so far).", sentence, self.skipped)

    def _first_of_all(
        self, found: bool, accelerator: Accelerator, exchange: Callable[[Any], list[Any]], decode: Callable[[Tensor], str]
    ) -> BadValue | None:
        """The first bad value of all processes, with its texts; sets `counts`. None for finite values whose sum alone was too large."""
        outputs = [output for output, _ in self._seen]
        if not found:
            self.counts = {f"nonfinite/{name}": 0.0 for name in tensors_of(outputs[0])}
            return None
        bad = first_bad(outputs, accelerator.process_index)
        if bad is not None:
            inputs = self._seen[bad.micro_batch][1]
            prompt, completion = (decode(inputs[name][bad.row]) for name in ("prompt_ids", "completion_ids"))
            bad = replace(bad, prompt=prompt, completion=completion)
        everyone = exchange((bad, bad_counts(outputs)))
        totals = Counter({name: 0 for name in tensors_of(outputs[0])})
        for _, counts in everyone:
            totals.update(counts)
        self.counts = {f"nonfinite/{name}": float(count) for name, count in totals.items()}
        return agree([one for one, _ in everyone])

    def _stop(self, step: int, tensor: str, sentence: str, is_main: bool) -> NoReturn:
        if is_main and self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "stopped.json").write_text(json.dumps({"step": step, "tensor": tensor, "sentence": sentence}))
        self.stopped = True
        self.on_stop(self.counts)
        with told_once(0 if is_main else 1):
            raise NonFiniteError(sentence)

    def refuse_gradient(self, norm: float, taken: bool, step: int, is_main: bool) -> None:
        """
        What to do about a gradient that is not finite although the loss was: its norm is the same on every process.

        Args:
            norm: not finite. taken: whether the optimizer step was taken with it (see `gradient_fault`). step: as the log counts.

        Raises:
            NonFiniteError: under raise; under skip after `max_skips` in a row.
        """
        sentence = (
            f"step {step}: the norm of the gradient is {norm}, although every value that the loss read and gave is finite. Likely: an "
            "infinite slope in the objective, or an overflow of half precision in the backward pass."
        )
        self.counts = {**self.counts, "nonfinite/gradient": 1.0}
        self._in_a_row += 1
        self._gradient_was_bad = True
        if self.policy == "raise" or self._in_a_row > self.max_skips:
            self._stop(step, "gradient", f"{sentence} {TAKEN if taken else NOT_TAKEN}", is_main)
        self.skipped += 1
        if is_main:
            logger.warning("%s The optimizer step is dropped on every process (%d so far).", sentence, self.skipped)

    def state_dict(self) -> dict[str, Any]:
        """Steps dropped, in all and in a row."""
        return {"skipped": self.skipped, "in_a_row": self._in_a_row, "gradient": self._gradient_was_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        self.skipped, self._in_a_row, self._gradient_was_bad = state["skipped"], state["in_a_row"], state["gradient"]

    @property
    def step(self) -> list[tuple[LossOutput, MicroBatch]]:
        """The micro-batches of the optimizer step under way."""
        return self._seen

    def close(self) -> bool:
        """Ends the step; returns whether it is to be dropped."""
        drop, self._drop = self._drop, False
        self.last, self._seen, self._flags = self._seen, [], None
        return drop
