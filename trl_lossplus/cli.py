"""
The command line: trl-lossplus COMMAND ...

A command is a function from its arguments to an exit code, registered in `COMMANDS` with its one-line help. Bad input raises
LossPlusError (or another ValueError, or OSError), which `main` turns into one line on stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from . import __version__
from .functional.errors import LossPlusError, unknown_name

if TYPE_CHECKING:
    from .config import GRPOPlusConfig

PROG = "trl-lossplus"
TRAINERS = ("grpo", "ppo")
EXPLAIN_USAGE = f"""usage: {PROG} explain [--trainer grpo|ppo] [--config FILE] [--num_processes N] [--any_field value ...]

Prints the loss that a configuration describes, where each term acts, the tensors, the schedule and every warning.

  --trainer NAME      grpo (GRPOPlusConfig) or ppo (PPOPlusConfig); default ppo where a field that only PPO has is given, else grpo
  --config FILE       YAML, as the recipes take it; what is no field of the configuration is listed and left aside
  --num_processes N   processes of the launch (default 1): a rollout's completions are those of all of them
  --any_field value   any field of the configuration, trl.GRPOConfig's among them; overrides the file
"""

OF_THE_TOY = (
    "no model_name_or_path: a recipe then trains the toy, and takes the toy's batch size, lengths and rates for what the file does not name; "
    "here TRL's defaults hold"
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No Python warnings, and no log records below ERROR."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def _take(arguments: list[str], flag: str) -> str | None:
    """Removes `flag VALUE` or `flag=VALUE` from the arguments and returns the (last) value."""
    value = None
    for i in range(len(arguments) - 1, -1, -1):
        if arguments[i] == flag:
            if i + 1 == len(arguments):
                raise LossPlusError(f"{flag} needs a value after it.")
            taken = arguments[i + 1]
            del arguments[i : i + 2]
        elif arguments[i].startswith(f"{flag}="):
            taken = arguments.pop(i).partition("=")[2]
        else:
            continue
        value = taken if value is None else value
    return value


def config_classes() -> dict[str, type[GRPOPlusConfig]]:
    """{trainer: its configuration}."""
    from .config import GRPOPlusConfig
    from .ppo_config import PPOPlusConfig

    return dict(zip(TRAINERS, (GRPOPlusConfig, PPOPlusConfig), strict=True))


def field_names(kind: type[GRPOPlusConfig]) -> list[str]:
    """The fields that a user can set."""
    return [item.name for item in dataclasses.fields(kind) if item.init]


def explaining_config(base: type[GRPOPlusConfig], num_processes: int) -> type[GRPOPlusConfig]:
    """A configuration for reading only: it needs no accelerator and no launcher, and is one of `num_processes` processes."""

    class Explained(base):  # type: ignore[misc, valid-type]
        """A configuration without what only the training machine has."""

        def __post_init__(self) -> None:
            self.use_cpu, self.bf16, self.fp16 = True, False, False
            self.bf16_full_eval, self.fp16_full_eval, self.tf32, self.torch_compile = False, False, None, False
            self.deepspeed, self.fsdp, self.fsdp_config, self.parallelism_config = None, None, None, None
            super().__post_init__()

        @property
        def world_size(self) -> int:
            return num_processes

    Explained.__name__ = base.__name__  # messages name the class that the user knows
    return Explained


def _mapping(path: str) -> dict[str, Any]:
    """The YAML file's keys and values. Raises LossPlusError for a file that holds no mapping."""
    import yaml

    try:
        with open(path) as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise LossPlusError(f"--config={path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise LossPlusError(f"--config={path}: no valid YAML ({error}).") from error
    if not isinstance(values, dict):
        raise LossPlusError(f"--config={path}: it must hold `field: value` lines.")
    return values


def _flag_name(word: str) -> str:
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def choose_trainer(named: str | None, keys: Iterable[str], words: Iterable[str], say: Callable[[str], object]) -> str:
    """
    The trainer whose configuration is read: the one that is named, else ppo where a field that only PPO has is given.

    Args:
        named: behind --trainer. keys: of the file. words: of the command line. say: takes the line that tells why it is ppo.

    Raises:
        LossPlusError: no trainer of that name; a field of PPO's on the command line beside --trainer grpo.
    """
    if named is not None and named not in TRAINERS:
        raise unknown_name("trainer", named, TRAINERS)
    classes = config_classes()
    only = set(field_names(classes["ppo"])) - set(field_names(classes["grpo"]))
    flags = [_flag_name(word) for word in words if word.startswith("--")]
    if named == "grpo":
        for name in (name for name in flags if name in only):
            raise LossPlusError(f"--{name} is a field of PPO alone: it needs --trainer ppo.")
    given = [name for name in dict.fromkeys([*keys, *flags]) if name in only]
    if named is None and given:
        say(f"trainer: ppo, for only PPO has {', '.join(given)}")
    return named or ("ppo" if given else "grpo")


def left_aside(keys: Iterable[str], fields: Sequence[str], all_fields: Sequence[str]) -> list[str]:
    """
    What is said about the keys of a recipe that are no configuration fields.

    Args:
        keys: of the recipe. fields: of the configuration that is read. all_fields: those of any, which may be misspelt.

    Returns:
        No line where there are none; else one that lists them, and one for each that looks like a misspelt field. The fields of
        TRL's script and model arguments are never taken for misspelt ones.
    """
    from trl import ModelConfig, ScriptArguments

    other = [str(key) for key in keys if key not in fields]
    known = {"env", *all_fields, *(item.name for kind in (ScriptArguments, ModelConfig) for item in dataclasses.fields(kind))}
    families = {name.split("_")[0] for name in fields if name.startswith(("kl_", "clip_", "advantage_", "loss_", "policy_"))}
    lines = [f"not part of the loss: {', '.join(other)}"] if other else []
    for key in other:
        cutoff = 0.6 if key.split("_")[0] in families else 0.75
        close = [name for names in (fields, all_fields) for name in difflib.get_close_matches(key, names, n=1, cutoff=cutoff)]
        if close and key not in known:
            lines.append(f"warning: {key} is not a field of the loss, did you mean {close[0]}?")
    return lines


def _refuse(message: str) -> NoReturn:
    raise LossPlusError(f"{message}.")


def parse_config(arguments: Sequence[str], say: Callable[[str], object]) -> GRPOPlusConfig:
    """
    The configuration of `[--trainer NAME] [--config FILE] [--num_processes N] [--any_field value ...]`, read by TRL's own parser.

    Args:
        arguments: of the command line. say: takes each line about the choice of the trainer and keys that are left aside.

    Raises:
        LossPlusError: an unknown flag (names the nearest), or settings that contradict each other. ValueError: TRL refuses them.
    """
    from trl import TrlParser

    rest = list(arguments)
    path, processes, named = _take(rest, "--config"), _take(rest, "--num_processes") or "1", _take(rest, "--trainer")
    if not processes.isdecimal() or int(processes) < 1:
        raise LossPlusError(f"--num_processes={processes}: it must be a whole number of at least 1.")
    keys = list(_mapping(path)) if path else []
    trainer = choose_trainer(named, keys, rest, say)
    kind = explaining_config(config_classes()[trainer], int(processes))
    parser: Any = TrlParser([kind], add_help=False)  # type: ignore[list-item]
    parser.error = _refuse
    all_fields = field_names(config_classes()["ppo"])
    for line in left_aside(keys, field_names(kind), all_fields):
        say(line)
    if path and not {"model_name_or_path", "per_device_train_batch_size"} & {*keys, *map(_flag_name, rest)}:
        say(OF_THE_TOY)
    unknown = parser.parse_known_args(rest)[1]
    if unknown:
        raise unknown_flag(unknown[0], all_fields)
    file = ["--config", path] if path else []
    try:
        return parser.parse_args_and_config([*file, *rest], return_remaining_strings=True)[0]
    except ValueError as error:
        hint = " With more than 1 process, say --num_processes." if processes == "1" and "num_generations" in str(error) else ""
        raise LossPlusError(f"{error}{hint}") from error
    except TypeError as error:
        raise LossPlusError(f"a field has a value of the wrong type: {error}.") from error


def unknown_flag(flag: str, fields: Sequence[str]) -> LossPlusError:
    """The error for an argument that is no field: names the nearest one."""
    name = flag.partition("=")[0]
    if not name.startswith("-"):
        return LossPlusError(f"{flag!r} follows no --field.")
    close = difflib.get_close_matches(_flag_name(flag), fields, n=1, cutoff=0.5)
    hint = f" Did you mean --{close[0]}?" if close else ""
    return LossPlusError(f"{name} is not known.{hint} `{PROG} explain --help` lists the fields of the loss.")


def choices() -> str:
    """The fields that the two configurations add, and the names of objectives and estimators, as text."""
    from trl import GRPOConfig

    from .registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

    lines: list[str] = []
    below: Any = GRPOConfig
    for title, kind in zip(("Fields of the loss", "Fields of PPO (--trainer ppo)"), config_classes().values(), strict=True):
        theirs = {item.name: item.metadata for item in dataclasses.fields(below)}
        ours = [item for item in dataclasses.fields(kind) if item.metadata != theirs.get(item.name)]
        lines += [*([""] if lines else []), f"{title}:", *(f"  --{item.name}  {item.metadata['help']}" for item in ours)]
        below = kind
    for title, registry in (("policy_loss", POLICY_LOSSES), ("advantage_estimator", ADVANTAGE_ESTIMATORS)):
        lines += ["", f"{title}:"]
        for name in registry.names():
            entry = registry.get(name)
            options = f"; options {', '.join(sorted(entry.options))}" if entry.options else ""
            lines.append(f"  {name}  {entry.formula} ({entry.source}){options}")
    return "\n".join(lines) + "\n"


def run_explain(arguments: Sequence[str]) -> int:
    """`trl-lossplus explain`."""
    if {"-h", "--help"} & set(arguments):
        with quiet():
            print(f"{EXPLAIN_USAGE}\n{choices()}", end="")
        return 0
    with quiet():
        from .explain import explain

        text = explain(parse_config(arguments, say=print))
    print(text, end="")
    return 0


class Command(NamedTuple):
    """A subcommand: what it does in a line, and the function that takes its arguments and returns the exit code."""

    help: str
    run: Callable[[Sequence[str]], int]


def run_list(arguments: Sequence[str]) -> int:
    """`list [KIND]`: the catalog of one kind, or of all."""
    from .catalog import KINDS, listing

    if {"-h", "--help"} & set(arguments):
        print(
            f"usage: {PROG} list [{'|'.join(KINDS)}]\n\nWhat can be chosen, of one kind or of all: name, formula, what it needs, source."
        )
        return 0
    if len(arguments) > 1:
        raise LossPlusError(f"list takes one kind, and got {' '.join(arguments)}.")
    print("\n\n".join(listing(kind) for kind in (arguments or KINDS)))
    return 0


def _from(module: str, function: str) -> Callable[[Sequence[str]], int]:
    """A command whose module is imported when it runs."""

    def run(arguments: Sequence[str]) -> int:
        return getattr(importlib.import_module(f".{module}", __package__), function)(arguments)

    return run


COMMANDS: dict[str, Command] = {
    "new": Command("a project to start from: script, configuration, reward and its test", _from("new", "main")),
    "explain": Command("the loss of a configuration in words, with every warning", run_explain),
    "snapshot": Command("look at a snapshot, or what differs between two", _from("snapshots.command", "snapshot_main")),
    "check": Command("every number of a toy run a second time, by hand", _from("check.run", "main")),
    "doctor": Command("what is wrong with a run, and what to change", _from("diagnostics.doctor", "main")),
    "report": Command("one HTML file about a run, or two", _from("diagnostics.report", "main")),
    "list": Command(
        "what can be chosen: policy, advantages, kl, aggregation, correction; elsewhere: what others call it", run_list
    ),
    "memory": Command("what a training takes, from its shape and method", _from("memory", "main")),
    "replay": Command("a snapshot's tensors under another loss, or a sweep of them", _from("snapshots.command", "replay_main")),
}


def usage() -> str:
    """The help of the whole program."""
    width = max(map(len, COMMANDS))
    commands = [f"  {name.ljust(width)}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([f"usage: {PROG} COMMAND ...", "", *commands, "", f"{PROG} COMMAND --help says more; --version.", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs one command.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        The exit code: 0, or 2 for bad input, which is told in one line on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.path.append(os.getcwd())  # for the user's own package.module:function
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"{PROG} {__version__}")
        return 0
    try:
        if arguments[0] not in COMMANDS:
            raise unknown_name("command", arguments[0], COMMANDS)
        status = COMMANDS[arguments[0]].run(arguments[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who read it (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
