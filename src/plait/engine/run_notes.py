"""What a rank reports to the process that started it: lines for the terminal, warnings, and the status in the live line."""

import warnings
from collections.abc import Callable
from typing import Any, TextIO

from plait.engine.engine import Engine
from plait.engine.step import Step
from plait.launch.failures import short
from plait.launch.place import Place
from plait.parallel.context.sequences import opened_units
from plait.parallel.tensor import choose
from plait.tensors.norm import number


class RunNotes:
    """Reports of one rank. What all ranks know, rank 0 reports; what a pipeline stage knows alone, the first rank of that stage."""

    def __init__(self, place: Place):
        self.place = place
        self.send: Callable[[dict[str, Any]], None] = place.report or (lambda message: None)
        self.reported = set[str]()
        """Reasons why training is not exact that were reported."""

    def note(self, text: str) -> None:
        """A line on the terminal."""
        self.send({"kind": "note", "text": text})

    def status(self, value: dict[str, Any]) -> None:
        self.send({"kind": "status", "value": value})

    def take_warnings(self) -> None:
        """Report Python's warnings, where the launcher shows each once for all ranks."""
        if self.place.report is not None and not self.place.joined:
            warnings.showwarning = self._warning

    def _warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        text = warnings.formatwarning(message, category, filename, lineno, line)
        self.send({"kind": "warning", "text": text, "short": f"{category.__name__}: {short(str(message))}"})

    def report_unsplit(self, engine: Engine) -> None:
        """What of the model every rank holds, or computes, in full under tp and cp; and what stays uncompiled."""
        lines = [choose.summary(engine.rank_model.whole_sketch)] if engine.rank_model.plan.tp > 1 else []
        uncompiled = engine.rank_model.techniques.compiled.notes() if engine.rank_model.techniques.compiled is not None else []
        for line in (*lines, *opened_units(engine.rank_model.whole_sketch), *uncompiled) if self.place.rank == 0 else ():
            self.note(f"note  {line}")

    def report_inexact(self, engine: Engine) -> None:
        """Why training cannot equal one device, each reason once. Some show in the first step, and losses' on the last stage only."""
        reasons = engine.inexact if self.place.rank == 0 else engine.rank_model.batch_peers.inexact if first_of_stage(engine) else ()
        for line in reasons:
            if line not in self.reported:
                self.note(f"note  not exact: {line}")
                self.reported.add(line)

    def report_uncompiled(self, engine: Engine) -> None:
        """What torch.compile gave up in the last step."""
        for line in engine.rank_model.techniques.compiled.news() if engine.rank_model.techniques.compiled is not None else ():
            self.note(f"note  {line}" if self.place.rank == 0 else f"note  rank {self.place.rank}: {line}")

    def report_nonfinite_checkpoints(self, engine: Engine) -> None:
        """Checkpoints with values that are not finite."""
        while engine.checkpoints.marked and self.place.rank == 0:
            problem = engine.checkpoints.marked.pop(0)
            self.note(f"note  {problem.what}: {problem.why}")

    def report_unsaved(self, engine: Engine) -> None:
        """State of modules that steps change and checkpoints cannot hold."""
        if first_of_stage(engine):
            for name, kind in engine.carried.take().unsaved.items():
                self.note(f"note  checkpoints cannot hold {name} ({kind}), which steps change: a resumed run begins it anew")


class StepTally:
    """The last loss of a run and its skipped steps, as steps are recorded."""

    def __init__(self, notes: RunNotes):
        self.notes = notes
        self.loss: float | None = None
        self.skipped = 0

    def add(self, step: Step) -> None:
        """A step was recorded; reports why it was skipped, if it was."""
        self.loss, self.skipped = step.loss, self.skipped + step.skipped
        if step.trouble is not None and self.notes.place.rank == 0:
            self.notes.note("note  left out " + f"{step.trouble.what}\n{step.trouble.why}".replace("\n", "\n      "))

    def facts(self) -> dict[str, Any]:
        """For the result of the run."""
        return {"loss": None if self.loss is None else number(self.loss), "skipped": self.skipped}


def first_of_stage(engine: Engine) -> bool:
    """Whether this rank is the first of its pipeline stage."""
    return not any(place for axis, place in engine.rank_model.mesh.at.items() if axis != "pp")
