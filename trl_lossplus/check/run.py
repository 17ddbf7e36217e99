"""`trl-lossplus check`: a small training run whose numbers are all computed a second time by hand."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..arguments import Parser
from ..cli import PROG, quiet
from ..config import GRPOPlusConfig
from ..ppo_config import PPOPlusConfig
from ..registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, import_function
from ..toy import TOY_LORA, save_toy, toy_dataset
from ..trainers.correct import rejects_at_rollout
from .by_hand_loss import StepCheck
from .by_hand_rollout import RolloutCheck, Settings
from .record import Micro, Recorder, Rollout
from .sampler import Sampler, rewards
from .settings import build_config
from .table import TOLERANCE, Line, Table

DESCRIPTION = """\
Trains the toy for three optimizer steps under a loss, computes every number a second time by hand (plain Python floats, straight
from the formulas), and prints the two beside each other in the order of the data flow: rewards, advantages, ratios, per-token
losses, terms, total. Exit code 0: they agree to float32; 1: they differ (the first quantity that does is named); 2: bad input, or
a loss that has no plain version.

Of a recipe (--config) the fields of the loss are read; batch sizes, schedule and length are the check's own unless they are given
on the command line, for instance --num_iterations 1. By default a rollout serves two optimizer steps, so that ratios differ from 1.

A loss of your own: --policy_loss my.module:loss --plain my.module:plain_loss, where plain_loss(row, spec) takes a dictionary of
lists over one completion's own tokens (logps, old_logps, advantages, ref_logps, entropies, ...) and the configuration as a
dictionary, and returns the list of its per-token losses (to minimise, not reduced). An advantage estimator of your own:
--plain_estimator my.module:plain, where plain(rewards, groups, options) takes one reward (None: not scored) and one prompt number
a completion and returns one advantage a completion; for an estimator that works token by token plain(row, options) takes the
rewards (and values) of one completion's tokens and returns (advantages, returns)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The check's own arguments; what else is on the command line is a field of the configuration."""
    parser.add_argument("--config", metavar="FILE", help="YAML, as the recipes take it")
    parser.add_argument("--trainer", metavar="NAME", help="grpo or ppo; default ppo where a field that only PPO has is given")
    parser.add_argument("--plain", metavar="MODULE:FUNCTION", help="the plain version of a policy loss of your own")
    parser.add_argument("--plain_estimator", metavar="MODULE:FUNCTION", help="the same of an advantage estimator of your own")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """No output, and one thread: the toy is so small that more of them wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with quiet(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        torch.set_num_threads(threads)


def trained(config: GRPOPlusConfig, folder: str, reward_funcs: list[Any] | None = None) -> Recorder:
    """The toy, trained for three steps under this configuration, with everything written down."""
    from ..trainers.grpo import GRPOPlusTrainer
    from ..trainers.ppo import PPOPlusTrainer

    spec = config.loss_spec()
    scores = "rollout_logps" in spec.required() or spec.rollout_rs is not None or config.rollout_is_correction
    sampler = Sampler(scores=scores)
    by_column = "reads_reward_columns" in ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator).traits
    number = len(config.reward_weights) if config.reward_weights else 2 if by_column else 1
    more: dict[str, Any] = {}
    if getattr(config, "critic", None) == "adapter":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(**TOY_LORA)
    kind: Any = PPOPlusTrainer if isinstance(config, PPOPlusConfig) else GRPOPlusTrainer
    with silent():
        trainer = kind(
            model=save_toy(f"{folder}/toy", hidden_size=32, num_layers=1),
            reward_funcs=reward_funcs or rewards(number),
            args=config,
            train_dataset=toy_dataset(),
            rollout_func=sampler,
            **more,
        )
        recorder = Recorder(trainer, sampler)
        with recorder.watching():
            trainer.train()
    return recorder


def described(recorder: Recorder, plain_loss: Callable[..., Any] | None, plain_estimator: Callable[..., Any] | None) -> Settings:
    """What the hand needs to know of the configuration."""
    trainer = recorder.trainer
    config, spec = trainer.args, trainer.args.loss_spec()
    objective, estimator = POLICY_LOSSES.get(spec.policy_loss), ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator)
    columns = len(trainer.reward_funcs)
    return Settings(
        spec={**dataclasses.asdict(spec), "sequence_level": "sequence_level" in objective.traits},
        estimator_options=config.estimator_options,
        estimator=estimator.name,
        objective=objective.name,
        num_generations=config.num_generations,
        reward_weights=list(config.reward_weights or [1.0] * columns),
        temperature=config.temperature,
        accumulation=config.gradient_accumulation_steps,
        micro_batches=config.steps_per_generation,
        exact_windows=config.windows_are_exact,
        empty_rows=config.counts_empty_rows,
        mask_truncated=bool(config.mask_truncated_completions),
        ends=list(trainer.eos_token_ids),
        pad=trainer.processing_class.pad_token_id,
        missing_eos_penalty=getattr(config, "missing_eos_penalty", None) or 0.0,
        bootstrap=getattr(config, "truncated_completions", "terminal") == "bootstrap",
        adaptive_entropy=bool(config.use_adaptive_entropy),
        plain_loss=plain_loss,
        plain_estimator=plain_estimator,
        token_level="token_level" in estimator.traits,
        rejects=rejects_at_rollout(spec),
        weights=(
            (
                config.vllm_importance_sampling_mode,
                config.vllm_importance_sampling_clip_min,
                config.vllm_importance_sampling_clip_max,
            )
            if config.rollout_is_correction
            else None
        ),
    )


