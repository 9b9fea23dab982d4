"""What the user's code showed when it ran, kept on disk for as long as what it looked at is the same.

A key names what such a result depends on and a process knows beforehand: the environment, Python, the working directory, the host. `FileWatch`
notes the rest while the code runs: each file that it opens or asks for, folders that it lists, all modules. A record has their sizes
and times, and counts only while none of them has changed. Code that writes, starts a process or uses the network is not
trusted to do the same again, and files as new as the process may have changed after they were read: then nothing is kept.

What this cannot see: files that a compiled library opens by itself without Python asking for them before, clocks, and devices.
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

from plait.config.files import read_plain

MOST = 64
"""Records on disk: the oldest are removed."""
SIZE = 64 << 20
"""Bytes of a record that are read at most."""
PSEUDO = 1 << 20
"""Bytes that are read of a file that says that it is empty, as those of the kernel do."""
EARLIER = 2 * 10**9
"""Nanoseconds by which the start of a process may be known too late."""
UNREPEATABLE = ("subprocess.", "socket.connect", "socket.getaddrinfo", "socket.gethost", "socket.send", "sqlite3.connect", "os.fork", "os.exec",
                "os.posix_spawn", "os.system", "pty.", "ftplib.", "urllib.")  # fmt: skip
"""What events begin with after which code may find something else the next time."""
CHANGING = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.", "tempfile.")
BYTECODE = f"{os.sep}__pycache__"
LIBRARIES = "/etc/ld.so.cache"
"""What the system's loader knows of installed libraries."""
OF_THE_SHELL = frozenset((
    "_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES", "WINDOWID", "TERM_SESSION_ID", "TMUX", "TMUX_PANE", "STY", "SSH_CLIENT", "SSH_CONNECTION",
    "SSH_TTY", "XDG_SESSION_ID",
))  # fmt: skip
"""Variables that a shell sets for itself, and those that say in which terminal or login it runs: they differ from one shell to the next, and say
nothing of a job. A key has the working directory by itself."""

State = tuple[int, ...] | str | None
"""Of a file: size and time; of a listed folder its time; () of anything else that exists; None of what does not. Of a file that says
that it is empty, a digest of what is read."""


class FileWatch:
    """Notes what code in `with` looks at. `reason`: why what it finds cannot be kept, if so."""

    def __init__(self) -> None:
        self.paths: dict[str, bool] = {}
        """Path -> whether it is a folder that was listed."""
        self.reason = ""

    def __enter__(self) -> "FileWatch":
        self._asks = os.stat, os.access, ctypes.util.find_library
        os.stat, os.access = (self._noting(ask) for ask in self._asks[:2])  # of which Python tells no hook
        ctypes.util.find_library = self._find_library
        _active().add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active().discard(self)
        os.stat, os.access, ctypes.util.find_library = self._asks

    def _find_library(self, name: str) -> str | None:
        """What Python starts processes for, and finds again as long as no library was installed."""
        self._add(LIBRARIES)
        with unnoted():
            return self._asks[2](name)

    def _noting(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: object, *args: object, **kwargs: object) -> object:
            self._add(path)
            return ask(path, *args, **kwargs)

        return asked

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """An event of `sys.addaudithook`."""
        if event == "open":
            writes = len(args) > 2 and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            self._add(args[0], writes="it writes" if writes else "")
        elif event in ("os.listdir", "os.scandir"):
            self._add("." if args[0] is None else args[0], listed=True)
        elif event.startswith(UNREPEATABLE):
            self.reason = self.reason or f"{event} {args[:1]}"
        elif event.startswith(CHANGING) and args:
            self._add(args[0], writes=event)

    def _add(self, path: object, *, listed: bool = False, writes: str = "") -> None:
        if isinstance(path, int):  # it was opened by a name
            self.reason = self.reason or "a folder is listed by a descriptor" * listed
            return
        with suppress(TypeError, OSError, ValueError):
            name = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
            if writes and BYTECODE not in name and not name.startswith("/dev/"):
                self.reason = self.reason or f"{writes} {name}"
            if BYTECODE not in name:  # modules count by their sources
                self.paths[name] = self.paths.get(name, False) or listed

    def states(self) -> dict[str, State]:
        """Of all that was looked at, and of each module of this process, and the folders that Python looks for modules in."""
        began = int(psutil.Process().create_time() * 1e9) - EARLIER
        files = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
        paths = dict.fromkeys((file for file in files if isinstance(file, str)), False) | self.paths
        found = {path: state_of(path, listed) for path, listed in (paths | dict.fromkeys(sys.path_importer_cache, True)).items()}
        times = ((path, state[-1]) for path, state in found.items() if isinstance(state, tuple) and state)
        new = (path for path, changed in times if changed >= began and not _bytecode_changed(path, changed))
        self.reason = self.reason or next((f"{path} is as new as this process" for path in new), "")
        return found


