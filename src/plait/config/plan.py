"""The plan: how to split a job, as a frozen value. A line of text, a TOML file and JSON use the same keys.

>>> Plan.parse("dp=2 microbatches=3").devices
2

Errors of a plan are raised all at once.
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
from plait.config.files import open_plain_file, parse_strict_json, to_json_text
from plait.config.keys import AXES, DATA_AXES, FORMER_KEYS, KEYS, SAME_LOSS, SAME_SLICES, TABLES, Key

FILE_BYTES, LINE_LENGTH = 8192, 1000
"""Maximum size of a plan, as a file and as a line: parsers take minutes for large inputs."""
MAX_PROBLEMS = 20
"""Maximum number of printed problems of a plan."""
MAX_NUMBER = 2**20
"""Largest valid number in a plan."""


def parse_plan_line(text: str) -> dict[str, Any]:
    """Parse one line of ``key=value`` words. Raises all errors together."""
    where = f'--plan "{_shorten(text, 200)}"'
    if len(text) > LINE_LENGTH:
        why = f"it has {len(text)} characters, and a plan line has at most {LINE_LENGTH}"
        raise PlaitError(Problem("T003", "the plan line is too long", why, where, ("--plan plan.toml",)))
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals:
            word = _shorten(word)
            problems.append(Problem("T002", f"`{word}` is not key=value", where=where, fix=(f"{word}=…",)))
        elif key in values:
            problems.append(_duplicate_problem(key, where))
        else:
            values[key] = value == "true" if value in ("true", "false") else _parse_number(value)
    return _check_values(values, where, problems)


def _parse_number(word: str) -> int | float | str:
    """Convert a word to a number if it is one."""
    if re.fullmatch(r"-?\d{1,18}", word):
        return int(word)
    return float(word) if re.fullmatch(r"-?(\d{1,17}|\d{0,17}\.\d{1,20})(e[-+]?\d{1,2})?", word) else word


def read_plan_file(path: Path) -> dict[str, Any]:
    """Read a TOML file (or JSON if the name ends in .json). Raises all errors together."""
    try:
        with open_plain_file(path) as file:
            size, content = os.fstat(file.fileno()).st_size, file.read(FILE_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        what = f"the plan file {_shorten(str(path), 300)} cannot be read"
        raise PlaitError(Problem("T003", what, why, fix=('--plan "dp=2"',))) from None
    if len(content) > FILE_BYTES:
        why = f"it has {max(size, len(content))} bytes, and a plan file has at most {FILE_BYTES}"
        raise PlaitError(Problem("T003", f"the plan file {path} is too large", why, str(path)))
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = content.decode("utf-8")
        data = parse_strict_json(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        why = _shorten(str(error), 200)
        raise PlaitError(Problem("T003", f"the plan file {path} is not {kind}", why, str(path))) from None
    values, problems = _flatten(data, path)
    return _check_values(values, str(path), problems)


def format_word(key: Key, value: object) -> str:
    """Format a value as in a line."""
    if key.wildcard and value == 0:
        return "*"
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_plan_toml(values: dict[str, Any]) -> str:
    """Format the values as a TOML file, with the tables of the keys."""
    lines: list[str] = []
    for table in TABLES:
        rows = [(name, value) for name, value in values.items() if KEYS[name].table == table]
        words = [(name, format_word(KEYS[name], value), isinstance(value, str)) for name, value in rows]
        lines += [f"[{table}]", *(f"{n} = {json.dumps(w) if text or w == '*' else w}" for n, w, text in words), ""]
    return "\n".join(lines)


def _flatten(data: object, path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Merge the keys of all tables into one dict, and return the problems of the tables."""
    where, values, problems = str(path), dict[str, Any](), list[Problem]()
    if not isinstance(data, dict):
        return values, [Problem("T003", f"the plan file {path} is not a table of plan keys", where=where)]
    for name, content in data.items():
        if isinstance(content, dict) != (name in TABLES):
            problems.append(_misplaced_problem(name, content, path))
            continue
        rows = content if name in TABLES else {name: content}
        for key, value in rows.items():
            known = KEYS.get(FORMER_KEYS.get(key, key))
            if name in TABLES and known is not None and known.table != name:
                right = known.table
                what = f"`{key}` belongs in [{right}], not in [{name}]"
                problems.append(Problem("T001", what, where=where, fix=(f"[{right}] {key} = {_quote_value(value)}",)))
            if key in values:
                problems.append(_duplicate_problem(key, where))
            values[key] = value
    return values, problems


