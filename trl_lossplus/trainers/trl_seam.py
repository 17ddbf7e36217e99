"""
With trl_passes.py and trl_head.py the only file that names TRL's private API.

`TRLSeam` is TRL's GRPOTrainer with its private steps turned into hooks with names of ours. What it overrides and reads is
checked when this module is imported: a method that is missing or takes other arguments is an error, a changed body of an
overridden method is one warning, and the versions that were tested are silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import trl
from torch import Tensor
from trl import GRPOTrainer

from .drawn import COMPLETION_IDS, COMPLETIONS, EXTRA_FIELDS, TOOL_MASK, Drawn, DrawnRow, as_generated, as_rows
from .failures import rewards_of_all
from .minibatch import MicroBatch
from .seam_check import SUPPORTED, TRLVersionError, compare
from .trl_head import check_head
from .trl_passes import RolloutPasses

# Method: the arguments that we pass or take, and fingerprints of its source in the versions that were tested.
SEAM: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "_prepare_inputs": (("generation_batch",), frozenset({"40caff99c2cf"})),
    "_generate_and_score_completions": (("inputs",), frozenset({"3d5cec813b83"})),
    "_generate": (("prompts",), frozenset({"bea6bc4f3207", "9f3c378340c4"})),
    "_calculate_rewards": (("inputs", "prompts", "completions", "completion_ids_list"), frozenset({"5017fb893c0c"})),
    "_compute_loss": (("model", "inputs"), frozenset({"16c4f3917b9f"})),
    "_get_per_token_logps_and_entropies": (
        ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss"),
        frozenset({"fecf708797b1"}),
    ),
    "get_high_entropy_mask": (("entropies", "mask", "threshold"), frozenset({"f7839444abae"})),
    "_get_train_sampler": (("dataset",), frozenset({"c0ce48638e78"})),
    "_save_checkpoint": (("model", "trial"), frozenset({"10fa449292ba"})),
    "_load_optimizer_and_scheduler": (("checkpoint",), frozenset({"d6497323f7e1"})),
}
ATTRIBUTES = (
    "_buffered_inputs",
    "_step",
    "_metrics",
    "_logs",
    "_pending_extra_logs",
    "_pending_metrics",
    "_entropy_bonus_enabled",
    "_last_world_entropy",
    "_tokenizer",
    "eos_token_ids",
)


def check_seam(trainer: type, version: str) -> list[str]:
    """Compares a trainer class with `SEAM`, see `seam_check.compare`."""
    return compare(trainer, version, SEAM)


class TRLSeam(RolloutPasses):
    """GRPOTrainer whose scoring, cutting and loss are the hooks below; everything else stays TRL's."""

    def __init__(self, *args: Any, needs_reference: bool, scale_rewards: str, **kwargs: Any):
        # TRL builds and evaluates a reference model where args.beta is not 0; we may need one for the reward alone. Fields that are
        # None with us have no meaning for TRL.
        config = kwargs["args"]
        written = {name: getattr(config, name) for name in ("beta", "scale_rewards")}
        config.beta = (config.beta or 1.0) if needs_reference else 0.0
        config.scale_rewards = scale_rewards
        try:
            super().__init__(*args, **kwargs)
        finally:
            for name, value in written.items():
                setattr(config, name, value)
        lacking = [name for name in ATTRIBUTES if not hasattr(self, name)]
        if lacking:
            raise TRLVersionError(f"TRL {trl.__version__}: GRPOTrainer has no {', '.join(lacking)}. Install '{SUPPORTED}'.")
        check_head(self.accelerator.device)
        self._gathered_rewards: Tensor | None = None
        self.own_tokens: list[list[int]] | None = None
        self._draws_from: list[dict[str, Any]] | None = None  # the examples of a draw under way
        self._drawn: tuple[list[DrawnRow], Tensor] | None = None  # rows that stand in for generation, and their rewards

    # Hooks, to be overridden.

    def check_rewards(self, rewards: Tensor) -> None:
        """Refuses (N, K) rewards, alike on every process."""

    def see_completions(
        self, prompts: list[Any], completions: list[Any], ids: list[list[int]], columns: dict[str, list[Any]]
    ) -> None:
        """Called once a rollout with the local rows, before they are rewarded."""

    def see_rewards(self, prompts: list[Any], ids: list[list[int]], columns: dict[str, list[Any]]) -> None:
        """Called once a rollout with the local rows, when they are rewarded and before `make_rollout`; may use collectives."""

    def take_beside(self, rows: int) -> list[Any]:
        """What the reward functions left beside their rewards, a value a local row; it stays with the row, see `put_beside`."""
        return [None] * rows

    def put_beside(self, values: list[Any]) -> None:
        """Called before `see_rewards` where rows were drawn earlier: what `take_beside` gave for each of them."""

    def collect(self, examples: list[dict[str, Any]]) -> tuple[MicroBatch, Tensor]:
        """TRL's rollout of the local examples, and the gathered (N, K) rewards."""
        rollout = super()._generate_and_score_completions(examples)
        rewards, self._gathered_rewards = self._gathered_rewards, None
        return rollout, cast(Tensor, rewards)

    def make_rollout(self, rollout: MicroBatch, rewards: Tensor) -> MicroBatch:
        """Replaces what TRL put into the rollout: (local) tensors, with the gathered (N, K) rewards."""
        raise NotImplementedError

    def cut(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Takes the shuffled rollout's micro-batches, in the order of use."""
        raise NotImplementedError

    def micro_loss(self, model: torch.nn.Module, inputs: MicroBatch) -> Tensor:
        """The scalar to be differentiated for one micro-batch."""
        raise NotImplementedError

    def save_plus_state(self, checkpoint: str) -> None:
        """Called on the saving process with the checkpoint's folder."""

    def save_process_state(self, checkpoint: str) -> None:
        """Called on every process with the checkpoint's folder, where it can be resumed from."""

    def load_plus_state(self, checkpoint: str) -> None:
        """Called on every process with the checkpoint's folder."""

    # TRL's private steps.

    def _generate(self, prompts: Any) -> Any:
        if self._drawn is None:
            with self.around_generation():
                generated = super()._generate(prompts)
        else:
            generated = as_generated(self._drawn[0])
        self.own_tokens = generated[TOOL_MASK]
        if self._draws_from is None:
            return generated
        raise Drawn(self._score(prompts, generated))

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        names = [name for name in inputs[0] if name not in ("prompt", "completion", "completion_ids")]
        columns = {name: [example[name] for example in inputs] for name in names}

        def own() -> Tensor:
            self.see_completions(prompts, completions, completion_ids_list, columns)
            if self._drawn is None:
                return super(TRLSeam, self)._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            rows, rewards = self._drawn
            for column in sorted({column for row in rows for column in row.logged}):
                self._pending_extra_logs[column].extend(row.logged.get(column) for row in rows)
            self.put_beside([row.beside for row in rows])
            return rewards

        self._gathered_rewards = own() if self._drawn is not None else self._rewards_of_all(own, len(prompts))
        self.see_rewards(prompts, completion_ids_list, columns)
        return self._gathered_rewards

    def _rewards_of_all(self, own: Callable[[], Tensor], rows: int) -> Tensor:
        """The gathered (N, K) rewards that `own` gives, checked."""
        rewards = rewards_of_all(own, self.accelerator, (rows, len(self.reward_funcs)))
        self.check_rewards(rewards)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> MicroBatch:
        return self.make_rollout(*self.collect(inputs))

    def _prepare_inputs(self, generation_batch: Any) -> MicroBatch:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return self.cut([inputs])[0]
        if self._buffered_inputs is not before:
            self._buffered_inputs = self.cut(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model: torch.nn.Module, inputs: MicroBatch) -> Tensor:
        return self.micro_loss(model, inputs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        checkpoint = f"{self._get_output_dir(trial=trial)}/checkpoint-{self.state.global_step}"
        if self.args.should_save:
            self.save_plus_state(checkpoint)
        if not self.args.save_only_model:
            self.save_process_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.load_plus_state(checkpoint)

    # A rollout in two parts: completions that are generated and scored, and the tensors of those that are kept.

    def draw(self, examples: list[dict[str, Any]], *, measured: bool) -> tuple[list[DrawnRow], Tensor]:
        """
        Generates and scores completions of the local examples, without log-probs: the rows, and the gathered (N, K) rewards.

        `measured`: whether they count in TRL's metrics of completions and tools; tokens are always counted.
        """
        metrics = self._metrics[self.mode]
        before = {name: len(values) for name, values in metrics.items()}
        self._draws_from = examples
        try:
            super()._generate_and_score_completions(examples)
        except Drawn as drawn:
            for name, values in metrics.items():
                if not measured and name != "num_tokens":
                    del values[before.get(name, 0) :]
            return drawn.result
        finally:
            self._draws_from = None
        raise TRLVersionError(f"TRL {trl.__version__} generated nothing through GRPOTrainer._generate. Install '{SUPPORTED}'.")

    def rollout_of(self, rows: list[DrawnRow], rewards: Tensor) -> tuple[MicroBatch, Tensor]:
        """`collect` of local rows that were drawn before, by whichever process, with the gathered (N, K) rewards of all."""
        self._drawn = (rows, rewards)
        try:
            return TRLSeam.collect(self, [row.example for row in rows])
        finally:
            self._drawn = None

    def _score(self, prompts: Any, generated: Any) -> tuple[list[DrawnRow], Tensor]:
        """Rows and gathered rewards of what was generated for the draw under way."""
        examples = cast(list[dict[str, Any]], self._draws_from)
        for name, values in generated[EXTRA_FIELDS].items():  # a rollout function's own columns, for the reward functions
            for i, example in enumerate(examples):
                example[name] = values[i] if isinstance(values, list) else values
        given = (examples, prompts, generated[COMPLETIONS], generated[COMPLETION_IDS])
        rewards = self._rewards_of_all(partial(super()._calculate_rewards, *given), len(examples))
        logged = dict(self._pending_extra_logs)
        self._pending_extra_logs.clear()
        return as_rows(examples, generated, logged, self.take_beside(len(examples))), rewards

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.packed is None and (self.token_budget is None or batch_size is None):
            args = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy)
            with self.head(compute_entropy):
                return self.around_logps(partial(super()._get_per_token_logps_and_entropies, *args, **others))
        rows = batch_size or len(input_ids)
        return self._by_chunks(model, input_ids, attention_mask, logits_to_keep, rows, compute_entropy)

    # What hooks need of TRL's state, under public names.
    @property
    def is_vision(self) -> bool:
        """Whether the policy is a vision-language model."""
        return bool(self._is_vlm)

    @property
    def reference_model(self) -> torch.nn.Module | None:
        """The reference where it is a model of its own, without its wrappers."""
        return None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the policy's forward computes in: autocast's type, or the model's."""
        by_name = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return by_name.get(str(self.accelerator.mixed_precision), self.model.dtype)

    @property
    def mode(self) -> str:
        """train or eval."""
        return "train" if self.model.training else "eval"

    @property
    def group_size(self) -> int:
        """Completions a prompt, in training or evaluation."""
        return self.num_generations if self.model.training else self.num_generations_eval

    def log_value(self, name: str, value: float) -> None:
        """One value of a metric; TRL logs the mean of those since the last log."""
        self._metrics[self.mode][name].append(value)

    def replace_last(self, name: str, value: float) -> None:
        """Replaces the last value of a metric that TRL logged."""
        self._metrics[self.mode][name][-1] = value

    def show_advantages(self, advantages: list[float]) -> None:
        """Puts the advantages that are used into the last rows of the completions table."""
        table = self._logs["advantages"]
        for _ in range(min(len(advantages), len(table))):
            table.pop()
        table.extend(advantages)

    def decode(self, ids: Tensor | list[int]) -> str:
        """Text of token ids (n,), special tokens left out."""
        return cast(str, self._tokenizer.decode(ids, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """Text of one token id, special tokens too."""
        return self._tokenizer.decode([token])

    def ended(self, rollout: MicroBatch) -> Tensor:
        """Whether each completion ends with an end token: (B,) bool. One that TRL masked as truncated does not."""
        lengths = rollout["completion_mask"].sum(1)
        last = rollout["completion_ids"].gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        return torch.isin(last, torch.tensor(self.eos_token_ids, device=last.device)) & (lengths > 0)

    def hide_from_vllm(self, hidden: Callable[[str], bool]) -> None:
        """Keeps parameters, told by their names, out of what is sent to vLLM."""
        generation: Any = self.vllm_generation
        inner = generation._iter_named_params

        def shown() -> Iterator[tuple[str, Tensor]]:
            return ((name, tensor) for name, tensor in inner() if not hidden(name))

        generation._iter_named_params = shown

    def entropy_coefficient(self) -> float:
        """The coefficient of the entropy bonus for this optimizer step, as TRL's control gates it."""
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef

    @property
    def entropy_bonus_enabled(self) -> bool:
        """Whether an entropy bonus is part of the loss in this run."""
        return self._entropy_bonus_enabled

    def update_entropy_control(self, entropy: float) -> None:
        """TRL's adaptive entropy control: one step up or down, from the optimizer step's mean entropy over all processes."""
        if entropy <= self.args.entropy_target:
            self.entropy_coef = min(self.entropy_coef + self.args.entropy_coef_delta, self.args.entropy_coef_max)
        else:
            self.entropy_coef = max(self.entropy_coef - self.args.entropy_coef_delta, self.args.entropy_coef_min)
        self._last_world_entropy = entropy


check_seam(GRPOTrainer, trl.__version__)