def _bytecode_changed(folder: str, time_ns: int) -> bool:
    """Whether the last change of a folder, at that time, was that Python made the one for bytecode in it, or came before."""
    bytecode = state_of(folder + BYTECODE, listed=True)
    return isinstance(bytecode, tuple) and bytecode >= (time_ns,)


@contextmanager
def unnoted() -> Iterator[None]:
    """What code in it looks at, no result depends on."""
    active = _active()
    before = set(active)
    active.clear()
    try:
        yield
    finally:
        active |= before


@contextmanager
def same_environment() -> Iterator[None]:
    """What code in it adds to the environment, of which keys are made, is removed again."""
    before = {*os.environ}
    yield
    for name in {*os.environ} - before:
        del os.environ[name]


@cache
def _active() -> set[FileWatch]:
    """The watches under way. There is one hook, since Python removes none."""
    active: set[FileWatch] = set()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        for watch in tuple(active):
            watch.note(event, args)

    sys.addaudithook(hook)
    return active


def state_of(path: str, listed: bool) -> State:
    """What is recorded of a path now."""
    try:
        status = os.stat(path)
        if S_ISDIR(status.st_mode):
            return (status.st_mtime_ns,) if listed else ()
        if not S_ISREG(status.st_mode):
            return ()
        if not status.st_size:
            return hashlib.sha256(read_plain(Path(path), PSEUDO)).hexdigest()
        return status.st_size, status.st_mtime_ns
    except (OSError, ValueError):
        return None


def key_of(*words: object) -> str:
    """The key of what `words` name, in this environment (but for `OF_THE_SHELL`) and on this host."""
    environment = sorted((name, value) for name, value in os.environ.items() if name not in OF_THE_SHELL)
    here = (environment, os.getcwd(), sys.executable, sys.version, sys.path, sys.flags, platform.node(), platform.release())
    return hashlib.sha256(json.dumps([*map(repr, words), *map(repr, here)]).encode()).hexdigest()


def folder() -> Path:
    """Where records are: in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait" / "sketches"


class _Record(Struct):
    key: str
    states: dict[str, State]
    listed: list[str]
    content: bytes


@dataclass(frozen=True)
class KeptContent:
    """What was kept, and how many seconds ago."""

    content: bytes
    age: float


def load(key: str) -> KeptContent | None:
    """What was kept under a key, if nothing that it depends on has changed. A damaged record counts as none."""
    try:
        file = folder() / key
        raw, made = read_plain(file, SIZE), file.stat().st_mtime
        digest, packed = raw[:32], raw[32:]
        if hashlib.sha256(packed).digest() != digest:
            return None
        record = msgpack.decode(zlib.decompress(packed), type=_Record)
    except (OSError, RuntimeError, ValueError, DecodeError, zlib.error):
        return None
    listed = set(record.listed)
    if record.key != key or any(state_of(path, path in listed) != state for path, state in record.states.items()):
        return None
    return KeptContent(record.content, max(0.0, time.time() - made))


def save(key: str, content: bytes, watch: FileWatch, states: Mapping[str, State]) -> bool:
    """Keep something; False if it cannot be: there is no room, or no right to write."""
    listed = [path for path in states if watch.paths.get(path) or path in sys.path_importer_cache]
    try:
        packed = zlib.compress(msgpack.encode(_Record(key, dict(states), listed, content)), 1)
        place = folder()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = place / f"{key}.{os.getpid()}.part"
        try:
            part.write_bytes(hashlib.sha256(packed).digest() + packed)
            os.replace(part, place / key)
        finally:
            part.unlink(missing_ok=True)
        _prune(place)
    except (OSError, RuntimeError, UnicodeError):  # a name may be no text
        return False
    return True


def _prune(place: Path) -> None:
    """Remove the oldest records, of which others may remove some meanwhile, and what a process that was killed has left."""
    aged = list[tuple[float, Path]]()
    for path in place.iterdir():
        with suppress(OSError):
            aged.append((path.stat().st_mtime, path))
    for _, path in sorted(aged)[:-MOST]:
        with suppress(OSError):
            path.unlink()
