"""A run as a Python object, returned by `plait.train` and by `Run.open`. It reads the run's files on access."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job, load_job
from plait.report.figures import make_figures, thin_points
from plait.report.page import render_page
from plait.report.picture import Series, draw_lines, draw_picture
from plait.report.run_files import RunFiles
from plait.report.summary import find_run_folder, format_run_summary, read_metric_rows, summarize_run
from plait.report.timeline import Timeline, make_timeline

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Run:
    """A run: its directory and its files. Steps count from 1.

    A notebook shows its summary and its loss curve.
    """

    path: Path
    stopped: bool | None = None
    """Whether it was stopped before its last step; None for a run opened later, because its files lack this information."""
    job: Job | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def open(path: str | Path = "runs/latest", job: Job | None = None) -> "Run":
        """Open an earlier run. `job`: its job, required by `model` if the job is not in a file. Raises R003 if the folder has no run."""
        return Run(find_run_folder(Path(path), 'plait.Run.open("{}")'), None, job)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A flat dict for each step, for example for `pandas.DataFrame`: step, loss, lr, samples_per_s, spans/forward (seconds), …

        A non-finite loss is None.
        """
        return [dict(_flatten_row(row)) for row in self._read_rows() if "loss" in row]

    @property
    def losses(self) -> list[float]:
        """The loss of each step; nan if it was not finite."""
        return [nan if row["loss"] is None else row["loss"] for row in self._read_rows() if "loss" in row]

    @property
    def loss(self) -> float | None:
        """The loss of the last step; None before the first step."""
        return next(reversed(self.losses), None)

    @property
    def steps(self) -> int:
        """Number of steps, including those before a resume."""
        return max((row["step"] for row in self._read_rows() if "loss" in row), default=0)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A dict for each evaluation: its step, and the metrics of `Job.evaluate`."""
        return [{"step": row["step"], **row["evaluation"]} for row in self._read_rows() if "evaluation" in row]

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint; None if there is none."""
        from plait.checkpoint.checkpoints import Checkpoints

        return next(iter(Checkpoints(self.path / "checkpoints").list_published()), None)

    def model(self, job: Job | None = None) -> "nn.Module":
        """Build the job's model with the weights of the newest checkpoint, on the CPU and in eval mode.

        Raises K001 without a checkpoint, and U023 if the job is unknown.
        """
        from plait.checkpoint.foreign_weights import fill_model
        from plait.model.build_model import make_plain_model

        if self.checkpoint is None:
            raise PlaitError(Problem("K001", f"the run {self.path} has no checkpoint"))
        model = make_plain_model(job or self.job or self._load_job())
        fill_model(model, self.checkpoint)
        return model.eval()

    def report(self) -> str:
        """Return the summary printed by `plait report`. Raises R004 before the first step."""
        return format_run_summary(summarize_run(self.path))

    def timeline(self, step: int | None = None) -> "TimelinePicture":
        """Return the timeline of all ranks in a step, by default one with the median time."""
        return TimelinePicture(make_timeline(RunFiles.read(self.path, step), step))

    def _read_rows(self) -> list[dict[str, Any]]:
        return read_metric_rows(self.path / "metrics.jsonl")

    def _load_job(self) -> Job:
        told = json.loads((self.path / "job.json").read_text(encoding="utf-8"))
        if Path(told["job"].partition(":")[0]).suffix != ".py":
            what = f"{self.path} has no job file of its training"
            why = f"`{told['job']}` is a Python object, not a file"
            raise PlaitError(Problem("U023", what, why=why, fix=(f'plait.Run.open("{self.path}", job)',)))
        return load_job(told["job"], told["arguments"])

    def _repr_html_(self) -> str:
        if not self.losses:
            return f"<pre>{escape(repr(self))}</pre>"
        losses = [(row["step"], row["loss"]) for row in self._read_rows() if isinstance(row.get("loss"), float)]
        curves = [_draw_curve("loss", losses)]
        found = self.evaluations
        for name in (name for name in dict.fromkeys(key for row in found for key in row) if name != "step"):
            points = [(row["step"], row[name]) for row in found if isinstance(row.get(name), (int, float))]
            curves += [_draw_curve(f"evaluation: {name}", points)] * (len(points) > 1)
        return f"<pre>{escape(self.report())}</pre>{''.join(curves)}"


@dataclass(frozen=True)
class TimelinePicture:
    """A timeline that a notebook draws like `plait report --timeline`."""

    timeline: Timeline

    def __repr__(self) -> str:
        return f"step {self.timeline.step} of {self.timeline.run}: a notebook draws it; `page` is the report of the run as HTML"

    @property
    def page(self) -> str:
        """The page of `plait report`, without predictions of the planner."""
        return render_page(self._make_figures())

    def _make_figures(self) -> dict[str, Any]:
        return make_figures([RunFiles.read(self.timeline.run, self.timeline.step)], self.timeline.step)

    def _repr_html_(self) -> str:
        return draw_picture(self._make_figures(), "timeline")


def _draw_curve(name: str, points: list[tuple[int, float]]) -> str:
    """Draw one metric by step."""
    few = thin_points(points)
    return draw_lines(name, [Series(name, [step for step, _ in few], [value for _, value in few])])


def _flatten_row(row: dict[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested values to names such as `spans/forward` and `busy_by_rank/0`."""
    for name, value in row.items():
        if isinstance(value, list):
            value = {str(i): one for i, one in enumerate(value)}
        if isinstance(value, dict):
            yield from _flatten_row(value, f"{start}{name}/")
        else:
            yield start + name, value
