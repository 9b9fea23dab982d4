"""The record of a rank during training: metrics (rank 0), events (every rank), and the status for the live line.

An event is one step's timed spans on a rank: ``{"step": 12, "epoch": 0, "start": 352, "size": 32, "spans": [["data", 0.0, 0.0004],
…]}``. Starts and durations are in seconds, relative to the step's first span, which began `at` on the host's clock: one clock for all
ranks of a host. Under `pp` the spans are those of actions: `receive F1.0`, `F1.0`, `send F1.0`. `start` and `size` give the samples
of the epoch's order that the step used: with the seed they are the ledger of samples. The first event after a restart has the number
of ranks on which the run continues: `restart`.
"""

import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from statistics import median_low
from typing import Any, Protocol

import psutil
import torch

from plait.data.batch import Batch
from plait.engine.engine import Engine
from plait.engine.memory import measure_memory, reset_peaks
from plait.engine.memory_use import MemoryUse
from plait.engine.run_directory import RunDirectory
from plait.engine.step import Step, get_span_kind
from plait.tensors.norm import finite_or_none

COMPUTE_KINDS = ("forward", "backward", "loss", "replicate", "collect")


class MetricsFollower(Protocol):
    """A reader of `metrics.jsonl` while rank 0 writes it (see `integrations/trackers`). Its methods never raise, and only `close` may
    wait."""

    def start(self, run: Path, step: int, note: Callable[[str], None]) -> None:
        """Follow the run at this path, which continues after `step`; `note` prints a line for the user."""

    def notify_row(self) -> None:
        """Called after a row was written."""

    def close(self, done: bool, alive: Callable[[], None]) -> None:
        """Called after the last row. `done`: the run ended normally or on request; call `alive` while waiting."""


