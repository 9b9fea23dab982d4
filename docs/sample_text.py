"""Draw texts of plait at random, to be read without the code: messages, names, and first lines of docstrings.

    python docs/sample_text.py [--seed 0] [--count 30] [--kind message|name|docstring]

A reader paraphrases each of them; of thirty, 27 should be understood correctly.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "plait"
MESSAGES = ("Problem", "note", "say", "option", "Key", "Fault")
"""Calls whose texts are messages to users."""


@dataclass(frozen=True)
class Sample:
    """A text and its place."""

    kind: str
    text: str
    place: str


def samples() -> Iterator[Sample]:
    """Return all texts of the package."""
    for path in sorted(SOURCES.rglob("*.py")):
        tree, file = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node)):
                yield Sample("docstring", doc.splitlines()[0], f"{file}:{getattr(node, 'lineno', 1)}")
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("__"):
                yield Sample("name", node.name, f"{file}:{node.lineno}")
            if isinstance(node, ast.Call) and _name(node.func) in MESSAGES:
                for argument in [*node.args, *(word.value for word in node.keywords)]:
                    if (text := _text(argument)).count(" ") > 2:
                        yield Sample("message", text, f"{file}:{argument.lineno}")


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(node: ast.expr) -> str:
    """Return a literal text, with the names of its values in the code."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(p.value if isinstance(p, ast.Constant) else f"{{{ast.unparse(p.value)}}}" for p in node.values)  # type: ignore[attr-defined]
    return " · ".join(filter(None, map(_text, node.elts))) if isinstance(node, ast.Tuple) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--kind", choices=("message", "name", "docstring"))
    given = parser.parse_args()
    drawn, every = random.Random(given.seed), list(samples())
    for kind in (given.kind,) if given.kind else ("message", "name", "docstring"):
        of_kind = [sample for sample in every if sample.kind == kind]
        print(f"\n{kind}: {given.count} of {len(of_kind)}, seed {given.seed}")
        for number, sample in enumerate(drawn.sample(of_kind, given.count), 1):
            print(f"{number:3}  {sample.text}\n     {sample.place}")


if __name__ == "__main__":
    main()
