"""The rounds of a run: after ranks or machines fail, end or come, the launcher decides which round follows, where, and under which plan.

    a rank fails                    all ranks are restarted, up to --max-restarts times at one step
    the same one fails every time   its device is left out: fewer ranks continue under another plan
    a rank fails, with --allow-shrink      the same, at once
    a machine is lost               the other machines continue
    a machine comes (back)          the ranks stop after their step, and a round with all machines begins

On several machines number 0 decides and the other launchers follow; `launch/nodes.py` has the states of all. Before a round begins, the
newest state that machines have in memory is copied to the run's checkpoints, where all can read it.
"""

import shutil
from dataclasses import replace
from typing import Any

from plait.checkpoint.checkpoints import Checkpoints
from plait.cli.other_plans import OtherPlans
from plait.cli.rank_failures import RESTARTED, HostDevice, RankFailures
from plait.cli.request import Request
from plait.config.errors import RESUMABLE, PlaitError, Problem, in_a_line
from plait.engine.elastic import Memory
from plait.engine.run_directory import RunDirectory
from plait.launch.failures import BETWEEN
from plait.launch.nodes import Node
from plait.launch.round import Round
from plait.launch.stopping import Stopped, StopRequest, command
from plait.launch.supervise import Listener

BROUGHT = "brought"
"""The folder in the run directory to which machines copy their parts of a state."""


