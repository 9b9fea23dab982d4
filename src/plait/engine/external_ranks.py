"""Ranks that an external launcher started, or several nodes: they agree on the run directory before training, and each reports its own
failure.

No plait process supervises these ranks, so no process can compare their failures. A rank reports its own failure; a rank that lost a
peer reports that. Failures common to all ranks are reported by one rank (`PlaitError.said`).
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
from plait.config.errors import PlaitError, Problem, format_trace
from plait.engine.build import broadcast_text
from plait.engine.run_directory import RunDirectory
from plait.launch import attempts
from plait.launch.failures import Failure, describe_error
from plait.launch.nodes import Node
from plait.launch.place import Place
from plait.launch.progress import ProgressBoard
from plait.launch.stopping import StopRequest, StopRequested
from plait.tensors.collectives import all_gather_bytes

TOKEN_FILE = ".seen-by-all"
"""A file that rank 0 writes into the run directory for the other ranks to read."""
STARTS_FILE = "starts.json"
"""A file of the run directory: the launcher starts that created or resumed the run (`launch/attempts.py`)."""
SEEN_TIMEOUT_S = 5.0
"""Seconds within which a file must be visible on all nodes of a shared file system."""


def agree_run_directory(
    place: Place, group: ProcessGroup | None, device: torch.device, make: Callable[[], RunDirectory]
) -> RunDirectory:
    """Create the run directory on rank 0, and check that every rank sees it. L003 on all ranks if some do not.

    If rank 0 cannot create it, every rank ends with the same exit code.
    """
    facts: dict[str, Any] = {}
    failure: Exception | None = None
    if place.rank == 0:
        try:
            facts = _write_token(make())
        except Exception as error:
            failure, facts = error, {"exit_code": error.exit_code if isinstance(error, PlaitError) else 1}
    facts = json.loads(broadcast_text(json.dumps(facts), place.rank, group, device))
    if failure is not None:
        raise failure
    if "exit_code" in facts:
        raise PlaitError(Problem("L003", "rank 0 could not create the run directory"), facts["exit_code"], said=True)
    folder = _find_directory(facts)
    rows = torch.zeros(place.world, device=device)
    rows[place.rank] = float(folder is None)
    if group is not None:
        dist.all_reduce(rows, group=group)
    blind = [rank for rank, missing in enumerate(rows.tolist()) if missing]
    if place.rank == 0:
        (Path(facts["path"]) / TOKEN_FILE).unlink(missing_ok=True)
    if blind:
        raise _make_unshared_error(facts, blind)
    assert folder is not None
    if folder != Path(facts["path"]) and place.local_rank == 0:
        print(f"note  rank {place.rank} was started in a different folder than rank 0; it writes to {folder}", flush=True)
    return RunDirectory(folder)


def find_earlier_run(
    place: Place, group: ProcessGroup | None, device: torch.device, runs: Iterable[Path]
) -> tuple[list[str], str | None]:
    """Return the launcher starts of all ranks, and the run with a checkpoint that an earlier attempt left. The same on all ranks.

    `runs`: the runs of the job that rank 0 sees, newest first.
    """
    said = all_gather_bytes(json.dumps(attempts.find_start_ids()).encode(), group, device)
    starts = sorted({start for text in said for start in json.loads(text)})
    left = ""
    if place.rank == 0:
        found = next((run for run in runs if set(starts) & set(_read_starts(run))), None)
        left = str(found) if found is not None and Checkpoints(found / "checkpoints").list_published() else ""
    return starts, broadcast_text(left, place.rank, group, device) or None


def record_starts(run: RunDirectory, starts: list[str]) -> None:
    """Record in the run directory the starts that it belongs to."""
    known = _read_starts(run.path)
    if set(starts) - set(known):
        beside = run.path / f"{STARTS_FILE}.tmp"
        beside.write_text(json.dumps(sorted({*known, *starts}), indent=1) + "\n", encoding="utf-8")
        os.replace(beside, run.path / STARTS_FILE)


def _read_starts(run: Path) -> list[str]:
    try:
        return [str(start) for start in json.loads((run / STARTS_FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def agree_on_nodes(node: Node, make: Callable[[], RunDirectory]) -> RunDirectory:
    """Create the run directory on node 0, and check that every node sees it, before any rank starts.

    A node may join later, so the token file remains until the run ends (`remove_node_token`).
    """
    if node.index == 0:
        node.publish("run", _write_token(make()))
    facts = node.await_value("run")
    folder = _find_directory(facts)
    if folder is None:
        raise _make_unshared_error(facts, [node.index * node.ranks_per_node + i for i in range(node.ranks_per_node)])
    return RunDirectory(folder)


def remove_node_token(node: Node, run: RunDirectory) -> None:
    if node.index == 0:
        (run.path / TOKEN_FILE).unlink(missing_ok=True)


def _write_token(run: RunDirectory) -> dict[str, Any]:
    token = secrets.token_hex(16)
    (run.path / TOKEN_FILE).write_text(token, encoding="utf-8")
    return {"path": str(run.path), "whole": str(run.path.resolve()), "token": token, "host": socket.gethostname()}


def _find_directory(facts: dict[str, Any]) -> Path | None:
    """Find the run directory as this rank sees it, by its relative or absolute path."""
    end = time.monotonic() + SEEN_TIMEOUT_S
    while True:
        for folder in (Path(facts["path"]), Path(facts["whole"])):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if (folder / TOKEN_FILE).read_text(encoding="utf-8") == facts["token"]:
                    return folder
        if time.monotonic() > end:
            return None
        time.sleep(0.1)


def _make_unshared_error(facts: dict[str, Any], blind: list[int]) -> PlaitError:
    ranks = ", ".join(map(str, blind[:8])) + (", …" if len(blind) > 8 else "")
    why = f"rank 0 created {facts['whole']} on {facts['host']}; rank {ranks} cannot read it"
    shared = "--runs /a/folder/that/all/machines/share    (NFS, Lustre, …)"
    fix = (shared, "start all processes in one working directory on a shared file system")
    what = "the run directory is not on a file system that all machines share"
    return PlaitError(Problem("L003", what, why=why, where=f"here: {socket.gethostname()}:{os.getcwd()}", fix=fix))


@contextlib.contextmanager
def report_failures(place: Place, log: Callable[[], Path | None]) -> Iterator[None]:
    """Convert an exception inside to an error with its rank, its step and the user's line; write the traceback to the rank's log."""
    words, begun = ProgressBoard(range(1)), place.beat

    def beat(step: int, phase: str) -> None:
        begun(step, phase)
        words.write(0, step, phase)

    place.beat = beat
    place.set_phase = lambda phase: words.write_phase(0, phase)
    try:
        yield
    except PlaitError:
        raise
    except (Exception, SystemExit) as error:
        trace, file = format_trace(error), log()
        if file is not None:
            with contextlib.suppress(OSError), open(file, "a", encoding="utf-8", errors="backslashreplace") as out:
                out.write(trace)
        failure = Failure.from_report(place.rank, words.read(0), describe_error(error))
        request = StopRequest.get_current()
        if failure.victim and request.number and words.read(0).step < 2:  # other ranks had no step to save, and have exited
            raise StopRequested(request.number).error() from error
        raise failure.error() from error
