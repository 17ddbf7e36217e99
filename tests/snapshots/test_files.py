"""A snapshot's files: whole or not at all, readable without us, bounded; damaged, foreign and newer ones are one clear line each."""

import json
import os
import random

import pytest
import safetensors
import torch
from made import step
from safetensors.torch import load_file, save_file

from trl_lossplus import LossPlusError, LossSpec, Snapshot, replay
from trl_lossplus.cli import main
from trl_lossplus.snapshots.store import canonical, checksum
from trl_lossplus.snapshots.take import snapshot_folder

SPEC = LossSpec(beta=0.1, vf_coef=0.3, loss_aggregation="prompt_mean")


@pytest.fixture
def saved(tmp_path):
    step(SPEC)[0].save(tmp_path)
    return tmp_path


def refused(folder, words):
    with pytest.raises(LossPlusError, match=words) as error:
        Snapshot.load(folder)
    assert "\n" not in str(error.value)


def rewritten(folder, sealed=True, **changes):
    """The JSON file with other contents, and (if sealed) a checksum that fits them."""
    described = {**json.loads((folder / "rank-0.json").read_text()), **changes}
    if sealed:
        described["checksum"] = checksum(canonical(described))
    (folder / "rank-0.json").write_text(json.dumps(described))


def test_read_without_us(saved):
    """By any reader of the two formats: names, metadata, and strict JSON."""
    with safetensors.safe_open(saved / "rank-0.safetensors", "np") as file:
        names = set(file.keys())
        assert file.get_tensor("0/batch/logps").shape == (4, 6)
    assert {"0/batch/mask", "0/out/policy", "1/grad/logps", "0/beside/completion_ids"} <= names

    def not_json(word):
        raise AssertionError(f"{word} is no JSON")

    described = json.loads((saved / "rank-0.json").read_text(), parse_constant=not_json)
    assert described["spec"]["policy_loss"] == "ppo_clip"
    assert described["tokens"]["3"] == " t3"
    assert described["loss"] == pytest.approx(sum(described["terms"].values()))


def test_numbers_that_json_has_not(tmp_path):
    """A loss that is not finite, and an infinite bound, come back as they were, from strict JSON."""
    snapshot = step(LossSpec(policy_loss="clip_cov", clip_cov_max=float("inf"), beta=0.1))[0]
    snapshot.micro[0].terms = {"policy": float("nan"), "kl": float("-inf")}
    snapshot.facts["step_loss"] = float("inf")
    snapshot.save(tmp_path)
    assert "NaN" not in (tmp_path / "rank-0.json").read_text().replace('"NaN"', "")
    again = Snapshot.load(tmp_path)
    assert again.terms["policy"] != again.terms["policy"]
    assert again.terms["kl"] == float("-inf")
    assert again.spec.clip_cov_max == float("inf")


def test_bounded_size():
    """Five of six rows: how many are left out is said; loss, terms and replay are those of the rows that are kept."""
    whole, snapshot = step(SPEC)[0], step(SPEC, max_rows=5)[0]
    assert (snapshot.rows, snapshot.facts["rows_left_out"], whole.facts["rows_left_out"]) == (5, 1, 0)
    assert snapshot.facts["step_loss"] == whole.loss
    assert snapshot.loss != whole.loss
    assert snapshot.texts["completion"] == [f"row {i}" for i in range(5)]
    again = replay(snapshot)
    assert (again.loss, again.terms) == (snapshot.loss, snapshot.terms)
    assert torch.equal(again.gradients[1], whole.micro[1].gradient[:1])
    assert step(SPEC, max_rows=4)[0].rows == 4
    assert len(step(SPEC, max_rows=4)[0].micro) == 1


@pytest.mark.parametrize("fails_at", [1, 2])
def test_whole_or_not_at_all(saved, monkeypatch, fails_at):
    """Stopped between the two files, also over an older snapshot: none is there, and no part of the old one beside the new."""
    inner, calls = os.replace, []

    def stops(*paths):
        calls.append(paths)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        inner(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stops)
        with pytest.raises(OSError, match="No space"):
            step(LossSpec())[0].save(saved)
    assert sorted(path.name for path in saved.iterdir()) == ["rank-0.safetensors"]
    refused(saved, "no snapshot here")
    step(LossSpec())[0].save(saved)
    assert Snapshot.load(saved).spec == LossSpec()


