"""What MkDocs needs to show docs/ as GitHub does: pages of the top folder, blank lines around blocks, file names of code blocks.

mkdocs.yml names this file.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the top folder, by their names in the site."""
FENCE = re.compile(r"```(?:(\w+) (\S+)$)?")
"""The first or last line of a code block; its language and the name of its file, if it has one."""
LIST, TABLE = re.compile(r"(?:[-*]|\d+\.) "), re.compile(r"\|")
"""How a line of a list and of a table begins."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the top folder, whose links are then relative to docs/."""
    for name, page in TOP.items():
        text = Path(config.config_file_path).with_name(name).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, at in TOP.items():
            text = text.replace(f"]({other})", f"]({at})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with a blank line around code blocks, and before lists and tables; a file name of a code block becomes its title."""
    lines, is_code, before = list[str](), False, ""
    for line in markdown.splitlines():
        fence = FENCE.match(line)
        begins = any(kind.match(line) and not kind.match(before) and before[:1] != " " for kind in (LIST, TABLE))
        if before and not is_code and (fence or begins or before.startswith("```")):
            lines.append("")
        if fence:
            is_code = not is_code
            line = f'```{fence[1]} title="{fence[2]}"' if fence[1] else line
        lines.append(line)
        before = line
    return "\n".join(lines)
