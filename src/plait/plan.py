"""The plan: how to split a job. A small frozen value; a line of text, a TOML file or JSON, the same words in all.

>>> Plan.parse("dp=2 microbatches=3").devices
2
"""

import json
import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, Problem, did_you_mean


@dataclass(frozen=True)
class Key:
    """One key of a plan: its TOML table, its type, what it may be, and one line of help."""

    table: str
    kind: type
    help: str
    choices: tuple[str, ...] = ()
    wildcard: bool = False


KEYS: dict[str, Key] = {
    "dp": Key("mesh", int, "copies of the model, each on its share of the batch; * fills the processes", wildcard=True),
    "microbatches": Key("step", int, "parts each share is computed in; gradients are summed once, in the last"),
    "precision": Key("compute", str, "number format of the forward pass", ("fp32", "bf16", "fp16")),
    "compile": Key("compute", bool, "torch.compile the model"),
    "processes": Key(
        "compute", str, "per-device, or one: the classic DataParallel with threads", ("per-device", "one")
    ),
}


@dataclass(frozen=True)
class Plan:
    """How to split a job. `dp` is 0 while it is the wildcard ``*`` (see `fill`)."""

    dp: int = 1
    microbatches: int = 1
    precision: str = "fp32"
    compile: bool = False
    processes: str = "per-device"

    @property
    def devices(self) -> int:
        """Devices the plan computes on."""
        return self.dp

    @property
    def world(self) -> int:
        """Processes the plan runs in."""
        return 1 if self.processes == "one" else self.devices

    @property
    def ranks(self) -> int:
        """Data-parallel processes: between how many the samples of a batch are shared out."""
        return self.world

    def fill(self, nproc: int | None) -> "Plan":
        """The plan with its wildcard filled by `nproc` processes. P001 when the counts do not agree."""
        if self.dp == 0:
            return replace(self, dp=nproc or 1)
        if nproc is not None and nproc != self.world:
            how = f"dp={self.dp}" if self.processes != "one" else f"dp={self.dp} in processes=one"
            raise PlaitError(
                Problem(
                    "P001",
                    f"the plan needs {_count(self.world, 'process')}, {_count(nproc, 'process')} were asked for",
                    why=f"{how} = {self.world}",
                    fix=(
                        f"--nproc {self.world}",
                        f'--plan "{replace(self, dp=nproc)}"',
                        '--plan "dp=*"  (fills the rest)',
                    ),
                )
            )
        return self

    @staticmethod
    def parse(text: str) -> "Plan":
        """A plan from one line of ``key=value`` words. All faults are raised together."""
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        for word in text.split():
            key, equals, value = word.partition("=")
            where = f'--plan "{text}"'
            if not equals:
                problems.append(Problem("T002", f"`{word}` is not key=value", where=where, fix=(f"{word}=…",)))
            elif key in values:
                problems.append(Problem("T002", f"`{key}` is given twice", where=where, fix=("keep one",)))
            else:
                values[key] = _literal(value)
        return _checked(values, f'--plan "{text}"', problems)

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """A plan from a TOML file (or JSON when the name ends in .json), with the tables of `KEYS`."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise PlaitError(
                Problem(
                    "T003", f"cannot read the plan {path}", why=error.strerror or str(error), fix=('--plan "dp=2"',)
                )
            ) from None
        except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            kind = "JSON" if path.suffix == ".json" else "TOML"
            raise PlaitError(Problem("T003", f"{path} is not {kind}", why=str(error), where=str(path))) from None
        return _checked(*_flatten(data, path))

    @staticmethod
    def read(text: str) -> "Plan":
        """What ``--plan`` takes: a file when it names one, else a line."""
        if "=" not in text and text.strip():
            return Plan.load(text)
        return Plan.parse(text)

    def changed(self) -> dict[str, Any]:
        """The keys that differ from the default, in the order of `KEYS`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        return " ".join(f"{k}={_text(k, v)}" for k, v in self.changed().items()) or "dp=1"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_toml(self) -> str:
        """The plan as a TOML file; `Plan.load` reads it back to an equal plan."""
        lines: list[str] = []
        for table in dict.fromkeys(key.table for key in KEYS.values()):
            rows = [(k, v) for k, v in asdict(self).items() if KEYS[k].table == table]
            lines += [f"[{table}]", *(f"{k} = {_toml(k, v)}" for k, v in rows), ""]
        return "\n".join(lines)


def _flatten(data: Any, path: Path) -> tuple[dict[str, Any], str, list[Problem]]:
    tables = tuple(dict.fromkeys(key.table for key in KEYS.values()))
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    if not isinstance(data, dict):
        return values, str(path), [Problem("T003", f"{path} is not a table of plan keys", where=str(path))]
    for name, content in data.items():
        if name in KEYS and not isinstance(content, dict):
            values[name] = content
        elif name not in tables or not isinstance(content, dict):
            problems.append(
                Problem(
                    "T001",
                    f"unknown table in {path.name}:  [{name}]        {did_you_mean(name, tables)}",
                    where=str(path),
                )
            )
        else:
            for key, value in content.items():
                if key in KEYS and KEYS[key].table != name:
                    right = KEYS[key].table
                    problems.append(
                        Problem(
                            "T001",
                            f"`{key}` belongs in [{right}], not in [{name}]",
                            where=str(path),
                            fix=(f"[{right}] {key} = {value}",),
                        )
                    )
                values[key] = value
    return values, str(path), problems


def _checked(values: dict[str, Any], where: str, problems: list[Problem]) -> Plan:
    good: dict[str, Any] = {}
    for key, value in values.items():
        if key not in KEYS:
            problems.append(
                Problem(
                    "T001",
                    f"unknown key in the plan:  {key} = {value}        {did_you_mean(key, tuple(KEYS))}",
                    where=where,
                )
            )
            continue
        problem, good[key] = _value(key, value, where)
        problems += problem
    if problems:
        raise PlaitError(problems)
    return Plan(**good)


def _value(key: str, value: Any, where: str) -> tuple[list[Problem], Any]:
    spec = KEYS[key]
    if spec.wildcard and value == "*":
        return [], 0
    if spec.kind is bool and isinstance(value, bool):
        return [], value
    if spec.kind is int and isinstance(value, int) and not isinstance(value, bool):
        if 1 <= value <= 2**20:
            return [], value
        return [Problem("T002", f"{key} = {value}        expected a whole number from 1 to {2**20}", where=where)], None
    if spec.kind is str and value in spec.choices:
        return [], value
    if spec.choices:
        expected = (
            f"expected {', '.join(spec.choices[:-1])} or {spec.choices[-1]}, {did_you_mean(str(value), spec.choices)}"
        )
    else:
        expected = {"bool": "expected true or false", "int": "expected a whole number"}[spec.kind.__name__]
        expected += " or *" if spec.wildcard else ""
    return [Problem("T002", f"{key} = {json.dumps(value, default=str)}        {expected}", where=where)], None


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


def _text(key: str, value: Any) -> str:
    if KEYS[key].wildcard and value == 0:
        return "*"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(key: str, value: Any) -> str:
    text = _text(key, value)
    return json.dumps(text) if isinstance(value, str) or text == "*" else text


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}es"