def _misplaced_problem(name: str, content: object, path: Path) -> Problem:
    if name in TABLES:
        key = next(k for k in KEYS if KEYS[k].table == name)
        what, fix = f"`{name}` is a table of keys, not {_quote_value(content)}", (f"[{name}] {key} = …",)
    elif name in KEYS:
        table = KEYS[name].table
        what, fix = f"`{name}` is a key of [{table}], not a table", (f"[{table}] {name} = …",)
    else:
        hint = did_you_mean(name, TABLES)
        what, fix = f"unknown table in {path.name}:  [{_shorten(name)}]        {hint}", ()
    return Problem("T001", what, where=str(path), fix=fix)


def _check_values(values: dict[str, Any], where: str, problems: list[Problem]) -> dict[str, Any]:
    good: dict[str, Any] = {}
    problems += [_duplicate_problem(FORMER_KEYS[name], where) for name in values if FORMER_KEYS.get(name) in values]
    for name, value in former_names.replace_former_names("plan key", values, FORMER_KEYS).items():
        if name in KEYS:
            problem, good[name] = _parse_value(name, KEYS[name], value, where)
            problems += problem
        else:
            word = name.lower().replace("-", "_")  # names of other frameworks
            ours = next((key for key in KEYS if word in KEYS[key].aliases), None)
            hint = f"did you mean  {ours} ?" if ours else did_you_mean(name, tuple(KEYS))
            what = f"unknown key in the plan:  {_shorten(name)} = {_format_bare(value)}        {hint}"
            problems.append(Problem("T001", what, where=where))
    wild = [name for name, value in good.items() if KEYS[name].wildcard and value == 0]
    if len(wild) > 1:
        what = f"{' and '.join(f'{name}=*' for name in wild)}: only one axis can use the remaining ranks"
        problems.append(Problem("T002", what, where=where, fix=tuple(f"{name}=*" for name in wild)))
    if len(problems) > MAX_PROBLEMS:
        rest = len(problems) - MAX_PROBLEMS + 1
        problems[MAX_PROBLEMS - 1 :] = [Problem(problems[MAX_PROBLEMS - 1].code, f"… and {rest} more problems", where=where)]
    if problems:
        raise PlaitError(problems)
    return good


def _duplicate_problem(key: str, where: str) -> Problem:
    return Problem("T002", f"`{_shorten(key)}` is given twice", where=where, fix=("remove one of the two",))


