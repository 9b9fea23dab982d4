"""Which code is of a library and which the user's own; how imports of libraries stay quiet and cheap."""

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

PLAIT = str(Path(__file__).parents[1]) + os.sep
STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_SITES = (*(sysconfig.get_path(name) for name in ("purelib", "platlib")), *site.getsitepackages(), site.getusersitepackages())
_LIBRARIES = (PLAIT, *STANDARD, *(f"{folder}{os.sep}" for folder in _SITES))
_NAMED_FOR_IT = ("site-packages", "dist-packages")


def is_library(file: str) -> bool:
    """Whether a file is plait's, Python's or of an installed distribution, wherever that lies: other folders come by PYTHONPATH, `.pth`
    files and module systems. What an editable install points to is the user's own."""
    if file.startswith(_LIBRARIES):
        return True
    folders = (entry.rstrip(os.sep) for entry in sys.path if isinstance(entry, str) and entry.rstrip(os.sep))
    return any(_is_installed(folder, file[len(folder) + 1 :]) for folder in folders if file.startswith(folder + os.sep))


def is_user_module(name: str) -> bool:
    """Whether an imported module has a file, and that is the user's own code."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return bool(file) and not is_library(file)


def _is_installed(folder: str, file: str) -> bool:
    return os.path.basename(folder) in _NAMED_FOR_IT or file.partition(os.sep)[0] in _distributed(folder)


def hush_imports() -> None:
    """From now on warnings that libraries log while they are imported are not shown above plait's answers. Errors are, and so is all of it
    where the job configures logging."""
    import torch  # which hands out its log by a handler of its own

    for handler in (logging.lastResort, *logging.getLogger(torch.__name__).handlers):
        if handler is not None:
            handler.addFilter(_is_shown)  # once, however often


def _is_shown(record: logging.LogRecord) -> bool:
    """False for a warning that comes from an import, with no line of the user's own in between."""
    for frame, _ in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return record.levelno > logging.WARNING
        if not file.startswith("<") and not is_library(file):
            break
    return True


@functools.cache
def _distributed(folder: str) -> frozenset[str]:
    """The files and folders right in a folder that distributions have put there."""
    from importlib.metadata import distributions

    if not os.path.isdir(folder) or not any(name.endswith(".dist-info") for name in os.listdir(folder)):
        return frozenset()
    return frozenset(file.parts[0] for found in distributions(path=[folder]) for file in found.files or ())


@contextmanager
def uncollected() -> Iterator[None]:
    """A context for imports and the like, which create many objects that stay: the garbage collector skips these objects, now and later."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # what libraries made is freed at the end: nanobind reports the rest as leaked
        if enabled:
            gc.enable()
