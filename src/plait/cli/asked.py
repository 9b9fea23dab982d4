"""What a function of `plait/api.py` was asked for: a job in one of its three forms, and a command's options as values of Python."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from plait.cli import main as command_line
from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.job import Job, load_job, made_by
from plait.config.plan import Plan
from plait.engine.callbacks import Callback

JobLike = Job | Callable[..., Job] | str | Path
"""A job, a function that returns one, or `path/to/job.py:function`."""
ELSEWHERE = {"job", "json", "verbose", "nnodes", "node_rank", "master"}
"""Options of commands that Python says otherwise, or the environment does."""
SHOWN_OTHERWISE = {"out", "tries", "show", "dry_run", "map", "scale", "objective", "vary", "deadline"}
"""Options of `plait plan` that make another answer than a table of plans."""
WORDS: dict[object, tuple[type | tuple[type, ...], str]] = {
    int: (int, "a whole number"), float: ((int, float), "a number"), Path: ((str, PathLike), "a path"),
    None: ((str, PathLike, Plan), "text"),
}  # fmt: skip
"""Of an option's type: what its value may be."""


@dataclass(frozen=True)
class Asked:
    """A job, the command that Python asks for, and its options."""

    given: JobLike
    command: str
    values: Mapping[str, object]
    arguments: Mapping[str, object]
    """Of the job's function."""
    title: str | None = None
    callbacks: tuple[Callback, ...] = ()
    """Those that are given as values."""

    @property
    def file(self) -> str | None:
        """The job's name where it lies in a file."""
        return str(self.given) if isinstance(self.given, (str, Path)) else None

    @property
    def name(self) -> str:
        """What the run is named by."""
        if self.file is not None and self.title is None:
            return self.file
        named = self.title or getattr(self.given, "__name__", "")
        return re.sub(r"\W+", "-", named.replace("<lambda>", "")).strip("-") or "job"

    def load(self) -> Job:
        """The job. J001 to J005; U020 for what is none."""
        if self.file is not None:
            return load_job(self.file, {key: str(value) for key, value in self.arguments.items()})
        if isinstance(self.given, Job) and not self.arguments:
            return self.given
        if callable(self.given):
            make = self.given
            return made_by(lambda: make(**self.arguments), self.name)
        what = f"{type(self.given).__name__} is not a job"
        if isinstance(self.given, Job):
            what = f"a Job takes no arguments ({', '.join(self.arguments)}): a function that returns one does"
        raise PlaitError(Problem("U020", what, fix=("a plait.Job, a function that returns one, or path/to/job.py",)))

    def options(self) -> argparse.Namespace:
        """As the command line makes them. U020 for an option that does not exist, U002 for a value that one cannot have."""
        without = ELSEWHERE | (SHOWN_OTHERWISE if self.command == "plan" else set())
        known = {key: option for key, option in command_line.options_of(self.command).items() if key not in without}
        found, problems = command_line.parsed([self.command, "job.py"]), list[Problem]()
        for key, value in self.values.items():
            if key in known:
                value, wrong = converted(known[key], value)
                setattr(found, key, value)
                problems += [wrong] if wrong is not None else []
            else:
                problems.append(self._unknown(key, list(known)))
        if problems:
            raise PlaitError(problems)
        found.job, found.arguments = self.name, {key: str(value) for key, value in self.arguments.items()}
        return found

    def _unknown(self, key: str, known: list[str]) -> Problem:
        if key in {field.name for field in fields(Job)}:
            what = f"plait.{self.command} has no option {key}: it is a field of the job"
            return Problem("U020", what, fix=(f"dataclasses.replace(job, {key}=…)",))
        return Problem("U020", f"plait.{self.command} has no option {key}        {did_you_mean(key, known)}")


def converted(option: argparse.Action, value: object) -> tuple[Any, Problem | None]:
    """The value that the command line would have made of the same words, and what is wrong with the one given."""
    listed = isinstance(option.default, list)
    if listed or (option.dest == "ranks" and not isinstance(value, str)):
        many = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if not listed:
            return ",".join(map(str, many)), None
        wrong = [problem for one in many if (problem := _wrong(option, one)) is not None]
        return many, next(iter(wrong), None)
    if option.nargs == "?" and isinstance(value, bool):  # resume=True
        return (option.const if value else None), None
    if value is None and option.default is None:
        return None, None
    kind = option.type if option.type in (int, float, Path) else str
    problem = _wrong(option, value)
    return (value if problem is not None or option.nargs == 0 else kind(value)), problem  # type: ignore[operator]


def _wrong(option: argparse.Action, value: object) -> Problem | None:
    """U002 for a value that an option cannot have."""
    kinds, words = (bool, "True or False") if option.nargs == 0 else WORDS[option.type]
    right = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
    if right and option.choices:
        right, words = value in option.choices, f"one of {', '.join(map(str, option.choices))}"
    return None if right else Problem("U002", f"{option.dest}={value!r} is not {words}")
