"""The rows of a run's files, `metrics.jsonl` and `events/`, each looked at before it is used: a disk or a hand may have changed them."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from plait.config.errors import PlaitError, Problem

Row = dict[str, Any]
NUMBER = (int, float)


def metrics(file: Path) -> list[Row]:
    """Of `metrics.jsonl`. R009 for a row of a step or an evaluation that is none."""
    return list(_checked(file, enumerate(_lines(file), 1), _wrong_in_metrics))


def events(file: Path, step: int | None, most: int) -> dict[int, Row]:
    """The last rows of an events file, and that of `step`, by step. R009 for one that is none."""
    lines = _lines(file)
    begins = b'{"step": %d,' % (-1 if step is None else step)
    wanted = [(n, line) for n, line in enumerate(lines, 1) if n > len(lines) - most or line.startswith(begins)]
    return {row["step"]: row for row in _checked(file, wanted, _wrong_in_events) if "step" in row}


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines() if file.exists() else []


def _checked(file: Path, lines: Iterable[tuple[int, bytes]], wrong: Callable[[Row], str]) -> Iterator[Row]:
    """The objects on numbered lines; one torn by a kill is left out."""
    for n, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict):
            continue
        if why := wrong(row):
            fix = ("delete the line: checkpoints do not depend on it",)
            raise PlaitError(Problem("R009", f"{file} is damaged", why=why, where=f"{file}:{n}", fix=fix))
        yield row


def _wrong_in_metrics(row: Row) -> str:
    if "loss" in row:
        numbers = {key: row.get(key) for key in ("step", "samples", "seconds", "samples_per_s")}
        loss = {} if row["loss"] is None else {"loss": row["loss"]}
        return _no_number(numbers | loss)
    if "evaluation" in row:
        why = "" if isinstance(row["evaluation"], dict) else f"its `evaluation` is {_shown(row['evaluation'])}"
        return _no_number({"step": row.get("step")}) or why
    return ""


def _wrong_in_events(row: Row) -> str:
    if "step" not in row:
        return ""
    if why := _no_number({key: row.get(key) for key in ("step", "at", "size")}):
        return why
    spans = row.get("spans")
    rows = spans if isinstance(spans, list) else [None]
    fine = all(isinstance(span, list) and len(span) == 3 and all(map(_number, span[1:])) for span in rows)
    return "" if fine else f"its `spans` are {_shown(spans)}"


def _no_number(values: Row) -> str:
    return next((f"its `{key}` is {_shown(value)}" for key, value in values.items() if not _number(value)), "")


def _number(value: object) -> bool:
    return isinstance(value, NUMBER) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return "not there" if value is None else repr(value)[:60]
