"""Ranks that another launcher started, or several machines: they agree on the run directory before they train, and each says why it failed.

No process of plait's watches over them, so nobody can compare their failures: a rank says its own, and one that lost
another rank says that. What all of them would say is said by one (`PlaitError.said`).
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait.checkpoint.checkpoints import Checkpoints
from plait.config.errors import PlaitError, Problem, trace_of
from plait.engine.build import broadcast_text
from plait.engine.run_directory import RunDirectory
from plait.launch import attempts
from plait.launch.failures import Failure, described
from plait.launch.nodes import Node
from plait.launch.place import Place
from plait.launch.progress import ProgressBoard
from plait.launch.stopping import Stopped, StopRequest
from plait.tensors.collectives import exchange

TOKEN = ".seen-by-all"
"""A file that rank 0 puts into the run directory for the others to read."""
STARTS = "starts.json"
"""A file of a run directory: which starts of a launcher made the run, or went on with it (`launch/attempts.py`)."""
SEEN = 5.0
"""Seconds in which a file must be seen on all machines of a shared file system."""


def meet(
    place: Place, group: ProcessGroup | None, device: torch.device, make: Callable[[], RunDirectory]
) -> RunDirectory:
    """The run directory, which rank 0 makes and every rank sees. L003 on all ranks when some do not.

    What rank 0 cannot make ends every rank with the same exit code.
    """
    facts: dict[str, Any] = {}
    failure: Exception | None = None
    if place.rank == 0:
        try:
            facts = _made(make())
        except Exception as error:
            failure, facts = error, {"exit_code": error.exit_code if isinstance(error, PlaitError) else 1}
    facts = json.loads(broadcast_text(json.dumps(facts), place.rank, group, device))
    if failure is not None:
        raise failure
    if "exit_code" in facts:
        raise PlaitError(Problem("L003", "rank 0 could not make the run directory"), facts["exit_code"], said=True)
    folder = _seen(facts)
    rows = torch.zeros(place.world, device=device)
    rows[place.rank] = float(folder is None)
    if group is not None:
        dist.all_reduce(rows, group=group)
    blind = [rank for rank, missing in enumerate(rows.tolist()) if missing]
    if place.rank == 0:
        (Path(facts["path"]) / TOKEN).unlink(missing_ok=True)
    if blind:
        raise _apart(facts, blind)
    assert folder is not None
    if folder != Path(facts["path"]) and place.local_rank == 0:
        print(f"note  rank {place.rank} was started in another folder than rank 0; it writes into {folder}", flush=True)
    return RunDirectory(folder)


def earlier(
    place: Place, group: ProcessGroup | None, device: torch.device, runs: Iterable[Path]
) -> tuple[list[str], str | None]:
    """The starts that the ranks belong to; and the run, with a checkpoint, that an earlier attempt of one left. On all ranks.

    `runs`: those of the job that rank 0 sees, the newest first.
    """
    said = exchange(json.dumps(attempts.starts()).encode(), group, device)
    starts = sorted({start for text in said for start in json.loads(text)})
    left = ""
    if place.rank == 0:
        found = next((run for run in runs if set(starts) & set(_starts(run))), None)
        left = str(found) if found is not None and Checkpoints(found / "checkpoints").found() else ""
    return starts, broadcast_text(left, place.rank, group, device) or None


def remember(run: RunDirectory, starts: list[str]) -> None:
    """Note in the run directory which starts it belongs to."""
    known = _starts(run.path)
    if set(starts) - set(known):
        beside = run.path / f"{STARTS}.tmp"
        beside.write_text(json.dumps(sorted({*known, *starts}), indent=1) + "\n", encoding="utf-8")
        os.replace(beside, run.path / STARTS)


def _starts(run: Path) -> list[str]:
    try:
        return [str(start) for start in json.loads((run / STARTS).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def meet_on_nodes(node: Node, make: Callable[[], RunDirectory]) -> RunDirectory:
    """The same among launchers, before there are ranks: number 0 makes the run directory, and every machine sees it.

    A machine may come later: what shows that it sees the right one stays there until the run ends (`left_by_nodes`).
    """
    if node.index == 0:
        node.give("run", _made(make()))
    facts = node.take("run")
    folder = _seen(facts)
    if folder is None:
        raise _apart(facts, [node.index * node.each + i for i in range(node.each)])
    return RunDirectory(folder)


def left_by_nodes(node: Node, run: RunDirectory) -> None:
    if node.index == 0:
        (run.path / TOKEN).unlink(missing_ok=True)


def _made(run: RunDirectory) -> dict[str, Any]:
    token = secrets.token_hex(16)
    (run.path / TOKEN).write_text(token, encoding="utf-8")
    return {"path": str(run.path), "whole": str(run.path.resolve()), "token": token, "host": socket.gethostname()}


def _seen(facts: dict[str, Any]) -> Path | None:
    """The run directory as this rank sees it, beneath its own working directory or by its whole path."""
    end = time.monotonic() + SEEN
    while True:
        for folder in (Path(facts["path"]), Path(facts["whole"])):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if (folder / TOKEN).read_text(encoding="utf-8") == facts["token"]:
                    return folder
        if time.monotonic() > end:
            return None
        time.sleep(0.1)


def _apart(facts: dict[str, Any], blind: list[int]) -> PlaitError:
    ranks = ", ".join(map(str, blind[:8])) + (", …" if len(blind) > 8 else "")
    why = f"rank 0 made {facts['whole']} on {facts['host']}; rank {ranks} cannot read it"
    shared = "--runs /a/folder/that/all/machines/share    (NFS, Lustre, …)"
    fix = (shared, "start all processes in one working directory on such a file system")
    what = "the run directory is not on a file system that all machines share"
    return PlaitError(Problem("L003", what, why=why, where=f"here: {socket.gethostname()}:{os.getcwd()}", fix=fix))


@contextlib.contextmanager
def telling(place: Place, log: Callable[[], Path | None]) -> Iterator[None]:
    """Whatever a rank raises inside becomes an error with its rank, its step and the user's line; its log gets the traceback."""
    words, begun = ProgressBoard(range(1)), place.beat

    def beat(step: int, phase: str) -> None:
        begun(step, phase)
        words.write(0, step, phase)

    place.beat = beat
    place.within = lambda phase: words.within(0, phase)
    try:
        yield
    except PlaitError:
        raise
    except (Exception, SystemExit) as error:
        trace, file = trace_of(error), log()
        if file is not None:
            with contextlib.suppress(OSError), open(file, "a", encoding="utf-8", errors="backslashreplace") as out:
                out.write(trace)
        failure = Failure.raised(place.rank, words.read(0), described(error))
        request = StopRequest.of_process()
        if failure.victim and request.number and words.read(0).step < 2:  # others had no step to save, and have ended
            raise Stopped(request.number).error() from error
        raise failure.error() from error
