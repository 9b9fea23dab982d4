"""Values as YAML that a person can read. A string is bare only where no reader can take it for anything else, and quoted as in JSON
everywhere else; several lines of plain text are a block. (A template of text would not do: `--option` sets any key of a document.)
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
    return "".join(f"{row}\n" for row in _rows(value))


def _rows(value: "list[Value] | dict[str, Value]") -> list[str]:
    """The lines of a list or a table that is not empty."""
    rows: list[str] = []
    heads = [(f"{_text(key)}:", one) for key, one in value.items()] if isinstance(value, dict) else [("-", one) for one in value]
    for head, one in heads:
        first, *rest = _value(one)
        if head == "-" and not first:
            first, *rest = rest
        rows += [f"{head} {first}" if first else head]
        rows += rest if head != "-" and isinstance(one, list) else [f"  {row}" if row else "" for row in rest]
    return rows


def _value(value: Value) -> list[str]:
    """What stands behind a key, and the lines below it."""
    if isinstance(value, (dict, list)):
        return ["", *_rows(value)] if value else ["{}" if isinstance(value, dict) else "[]"]
    if isinstance(value, str):
        return ["|", *value.splitlines()] if value.count("\n") > 1 and BLOCK.fullmatch(value) else [_text(value)]
    return ["null" if value is None else str(value).lower()]


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
