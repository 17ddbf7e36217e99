"""
A snapshot: the tensors that one optimizer step's loss read and returned, with the spec and the texts.

On disk it is a folder with, for each process, `rank-R.safetensors` (tensors named `micro-batch/kind/name`) and `rank-R.json`
(everything else). Both are read without this package by any safetensors and JSON reader; nothing in them is executed. The JSON file
is written last and holds a checksum of both, so a folder without it, or with a part of another snapshot, holds none.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from .. import __version__
from ..batch import LossBatch
from ..diagnostics.probes import pooled
from ..functional.aggregation import Window
from ..functional.errors import LossPlusError
from ..functional.kl import canonical_kl
from ..registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from ..spec import LossSpec
from .validate import checked_parts, checked_window, number, plain_numbers, read_described

if TYPE_CHECKING:
    from .diff import Difference
    from .replay import Replay

FORMAT = 1
BATCH_FIELDS = tuple(item.name for item in fields(LossBatch))
WINDOW_NUMBERS = ("num_tokens", "num_rows", "num_prompts", "world_size")
Pooled = tuple[str, float, float]  # a statistic: kind, total, weight


@dataclass
class MicroSnapshot:
    """
    One micro-batch of B rows and T tokens.

    batch: cleaned, as the loss read it. window: the optimizer step's counts. per_token: (B, T) each, what the loss gave.
    gradient: (B, T), d loss / d log-probs. terms: {name: share of the step's}. statistics: {name: (kind, total, weight)}.
    beside: what the loss did not read (token ids, row numbers).
    """

    batch: LossBatch
    window: Window | None
    per_token: dict[str, Tensor]
    gradient: Tensor
    terms: dict[str, float]
    statistics: dict[str, Pooled] = field(default_factory=dict)
    beside: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Snapshot:
    """
    One optimizer step, of one process or of all of them together.

    Attributes:
        spec: the loss. micro: its micro-batches, of one process after another.
        facts: step, rank, processes, versions, seed, rows_left_out, and what else was given. texts: {"prompt": [...],
        "completion": [...]} by row, over the micro-batches in order. tokens: {id: text} of the completions.
        processes: whose parts are in here (1: one process's, as it is on disk).
    """

    spec: LossSpec
    micro: list[MicroSnapshot]
    facts: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    tokens: dict[int, str] = field(default_factory=dict)
    processes: int = 1

    @property
    def rows(self) -> int:
        """Rows of all micro-batches."""
        return sum(len(part.batch.mask) for part in self.micro)

    @property
    def terms(self) -> dict[str, float]:
        """Each term over the micro-batches, the mean over processes (whose gradients the backend averages)."""
        return summed([part.terms for part in self.micro], self.processes)

    @property
    def loss(self) -> float:
        """The sum of the terms."""
        return sum(self.terms.values())

    @property
    def stats(self) -> dict[str, float]:
        """The statistics' values over all micro-batches, by metric name; NaN where there was nothing to count."""
        return pooled([part.statistics for part in self.micro])

    def save(self, folder: str | os.PathLike[str], rank: int = 0) -> Path:
        """
        Writes the snapshot into `folder`, whole or not at all.

        Returns:
            The path of the JSON file. Raises OSError where the folder cannot be written, LossPlusError for several processes' parts.
        """
        if self.processes > 1:
            raise LossPlusError(f"this snapshot holds the parts of {self.processes} processes: save each with its rank.")
        path = Path(folder)
        stem = path / file_stem(rank)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in self._named_tensors() if t is not None}
        data = to_bytes(tensors, metadata={"format": "pt"})
        with tempfile.TemporaryDirectory(dir=path) as inside:
            (Path(inside) / "t").write_bytes(data)
            (Path(inside) / "j").write_text(json.dumps(self._described(checksum(data)), allow_nan=False), encoding="utf-8")
            stem.with_suffix(".json").unlink(missing_ok=True)  # never an old description beside new tensors
            os.replace(Path(inside) / "t", stem.with_suffix(".safetensors"))
            os.replace(Path(inside) / "j", stem.with_suffix(".json"))
        return stem.with_suffix(".json")

    def _named_tensors(self) -> list[tuple[str, Tensor | None]]:
        """Every tensor under its name on disk."""
        named: list[tuple[str, Tensor | None]] = []
        for i, micro in enumerate(self.micro):
            parts = {f"batch/{name}": getattr(micro.batch, name) for name in BATCH_FIELDS}
            parts |= {f"out/{name}": tensor for name, tensor in micro.per_token.items()}
            parts |= {f"beside/{name}": tensor for name, tensor in micro.beside.items()}
            parts |= {"grad/logps": micro.gradient}
            parts |= {"window/group_tokens": None if micro.window is None else micro.window.group_tokens}
            named += [(f"{i}/{name}", tensor) for name, tensor in parts.items()]
        return named

    def _described(self, tensors: str) -> dict[str, Any]:
        """What goes into the JSON file; `tensors` is the checksum of the other."""
        parts = [{"window": _counts(part.window), "terms": part.terms, "statistics": part.statistics} for part in self.micro]
        described = plain_numbers(
            {
                "format": FORMAT, "spec": asdict(self.spec), "micro_batches": parts, "loss": self.loss, "terms": self.terms,
                "facts": {**self.facts, "trl_lossplus": __version__}, "texts": self.texts,
                "tokens": {str(key): text for key, text in self.tokens.items()}, "sha256": tensors,
            }
        )  # fmt: skip
        return {**described, "checksum": checksum(canonical(described))}

    @classmethod
    def load(cls, folder: str | os.PathLike[str], rank: int | None = None) -> Snapshot:
        """
        Reads a snapshot.

        Args:
            folder: the snapshot's folder. rank: whose part; None: all processes' together.

        Raises:
            LossPlusError: there is none, it is truncated, damaged, foreign, or of a newer format; one line that says which.
        """
        path = Path(folder)
        first = load_part(path, 0 if rank is None else rank)
        processes = first.facts.get("processes", 1)
        if not isinstance(processes, int):
            raise LossPlusError(f"{path}: processes is {processes!r}; the snapshot is damaged.")
        if rank is not None or processes <= 1:
            return first
        return together([first, *(load_part(path, other) for other in range(1, processes))])

    def diff(self, other: Snapshot) -> Difference:
        """What differs between this and another snapshot, see `snapshots.diff.diff`."""
        from .diff import diff

        return diff(self, other)

    def replay(self, spec: LossSpec | None = None, **changes: Any) -> Replay:
        """This step under another loss: a spec, or fields of it that change. See `snapshots.replay.replay`."""
        from .replay import replay

        base = self.spec if spec is None else spec
        return replay(self, LossSpec.from_dict({**asdict(base), **changes}) if changes else base)


def file_stem(rank: int) -> str:
    """`rank-R`. Raises LossPlusError for what is no process number."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise LossPlusError(f"rank={rank!r}: it must be a process number, 0 or more.")
    return f"rank-{rank}"


def checksum(data: bytes) -> str:
    """SHA-256 in hex digits."""
    return hashlib.sha256(data).hexdigest()


def canonical(described: dict[str, Any]) -> bytes:
    """One text for the same contents, without their checksum."""
    return json.dumps({k: v for k, v in described.items() if k != "checksum"}, sort_keys=True).encode()


def summed(parts: Sequence[dict[str, float]], processes: int = 1) -> dict[str, float]:
    """Terms of micro-batches, added up by name in their order, over the number of processes."""
    terms: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            terms[name] = terms.get(name, 0.0) + value
    return {name: value / processes for name, value in terms.items()}


def _counts(window: Window | None) -> dict[str, Any] | None:
    """A window's counts as plain numbers."""
    if window is None:
        return None
    values = {name: getattr(window, name) for name in WINDOW_NUMBERS}
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}


