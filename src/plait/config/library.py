"""Separates library code from the user's code, and makes imports of libraries quiet and fast."""

import atexit
import functools
import gc
import logging
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PLAIT_FOLDER = str(Path(__file__).parents[1]) + os.sep
STDLIB_FOLDERS = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_SITES = (*(sysconfig.get_path(name) for name in ("purelib", "platlib")), *site.getsitepackages(), site.getusersitepackages())
_LIBRARIES = (PLAIT_FOLDER, *STDLIB_FOLDERS, *(f"{folder}{os.sep}" for folder in _SITES))
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def is_library(file: str) -> bool:
    """Return True if a file belongs to plait, Python or an installed distribution in any folder (PYTHONPATH, `.pth` files, module systems).

    The target of an editable install is the user's code.
    """
    if file.startswith(_LIBRARIES):
        return True
    folders = (entry.rstrip(os.sep) for entry in sys.path if isinstance(entry, str) and entry.rstrip(os.sep))
    return any(_is_installed(folder, file[len(folder) + 1 :]) for folder in folders if file.startswith(folder + os.sep))


def is_user_module(name: str) -> bool:
    """Return True if an imported module has a file in the user's code."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return bool(file) and not is_library(file)


def _is_installed(folder: str, file: str) -> bool:
    return os.path.basename(folder) in _PACKAGE_FOLDERS or file.partition(os.sep)[0] in _list_distributed(folder)


def silence_imports() -> None:
    """Hide warnings that libraries log during imports. Errors stay visible, and so do all messages if the job configures logging."""
    import torch  # torch logs through its own handler

    for handler in (logging.lastResort, *logging.getLogger(torch.__name__).handlers):
        if handler is not None:
            handler.addFilter(_is_shown)  # has no effect the second time


def _is_shown(record: logging.LogRecord) -> bool:
    """Return False for a warning during an import, unless a line of the user's code is in between."""
    for frame, _ in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return record.levelno > logging.WARNING
        if not file.startswith("<") and not is_library(file):
            break
    return True


@functools.cache
def _list_distributed(folder: str) -> frozenset[str]:
    """Return the files and folders that installed distributions have created directly in a folder."""
    from importlib.metadata import distributions

    if not os.path.isdir(folder) or not any(name.endswith(".dist-info") for name in os.listdir(folder)):
        return frozenset()
    return frozenset(file.parts[0] for found in distributions(path=[folder]) for file in found.files or ())


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector during imports and similar code, and exclude the created objects from later collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # free the objects of libraries at exit: nanobind reports the rest as leaked
        if enabled:
            gc.enable()
