"""The house rules of the package, read from its sources: who imports whom, and how long a file or function may be."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "trl_lossplus"
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}
SEAM = {"trainers/trl_seam.py", "trainers/trl_passes.py", "trainers/trl_head.py"}
# Ranks: a module imports from lower ranks (or its own package) alone. functional < registry, batch, spec < loss < the rest.
RANKS = {
    "functional": 0,
    "registry": 1,
    "objectives": 2,
    "objectives_more": 2,
    "objectives_stale": 2,
    "estimators": 2,
    "batch": 2,
    "spec": 2,
    "over_step": 2,
}
RANKS |= {"kl_control": 2, "loss": 3}


def imports(name: str, runtime_only: bool = False) -> set[str]:
    """Absolute names of everything that a file imports, at any depth; `runtime_only` leaves out `if TYPE_CHECKING:`."""
    package = ["trl_lossplus", *Path(name).parts[:-1]]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if runtime_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(TREES[name])
    return found


def test_the_rules_see_imports():
    """The reader of imports finds relative, nested and type-only ones."""
    source = "import os.path\nfrom ..loss import f\nfrom . import kl\n"
    source += "def g():\n    from trl.trainer import x\nif TYPE_CHECKING:\n    import a"
    TREES["functional/made_up.py"] = ast.parse(source)
    try:
        seen = {"os.path", "trl_lossplus.loss.f", "trl_lossplus.functional.kl", "trl.trainer.x"}
        assert imports("functional/made_up.py") == seen | {"a"}
        assert imports("functional/made_up.py", runtime_only=True) == seen
    finally:
        del TREES["functional/made_up.py"]


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("functional/")])
def test_functional_imports_torch_and_its_neighbours(name):
    """Pure tensor mathematics: the standard library, torch, and functional/ itself."""
    for module in imports(name):
        top = module.split(".")[0]
        assert top in sys.stdlib_module_names | {"torch", "__future__"} or module.startswith("trl_lossplus.functional."), module


@pytest.mark.parametrize("name", [name for name in TREES if Path(name).parts[0].removesuffix(".py") in RANKS])
def test_lower_layers_do_not_know_higher_ones(name):
    """functional <- registry <- objectives, estimators, batch, spec <- loss; none of them a trainer, a config or TRL."""
    rank = RANKS[Path(name).parts[0].removesuffix(".py")]
    for module in imports(name, runtime_only=True):
        top, *rest = module.split(".")
        assert top not in {"trl", "transformers", "accelerate", "datasets", "peft"}, module
        if top == "trl_lossplus":
            lazy = name == "registry.py" and rest[0] in {
                "objectives",
                "objectives_more",
                "objectives_stale",
                "estimators",
            }  # importing them registers ours
            assert lazy or RANKS.get(rest[0], 99) <= rank, module


@pytest.mark.parametrize("name", [name for name in TREES if name not in SEAM])
def test_only_the_seam_names_trl_trainer(name):
    """No other file imports, or spells as a dotted name or text, TRL's private `trl.trainer`."""
    assert not [module for module in imports(name) if f"{module}.".startswith("trl.trainer.")]
    for node in ast.walk(TREES[name]):
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node).startswith("trl.trainer"))
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("trl.trainer"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_are_short(path):
    """At most 400 lines a file, 60 a function (with its decorators and its docstring)."""
    assert len(path.read_text().splitlines()) <= 400
    for node in ast.walk(TREES[path.relative_to(ROOT).as_posix()]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            assert node.end_lineno - first + 1 <= 60, f"{node.name}: {node.end_lineno - first + 1} lines"
