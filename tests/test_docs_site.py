"""The site's pages without mkdocs: every link has its page and its anchor, the navigation is whole, nothing is loaded from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import yaml
from docpages import DOCS, PAGES, ROOT, anchors, links, slug


@pytest.fixture(scope="module")
def site():
    """docs/site_hooks.py as a module."""
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(site):
    """{file: text} of the pages that are made when the site is built."""
    return site.made_pages()


def navigation() -> list[str]:
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())

    def files(item):
        children = item.values() if isinstance(item, dict) else item
        return [item] if isinstance(item, str) else [name for child in children for name in files(child)]

    return files(yaml.safe_load(text)["nav"])


def broken(text, folder, here, generated=()):
    """Links of a page that lead nowhere: the file is not there, or has no such heading."""
    wrong = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        if re.match(r"(https?:|mailto:)", target):
            continue
        name = path.rsplit("/", 1)[-1]
        if path.startswith("examples/") and (ROOT / path).exists():
            continue
        if path in generated:
            other = generated[path]
        elif path and not (folder / path).exists():
            wrong.append(target)
            continue
        else:
            other = here if not path else (folder / path).read_text() if name.endswith(".md") else ""
        if anchor and anchor not in anchors(other):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors(page):
    path = PAGES[page]
    text = path.read_text()
    assert broken(text, path.parent, text) == []


def test_links_of_made_pages(made):
    for name, text in made.items():
        folder = (DOCS / name).parent
        beside = {other.rsplit("/", 1)[-1]: page for other, page in made.items() if (DOCS / other).parent == folder}
        assert broken(text, folder, text, beside) == [], name


def test_a_broken_link_is_seen(tmp_path):
    (tmp_path / "other.md").write_text("# One heading\n```text\n# none\n```\n")
    text = "# Here, `now`\n[a](other.md#one-heading) [b](#here-now) `[x](none.md)` ![c](none.svg) [d](other.md#none) [e](#there)"
    assert broken(text, tmp_path, text) == ["none.svg", "other.md#none", "#there"]
    assert slug("What `make test` says: (all) [of it](x.md)") == "what-make-test-says-all-of-it"


def test_navigation_is_whole(made):
    """Each page of docs/ and each made one is in mkdocs.yml, once; add a new page under `nav` there."""
    there = navigation()
    assert len(there) == len(set(there))
    assert set(there) == {path.name for path in PAGES.values() if path.parent == DOCS} | set(made)


def test_front_page_is_the_readme(site, made):
    """Links into docs/ are those of the site's pages; what the site does not hold is text alone; nothing else changes."""
    text = "a [b](docs/c.md#d) [docs/l.md](docs/l.md) [e](recipes/grpo.py), [f](https://g.org) [h](examples/i.ipynb) [j](#k)"
    assert site.front_page(text) == "a [b](c.md#d) [l.md](l.md) e, [f](https://g.org) [h](examples/i.ipynb) [j](#k)"
    assert len(links(made["index.md"])) > 10
    assert made["index.md"].splitlines()[0] == (ROOT / "README.md").read_text().splitlines()[0]


def test_reference_names_what_there_is(made):
    """Every public name, every function of functional/, every field of ours and every command has its heading."""
    import trl_lossplus
    from trl_lossplus.cli import COMMANDS

    assert {name.lower() for name in trl_lossplus.__all__} <= anchors(made["reference/python.md"])
    assert {"masked_mean", "aggregate", "estimate_kl", "value_loss"} <= anchors(made["reference/functional.md"])
    assert {"policy_loss", "kl_placement", "critic", "vf_coef"} <= anchors(made["reference/fields.md"])
    assert "learning_rate" not in anchors(made["reference/fields.md"])
    assert set(COMMANDS) == anchors(made["reference/commands.md"]) - {"commands"}
    assert made["reference/commands.md"].count("usage: ") >= len(COMMANDS)


