"""What a job's code can reach: the objects that a function, or a data set, holds and names.

The search begins at one object and goes to the nearest first: closures, defaults, the globals and attributes that code names, the
attributes of instances and of the user's own classes, the variables of suspended generators, and what is in containers.

Looked for, before a fork, are connections that processes cannot share: a database, a socket or a pipe that was opened before the fork is
one for all ranks and loader processes: one process reads what was sent to another, or the library fails. (A plain file is harmless:
`launch/limits.py` gives each process an offset of its own.)
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

LOOKED_AT = 20_000
"""Objects, at most."""
INSIDE = 256
"""Entries of a container that are followed."""
PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), Tensor, np.ndarray, types.ModuleType,
         logging.Logger, logging.Handler)  # fmt: skip
"""Objects that hold nothing to follow."""


@dataclass(frozen=True)
class Reached:
    """An object, and how the code comes to it, such as `dataset.reader.db`."""

    path: str
    value: object

    @property
    def name(self) -> str:
        """The last name of the path."""
        return self.path.rpartition(".")[2]


def reachable(start: object) -> Iterator[Reached]:
    """All objects that `start` can reach, the nearest first, `start` itself included; plain values too."""
    ahead, met = deque([Reached("", start)]), dict[int, object]()  # kept alive: an id may be used again otherwise
    while ahead and len(met) < LOOKED_AT:
        here = ahead.popleft()
        plain = isinstance(here.value, PLAIN)
        if id(here.value) in met and not plain:
            continue
        yield here
        if not plain:
            met[id(here.value)] = here.value
            ours = _of_plait(here.value)
            inside = ((here.path if ours else here.path + name, inner) for name, inner in _inside(here.value))
            ahead.extend(Reached(path.lstrip("."), inner) for path, inner in inside)


def _of_plait(value: object) -> bool:
    """Whether a function, or an object's class, is plait's own: then its names are not the user's words, and no path has them."""
    module = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return str(module).startswith("plait.")


def _inside(value: object) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with what is appended to its path."""
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
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
        yield from ((f"[{key!r}]", inner) for key, inner in islice(list(value.items()), INSIDE))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{i}]", inner) for i, inner in enumerate(islice(list(value), INSIDE)))
    elif isinstance(value, queue.Queue):
        yield "", list(value.queue)
    elif isinstance(value, Job):
        yield from (("", value.data), ("", value.evaluate))
    elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        yield from (("", inner) for inner in gc.get_referents(value))
    elif isinstance(value, type):
        if not of_library(value.__module__):
            yield from ((f".{n}", inner) for n, inner in list(vars(value).items()))
    elif isinstance(value, (staticmethod, classmethod, property)):
        yield "", value.fget if isinstance(value, property) else value.__func__
    else:
        yield from _of_instance(value)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    defaults, code = function.__defaults__ or (), function.__code__
    first = code.co_argcount - len(defaults)
    yield from ((f".{n}", inner) for n, inner in zip(code.co_varnames[first:], defaults))
    yield from ((f".{n}", inner) for n, inner in (function.__kwdefaults__ or {}).items())
    names = set() if of_library(function.__module__) else set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if not of_library(value.__name__):
                yield from ((f".{name}.{n}", vars(value)[n]) for n in names & vars(value).keys())
        else:
            yield f".{name}", value


def _names(code: types.CodeType) -> Iterable[str]:
    """Names that a function's code, and that of functions inside it, looks up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _of_instance(value: object) -> Iterator[tuple[str, Any]]:
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


def of_library(module: str | None) -> bool:
    """Whether a module is not the user's own."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return (file is None and module != "__main__") or is_library(str(file or ""))


CONNECTIONS = {
    ("lmdb", "Environment"), ("lmdb", "Transaction"), ("zmq", "Socket"), ("zmq", "Context"), ("apsw", "Connection"),
    ("duckdb", "DuckDBPyConnection"), ("_duckdb", "DuckDBPyConnection"), ("plyvel", "DB"), ("rocksdb", "DB"),
}  # fmt: skip
"""Of libraries whose objects have no descriptor to ask: (first word of the module, class)."""


def check_unshared(job: Job) -> None:
    """J046 if the job's data has a connection already, which all ranks would share. Call it before ranks are forked."""
    sources = {"Job(data=…)": job.data}
    if job.evaluate is not None:
        sources["Evaluate(data=…)"] = job.evaluate.data
    for where, make in sources.items():
        if (found := connection_in(make)) is not None:
            raise PlaitError(shared(found, "all ranks", where))


def check_loaders(data: object) -> None:
    """J046 if data, as this process has opened it, has a connection. Call it before loader processes are forked."""
    if (found := connection_in(data)) is not None:
        raise PlaitError(shared(found, "all loader processes", "Job(data=…)"))


def shared(found: Reached, processes: str, where: str) -> Problem:
    """J046."""
    what = f"the data uses {kind_of(found.value)} that is already open: {found.path or type(found.value).__name__}"
    why = f"{processes} would be forked with this one connection, and each would read what was sent to the others"
    fix = (
        "open it at the first sample:    if self.db is None or self.pid != os.getpid(): self.db, self.pid = connect(), os.getpid()",
        "open it inside the function:    data=lambda: Dataset(connect())" if processes == "all ranks" else "--workers 0",
    )
    return Problem("J046", what, why=why, where=where, fix=fix)


def connection_in(start: object) -> Reached | None:
    """The first connection that `start` can reach, the nearest first."""
    return next((found for found in reachable(start) if kind_of(found.value)), None)


def kind_of(value: object) -> str:
    """What kind of connection it is, or nothing."""
    kind = type(value)
    if isinstance(value, type):
        return ""
    if isinstance(value, sqlite3.Connection):
        return "an SQLite database" if _in_file(value) else ""
    if any((base.__module__.split(".")[0], base.__name__) in CONNECTIONS for base in kind.__mro__):
        return f"a connection ({kind.__module__.split('.')[0]}.{kind.__name__})"
    if isinstance(value, socket.socket):
        return "a socket" if value.fileno() >= 0 else ""
    return _of_descriptor(value)


def _in_file(database: sqlite3.Connection) -> bool:
    """Whether the database is in a file, and open; one in memory is copied by a fork."""
    try:
        return any(row[2] for row in database.execute("PRAGMA database_list"))
    except sqlite3.Error:
        return False


def _of_descriptor(value: object) -> str:
    """The same by the descriptor that an object says it has."""
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
