"""Cache on disk for sketches of the user's code, valid as long as the files that the code read are unchanged.

A key covers the inputs that are fixed in advance: the environment, Python, the working directory, the host. `FileWatch` records the
other inputs while the code runs: files that it opens or looks up, folders that it lists, all modules. A record has their sizes and times,
and is valid only while none of them has changed. Code that writes, starts a process or uses the network may behave differently next time,
and files as new as the process may have changed after they were read. In both cases nothing is cached.

Not covered are files that a compiled library opens without Python, clocks, and devices.
"""

import ctypes.util
import hashlib
import json
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import psutil
from msgspec import DecodeError, Struct, msgpack

from plait.config.files import read_plain_file

MAX_RECORDS = 64
"""Maximum number of records on disk; the oldest are removed."""
MAX_RECORD_BYTES = 64 << 20
"""Maximum size of a record."""
PSEUDO_FILE_BYTES = 1 << 20
"""Bytes read from a file whose size is reported as 0, as for files of the kernel."""
START_MARGIN_NS = 2 * 10**9
"""Maximum error of a process's start time, in nanoseconds."""
UNREPEATABLE = ("subprocess.", "socket.connect", "socket.getaddrinfo", "socket.gethost", "socket.send", "sqlite3.connect", "os.fork", "os.exec",
                "os.posix_spawn", "os.system", "pty.", "ftplib.", "urllib.")  # fmt: skip
"""Prefixes of audit events after which the code may find other inputs next time."""
CHANGING_EVENTS = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.", "tempfile.")
BYTECODE = f"{os.sep}__pycache__"
LIBRARY_CACHE = "/etc/ld.so.cache"
"""The dynamic loader's list of installed libraries."""
SHELL_VARIABLES = frozenset((
    "_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES", "WINDOWID", "TERM_SESSION_ID", "TMUX", "TMUX_PANE", "STY", "SSH_CLIENT", "SSH_CONNECTION",
    "SSH_TTY", "XDG_SESSION_ID",
))  # fmt: skip
"""Variables that a shell sets for itself, or that identify a terminal or login. They differ between shells and do not affect a job.

The working directory is a separate part of a key.
"""

State = tuple[int, ...] | str | None
"""State of a path: size and time of a file; time of a listed folder; () of anything else that exists; None if it is missing.

A digest of the content of a file whose size is reported as 0.
"""


