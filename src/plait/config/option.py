"""An option of a command, as a field of a dataclass: its name, its help, its values, and where it can be given.

A command's options are one frozen dataclass (`command_options.py`). From its fields come the parser of the command line
(`cli/main.py`), the keyword arguments in Python (`api.py`), the words that `plait submit` hands on, and what is out of range.
"""

from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin

from plait.config.errors import PlaitError, Problem, too_small

REQUIRED = MISSING
"""The default of an option that must be given."""


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    name: str
    """In Python, and of the field."""
    kind: type
    """Of its value, or of each value where it is given `many` times: bool, int, float, str or Path."""
    many: bool
    default: object
    help: str | None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    """The smallest number that it takes."""
    words: tuple[str, ...] = ()
    """On the command line, if these are not --name."""
    by_place: bool = False
    """No word stands before its value on the command line."""
    bare: str | None = None
    """Its value when it is given without one, if it can be."""
    listed: bool = False
    """A text of values with commas between them, for which Python also takes a list."""
    python: bool = True
    """It is a keyword argument in Python too."""
    handed_on: bool = True
    """`plait submit` hands it on, as it is given, to the `plait train` that the scheduler starts."""

    @property
    def flag(self) -> str:
        """Its word on the command line, such as --save-every."""
        return self.words[-1] if self.words else f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of a command."""

    arguments: dict[str, str] = field(default_factory=dict)
    """Of the job's function: --job.NAME on the command line."""


def option(default: object, help: str | None, **facts: Any) -> Any:
    """A field that is an option; `facts` are those of `Option`."""
    return field(default=default, metadata={"help": help, **facts})


@cache
def options_of(command: type[CommandOptions]) -> dict[str, Option]:
    """The options of a command by name, in the order of its help."""
    return {each.name: _of(each) for each in fields(command) if "help" in each.metadata}


def _of(source: Field[Any]) -> Option:
    """The option that a field is: `int | None` takes a number, `tuple[str, ...]` many texts."""
    kind, *_ = [kind for kind in get_args(source.type) if kind is not NoneType] or [source.type]
    return Option(source.name, kind, get_origin(source.type) is tuple, source.default, **source.metadata)


def words_of(given: CommandOptions, options: Iterable[Option] | None = None) -> list[str]:
    """The words of a command line that give its options these values; `options`: these alone. What has its default is left out."""
    words = list[str]()
    for each in options_of(type(given)).values() if options is None else options:
        value = getattr(given, each.name)
        if value != each.default:
            named = "" if each.by_place else f"{each.flag}="
            words += [each.flag] if value is True else [f"{named}{one}" for one in (value if each.many else (value,))]
    return [*words, *(f"--job.{name}={value}" for name, value in given.arguments.items())]


def check_range(given: CommandOptions) -> None:
    """Raise what is out of range."""
    if problems := out_of_range(given):
        raise PlaitError(problems)


def out_of_range(given: CommandOptions) -> list[Problem]:
    """U002 for numbers that are too small."""
    found = list[Problem]()
    for name, each in options_of(type(given)).items():
        value = getattr(given, name)
        if each.least is not None and value is not None and value < each.least:
            found.append(too_small(each.flag, value, each.least))
    return found
