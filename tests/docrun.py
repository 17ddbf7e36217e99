"""
Runs the blocks of a page of the documentation, in the page's order, in one empty folder.

python: executed, all blocks of a page in one scope; one that begins with `# name.py` becomes that file.
yaml: built into a configuration; one that begins with `# name.yaml` becomes that file too. Of accelerate's: its class takes it.
bash, shell: `trl-lossplus ...` is run (`|| true` at the end: its exit status must be 1), `python FILE` of the page's own files too;
    of `accelerate launch` and `python recipes/...` files and arguments are read; make's targets and pip's extras exist.
text: `$ trl-lossplus ...` at its head: what is below was printed by it. With `<!-- printed -->` above: printed by the page so far
    (numbers left aside).
json: parses; one line a record. With `<!-- file: NAME -->` above it becomes that file.

A comment above a fence says otherwise: `<!-- not run: REASON -->`, `<!-- nightly: REASON -->`; `<!-- trained -->`: the recipes are run.
A page may name the repository as `../trl-lossplus/`.
"""

import contextlib
import io
import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import yaml
from accelerate.commands.config.config_args import ClusterConfig
from docpages import ROOT, Block, blocks

sys.path.insert(0, str(ROOT))

from recipes import arguments, grpo, ppo, runner
from trl_lossplus.cli import choose_trainer, main

RECIPES = {"grpo": grpo.RECIPE, "ppo": ppo.RECIPE}
REPOSITORY = ("recipes", "accelerate_configs", "benchmarks", "docs", "tests")
LANGUAGES = {"python", "yaml", "bash", "shell", "text", "json"}


def masked(line: str) -> str:
    """A line without its numbers and their signs, for comparison."""
    return re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", line).strip()


def commands(text: str) -> list[str]:
    """The commands of a shell block: continued lines joined, comments left out."""
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line]


class PageRun:
    """One page's run: `scope` of its Python, `printed` so far, `ran` blocks."""

    trains = False

    def __init__(self, page: str, folder: Path, monkeypatch):
        self.page, self.folder, self.scope, self.printed, self.ran = page, folder, {"__name__": "__page__"}, "", 0
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        for name in REPOSITORY:
            (folder / name).symlink_to(ROOT / name)

    def run(self, nightly: bool = False) -> "PageRun":
        """Every block but those that cannot run, and those for the night unless asked for. A failure names page and line."""
        before = set(sys.modules)
        try:
            for block in blocks(self.page):
                if not block.not_run and (nightly or not block.nightly):
                    self.one(block)
                    self.ran += 1
        finally:
            for name in set(sys.modules) - before:
                if str(self.folder) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]
        return self

    def one(self, block: Block) -> None:
        """One block."""
        out = io.StringIO()
        try:
            assert block.language in LANGUAGES, f"a block of {block.language} is not tested"
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                getattr(self, "bash" if block.language == "shell" else block.language)(block)
        except BaseException as error:
            error.add_note(f"in the block at {block.page}:{block.line}\n{out.getvalue()[-2000:]}")
            raise
        self.printed += out.getvalue()

    def file(self, block: Block) -> Path | None:
        """The file that the block's first line names, written."""
        name = re.match(r"# ([\w/]+\.(?:py|ya?ml))\n", block.text)
        if name is None:
            return None
        path = self.folder / name[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        return path

    def python(self, block: Block) -> None:
        code = compile(block.text, f"{block.page}:{block.line}", "exec")
        if self.file(block) is None:
            exec(code, self.scope)

    def yaml(self, block: Block) -> None:
        values, path = yaml.safe_load(block.text), self.file(block)
        if "distributed_type" in values:
            assert set(values) <= {*ClusterConfig.__dataclass_fields__, "compute_environment"}
            return
        if path is None:
            path = self.folder / "block.yaml"
            path.write_text(block.text)
        recipe = RECIPES[choose_trainer(None, values, (), print)]
        _, training, _ = arguments.parse(recipe, ["--config", str(path), "--output_dir", str(self.folder / "out")])
        assert training.loss_spec()

    def json(self, block: Block) -> None:
        for line in block.text.splitlines():
            json.loads(line)
        if block.mark.startswith("file: "):
            (self.folder / block.mark.removeprefix("file: ")).write_text(block.text)

    def text(self, block: Block) -> None:
        first, _, below = block.text.partition("\n")
        if first.startswith("$ trl-lossplus "):
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                assert main(shlex.split(first)[2:]) == 0
            for line in below.splitlines():
                assert line == "..." or line in shown.getvalue(), line
        if block.mark == "printed":
            printed = {masked(line) for line in self.printed.splitlines()}
            for line in block.text.splitlines():
                assert line == "..." or masked(line) in printed, line

    def bash(self, block: Block) -> None:
        for command in commands(block.text):
            wanted = 1 if command.endswith("|| true") else 0
            words = shlex.split(command.removesuffix("|| true").replace("../trl-lossplus/", ""))
            self.trains = block.mark == "trained"
            while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            kind = {"trl-lossplus": self.lossplus, "accelerate": self.accelerate, "python": self.script, "pip": self.pip}
            kind |= {"make": self.make, "mkdir": self.shell, "cd": self.shell, "git": self.shell}
            assert words[0] in kind, f"{command!r}: no way to test it; put <!-- not run: REASON --> above the block"
            kind[words[0]](words, wanted)

    def lossplus(self, words: list[str], wanted: int) -> None:
        assert main(words[1:]) == wanted, words

    def accelerate(self, words: list[str], wanted: int) -> None:
        assert words[1:3] == ["launch", "--config_file"], words
        ClusterConfig.from_yaml_file(words[3])
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        self.script(["python", *words[at:]], wanted)

    def script(self, words: list[str], wanted: int) -> None:
        """A recipe's arguments are read; another file of the repository is there and knows the flags; a file of the page is run."""
        if words[1:3] == ["-m", "pytest"]:
            return
        path = Path(words[1])
        name = path.stem if path.parent.name == "recipes" else ""
        if name in RECIPES and self.trains:
            assert runner.main(RECIPES[name], words[2:]) == wanted, words
        elif name in RECIPES:
            assert arguments.parse(RECIPES[name], words[2:])
        elif path.parts[0] in REPOSITORY:
            source = path.read_text()
            assert all(word.split("=")[0] in source for word in words[2:] if word.startswith("--")), words
        else:
            before, sys.argv = sys.argv, words[1:]
            try:
                self.scope |= runpy.run_path(str(path), run_name="__main__")
            finally:
                sys.argv = before

    def pip(self, words: list[str], wanted: int) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for found in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert set(found.split(",")) <= set(extras), words

    def make(self, words: list[str], wanted: int) -> None:
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{word}:", makefile, re.M) for word in words[1:] if "=" not in word), words

    def shell(self, words: list[str], wanted: int) -> None:
        """What sets the scene."""
