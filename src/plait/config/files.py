"""Reads untrusted files up to a size limit, and checks and writes output files.

A read from a pipe or a device could wait or continue forever, and a sparse file may claim more bytes than the disk has. `open_plain_file`
rejects these at once, with an OSError that names the kind of file. Output paths are checked before the work starts.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from plait.config.errors import PlaitError, Problem

FILE_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a link",
}  # fmt: skip


class NotPlainFile(OSError):
    """The path is not a regular file that can be read completely. The text names the reason."""


def open_plain_file(path: Path, follow: bool = True) -> BinaryIO:
    """Open a regular file. Raises OSError if it is missing or not regular; links are followed only with `follow`."""
    try:
        status = os.stat(path, follow_symlinks=follow)
        _check_plain(status)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except ValueError as error:  # a name with a zero byte
        raise NotPlainFile(str(error)) from None
    file = os.fdopen(descriptor, "rb")
    try:
        now = os.fstat(descriptor)
        _check_plain(now)
        _check_claimed_size(now, descriptor)
    except OSError:
        file.close()
        raise
    return file


def read_plain_file(path: Path, max_bytes: int, follow: bool = True) -> bytes:
    """Read a regular file of at most `max_bytes` bytes. Raises OSError otherwise."""
    with open_plain_file(path, follow) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if size > max_bytes or len(content) > max_bytes:
        raise NotPlainFile(f"it has {max(size, len(content))} bytes, and at most {max_bytes} are read")
    return content


def parse_strict_json(text: bytes | str) -> Any:
    """Parse JSON, and reject duplicate keys. Raises ValueError or RecursionError."""
    return json.loads(text, object_pairs_hook=_reject_duplicates)


def to_json_text(value: object) -> str:
    """Format an arbitrary value of a file as JSON."""
    try:
        return json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return "a number of thousands of digits"


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is given twice")
    return values


def _check_plain(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotPlainFile(f"it is {FILE_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a plain file")


def _check_claimed_size(status: os.stat_result, descriptor: int) -> None:
    """Reject a file larger than its disk. A sparse file can claim any size without having been written."""
    if status.st_blocks * 512 >= status.st_size:
        return
    try:
        disk = os.fstatvfs(descriptor)
    except OSError:
        return
    whole = disk.f_blocks * disk.f_frsize
    if 0 < whole < status.st_size:
        raise NotPlainFile(f"it claims {status.st_size} bytes, more than the capacity of its disk ({whole})")


def check_writable(path: Path) -> None:
    """Raise M016 if the file cannot be written, as far as this can be checked without writing."""
    folder = path.parent
    if path.is_dir():
        raise _unwritable_error(path, "it is a folder", (f"--output {path / 'plan.toml'}",))
    if not folder.is_dir():
        raise _unwritable_error(path, f"the folder {folder} does not exist", (f"mkdir -p {folder}",))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise _unwritable_error(path, "this process has no permission to write there", ())


def write_output(path: Path, text: str) -> None:
    """Write a file. Raises M016 if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable_error(path, f"{type(error).__name__}: {error.strerror or error}", ()) from error


def _unwritable_error(path: Path, why: str, fix: tuple[str, ...]) -> PlaitError:
    return PlaitError(Problem("M016", f"--output {path} cannot be written", why=why, fix=fix))
