"""What a run of groups and a server leaves behind: metrics of each step, the ledger, status; and the spread of the groups' speeds."""

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
from plait.engine.server.dealing import Dealer, LedgerRow, Rules
from plait.engine.server.group import ServerSetting
from plait.engine.server.state import Made
from plait.tensors.norm import number

FILE = "ledger.jsonl"


@dataclass(frozen=True)
class Figures:
    """What a group tells of a gradient. `took`: seconds from the deal to its arrival."""

    weight: float
    loss: float
    tokens: float
    waited: float
    computed: float
    took: float = 0.0


@dataclass
class OfStep:
    """What the gradients of a step add up to."""

    loss: float = 0.0
    weight: float = 0.0
    tokens: float = 0.0
    samples: int = 0


class ServerRecord:
    """Written by the lead. `status` is called at most ten times a second."""

    def __init__(
        self,
        setting: ServerSetting,
        status: Callable[[dict[str, Any]], None],
        note: Callable[[str], None],
        engine: Engine,
    ):
        self.setting, self.status, self.note = setting, status, note
        self.run = RunDirectory(setting.folder) if setting.folder is not None else None
        self.path = setting.folder / FILE if setting.folder is not None else Path(os.devnull)
        self.ledger = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self.metrics = open(self.run.metrics if self.run else os.devnull, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.hash, self.kept = hashlib.sha256(), list[LedgerRow]()
        self.step, self.last, self.told = engine.position.step, time.perf_counter(), 0.0
        self.loss: float | None = None
        self.now = OfStep()
        self.recent: deque[tuple[float, int, float]] = deque(maxlen=50)
        self.paces: dict[int, deque[float]] = {}
        """Seconds for each sample, of each group's last portions."""
        self.waits: dict[int, float] = {}
        self.busy: dict[int, float] = {}
        self.counts = [0] * setting.plan.replica_groups
        self.process = psutil.Process()

    @property
    def digest(self) -> str:
        """Of all rows of the ledger so far."""
        return self.hash.hexdigest()

    def rows(self, rows: Iterable[LedgerRow]) -> None:
        for row in rows:
            line = json.dumps(row.to_json()) + "\n"
            self.hash.update(line.encode())
            self.ledger.write(line)
            if self.run is None:
                self.kept.append(row)

    def lost(self, group: int, fence: int, dealer: Dealer) -> None:
        """A group was declared dead: a line beside the rows, which the digest leaves out."""
        self.ledger.write(
            json.dumps({"lost": group, "fence": fence, "rows": dealer.seq, "version": dealer.version}) + "\n"
        )

    def update(self, dealer: Dealer, rows: list[LedgerRow], figures: list[Figures], made: Made, loss: float) -> None:
        """Record an update, and the step that ends with it."""
        self.rows(rows)
        used = [row for row in rows if not row.dropped]
        for row, told in zip(used, figures):
            self.now.loss += told.weight * told.loss
            self.now.weight += told.weight
            self.now.tokens += told.tokens
            self.now.samples += len(row.ids)
            self.counts[row.group] += len(row.ids)
            self.busy[row.group] = self.busy.get(row.group, 0.0) + told.took
            self.paces.setdefault(row.group, deque(maxlen=20)).append(told.took / max(1, len(row.ids)))
        self.loss = loss if self.loss is None else self.loss
        if dealer.done > self.step:
            self._step(dealer, made)

    def _step(self, dealer: Dealer, made: Made) -> None:
        now, self.now = self.now, OfStep()
        at = time.perf_counter()
        seconds, self.last = max(at - self.last, 1e-9), at
        self.loss, self.step = now.loss / now.weight, dealer.done
        counts, self.counts = self.counts, [0] * len(self.counts)
        self.recent.append((seconds, now.samples, now.tokens))
        busy = [round(pace[-1], 6) if (pace := self.paces.get(g)) else 0.0 for g in range(len(counts))]
        row = {
            "step": self.step, "loss": self.loss, "norm": made.norm, "lr": made.lr, "samples": dealer.samples,
            "seconds": round(seconds, 6), "samples_per_s": round(now.samples / seconds, 2),
            "tokens_per_s": round(now.tokens / seconds, 1) if now.tokens else None, "ranks": len(counts), "samples_by_rank": counts,
            "busy_by_rank": busy, "data_by_rank": [0.0] * len(counts), "skipped": made.skipped, "spans": {},
            "version": dealer.version, "stalest": dealer.stalest,
        }  # fmt: skip
        self._write(row)
        if at - self.told > 0.1 or self.step >= dealer.steps:
            self.told = at
            self.status(self._status(dealer.steps))

    def _status(self, steps: int) -> dict[str, Any]:
        total, samples, words = (sum(each) for each in zip(*self.recent))
        waited = sum(self.waits.values())
        share = 1.0 - waited / max(waited + sum(self.busy.values()), 1e-9)
        return {
            "step": self.step, "steps": steps, "loss": self.loss, "rate": (words or samples) / total,
            "unit": "tok/s" if words else "samples/s", "share": share, "devices": self.setting.plan.devices,
            "memory": self.process.memory_info().rss, "comm": 1.0 - share, "data": 0.0, "data_rank": None,
            "eta": (steps - self.step) * total / len(self.recent),
        }  # fmt: skip

    def _write(self, row: dict[str, Any]) -> None:
        plain = {k: number(v) if isinstance(v, float) else v for k, v in row.items()}
        self.metrics.write(json.dumps(plain, allow_nan=False) + "\n")

    def waited(self, group: int, seconds: float) -> None:
        """A group has waited so long for a portion."""
        self.waits[group] = self.waits.get(group, 0.0) + seconds

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        if values:
            self.metrics.write(
                json.dumps({"step": step, "evaluation": {k: number(v) for k, v in values.items()}}) + "\n"
            )
            self.status({"evaluation": values, "step": step})

    def evaluated(self, step: int) -> bool:
        """Whether the record has the evaluation of a step."""
        return self.run is not None and self.run.evaluation(step) is not None

    def summary(self, dealer: Dealer) -> list[str]:
        """What is to be said at the end of the speeds, and of the staleness that they need."""
        means = [sum(pace) / len(pace) for _, pace in sorted(self.paces.items()) if pace]
        if len(means) < 2:
            return []
        waited = sum(self.waits.values())
        part = waited / max(waited + sum(self.busy.values()), 1e-9)
        need, slower = needed(means, dealer.rules), max(means) / max(min(means), 1e-9)
        least = (
            f"staleness={need} would let none wait for another"
            if need > dealer.rules.staleness
            else "none has to wait for another"
        )
        return [
            f"note  groups differ by {slower:.1f}× in speed: {least}; at staleness={dealer.rules.staleness} they waited {100 * part:.0f} % "
            f"of their time for the server, and the stalest gradient was {dealer.stalest} versions old"
        ]

    def cut(self, dealer: Dealer, digest: str) -> None:
        """A run goes on from a checkpoint: forget what is recorded of later steps."""
        assert self.run is not None
        self.metrics.close()
        self.run.cut(dealer.done)
        self.metrics = open(self.run.metrics, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.ledger.close()
        lines = _up_to(self.path, dealer.seq)
        for line in lines:
            if "lost" not in json.loads(line):
                self.hash.update(line.encode())
        if digest and self.digest != digest:
            self.note(
                f"note  {self.path} is not the ledger of this checkpoint, which had {dealer.seq} rows: it goes on all the same"
            )
        beside = self.path.with_name(f"{FILE}.tmp")
        beside.write_text("".join(lines), encoding="utf-8")
        os.replace(beside, self.path)
        self.ledger = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self.step = dealer.done

    def flush(self) -> None:
        """Everything recorded so far is in the files."""
        self.metrics.flush()
        self.ledger.flush()

    def close(self) -> None:
        self.metrics.close()
        self.ledger.close()


def needed(seconds: list[float], rules: Rules) -> int:
    """The smallest bound at which groups that take so long for a portion never wait: while the slowest computes one, the others
    make so many.

    >>> needed([1, 1, 1, 3], Rules(4, each=True)), needed([1, 1, 1, 3], Rules(4))
    (9, 3)
    """
    slowest = max(seconds)
    others = sum(slowest / each for each in seconds) - 1.0
    return math.ceil(round(others if rules.each else others / rules.groups, 6))


def _up_to(path: Path, rows: int) -> list[str]:
    """The lines of a ledger with its first rows, and what is said between them."""
    found, count = [], 0
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        try:
            count += "lost" not in json.loads(line)
        except ValueError:  # torn by a kill
            break
        if count > rows:
            break
        found.append(line)
    return found
