"""Restart loop of a run. A round is one start of the ranks; after failures, ends or new nodes, the launcher decides on the next round.

    a rank fails                    all ranks are restarted, up to --max-restarts times at one step
    the same rank fails every time  its device is excluded: fewer ranks continue under another plan
    a rank fails, --allow-shrink    its device is excluded at once
    a node is lost                  the other nodes continue
    a node joins                    the ranks stop after their step, and a round with all nodes begins

With several nodes, node 0 decides and the other launchers follow; `launch/nodes.py` has the state of all nodes. Before a round begins,
the newest snapshot in the memory of the nodes is copied to the run's checkpoints, where all nodes can read it.
"""

import shutil
from dataclasses import replace
from typing import Any

from plait.checkpoint.checkpoints import Checkpoints
from plait.cli.fallback_plans import FallbackPlans
from plait.cli.rank_failures import RESTARTABLE, HostDevice, RankFailures
from plait.cli.train_request import TrainRequest
from plait.config.errors import RESUMABLE, PlaitError, Problem, summarize_error
from plait.engine.elastic import SnapshotStore
from plait.engine.run_directory import RunDirectory
from plait.launch.failures import BETWEEN_STEP_CODES
from plait.launch.nodes import Node
from plait.launch.round import Round
from plait.launch.stopping import StopRequest, StopRequested, rebuild_command
from plait.launch.supervisor import Listener

TRANSFER_FOLDER = "brought"
"""Folder in the run directory to which nodes copy their parts of a snapshot."""