def test_foreign_and_newer(saved, tmp_path):
    refused(tmp_path / "nowhere", "no snapshot here")
    for name in ("step-10", "step-9"):
        step(LossSpec())[0].save(saved.parent / "several" / name)
    refused(saved.parent / "several", "; folders in it that hold one: step-9, step-10.")
    good = (saved / "rank-0.json").read_text()
    for text, words in (
        ("", "not a snapshot, or a truncated one"),
        ('{"a": 1}', "not a snapshot of trl-lossplus"),
        ("[1, 2]", "not a snapshot of trl-lossplus"),
        ('{"format": 1}', "it lacks spec, micro_batches"),
        ("[" * 100_000, "not a snapshot, or a truncated one"),
        ("\ufeff{}", "not a snapshot"),
    ):
        (saved / "rank-0.json").write_text(text)
        refused(saved, words)
    (saved / "rank-0.json").write_bytes(b"\xff\xfe\x00")
    refused(saved, "not a snapshot")
    (saved / "rank-0.json").write_text(good)
    rewritten(saved, format=99)
    refused(saved, "format 99 is newer than this version of trl-lossplus reads")
    (saved / "rank-0.json").write_text(good)
    save_file({"weight": torch.zeros(3)}, saved / "rank-0.safetensors")
    refused(saved, "damaged, or changed after it was written")


def test_a_pickle_is_never_loaded(saved):
    """A file that would run code when unpickled is refused as no safetensors file, and does not run."""

    class Runs:
        def __reduce__(self):
            return (os.mkdir, (str(saved / "it_ran"),))

    torch.save(Runs(), saved / "rank-0.safetensors")
    refused(saved, "truncated or no safetensors file")
    assert not (saved / "it_ran").exists()


