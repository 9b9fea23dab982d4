"""One word per concept: docs/glossary.md contains the names of the code, and documents use no synonyms."""

import ast
import re
from pathlib import Path

import pytest

import plait
from plait.config.keys import KEYS
from plait.engine.step import SPAN_NAMES
from plait.parallel.apply_order import ORDER

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"(?m)^\| (?!word \|)(.+?) \| (.+) \|$", GLOSSARY))
TERMS = {name for head in ENTRIES for name in re.findall(r"`([^`]+)`", head)}
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
AXES = {"replica_groups", "dp", "fsdp", "tp", "cp", "ep", "pp"}
NAMES = {
    "plan key": set(KEYS),
    "public name": set(plait.__all__),
    "span": set(SPAN_NAMES),
    "axis": {strategy.AXIS for strategy in ORDER if strategy.AXIS},
}

BANNED = {
    r"mini-?batch(es)?": "batch, or micro-batch",
    r"micro batch(es)?|microbatch": "micro-batch",
    r"world size|(?-i:world_size)": "ranks, or processes",
    r"all reduces?|allreduces?": "all-reduce",
    r"(?<!loader )workers?": "rank, or loader worker",
    r"(hyper-?parallel|data-parallel) degree": "dp",
}
"""A synonym and the glossary's word. Only prose counts: code, in backticks or blocks, is left out."""
IN_DOCSTRINGS = [word for word in BANNED if "workers" not in word]
"""In the source a process that is not yet known as a rank may be a worker."""


def prose(markdown: str) -> str:
    return re.sub(r"(?s)```.*?```|``.*?``|`[^`\n]*`", " ", re.sub(r"(?m)^    .*$", "", markdown))


def docstrings() -> list[tuple[str, str]]:
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                found.append((f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text))
    return found


@pytest.mark.parametrize("kind", NAMES)
def test_what_the_code_names_is_explained(kind: str) -> None:
    assert NAMES[kind] <= TERMS, f"{kind} not in docs/glossary.md: {sorted(NAMES[kind] - TERMS)}"


def test_what_is_explained_exists() -> None:
    known = set().union(*NAMES.values(), AXES)
    assert known >= TERMS, f"docs/glossary.md explains what is not there: {sorted(TERMS - known)}"


def test_an_entry_is_one_or_two_sentences() -> None:
    long = [head for head, text in ENTRIES.items() if len(re.findall(r"[.!?](?= [A-Z`*]|$)", text)) not in (1, 2)]
    assert len(ENTRIES) > 50 and not long, long


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_documents_use_the_glossarys_words(path: Path) -> None:
    text = prose(path.read_text(encoding="utf-8"))
    found = [(m.group(), say) for word, say in BANNED.items() for m in re.finditer(rf"(?i)\b({word})\b", text)]
    assert not found, [f"{word!r}: say {say}" for word, say in found]


def test_docstrings_use_the_glossarys_words() -> None:
    found = [
        f"{place}  {m.group()!r}: say {BANNED[word]}"
        for place, text in docstrings()
        for word in IN_DOCSTRINGS
        for m in re.finditer(rf"(?i)\b({word})\b", prose(text))
    ]
    assert not found, "\n".join(found)
