"""What is asked of every HTML page of ours, and a real browser where there is one."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use", "rect", "image", "line", "circle"}


class Page(HTMLParser):
    """Elements, ids, links, and whether every tag is closed in turn."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.references, self.text = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "srcset", "action"):
                self.references.append(value)
            assert not name.startswith("on"), name
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check_page(text):
    """What holds of every report. Returns the parsed page."""
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith(("#", "data:image/png;base64,")) for reference in page.references)
    assert {reference[1:] for reference in page.references if reference.startswith("#")} <= set(page.ids)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    return page


def chromium(*options):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    done = subprocess.run([CHROMIUM, *flags, *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
