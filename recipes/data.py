"""
Datasets by name: the toy, a reasoning_gym task, a local file or folder, or the hub.

What comes out has a `prompt` column, a string or a conversation, and whatever columns the reward functions read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from trl_lossplus import LossPlusError
from trl_lossplus.functional.errors import unknown_name
from trl_lossplus.toy import toy_dataset

GYM = "reasoning_gym:"
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class DataSource:
    """
    Which dataset, and how its prompts are made.

    Attributes:
        name: `toy`, `reasoning_gym:TASK`, a .jsonl, .json, .parquet or .csv file, a folder (saved by `save_to_disk`, or of data
            files), or a name on the hub.
        config: the hub dataset's configuration.
        kwargs: settings of a reasoning_gym task (`size`, `seed` and the task's own), or more arguments for `load_dataset`.
        prompt_column: the column that becomes `prompt`; None: it is called so already.
        answer_column: the column that becomes `answer`; None: none does.
        as_chat: whether a text prompt becomes a user's message, so that the tokenizer's chat template applies.
        system_prompt: put before the user's message; implies `as_chat`.
    """

    name: str
    config: str | None = None
    kwargs: dict[str, Any] | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    as_chat: bool = False
    system_prompt: str | None = None

    def load(self, split: str) -> Dataset:
        """
        One split, with its prompts made.

        Args:
            split: its name; a toy has one, a reasoning_gym task and a file have `train`, the task any other name too (other
                problems of as many).

        Raises:
            LossPlusError: the file, dataset, task, split or column is not there, or cannot be read.
        """
        if self.name == "toy":
            dataset = toy_dataset()
        elif self.name.startswith(GYM):
            dataset = reasoning_gym_dataset(self.name.removeprefix(GYM), split, **(self.kwargs or {}))
        else:
            dataset = _take_split(self.name, self._stored(), split)
        return self._with_prompts(dataset)

    def _stored(self) -> Dataset | DatasetDict:
        """What lies on the disk or the hub under `name`."""
        path, kwargs = Path(self.name), self.kwargs or {}
        builder = BUILDERS.get(path.suffix)
        looks_local = builder is not None or self.name.startswith((".", "/", "~")) or self.name.count("/") > 1
        if looks_local and not path.exists():
            raise LossPlusError(f"dataset_name={self.name!r}: there is no such file or folder.")
        try:
            if builder is not None and path.is_file():
                return load_dataset(builder, data_files=str(path), **kwargs)
            if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
                return load_from_disk(self.name)
            return load_dataset(self.name, self.config, **kwargs)
        except (OSError, ValueError, TypeError, _generation_error()) as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise LossPlusError(f"dataset_name={self.name!r} cannot be loaded: {reason}") from None

    def _with_prompts(self, dataset: Dataset) -> Dataset:
        for becomes, column in (("prompt", self.prompt_column), ("answer", self.answer_column)):
            if column is None or column == becomes:
                continue
            if column not in dataset.column_names:
                raise unknown_name(f"dataset_{becomes}_column", column, dataset.column_names)
            dataset = dataset.remove_columns([name for name in dataset.column_names if name == becomes])
            dataset = dataset.rename_column(column, becomes)
        if "prompt" not in dataset.column_names:
            columns = ", ".join(dataset.column_names)
            raise LossPlusError(f"{self.name} has no 'prompt' column, but {columns}. Set dataset_prompt_column to one of them.")
        if not (self.as_chat or self.system_prompt):
            return dataset
        if len(dataset) and not isinstance(dataset[0]["prompt"], str):
            raise LossPlusError("as_chat: the dataset's prompts are conversations already. Remove as_chat and system_prompt.")
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        chats = [[*system, {"role": "user", "content": text}] for text in dataset["prompt"]]
        rest = {name: dataset[name] for name in dataset.column_names if name != "prompt"}
        return Dataset.from_dict({"prompt": chats, **rest})


def _generation_error() -> type[Exception]:
    """What `datasets` raises for a file that it cannot read."""
    from datasets.exceptions import DatasetGenerationError

    return DatasetGenerationError


def _take_split(name: str, stored: Dataset | DatasetDict, split: str) -> Dataset:
    if isinstance(stored, Dataset):
        return stored
    if split not in stored:
        raise unknown_name(f"split of dataset {name!r}", split, [str(key) for key in stored])
    return stored[split]


def reasoning_gym_dataset(task: str, split: str = "train", size: int = 512, seed: int = 0, **kwargs: Any) -> Dataset:
    """
    Problems of one reasoning_gym task: columns `prompt`, `answer`, and `task` and `entry` for the `reasoning_gym` reward.

    Args:
        task: its name, for instance chain_sum. kwargs: its own settings, for instance min_terms=2.
        split: `train`, or another name for `size` other problems (other seeds; a small task repeats itself all the same).

    Raises:
        LossPlusError: reasoning_gym is not installed, the task is unknown, or does not take these settings.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise LossPlusError(
            f"dataset {GYM + task!r} needs the reasoning-gym package. Install the extra: pip install 'trl-lossplus[real]'."
        ) from None
    if task not in DATASETS:
        raise unknown_name("reasoning_gym task", task, DATASETS)
    settings = {"seed": seed if split == "train" else seed + size, "size": size, **kwargs}
    try:
        problems = reasoning_gym.create_dataset(task, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise LossPlusError(f"dataset_kwargs={kwargs}: reasoning_gym's {task} does not take these ({error}).") from None
    description = json.dumps({"name": task, "kwargs": settings})
    rows = [
        {"prompt": problem["question"], "answer": str(problem["answer"]), "task": description, "entry": index}
        for index, problem in zip(range(size), problems, strict=False)
    ]
    return Dataset.from_list(rows)
