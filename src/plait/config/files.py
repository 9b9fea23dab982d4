"""Files that nobody vouches for, opened only if they are plain and read up to a limit; and files that a command is told to write.

A pipe or a device in place of a file would be waited for, or read, without end; a sparse file claims more bytes than the
disk has. `open_plain` refuses them at once, with an OSError that says what is there instead. What is to be written is seen to be
writable before the work.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from plait.config.errors import PlaitError, Problem

KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a link",
}  # fmt: skip


class NotPlain(OSError):
    """There is something else than a plain file that can be read whole. Its text says what."""


def open_plain(path: Path, follow: bool = True) -> BinaryIO:
    """The opened file. OSError when it is missing or no plain file; a link counts as none unless `follow`."""
    try:
        status = os.stat(path, follow_symlinks=follow)
        _plain(status)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except ValueError as error:  # a name with a zero byte
        raise NotPlain(str(error)) from None
    file = os.fdopen(descriptor, "rb")
    try:
        now = os.fstat(descriptor)
        _plain(now)
        _fits_its_disk(now, descriptor)
    except OSError:
        file.close()
        raise
    return file


def read_plain(path: Path, most: int, follow: bool = True) -> bytes:
    """All of a plain file of at most `most` bytes. OSError otherwise."""
    with open_plain(path, follow) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if size > most or len(content) > most:
        raise NotPlain(f"it has {max(size, len(content))} bytes, and at most {most} are read")
    return content


def loads(text: bytes | str) -> Any:
    """JSON whose objects name each key once. ValueError or RecursionError otherwise."""
    return json.loads(text, object_pairs_hook=_once)


def as_json(value: object) -> str:
    """What a file said, as JSON: it may be anything."""
    try:
        return json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return "a number of thousands of digits"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is given twice")
    return values


def _plain(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotPlain(f"it is {KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a plain file")


def _fits_its_disk(status: os.stat_result, descriptor: int) -> None:
    """A file with holes may claim any size; one larger than the disk that holds it was never written."""
    if status.st_blocks * 512 >= status.st_size:
        return
    try:
        disk = os.fstatvfs(descriptor)
    except OSError:
        return
    whole = disk.f_blocks * disk.f_frsize
    if 0 < whole < status.st_size:
        raise NotPlain(f"it claims {status.st_size} bytes, more than the capacity of its disk ({whole})")


def check_writable(path: Path) -> None:
    """M016 when a file cannot be written there, as far as that can be told without writing."""
    folder = path.parent
    if path.is_dir():
        raise _unwritable(path, "it is a folder", (f"--output {path / 'plan.toml'}",))
    if not folder.is_dir():
        raise _unwritable(path, f"the folder {folder} does not exist", (f"mkdir -p {folder}",))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise _unwritable(path, "this process has no permission to write there", ())


def write(path: Path, text: str) -> None:
    """Write a file. M016 when it cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, f"{type(error).__name__}: {error.strerror or error}", ()) from error


def _unwritable(path: Path, why: str, fix: tuple[str, ...]) -> PlaitError:
    return PlaitError(Problem("M016", f"--output {path} cannot be written", why=why, fix=fix))
