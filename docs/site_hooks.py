"""Lets MkDocs show docs/ like GitHub: adds pages of the top folder, blank lines around blocks, and file names of code blocks.

mkdocs.yml names this file.
"""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the top folder, by their names in the site."""
FENCE = re.compile(r"```(?:(\w+) (\S+)$)?")
"""The first or last line of a code block; its language and the name of its file, if it has one."""
LIST, TABLE = re.compile(r"(?:[-*]|\d+\.) "), re.compile(r"\|")
"""The start of a line of a list and of a table."""
BOOSTS = {"faq": 8, "how_to/": 4, "techniques/": 2, "decisions/": 0.1, "log": 0.1, "changelog": 0.1, "trackers": 0.3, "long_lists": 0.1, "": 1}
"""The search weight of a page, by the beginning of its name: answers for users rank above records of development."""
EXAMPLE = re.compile(r"(?m)^>>> .*(?:\n.+)*")
"""An example in a docstring, up to the next blank line."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the top folder, whose links are then relative to docs/."""
    for name, page in TOP.items():
        text = Path(config.config_file_path).with_name(name).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, at in TOP.items():
            text = text.replace(f"]({other})", f"]({at})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page with blank lines around code blocks, and before lists and tables. Text inside a list item is indented by four blanks.
    The file name of a code block becomes its title."""
    page.meta["search"] = {"boost": next(boost for start, boost in BOOSTS.items() if page.file.src_uri.startswith(start))}
    lines, is_code, before = list[str](), False, ""
    for line in markdown.splitlines():
        fence = FENCE.match(line)
        begins = any(kind.match(line) and not kind.match(before) and before[:1] != " " for kind in (LIST, TABLE))
        if before and not is_code and (fence or begins or before.startswith("```")):
            lines.append("")
        if fence:
            is_code = not is_code
            line = f'```{fence[1]} title="{fence[2]}"' if fence[1] else line
        if not is_code and re.match(r"  \S", line):
            line = f"  {line}"  # inside an item of a list
        lines.append(line)
        before = line
    return "\n".join(lines)


class Examples(griffe.Extension):
    """Convert the examples of docstrings to code blocks, because Markdown treats >>> as a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring:
            text = re.sub(r" +# doctest: \+\w+", "", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
