"""The tensors of a snapshot under a loss: the same one (bit for bit), or another."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..batch import LossBatch
from ..diagnostics.probes import pooled
from ..functional.aggregation import Window
from ..functional.errors import LossPlusError
from ..functional.masking import masked_quantiles
from ..loss import LossOutput, compute_loss
from ..over_step import apart, join, over_step
from ..registry import POLICY_LOSSES
from ..spec import LossSpec
from .readvantage import with_advantages_of
from .store import Pooled, Snapshot, summed

# Of a step that trained the critic alone there is this term and no other.
CRITIC_ALONE = ("value",)


@dataclass
class Replay:
    """
    A snapshot's optimizer step under one loss.

    Attributes:
        spec: the loss. loss, terms: over the step. outputs: by micro-batch, without graph.
        gradients: d loss / d log-probs by micro-batch, (B, T) each, of one process after another.
    """

    spec: LossSpec
    loss: float
    terms: dict[str, float]
    outputs: list[LossOutput]
    gradients: list[Tensor]
    processes: int = 1

    @property
    def stats(self) -> dict[str, float]:
        """The statistics' values over all micro-batches, by metric name."""
        return pooled([statistics_of(output) for output in self.outputs])

    @property
    def gradient(self) -> Tensor:
        """All micro-batches' gradients in one row, as the backend averages them over processes."""
        return flat(self.gradients) / self.processes

    @property
    def gradient_norm(self) -> float:
        """Norm of the gradient with respect to the log-probs."""
        return float(self.gradient.norm())

    def cosine(self, other: Replay) -> float:
        """Cosine between the two gradients; NaN where one of them is 0."""
        return cosine(self.gradient, other.gradient)

    def ratio_quantiles(self) -> list[float]:
        """0, 5, 25, 50, 75, 95 and 100% of the ratio over the valid tokens."""
        return ratio_quantiles([(out.per_token["ratio"], out.inputs.mask) for out in self.outputs if out.inputs is not None])

    def as_snapshot(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what this loss made of it, to be compared with the original by `diff`."""
        micro = [
            replace(
                part, per_token=output.per_token, gradient=gradient, terms=numbers_of(output), statistics=statistics_of(output)
            )
            for part, output, gradient in zip(snapshot.micro, self.outputs, self.gradients, strict=True)
        ]
        return replace(snapshot, spec=self.spec, micro=micro)


def flat(gradients: Collection[Tensor]) -> Tensor:
    """Micro-batches' (B, T) tensors in one row."""
    return torch.cat([gradient.reshape(-1) for gradient in gradients]) if gradients else torch.zeros(0)


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine between two rows; NaN where one of them is 0."""
    size = a.norm() * b.norm()
    return float(a @ b / size) if size > 0 else float("nan")


def ratio_quantiles(pairs: Collection[tuple[Tensor, Tensor]]) -> list[float]:
    """0, 5, 25, 50, 75, 95 and 100% of the ratios (B, T) over the valid tokens of the masks beside them."""
    ratios = torch.cat([ratio[mask] for ratio, mask in pairs]) if pairs else torch.zeros(0)
    return masked_quantiles(ratios, torch.ones_like(ratios, dtype=torch.bool)).tolist()


def run_micro_batch(
    batch: LossBatch, spec: LossSpec, window: Window | None, critic_alone: bool = False
) -> tuple[LossOutput, Tensor]:
    """
    The loss of one micro-batch and its gradient (B, T) with respect to the log-probs.

    Args:
        critic_alone: the step trains the critic alone: of the terms only the value loss is left.

    Returns:
        The output without its graph, and the gradient (0 where nothing reads the log-probs). Raises LossPlusError, see `compute_loss`.
    """
    with torch.enable_grad():
        logps = batch.logps.detach().clone().requires_grad_()
        values = None if batch.values is None else batch.values.detach().clone().requires_grad_()
        output = compute_loss(replace(batch, logps=logps, values=values), spec, window)
        terms = {name: term for name, term in output.terms.items() if not critic_alone or name in CRITIC_ALONE}
        total = torch.stack(list(terms.values())).sum() if terms else output.loss * 0
        total.backward()
    found = {name: term.detach() for name, term in terms.items()}
    output = replace(output, loss=total.detach(), terms=found, sources={})
    return output, torch.zeros_like(logps) if logps.grad is None else logps.grad


def statistics_of(output: LossOutput) -> dict[str, Pooled]:
    """The statistics of one micro-batch as plain numbers."""
    return {name: (x.kind, float(x.total), float(x.weight)) for name, x in output.statistics.items()}


def numbers_of(output: LossOutput) -> dict[str, float]:
    """The terms of one micro-batch as plain numbers."""
    return {name: float(term.detach()) for name, term in output.terms.items()}


def replay(snapshot: Snapshot, spec: LossSpec | None = None) -> Replay:
    """
    Computes a snapshot's loss again. No model is loaded; the auxiliary loss of a mixture of experts stays as it was.

    Args:
        spec: another loss; None: the snapshot's own, which gives its loss, per-token values and gradient bit for bit (on the kind
            of device and with the number of threads that it was taken with).

    Raises:
        LossPlusError: the spec reads a tensor that the snapshot does not hold, or changes what was fixed at the rollout
            (normalization, KL in the reward, ...), which a replay cannot redo; or what it changes needs all rows of the step or rollout
            (an objective that looks at them, another advantage estimator), and the snapshot does not hold them.
    """
    spec = snapshot.spec if spec is None else spec
    _refuse_rollout_changes(snapshot.spec, spec)
    snapshot = with_advantages_of(snapshot, spec)
    outputs, gradients = [], []
    for part, batch in zip(snapshot.micro, _batches(snapshot, spec), strict=True):
        output, gradient = run_micro_batch(batch, spec, part.window, "policy" not in part.terms)
        if "aux" in part.terms:
            output = output.with_term("aux", output.loss.new_tensor(part.terms["aux"]))
        outputs.append(output)
        gradients.append(gradient)
    terms = summed([numbers_of(output) for output in outputs], snapshot.processes)
    return Replay(spec, sum(terms.values()), terms, outputs, gradients, snapshot.processes)


def _batches(snapshot: Snapshot, spec: LossSpec) -> list[LossBatch]:
    """The micro-batches' batches; what an objective computed over the step is made anew where the loss is another."""
    batches = [part.batch for part in snapshot.micro]
    if spec == snapshot.spec or POLICY_LOSSES.get(spec.policy_loss).over_step is None:
        return batches
    left, processes = snapshot.facts.get("rows_left_out", 0), snapshot.facts.get("processes", 1)
    if left or processes != snapshot.processes:
        held = (
            f"{left} rows were left out (snapshot_rows)" if left else f"{snapshot.processes} of {processes} processes' are here"
        )
        raise LossPlusError(f"policy_loss={spec.policy_loss!r} looks at all rows of an optimizer step: {held}.")
    made = apart(over_step(join(batches), spec), [batch.mask for batch in batches])
    return [replace(batch, **part) for batch, part in zip(batches, made, strict=True)]


ROLLOUT_FIELDS = (
    "advantage_normalization", "advantage_norm_scope", "kl_reward_coef", "kl_reward_level",
    "whiten_rewards", "gamma", "gae_lambda", "gae_lambda_critic", "zero_std_groups", "rollout_is_batch_normalize",
)  # fmt: skip


def _refuse_rollout_changes(old: LossSpec, new: LossSpec) -> None:
    in_loss = all("rollout_rs" in POLICY_LOSSES.get(spec.policy_loss).options for spec in (old, new))
    for name in (*ROLLOUT_FIELDS, *(() if in_loss else ("rollout_rs", "rollout_rs_threshold"))):
        if getattr(old, name) != getattr(new, name):
            raise LossPlusError(
                f"{name}={getattr(new, name)!r}: it acted at the rollout (there {getattr(old, name)!r}); a replay changes the loss alone."
            )
