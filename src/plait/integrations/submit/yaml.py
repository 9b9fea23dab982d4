"""Values as YAML that a person can read. A string is bare only where no reader can take it for anything else, and quoted as in JSON
everywhere else; several lines of plain text are a block.
"""

import re

Value = str | int | bool | None | list["Value"] | dict[str, "Value"]

BARE = re.compile(r"-{0,2}[A-Za-z/](?:[A-Za-z0-9_./=-]|:(?=[A-Za-z0-9/]))*")
"""Words and options: what begins with a letter or a slash, and has no mark of YAML in it, is no number and no date."""
WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))
"""Which YAML 1.1 takes for something else than text."""
NAMED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
BLOCK = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\n)(?:(?:[\x20-\x7e]*[\x21-\x7e])?\n)*(?<!\n\n)")
"""Printable lines of which the first does not begin with a space, none ends with one, and the last is not empty."""


def dump(value: dict[str, Value]) -> str:
    """A document."""
    return "".join(f"{row}\n" for row in _rows(value))


def _rows(value: Value) -> list[str]:
    """The lines of a list or a table that is not empty."""
    rows: list[str] = []
    if isinstance(value, dict):
        for key, one in value.items():
            first, rest = _value(one)
            rows += [f"{_text(key)}: {first}" if first else f"{_text(key)}:"]
            rows += rest if isinstance(one, list) else [f"  {row}" if row else "" for row in rest]
    elif isinstance(value, list):
        for one in value:
            first, rest = _value(one)
            first, *rest = [first, *rest] if first else rest
            rows += [f"- {first}", *(f"  {row}" if row else "" for row in rest)]
    return rows


def _value(value: Value) -> tuple[str, list[str]]:
    """What stands behind a key, and the lines below it."""
    if isinstance(value, (dict, list)):
        return ("", _rows(value)) if value else (("{}" if isinstance(value, dict) else "[]"), [])
    if isinstance(value, str) and value.count("\n") > 1 and BLOCK.fullmatch(value):
        return "|", value.splitlines()
    if isinstance(value, str):
        return _text(value), []
    return ("null" if value is None else str(value).lower()), []


def _text(text: str) -> str:
    if BARE.fullmatch(text) and text.lower() not in WORDS:
        return text
    return '"' + "".join(map(_letter, text)) + '"'


def _letter(letter: str) -> str:
    if letter in NAMED:
        return NAMED[letter]
    if letter.isprintable() and letter != "\ufeff":
        return letter
    number = ord(letter)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"