def _parse_value(name: str, key: Key, value: object, where: str) -> tuple[list[Problem], Any]:
    """Return the problems of a value, and the value for a `Plan`."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if key.wildcard and value == "*":
        return [], 0
    if key.kind is bool and isinstance(value, bool):
        return [], value
    if key.kind is str and isinstance(value, str) and value in key.choices:
        return [], value
    if key.pattern and isinstance(value, str) and re.fullmatch(key.pattern.partition("|")[0], value):
        return [], value
    if (
        key.kind is int
        and number
        and (value in map(int, key.choices) if key.choices else key.minimum <= value <= MAX_NUMBER)
    ):
        return [], value
    if key.kind is float and (number or isinstance(value, float)) and 0 <= value <= key.maximum:
        return [], float(value)
    if key.choices:
        hint = did_you_mean(_format_bare(value), key.choices) if key.kind is str else ""
        others = [*key.choices, key.pattern.partition("|")[2]] if key.pattern else key.choices
        expected = f"expected {', '.join(others[:-1])} or {others[-1]}" + (f", {hint}" if hint else "")
    elif key.kind is float:
        expected = f"expected a number from 0 to {key.maximum:g}"
    elif number and key.kind is int:
        expected = f"expected a whole number from {key.minimum} to {MAX_NUMBER}"
    else:
        expected = "expected true or false" if key.kind is bool else "expected a whole number"
    expected += " or *" if key.wildcard else ""
    return [Problem("T002", f"{name} = {_quote_value(value)}        {expected}", where=where)], None


def _shorten(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _quote_value(value: object) -> str:
    """Format an arbitrary value of a plan as in a file, shortened."""
    if isinstance(value, (dict, list)):
        return "{…}" if isinstance(value, dict) else "[…]"
    return _shorten(to_json_text(value))


def _format_bare(value: object) -> str:
    return _shorten(value) if isinstance(value, str) else _quote_value(value)


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
        if self.ep > 1 and self.dp == self.fsdp == 1:  # ep alone: its ranks are the replicas of dp
            object.__setattr__(self, "dp", self.ep)

    @cached_property
    def devices(self) -> int:
        """Number of devices that compute."""
        return self.along(AXES)

    @cached_property
    def shares(self) -> int:
        """Number of local batches: ranks with different samples in a batch, or in a replica group's part of it."""
        return self.along(DATA_AXES)

    def along(self, axes: tuple[str, ...]) -> int:
        """Return how many ranks differ along these axes only."""
        return math.prod([getattr(self, axis) for axis in axes])

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes along which ranks have different shards of the same parameters. Ranks are numbered along all of them, the last one fastest."""
        return ("fsdp", "cp") if self.shard_over_cp else ("fsdp",)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes along which ranks have replicas of the same slices and shards."""
        return tuple(axis for axis in SAME_SLICES if axis not in self.shard_axes)

    @property
    def part_axes(self) -> tuple[str, ...]:
        """Axes along which ranks have parts, slices or shards, of the same tensors."""
        return (*self.shard_axes, "tp")

    @cached_property
    def shards(self) -> int:
        """Number of shards into which fsdp divides a parameter.

        >>> Plan.parse("fsdp=2 cp=4").shards, Plan.parse("fsdp=2 cp=4 shard_over_cp=true").shards
        (2, 8)
        """
        return self.along(self.shard_axes)

    @property
    def is_sharded(self) -> bool:
        """Ranks gather parameters for computing, from the shards of other ranks or from host memory."""
        return self.shards > 1 or self.offload == "all"

    @property
    def expert_shards(self) -> int:
        """Number of ranks that shard the same experts of a replica: `shards` without the factor that `ep` uses.

        >>> Plan.parse("fsdp=4 ep=2").expert_shards
        2
        """
        return self.shards // math.gcd(self.fsdp, self.ep)

    @property
    def across(self) -> bool:
        """Ranks differ by more than replicas and shards: the plan has groups, stages, slices, sequence shards or experts."""
        return self.devices > self.shares or self.ep > 1

    @property
    def inner(self) -> "Plan":
        """The plan of one replica group."""
        given = {key: value for key, value in self.changed().items() if KEYS[key].table != "groups"}
        return Plan(**given | {"replica_groups": 1} if self.replica_groups > 1 else given)

    @property
    def uses_sequence_shards(self) -> bool:
        """tp computes on sequence shards between its slices.

        False under compile: such tensors claim the shape of the full sequence, which torch.compile cannot trace.
        """
        return self.sequence_parallel and not self.compile

    @property
    def uncompiled(self) -> "Plan":
        """The same plan without compilation, with the same messages and the same saved activations."""
        return replace(self, compile=False, sequence_parallel=self.uses_sequence_shards or self.tp == 1)

    @property
    def waits_in_forward(self) -> bool:
        """Ranks communicate in the forward pass: slices, sequence shards or experts."""
        return self.along((*SAME_LOSS, "ep")) > 1

    @property
    def weight_sharding(self) -> list[str]:
        """The keys, such as `fsdp=2`, under which a rank has a shard of the weights or its own replica of them."""
        keys = [f"{axis}={size}" for axis in ("fsdp", "tp", "pp", "ep", "replica_groups") if (size := getattr(self, axis)) > 1]
        keys += [self.word("shard_over_cp")] if self.shard_over_cp else []
        return keys + (["offload=all"] if self.offload == "all" else [])

    @property
    def server_count(self) -> int:
        """Number of servers that receive the groups' gradients (`outer_sync=async`): processes without a device."""
        return self.servers if self.outer_sync == "async" and self.replica_groups > 1 else 0

    @property
    def world(self) -> int:
        """Number of processes."""
        return 1 if self.processes == "one" else self.devices + self.server_count

    @property
    def ranks(self) -> int:
        """Number of processes with different samples."""
        return 1 if self.processes == "one" else self.shares

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of the batch that `batch_split` lists, one per local batch; empty if it lists none.

        >>> Plan.parse("dp=3 batch_split=4:2:1").parts
        (4, 2, 1)
        """
        return tuple(map(int, self.batch_split.split(":"))) if ":" in self.batch_split else ()

    def at(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every axis.

        >>> Plan.parse("dp=2 tp=2").at(1)
        {'replica_groups': 0, 'pp': 0, 'dp': 0, 'fsdp': 0, 'cp': 0, 'tp': 1}
        """
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in AXES}

    def rank(self, at: Mapping[str, int]) -> int:
        """Return the rank at these coordinates: the inverse of `at`."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + at[axis]
        return rank

    @property
    def rarely(self) -> bool:
        """The plan has replica groups that train separately and synchronize infrequently."""
        return self.replica_groups > 1 and self.outer_sync != "async"

    def dp_rank(self, rank: int) -> int:
        """Return the index of a rank's local batch in its group. Ranks of one `cp` and `tp` group have the same."""
        at = self.at(rank)
        return at["dp"] * self.fsdp + at["fsdp"]

    def fill(self, nproc: int | None) -> "Plan":
        """Fill the wildcard for `nproc` processes. Raises P001 if the counts do not match."""
        wild = next((name for name in AXES if getattr(self, name) == 0), None)
        if wild is not None:
            others = math.prod(getattr(self, name) for name in AXES if name != wild)
            filled = replace(self, **{wild: max(1, (nproc or others) // max(others, 1))})
            return filled if nproc is None else filled.fill(nproc)
        if nproc is not None and nproc != self.world:
            raise PlaitError(self._count_problem(nproc))
        return self

    def changes(self, key: str) -> bool:
        """Return True if a key's value differs from its default."""
        return getattr(self, key) != getattr(Plan, key)

    def word(self, key: str) -> str:
        """Format a key with its value, as in a line: `tp=2`."""
        return f"{key}={format_word(KEYS[key], getattr(self, key))}"

    def _count_problem(self, nproc: int) -> Problem:
        """P001: the plan does not need `nproc` processes. Proposes a different size of the first axis that fits."""
        used = " × ".join(f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1) or "dp=1"
        how = "threads of processes=one" if self.processes == "one" else used
        fix = [f"--nproc {self.world}"]
        for name in sorted(AXES, key=lambda axis: (getattr(self, axis) == 1, axis == "pp")):
            others = self.devices // getattr(self, name)
            if nproc % others == 0:
                changed = replace(self, processes="per-device", **{name: nproc // others})
                fix += [f'--plan "{changed}"', f'--plan "{replace(changed, **{name: 0})}"  (* uses the remaining processes)']
                break
        what = f"the plan needs {_format_processes(self.world)}, and the run has {nproc}"
        return Problem("P001", what, why=f"{how} = {_format_processes(self.world)}", fix=tuple(fix))

    @staticmethod
    def parse(text: str) -> "Plan":
        """Parse a line of ``key=value`` words. Raises all errors together."""
        return Plan(**parse_plan_line(text))

    @staticmethod
    def stored(source: str | Path) -> "Plan":
        """Read a plan that plait wrote, as a line of a checkpoint or as the file of a run. Former names raise no warning."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", former_names.FormerName)
            return Plan.load(source) if isinstance(source, Path) else Plan.parse(source)

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Load a TOML file (or JSON if the name ends in .json), with the tables of `KEYS`."""
        return Plan(**read_plan_file(Path(path)))

    @staticmethod
    def read(text: str) -> "Plan":
        """Read the value of ``--plan``: a file name, or a line."""
        if "=" not in text and text.strip():
            return Plan.load(text)
        return Plan.parse(text)

    def changed(self) -> dict[str, Any]:
        """Return the keys that differ from the default, in the order of `KEYS`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        return " ".join(f"{k}={format_word(KEYS[k], v)}" for k, v in self.changed().items()) or "dp=1"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; `Plan.load` reads them back to an equal plan."""
        return {k: "*" if KEYS[k].wildcard and v == 0 else v for k, v in asdict(self).items()}

    def to_toml(self) -> str:
        """Format the plan as a TOML file; `Plan.load` reads it back to an equal plan."""
        return format_plan_toml(asdict(self))


def _format_processes(n: int) -> str:
    return "1 process" if n == 1 else f"{n} processes"
