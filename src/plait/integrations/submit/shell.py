"""Scripts: a template with fields, and words as a shell reads them, each of which comes out as it went in."""

import shlex
from collections.abc import Iterable
from string import Template

SECRET = "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
"""Draws a secret: 64 hexadecimal digits."""


class Script(Template):
    """A script with fields such as @{name}; each $ is the shell's."""

    delimiter = "@"


def line(words: Iterable[str]) -> str:
    """A command of a POSIX shell. A value keeps its option readable: --runs='my runs', not '--runs=my runs'."""
    return " ".join(map(_word, words))


def _word(word: str) -> str:
    name, equals, value = word.partition("=")
    if equals and value and shlex.quote(name) == name and name.startswith("--"):
        return f"{name}={shlex.quote(value)}"
    return shlex.quote(word)


def comment(text: str) -> str:
    """Text in a comment: on one line, whatever is in it."""
    return "# " + "".join(letter if letter.isprintable() else "?" for letter in text)