def test_long_names_may_be_broken_in_tables_alone(site):
    long, short = "algorithm.rollout_correction.rollout_is", "kl_placement"
    html = f"<td><code>{long}</code>, <code>{short}</code></td><p><code>{long}</code></p>"
    broken = "algorithm.<wbr>rollout_<wbr>correction.<wbr>rollout_<wbr>is"
    assert site.breakable(html) == html.replace(long, broken, 1).replace("<td>", '<td class="sentence">')
    assert (
        site.breakable("<th>a</th><td>advantage_estimator</td>") == '<th>a</th><td>advantage_<wbr class="narrow">estimator</td>'
    )


def test_cells_with_a_sentence_are_told_from_short_ones(site):
    """A sentence: more than 24 letters as read, the tags aside; no style of a cell is lost, no link is broken."""
    html = '<td style="text-align: right;">1.7</td><td><a href="a_very_long_file_name.html#there">one</a> and three columns more</td>'
    assert site.breakable(html) == html.replace("<td><a", '<td class="sentence"><a')


def test_flags_and_numbers_are_not_broken(site):
    """Blocks of code, other hyphens, and what stands inside of tags stay as they are."""
    html = '<p id="a-1e-07">to 1e-07, <code>run --beta 3e-4 x-y</code></p><pre><code>run --beta <b>3e-4</b></code></pre><a href="x--y">a-b</a>'
    inline, block = html.split("<pre>")
    for text in ("--beta", " 1e-07", "3e-4"):
        bare = text.strip()
        inline = inline.replace(text, text.replace(bare, f'<span class="whole">{bare}</span>'))
    assert site.unbroken(html) == f"{inline}<pre>{block}"


def test_the_style_names_what_the_pages_hold(site):
    """Classes that the hook and mkdocs.yml give have a rule: of sentences in tables, of breaks on a phone alone, of formulas that wrap."""
    style = (DOCS / "assets" / "site.css").read_text()
    assert "default_lang: output" in (ROOT / "mkdocs.yml").read_text()
    for rule in (
        r"\.whole \{ white-space: nowrap",
        r"\.sentence \{ min-width",
        r"wbr\.narrow \{ display: none",
        r"\.language-output code \{ white-space: pre-wrap",
    ):
        assert re.search(rule, style), rule
    on_a_phone = style.split("max-width: 44", 1)[1]
    assert all(
        rule in on_a_phone for rule in (":is(.headerlink, .md-code__nav) { display: none", "p:has(> img) { overflow-x: auto")
    )


def test_reference_shows_a_call_as_it_is_written(made):
    """Types without quotes, text defaults with them; each parameter has an item of its own; nothing is escaped that Markdown shows."""
    functions, fields = made["reference/functional.md"], made["reference/fields.md"]
    assert "    scale_rewards: str = 'group',\n    eps: float = 1e-06,\n" in functions
    assert "Advantages(advantages: Tensor, returns: Tensor)" in functions
    assert "* `rewards`: (B,).\n* `group_ids`: (B,) integers.\n" in functions
    assert "tokens with A &lt; 0 and a ratio" in fields
    assert not re.search(r"ForwardRef|<factory>|\\<", "".join(made.values()))
    assert max(map(len, made["reference/commands.md"].splitlines())) <= 96


def test_what_a_page_loads(site):
    html = (
        '<a href="https://a.org"></a><script src="https://b.org/x.js"></script><link rel="stylesheet" href="//c.org/x.css">'
        '<img alt="" src="https://d.org/x.png"><img src="img/x.svg"><link rel="canonical" href="https://e.org">'
    )
    assert site.loaded_from_elsewhere(html) == ["https://b.org/x.js", "https://d.org/x.png", "//c.org/x.css"]


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_are_named_exist(page):
    """`tests/file.py` and `tests/file.py::test` of a page are there."""
    for path, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", PAGES[page].read_text()):
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


@pytest.mark.nightly
def test_mkdocs_builds_it_without_a_warning(tmp_path):
    """As `make docs` does, where its packages are installed."""
    pytest.importorskip("material")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert (run.returncode, run.stdout + run.stderr) == (0, "")
    assert (tmp_path / "reference" / "python.html").is_file()
    assert len(list(tmp_path.glob("examples/*.ipynb"))) == 3
