"""Options of commands: the command-line parser, Python's keyword arguments and forwarded words use the same fields."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait import api
from plait.cli.main import COMMANDS, parse_command_line
from plait.config.command_options import (
    REQUIRED,
    SCHEDULERS,
    BenchOptions,
    CommandOptions,
    Option,
    TrainOptions,
    find_out_of_range,
    format_words,
    list_options,
)
from plait.config.errors import PlaitError
from plait.integrations.submit.submission import load_scheduler

EVERY = [(name, option) for name, command in COMMANDS.items() for option in list_options(command.options).values()]
SAID = {int: "7", float: "2.5", str: "a", Path: "a/b"}


def value_of(option: Option) -> Any:
    """A value other than the default."""
    if option.kind is bool:
        return True
    text = next((choice for choice in option.choices if choice != option.default), SAID[option.kind])
    text = "11" if option.least == 9 else text
    return (text, text) if option.many else option.kind(text)


def words(option: Option) -> list[str]:
    """The command-line words that set this value."""
    value = value_of(option)
    if option.by_place:
        return list(value) if option.many else [str(value)]
    return [option.flag] if value is True else [f"{option.flag}={each}" for each in (value if option.many else (value,))]


def required(command: str) -> dict[str, Option]:
    return {name: option for name, option in list_options(COMMANDS[command].options).items() if option.default is REQUIRED}


@pytest.mark.parametrize("name, option", EVERY, ids=[f"{name} {option.name}" for name, option in EVERY])
def test_the_command_line_gives_every_field_its_value(name: str, option: Option) -> None:
    needed = required(name)
    given = [word for each in needed.values() for word in words(each)]
    least = COMMANDS[name].options(**{key: value_of(each) for key, each in needed.items()})
    assert parse_command_line([name, *given])[1] == least, "what is left out has its default"
    if option.name not in needed and (name, option.name) != ("bench", "job"):
        _, found = parse_command_line([name, *given, *words(option), "--job.lr=3"])
        assert found == replace(least, **{option.name: value_of(option)}, arguments={"lr": "3"})
        assert parse_command_line([name, *format_words(found)])[1] == found


def test_words_without_dashes_are_known_by_their_place() -> None:
    _, found = parse_command_line(["bench", "data", "job.py"])
    assert found == BenchOptions(what="data", job="job.py")


@pytest.mark.parametrize("name, option", [(n, o) for n, o in EVERY if n in api.OPTIONS and o.python])
def test_python_takes_the_same_values_by_the_same_names(name: str, option: Option) -> None:
    made = api.ApiRequest("job.py", name, {option.name: value_of(option)}, {"lr": 3}).parse_options()
    assert made == replace(api.OPTIONS[name](job="job.py", arguments={"lr": "3"}), **{option.name: value_of(option)})


@pytest.mark.parametrize("name, option", [(n, o) for n, o in EVERY if n in api.OPTIONS and not o.listed])
def test_python_refuses_values_of_other_kinds(name: str, option: Option) -> None:
    with pytest.raises(PlaitError) as raised:
        api.ApiRequest("job.py", name, {option.name: {1: 2}}, {}).parse_options()
    assert raised.value.codes == (["U002"] if option.python else ["U020"])


@pytest.mark.parametrize("name", api.OPTIONS)
def test_signatures_and_their_docstrings_name_options(name: str) -> None:
    function = getattr(api, name)
    known = {key for key, option in list_options(api.OPTIONS[name]).items() if option.python}
    beside = {"job", "arguments", "name", "quiet", "options"}
    assert {*inspect.signature(function).parameters} - beside <= known
    assert {*re.findall(r'(?<!")\b([a-z_]+)=', function.__doc__ or "")} <= known


def test_numbers_that_are_too_small() -> None:
    given = TrainOptions(job="job.py", steps=0, keep=-1, workers=0, max_restarts=-1, nproc=0)
    told = [problem.what for problem in find_out_of_range(given)]
    assert [what.partition(" is")[0] for what in told] == ["--nproc 0", "--max-restarts -1", "--steps 0", "--keep -1"]
    assert find_out_of_range(TrainOptions(job="job.py")) == [] and find_out_of_range(CommandOptions()) == []


def test_each_scheduler_has_a_file() -> None:
    assert all(load_scheduler(kind).name for kind in SCHEDULERS)
