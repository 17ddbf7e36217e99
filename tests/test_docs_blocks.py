"""Every code block of README and docs/ runs (docrun.py says what that is for each language), or says why it cannot."""

import pytest
from docpages import PAGES, Block, blocks
from docrun import PageRun, commands, masked

from trl_lossplus.functional.kl import KL_ESTIMATORS, KL_FORMULAS
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

# Run by tests of their own, which look at more: docs/verify.md, README.md, docs/ppo.md.
OWN = {"docs/verify.md": "snapshots/test_verify_page.py", "README.md": "test_readme.py", "docs/ppo.md": "test_docs_ppo.py"}
WITH_BLOCKS = [page for page in PAGES if any(not block.not_run for block in blocks(page)) and page not in OWN]
EVERY_BLOCK = [block for page in PAGES for block in blocks(page)]


@pytest.fixture(autouse=True)
def registries():
    """What a page registers is forgotten."""
    POLICY_LOSSES.names()  # ours are registered when first asked for: they must be there before what is kept is taken
    kept = [(names, dict(names)) for names in (POLICY_LOSSES.entries, ADVANTAGE_ESTIMATORS.entries, KL_ESTIMATORS, KL_FORMULAS)]
    yield
    for names, before in kept:
        names.clear()
        names.update(before)


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_page_runs(page, tmp_path, monkeypatch):
    assert PageRun(page, tmp_path, monkeypatch).run().ran


@pytest.mark.nightly
@pytest.mark.parametrize("page", sorted({block.page for block in EVERY_BLOCK if block.nightly}))
def test_page_runs_with_its_long_blocks(page, tmp_path, monkeypatch):
    assert PageRun(page, tmp_path, monkeypatch).run(nightly=True).ran


@pytest.mark.parametrize("block", [b for b in EVERY_BLOCK if b.not_run], ids=lambda block: f"{block.page}:{block.line}")
def test_not_run(block):
    """Listed as skipped, with the page's reason."""
    assert len(block.not_run) > 15
    pytest.skip(block.not_run)


def test_marks_are_understood():
    for block in EVERY_BLOCK:
        known = block.mark in ("", "printed", "trained") or block.mark.startswith("file: ")
        assert known or block.not_run or block.nightly, (block.page, block.line, block.mark)


def failing(language, text, folder, monkeypatch, mark=""):
    run = PageRun("README.md", folder, monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError, SystemExit, OSError)) as caught:
        run.one(Block("made up", 3, language, text, mark))
    return f"{caught.value} {' '.join(caught.value.__notes__)}"


@pytest.mark.parametrize(
    ("language", "text", "mark"),
    [
        ("python", "assert 1 + 1 == 3\n", ""),
        ("yaml", "beta: 0.1\nkl_estimatr: k3\n", ""),
        ("yaml", "policy_loss: gspo\nepsilon: -1\n", ""),
        ("yaml", "distributed_type: MULTI_GPU\nprocesses: 2\n", ""),
        ("bash", "trl-lossplus explain --policy_loss none\n", ""),
        ("bash", "accelerate launch --config_file none.yaml recipes/grpo.py\n", ""),
        ("bash", "python recipes/grpo.py --config recipes/configs/gspo.yaml --betta 1\n", ""),
        ("bash", "python benchmarks/replay.py --nonesuch\n", ""),
        ("bash", "make everything\n", ""),
        ("bash", "pip install 'trl-lossplus[everything]'\n", ""),
        ("bash", "curl example.org\n", ""),
        ("text", "$ trl-lossplus list kl\nk9\n", ""),
        ("text", "nobody printed this\n", "printed"),
        ("json", '{"a": 1}\n{"b"\n', ""),
        ("toml", "a = 1\n", ""),
    ],
)
def test_a_wrong_block_fails(language, text, mark, tmp_path, monkeypatch):
    """Each kind can fail, and says where."""
    message = failing(language, text, tmp_path, monkeypatch, mark)
    assert "made up:3" in message


def test_reading_of_commands():
    text = "# first\ntrl-lossplus list kl \\\n  # no\nmake train   # trains\n"
    assert commands(text) == ["trl-lossplus list kl", "make train"]
    assert masked("step 1/5  loss +1.5e-05, 3 rows.") == masked("step 20/50  loss +2, 10 rows.")
