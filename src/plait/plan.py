"""The plan: how to split a job. A small frozen value; a line of text, a TOML file or JSON, the same words in all.

>>> Plan.parse("dp=2 microbatches=3").devices
2
"""

import json
import math
import os
import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, Problem, did_you_mean

FILE_BYTES, LINE_LENGTH = 8192, 1000
"""The largest plan that is read, as a file and as a line: parsers take minutes over what no person wrote."""
SHOWN = 20
"""The most problems of a plan that are shown."""


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
    "fsdp": Key("mesh", int, "processes that share one sharded copy, each on its share of the batch", wildcard=True),
    "microbatches": Key("step", int, "parts each share is computed in; gradients are summed once, in the last"),
    "zero": Key("memory", int, "what fsdp shards: 1 optimizer state, 2 and gradients, 3 and parameters", ("1", "2", "3")),
    "recompute": Key(
        "memory", str, "activations computed again in backward instead of kept", ("none", "selective", "full")
    ),
    "offload": Key("memory", str, "what is kept in host memory", ("none", "optimizer", "all")),
    "precision": Key("compute", str, "number format of the forward pass", ("fp32", "bf16", "fp16")),
    "compile": Key("compute", bool, "torch.compile the model"),
    "processes": Key(
        "compute", str, "per-device, or one: the classic DataParallel with threads", ("per-device", "one")
    ),
}

AXES = tuple(name for name, key in KEYS.items() if key.wildcard)
"""The axes of the mesh, from the slowest link to the fastest: rank = dp's index × fsdp + fsdp's index."""


