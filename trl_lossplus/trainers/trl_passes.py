"""
The seam's other half, apart for its length: what TRL holds from step to step, and what runs beside its own steps, forward passes
over a rollout and greedy completions.

Like trl_seam.py it names TRL's private API; what it relies on stands in the table there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch import Tensor
from transformers import GenerationConfig
from transformers.integrations.fsdp import is_fsdp_managed_module
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from .budget import Load, Packed, Padded
from .failures import rewards_of_all
from .layouts import PackedForward
from .minibatch import MicroBatch
from .packing import Packing
from .rollout_pass import Chunk, chunks, placed
from .trl_head import replaced, scoring

FORWARD_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
# Settings of generation that only sampling reads.
SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


class HeldState(GRPOTrainer):
    """GRPOTrainer whose state in memory, from micro-batch to micro-batch, can be taken and put back."""

    args: Any
    _logs: dict[str, Any]
    _buffered_inputs: Any
    prompt_sampler: Any = None  # gives the prompts of training, pass after pass; None where the dataset is streamed

    @property
    def micro_batches_per_generation(self) -> int:
        """Micro-batches that a rollout serves, over all its iterations."""
        return int(self.args.steps_per_generation * self.num_iterations)

    @property
    def mid_rollout(self) -> bool:
        """Whether the rollout in use serves more micro-batches."""
        return self._step % self.micro_batches_per_generation != 0

    @property
    def in_first_pass(self) -> bool:
        """Whether this micro-batch is of the first optimizer step after a rollout, which has changed no weights yet."""
        return self._step % self.micro_batches_per_generation < self.args.gradient_accumulation_steps

    @property
    def rows_of_prompts(self) -> int | None:
        """Rows of the training dataset, None where it is streamed."""
        return None if self.prompt_sampler is None else len(cast(Any, self.train_dataset))

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.prompt_sampler = super()._get_train_sampler(dataset)
        return self.prompt_sampler

    def held(self) -> dict[str, Any]:
        """The rollout in use (None between two), micro-batches taken, metrics and completions not logged yet, entropy control."""
        return {
            "rollout": self._buffered_inputs if self.mid_rollout else None,
            "micro_batches": self._step,
            "metrics": dict(self._metrics["train"]),
            "completions": self._shown() if self.log_completions and not self._logs.get("images") else None,
            "entropy": (self.entropy_coef, self._last_world_entropy),
        }

    def _shown(self) -> str:
        names = ("prompt", "completion", "advantages", "rewards", "extra")
        lists = {name: self._logs[name] for name in names}
        lists = {
            name: {key: list(column) for key, column in value.items()} if isinstance(value, dict) else list(value)
            for name, value in lists.items()
        }
        return json.dumps(lists, default=str)

    def hold(self, held: dict[str, Any]) -> None:
        """Puts back what `held` gave."""
        self._buffered_inputs = held["rollout"]
        self._step = held["micro_batches"]
        self._metrics["train"].update(held["metrics"])
        if self.use_adaptive_entropy:
            self.entropy_coef, self._last_world_entropy = held["entropy"]
        for name, value in json.loads(held["completions"] or "{}").items():
            for key, column in value.items() if isinstance(value, dict) else [(None, value)]:
                (self._logs[name] if key is None else self._logs[name][key]).extend(column)

    def hold_none(self, micro_batches: int) -> None:
        """No rollout is in use; the next one is made from the prompts of the last, for what is left of its use."""
        self._buffered_inputs, self._step = None, micro_batches


class RolloutPasses(HeldState):
    """GRPOTrainer with passes of our own over a rollout's rows and prompts."""

    model: Any
    num_generations: int
    num_generations_eval: int
    packed: PackedForward | None = None  # how rows are packed, None where they are padded
    packs_critic = True  # where the policy is packed: whether a critic is too
    token_budget: int | None = None  # tokens of a forward pass at most, see max_tokens_per_microbatch
    trims_left = False  # whether padding on the left can be taken away
    entropy_has_gradient = True  # whether the loss differentiates the entropies
    greedy = False  # whether greedy completions are being generated; a rollout_func reads it
    around_generation: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered while completions are made

    def policy_forward(
        self,
        model: torch.nn.Module,
        inputs: MicroBatch,
        *,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        batch_size: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """
        Log-probs and entropies (B, T) of the completion tokens, and the auxiliary loss of a mixture of experts.

        `batch_size` rows at a time or as many as the budget allows, all at once if None.
        """
        if inputs.get("packing") is not None:
            score = partial(self.score, model, inputs["packing"], compute_entropy)
            return *self.around_logps(score), None
        extra = {name: inputs[name] for name in FORWARD_INPUTS if inputs.get(name) is not None}
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
            **extra,
        )

    def score(self, model: torch.nn.Module, packing: Packing, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs and, if asked, entropies (B, T) of packed rows."""
        with self.accelerator.autocast(), self.head(entropy):
            return cast(PackedForward, self.packed).score(model, packing)

    def head(self, entropy: bool) -> AbstractContextManager[None]:
        """Within it the LM head scores as trl_head.py says."""
        return scoring(self.accelerator.device, entropy=entropy, entropy_has_gradient=self.entropy_has_gradient)

    def around_logps(self, take: Callable[[], Any], parts: list[Chunk] | None = None) -> Any:
        """
        Called around every pass that takes log-probs, TRL's and ours, of the policy and of the reference; gives its result.

        `parts`: what the pass goes over, a forward pass each; None: the rows in order.
        """
        return take()

    @property
    def load(self) -> Load:
        """What rows cost in tokens."""
        padded = self.packed is None or not self.packs_critic
        return Padded(self.padded_multiple) if padded else Packed(cast(PackedForward, self.packed).share_prefix)

    def rollout_chunks(self, rollout: MicroBatch, rows: int, packed: PackedForward | None) -> list[Chunk]:
        """A rollout's rows as they are run, `rows` at a time or by the budget, packed or padded."""
        parts = chunks(
            rollout,
            rows=rows,
            load=self.load if packed is not None else Padded(self.padded_multiple),
            left=self.trims_left,
            multiple=self.padded_multiple,
            budget=self.token_budget,
            most=self._most,
        )
        for _, chunk in parts if packed is not None else []:
            chunk["packing"] = cast(PackedForward, packed).pack(chunk)
        return parts

    def _most(self, number: int) -> int:
        """The largest of a number over processes."""
        return int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max())

    def _by_chunks(
        self, model: torch.nn.Module, ids: Tensor, mask: Tensor, width: int, rows: int, compute_entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's pass over a rollout, by chunks of ours: log-probs and entropies (B, T)."""
        split = ids.shape[1] - width
        columns = {"prompt": slice(0, split), "completion": slice(split, None)}
        rollout = {f"{name}_{x}": t[:, at] for name, at in columns.items() for x, t in (("ids", ids), ("mask", mask))}
        parts = self.rollout_chunks(rollout, rows, self.packed)

        def take() -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
            return [self.policy_forward(model, chunk, compute_entropy=compute_entropy) for _, chunk in parts]

        logps, entropies, _ = zip(*self.around_logps(take, parts), strict=True)
        whole = partial(placed, parts, shape=(len(ids), width))
        return whole(logps), whole(entropies) if compute_entropy else None, None

    @contextmanager
    def without_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Backward passes within it add to the gradient; they neither wait for other processes nor let DeepSpeed step."""
        if not self.accelerator.sync_gradients:  # so it is without us
            yield
            return
        state, context = self.accelerator.gradient_state, self.accelerator.no_sync(model)
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            context = nullcontext()  # as transformers: DeepSpeed is told by sync_gradients
        elif self.is_distributed_loading_by_transformers and is_fsdp_managed_module(self.model):
            context = self._defer_fsdp_gradient_reduction()
        with context:
            state._set_sync_gradients(False)
            try:
                yield
            finally:
                state._set_sync_gradients(True)

    def add_gradient(self, loss: Tensor) -> None:
        """The backward pass of a part of a micro-batch, as transformers runs a whole one's."""
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))

    def rollout_logps(self, rollout: MicroBatch) -> Tensor:
        """
        Log-probs (B, T) of the rollout under the policy as it is, without gradient; TRL's own where it took them.

        They are not stored: where TRL takes none, the update is on-policy and the loss uses its own forward pass.
        """
        if rollout.get("old_per_token_logps") is not None:
            return rollout["old_per_token_logps"]
        with self.for_rollout_pass():
            return self.policy_forward(self.model, rollout, batch_size=self.rows_per_pass)[0]

    def rollout_squares(self, rollout: MicroBatch) -> tuple[Tensor, Tensor]:
        """
        `rollout_logps` (B, T), and the sum of the squared probabilities over the vocabulary (B, T), from one forward pass.

        TRL's LM head takes both from its tiles, so no logits (B, T, V) are made; for this pass it is told to give the sums as well.
        """
        from trl.trainer.utils import add_fused_lm_head

        base: Any = self.accelerator.unwrap_model(self.model)
        base = base.get_base_model() if is_peft_model(base) else base
        before, sums = base.forward, []
        precision = {"temperature": self.temperature, "cast_lm_head_to_fp32": self.args.cast_lm_head_to_fp32}
        add_fused_lm_head(base, **precision, outputs=("log_probs", "log_sum_sq_probs"))
        with_sums = base.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = with_sums(*args, **kwargs)
            sums.append(output.log_sum_sq_probs)
            return output

        base.forward = forward
        try:
            with self.for_rollout_pass(), replaced(self, {"packed": None, "token_budget": None}):
                logps = self.policy_forward(self.model, rollout, batch_size=self.rows_per_pass)[0]
        finally:
            base.forward = before
        return logps, torch.cat(sums)[:, -logps.shape[1] :].exp()

    def score_greedily(self, prompts: list[Any], rows: list[dict[str, Any]]) -> Tensor:
        """
        Rewards (N, K) of one greedy completion of each prompt, generated and scored as a rollout's; those of all processes.

        Args:
            prompts: as many on every process. rows: the dataset's columns of each.
        """
        with self._greedily(), self.around_generation():
            _, ids, _, completions, _, extra, *_ = super()._generate(prompts)
            for name, values in extra.items():  # a rollout function's own columns, for the reward functions
                rows = [{**row, name: values[i] if isinstance(values, list) else values} for i, row in enumerate(rows)]
            own = partial(super()._calculate_rewards, rows, prompts, completions, ids)
            return rewards_of_all(own, self.accelerator, (len(prompts), len(self.reward_funcs)))

    @contextmanager
    def _greedily(self) -> Iterator[None]:
        """One completion a prompt, the likeliest token at each place; nothing is counted or logged, the random state stays."""
        ours: dict[str, Any] = {"greedy": True, "num_generations": 1, "num_generations_eval": 1}
        ours |= {"_metrics": {mode: defaultdict(list) for mode in self._metrics}}
        ours |= {name: defaultdict(list) for name in ("_pending_extra_logs", "_pending_metrics")}
        sampler: Any = self.vllm_generation if self.use_vllm else self
        kwargs = {name: value for name, value in (sampler.generation_kwargs or {}).items() if name not in SAMPLING}
        if self.use_vllm:
            theirs: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": None, "generation_kwargs": kwargs}
        else:
            kwargs["do_sample"] = False
            theirs = {"generation_kwargs": kwargs, "generation_config": GenerationConfig(**kwargs, disable_compile=True)}
        device, seen = self.accelerator.device, self.state.num_input_tokens_seen
        random = {
            "devices": [] if device.type == "cpu" else [device],
            "device_type": "cuda" if device.type == "cpu" else device.type,
        }
        with torch.random.fork_rng(**random), replaced(self, ours), replaced(sampler, theirs):
            yield
        self.state.num_input_tokens_seen = seen

    @property
    def padded_multiple(self) -> int:
        """TRL's pad_to_multiple_of as a number."""
        return int(self.pad_to_multiple_of or 1)

    @property
    def rows_per_pass(self) -> int:
        """Rows that a pass over the rollout takes at a time."""
        return self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size

    @contextmanager
    def for_rollout_pass(self) -> Iterator[None]:
        """As TRL evaluates log-probs at the rollout: without gradient, and without checkpointing."""
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            yield
