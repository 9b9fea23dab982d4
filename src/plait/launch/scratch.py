"""Temporary folders of a process: in-memory snapshots, traces of a proof.

A killed process leaves its folder behind. So each folder has a file lock, which the system releases when the process ends. Before a folder
is created, the user's folders whose locks are free are removed. Process IDs are not enough, since two containers may share the file system
and have separate IDs.
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

LOCK_FILE = "lock"
NEW_FOLDER_S = 60.0
"""Seconds for which a folder without a lock may still be under construction."""


class ScratchFolder:
    """A new folder in `base` (default: the system's temporary folder) with access for this user only.

    Raises H006 or OSError if it cannot be created.
    """

    def __init__(self, name: str, base: Path | None = None):
        base = base or Path(tempfile.gettempdir())
        _remove_abandoned(base)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_folder_prefix()}{name}-{os.getpid()}-", dir=base))
        try:
            self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            if (problem := limits.explain_os_limit(error)) is not None:
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


def _folder_prefix() -> str:
    return f"plait-{os.getuid()}-"


def _remove_abandoned(base: Path) -> None:
    """Remove folders of this user whose processes have ended."""
    for folder in base.glob(f"{_folder_prefix()}[a-z]*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not _is_abandoned(folder):
                continue
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether no process holds the lock of a folder."""
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > NEW_FOLDER_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