@dataclass(frozen=True)
class Plan:
    """How to split a job. A mesh axis is 0 while it is the wildcard ``*`` (see `fill`)."""

    dp: int = 1
    fsdp: int = 1
    microbatches: int = 1
    zero: int = 3
    recompute: str = "none"
    offload: str = "none"
    precision: str = "fp32"
    compile: bool = False
    processes: str = "per-device"

    @property
    def devices(self) -> int:
        """Devices the plan computes on."""
        return self.dp * self.fsdp

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
        wild = next((name for name in AXES if getattr(self, name) == 0), None)
        if wild is not None:
            others = math.prod(getattr(self, name) for name in AXES if name != wild)
            filled = replace(self, **{wild: max(1, (nproc or others) // max(others, 1))})
            return filled if nproc is None else filled.fill(nproc)
        if nproc is not None and nproc != self.world:
            raise PlaitError(self._not(nproc))
        return self

    def _not(self, nproc: int) -> Problem:
        """P001: the plan does not make `nproc` processes."""
        used = " × ".join(f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1) or "dp=1"
        how = "threads of processes=one" if self.processes == "one" else used
        others = self.devices // self.dp
        fix = [f"--nproc {self.world}"]
        if nproc % others == 0:
            changed = replace(self, dp=nproc // others, processes="per-device")
            fix += [f'--plan "{changed}"', f'--plan "{replace(changed, dp=0)}"  (fills the rest)']
        what = f"the plan needs {_count(self.world, 'process')}, {_count(nproc, 'process')} were asked for"
        return Problem("P001", what, why=f"{how} = {_count(self.world, 'process')}", fix=tuple(fix))

    @staticmethod
    def parse(text: str) -> "Plan":
        """A plan from one line of ``key=value`` words. All faults are raised together."""
        where = f'--plan "{_short(text, 200)}"'
        if len(text) > LINE_LENGTH:
            why = f"{len(text)} characters, at most {LINE_LENGTH}"
            raise PlaitError(Problem("T003", "the line is too long for a plan", why, where, ("--plan plan.toml",)))
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals:
                word = _short(word)
                problems.append(Problem("T002", f"`{word}` is not key=value", where=where, fix=(f"{word}=…",)))
            elif key in values:
                problems.append(_twice(key, where))
            else:
                values[key] = _literal(value)
        return _checked(values, where, problems)

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """A plan from a TOML file (or JSON when the name ends in .json), with the tables of `KEYS`."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                size, content = os.fstat(file.fileno()).st_size, file.read(FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            what = f"cannot read the plan {_short(str(path), 300)}"
            raise PlaitError(Problem("T003", what, why, fix=('--plan "dp=2"',))) from None
        if len(content) > FILE_BYTES:
            why = f"{max(size, len(content))} bytes, at most {FILE_BYTES}"
            raise PlaitError(Problem("T003", f"{path} is too large for a plan", why, str(path)))
        kind = "JSON" if path.suffix == ".json" else "TOML"
        try:
            text = content.decode("utf-8")
            data = json.loads(text, object_pairs_hook=_once) if kind == "JSON" else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            why = _short(str(error), 200)
            raise PlaitError(Problem("T003", f"{path} is not {kind}", why, str(path))) from None
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
        """The plan as JSON values; `Plan.load` reads them back to an equal plan."""
        return {k: "*" if KEYS[k].wildcard and v == 0 else v for k, v in asdict(self).items()}

    def to_toml(self) -> str:
        """The plan as a TOML file; `Plan.load` reads it back to an equal plan."""
        lines: list[str] = []
        for table in dict.fromkeys(key.table for key in KEYS.values()):
            rows = [(k, v) for k, v in asdict(self).items() if KEYS[k].table == table]
            lines += [f"[{table}]", *(f"{k} = {_toml(k, v)}" for k, v in rows), ""]
        return "\n".join(lines)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is given twice")
    return values


def _flatten(data: Any, path: Path) -> tuple[dict[str, Any], str, list[Problem]]:
    """The keys of all tables in one dict, where they stand, and what is wrong with the tables."""
    tables = tuple(dict.fromkeys(key.table for key in KEYS.values()))
    values: dict[str, Any] = {}
    where, problems = str(path), list[Problem]()
    if not isinstance(data, dict):
        return values, where, [Problem("T003", f"{path} is not a table of plan keys", where=where)]
    for name, content in data.items():
        if isinstance(content, dict) != (name in tables):
            problems.append(_misplaced(name, content, tables, path))
            continue
        rows = content if name in tables else {name: content}
        for key, value in rows.items():
            if name in tables and key in KEYS and KEYS[key].table != name:
                right = KEYS[key].table
                what = f"`{key}` belongs in [{right}], not in [{name}]"
                problems.append(Problem("T001", what, where=where, fix=(f"[{right}] {key} = {_shown(value)}",)))
            if key in values:
                problems.append(_twice(key, where))
            values[key] = value
    return values, where, problems


def _misplaced(name: str, content: Any, tables: tuple[str, ...], path: Path) -> Problem:
    if name in tables:
        key = next(k for k in KEYS if KEYS[k].table == name)
        what, fix = f"`{name}` is a table of keys, not {_shown(content)}", (f"[{name}] {key} = …",)
    elif name in KEYS:
        table = KEYS[name].table
        what, fix = f"`{name}` is a key of [{table}], not a table", (f"[{table}] {name} = …",)
    else:
        what, fix = f"unknown table in {path.name}:  [{_short(name)}]        {did_you_mean(name, tables)}", ()
    return Problem("T001", what, where=str(path), fix=fix)


def _checked(values: dict[str, Any], where: str, problems: list[Problem]) -> Plan:
    good: dict[str, Any] = {}
    for key, value in values.items():
        if key in KEYS:
            problem, good[key] = _value(key, value, where)
            problems += problem
        else:
            hint = did_you_mean(key, tuple(KEYS))
            what = f"unknown key in the plan:  {_short(key)} = {_bare(value)}        {hint}"
            problems.append(Problem("T001", what, where=where))
    if len(problems) > SHOWN:
        rest = len(problems) - SHOWN + 1
        problems[SHOWN - 1 :] = [Problem(problems[SHOWN - 1].code, f"… and {rest} more problems", where=where)]
    wild = [key for key in AXES if good.get(key) == 0]
    if len(wild) > 1:
        what = f"{' and '.join(f'{key}=*' for key in wild)}: only one axis can fill the rest"
        problems.append(Problem("T002", what, where=where, fix=(f"{wild[0]}=*",)))
    if problems:
        raise PlaitError(problems)
    return Plan(**good)


def _twice(key: str, where: str) -> Problem:
    return Problem("T002", f"`{_short(key)}` is given twice", where=where, fix=("keep one",))


def _value(key: str, value: Any, where: str) -> tuple[list[Problem], Any]:
    spec = KEYS[key]
    if spec.wildcard and value == "*":
        return [], 0
    if spec.kind is bool and isinstance(value, bool):
        return [], value
    if spec.kind is int and spec.choices and not isinstance(value, bool) and str(value) in spec.choices:
        return [], int(value)
    if spec.kind is int and not spec.choices and isinstance(value, int) and not isinstance(value, bool):
        if 1 <= value <= 2**20:
            return [], value
        what = f"{key} = {_shown(value)}        expected a whole number from 1 to {2**20}"
        return [Problem("T002", what, where=where)], None
    if spec.kind is str and value in spec.choices:
        return [], value
    if spec.choices:
        hint = "" if spec.kind is int else did_you_mean(_bare(value), spec.choices)
        expected = f"expected {', '.join(spec.choices[:-1])} or {spec.choices[-1]}" + (f", {hint}" if hint else "")
    else:
        expected = {"bool": "expected true or false", "int": "expected a whole number"}[spec.kind.__name__]
        expected += " or *" if spec.wildcard else ""
    return [Problem("T002", f"{key} = {_shown(value)}        {expected}", where=where)], None


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _shown(value: Any) -> str:
    """A value from a plan, as a file would have it, but short: it may be anything."""
    if isinstance(value, (dict, list)):
        return "{…}" if isinstance(value, dict) else "[…]"
    try:
        return _short(json.dumps(value, default=str))
    except ValueError:
        return "a number of thousands of digits"


def _bare(value: Any) -> str:
    return _short(value) if isinstance(value, str) else _shown(value)


def _text(key: str, value: Any) -> str:
    if KEYS[key].wildcard and value == 0:
        return "*"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(key: str, value: Any) -> str:
    text = _text(key, value)
    return json.dumps(text) if isinstance(value, str) or text == "*" else text


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}es"
