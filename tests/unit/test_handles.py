"""Handles that a job's data opened before ranks and loader processes are forked: each process has its own file offset, and connections are
rejected."""

import io
import multiprocessing
import os
import queue
import socket
import sqlite3
import subprocess
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextlib import closing as closed_after
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import make
from torch import nn
from torch.nn import functional as F

import plait
from plait import PlaitError
from plait.config.plan import Plan
from plait.data.batch import BatchShare, Position
from plait.data.loading import iter_batches
from plait.data.reachable_objects import check_loader_data, check_unshared, find_connection
from plait.launch import fork
from plait.launch.place import Place
from plait.proof.verify import verify

LENGTH, READS = 24, 400
OPENED: Any = None
"""Handles that a job file opens at its module level."""


def row(i: int) -> np.ndarray:
    return np.arange(6 * i, 6 * i + 6, dtype=np.float32)


class Rows:
    """Samples that `read(i)` returns."""

    def __init__(self, read: Callable[[int], bytes]):
        self.read = read

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, i: int) -> Any:
        x = torch.from_numpy(np.frombuffer(self.read(i), dtype=np.float32).copy())
        return x / 100, x.sum()[None] / 100


def buffered(path: Path, closing: ExitStack) -> Callable[[int], bytes]:
    file = closing.enter_context(open(path / "rows", "rb"))  # noqa: SIM115

    def read(i: int) -> bytes:
        file.seek(24 * i)
        return file.read(24)

    return read


def descriptor(path: Path, closing: ExitStack) -> Callable[[int], bytes]:
    number = os.open(path / "rows", os.O_RDWR)
    closing.callback(os.close, number)

    def read(i: int) -> bytes:
        os.lseek(number, 24 * i, os.SEEK_SET)
        return os.read(number, 24)

    return read


def deleted(path: Path, closing: ExitStack) -> Callable[[int], bytes]:
    """A temporary file that no longer has a name."""
    file = closing.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
    file.write((path / "rows").read_bytes())

    def read(i: int) -> bytes:
        file.seek(24 * i)
        return file.read(24) or b""

    return read


def arrays(path: Path, closing: ExitStack) -> Callable[[int], bytes]:
    file = closing.enter_context(open(path / "rows", "r+b"))  # noqa: SIM115

    def read(i: int) -> bytes:
        file.seek(24 * i)
        return np.fromfile(file, dtype=np.float32, count=6).tobytes()

    return read


def zipped(path: Path, closing: ExitStack) -> Callable[[int], bytes]:
    with zipfile.ZipFile(path / "rows.zip", "w") as made:
        for i in range(LENGTH):
            made.writestr(str(i), row(i).tobytes())
    archive = closing.enter_context(zipfile.ZipFile(path / "rows.zip"))
    return lambda i: archive.read(str(i))


def tarred(path: Path, closing: ExitStack) -> Callable[[int], bytes]:
    with tarfile.open(path / "rows.tar", "w") as made:
        for i in range(LENGTH):
            entry = tarfile.TarInfo(str(i))
            entry.size = 24
            made.addfile(entry, io.BytesIO(row(i).tobytes()))
    archive = closing.enter_context(tarfile.open(path / "rows.tar"))  # noqa: SIM115
    members = archive.getmembers()

    def read(i: int) -> bytes:
        file = archive.extractfile(members[i])
        assert file is not None
        return file.read()

    return read


