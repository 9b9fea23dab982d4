"""Launch `plait train` with outer_sync=async: fork replica groups and servers.

A group that dies is restarted or left out. After the death of a server, all processes restart from the newest checkpoint.
"""

from collections.abc import Callable
from typing import Any

from plait.checkpoint.checkpoints import Checkpoints
from plait.cli.train_request import TrainRequest
from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.engine.resume import translate_write_errors
from plait.engine.run_directory import RunDirectory
from plait.engine.server.group import ServerSetting
from plait.engine.server.processes import run_processes
from plait.launch import fork
from plait.launch.failures import LOST_CODES, Failure
from plait.launch.stopping import StopRequest
from plait.launch.supervisor import SpareRanks


def refuse_launchers(plan: Plan, how: str) -> None:
    """Raise P063: groups and servers communicate on one machine, and only plait's launcher starts them."""
    if plan.server_count:
        what = f"outer_sync=async needs one machine and plait's own launcher: here {how}"
        why = "groups and servers communicate over the loopback of one machine, and only plait's launcher restarts them"
        fix = ("plait train … on one machine", "outer_sync=local or outer_sync=diloco    on several machines or under other launchers")
        raise PlaitError(Problem("P063", what, why=why, fix=fix))


class GroupFailures:
    """Counts dead groups, and decides if each is restarted or left out."""

    def __init__(self, plan: Plan, restarts: int, note: Callable[[str], None], stop: StopRequest | None = None):
        self.plan, self.restarts_left, self.note, self.stop = plan, restarts, note, stop
        self.alive = set(range(plan.replica_groups))

    def handle_failure(self, rank: int, failure: Failure) -> str:
        """Return "again" to restart a dead group, "without" to continue without it, or "" to end the run."""
        told = failure.all_problems()[0]
        if self.stop is not None:
            self.stop.waits = True  # a stop request is delayed until the servers save, even while a group is being built
        why = f" ({told.why.splitlines()[0]})" if told.why else ""
        if self.restarts_left > 0:
            self.restarts_left -= 1
            self.note(f"note  {told.what}{why}: restarting it ({self.restarts_left} restarts left)")
            return "again"
        self.alive.discard(rank)
        if not self.alive:
            return ""
        self.note(
            f"note  {told.what}{why}: continuing with {len(self.alive)} of {self.plan.replica_groups} groups"
        )
        return "without"


def fork_groups(
    request: TrainRequest, run: RunDirectory, listener: fork.Listener, begin: Callable[[range], None]
) -> list[dict[str, Any]]:
    """Fork groups and servers, and restart them after the death of a server. Returns the result of the first server."""
    plan, resume, left = request.plan, request.resume, request.max_restarts
    if request.workers:
        listener.on_note(
            "note  --workers has no effect under outer_sync=async: a group reads its samples when the server assigns them"
        )
    begin(range(plan.world))
    stop = StopRequest.get_current()
    stop.trains = True
    while True:
        losses = GroupFailures(plan, request.max_restarts, listener.on_note, stop)
        try:
            spare = SpareRanks(lambda rank: rank < plan.replica_groups, losses.handle_failure)
            results = run_processes(build_setting(request, run, resume), spare, listener, request.hang_timeout)
            return [results[plan.replica_groups]]
        except PlaitError as error:
            saved = Checkpoints(run.checkpoints).list_published()
            server = listener.guilty_rank >= plan.replica_groups
            if not (server and left and saved and error.codes[0] in LOST_CODES) or listener.is_stop_requested:
                raise
            left, resume, listener.guilty_rank = left - 1, "", -1
            listener.on_note(f"note  {error.problems[0].what}: restarting all processes from {saved[0].name}")


def build_setting(request: TrainRequest, run: RunDirectory, resume: str | None) -> ServerSetting:
    """Build the settings that groups and servers share."""

    def describe_run() -> None:
        with translate_write_errors(run.path):
            run.write_description(request.name, request.plan, request.arguments)

    return ServerSetting(
        request.job, request.plan, request.device, on_nan=request.on_nan, folder=run.path, save_every=request.save_every,
        keep=request.keep, resume=resume, allow_changes=request.allow_changes,
        arguments=request.arguments, on_resumed=describe_run,
    )  # fmt: skip