class Recorder:
    """Writes one rank's record of a run. `status` is called with a dict at most ten times a second on rank 0."""

    def __init__(
        self,
        engine: Engine,
        run: RunDirectory,
        status: Callable[[dict[str, Any]], None],
        followers: tuple[MetricsFollower, ...] = (),
        note: Callable[[str], None] = print,
        on_recorded: Callable[[Step], None] = lambda step: None,
    ):
        self.engine, self.status, self.note, self.status_at = engine, status, note, 0.0
        self.on_recorded = on_recorded
        """Called with each step once it is recorded."""
        self.unread: deque[tuple[Batch, Step, float]] = deque()
        """Steps whose statistics are not on the host yet, with their time."""
        rank = engine.place.rank
        self.rank, self.world = rank, engine.plan.devices
        self.events = open(run.get_events_path(rank), "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.metrics = open(run.metrics, "a", buffering=1, encoding="utf-8") if rank == 0 else None  # noqa: SIM115
        self.followers = followers if rank == 0 else ()
        for follower in self.followers:
            follower.start(run.path, engine.position.step, note)
        self.restart_field: dict[str, int] = {"restart": self.world} if engine.position.step else {}
        """For the first event after a restart: the number of ranks on which the run continues."""
        self.recent: deque[tuple[float, dict[str, float], int, int]] = deque(maxlen=50)
        self.waits: deque[tuple[list[float], float]] = deque(maxlen=50)
        """Seconds that each rank waited for samples, and seconds that rank 0 waited in its reductions for the slowest rank."""
        self.last = time.perf_counter()
        self.row: dict[str, Any] = {}
        """Metrics of the last step, on every rank: rank 0 may be lost before it writes them."""
        self.device_bytes: list[int] = []
        self.slow = Counter[tuple[str, int]]()
        self.process = psutil.Process()
        self.run, self.uses = run, dict[str, MemoryUse]()

    def step(self, batch: Batch, step: Step) -> None:
        """Record one step once its statistics are on the host."""
        self.unread.append((batch, step, time.perf_counter()))
        self._record_ready(wait=False)

    def _record_ready(self, wait: bool) -> None:
        while self.unread and (wait or self.unread[0][1].known):
            batch, step, now = self.unread.popleft()
            if step.step <= self.engine.position.step:  # else it ended the run, whose position is the step before
                self._record(batch, step, now)
                self.on_recorded(step)

    def _record(self, batch: Batch, step: Step, now: float) -> None:
        seconds, self.last = now - self.last, now
        self._write_event(batch, step)
        spent: dict[str, float] = {}
        for name, _, took in step.spans:
            sort = get_span_kind(name)
            spent[sort] = spent.get(sort, 0.0) + took
        tokens = step.tokens * step.size // max(1, batch.count)  # lengths are equal on all ranks; scale to the batch
        self.recent.append((seconds, spent, step.size, tokens))
        row: dict[str, Any] = {
            "step": step.step, "loss": step.loss, "norm": step.norm, "lr": step.lr, "samples": step.samples,
            "seconds": round(seconds, 6), "samples_per_s": round(step.size / seconds, 2),
            "tokens_per_s": round(tokens / seconds, 1) if tokens else None,
            "ranks": len(step.by_rank), "samples_by_rank": [n for n, _ in step.by_rank],
            "busy_by_rank": [round(s, 6) for _, s in step.by_rank],
            "data_by_rank": [round(s, 6) for s in step.data_by_rank], "skipped": step.skipped,
            "spans": {k: round(v, 6) for k, v in spent.items()},
        }  # fmt: skip
        row |= {"phases": step.phases} if step.phases else {}
        row |= {"lrs": step.lrs} if len(step.lrs) > 1 else {}
        row |= {name: found for name, found in (("norms", step.norms), ("logged", step.logged)) if found}
        self.row = row
        if self.metrics is None:
            return
        if self.engine.rank_model.techniques.replicas is not None:
            replicas, outputs = self.engine.rank_model.techniques.replicas, self.engine.output_bytes
            row["device_bytes"] = self.device_bytes = replicas.device_bytes(self.engine.optimizer, outputs)
        if step.loss_scale is not None:
            row["loss_scale"] = step.loss_scale
        self.metrics.write(_to_json_line(row))
        for follower in self.followers:
            follower.notify_row()
        if step.note:
            self.note(step.note)
        busy = [seconds for _, seconds in step.by_rank]
        self._note_straggler("is {}× slower than the median rank", busy, 0.0)
        self._note_straggler("waits {}× as long for its samples as the median rank", step.data_by_rank, 0.1 * seconds)
        share = self.engine.plan.dp_rank
        ready = [data + step.by_rank[share(rank)][1] for rank, data in enumerate(step.data_by_rank)]
        self.waits.append((step.data_by_rank, max(ready) - ready[0]))
        if now - self.status_at > 0.1 or step.step == self.engine.job.steps:
            self.status_at = now
            self.status(self._make_status(step))

    def _note_straggler(self, complaint: str, spent: list[float], least: float) -> None:
        """Report once if a rank takes 1.4 times as long as the median rank, and `least` seconds more, for 50 consecutive steps."""
        median = median_low(spent)
        for rank, seconds in enumerate(spent):
            slow = seconds > 1.4 * median > 0 and seconds >= median + least
            key = complaint, rank
            self.slow[key] = self.slow[key] + 1 if slow else min(self.slow[key], 0)
            if self.slow[key] == 50:
                self.slow[key] = -(10**9)
                self.note(f"note  rank {rank} {complaint.format(f'{seconds / median:.1f}')} for 50 steps")

    def record_memory(self, when: str) -> None:
        """Record this rank's memory use, and reset the peaks. `when`: after the first step, or at the end of the run."""
        use, step = measure_memory(self.engine), self.engine.position.step
        reset_peaks(self.engine.rank_model.device)
        self.uses[when] = use
        self.run.write_memory(self.rank, {"step": step, **{name: each.to_dict() for name, each in self.uses.items()}})
        if self.metrics is not None and use.total:
            self.metrics.write(_to_json_line({"step": step, "memory": {"when": when, **use.to_dict()}}))

    def record_evaluation(self, step: int, values: dict[str, float]) -> None:
        if self.metrics is None or not values:
            return
        self.metrics.write(_to_json_line({"step": step, "evaluation": values}))
        wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if wrong:
            self.note(f"note  evaluation at step {step}: {', '.join(wrong)}")
        self.status({"evaluation": values, "step": step})

    def _write_event(self, batch: Batch, step: Step) -> None:
        origin = step.spans[0][1] if step.spans else 0.0
        spans = [[name, round(start - origin, 6), round(took, 6)] for name, start, took in step.spans]
        at = batch.position
        row = {"step": step.step, "epoch": at.epoch, "start": at.start, "size": batch.size, "at": round(origin, 6)}
        self.events.write(json.dumps(row | self.restart_field | {"spans": spans}) + "\n")
        self.restart_field = {}

    def _make_status(self, step: Step) -> dict[str, Any]:
        total = sum(r[0] for r in self.recent)
        spent = {name: sum(r[1].get(name, 0.0) for r in self.recent) for name in ("reduce", "optimizer", *COMPUTE_KINDS)}
        data = [sum(each) for each in zip(*(data for data, _ in self.waits))]
        slowest = max(range(len(data)), key=data.__getitem__)
        alike = data[slowest] - min(data) < 0.05 * total
        comm = max(0.0, spent["reduce"] - sum(others for _, others in self.waits))
        samples, tokens = sum(r[2] for r in self.recent), sum(r[3] for r in self.recent)
        useful = sum(spent[name] for name in COMPUTE_KINDS) + spent["optimizer"] / self.world
        left = self.engine.job.steps - step.step
        return {
            "step": step.step, "steps": self.engine.job.steps, "loss": step.loss, "rate": (tokens or samples) / total,
            "unit": "tok/s" if tokens else "samples/s", "share": useful / total, "devices": self.world,
            "memory": self._read_memory_bytes(), "comm": comm / total, "data": data[slowest] / total,
            "data_rank": None if alike else slowest, "eta": left * total / len(self.recent), "logged": step.logged,
        }  # fmt: skip

    def _read_memory_bytes(self) -> int:
        if self.engine.rank_model.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return self.process.memory_info().rss

    def flush(self) -> None:
        """Flush all records to the files, before a checkpoint marks their steps as done."""
        self._record_ready(wait=True)
        for file in (self.events, self.metrics):
            if file is not None:
                file.flush()

    def close(self, done: bool = True) -> None:
        """Close the files. `done`: the run ended normally or on request."""
        for file in (self.events, self.metrics):
            if file is not None:
                file.close()
        for follower in self.followers:
            follower.close(done, lambda: self.engine.place.set_phase("checkpoint"))


def _to_json_line(row: dict[str, Any]) -> str:
    """Format a line of metrics; a non-finite value becomes null."""

    def replace_nonfinite(value: object) -> Any:
        if isinstance(value, dict):
            return {k: replace_nonfinite(v) for k, v in value.items()}
        return finite_or_none(value) if isinstance(value, float) else value

    return json.dumps(replace_nonfinite(row), allow_nan=False) + "\n"