def hdf5(path: Path, closing: ExitStack) -> Callable[[int], bytes]:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path / "rows.h5", "w") as made:
        made["rows"] = np.stack([row(i) for i in range(LENGTH)])
    rows = closing.enter_context(h5py.File(path / "rows.h5", "r"))["rows"]
    return lambda i: rows[i].tobytes()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Handles that are open while a test runs."""
    with ExitStack() as stack:
        yield stack


FILES = (buffered, descriptor, deleted, arrays, zipped, tarred, hdf5)


def test_ranks_that_seek_in_one_file_do_not_move_each_other(tmp_path: Path, closing: ExitStack) -> None:
    (tmp_path / "rows").write_bytes(bytes(range(8)))
    file, both = closing.enter_context(open(tmp_path / "rows", "rb", buffering=0)), multiprocessing.Barrier(2)  # noqa: SIM115

    def reads(place: Place) -> dict[str, Any]:
        file.seek(4 * place.rank)
        both.wait(60)
        return {"read": list(file.read(4))}

    assert fork.run_ranks(reads, 2) == [{"read": [0, 1, 2, 3]}, {"read": [4, 5, 6, 7]}]


@pytest.mark.slow
@pytest.mark.parametrize("opened", FILES)
def test_every_rank_and_loader_process_reads_a_file_at_its_own_offset(
    opened: Any, tmp_path: Path, closing: ExitStack
) -> None:
    (tmp_path / "rows").write_bytes(b"".join(row(i).tobytes() for i in range(LENGTH)))
    data = Rows(opened(tmp_path, closing))

    def reads(place: Place) -> dict[str, Any]:
        wrong = 0
        for k in range(READS):
            i = (k * (7 + 4 * place.rank)) % LENGTH
            wrong += not np.array_equal(data[i][0].numpy(), row(i) / np.float32(100))
        source = iter_batches(data, 8, 0, BatchShare(), Position(), workers=2)
        for _ in range(6):
            micro = next(source).micro_batches[0]
            wrong += sum(
                not np.array_equal(x.numpy(), row(i) / np.float32(100)) for x, i in zip(micro.inputs, micro.ids)
            )
        return {"wrong": wrong}

    assert fork.run_ranks(reads, 2) == [{"wrong": 0}] * 2


class Lazy(Rows):
    """A database that each process opens when it first reads."""

    def __init__(self, path: Path):
        super().__init__(lambda i: row(i).tobytes())
        self.path, self.db = path, None


class Global(Rows):
    """A database of the module, named only in a method."""

    def __getitem__(self, i: int) -> Any:
        return OPENED.execute("SELECT 1").fetchone()


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object):
        self.inner = inner


def job(data: Any) -> plait.Job:
    return make(lambda: nn.Linear(6, 1), data=data, loss=F.mse_loss, batch=8)


def test_what_each_process_has_for_itself_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closing: ExitStack
) -> None:
    memory = closing.enter_context(closed_after(sqlite3.connect(":memory:")))
    file = closing.enter_context(open(tmp_path / "rows", "w+b"))  # noqa: SIM115
    closed = socket.socket()
    closed.close()
    monkeypatch.setitem(globals(), "OPENED", memory)
    for held in (Lazy(tmp_path), memory, file, closed, threading.Lock(), [1, 2], {"log": plait}, queue.Queue(), Global):
        check_unshared(job(lambda held=held: Rows(lambda i: held)))  # pyrefly: ignore
        check_loader_data(held)


def connection(name: str, path: Path, closing: ExitStack) -> Any:
    """An open connection."""
    if name in ("database", "inside a slot"):
        database = closing.enter_context(closed_after(sqlite3.connect(path / "rows.db")))
        return database if name == "database" else Slotted([database])
    if name == "process":
        child = closing.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        closing.callback(child.kill)
        return child
    if name == "queue":
        return closing.enter_context(closed_after(multiprocessing.Queue()))
    if name == "socket":
        return closing.enter_context(socket.socket())
    ours, theirs = map(closing.enter_context, multiprocessing.Pipe())
    return ours if name == "pipe" else map(len, pulled_of(theirs))


def pulled_of(source: Any) -> Iterator[Any]:
    return (item for item in [source])


@pytest.mark.parametrize("name", ("database", "inside a slot", "socket", "pipe", "queue", "process", "in a generator"))
def test_an_open_connection_is_refused_before_ranks_and_loader_processes(
    name: str, tmp_path: Path, closing: ExitStack
) -> None:
    held = connection(name, tmp_path, closing)

    class Uses(Rows):
        def __init__(self) -> None:
            super().__init__(lambda i: held)

    for data in (Uses, lambda: Uses(), lambda held=held: Rows(lambda i: held)):
        with pytest.raises(PlaitError) as error:
            check_unshared(job(data))
        assert error.value.codes == ["J046"], error.value
    with pytest.raises(PlaitError) as error:
        next(iter_batches(Rows(lambda i: held), 4, 0, BatchShare(), Position(), workers=1))
    assert error.value.codes == ["J046"] and "--workers 0" in str(error.value)


def test_a_database_of_the_module_is_refused_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closing: ExitStack
) -> None:
    monkeypatch.setitem(globals(), "OPENED", connection("database", tmp_path, closing))
    assert find_connection(lambda: Global(lambda i: b"")) is not None
    with pytest.raises(PlaitError) as error:
        verify(job(lambda: Global(lambda i: b"")), Plan.parse("dp=2"))
    assert error.value.codes == ["J046"] and "OPENED" in str(error.value)