def together(parts: Sequence[Snapshot]) -> Snapshot:
    """The parts of all processes as one snapshot: every micro-batch, and the mean of the losses that the backend averages."""
    first = parts[0]
    texts = {name: [text for part in parts for text in part.texts.get(name, [])] for name in first.texts}
    left = sum(part.facts.get("rows_left_out", 0) for part in parts)
    return replace(
        first,
        micro=[micro for part in parts for micro in part.micro],
        facts={**first.facts, "rank": "all", "rows_left_out": left},
        texts=texts,
        tokens={key: text for part in parts for key, text in part.tokens.items()},
        processes=len(parts),
    )


def load_part(path: Path, rank: int) -> Snapshot:
    """One process's part. Raises LossPlusError, see `Snapshot.load`."""
    stem = path / file_stem(rank)
    described = read_described(stem.with_suffix(".json"), FORMAT)
    spec = _spec(path, described["spec"])
    file = stem.with_suffix(".safetensors")
    try:
        data = file.read_bytes()
        tensors = from_bytes(data)
    except (SafetensorError, OSError, ValueError) as error:
        raise LossPlusError(f"{file}: cannot be read, it is truncated or no safetensors file ({error}).") from None
    whole = checksum(data) == described["sha256"]
    if not whole or checksum(canonical(described)) != described["checksum"]:
        raise LossPlusError(f"{file if not whole else stem.with_suffix('.json')}: damaged, or changed after it was written.")
    micro = [_micro(path, i, tensors, part) for i, part in enumerate(described["micro_batches"])]
    unknown = {name.split("/")[0] for name in tensors} - {str(i) for i in range(len(micro))}
    if unknown:
        raise LossPlusError(f"{file}: holds tensors of {', '.join(sorted(unknown))}, and there are {len(micro)} micro-batches.")
    tokens = {int(key): text for key, text in described["tokens"].items()}
    return Snapshot(spec, micro, described["facts"], described["texts"], tokens)