def by_hand(recorder: Recorder, s: Settings) -> Table:
    """Goes through what was written down, in the order of time, and compares it."""
    table, rollouts, micros, steps = Table(), [], [], 0
    latest = -1
    coefficient = s.spec["beta"] if s.kl_in("loss") else s.spec["kl_reward_coef"]
    for event in recorder.events:
        if isinstance(event, Rollout):
            check = RolloutCheck(s, table, event, coefficient)
            recorder.kept[event.number] = check.completions
            rollouts.append(check.run())
            coefficient = check.coefficient
            continue
        micros.append(event)
        if len(micros) == s.accumulation:
            untrained = s.exact_windows and micros[0].rollout != latest
            latest = micros[0].rollout
            StepCheck(s, table, steps, micros, rollouts, untrained).run()
            micros, steps = [], steps + 1
    return table


def place_in_words(recorder: Recorder, line: Line) -> str:
    """Where a difference is, with the completion and the token it belongs to."""
    words = f"{line.quantity!r} in {line.section}"
    if line.place.row is None:
        return words
    number = int(line.section.split()[-1]) - 1
    if not line.section.startswith("rollout"):
        steps = [event for event in recorder.events if isinstance(event, Micro)]
        number = steps[number * recorder.trainer.args.gradient_accumulation_steps].rollout
    row = recorder.kept[number][line.place.row]
    words += f", row {line.place.row} ({row.text!r})"
    column = line.place.column
    if column is not None and column < len(row.ids):
        words += f", token {column} ({recorder.trainer.processing_class.decode([row.ids[column]])!r})"
    return words


def verdict(recorder: Recorder, table: Table) -> tuple[str, int]:
    """The last line, and the exit code."""
    if table.first is not None:
        line = table.first
        return (
            f"DIFFERS: the first quantity is {place_in_words(recorder, line)}: the trainer has {line.theirs:.7g}, by hand it is "
            f"{line.mine:.7g}. Everything before it agrees.",
            1,
        )
    if table.missing:
        words = "; ".join(f"{what} has no plain version: {how}" for what, how in table.missing.items())
        return f"NOT CHECKED: {words}. Everything else agrees.", 2
    sections = {line.section for line in table.lines.values()}
    steps = sum(section.startswith("optimizer") for section in sections)
    return f"ok: {table.numbers} numbers in {steps} optimizer steps agree with those by hand (float32: {TOLERANCE:g}).", 0


def report(recorder: Recorder, s: Settings, table: Table) -> tuple[list[str], int]:
    """What is printed, and the exit code."""
    spec, config = s.spec, recorder.trainer.args
    lines = [
        f"{type(recorder.trainer).__name__}: policy_loss {spec['policy_loss']}, {spec['loss_aggregation']}, advantages "
        f"{s.estimator}, normalization {spec['advantage_normalization']}, KL {spec['kl_placement']}",
        f"rows {config.per_device_train_batch_size} x {s.micro_batches} a rollout, {s.num_generations} a prompt, "
        f"{s.accumulation} micro-batches an optimizer step, {config.num_iterations} passes over a rollout",
        *table.text(),
        "",
    ]
    if table.reached:
        seen = (f"{what} {hits}/{total}" for what, (hits, total) in table.reached.items())
        lines.append(f"seen (tokens): {', '.join(seen)}")
    unseen = [what for what, (hits, _) in table.reached.items() if not hits]
    if unseen:
        lines.append(
            f"not seen, so this says nothing about it: {', '.join(unseen)} (try a higher --learning_rate, or other bounds)"
        )
    if table.given:
        lines.append(f"taken from the trainer as it is: {', '.join(dict.fromkeys(table.given))}")
    for what, how in table.missing.items():
        lines.append(f"no plain version of {what}: {how}")
    words, code = verdict(recorder, table)
    return [*lines, words], code


def check(
    words: Sequence[str],
    *,
    config: str | None = None,
    trainer: str | None = None,
    plain: str | None = None,
    plain_estimator: str | None = None,
    say: Callable[[str], Any] = print,
) -> int:
    """
    Checks one configuration.

    Args:
        words: `--any_field value ...`. config: a recipe's path. trainer: grpo or ppo. plain, plain_estimator: module:function.
        say: takes each line of the report.

    Returns:
        0, 1 or 2, see the head of this file.

    Raises:
        LossPlusError: bad input.
    """
    loss = None if plain is None else import_function("plain", plain)
    estimator = None if plain_estimator is None else import_function("plain_estimator", plain_estimator)
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            settings = build_config(words, config, trainer, folder, say)
        recorder = trained(settings, str(Path(folder)))
        described_as = described(recorder, loss, estimator)
        lines, code = report(recorder, described_as, by_hand(recorder, described_as))
    for line in lines:
        say(line)
    return code


def main(argv: Sequence[str]) -> int:
    """`trl-lossplus check`: the exit code. Raises LossPlusError for bad input."""
    parser = Parser(
        prog=f"{PROG} check",
        usage=f"{PROG} check [--config FILE] [--plain MODULE:FUNCTION] [--any_field value ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add_arguments(parser)
    if {"-h", "--help"} & set(argv):
        parser.print_help()
        return 0
    own, words = parser.parse_known_args(list(argv))
    return check(words, config=own.config, trainer=own.trainer, plain=own.plain, plain_estimator=own.plain_estimator)