# Each sealed with a checksum that fits, so that the parts themselves are looked at.
FAULTS = {
    "unknown field": ({"spec": {"policy_los": "x"}}, "policy_los"),
    "value out of range": ({"spec": {"epsilon": -1}}, "epsilon"),
    "unknown loss": ({"spec": {"policy_loss": "nothing"}}, "policy_loss='nothing' is not known"),
    "type of a value": ({"spec": {"epsilon": [1]}}, "epsilon"),
    "texts": ({"texts": {"prompt": 3}}, "texts has not the form"),
    "tokens": ({"tokens": {"x": "y"}}, "tokens has not the form"),
    "micro-batches": ({"micro_batches": [{"window": None}]}, "micro_batches has not the form"),
    "a window": ({"micro_batches": [{"window": {"a": 1}, "terms": {}, "statistics": {}}] * 2}, "a window holds a"),
    "a term": ({"micro_batches": [{"window": None, "terms": {"kl": "x"}, "statistics": {}}] * 2}, "'x' where a number belongs"),
    "too few micro-batches": (
        {"micro_batches": [{"window": None, "terms": {}, "statistics": {}}]},
        "holds tensors of 1, and there",
    ),
    "too many": ({"micro_batches": [{"window": None, "terms": {}, "statistics": {}}] * 3}, "micro-batch 2 has no logps"),
    "processes": ({"facts": {"processes": 3}}, "rank-1.json: no snapshot here"),
    "processes, no number": ({"facts": {"processes": "../.."}}, "processes is '../..'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_parts_of_the_wrong_form(saved, name):
    changes, words = FAULTS[name]
    rewritten(saved, **changes)
    refused(saved, words)


TENSORS = {
    "no gradient": (lambda t: t.pop("0/grad/logps"), "has no gradient"),
    "no mask": (lambda t: t.pop("1/batch/mask"), "micro-batch 1 has no mask"),
    "mask as numbers": (lambda t: t.update({"0/batch/mask": t["0/batch/mask"].float()}), "mask has dtype torch.float32"),
    "log-probs as integers": (lambda t: t.update({"0/batch/logps": t["0/batch/logps"].long()}), "logps has dtype torch.int64"),
    "groups as fractions": (lambda t: t.update({"0/batch/group_ids": t["0/batch/group_ids"].float()}), "group_ids has dtype"),
    "shape": (lambda t: t.update({"0/batch/old_logps": torch.zeros(4, 5)}), "old_logps has shape"),
    "output's shape": (lambda t: t.update({"0/out/policy": torch.zeros(4, 5)}), "policy has shape"),
    "ids' rows": (lambda t: t.update({"0/beside/completion_ids": torch.zeros(9, 6).long()}), "completion_ids has shape"),
    "one more": (lambda t: t.update({"0/batch/spy": torch.zeros(4, 6)}), "holds spy"),
    "path as a name": (lambda t: t.update({"../../etc/passwd": torch.zeros(1)}), "holds tensors of .., and there are 2"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_the_wrong_form(saved, name):
    change, words = TENSORS[name]
    tensors = load_file(saved / "rank-0.safetensors")
    change(tensors)
    save_file(tensors, saved / "rank-0.safetensors")
    rewritten(saved, sha256=checksum((saved / "rank-0.safetensors").read_bytes()))
    refused(saved, words)


@pytest.mark.parametrize("file", ["rank-0.json", "rank-0.safetensors"])
def test_truncated_at_every_tenth(saved, file, capsys):
    data = (saved / file).read_bytes()
    for tenth in range(10):
        (saved / file).write_bytes(data[: len(data) * tenth // 10])
        refused(saved, "truncated")
        assert main(["snapshot", "show", str(saved)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    (saved / file).write_bytes(data)
    assert Snapshot.load(saved).spec == SPEC


@pytest.mark.parametrize("file", ["rank-0.json", "rank-0.safetensors"])
def test_bytes_flipped(saved, file):
    """300 single bytes replaced: each is refused by one line, none loads as if nothing were wrong, and nothing else is raised."""
    data, draw = (saved / file).read_bytes(), random.Random(0)
    for _ in range(300):
        place, byte = draw.randrange(len(data)), draw.randrange(256)
        broken = data[:place] + bytes([byte]) + data[place + 1 :]
        if broken != data and not (file.endswith("json") and _same_json(broken, data)):
            (saved / file).write_bytes(broken)
            refused(saved, "")


def _same_json(a, b):
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


def test_flipped_json_with_a_fitting_checksum(saved):
    """As above where someone also mends the checksum: the parts' own checks refuse it, or it is a sound snapshot of other numbers."""
    text, draw, refusals = (saved / "rank-0.json").read_text(), random.Random(1), []
    for _ in range(300):
        place = draw.randrange(len(text))
        broken = text[:place] + chr(draw.randrange(32, 127)) + text[place + 1 :]
        try:
            described = json.loads(broken)
            described["checksum"] = checksum(canonical(described))
            (saved / "rank-0.json").write_text(json.dumps(described))
        except (ValueError, TypeError):
            continue
        try:
            replay(Snapshot.load(saved))
        except LossPlusError as error:
            refusals.append(str(error))
    assert len(refusals) > 30
    assert not [text for text in refusals if "\n" in text]


@pytest.mark.parametrize("reason", ["../elsewhere", "a/b", "", "..", "a\n", "nul\0"])
def test_a_name_that_would_leave_the_folder_is_refused(tmp_path, reason):
    with pytest.raises(LossPlusError, match="only letters, digits"):
        snapshot_folder(tmp_path, 1, reason)
    assert snapshot_folder(tmp_path, 12, "step") == tmp_path / "step-00000012-step"


@pytest.mark.parametrize("rank", ["../../x", -1, 1.5, True, "0"])
def test_a_rank_that_is_no_process_is_refused(saved, rank):
    for call in (lambda: Snapshot.load(saved, rank), lambda: step(SPEC)[0].save(saved, rank)):
        with pytest.raises(LossPlusError, match="must be a process number"):
            call()
