"""Read back the files written for a scheduler, with that scheduler's rules."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from plait.config.plan import Plan
from plait.integrations.submit.submission import Submission

SCHEMAS = Path(__file__).parent / "schemas"
KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
KNOWN = {"$comment", "type", "properties", "required", "additionalProperties", "items", "anyOf", "minimum", "maximum"}


def asked(**more: Any) -> Submission:
    """A job on two nodes with two devices each."""
    return Submission(**{"job": "job.py", "plan": Plan.parse("dp=2 tp=2"), "nodes": 2, "per_node": 2, "name": "job"} | more)


def faults(value: Any, kind: str) -> list[str]:
    """Return the violations of a schema of `tests/schemas` in a document."""
    return _faults(value, json.loads((SCHEMAS / f"{kind}.json").read_text()), kind)


def _faults(value: Any, schema: dict[str, Any], at: str) -> list[str]:
    assert schema.keys() <= KNOWN, f"{schema.keys() - KNOWN} are not understood here"
    if "anyOf" in schema:
        found = [_faults(value, one, at) for one in schema["anyOf"]]
        return [] if [] in found else found[0]
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool)) for kind in kinds):
        return [f"{at} is {value!r}, no {kinds}"]
    if isinstance(value, dict):
        rest = schema.get("additionalProperties", True)
        rules = {key: schema.get("properties", {}).get(key, rest) for key in value}
        lost = [f"{at} has no {key}" for key in schema.get("required", []) if key not in value]
        lost += [f"{at} does not know {key}" for key, rule in rules.items() if rule is False]
        inner = [_faults(value[key], rule, f"{at}.{key}") for key, rule in rules.items() if isinstance(rule, dict)]
        return lost + [fault for one in inner for fault in one]
    if isinstance(value, list):
        return [fault for k, one in enumerate(value) for fault in _faults(one, schema["items"], f"{at}[{k}]")]
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return [f"{at} is {value}"]
    return []


def sbatch(script: str) -> dict[str, str | None]:
    """Return the options of a script as sbatch reads them: words of a line with quotes and backslashes, up to a #."""
    found: dict[str, str | None] = {}
    for row in script.splitlines():
        if row and not row.startswith("#"):
            break
        if row.startswith("#SBATCH"):
            for word in _arguments(row.removeprefix("#SBATCH")):
                name, equals, value = word.removeprefix("--").partition("=")
                found[name] = value if equals else None
    return found


def _arguments(row: str) -> list[str]:
    """Split like `get_argument` in sbatch's source: a backslash alone does not escape a space."""
    words: list[str] = []
    while row := row.lstrip():
        word, quote, escaped, at = "", "", False, 0
        while at < len(row) and (quote or not row[at].isspace()):
            letter, at = row[at], at + 1
            if escaped:
                escaped = False
            elif letter == "\\":
                escaped = True
                continue
            elif quote:
                if letter == quote:
                    quote = ""
                    continue
            elif letter in "\"'":
                quote = letter
                continue
            elif letter == "#":
                return [*words, word] if word else words
            word += letter
        assert not quote
        words, row = [*words, word], row[at:]
    return words


def expanded(word: str, variables: dict[str, str]) -> str:
    """Expand as Kubernetes does for a word of a command: $(NAME) is a variable if it is defined, $$ is $."""

    def read(match: re.Match[str]) -> str:
        return "$" if match.group() == "$$" else variables.get(match.group()[2:-1], match.group())

    return re.sub(r"\$\$|\$\([^)]*\)", read, word)


class Programs:
    """A folder for PATH, with programs that record their arguments."""

    def __init__(self, folder: Path, *names: str):
        self.path, self.said = folder / "programs", folder / "said"
        self.path.mkdir()
        for name in names:
            self.add(name, '#!/bin/bash\nprintf \'%s\\0\' "$#" "${0##*/}" "$@" > "$SAID/$BASHPID"\n')

    def add(self, name: str, text: str) -> None:
        """Add a program with this text."""
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        """Return an environment in which these programs come first on PATH."""
        return os.environ | {"PATH": f"{self.path}:{os.environ['PATH']}", "SAID": str(self.said)} | more

    def run(self, script: str, shell: str = "bash", **more: str) -> list[list[str]]:
        """Return the arguments of each program that a script starts."""
        shutil.rmtree(self.said, ignore_errors=True)
        self.said.mkdir()
        words = [shell, "-c", script]
        done = subprocess.run(
            words, env=self.environment(**more), capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return [path.read_bytes().decode().split("\0")[1:-1] for path in sorted(self.said.iterdir())]
