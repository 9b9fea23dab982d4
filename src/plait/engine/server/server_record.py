"""The record of a run of groups and servers: metrics of each step, the ledger, status, and the spread of the groups' speeds."""

import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from plait.engine.engine import Engine
from plait.engine.run_directory import RunDirectory
from plait.engine.server.dealer import Dealer, DealerRules, LedgerRow
from plait.engine.server.group import ServerSetting
from plait.engine.server.state import UpdateResult
from plait.tensors.norm import finite_or_none

LEDGER_FILE = "ledger.jsonl"


@dataclass(frozen=True)
class GradientStats:
    """Statistics that a group reports for a gradient. `latency`: seconds from the deal to its arrival."""

    weight: float
    loss: float
    tokens: float
    waited: float
    computed: float
    latency: float = 0.0


@dataclass
class StepTotals:
    """Totals over the gradients of a step."""

    loss: float = 0.0
    weight: float = 0.0
    tokens: float = 0.0
    samples: int = 0


class ServerRecord:
    """The record that the lead writes. `status` is called at most ten times a second."""

    def __init__(
        self,
        setting: ServerSetting,
        status: Callable[[dict[str, Any]], None],
        note: Callable[[str], None],
        engine: Engine,
    ):
        self.setting, self.status, self.note = setting, status, note
        self.run = RunDirectory(setting.folder) if setting.folder is not None else None
        self.path = setting.folder / LEDGER_FILE if setting.folder is not None else Path(os.devnull)
        self.ledger = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self.metrics = open(self.run.metrics if self.run else os.devnull, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.hash, self.kept_rows = hashlib.sha256(), list[LedgerRow]()
        self.step, self.last, self.status_at = engine.position.step, time.perf_counter(), 0.0
        self.loss: float | None = None
        self.totals = StepTotals()
        self.recent: deque[tuple[float, int, float]] = deque(maxlen=50)
        self.paces: dict[int, deque[float]] = {}
        """Seconds per sample of each group's last portions."""
        self.waits: dict[int, float] = {}
        self.busy: dict[int, float] = {}
        self.counts = [0] * setting.plan.replica_groups
        self.process = psutil.Process()

    @property
    def digest(self) -> str:
        """Digest of all rows of the ledger so far."""
        return self.hash.hexdigest()

    def add_rows(self, rows: Iterable[LedgerRow]) -> None:
        for row in rows:
            line = json.dumps(row.to_json()) + "\n"
            self.hash.update(line.encode())
            self.ledger.write(line)
            if self.run is None:
                self.kept_rows.append(row)

    def add_lost_group(self, group: int, fence: int, dealer: Dealer) -> None:
        """Record that a group was declared dead, as a line that the digest omits."""
        self.ledger.write(
            json.dumps({"lost": group, "fence": fence, "rows": dealer.seq, "version": dealer.version}) + "\n"
        )

    def update(self, dealer: Dealer, rows: list[LedgerRow], figures: list[GradientStats], made: UpdateResult, loss: float) -> None:
        """Record an update, and the step that it completes."""
        self.add_rows(rows)
        used = [row for row in rows if not row.dropped]
        for row, told in zip(used, figures):
            self.totals.loss += told.weight * told.loss
            self.totals.weight += told.weight
            self.totals.tokens += told.tokens
            self.totals.samples += len(row.ids)
            self.counts[row.group] += len(row.ids)
            self.busy[row.group] = self.busy.get(row.group, 0.0) + told.latency
            self.paces.setdefault(row.group, deque(maxlen=20)).append(told.latency / max(1, len(row.ids)))
        self.loss = loss if self.loss is None else self.loss
        if dealer.done_clocks > self.step:
            self._write_step(dealer, made)

    def _write_step(self, dealer: Dealer, made: UpdateResult) -> None:
        now, self.totals = self.totals, StepTotals()
        at = time.perf_counter()
        seconds, self.last = max(at - self.last, 1e-9), at
        self.loss, self.step = now.loss / now.weight, dealer.done_clocks
        counts, self.counts = self.counts, [0] * len(self.counts)
        self.recent.append((seconds, now.samples, now.tokens))
        busy = [round(pace[-1], 6) if (pace := self.paces.get(g)) else 0.0 for g in range(len(counts))]
        row = {
            "step": self.step, "loss": self.loss, "norm": made.norm, "lr": made.lr, "samples": dealer.samples,
            "seconds": round(seconds, 6), "samples_per_s": round(now.samples / seconds, 2),
            "tokens_per_s": round(now.tokens / seconds, 1) if now.tokens else None, "ranks": len(counts), "samples_by_rank": counts,
            "busy_by_rank": busy, "data_by_rank": [0.0] * len(counts), "skipped": made.skipped, "spans": {},
            "version": dealer.version, "stalest": dealer.max_staleness,
        }  # fmt: skip
        self._write_metrics(row)
        if at - self.status_at > 0.1 or self.step >= dealer.steps:
            self.status_at = at
            self.status(self._make_status(dealer.steps))

    def _make_status(self, steps: int) -> dict[str, Any]:
        total, samples, words = (sum(each) for each in zip(*self.recent))
        waited = sum(self.waits.values())
        share = 1.0 - waited / max(waited + sum(self.busy.values()), 1e-9)
        return {
            "step": self.step, "steps": steps, "loss": self.loss, "rate": (words or samples) / total,
            "unit": "tok/s" if words else "samples/s", "share": share, "devices": self.setting.plan.devices,
            "memory": self.process.memory_info().rss, "comm": 1.0 - share, "data": 0.0, "data_rank": None,
            "eta": (steps - self.step) * total / len(self.recent),
        }  # fmt: skip

    def _write_metrics(self, row: dict[str, Any]) -> None:
        plain = {k: finite_or_none(v) if isinstance(v, float) else v for k, v in row.items()}
        self.metrics.write(json.dumps(plain, allow_nan=False) + "\n")

    def add_wait(self, group: int, seconds: float) -> None:
        """Add seconds that a group waited for a portion."""
        self.waits[group] = self.waits.get(group, 0.0) + seconds

    def record_evaluation(self, step: int, values: dict[str, float]) -> None:
        if values:
            self.metrics.write(
                json.dumps({"step": step, "evaluation": {k: finite_or_none(v) for k, v in values.items()}}) + "\n"
            )
            self.status({"evaluation": values, "step": step})

    def has_evaluation(self, step: int) -> bool:
        """Return whether the record has the evaluation of a step."""
        return self.run is not None and self.run.read_evaluation(step) is not None

    def summarize(self, dealer: Dealer) -> list[str]:
        """Summarize the speeds at the end, and the staleness that they require."""
        means = [sum(pace) / len(pace) for _, pace in sorted(self.paces.items()) if pace]
        if len(means) < 2:
            return []
        waited = sum(self.waits.values())
        part = waited / max(waited + sum(self.busy.values()), 1e-9)
        need, slower = compute_needed_staleness(means, dealer.rules), max(means) / max(min(means), 1e-9)
        least = (
            f"staleness={need} would avoid all waits"
            if need > dealer.rules.staleness
            else "no group has to wait for another"
        )
        return [
            f"note  groups differ by {slower:.1f}× in speed: {least}; at staleness={dealer.rules.staleness} they waited {100 * part:.0f} % "
            f"of their time for the server, and the stalest gradient was {dealer.max_staleness} versions old"
        ]

    def truncate(self, dealer: Dealer, digest: str) -> None:
        """Remove the records of steps after the checkpoint that the run resumes from."""
        assert self.run is not None
        self.metrics.close()
        self.run.truncate(dealer.done_clocks)
        self.metrics = open(self.run.metrics, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.ledger.close()
        lines = _read_ledger_lines(self.path, dealer.seq)
        for line in lines:
            if "lost" not in json.loads(line):
                self.hash.update(line.encode())
        if digest and self.digest != digest:
            self.note(
                f"note  {self.path} does not match the ledger of this checkpoint, which had {dealer.seq} rows; the run continues"
            )
        beside = self.path.with_name(f"{LEDGER_FILE}.tmp")
        beside.write_text("".join(lines), encoding="utf-8")
        os.replace(beside, self.path)
        self.ledger = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self.step = dealer.done_clocks

    def flush(self) -> None:
        """Flush all records to the files."""
        self.metrics.flush()
        self.ledger.flush()

    def close(self) -> None:
        self.metrics.close()
        self.ledger.close()


def compute_needed_staleness(seconds: list[float], rules: DealerRules) -> int:
    """Return the smallest staleness bound at which groups with these seconds per portion never wait.

    While the slowest group computes one portion, the others must be able to complete this many.

    >>> compute_needed_staleness([1, 1, 1, 3], DealerRules(4, update_per_gradient=True)), compute_needed_staleness([1, 1, 1, 3], DealerRules(4))
    (9, 3)
    """
    slowest = max(seconds)
    others = sum(slowest / each for each in seconds) - 1.0
    return math.ceil(round(others if rules.update_per_gradient else others / rules.groups, 6))


def _read_ledger_lines(path: Path, rows: int) -> list[str]:
    """Read the lines of a ledger up to a number of rows, with the death lines between them."""
    found, count = [], 0
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        try:
            count += "lost" not in json.loads(line)
        except ValueError:  # a partial line after a kill
            break
        if count > rows:
            break
        found.append(line)
    return found
