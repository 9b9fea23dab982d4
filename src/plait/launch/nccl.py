"""NCCL settings: timeouts, flight recorder and communicators.

Variables that the user has set, under any of their names, are kept. RCCL of ROCm and torch's ROCm build use the same names.

- *Timeout of a collective.* The first step builds, compiles and connects, so it may take long; later steps are alike. plait's launcher finds
  a hung rank by observation. With it, NCCL's timeout only has to exceed every limit of the launcher, up to one hour for a rank that
  reads, saves or compiles (`launch/hangs.py`). Under another launcher the timeout is half an hour, then torch's default of ten minutes.
- `TORCH_NCCL_ASYNC_ERROR_HANDLING=3`: a rank whose collective fails or times out ends at once, without waiting for communicators that
  may hang too. The launcher treats it as a victim, and searches for the cause.
- `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800`: torch ends a process whose watchdog thread is stuck for this long. The default is eight minutes,
  in which a large allocation, a graph capture or a compiler may hold the driver's lock.
- `TORCH_FR_BUFFER_SIZE=2000`: the flight recorder keeps the last 2000 collectives of a rank with kind, sizes, group and number.
- `TORCH_NCCL_DUMP_ON_TIMEOUT=1`: the flight recorder is written at a timeout. Through `TORCH_NCCL_DEBUG_INFO_PIPE_FILE`, plait's launcher
  also requests it when a rank hangs.
- `TORCH_FR_DUMP_TEMP_FILE`: one file per rank, in the folder of the run's logs. torch's `torchfrtrace` reads all of them and finds the rank
  that did not enter a collective.

*`device_id`* is passed to the group unless ranks send single messages. With it, the communicator is created at once, so network errors
appear at the start. Communicators of other groups are split from it, which is faster and uses less memory. But then all single `isend` and
`irecv` calls run on the group's one stream, and a pipeline stage would finish a send before it starts to receive. plait's order of messages
is free of deadlocks in both cases (`tests/unit/test_order.py`). Under `pp` each pair of ranks therefore has its own communicator, created
by its first message.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from plait.config.errors import PlaitError

DEFAULTS = (
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),
    (("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",), "1800"),
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
"""Names of a variable, torch's preferred one first, and the value that plait sets if none is set."""
RECORD_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
PIPE_VARIABLES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",)
RECORD_STEM = "nccl_trace_rank_"
"""Prefix of the flight recorder's files; the rank follows."""
LAUNCHED_TIMEOUTS = (timedelta(hours=2), timedelta(minutes=65))
JOINED_TIMEOUTS = (timedelta(minutes=30), timedelta(minutes=10))
"""Timeouts of a collective in the first step and later, under plait's launcher and under another one."""
DUMP_WAIT_S = 5.0
"""Seconds in which ranks may write their flight recorders."""


def set_nccl_defaults(folder: Path | None = None) -> None:
    """Set variables that the user has not set. Call it before the group is created. `folder`: for flight records of all ranks."""
    for names, value in DEFAULTS:
        _set_default(names, value)
    if folder is not None:
        for names in (RECORD_VARIABLES, PIPE_VARIABLES):
            _set_default(names, str(folder.absolute() / RECORD_STEM))


def _set_default(names: tuple[str, ...], value: str) -> None:
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value


def list_flight_records(folder: Path, since: float = 0.0) -> list[Path]:
    """List the flight records in a folder that were written after a time (of `time.time()`), in rank order."""
    found = ((path, path.name.removeprefix(RECORD_STEM)) for path in folder.glob(f"{RECORD_STEM}*"))
    mine = [(int(rank), path) for path, rank in found if rank.isdecimal() and path.stat().st_mtime >= since]
    return [path for _, path in sorted(mine)]


def request_flight_records(folder: Path, ranks: Iterable[int], patience: float = DUMP_WAIT_S) -> list[Path]:
    """Request the flight records of these ranks and wait briefly for them, before a hung run is ended."""
    began, asked = time.time(), 0
    for rank in ranks:
        with contextlib.suppress(OSError):  # that rank has no NCCL, or no reader any more
            pipe = os.open(folder / f"{RECORD_STEM}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                asked += os.write(pipe, b"1\n") > 0
            finally:
                os.close(pipe)
    end, before = time.monotonic() + patience, list[tuple[Path, int]]()
    while asked and time.monotonic() < end:
        now = [(path, path.stat().st_size) for path in list_flight_records(folder, int(began))]
        if len(now) == asked and now == before and all(size for _, size in now):
            break
        before = now
        time.sleep(0.1)
    return [path for path, _ in before]


def add_record_hint(error: PlaitError, folder: Path, since: float) -> PlaitError:
    """Add a hint with the flight records written since a time to an error, if there are any."""
    found = list_flight_records(folder, int(since))
    if not found or not error.problems:
        return error
    files = str(found[0]) if len(found) == 1 else f"{found[0]} … {found[-1].name.removeprefix(RECORD_STEM)}"
    line = f"torchfrtrace --prefix {RECORD_STEM} {folder}    finds the rank that did not enter a collective, from {files}"
    first, *rest = error.problems
    return PlaitError([replace(first, fix=(line, *first.fix)), *rest], error.exit_code, error.trace)
