"""examples/*.ipynb: kept without outputs; they parse, compile and name what there is; at night they run."""

import ast
import importlib
import json
import sys

import pytest
from docpages import ROOT, links

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
WRITTEN = {"my_losses", "my_mistake"}  # modules that a notebook writes itself


def cells(path, kind):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_the_three_are_there():
    assert [path.stem for path in NOTEBOOKS] == ["compare_losses", "why_did_it_collapse", "your_own_loss"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_without_outputs(path):
    """Format 4.5, ids unlike each other, no output and no count, no host's path; code cells compile, and what they import exists."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    for text in cells(path, "code"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, item.name) for item in node.names), ast.unparse(node)
            if isinstance(node, ast.Import):
                for item in node.names:
                    assert item.name in WRITTEN or importlib.import_module(item.name)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pages_that_are_named_exist(path):
    for text in cells(path, "markdown"):
        assert links(text) == []
        named = [word.strip("`.,:;()") for word in text.split() if word.strip("`.,:;()").endswith((".md", ".ipynb"))]
        assert all((ROOT / name).exists() or (path.parent / name).exists() for name in named), named


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    """All code cells in order in one scope, in an empty folder. They hold assertions of their own."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    scope = {"__name__": "__notebook__"}
    try:
        for number, text in enumerate(cells(path, "code")):
            exec(compile(text, f"{path.name}, code cell {number}", "exec"), scope)
    finally:
        import logging

        logging.disable(logging.NOTSET)
        for name in WRITTEN:
            sys.modules.pop(name, None)
