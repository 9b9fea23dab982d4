"""`plait train` with outer_sync=async, the launcher's side: groups and servers are forked; a group that dies is started again or left out,
and after a server's death all start again from the newest checkpoint."""

from collections.abc import Callable
from typing import Any

from plait.checkpoint.checkpoints import Checkpoints
from plait.cli.request import Request
from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.engine.resume import writing
from plait.engine.run_directory import RunDirectory
from plait.engine.server.group import ServerSetting
from plait.engine.server.processes import start
from plait.launch import fork
from plait.launch.failures import LOST, Failure
from plait.launch.stopping import StopRequest
from plait.launch.supervise import Spare


def refuse_launchers(plan: Plan, how: str) -> None:
    """P063: groups and servers find each other on one machine, and plait's launcher starts them."""
    if plan.server_count:
        what = f"outer_sync=async needs one machine and plait's own launcher: here {how}"
        why = "groups and servers communicate over the loopback of one machine, and only plait's launcher restarts them"
        fix = ("plait train … on one machine", "outer_sync=local or outer_sync=diloco    on several machines or under other launchers")
        raise PlaitError(Problem("P063", what, why=why, fix=fix))


class GroupLosses:
    """Counts the groups that die, and says what becomes of each."""

    def __init__(self, plan: Plan, restarts: int, note: Callable[[str], None], stop: StopRequest | None = None):
        self.plan, self.left, self.note, self.stop = plan, restarts, note, stop
        self.there = set(range(plan.replica_groups))

    def lost(self, rank: int, failure: Failure) -> str:
        """What becomes of a group that has died."""
        told = failure.all_problems()[0]
        if self.stop is not None:
            self.stop.waits = True  # a request to stop waits for the servers, though a group is being built
        why = f" ({told.why.splitlines()[0]})" if told.why else ""
        if self.left > 0:
            self.left -= 1
            self.note(f"note  {told.what}{why}: it is started again ({self.left} more times)")
            return "again"
        self.there.discard(rank)
        if not self.there:
            return ""
        self.note(
            f"note  {told.what}{why}: the run goes on with {len(self.there)} of {self.plan.replica_groups} groups"
        )
        return "without"


def ranks(
    request: Request, run: RunDirectory, listener: fork.Listener, begin: Callable[[range], None]
) -> list[dict[str, Any]]:
    """Fork groups and servers, again after the death of a server. What the first server returned."""
    plan, resume, left = request.plan, request.resume, request.max_restarts
    if request.workers:
        listener.note(
            "note  --workers has no effect under outer_sync=async: a group reads the samples of a portion when it is dealt"
        )
    begin(range(plan.world))
    stop = StopRequest.of_process()
    stop.trains = True
    while True:
        losses = GroupLosses(plan, request.max_restarts, listener.note, stop)
        try:
            spare = Spare(lambda rank: rank < plan.replica_groups, losses.lost)
            results = start(setting_of(request, run, resume), spare, listener, request.hang_timeout)
            return [results[plan.replica_groups]]
        except PlaitError as error:
            saved = Checkpoints(run.checkpoints).found()
            server = listener.guilty >= plan.replica_groups
            if not (server and left and saved and error.codes[0] in LOST) or listener.asked:
                raise
            left, resume, listener.guilty = left - 1, "", -1
            listener.note(f"note  {error.problems[0].what}: all start again from {saved[0].name}")


def setting_of(request: Request, run: RunDirectory, resume: str | None) -> ServerSetting:
    """What groups and servers of a request know."""

    def described() -> None:
        with writing(run.path):
            run.describe(request.name, request.plan, request.arguments)

    return ServerSetting(
        request.job, request.plan, request.device, on_nan=request.on_nan, folder=run.path, save_every=request.save_every,
        keep=request.keep, resume=resume, allow_changes=request.allow_changes,
        arguments=request.arguments, described=described,
    )  # fmt: skip
