"""A plan as text: what a line, a TOML file or JSON says, every fault at once, and the same words written again.

Nothing here knows which keys there are: `config/plan.py` passes them in.
"""

import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.plain_file import loads, open_plain

FILE_BYTES, LINE_LENGTH = 8192, 1000
"""The largest plan that is read, as a file and as a line: parsers take minutes over what no person wrote."""
SHOWN = 20
"""The most problems of a plan that are shown."""
LARGEST = 2**20
"""The largest number of a plan."""


@dataclass(frozen=True)
class Key:
    """One key of a plan: its TOML table, its type, what it may be, and one line of help."""

    table: str
    kind: type
    help: str
    choices: tuple[str, ...] = ()
    wildcard: bool = False
    also: tuple[str, ...] = ()
    """What other frameworks call it; a plan that uses such a name is told ours."""


Keys = dict[str, Key]


def from_line(text: str, keys: Keys) -> dict[str, Any]:
    """What one line of ``key=value`` words says. All faults are raised together."""
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
    return _checked(values, keys, where, problems)


def from_file(path: Path, keys: Keys) -> dict[str, Any]:
    """What a TOML file (or JSON when the name ends in .json) says. All faults are raised together."""
    try:
        with open_plain(path) as file:
            size, content = os.fstat(file.fileno()).st_size, file.read(FILE_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        what = f"cannot read the plan {_short(str(path), 300)}"
        raise PlaitError(Problem("T003", what, why, fix=('--plan "dp=2"',))) from None
    if len(content) > FILE_BYTES:
        why = f"{max(size, len(content))} bytes, at most {FILE_BYTES}"
        raise PlaitError(Problem("T003", f"{path} is too large for a plan", why, str(path)))
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = content.decode("utf-8")
        data = loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        why = _short(str(error), 200)
        raise PlaitError(Problem("T003", f"{path} is not {kind}", why, str(path))) from None
    values, problems = _flatten(data, keys, path)
    return _checked(values, keys, str(path), problems)


def as_word(key: Key, value: Any) -> str:
    """A value as it stands on a line."""
    if key.wildcard and value == 0:
        return "*"
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_toml(values: dict[str, Any], keys: Keys) -> str:
    """The values as a TOML file, in the tables of the keys."""
    lines: list[str] = []
    for table in _tables(keys):
        rows = [(name, value) for name, value in values.items() if keys[name].table == table]
        lines += [f"[{table}]", *(f"{name} = {_toml(keys[name], value)}" for name, value in rows), ""]
    return "\n".join(lines)


def _toml(key: Key, value: Any) -> str:
    text = as_word(key, value)
    return json.dumps(text) if isinstance(value, str) or text == "*" else text


def _tables(keys: Keys) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key.table for key in keys.values()))


def _flatten(data: Any, keys: Keys, path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """The keys of all tables in one dict, and what is wrong with the tables."""
    tables, where = _tables(keys), str(path)
    values, problems = dict[str, Any](), list[Problem]()
    if not isinstance(data, dict):
        return values, [Problem("T003", f"{path} is not a table of plan keys", where=where)]
    for name, content in data.items():
        if isinstance(content, dict) != (name in tables):
            problems.append(_misplaced(name, content, keys, path))
            continue
        rows = content if name in tables else {name: content}
        for key, value in rows.items():
            if name in tables and key in keys and keys[key].table != name:
                right = keys[key].table
                what = f"`{key}` belongs in [{right}], not in [{name}]"
                problems.append(Problem("T001", what, where=where, fix=(f"[{right}] {key} = {_shown(value)}",)))
            if key in values:
                problems.append(_twice(key, where))
            values[key] = value
    return values, problems


def _misplaced(name: str, content: Any, keys: Keys, path: Path) -> Problem:
    if name in _tables(keys):
        key = next(k for k in keys if keys[k].table == name)
        what, fix = f"`{name}` is a table of keys, not {_shown(content)}", (f"[{name}] {key} = …",)
    elif name in keys:
        table = keys[name].table
        what, fix = f"`{name}` is a key of [{table}], not a table", (f"[{table}] {name} = …",)
    else:
        hint = did_you_mean(name, _tables(keys))
        what, fix = f"unknown table in {path.name}:  [{_short(name)}]        {hint}", ()
    return Problem("T001", what, where=str(path), fix=fix)


def _checked(values: dict[str, Any], keys: Keys, where: str, problems: list[Problem]) -> dict[str, Any]:
    good: dict[str, Any] = {}
    for name, value in values.items():
        if name in keys:
            problem, good[name] = _value(name, keys[name], value, where)
            problems += problem
        else:
            hint = _meant(name, keys)
            what = f"unknown key in the plan:  {_short(name)} = {_bare(value)}        {hint}"
            problems.append(Problem("T001", what, where=where))
    wild = [name for name, value in good.items() if keys[name].wildcard and value == 0]
    if len(wild) > 1:
        what = f"{' and '.join(f'{name}=*' for name in wild)}: only one axis can fill the rest"
        problems.append(Problem("T002", what, where=where, fix=tuple(f"{name}=*" for name in wild)))
    if len(problems) > SHOWN:
        rest = len(problems) - SHOWN + 1
        problems[SHOWN - 1 :] = [Problem(problems[SHOWN - 1].code, f"… and {rest} more problems", where=where)]
    if problems:
        raise PlaitError(problems)
    return good


def _meant(name: str, keys: Keys) -> str:
    """Which key a name that is none stands for: one of other frameworks', or one like it."""
    word = name.lower().replace("-", "_")
    ours = next((key for key in keys if word in keys[key].also), None)
    return f"did you mean  {ours} ?" if ours else did_you_mean(name, tuple(keys))


def _twice(key: str, where: str) -> Problem:
    return Problem("T002", f"`{_short(key)}` is given twice", where=where, fix=("keep one",))


def _value(name: str, key: Key, value: Any, where: str) -> tuple[list[Problem], Any]:
    """What is wrong with a value, and what it stands for in a `Plan`."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if key.wildcard and value == "*":
        return [], 0
    if key.kind is bool and isinstance(value, bool):
        return [], value
    if key.kind is str and isinstance(value, str) and value in key.choices:
        return [], value
    if key.kind is int and number and (value in map(int, key.choices) if key.choices else 1 <= value <= LARGEST):
        return [], value
    if key.choices:
        hint = did_you_mean(_bare(value), key.choices) if key.kind is str else ""
        expected = f"expected {', '.join(key.choices[:-1])} or {key.choices[-1]}" + (f", {hint}" if hint else "")
    elif number and key.kind is int:
        expected = f"expected a whole number from 1 to {LARGEST}"
    else:
        expected = "expected true or false" if key.kind is bool else "expected a whole number"
    expected += " or *" if key.wildcard else ""
    return [Problem("T002", f"{name} = {_shown(value)}        {expected}", where=where)], None


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
