"""The objects that a job's code can reach through functions and data sets.

The search is breadth-first from one object. It follows closures, defaults, referenced globals and attributes, attributes of instances and
of user classes, variables of suspended generators, and containers.

Before a fork it finds connections that processes cannot share: a database, a socket or a pipe. After the fork all ranks and loader processes
would use the same one: one process reads the data sent to another, or the library fails. (A plain file is harmless, since
`launch/limits.py` gives each process its own offset.)
"""

import gc
import logging
import os
import queue
import socket
import sqlite3
import stat
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.library import is_library

MAX_OBJECTS = 20_000
"""Maximum number of visited objects."""
MAX_ENTRIES = 256
"""Maximum number of visited entries of a container."""
PLAIN_TYPES = (str, bytes, bytearray, int, float, complex, bool, type(None), Tensor, np.ndarray, types.ModuleType,
         logging.Logger, logging.Handler)  # fmt: skip
"""Types without children."""


@dataclass(frozen=True)
class ReachedObject:
    """An object, and the path to it in the code, such as `dataset.reader.db`."""

    path: str
    value: object

    @property
    def name(self) -> str:
        """The last name of the path."""
        return self.path.rpartition(".")[2]


def iter_reachable(start: object) -> Iterator[ReachedObject]:
    """Yield all objects reachable from `start`, nearest first, including `start` and plain values."""
    ahead, met = deque([ReachedObject("", start)]), dict[int, object]()  # kept alive, so that ids are not reused
    while ahead and len(met) < MAX_OBJECTS:
        here = ahead.popleft()
        plain = isinstance(here.value, PLAIN_TYPES)
        if id(here.value) in met and not plain:
            continue
        yield here
        if not plain:
            met[id(here.value)] = here.value
            ours = _is_plait_object(here.value)
            inside = ((here.path if ours else here.path + name, inner) for name, inner in _iter_children(here.value))
            ahead.extend(ReachedObject(path.lstrip("."), inner) for path, inner in inside)


def _is_plait_object(value: object) -> bool:
    """Return whether a function, or an object's class, belongs to plait; its names are excluded from paths."""
    module = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return str(module).startswith("plait.")


