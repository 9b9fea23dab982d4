"""The plan: how to split a job. A small frozen value; a line of text, a TOML file or JSON, the same words in all.

>>> Plan.parse("dp=2 microbatches=3").devices
2

Reading tells every fault at once.
"""

import json
import math
import os
import re
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from plait.config import former_names
from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.files import as_json, loads, open_plain
from plait.config.keys import AXES, FORMER, KEYS, OTHER_SAMPLES, SAME_LOSS, SAME_SLICES, TABLES, Key

FILE_BYTES, LINE_LENGTH = 8192, 1000
"""The largest plan that is read, as a file and as a line: parsers take minutes over what no person wrote."""
SHOWN = 20
"""The most problems of a plan that are shown."""
LARGEST = 2**20
"""The largest number of a plan."""


def from_line(text: str) -> dict[str, Any]:
    """What one line of ``key=value`` words says. All faults are raised together."""
    where = f'--plan "{_short(text, 200)}"'
    if len(text) > LINE_LENGTH:
        why = f"it has {len(text)} characters, and a plan line has at most {LINE_LENGTH}"
        raise PlaitError(Problem("T003", "the plan line is too long", why, where, ("--plan plan.toml",)))
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
            values[key] = value == "true" if value in ("true", "false") else _number(value)
    return _checked(values, where, problems)


def _number(word: str) -> int | float | str:
    """The number that a word is, if it is one."""
    if re.fullmatch(r"-?\d{1,18}", word):
        return int(word)
    return float(word) if re.fullmatch(r"-?(\d{1,17}|\d{0,17}\.\d{1,20})(e[-+]?\d{1,2})?", word) else word


