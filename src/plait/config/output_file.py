"""Files that a command is told to write: seen to be writable before the work, and never half written."""

import os
from pathlib import Path

from plait.config.errors import PlaitError, Problem


def check_writable(path: Path) -> None:
    """M016 when a file cannot be written there, as far as that can be told without writing."""
    folder = path.parent
    if path.is_dir():
        raise _unwritable(path, "it is a folder", (str(path / "plan.toml"),))
    if not folder.is_dir():
        raise _unwritable(path, f"there is no folder {folder}", (f"mkdir -p {folder}",))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise _unwritable(path, "it is not allowed", ())


def write(path: Path, text: str) -> None:
    """Write a file. M016 when it cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, f"{type(error).__name__}: {error.strerror or error}", ()) from error


def _unwritable(path: Path, why: str, fix: tuple[str, ...]) -> PlaitError:
    return PlaitError(Problem("M016", f"--out {path} cannot be written", why=why, fix=fix))