def _iter_children(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the children of an object, each with the suffix of its path."""
    if isinstance(value, types.FunctionType):
        yield from _iter_function(value)
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, partial):
        yield from (("", inner) for inner in (value.func, *value.args))
        yield from ((f".{n}", inner) for n, inner in value.keywords.items())
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield f".{value.__name__}", value.gi_code
        yield from (() if frame is None else ((f".{n}", inner) for n, inner in frame.f_locals.items()))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in islice(list(value.items()), MAX_ENTRIES))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{i}]", inner) for i, inner in enumerate(islice(list(value), MAX_ENTRIES)))
    elif isinstance(value, queue.Queue):
        yield "", list(value.queue)
    elif isinstance(value, Job):
        yield from (("", value.data), ("", value.evaluate))
    elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        yield from (("", inner) for inner in gc.get_referents(value))
    elif isinstance(value, type):
        if not is_library_module(value.__module__):
            yield from ((f".{n}", inner) for n, inner in list(vars(value).items()))
    elif isinstance(value, (staticmethod, classmethod, property)):
        yield "", value.fget if isinstance(value, property) else value.__func__
    else:
        yield from _iter_instance(value)


def _iter_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    defaults, code = function.__defaults__ or (), function.__code__
    first = code.co_argcount - len(defaults)
    yield from ((f".{n}", inner) for n, inner in zip(code.co_varnames[first:], defaults))
    yield from ((f".{n}", inner) for n, inner in (function.__kwdefaults__ or {}).items())
    names = set() if is_library_module(function.__module__) else set(_iter_code_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if not is_library_module(value.__name__):
                yield from ((f".{name}.{n}", vars(value)[n]) for n in names & vars(value).keys())
        else:
            yield f".{name}", value


def _iter_code_names(code: types.CodeType) -> Iterable[str]:
    """Yield the names that a function's code, including nested functions, looks up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _iter_code_names(inner)


def _iter_instance(value: object) -> Iterator[tuple[str, Any]]:
    yield "", type(value)
    yield from ((f".{n}", inner) for n, inner in list(getattr(value, "__dict__", {}).items()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and isinstance(vars(kind).get(name), types.MemberDescriptorType):
                try:
                    yield f".{name}", getattr(value, name)
                except AttributeError:  # not set
                    continue


def is_library_module(module: str | None) -> bool:
    """Return whether a module belongs to a library rather than the user."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return (file is None and module != "__main__") or is_library(str(file or ""))


CONNECTION_TYPES = {
    ("lmdb", "Environment"), ("lmdb", "Transaction"), ("zmq", "Socket"), ("zmq", "Context"), ("apsw", "Connection"),
    ("duckdb", "DuckDBPyConnection"), ("_duckdb", "DuckDBPyConnection"), ("plyvel", "DB"), ("rocksdb", "DB"),
}  # fmt: skip
"""Connection classes without a file descriptor: (first word of the module, class)."""


def check_unshared(job: Job) -> None:
    """J046 if the job's data has an open connection, which all ranks would share. Call it before ranks are forked."""
    sources = {"Job(data=…)": job.data}
    if job.evaluate is not None:
        sources["Evaluate(data=…)"] = job.evaluate.data
    for where, make in sources.items():
        if (found := find_connection(make)) is not None:
            raise PlaitError(connection_problem(found, "all ranks", where))


def check_loader_data(data: object) -> None:
    """J046 if data opened in this process has a connection. Call it before loader processes are forked."""
    if (found := find_connection(data)) is not None:
        raise PlaitError(connection_problem(found, "all loader processes", "Job(data=…)"))


def connection_problem(found: ReachedObject, processes: str, where: str) -> Problem:
    """J046 for an open connection."""
    what = f"the data uses {describe_connection(found.value)} that is already open: {found.path or type(found.value).__name__}"
    why = f"{processes} would share this connection after the fork, and each would read data sent to the others"
    fix = (
        "open it at the first sample:    if self.db is None or self.pid != os.getpid(): self.db, self.pid = connect(), os.getpid()",
        "open it inside the function:    data=lambda: Dataset(connect())" if processes == "all ranks" else "--workers 0",
    )
    return Problem("J046", what, why=why, where=where, fix=fix)


def find_connection(start: object) -> ReachedObject | None:
    """Return the first connection reachable from `start`, nearest first, or None."""
    return next((found for found in iter_reachable(start) if describe_connection(found.value)), None)


def describe_connection(value: object) -> str:
    """Describe a connection by its kind; "" for other objects."""
    kind = type(value)
    if isinstance(value, type):
        return ""
    if isinstance(value, sqlite3.Connection):
        return "an SQLite database" if _is_file_database(value) else ""
    if any((base.__module__.split(".")[0], base.__name__) in CONNECTION_TYPES for base in kind.__mro__):
        return f"a connection ({kind.__module__.split('.')[0]}.{kind.__name__})"
    if isinstance(value, socket.socket):
        return "a socket" if value.fileno() >= 0 else ""
    return _describe_descriptor(value)


def _is_file_database(database: sqlite3.Connection) -> bool:
    """Return whether the database is open and in a file; a fork copies one in memory."""
    try:
        return any(row[2] for row in database.execute("PRAGMA database_list"))
    except sqlite3.Error:
        return False


def _describe_descriptor(value: object) -> str:
    """Describe a connection by its file descriptor; "" without one."""
    ask = getattr(type(value), "fileno", None)
    if not callable(ask):
        return ""
    try:
        number = ask(value)
        mode = os.fstat(number).st_mode if isinstance(number, int) and number > 2 else 0
    except Exception:  # it is closed, or has none
        return ""
    kinds = {"a socket": stat.S_ISSOCK, "a pipe": stat.S_ISFIFO}
    return next((f"{name} ({type(value).__name__})" for name, is_one in kinds.items() if is_one(mode)), "")