def _spec(path: Path, values: dict[str, Any]) -> LossSpec:
    """A snapshot's loss. Raises LossPlusError; a name that nothing registers here may be the user's own."""
    for kind, get in (
        ("policy_loss", POLICY_LOSSES.get),
        ("advantage_estimator", ADVANTAGE_ESTIMATORS.get),
        ("kl_estimator", canonical_kl),
    ):
        name = values.get(kind, "")
        if not isinstance(name, str) or not name or ":" in name:
            continue
        try:
            get(name)
        except LossPlusError as error:
            by_name = "" if kind == "kl_estimator" else f", or in a replay --{kind} MODULE:{name}"
            raise LossPlusError(
                f"{path}: {error} If {name!r} is your own, its module must be imported first: --import MODULE on the command line{by_name}; "
                "import MODULE in Python."
            ) from None
    return LossSpec.from_dict(values)


def _micro(path: Path, i: int, tensors: dict[str, Tensor], described: dict[str, Any]) -> MicroSnapshot:
    def under(kind: str) -> dict[str, Tensor]:
        prefix = f"{i}/{kind}/"
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    batch, gradient = under("batch"), under("grad").get("logps")
    for name in ("logps", "advantages", "mask"):
        if name not in batch:
            raise LossPlusError(f"{path}: micro-batch {i} has no {name}; the snapshot is damaged.")
    unknown = batch.keys() - set(BATCH_FIELDS)
    if unknown:
        raise LossPlusError(f"{path}: micro-batch {i} holds {', '.join(sorted(unknown))}, which no LossBatch has.")
    given = LossBatch(**{name: batch.get(name) for name in BATCH_FIELDS})  # type: ignore[arg-type]
    given.validate()
    group_tokens = under("window").get("group_tokens")
    checked_parts(f"{path}: micro-batch {i}", given, gradient, under("out"), under("beside"), group_tokens)
    numbers = described["window"]
    window = None if numbers is None else Window(**checked_window(path, numbers), group_tokens=group_tokens)
    terms = {name: number(value) for name, value in described["terms"].items()}
    counted = {name: (kind, number(total), number(weight)) for name, (kind, total, weight) in described["statistics"].items()}
    return MicroSnapshot(given, window, under("out"), cast(Tensor, gradient), terms, counted, under("beside"))
