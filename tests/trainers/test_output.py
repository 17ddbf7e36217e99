"""A disk that is full and a folder that cannot be written are told when the trainer is built."""

import resource
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from toyrun import trainer

from trl_lossplus import LossPlusError
from trl_lossplus.trainers.output import check_output


@contextmanager
def no_byte_more():
    """What the kernel does on a full disk, but for the reason that it gives: files are opened, and a write fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_folder_inside_a_file(tmp_path):
    """Before the model is looked at, and in one line."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LossPlusError, match=r"^output_dir='.*file/out' cannot be written \(Not a directory\)\.$"):
        trainer("no-such-model", tmp_path / "file" / "out")


def test_a_disk_that_takes_no_byte(toy, tmp_path):
    """A file can be made there, and not be written."""
    with no_byte_more(), pytest.raises(LossPlusError, match=r"cannot be written \(File too large\)\.$"):
        check_output(str(tmp_path / "out"))
    assert check_output(str(tmp_path / "out")).is_dir()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("method", ["full", "LoRA"])
def test_a_disk_without_room_for_a_checkpoint(toy, tmp_path, monkeypatch, method):
    """One byte less than the trained weights is too little; that it is enough where nothing is saved, or nothing else is trained."""
    extra = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if method == "LoRA" else {}
    first = trainer(toy, tmp_path, extra=extra)
    needed = 4 * sum(p.numel() for p in first.model.parameters() if p.requires_grad)
    assert needed == (4 * 4 * adapter_columns(first) if extra else 4 * first.model.num_parameters())

    def room(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    room(needed - 1)
    with pytest.raises(
        LossPlusError, match=r"MiB are free on its disk, and a checkpoint takes more than .* set save_strategy='no'"
    ):
        trainer(toy, tmp_path, extra=extra, save_strategy="steps")
    trainer(toy, tmp_path, extra=extra, save_strategy="no")
    room(needed)
    trainer(toy, tmp_path, extra=extra, save_strategy="steps")


def adapter_columns(run):
    """Inputs and outputs of every linear layer but the head: an adapter of rank r has r numbers for each."""
    layers = run.model.get_base_model().model.named_modules()
    return sum(m.in_features + m.out_features for _, m in layers if type(m).__name__ == "Linear" and hasattr(m, "base_layer"))
