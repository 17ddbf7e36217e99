"""The README tells the truth: its Python runs, its commands exist, its table names what there is."""

import re
from dataclasses import fields

from docpages import ROOT, blocks
from docrun import PageRun
from helpers import EVERY_OBJECTIVE

from trl_lossplus import GRPOPlusConfig, LossSpec, PPOPlusConfig
from trl_lossplus.cli import main
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from trl_lossplus.spec import CHOICES

README = (ROOT / "README.md").read_text()


def test_blocks_run(tmp_path, monkeypatch):
    """The example trains, the ten-line loss registers and can be named, and the commands are ones."""
    assert len([line for line in blocks("README.md", "python")[0].text.splitlines() if line.strip()]) <= 16
    scope = PageRun("README.md", tmp_path, monkeypatch).run().scope
    assert scope["trainer"].spec.policy_loss == "gspo"
    assert scope["trainer"].state.global_step == 20
    assert LossSpec(policy_loss="my_loss").required() == {"logps", "mask", "old_logps", "advantages"}
    POLICY_LOSSES.entries.pop("my_loss")


def test_explain_block_is_what_explain_prints(capsys):
    """Every line of the README's explanation is printed by the command that it names."""
    command = re.search(r"`trl-lossplus (explain --policy_loss[^`]*)`", README).group(1)
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    (shown,) = [block.text for block in blocks("README.md", "text") if block.text.startswith("The loss")]
    for line in shown.splitlines():
        assert line == "..." or line in printed, line


def test_table_names_fields_and_values():
    known = {item.name for item in (*fields(GRPOPlusConfig), *fields(PPOPlusConfig))}
    values = {*POLICY_LOSSES.names(), *ADVANTAGE_ESTIMATORS.names(), *(v for choice in CHOICES.values() for v in choice)}
    section = README.split("## What can be chosen")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", section, re.M)
    assert len(rows) >= 10
    for names, row in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert name in known, name
        if "policy_loss" in names:
            listed = {word.strip() for word in row.split(", or your own")[0].split(",")}
            assert listed <= values
    for objective in EVERY_OBJECTIVE:
        assert objective in README


def test_files_and_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for path in re.findall(r"(?:recipes|accelerate_configs|docs)/[\w./]+\w", README):
        assert (ROOT / path).exists(), path
    table = README.split("| recipes/configs/ |")[1].split("\n\n")[0]
    for name in re.findall(r"^\| ([\w, ]+) \|", table, re.M):
        for config in name.split(","):
            assert (ROOT / f"recipes/configs/{config.strip()}.yaml").exists(), config
