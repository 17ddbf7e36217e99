"""What mkdocs calls: the pages that are made from other files, and a look at what was built. See mkdocs.yml."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
log = logging.getLogger("mkdocs.hooks.site")


def front_page(readme: str) -> str:
    """The README as the site's first page: links into docs/ become links between pages; what the site does not hold is text."""
    held = re.sub(r"\[([^\]]*)\]\((?!https?:|#|docs/|examples/)[^)]*\)", r"\1", readme)
    return re.sub(r"\[(?:docs/)?([^\]]*)\]\(docs/", r"[\1](", held)


def reference() -> dict[str, str]:
    """{file: text} of the reference."""
    spec = importlib.util.spec_from_file_location("make_reference", HERE / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {f"reference/{name}.md": make() for name, make in module.PAGES.items()}


def made_pages() -> dict[str, str]:
    """{file: text} of all pages that are made when the site is built."""
    return {"index.md": front_page((HERE.parent / "README.md").read_text()), **reference()}


def loaded_from_elsewhere(html: str) -> list[str]:
    """What a page would load from another host: scripts, styles, pictures, fonts. (Links to follow are not loaded.)"""
    tags = re.findall(r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']((?:https?:)?//[^\"']+)", html)
    styles = [tag for tag in re.findall(r"<link\b[^>]*>", html) if re.search(r"rel=[\"'](?:stylesheet|preconnect|preload)", tag)]
    return tags + [found for tag in styles for found in re.findall(r"href=[\"']((?:https?:)?//[^\"']+)", tag)]


def breakable(html: str) -> str:
    """
    Tables that a narrow screen can hold: long names in cells may be broken after a dot, slash or underscore (those of 17 to 24
    letters where the screen is narrow alone: site.css), and a cell with a sentence has the class that keeps it from being squeezed.
    """

    def broken(word: re.Match[str]) -> str:
        return re.sub(r"([._/])(?=[^._/])", r"\1<wbr>" if len(word[0]) > 24 else r'\1<wbr class="narrow">', word[0])

    def cell(found: re.Match[str]) -> str:
        parts = re.split(r"(<[^>]*>)", found[3])
        shown = "".join(part if part.startswith("<") else re.sub(r"[\w./]{17,}", broken, part) for part in parts)
        sentence = ' class="sentence"' if len(" ".join(parts[::2])) > 24 else ""
        return f"<{found[1]}{sentence}{found[2]}>{shown}</{found[1]}>"

    return re.sub(r"<(t[dh])\b([^>]*)>(.*?)</t[dh]>", cell, html, flags=re.S)


def unbroken(html: str) -> str:
    """Flags and numbers with an exponent stay on one line: a browser would break them after a hyphen. Blocks of code are left alone."""
    whole = re.compile(r"(?<![\w-])(--\w+|[\d.]+e-\d+)")
    parts = re.split(r"(<pre\b.*?</pre>|<[^>]*>)", html, flags=re.S)
    return "".join(part if part.startswith("<") else whole.sub(r'<span class="whole">\1</span>', part) for part in parts)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """The page's HTML with names that may be broken, and with what may not."""
    return breakable(unbroken(html))


def on_files(files: Any, config: Any) -> Any:
    """Adds the made pages, and the notebooks as they are."""
    from mkdocs.structure.files import File

    notebooks = {f"examples/{path.name}": path.read_text() for path in (HERE.parent / "examples").glob("*.ipynb")}
    for name, text in {**made_pages(), **notebooks}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_post_build(config: Any) -> None:
    """A warning (an error under --strict) for each page that loads something from elsewhere."""
    for page in sorted(Path(config["site_dir"]).rglob("*.html")):
        for found in loaded_from_elsewhere(page.read_text()):
            log.warning("%s loads %s", page.name, found)
