"""A run as a value in Python: what `plait.train` returns, and `Run.open` of an earlier one. It reads the run's files when asked."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job, load_job
from plait.report.figures import figures, thinned
from plait.report.page import page
from plait.report.picture import Series, lines, picture
from plait.report.run_files import RunFiles
from plait.report.summary import metrics, run_folder, summary, text
from plait.report.timeline import Timeline, timeline

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Run:
    """A run: its directory, and what lies in it. Steps count from 1.

    A notebook shows it as a summary and the curve of its loss.
    """

    path: Path
    stopped: bool | None = None
    """Whether somebody stopped it before its last step; None of a run that was opened later, whose files do not say."""
    job: Job | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def open(path: str | Path = "runs/latest", job: Job | None = None) -> "Run":
        """An earlier run. `job`: what it trained, for `model`, where that does not lie in a file. R003 when there is no run."""
        return Run(run_folder(Path(path), 'plait.Run.open("{}")'), None, job)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A flat dict for each step, such as `pandas.DataFrame` takes: step, loss, lr, samples_per_s, spans/forward (seconds), …

        A loss that was not finite is None.
        """
        return [dict(_flat(row)) for row in self._rows() if "loss" in row]

    @property
    def losses(self) -> list[float]:
        """The loss of each step; nan where it was not finite."""
        return [nan if row["loss"] is None else row["loss"] for row in self._rows() if "loss" in row]

    @property
    def loss(self) -> float | None:
        """The loss of the last step; None when no step was made."""
        return next(reversed(self.losses), None)

    @property
    def steps(self) -> int:
        """How many steps were made, also before it was resumed."""
        return max((row["step"] for row in self._rows() if "loss" in row), default=0)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A dict for each evaluation: step, and the metrics of `Job.evaluate`."""
        return [{"step": row["step"], **row["evaluation"]} for row in self._rows() if "evaluation" in row]

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint; None when nothing was saved."""
        from plait.checkpoint.checkpoints import Checkpoints

        return next(iter(Checkpoints(self.path / "checkpoints").found()), None)

    def model(self, job: Job | None = None) -> "nn.Module":
        """The job's model with the weights of the newest checkpoint, on the CPU and in eval mode.

        K001 when nothing was saved, U023 when it is not known what was trained.
        """
        from plait.checkpoint.opening import fill
        from plait.model.make import plain_model

        if self.checkpoint is None:
            raise PlaitError(Problem("K001", f"the run {self.path} has no checkpoint"))
        model = plain_model(job or self.job or self._job_of_file())
        fill(model, self.checkpoint)
        return model.eval()

    def report(self) -> str:
        """The summary that `plait report` prints. R004 when no step was made."""
        return text(summary(self.path))

    def timeline(self, step: int | None = None) -> "TimelinePicture":
        """What each rank did in a step, by default in one that took the median time."""
        return TimelinePicture(timeline(RunFiles.read(self.path, step), step))

    def _rows(self) -> list[dict[str, Any]]:
        return metrics(self.path / "metrics.jsonl")

    def _job_of_file(self) -> Job:
        told = json.loads((self.path / "job.json").read_text(encoding="utf-8"))
        if Path(told["job"].partition(":")[0]).suffix != ".py":
            what = f"{self.path} does not know the job that it trained"
            why = f"`{told['job']}` was given as a value, in Python"
            raise PlaitError(Problem("U023", what, why=why, fix=(f'plait.Run.open("{self.path}", job)',)))
        return load_job(told["job"], told["arguments"])

    def _repr_html_(self) -> str:
        if not self.losses:
            return f"<pre>{escape(repr(self))}</pre>"
        losses = [(row["step"], row["loss"]) for row in self._rows() if isinstance(row.get("loss"), float)]
        curves = [_curve("loss", losses)]
        found = self.evaluations
        for name in (name for name in dict.fromkeys(key for row in found for key in row) if name != "step"):
            points = [(row["step"], row[name]) for row in found if isinstance(row.get(name), (int, float))]
            curves += [_curve(f"evaluation: {name}", points)] * (len(points) > 1)
        return f"<pre>{escape(self.report())}</pre>{''.join(curves)}"


@dataclass(frozen=True)
class TimelinePicture:
    """A timeline that a notebook shows as `plait report --timeline` draws it."""

    timeline: Timeline

    def __repr__(self) -> str:
        return f"step {self.timeline.step} of {self.timeline.run}: a notebook draws it; `page` is the report of the run as HTML"

    @property
    def page(self) -> str:
        """The page of `plait report`, without predictions of the planner."""
        return page(self._figures())

    def _figures(self) -> dict[str, Any]:
        return figures([RunFiles.read(self.timeline.run, self.timeline.step)], self.timeline.step)

    def _repr_html_(self) -> str:
        return picture(self._figures(), "timeline")


def _curve(name: str, points: list[tuple[int, float]]) -> str:
    """One number by step."""
    few = thinned(points)
    return lines(name, [Series(name, [step for step, _ in few], [value for _, value in few])])


def _flat(row: dict[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """`spans/forward` and `busy_by_rank/0` for what is nested."""
    for name, value in row.items():
        if isinstance(value, list):
            value = {str(i): one for i, one in enumerate(value)}
        if isinstance(value, dict):
            yield from _flat(value, f"{start}{name}/")
        else:
            yield start + name, value