class FileWatch:
    """Records the paths that code in `with` uses. `reason`: why its result cannot be cached, if so."""

    def __init__(self) -> None:
        self.paths: dict[str, bool] = {}
        """Path -> whether it is a folder that was listed."""
        self.reason = ""

    def __enter__(self) -> "FileWatch":
        self._originals = os.stat, os.access, ctypes.util.find_library
        os.stat, os.access = (self._wrap_query(ask) for ask in self._originals[:2])  # Python raises no audit events for these
        ctypes.util.find_library = self._find_library
        _active_watches().add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active_watches().discard(self)
        os.stat, os.access, ctypes.util.find_library = self._originals

    def _find_library(self, name: str) -> str | None:
        """Record the loader's cache. Python's search starts processes, and its result is stable until a library is installed."""
        self._record_path(LIBRARY_CACHE)
        with pause_watches():
            return self._originals[2](name)

    def _wrap_query(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def record_and_ask(path: object, *args: object, **kwargs: object) -> object:
            self._record_path(path)
            return ask(path, *args, **kwargs)

        return record_and_ask

    def record_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an event of `sys.addaudithook`."""
        if event == "open":
            writes = len(args) > 2 and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            self._record_path(args[0], writes="it writes" if writes else "")
        elif event in ("os.listdir", "os.scandir"):
            self._record_path("." if args[0] is None else args[0], listed=True)
        elif event.startswith(UNREPEATABLE):
            self.reason = self.reason or f"{event} {args[:1]}"
        elif event.startswith(CHANGING_EVENTS) and args:
            self._record_path(args[0], writes=event)

    def _record_path(self, path: object, *, listed: bool = False, writes: str = "") -> None:
        if isinstance(path, int):  # it was opened by a name
            self.reason = self.reason or "a folder is listed by a descriptor" * listed
            return
        with suppress(TypeError, OSError, ValueError):
            name = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
            if writes and BYTECODE not in name and not name.startswith("/dev/"):
                self.reason = self.reason or f"{writes} {name}"
            if BYTECODE not in name:  # modules are recorded by their source files
                self.paths[name] = self.paths.get(name, False) or listed

    def collect_states(self) -> dict[str, State]:
        """Return the states of all recorded paths, of each loaded module, and of the folders on Python's module path."""
        began = int(psutil.Process().create_time() * 1e9) - START_MARGIN_NS
        files = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
        paths = dict.fromkeys((file for file in files if isinstance(file, str)), False) | self.paths
        found = {path: read_file_state(path, listed) for path, listed in (paths | dict.fromkeys(sys.path_importer_cache, True)).items()}
        times = ((path, state[-1]) for path, state in found.items() if isinstance(state, tuple) and state)
        new = (path for path, changed in times if changed >= began and not _is_bytecode_change(path, changed))
        self.reason = self.reason or next((f"{path} is as new as this process" for path in new), "")
        return found


def _is_bytecode_change(folder: str, time_ns: int) -> bool:
    """Whether the last change of a folder, at that time, was the creation of its bytecode folder, or came before it."""
    bytecode = read_file_state(folder + BYTECODE, listed=True)
    return isinstance(bytecode, tuple) and bytecode >= (time_ns,)


@contextmanager
def pause_watches() -> Iterator[None]:
    """Inside, paths are not recorded, because no result depends on them."""
    active = _active_watches()
    before = set(active)
    active.clear()
    try:
        yield
    finally:
        active |= before


@contextmanager
def restore_environment() -> Iterator[None]:
    """Remove variables that the code inside adds to the environment, of which keys are made."""
    before = {*os.environ}
    yield
    for name in {*os.environ} - before:
        del os.environ[name]


@cache
def _active_watches() -> set[FileWatch]:
    """The active watches. There is one audit hook, because Python cannot remove hooks."""
    active: set[FileWatch] = set()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        for watch in tuple(active):
            watch.record_event(event, args)

    sys.addaudithook(hook)
    return active


def read_file_state(path: str, listed: bool) -> State:
    """Return the current state of a path."""
    try:
        status = os.stat(path)
        if S_ISDIR(status.st_mode):
            return (status.st_mtime_ns,) if listed else ()
        if not S_ISREG(status.st_mode):
            return ()
        if not status.st_size:
            return hashlib.sha256(read_plain_file(Path(path), PSEUDO_FILE_BYTES)).hexdigest()
        return status.st_size, status.st_mtime_ns
    except (OSError, ValueError):
        return None


def make_cache_key(*words: object) -> str:
    """Make the key of `words`, in this environment (without `SHELL_VARIABLES`) and on this host."""
    environment = sorted((name, value) for name, value in os.environ.items() if name not in SHELL_VARIABLES)
    here = (environment, os.getcwd(), sys.executable, sys.version, sys.path, sys.flags, platform.node(), platform.release())
    return hashlib.sha256(json.dumps([*map(repr, words), *map(repr, here)]).encode()).hexdigest()


def find_cache_folder() -> Path:
    """Return the folder of the records, in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait" / "sketches"


class _Record(Struct):
    key: str
    states: dict[str, State]
    listed: list[str]
    content: bytes


@dataclass(frozen=True)
class CachedContent:
    """Content of a record, and its age in seconds."""

    content: bytes
    age: float


def load_record(key: str) -> CachedContent | None:
    """Return the content under a key if none of its inputs has changed. A damaged record counts as missing."""
    try:
        file = find_cache_folder() / key
        raw, made = read_plain_file(file, MAX_RECORD_BYTES), file.stat().st_mtime
        digest, packed = raw[:32], raw[32:]
        if hashlib.sha256(packed).digest() != digest:
            return None
        record = msgpack.decode(zlib.decompress(packed), type=_Record)
    except (OSError, RuntimeError, ValueError, DecodeError, zlib.error):
        return None
    listed = set(record.listed)
    if record.key != key or any(read_file_state(path, path in listed) != state for path, state in record.states.items()):
        return None
    return CachedContent(record.content, max(0.0, time.time() - made))


def save_record(key: str, content: bytes, watch: FileWatch, states: Mapping[str, State]) -> bool:
    """Save a record. Returns False if the disk is full or not writable."""
    listed = [path for path in states if watch.paths.get(path) or path in sys.path_importer_cache]
    try:
        packed = zlib.compress(msgpack.encode(_Record(key, dict(states), listed, content)), 1)
        place = find_cache_folder()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = place / f"{key}.{os.getpid()}.part"
        try:
            part.write_bytes(hashlib.sha256(packed).digest() + packed)
            os.replace(part, place / key)
        finally:
            part.unlink(missing_ok=True)
        _prune_records(place)
    except (OSError, RuntimeError, UnicodeError):  # a name may not be valid text
        return False
    return True


def _prune_records(place: Path) -> None:
    """Remove the oldest records, and unfinished files of killed processes. Other processes may remove some at the same time."""
    aged = list[tuple[float, Path]]()
    for path in place.iterdir():
        with suppress(OSError):
            aged.append((path.stat().st_mtime, path))
    for _, path in sorted(aged)[:-MAX_RECORDS]:
        with suppress(OSError):
            path.unlink()
