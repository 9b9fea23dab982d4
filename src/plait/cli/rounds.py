"""What the launcher decides between two starts of the ranks: whether, where, and under which plan.

    a rank is lost              it is started again with all others, up to --restarts times at one step
    the same one every time     its device is left out, and the run goes on with fewer ranks under another plan
    --fewer                     that at once
    a machine is lost           the run goes on with the machines that are left
    a machine comes (back)      the ranks stop after their step, and the run goes on with all

On several machines number 0 decides, and the other launchers follow (`launch/nodes.py`). The state goes where all can read it: what
one machine's ranks kept is brought into the run's checkpoints.
"""

import shutil
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

from plait.checkpoint.checkpoints import Checkpoints
from plait.cli.other_plans import OtherPlans
from plait.cli.request import Request
from plait.config.errors import RESUMABLE, PlaitError, Problem, in_a_line
from plait.engine.elastic import Memory
from plait.engine.run_directory import RunDirectory
from plait.launch.failures import BETWEEN, LOST, OWN, SAMPLE
from plait.launch.nodes import Node
from plait.launch.rendezvous import Round
from plait.launch.stopping import Stopped, StopRequest, command
from plait.launch.supervise import Listener

AGAIN = (*LOST, "C009", SAMPLE)
"""Errors of what is lost: a rank, a machine, or a sample that may be read the next time."""
HARDWARE = ("C001", "C003")
"""Errors that a device may be to blame for."""
OFTEN = 3
"""Losses of one device from which on it is named."""
BROUGHT = "brought"
"""In the run directory: pieces of a state that machines bring together."""


class HostDevice(NamedTuple):
    """A device, by its machine's name and its number there."""

    host: str
    number: int


class Losses:
    """Counts what is lost, and judges whether the run goes on."""

    def __init__(self, limit: int, fewer: bool = False):
        self.limit, self.fewer = limit, fewer
        self.tries, self.reached, self.left_out = 0, -1, -9
        """Times in a row at one step; that step; the step at which a device was left out."""
        self.here = set[HostDevice | None]()
        """The devices that were lost at this step."""
        self.by_device = Counter[HostDevice]()
        self.raised: str | None = None
        """What the job's own code raised last, or how it ended its process, and where."""

    def again(
        self, error: BaseException, reached: int, device: HostDevice | None = None, spare: bool = True
    ) -> bool:
        """Whether the run goes on after this; `reached`: steps that were done by then; `device`: whose rank was lost; `spare`: the
        run could do without it."""
        if not self.limit or not isinstance(error, PlaitError) or error.codes[0] not in AGAIN:
            return False
        if (error.codes[0] in OWN and reached < 1) or self._same_again(error):
            return False  # nothing is lost by saying so
        if abs(reached - self.reached) > 1:
            self.tries = 0
            self.here.clear()
        self.tries, self.reached = self.tries + 1, reached
        hardware = error.codes[0] in HARDWARE and device is not None
        self.here.add(device if hardware and spare else None)
        if hardware and device is not None:
            self.by_device[device] += 1
        return self.tries <= self.limit or self.leaves_out

    def _same_again(self, error: PlaitError) -> bool:
        """Whether the job's own code has raised this of the same sample, or ended its process at the same place, before."""
        problem, before = error.problems[0], self.raised
        own = problem.code == SAMPLE or (problem.code == "C003" and "ended with exit code" in problem.what)
        self.raised = f"{problem.what} {problem.where}" if own else None
        return own and self.raised == before

    @property
    def leaves_out(self) -> bool:
        """Whether the device that was lost last is to be left out: asked for, or it alone fails at this step."""
        alone = len(self.here) == 1 and None not in self.here
        if self.fewer:
            return None not in self.here
        return self.tries > self.limit and alone and abs(self.reached - self.left_out) > 1

    def leave_out(self) -> None:
        """It is: those that stay have as many tries."""
        self.left_out, self.tries = self.reached, 0
        self.here.clear()

    def named(self, device: HostDevice | None) -> str | None:
        """A line on a device that is lost again and again."""
        if device is None or self.by_device[device] < OFTEN:
            return None
        return f"note  {self.by_device[device]} ranks were lost on {device.host}, device {device.number}: is it in order?"


