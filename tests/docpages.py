"""The documentation as data: pages, fenced blocks with what is said about them, links and anchors."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block: its page and line, the language, the text, and the comment right above the fence ("" for none)."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    @property
    def not_run(self) -> str:
        """Why it cannot run in a test, as the page says it: `<!-- not run: REASON -->`; "" for a block that is run."""
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else ""

    @property
    def nightly(self) -> str:
        """Why it is run at night alone: `<!-- nightly: REASON -->`."""
        return self.mark.removeprefix("nightly: ") if self.mark.startswith("nightly: ") else ""


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page, of these languages or of all."""
    text = PAGES[page].read_text()
    found = [
        Block(page, text[: item.start("language")].count("\n") + 1, item["language"], item["text"], item["mark"] or "")
        for item in FENCE.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def prose(text: str) -> str:
    """The text without fenced and indented blocks and code spans: where a bracket is a link."""
    text = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^ {4}[^ *\n-].*$", "", text, flags=re.M)
    return re.sub(r"`[^`\n]*`", "`x`", text)


def links(text: str) -> list[str]:
    """Targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """The anchors of a page; those of headings that come again are numbered, as GitHub does, and so have no fixed name here."""
    return {slug(found) for found in re.findall(r"^#{1,6} (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)}