class RestartLoop:
    """Starts the first round of a run, and the next one after each failure or end. `memory` is None if ranks are not restarted."""

    def __init__(self, request: TrainRequest, run: RunDirectory, memory: SnapshotStore | None, node: Node, listener: Listener):
        self.request, self.run, self.memory, self.node, self.listener = request, run, memory, node, listener
        self.failures = RankFailures(request.max_restarts if memory is not None else 0, request.allow_shrink)
        self.plans = FallbackPlans(request)

    def close(self) -> None:
        self.plans.close()

    @property
    def current(self) -> Round:
        """The running round, or the last one."""
        assert self.node.round is not None
        return self.node.round

    def start(self) -> Round | None:
        """Return the first round when all nodes have joined. Returns None if the run ended before this node could join."""
        self.node.announce_ready()
        if self.node.index:
            return self.node.await_round(self._copy_state)
        return self._begin_round(self.node.gather_nodes(), {0: tuple(range(self.node.ranks_per_node))})

    def restart_after_failure(self, error: PlaitError) -> Round | None:
        """Return the round after a failure, or raise the error. Returns None if the run continued without this node, and ended."""
        node, failures, memory = self.node, self.failures, self.memory
        if node.index:
            return self._follow_leader(error)
        again = failures.can_restart(error, self.listener.steps_done, self._find_failed_device(), self._can_exclude_device())
        if memory is None or self.listener.is_stop_requested or not again or node.is_cut_off:
            raise self._save_state(error) from None
        stop = StopRequest.get_current()
        stop.waits = True  # a stop request waits until the snapshot in memory is saved for the next start
        with node.keep_alive():
            memory.collect()
        there = [0, *node.list_remaining()]
        devices = {k: self.current.devices[k] for k in there}
        if failures.should_exclude_device:
            failures.exclude_device()
            machine, number = self.current.node_of(self.listener.guilty_rank), self.current.device_of(self.listener.guilty_rank)
            devices[machine] = tuple(d for d in devices.get(machine, ()) if d != number)
        devices = {k: numbers for k, numbers in devices.items() if numbers}
        self._report_failure(error, devices != self.current.devices)
        if node.count > 1:
            self._gather_state(there)
        stop.waits = False
        if stop.number:
            raise StopRequested(stop.number)
        return self._begin_round(node.list_newcomers(), devices, error)

    def continue_after_end(self, results: list[dict[str, Any]]) -> Round | None:
        """Return the next round if all ranks of this node stopped so that nodes can join; else None."""
        node = self.node
        node.announce_end(self.listener.is_stop_requested)
        if not any(result.get("stopped") for result in results) or not node.is_regrouped:
            return None
        if node.index:
            node.announce_ready()
            return node.await_round(self._copy_state)
        there = node.list_remaining()
        if any(node.rows[k].asked for k in (0, *there)):
            return None
        newcomers = node.list_newcomers()
        joined = f"node {', '.join(map(str, newcomers))} joined" if newcomers else "the node that joined is gone"
        self._print_note(f"note  {joined}: restarting")
        return self._begin_round(newcomers, {k: self.current.devices[k] for k in (0, *there)})

    def tick(self) -> None:
        """While ranks run: when nodes have joined and the plan with them is ready, stop the ranks for a round with them."""
        node = self.node
        if node.index or node.regroups or not self.failures.limit:
            return
        newcomers = node.list_newcomers()
        if newcomers and self.listener.guilty_rank < 0 and self.plans.is_ready(self.current.world + node.ranks_per_node * len(newcomers)):
            node.regroup()

    def build_stop_error(self, request: StopRequested) -> BaseException:
        """Build the error of a run that a signal stops between two rounds: C011 if its snapshot was saved."""
        what, why = "stopped while the ranks were restarted", "a rank failed, and no step was completed since then"
        problem = Problem("C011", what, why=why, fix=(f"{rebuild_command('--resume')}    continues from the saved state",))
        error = PlaitError(problem, RESUMABLE)
        saved = self._save_state(error)
        return request if saved is error else saved

    def _follow_leader(self, error: PlaitError) -> Round | None:
        """Wait for the decision of node 0, on all other nodes. Raises the error if node 0 ends the run."""
        if self.node.is_cut_off or self.memory is None:
            raise error
        with self.node.keep_alive():
            self.memory.collect()
        try:
            self.node.announce_ready(self.memory.list_states())
            return self.node.await_round(self._copy_state)
        except PlaitError:
            if self.node.is_cut_off:
                raise
            raise error from None

    def _begin_round(self, newcomers: list[int], devices: dict[int, tuple[int, ...]], error: PlaitError | None = None) -> Round:
        """Begin a round on these devices and those of the newcomers, as far as its plan uses them."""
        node, number = self.node, self.node.round_number + 1
        devices |= {k: tuple(range(node.ranks_per_node)) for k in newcomers}
        while len(devices) < node.min_nodes:
            node.send_heartbeat()
            newcomers = node.list_newcomers()
            devices |= {k: tuple(range(node.ranks_per_node)) for k in newcomers}
        largest = Round(number, "", devices)
        try:
            plan = self.plans.wait_for(largest.world, node.send_heartbeat)
        except PlaitError as impossible:
            if error is None:
                raise
            self._print_note(f"note  cannot continue with {largest.world} rank{'s' * (largest.world > 1)}: {summarize_error(impossible)}")
            raise error from None
        opened = node.open_round(Round(number, str(plan), largest.limit_devices(plan.world)), newcomers)
        if number:
            self._print_note(f"note  round {number}: {plan} on {plan.world} rank{'s' if plan.world > 1 else ''}")
        self.listener.guilty_rank = -1
        if self.memory is not None:  # the search for the plan of a smaller round starts before a failure
            if len(opened.devices) > 1:
                self.plans.prepare(opened.world - node.ranks_per_node)
            if self.failures.allow_shrink:
                self.plans.prepare(opened.world - 1)
        return opened

    def _save_state(self, error: PlaitError) -> PlaitError:
        """Save a snapshot that is newer than the checkpoints, and return the error with a fix that names it."""
        memory = self.memory
        if memory is None or self.node.count > 1 or error.codes[0] not in (*RESTARTABLE, *BETWEEN_STEP_CODES):
            return error
        memory.collect()
        if (path := memory.save_newest(self.run.checkpoints)) is None:
            return error
        first, *rest = error.problems
        fix = (f"the state before it is saved in {path}", *first.fix)
        return PlaitError([replace(first, fix=fix), *rest], error.exit_code, error.trace)

    def _find_failed_device(self) -> HostDevice | None:
        """Return the device of the rank that failed last."""
        rank = self.listener.guilty_rank
        if not 0 <= rank < self.current.world:
            return None
        host = self.node.rows[self.current.node_of(rank)].host if self.node.count > 1 else "this machine"
        return HostDevice(host, self.current.device_of(rank))

    def _can_exclude_device(self) -> bool:
        """Return True if that device can be excluded. Node 0 always has a rank."""
        if self._find_failed_device() is None:
            return False
        machine = self.current.node_of(self.listener.guilty_rank)
        return len(self.current.devices[machine]) > 1 or machine > 0

    def _report_failure(self, error: PlaitError, fewer: bool) -> None:
        problem, failures = error.problems[0], self.failures
        why = f" ({problem.why.splitlines()[0]})" if problem.why else ""
        tried = "" if fewer else f" ({failures.tries} of {failures.limit} at this step)"
        self._print_note(f"note  {problem.what}{why}: restarting{' with fewer ranks' if fewer else tried}")
        if line := failures.format_warning(self._find_failed_device()):
            self._print_note(line)

    def _print_note(self, text: str) -> None:
        self.listener.on_note(text)

    def _gather_state(self, there: list[int]) -> None:
        """Save the newest snapshot that one of these nodes, or all of them together, have in memory as a checkpoint of the run."""
        memory = self.memory
        assert memory is not None
        newest = Checkpoints(self.run.checkpoints).newest_step
        held = {k: self.node.rows[k].held for k in there} | {0: memory.list_states()}
        steps = {step for found in held.values() for step in (*found.complete, *found.pieces) if step > newest}
        for step in sorted(steps, reverse=True):
            complete = [k for k in there if step in held[k].complete]
            if self._save_step(step, complete[:1] or [k for k in there if step in held[k].pieces]):
                return

    def _save_step(self, step: int, givers: list[int]) -> bool:
        """Copy these nodes' parts of a snapshot one by one until it is complete, and save it. Returns True if it became complete."""
        memory, brought, metrics = self.memory, self.run.path / TRANSFER_FOLDER, None
        assert memory is not None
        try:
            for k in givers:
                metrics = (self.node.request_copy(k, step) if k else self._copy_state(step)) or metrics
                if memory.publish_step(brought, step, self.run.checkpoints):
                    memory.write_metrics(metrics)
                    return True
            return False
        finally:
            shutil.rmtree(brought, ignore_errors=True)

    def _copy_state(self, step: int) -> dict[str, Any] | None:
        """Copy this node's part of a snapshot to the run directory. Returns the metrics of the step if they are here."""
        return self.memory.copy_step(step, self.run.path / TRANSFER_FOLDER) if self.memory is not None else None
