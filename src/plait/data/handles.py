"""Connections that processes cannot share after a fork: found in a job's data before the fork.

A database, a socket or a pipe that was opened before the fork is one for all ranks and loader processes: one process reads what was
sent to another, or the library fails. (A plain file is harmless: `launch/descriptors.py` gives each process an offset of its own.)
"""

import os
import socket
import sqlite3
import stat

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.data.reachable import Reached, reachable

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