def from_file(path: Path) -> dict[str, Any]:
    """What a TOML file (or JSON when the name ends in .json) says. All faults are raised together."""
    try:
        with open_plain(path) as file:
            size, content = os.fstat(file.fileno()).st_size, file.read(FILE_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        what = f"the plan file {_short(str(path), 300)} cannot be read"
        raise PlaitError(Problem("T003", what, why, fix=('--plan "dp=2"',))) from None
    if len(content) > FILE_BYTES:
        why = f"it has {max(size, len(content))} bytes, and a plan file has at most {FILE_BYTES}"
        raise PlaitError(Problem("T003", f"the plan file {path} is too large", why, str(path)))
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = content.decode("utf-8")
        data = loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        why = _short(str(error), 200)
        raise PlaitError(Problem("T003", f"the plan file {path} is not {kind}", why, str(path))) from None
    values, problems = _flatten(data, path)
    return _checked(values, str(path), problems)


def as_word(key: Key, value: object) -> str:
    """A value as it stands on a line."""
    if key.wildcard and value == 0:
        return "*"
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_toml(values: dict[str, Any]) -> str:
    """The values as a TOML file, in the tables of the keys."""
    lines: list[str] = []
    for table in TABLES:
        rows = [(name, value) for name, value in values.items() if KEYS[name].table == table]
        words = [(name, as_word(KEYS[name], value), isinstance(value, str)) for name, value in rows]
        lines += [f"[{table}]", *(f"{n} = {json.dumps(w) if text or w == '*' else w}" for n, w, text in words), ""]
    return "\n".join(lines)


def _flatten(data: object, path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """The keys of all tables in one dict, and what is wrong with the tables."""
    where, values, problems = str(path), dict[str, Any](), list[Problem]()
    if not isinstance(data, dict):
        return values, [Problem("T003", f"the plan file {path} is not a table of plan keys", where=where)]
    for name, content in data.items():
        if isinstance(content, dict) != (name in TABLES):
            problems.append(_misplaced(name, content, path))
            continue
        rows = content if name in TABLES else {name: content}
        for key, value in rows.items():
            known = KEYS.get(FORMER.get(key, key))
            if name in TABLES and known is not None and known.table != name:
                right = known.table
                what = f"`{key}` belongs in [{right}], not in [{name}]"
                problems.append(Problem("T001", what, where=where, fix=(f"[{right}] {key} = {_shown(value)}",)))
            if key in values:
                problems.append(_twice(key, where))
            values[key] = value
    return values, problems


def _misplaced(name: str, content: object, path: Path) -> Problem:
    if name in TABLES:
        key = next(k for k in KEYS if KEYS[k].table == name)
        what, fix = f"`{name}` is a table of keys, not {_shown(content)}", (f"[{name}] {key} = …",)
    elif name in KEYS:
        table = KEYS[name].table
        what, fix = f"`{name}` is a key of [{table}], not a table", (f"[{table}] {name} = …",)
    else:
        hint = did_you_mean(name, TABLES)
        what, fix = f"unknown table in {path.name}:  [{_short(name)}]        {hint}", ()
    return Problem("T001", what, where=str(path), fix=fix)


def _checked(values: dict[str, Any], where: str, problems: list[Problem]) -> dict[str, Any]:
    good: dict[str, Any] = {}
    problems += [_twice(FORMER[name], where) for name in values if FORMER.get(name) in values]
    for name, value in former_names.replaced("plan key", values, FORMER).items():
        if name in KEYS:
            problem, good[name] = _value(name, KEYS[name], value, where)
            problems += problem
        else:
            word = name.lower().replace("-", "_")  # other frameworks may call one of ours so
            ours = next((key for key in KEYS if word in KEYS[key].also), None)
            hint = f"did you mean  {ours} ?" if ours else did_you_mean(name, tuple(KEYS))
            what = f"unknown key in the plan:  {_short(name)} = {_bare(value)}        {hint}"
            problems.append(Problem("T001", what, where=where))
    wild = [name for name, value in good.items() if KEYS[name].wildcard and value == 0]
    if len(wild) > 1:
        what = f"{' and '.join(f'{name}=*' for name in wild)}: only one axis can use the remaining ranks"
        problems.append(Problem("T002", what, where=where, fix=tuple(f"{name}=*" for name in wild)))
    if len(problems) > SHOWN:
        rest = len(problems) - SHOWN + 1
        problems[SHOWN - 1 :] = [Problem(problems[SHOWN - 1].code, f"… and {rest} more problems", where=where)]
    if problems:
        raise PlaitError(problems)
    return good


def _twice(key: str, where: str) -> Problem:
    return Problem("T002", f"`{_short(key)}` is given twice", where=where, fix=("remove one of the two",))


def _value(name: str, key: Key, value: object, where: str) -> tuple[list[Problem], Any]:
    """What is wrong with a value, and what it stands for in a `Plan`."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if key.wildcard and value == "*":
        return [], 0
    if key.kind is bool and isinstance(value, bool):
        return [], value
    if key.kind is str and isinstance(value, str) and value in key.choices:
        return [], value
    if key.form and isinstance(value, str) and re.fullmatch(key.form.partition("|")[0], value):
        return [], value
    if (
        key.kind is int
        and number
        and (value in map(int, key.choices) if key.choices else key.least <= value <= LARGEST)
    ):
        return [], value
    if key.kind is float and (number or isinstance(value, float)) and 0 <= value <= key.most:
        return [], float(value)
    if key.choices:
        hint = did_you_mean(_bare(value), key.choices) if key.kind is str else ""
        others = [*key.choices, key.form.partition("|")[2]] if key.form else key.choices
        expected = f"expected {', '.join(others[:-1])} or {others[-1]}" + (f", {hint}" if hint else "")
    elif key.kind is float:
        expected = f"expected a number from 0 to {key.most:g}"
    elif number and key.kind is int:
        expected = f"expected a whole number from {key.least} to {LARGEST}"
    else:
        expected = "expected true or false" if key.kind is bool else "expected a whole number"
    expected += " or *" if key.wildcard else ""
    return [Problem("T002", f"{name} = {_shown(value)}        {expected}", where=where)], None


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _shown(value: object) -> str:
    """A value from a plan, as a file would have it, but short: it may be anything."""
    if isinstance(value, (dict, list)):
        return "{…}" if isinstance(value, dict) else "[…]"
    return _short(as_json(value))


def _bare(value: object) -> str:
    return _short(value) if isinstance(value, str) else _shown(value)


@dataclass(frozen=True)
class Plan:
    """How to split a job. A mesh axis is 0 while it is the wildcard ``*`` (see `fill`)."""

    replica_groups: int = 1
    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    batch_split: str = "equal"
    outer_sync: str = "local"
    sync_every: int = 1
    warmup_sync_steps: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    num_fragments: int = 1
    fragment_delay: int = 0
    fragment_alpha: float = 0.0
    staleness: int = 0
    server_update: str = "clock"
    quorum: int = 0
    servers: int = 1
    grad_compression: str = "none"
    compression_rank: int = 2
    zero_stage: int = 3
    shard_over_cp: bool = False
    activation_checkpointing: str = "none"
    offload: str = "none"
    precision: str = "fp32"
    fp8_recipe: str = "tensorwise"
    compile: bool = False
    processes: str = "per-device"
    sequence_parallel: bool = True
    async_tp: bool = False
    cp_method: str = "ring"
    token_dispatcher: str = "alltoall"

    def __post_init__(self) -> None:
        if self.ep > 1 and self.dp == self.fsdp == 1:  # given alone, the ranks that share out experts are the copies
            object.__setattr__(self, "dp", self.ep)

    @cached_property
    def devices(self) -> int:
        """Devices the plan computes on."""
        return self.along(AXES)

    @cached_property
    def shares(self) -> int:
        """Between how many devices the samples of a batch, or of a replica group's part of it, are shared out."""
        return self.along(OTHER_SAMPLES)

    def along(self, axes: tuple[str, ...]) -> int:
        """How many ranks differ along these axes alone."""
        return math.prod([getattr(self, axis) for axis in axes])

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes along which ranks keep shards of the same parameters: ranks are numbered along all of them, the last one fastest."""
        return ("fsdp", "cp") if self.shard_over_cp else ("fsdp",)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have the same parts of the model: the same slices and the same shards."""
        return tuple(axis for axis in SAME_SLICES if axis not in self.shard_axes)

    @property
    def part_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have parts, slices or shards, of the same tensors."""
        return (*self.shard_axes, "tp")

    @cached_property
    def shards(self) -> int:
        """Into how many shards fsdp divides a parameter.

        >>> Plan.parse("fsdp=2 cp=4").shards, Plan.parse("fsdp=2 cp=4 shard_over_cp=true").shards
        (2, 8)
        """
        return self.along(self.shard_axes)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks gather parameters to compute with them: from the shards of other ranks, or from their host's memory."""
        return self.shards > 1 or self.offload == "all"

    @property
    def expert_shards(self) -> int:
        """Ranks that hold the same experts of a replica, and so shard them: those of `shards` that `ep` leaves over.

        >>> Plan.parse("fsdp=4 ep=2").expert_shards
        2
        """
        return self.shards // math.gcd(self.fsdp, self.ep)

    @property
    def across(self) -> bool:
        """Whether there is more than copies and shards: groups, stages, slices, stretches or experts, so that ranks differ."""
        return self.devices > self.shares or self.ep > 1

    @property
    def inner(self) -> "Plan":
        """The plan of one replica group, on its own."""
        given = {key: value for key, value in self.changed().items() if KEYS[key].table != "groups"}
        return Plan(**given | {"replica_groups": 1} if self.replica_groups > 1 else given)

    @property
    def stretched(self) -> bool:
        """Whether tp computes between its slices on stretches of the sequence. Not compiled: units would be given tensors that
        claim the shape of the whole sequence, which torch.compile cannot trace."""
        return self.sequence_parallel and not self.compile

    @property
    def uncompiled(self) -> "Plan":
        """The plan that sends the same and keeps the same, and compiles nothing."""
        return replace(self, compile=False, sequence_parallel=self.stretched or self.tp == 1)

    @property
    def waits_in_forward(self) -> bool:
        """Whether ranks compute a forward pass together: slices, stretches or experts, whose messages it waits for."""
        return self.along((*SAME_LOSS, "ep")) > 1

    @property
    def weight_sharding(self) -> list[str]:
        """The keys, such as `fsdp=2`, under which a rank holds a shard of the weights or its own replica of them."""
        keys = [f"{axis}={size}" for axis in ("fsdp", "tp", "pp", "ep", "replica_groups") if (size := getattr(self, axis)) > 1]
        keys += [self.word("shard_over_cp")] if self.shard_over_cp else []
        return keys + (["offload=all"] if self.offload == "all" else [])

    @property
    def server_count(self) -> int:
        """Servers that groups send their gradients to (`outer_sync=async`): processes that use no device."""
        return self.servers if self.outer_sync == "async" and self.replica_groups > 1 else 0

    @property
    def world(self) -> int:
        """Processes the plan runs in."""
        return 1 if self.processes == "one" else self.devices + self.server_count

    @property
    def ranks(self) -> int:
        """Data-parallel processes: between how many the samples of a batch are shared out."""
        return 1 if self.processes == "one" else self.shares

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts that `batch_split` gives each share of a batch; empty: it gives none.

        >>> Plan.parse("dp=3 batch_split=4:2:1").parts
        (4, 2, 1)
        """
        return tuple(map(int, self.batch_split.split(":"))) if ":" in self.batch_split else ()

    def at(self, rank: int) -> dict[str, int]:
        """The place of a rank on every axis.

        >>> Plan.parse("dp=2 tp=2").at(1)
        {'replica_groups': 0, 'pp': 0, 'dp': 0, 'fsdp': 0, 'cp': 0, 'tp': 1}
        """
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in AXES}

    def rank(self, at: Mapping[str, int]) -> int:
        """The rank at a place on every axis: the inverse of `at`."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + at[axis]
        return rank

    @property
    def rarely(self) -> bool:
        """Whether there are replica groups that train by themselves and synchronise now and then."""
        return self.replica_groups > 1 and self.outer_sync != "async"

    def share(self, rank: int) -> int:
        """Which share of its group's samples a rank computes on; ranks of one `cp` and `tp` have the same."""
        at = self.at(rank)
        return at["dp"] * self.fsdp + at["fsdp"]

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

    def changes(self, key: str) -> bool:
        """Whether a key's value differs from the default."""
        return getattr(self, key) != getattr(Plan, key)

    def word(self, key: str) -> str:
        """A key with its value, as in a line: `tp=2`."""
        return f"{key}={as_word(KEYS[key], getattr(self, key))}"

    def _not(self, nproc: int) -> Problem:
        """P001: the plan does not make `nproc` processes. Proposes another size of the first axis that can have one."""
        used = " × ".join(f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1) or "dp=1"
        how = "threads of processes=one" if self.processes == "one" else used
        fix = [f"--nproc {self.world}"]
        for name in sorted(AXES, key=lambda axis: (getattr(self, axis) == 1, axis == "pp")):
            others = self.devices // getattr(self, name)
            if nproc % others == 0:
                changed = replace(self, processes="per-device", **{name: nproc // others})
                fix += [f'--plan "{changed}"', f'--plan "{replace(changed, **{name: 0})}"  (* uses the remaining processes)']
                break
        what = f"the plan needs {_processes(self.world)}, and the run has {nproc}"
        return Problem("P001", what, why=f"{how} = {_processes(self.world)}", fix=tuple(fix))

    @staticmethod
    def parse(text: str) -> "Plan":
        """A plan from one line of ``key=value`` words. All faults are raised together."""
        return Plan(**from_line(text))

    @staticmethod
    def stored(source: str | Path) -> "Plan":
        """A plan that plait wrote, as a line in a checkpoint or as the file of a run: former names are no news there."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", former_names.FormerName)
            return Plan.load(source) if isinstance(source, Path) else Plan.parse(source)

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """A plan from a TOML file (or JSON when the name ends in .json), with the tables of `KEYS`."""
        return Plan(**from_file(Path(path)))

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
        return " ".join(f"{k}={as_word(KEYS[k], v)}" for k, v in self.changed().items()) or "dp=1"

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values; `Plan.load` reads them back to an equal plan."""
        return {k: "*" if KEYS[k].wildcard and v == 0 else v for k, v in asdict(self).items()}

    def to_toml(self) -> str:
        """The plan as a TOML file; `Plan.load` reads it back to an equal plan."""
        return as_toml(asdict(self))


def _processes(n: int) -> str:
    return "1 process" if n == 1 else f"{n} processes"