class Rounds:
    """The rounds of one run: the first, and the one that follows each loss or end."""

    def __init__(
        self, request: Request, run: RunDirectory, memory: Memory | None, node: Node | None, listener: Listener
    ):
        self.request, self.run, self.memory, self.node, self.listener = request, run, memory, node, listener
        self.losses = Losses(request.restarts if memory is not None else 0, request.fewer)
        self.plans = OtherPlans(request)
        self.now = Round.first(str(request.plan), request.plan.world)

    def close(self) -> None:
        self.plans.close()

    def first(self) -> Round | None:
        """The ranks of the request; of several machines, when all have come. None: the run ended before this machine could join."""
        node = self.node
        if node is None:
            self._prepare()
            return self.now
        node.ready()
        if node.index:
            return self._joined(node)
        self._open(node.gather(), {0: tuple(range(node.each))}, 0)
        return self.now

    def after_loss(self, error: PlaitError) -> Round | None:
        """The next round; raises the error when there is none. None: the run went on without this machine, and ended."""
        node, reached = self.node, self.listener.reached
        if node is not None and node.index:
            return self._follow(node, error)
        device = self._device()
        again = self.losses.again(error, reached, device, self._spare())
        if self.memory is None or self.listener.asked or not again or (node is not None and node.cut_off):
            raise self._with_state_saved(error) from None
        stop = StopRequest.of_process()
        stop.waits = True  # a request: until what is kept in memory is where the next start finds it
        self.memory.collect()
        there = [0] if node is None else [0, *node.left()]
        devices = {k: self.now.devices[k] for k in there}
        if self.losses.leaves_out:
            self.losses.leave_out()
            machine, number = self.now.machine_of(self.listener.guilty), self.now.device_of(self.listener.guilty)
            devices[machine] = tuple(d for d in devices.get(machine, ()) if d != number)
        devices = {k: numbers for k, numbers in devices.items() if numbers}
        self._say_lost(error, device, devices != self.now.devices)
        if node is not None:
            self._bring(there)
        stop.waits = False
        if stop.number:
            raise Stopped(stop.number)
        self._open(node.newcomers() if node is not None else [], devices, self.now.number + 1, error)
        return self.now

    def stopped(self, request: Stopped) -> BaseException:
        """What the run ends with when it is asked to stop while no ranks train: C011 where there is a state to save by now."""
        what, why = "stopped while the ranks were started again", "one of them was lost, and no step was made since"
        problem = Problem("C011", what, why=why, fix=(f"{command('--resume')}    continues from the saved state",))
        error = PlaitError(problem, RESUMABLE)
        saved = self._with_state_saved(error)
        return request if saved is error else saved

    def _with_state_saved(self, error: PlaitError) -> PlaitError:
        """The error with which the run ends, after what memory holds of later steps than the disk has become a checkpoint."""
        memory = self.memory
        if memory is None or self.node is not None or error.codes[0] not in (*AGAIN, *BETWEEN):
            return error
        memory.collect()
        if (path := memory.save_newest(self.run.checkpoints)) is None:
            return error
        first, *rest = error.problems
        fix = (f"the state before it is saved in {path}", *first.fix)
        return PlaitError([replace(first, fix=fix), *rest], error.exit_code, error.trace)

    def after_end(self, results: list[dict[str, Any]]) -> Round | None:
        """After all ranks of this machine have ended well: another round, where machines have come; else None."""
        node = self.node
        if node is None:
            return None
        node.ended(self.listener.asked)
        stopped = any(result.get("stopped") for result in results)
        if node.index:
            if not stopped or not self._regroups(node):
                return None
            return self._joined(node)
        if not (stopped and node.regroups):
            return None
        there = node.left()
        if any(node.row(k).get("asked") for k in (0, *there)):
            return None
        newcomers = node.newcomers()
        self._note(f"note  going on with machine {', '.join(map(str, newcomers)) or 'none'} more")
        self._open(newcomers, {k: self.now.devices[k] for k in (0, *there)}, self.now.number + 1)
        return self.now

    def tick(self) -> None:
        """While ranks run: when machines have come and the plan with them is known, ask the ranks to stop for them."""
        node = self.node
        if node is None or node.index or node.regroups or not self.losses.limit:
            return
        newcomers = node.newcomers()
        if newcomers and self.listener.guilty < 0 and self.plans.ready(self.now.world + node.each * len(newcomers)):
            node.regroup()

    def _regroups(self, node: Node) -> bool:
        node.look()
        return node.row(0).get("regroups") == self.now.number

    def _joined(self, node: Node) -> Round | None:
        found = node.next_round(self._serve)
        self.now = found or self.now
        return found

    def _follow(self, node: Node, error: PlaitError) -> Round | None:
        """Another machine's launcher: number 0 decides."""
        if node.cut_off or self.memory is None:
            raise error
        self.memory.collect()
        try:
            return self._joined(node)
        except PlaitError:
            if node.cut_off:
                raise
            raise error from None

    def _open(
        self, newcomers: list[int], devices: dict[int, tuple[int, ...]], number: int, error: PlaitError | None = None
    ) -> None:
        """Begin a round with these devices and those of the newcomers, as far as its plan uses them."""
        node = self.node
        if node is not None:
            devices |= {k: tuple(range(node.each)) for k in newcomers}
            while len(devices) < node.least:
                node.beat()
                newcomers = node.newcomers()
                devices |= {k: tuple(range(node.each)) for k in newcomers}
        whole = Round(number, "", devices)
        try:
            plan = self.plans.of(whole.world, node.beat if node is not None else lambda: None)
        except PlaitError as impossible:
            if error is None:
                raise
            self._note(f"note  no other plan goes on: {in_a_line(impossible)}")
            raise error from None
        self.now = Round(number, str(plan), whole.cut(plan.world))
        if node is not None:
            node.open(self.now, newcomers)
        if number:
            self._note(f"note  round {number}: {plan} on {plan.world} rank{'s' if plan.world > 1 else ''}")
        self.listener.guilty = -1
        self._prepare()

    def _prepare(self) -> None:
        """Have plans ready for what is likely to be lost next: a machine, or a rank."""
        if self.memory is None:
            return
        if self.node is not None and not self.node.index and len(self.now.devices) > 1:
            self.plans.prepare(self.now.world - self.node.each)
        if self.losses.fewer:
            self.plans.prepare(self.now.world - 1)

    def _spare(self) -> bool:
        """Whether the guilty rank's device can be left out: number 0 always has a rank."""
        if self._device() is None:
            return False
        machine = self.now.machine_of(self.listener.guilty)
        return len(self.now.devices[machine]) > 1 or machine > 0

    def _device(self) -> HostDevice | None:
        rank = self.listener.guilty
        if not 0 <= rank < self.now.world:
            return None
        host = self.node.host(self.now.machine_of(rank)) if self.node is not None else "this machine"
        return HostDevice(host, self.now.device_of(rank))

    def _say_lost(self, error: PlaitError, device: HostDevice | None, fewer: bool) -> None:
        problem, losses = error.problems[0], self.losses
        why = f" ({problem.why.splitlines()[0]})" if problem.why else ""
        tried = "" if fewer else f" ({losses.tries} of {losses.limit} at this step)"
        self._note(f"note  {problem.what}{why}: starting again{' with fewer ranks' if fewer else tried}")
        line = losses.named(device)
        if line:
            self._note(line)

    def _note(self, text: str) -> None:
        self.listener.note(text)

    def _bring(self, there: list[int]) -> None:
        """Have the newest state that a machine holds, or all together, in the run's checkpoints, where every rank can read it."""
        node, memory = self.node, self.memory
        assert node is not None and memory is not None
        newest = Checkpoints(self.run.checkpoints).newest_step
        held = {k: memory.held() if k == node.index else node.ask(k, do="say what is held") for k in there}
        steps = sorted({step for found in held.values() for step in found.get("whole", []) + found.get("pieces", [])})
        for step in reversed([step for step in steps if step > newest]):
            whole = [k for k in there if step in held[k].get("whole", [])]
            if self._put_together(step, whole[:1] or [k for k in there if step in held[k].get("pieces", [])]):
                return

    def _put_together(self, step: int, givers: list[int]) -> bool:
        """Whether what these machines have of a step, one after the other, is all of it; then it is a checkpoint of the run."""
        brought, metrics = self.run.path / BROUGHT, None
        assert self.memory is not None
        try:
            for k in givers:
                metrics = self._brought(k, step) or metrics
                if self.memory.published(brought, step, self.run.checkpoints):
                    self.memory.remember(metrics)
                    return True
            return False
        finally:
            shutil.rmtree(brought, ignore_errors=True)

    def _brought(self, k: int, step: int) -> dict[str, Any] | None:
        assert self.node is not None
        order = {"do": "bring", "step": step}
        answer = self._serve(order) if k == self.node.index else self.node.ask(k, **order)
        return answer.get("metrics")

    def _serve(self, order: dict[str, Any]) -> dict[str, Any]:
        """What number 0 asks of a machine between two rounds."""
        memory = self.memory
        if memory is None:
            return {}
        if order["do"] == "bring":
            return {"metrics": memory.bring(order["step"], self.run.path / BROUGHT)}
        return memory.held()
