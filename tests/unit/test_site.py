"""The site of docs/: every page is in the navigation, every technique has a picture, no link is broken, and nothing is loaded from outside."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import plait

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
DRAWN = sorted([DOCS / "overview.svg", *(DOCS / "techniques").glob("*.svg")])
FROM_TOP = {"index.md", "contributing.md", "changelog.md"}
"""Pages that docs/site_hooks.py takes from the top folder."""
SMALLEST = 8.5
"""The smallest font size in a drawing of width 480."""
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data", "link": "href"}
"""Elements that load something when a page is opened, and the attribute that names it."""


def pages(nav: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from pages(part)


def test_the_navigation_names_every_page_once() -> None:
    named = Counter(pages(CONFIG["nav"]))
    assert [page for page, count in named.items() if count > 1] == []
    assert set(named) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | FROM_TOP


def test_every_technique_has_its_picture() -> None:
    for page in (DOCS / "techniques").glob("*.md"):
        shown = re.findall(r"!\[[^\]]+\]\((\S+)\)", page.read_text(encoding="utf-8"))
        assert shown == ["axes.svg" if page.stem == "README" else f"{page.stem}.svg"]
        assert (page.parent / shown[0]).is_file()


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_drawing_is_legible(path: Path) -> None:
    """In light and dark mode, on a phone, and for a screen reader. It stays inside its frame and loads nothing."""
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    title = root.find(f"{space}title")
    assert title is not None and title.text and root.get("aria-labelledby") == title.get("id") and root.get("role") == "img"
    assert root.get("fill") == "currentColor" and "prefers-color-scheme:dark" in text
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    left, top, width, height = map(float, str(root.get("viewBox")).split())
    assert width <= 490
    for box in root.iter(f"{space}rect"):
        x, y, wide, high = (float(box.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert left <= x and x + wide <= left + width and top <= y and y + high <= top + height, ElementTree.tostring(box)
    for each in root.iter(f"{space}text"):
        size, x = float(each.get("font-size", 0)), float(each.get("x", 0))
        long = size * 0.54 * len(each.text or "")
        begin = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[str(each.get("text-anchor"))] * long
        assert size >= SMALLEST and begin >= left - 2 and begin + long <= left + width + 2, each.text


def test_the_reference_has_every_public_name_once() -> None:
    named = re.findall(r"(?m)^::: plait\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(plait.__all__)


def built(config: Path, into: Path) -> "subprocess.CompletedProcess[str]":
    """A strict build, as in `make docs`. It is not --quiet, which would count no warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(into)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from the present files. A link or an anchor without a target fails the build."""
    into = tmp_path_factory.mktemp("site")
    done = built(ROOT / "mkdocs.yml", into)
    assert done.returncode == 0, done.stdout + done.stderr
    return into


@pytest.mark.slow
@pytest.mark.parametrize("link", ["nowhere.md", "index.md#nowhere", "/index.md"])
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    """With the settings of mkdocs.yml, without its pages."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n[a link]({link})\n", encoding="utf-8")
    config = {key: CONFIG[key] for key in ("site_name", "validation", "use_directory_urls")} | {"docs_dir": "docs", "plugins": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    done = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode and link in done.stderr


class Loads(HTMLParser):
    """Resources that a page loads when it is opened."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found = list[str]()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADS and given.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(given.get(LOADS[tag]) or "")


@pytest.mark.slow
def test_the_site_loads_nothing_from_outside(site: Path) -> None:
    files = sorted(site.rglob("*.html"))
    assert len(files) >= len(set(pages(CONFIG["nav"])))
    for page in files:
        loaded = Loads(page).found
        assert any(each.endswith(".css") for each in loaded)
        assert [each for each in loaded if re.match(r"(\w+:)?//", each)] == [], page.name
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8"), "the theme would load a script for this from outside"
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\s]*", style.read_text(encoding="utf-8")) == []


@pytest.mark.slow
def test_the_site_shows_pages_as_they_are_written(site: Path) -> None:
    """Tables, lists and code blocks must not become lines of text: MkDocs needs blank lines that GitHub does not."""
    for page in DOCS.rglob("*.md"):
        out = site / page.relative_to(DOCS).with_suffix(".html")
        text = (out.with_name("index.html") if page.stem == "README" else out).read_text(encoding="utf-8")
        article = re.sub(r"(?s)<pre.*?</pre>|<code.*?</code>", "", text.partition("<article")[2].partition("</article>")[0])
        words = re.sub(r"<[^>]*>", "", article)
        marks = re.findall(r"(?m)^(?:```|\|.*\|$|[-*] \w).*", words)
        assert not marks, f"{page.name}: MkDocs takes these lines for text; put a blank line before them: {marks}"
