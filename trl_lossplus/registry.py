"""
Names to functions: what each needs, its formula and its source.

A user registers a function of the same shape as ours, or names it as `package.module:function`:

    @register_policy_loss("my_loss", requires={"old_logps", "advantages"}, formula="-A * min(r, 2)", source="me")
    def my_loss(batch, spec):
        return PolicyTerm(-batch.advantages * batch.ratio(spec.log_ratio_clamp).clamp(max=2))
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .functional.errors import LossPlusError, unknown_name

# Every tensor that a loss can read: its shape and who makes it. `logps` and `mask` are always there.
TENSORS: dict[str, tuple[str, str]] = {
    "logps": ("(B, T)", "the policy's forward pass, with gradient"),
    "mask": ("(B, T) bool", "the rollout: completion tokens that were generated, tool tokens left out"),
    "old_logps": ("(B, T)", "the policy at the rollout; where one update a rollout is made, logps without gradient"),
    "advantages": ("(B, T), (B, 1) or (B,)", "the advantage estimator, at the rollout"),
    "ref_logps": ("(B, T)", "the reference model, at the rollout"),
    "entropies": ("(B, T)", "the policy's forward pass"),
    "values": ("(B, T)", "the critic's forward pass, with gradient"),
    "old_values": ("(B, T)", "the critic, at the rollout"),
    "returns": ("(B, T)", "the advantage estimator, at the rollout"),
    "token_weights": ("(B, T)", "token_weight_func, at the rollout"),
    "rollout_weights": ("(B, T) or (B, 1)", "sampler and policy log-probs, at the rollout"),
    "rollout_logps": ("(B, T)", "the sampler (vLLM or rollout_func), at the rollout"),
    "group_ids": ("(B,) integers", "the rollout: one id a prompt"),
    "row_ids": ("(B,) integers", "the rollout: one id a completion, another in every optimizer step"),
    "selected_tokens": ("(B, T) bool", "the objective's own choice, over the optimizer step's rows of all processes"),
    "row_terms": ("(B, K)", "the objective itself, over the optimizer step's rows of all processes"),
    "lengths": ("(B,) integers", "the rollout: valid tokens of each completion"),
    "reward_baselines": ("(B,)", "the reward functions, on one greedy completion a prompt"),
    "sum_pi_squared": ("(B, T)", "the policy's forward pass at the rollout: sum of the squared probabilities"),
}
ALWAYS = frozenset({"logps", "mask"})
STEP_TENSORS = ("selected_tokens", "row_terms")  # what `over_step` of an objective may give
# What the trainer makes for the estimators alone, and what is there for the loss alone.
FOR_ESTIMATORS = frozenset({"lengths", "reward_baselines", "sum_pi_squared"})
FOR_LOSSES = frozenset({"logps", "advantages", "entropies", "values", "returns", *STEP_TENSORS})
TRAITS: dict[str, str] = {
    "sequence_level": "objective: one importance ratio a row",
    "reads_rollout_weights": "objective: rollout weights are its own matter and are not multiplied in afterwards",
    "no_options": "objective: reads no setting, so that setting one is an error (an empty `options` alone says nothing)",
    "regularized": "objective: part of it does not have the advantage as a factor, so it acts where the advantage is 0",
    "whole_groups": "objective: compares the rows of a prompt, so every optimizer step must hold whole groups",
    "ratio_alone": "objective: what it computes over a step reads ratios, not log-probs (before any update they are known to be 1)",
    "gradient_at_one": "objective: at ratio 1 the gradient is not -A a token; its docstring says what it is",
    "reward_to_go": "estimator: the sum of what follows, equal for all tokens of a row but for a discount and rewards by token",
    "constant_over_sequence": "estimator: one value a row; called as func(rewards (B,), group_ids, **tensors, **options)",
    "token_level": "estimator: called as func(rewards (B, T), [values,] mask, **tensors, **options)",
    "reads_reward_columns": "estimator: rewards are (B, K), one column a reward function",
    "uncentred": "estimator: compares the rows of a prompt, but its mean over them is not 0",
    "whitened": "estimator: its source whitens the result over the rollout's tokens (advantage_normalization: rollout)",
}


@dataclass(frozen=True)
class Entry:
    """
    One registered function. `options` are the spec or keyword fields that it reads beside its tensors; `optional` the tensors that
    it reads where there are any; `over_step` computes what the function needs of a whole optimizer step: (batch of all its rows, spec)
    -> {name among `STEP_TENSORS`: tensor by row}, without gradient; each micro-batch then holds its own rows of them.
    """

    name: str
    func: Callable[..., Any]
    requires: frozenset[str]
    formula: str
    source: str
    options: frozenset[str] = frozenset()
    traits: frozenset[str] = frozenset()
    aggregation: str = "token_mean"
    optional: frozenset[str] = frozenset()
    over_step: Callable[..., Any] | None = None


@dataclass
class Registry:
    """Entries of one kind, by name. `kind` is the configuration field in which users name them."""

    kind: str
    undeclared: frozenset[str] = frozenset()  # what a function named by its path reads, if it was not decorated
    entries: dict[str, Entry] = field(default_factory=dict)

    def register(
        self,
        name: str,
        *,
        requires: Iterable[str] = (),
        formula: str = "",
        source: str = "",
        options: Iterable[str] = (),
        traits: Iterable[str] = (),
        aggregation: str = "token_mean",
        optional: Iterable[str] = (),
        over_step: Callable[..., Any] | None = None,
        replace: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """
        A decorator that registers a function under `name` and returns it unchanged.

        Args:
            requires: names of the tensors that it reads (see `TENSORS`); reading another is an error.
            formula, source: shown by `trl-lossplus explain`.
            options: the configuration fields that it reads.
            traits: marks that others act on; see `TRAITS`.
            aggregation: the loss_aggregation that the objective's source prescribes, taken where the user names none.
            optional: names of tensors that an estimator takes where they are given.
            over_step: see `Entry`; the objective requires what it gives. Without one, an objective with the mark `whole_groups` can
                be trained only where a micro-batch is a whole rollout.
            replace: allow a name that is taken.

        Raises:
            LossPlusError: the name is taken, or a required tensor is not known.
        """
        needs, extra = frozenset(requires), frozenset(optional)
        for tensor in sorted((needs | extra) - TENSORS.keys()):
            raise unknown_name(f"{self.kind} {name!r}: requires", tensor, TENSORS)
        if name in self.entries and not replace:
            raise LossPlusError(f"{self.kind} {name!r} is registered already. Take another name, or pass replace=True.")

        def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
            text = formula or (func.__doc__ or "").strip()
            marks = (frozenset(options), frozenset(traits), aggregation, extra, over_step)
            self.entries[name] = Entry(name, func, needs, text, source, *marks)
            return func

        return decorate

    def names(self) -> list[str]:
        """The registered names, sorted."""
        _load_builtins()
        return sorted(self.entries)

    def get(self, name: str) -> Entry:
        """
        The entry of a registered name, or of `package.module:function`.

        A function named by its path may have been decorated (its requirements are then the declared ones); an undecorated
        policy loss reads `old_logps` and `advantages` beside `logps` and `mask`, an undecorated estimator rewards and group ids.

        Raises:
            LossPlusError: unknown name (lists the allowed ones and the nearest), module or function.
        """
        _load_builtins()
        if not isinstance(name, str):
            raise unknown_name(self.kind, name, [*self.entries, "package.module:function"])
        if name in self.entries:
            return self.entries[name]
        if not isinstance(name, str) or ":" not in name:
            raise unknown_name(self.kind, name, [*self.entries, "package.module:function"])
        func = import_function(self.kind, name)
        try:
            inspect.signature(func).bind(None, None)
        except ValueError:
            pass  # a function without a signature to look at
        except TypeError:
            first, second = ("batch", "spec") if self.kind == "policy_loss" else ("rewards", "group_ids")
            raise LossPlusError(f"{self.kind}={name!r}: the function must take two arguments, {first} and {second}.") from None
        declared = [entry for entry in self.entries.values() if entry.func is func]
        if declared:
            return declared[0]
        return Entry(name, func, self.undeclared, (func.__doc__ or "").strip(), name)


def import_module(what: str, name: str) -> ModuleType:
    """A user's module. Raises LossPlusError, which begins with `what`, where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise LossPlusError(f"{what}: module {name!r} cannot be imported ({type(error).__name__}: {error}).") from error


def import_function(kind: str, path: str) -> Callable[..., Any]:
    """
    The function at `package.module:function`.

    Raises:
        LossPlusError: the module cannot be imported, or has no such function; `kind` names the field.
    """
    module_name, _, function_name = path.partition(":")
    module = import_module(f"{kind}={path!r}", module_name)
    func = getattr(module, function_name, None)
    if not callable(func):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise unknown_name(f"{kind}={path!r}: function", function_name, public)
    return func


POLICY_LOSSES = Registry("policy_loss", frozenset({"old_logps", "advantages"}))
ADVANTAGE_ESTIMATORS = Registry("advantage_estimator", frozenset({"group_ids"}))
register_policy_loss = POLICY_LOSSES.register
register_advantage_estimator = ADVANTAGE_ESTIMATORS.register


def _load_builtins() -> None:
    from . import estimators, objectives, objectives_more, objectives_stale  # noqa: F401  (importing them registers ours)
