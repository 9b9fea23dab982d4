"""NCCL as plait sets it up: when a rank that waits gives up, what is written then, and which communicators there are.

What the user has set in the environment, by any of its names, stays as it is. RCCL, of ROCm, and torch for it take the same names.

- *How long a collective may wait.* The first step builds, compiles and connects, so all before its end may take long; later steps are
  alike. Beside plait's launcher, which finds a rank that hangs by looking at it, NCCL's own clock only has to be longer than
  anything that the launcher lets pass: an hour for a rank that reads, saves or compiles (`launch/hangs.py`). Under another launcher
  nobody else looks: half an hour, then torch's own ten minutes.
- `TORCH_NCCL_ASYNC_ERROR_HANDLING=3`: a rank whose collective fails or takes too long ends itself at once, without first waiting
  for communicators that may hang too. The launcher calls it a victim, and looks for the guilty one.
- `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800`: torch ends a process whose watchdog stands still for so long. By itself it takes eight
  minutes, in which a large allocation, a capture or a compiler may well hold the driver's lock.
- `TORCH_FR_BUFFER_SIZE=2000`: the flight recorder remembers so many of a rank's last collectives: kind, sizes, group, number.
- `TORCH_NCCL_DUMP_ON_TIMEOUT=1`: it writes them when NCCL's clock runs out; and, by `TORCH_NCCL_DEBUG_INFO_PIPE_FILE`, when plait's launcher
  asks for them, because some rank hangs.
- `TORCH_FR_DUMP_TEMP_FILE`: beside the run's logs, a file for each rank. `torchfrtrace` of torch reads them all and says which rank did
  not come to which collective.

*`device_id`* is given to the group where no messages go from rank to rank by themselves. With it the communicator is made at once, so that
what is wrong with the network shows at the start, and those of other groups are split from it, which is faster and takes
less memory. But every single `isend` and `irecv` then runs on the one stream of its group: a stage of a pipeline that sends to the next would
wait for it before it receives from the one before. The order of plait's messages ends either way (`tests/unit/test_order.py`); so under
`pp` a pair of ranks has a communicator of its own, made when it first sends.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from plait.config.errors import PlaitError

CHOSEN = (
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),
    (("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",), "1800"),
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
"""Names of a variable, of which torch prefers the first, and what plait sets where none of them is set."""
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
ASKED = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",)
STEM = "nccl_trace_rank_"
"""How files of the flight recorder begin; the rank follows."""
WATCHED = (timedelta(hours=2), timedelta(minutes=65))
JOINED = (timedelta(minutes=30), timedelta(minutes=10))
"""How long a collective may wait until the first step is over, and after it: beside plait's launcher, and under another."""
WRITING = 5.0
"""Seconds that ranks are given to write what their flight recorders have."""


def settle(folder: Path | None = None) -> None:
    """Set what the user has not set. `folder`: where flight recorders write, on all ranks of a run. Before the group is made."""
    for names, value in CHOSEN:
        _set(names, value)
    if folder is not None:
        for names in (RECORDS, ASKED):
            _set(names, str(folder.absolute() / STEM))


def _set(names: tuple[str, ...], value: str) -> None:
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value


def records(folder: Path, since: float = 0.0) -> list[Path]:
    """What flight recorders have written in a folder from a time (of `time.time()`) on, one file for each rank."""
    found = ((path, path.name.removeprefix(STEM)) for path in folder.glob(f"{STEM}*"))
    mine = [(int(rank), path) for path, rank in found if rank.isdecimal() and path.stat().st_mtime >= since]
    return [path for _, path in sorted(mine)]


def ask_for_records(folder: Path, ranks: Iterable[int], patience: float = WRITING) -> list[Path]:
    """Have these ranks write what their flight recorders have, and wait a little for it: before a run that hangs is ended."""
    began, asked = time.time(), 0
    for rank in ranks:
        with contextlib.suppress(OSError):  # no NCCL there, or nobody reads any more
            pipe = os.open(folder / f"{STEM}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                asked += os.write(pipe, b"1\n") > 0
            finally:
                os.close(pipe)
    end, before = time.monotonic() + patience, list[tuple[Path, int]]()
    while asked and time.monotonic() < end:
        now = [(path, path.stat().st_size) for path in records(folder, int(began))]
        if len(now) == asked and now == before and all(size for _, size in now):
            break
        before = now
        time.sleep(0.1)
    return [path for path, _ in before]


def named(error: PlaitError, folder: Path, since: float) -> PlaitError:
    """A failure that also names what flight recorders have written since then, where they did."""
    found = records(folder, int(since))
    if not found or not error.problems:
        return error
    files = str(found[0]) if len(found) == 1 else f"{found[0]} … {found[-1].name.removeprefix(STEM)}"
    line = f"torchfrtrace --prefix {STEM} {folder}    which rank did not come to which collective, of {files}"
    first, *rest = error.problems
    return PlaitError([replace(first, fix=(line, *first.fix)), *rest], error.exit_code, error.trace)
