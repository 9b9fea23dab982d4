"""Folders for what is not to outlive its process: snapshots in memory, the sides of a proof.

A process that is killed leaves its folder behind. So each folder has a lock, which the system takes from a process that ends, whatever
ends it; and who makes a folder first removes those of the same user whose locks nobody holds. Process numbers would not do: two
containers may share the file system, and not the numbers.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from plait.config.errors import FAILED, PlaitError
from plait.launch import limits

LOCK = "lock"
NEW = 60.0
"""Seconds for which a folder without a lock may be one that is being made."""


class Scratch:
    """A new folder in `base` (the system's folder for temporary files), open to this user alone. H006, OSError when it cannot be made."""

    def __init__(self, name: str, base: Path | None = None):
        base = base or Path(tempfile.gettempdir())
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{name}-{os.getpid()}-", dir=base))
        try:
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            if (problem := limits.refused(error)) is not None:
                raise PlaitError(problem, FAILED) from error
            raise

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _prefix() -> str:
    return f"plait-{os.getuid()}-"


def _sweep(base: Path) -> None:
    """Remove what processes of this user have left that have ended."""
    for folder in base.glob(f"{_prefix()}[a-z]*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not _left(folder):
                continue
            shutil.rmtree(folder, ignore_errors=True)


def _left(folder: Path) -> bool:
    """Whether nobody holds a folder."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > NEW
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