class RestartLoop:
    """The first round of a run, and the one that follows each failure or end. `memory` is None if ranks are not restarted."""

    def __init__(self, request: Request, run: RunDirectory, memory: Memory | None, node: Node, listener: Listener):
        self.request, self.run, self.memory, self.node, self.listener = request, run, memory, node, listener
        self.failures = RankFailures(request.max_restarts if memory is not None else 0, request.allow_shrink)
        self.plans = OtherPlans(request)

    def close(self) -> None:
        self.plans.close()

    @property
    def now(self) -> Round:
        """The round that runs, or ran last."""
        assert self.node.round is not None
        return self.node.round

    def first(self) -> Round | None:
        """The first round, once the machines have come. None if the run ended before this machine could join."""
        self.node.ready()
        if self.node.index:
            return self.node.next_round(self._bring)
        return self._open(self.node.gather(), {0: tuple(range(self.node.each))})

    def after_loss(self, error: PlaitError) -> Round | None:
        """The round after a failure; raises the error if there is none. None if the run continued without this machine, and ended."""
        node, failures, memory = self.node, self.failures, self.memory
        if node.index:
            return self._follow(error)
        again = failures.can_restart(error, self.listener.reached, self._device(), self._spare())
        if memory is None or self.listener.asked or not again or node.cut_off:
            raise self._with_state_saved(error) from None
        stop = StopRequest.of_process()
        stop.waits = True  # a request to stop waits until the state in memory is where the next start finds it
        with node.beating():
            memory.collect()
        there = [0, *node.left()]
        devices = {k: self.now.devices[k] for k in there}
        if failures.leaves_device_out:
            failures.leave_device_out()
            machine, number = self.now.machine_of(self.listener.guilty), self.now.device_of(self.listener.guilty)
            devices[machine] = tuple(d for d in devices.get(machine, ()) if d != number)
        devices = {k: numbers for k, numbers in devices.items() if numbers}
        self._say_lost(error, devices != self.now.devices)
        if node.count > 1:
            self._gather_state(there)
        stop.waits = False
        if stop.number:
            raise Stopped(stop.number)
        return self._open(node.newcomers(), devices, error)

    def after_end(self, results: list[dict[str, Any]]) -> Round | None:
        """After all ranks of this machine have returned: the next round, if they were stopped so that machines can join; else None."""
        node = self.node
        node.ended(self.listener.asked)
        if not any(result.get("stopped") for result in results) or not node.regrouped:
            return None
        if node.index:
            node.ready()
            return node.next_round(self._bring)
        there = node.left()
        if any(node.rows[k].asked for k in (0, *there)):
            return None
        newcomers = node.newcomers()
        joined = f"machine {', '.join(map(str, newcomers))} joined" if newcomers else "the machine that joined is gone"
        self._note(f"note  {joined}: restarting")
        return self._open(newcomers, {k: self.now.devices[k] for k in (0, *there)})

    def tick(self) -> None:
        """While ranks run: once machines have come and the plan with them is known, stop the ranks for a round with them."""
        node = self.node
        if node.index or node.regroups or not self.failures.limit:
            return
        newcomers = node.newcomers()
        if newcomers and self.listener.guilty < 0 and self.plans.ready(self.now.world + node.each * len(newcomers)):
            node.regroup()

    def stopped(self, request: Stopped) -> BaseException:
        """The error of a run that a signal stops between two rounds: C011 if its state was saved."""
        what, why = "stopped while the ranks were restarted", "a rank failed, and no step was completed since then"
        problem = Problem("C011", what, why=why, fix=(f"{command('--resume')}    continues from the saved state",))
        error = PlaitError(problem, RESUMABLE)
        saved = self._with_state_saved(error)
        return request if saved is error else saved

    def _follow(self, error: PlaitError) -> Round | None:
        """On every machine but number 0, which decides. Raises the error if number 0 ends the run."""
        if self.node.cut_off or self.memory is None:
            raise error
        with self.node.beating():
            self.memory.collect()
        try:
            self.node.ready(self.memory.held())
            return self.node.next_round(self._bring)
        except PlaitError:
            if self.node.cut_off:
                raise
            raise error from None

    def _open(self, newcomers: list[int], devices: dict[int, tuple[int, ...]], error: PlaitError | None = None) -> Round:
        """Begin a round on these devices and those of the newcomers, as far as its plan uses them."""
        node, number = self.node, self.node.number + 1
        devices |= {k: tuple(range(node.each)) for k in newcomers}
        while len(devices) < node.least:
            node.beat()
            newcomers = node.newcomers()
            devices |= {k: tuple(range(node.each)) for k in newcomers}
        largest = Round(number, "", devices)
        try:
            plan = self.plans.of(largest.world, node.beat)
        except PlaitError as impossible:
            if error is None:
                raise
            self._note(f"note  cannot continue with {largest.world} rank{'s' * (largest.world > 1)}: {in_a_line(impossible)}")
            raise error from None
        opened = node.open(Round(number, str(plan), largest.first(plan.world)), newcomers)
        if number:
            self._note(f"note  round {number}: {plan} on {plan.world} rank{'s' if plan.world > 1 else ''}")
        self.listener.guilty = -1
        if self.memory is not None:  # the search for the plan of a smaller round begins before a failure
            if len(opened.devices) > 1:
                self.plans.prepare(opened.world - node.each)
            if self.failures.allow_shrink:
                self.plans.prepare(opened.world - 1)
        return opened

    def _with_state_saved(self, error: PlaitError) -> PlaitError:
        """The error with which the run ends, after a state in memory that is newer than the disk's was saved as a checkpoint."""
        memory = self.memory
        if memory is None or self.node.count > 1 or error.codes[0] not in (*RESTARTED, *BETWEEN):
            return error
        memory.collect()
        if (path := memory.save_newest(self.run.checkpoints)) is None:
            return error
        first, *rest = error.problems
        fix = (f"the state before it is saved in {path}", *first.fix)
        return PlaitError([replace(first, fix=fix), *rest], error.exit_code, error.trace)

    def _device(self) -> HostDevice | None:
        """That of the rank that failed last."""
        rank = self.listener.guilty
        if not 0 <= rank < self.now.world:
            return None
        host = self.node.rows[self.now.machine_of(rank)].host if self.node.count > 1 else "this machine"
        return HostDevice(host, self.now.device_of(rank))

    def _spare(self) -> bool:
        """Whether that device can be left out: machine 0 always has a rank."""
        if self._device() is None:
            return False
        machine = self.now.machine_of(self.listener.guilty)
        return len(self.now.devices[machine]) > 1 or machine > 0

    def _say_lost(self, error: PlaitError, fewer: bool) -> None:
        problem, failures = error.problems[0], self.failures
        why = f" ({problem.why.splitlines()[0]})" if problem.why else ""
        tried = "" if fewer else f" ({failures.tries} of {failures.limit} at this step)"
        self._note(f"note  {problem.what}{why}: restarting{' with fewer ranks' if fewer else tried}")
        if line := failures.warning(self._device()):
            self._note(line)

    def _note(self, text: str) -> None:
        self.listener.note(text)

    def _gather_state(self, there: list[int]) -> None:
        """Save the newest state that one of these machines, or all of them together, have in memory as a checkpoint of the run."""
        memory = self.memory
        assert memory is not None
        newest = Checkpoints(self.run.checkpoints).newest_step
        held = {k: self.node.rows[k].held for k in there} | {0: memory.held()}
        steps = {step for found in held.values() for step in (*found.complete, *found.pieces) if step > newest}
        for step in sorted(steps, reverse=True):
            complete = [k for k in there if step in held[k].complete]
            if self._saved(step, complete[:1] or [k for k in there if step in held[k].pieces]):
                return

    def _saved(self, step: int, givers: list[int]) -> bool:
        """Copy these machines' parts of a step's state, one after the other, until it is complete, and save it. Whether it became complete."""
        memory, brought, metrics = self.memory, self.run.path / BROUGHT, None
        assert memory is not None
        try:
            for k in givers:
                metrics = (self.node.bring(k, step) if k else self._bring(step)) or metrics
                if memory.published(brought, step, self.run.checkpoints):
                    memory.remember(metrics)
                    return True
            return False
        finally:
            shutil.rmtree(brought, ignore_errors=True)

    def _bring(self, step: int) -> dict[str, Any] | None:
        """Copy this machine's part of a step's state to the run directory; the metrics of the step, if they are here."""
        return self.memory.bring(step, self.run.path / BROUGHT) if self.memory is not None else None
