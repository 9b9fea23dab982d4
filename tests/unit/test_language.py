"""Plain words: no text or name has a word of the list that readers stumbled over, no message has a sentence too long to read at once,
no docstring restates its signature, and a function name has one meaning."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from plait.cli.main import COMMANDS
from plait.config import command_options as of
from plait.config.command_options import list_options
from plait.config.keys import KEYS

ROOT = Path(__file__).parents[2]
LONGEST = 30
"""Words of a sentence."""
BANNED = {
    r"apart": "separate, different, or name the distance",
    r"besides?": "next to, in addition to, with",
    r"told|tells?": "says, shows, returns, reports",
    r"held(?!-out)|hold of": "stores, has",
    r"asked( for)?|asks for": "requested, given",
    r"wanted": "requested, required",
    r"stretch(es)?": "sequence shard",
    r"shar(e|es|ed|ing) out": "split, shard",
    r"put(s|ting)? together": "combine, gather, merge",
    r"go(es|ing)? on": "continue, resume",
    r"begin(s|ning)? anew": "start over",
    r"another training": "changes the training result",
    r"so (many|much)(?! (as|that|faster|slower|more|less))": "N, this many",
    r"and the like": "and similar",
    r"is it in order": "check",
    r"comes? to": "is",
    r"cuts?|cutting": "shard, split, slice",
    r"nobody|whoever": "no process, whichever process",
    r"where there (is|are)": "if there is",
    r"synchronis\w+|parallelis(?!m)\w+|initialis\w+|normalis\w+|optimis\w+|behaviour|neighbour\w*|favour\w*|colour\w*": "American spelling",
}
"""A pattern, and what to write in its place."""
DIALECT = frozenset((
    "anew", "apart", "asked", "beside", "besides", "cut", "cuts", "cutting", "heard", "held", "nobody", "stretch", "stretched", "stretches",
    "synchronise", "tells", "told", "wanted", "whoever", "whole", "wholes",
))  # fmt: skip
"""Words in no name of a function or class."""
CONTRACTS = {
    "run": "the command of a file of `cli/`",
    "main": "an entry point of a process",
    "is_enabled": "Strategy", "validate": "Strategy", "apply": "Strategy", "inexact_reasons": "Strategy", "shard_specs": "ShardingStrategy",
    "train_reference": "an algorithm of `proof/`",
}  # fmt: skip
"""Module functions that several files define, since they implement one contract."""
STOPWORDS = frozenset((
    "a", "all", "an", "and", "are", "as", "at", "be", "by", "each", "for", "from", "has", "have", "if", "in", "into", "is", "it", "its", "of", "on",
    "one", "or", "return", "returns", "that", "the", "this", "to", "whether", "which", "with",
))  # fmt: skip
SOURCES = sorted((ROOT / "src" / "plait").rglob("*.py"))


def prose(markdown: str) -> str:
    """The text without code, headings' marks and the words of tables' rules."""
    text = re.sub(r"(?s)```.*?```|``.*?``|`[^`\n]*`", " x ", re.sub(r"(?m)^(    |\t).*$", "", markdown))
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def texts() -> dict[str, str]:
    """Everything that users read, by its place."""
    found = {"src/plait/errors.md": prose((ROOT / "src/plait/errors.md").read_text(encoding="utf-8"))}
    pages = (ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING"))
    for path in [*pages, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]:
        place = str(path.relative_to(ROOT))
        found[place] = prose(path.read_text(encoding="utf-8"))
    return found


def helps() -> dict[str, str]:
    commands = [c for c in vars(of).values() if isinstance(c, type) and issubclass(c, of.CommandOptions)]
    found = {f"{c.__name__}.{o.name}": o.help for c in commands for o in list_options(c).values() if o.help}
    return found | {f"plan key {name}": key.help for name, key in KEYS.items()}


def banned(text: str) -> list[str]:
    return [f"{m.group(0)} ({instead})" for word, instead in BANNED.items() for m in re.finditer(rf"(?i)\b({word})\b", text)]


TEXTS = texts()


@pytest.mark.parametrize("place", TEXTS)
def test_no_word_of_the_list_is_in_a_text(place: str) -> None:
    assert not (found := banned(TEXTS[place])), f"{place}: {found}"


def test_no_word_of_the_list_is_in_help() -> None:
    assert not {place: found for place, text in helps().items() if (found := banned(text))}


def sentences(text: str) -> list[str]:
    blocks = re.split(r"\n\s*\n|\n(?=[|#*-])", re.sub(r"(?m)^#.*$", r"\g<0>\n", text))  # a heading is a block
    return [s.strip() for block in blocks for s in re.split(r"(?<=[.!?:;])\s+", block.replace("\n", " ")) if s.strip()]


def test_no_sentence_of_errors_or_help_is_too_long() -> None:
    places = {"src/plait/errors.md": TEXTS["src/plait/errors.md"], **helps()}
    long = {(place, s) for place, text in places.items() for s in sentences(text) if len(s.split()) > LONGEST}
    assert not long, "\n".join(f"{place}: {len(s.split())} words: {s}" for place, s in sorted(long))


@dataclass(frozen=True)
class SourceText:
    """A text of a Python file. `kind`: docstring, comment or message (any other string of three words or more)."""

    place: str
    kind: str
    text: str


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings(module: ast.Module) -> Iterator[ast.Constant]:
    """Strings that stand as statements: of modules, classes, functions and fields."""
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def source_texts(path: Path) -> Iterator[SourceText]:
    place, documented = str(path.relative_to(ROOT)), {id(node): node for node in docstrings(parsed(path))}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = "docstring" if id(node) in documented else "message"
            if kind == "docstring" or node.value.count(" ") > 1:
                yield SourceText(f"{place}:{node.lineno}", kind, prose(node.value) if kind == "docstring" else node.value)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield SourceText(f"{place}:{token.start[0]}", "comment", prose(token.string))


@pytest.mark.parametrize("folder", ["src/plait", "tests", "bench", "docs", "examples"])
def test_no_word_of_the_list_is_in_python_files(folder: str) -> None:
    """In `src/` every text; elsewhere docstrings and comments, since strings are what tests look for, and data."""
    kinds = {"docstring", "comment"} | ({"message"} if folder == "src/plait" else set())
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    rows = (text for path in paths for text in source_texts(path) if text.kind in kinds)
    assert not (found := [f"{row.place} {words}" for row in rows if (words := banned(row.text))]), "\n".join(found)


def test_no_sentence_of_a_message_is_too_long() -> None:
    rows = (text for path in SOURCES for text in source_texts(path) if text.kind == "message")
    found = {f"{row.place}: {s}" for row in rows for s in sentences(row.text) if len(s.split()) > LONGEST}
    assert not found, "\n".join(sorted(found))


def definitions(path: Path) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, (ast.FunctionDef, ast.ClassDef)))


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_no_name_is_of_the_dialect() -> None:
    names = ((path, node) for path in SOURCES for node in definitions(path))
    found = [f"{path.relative_to(ROOT)}:{node.lineno} {node.name}" for path, node in names if words_of(node.name) & DIALECT]
    assert not found, "\n".join(found)


def test_a_function_name_has_one_meaning() -> None:
    """At most two modules define a function of one name, unless it implements a contract."""
    names = Counter(node.name for path in SOURCES for node in parsed(path).body if isinstance(node, ast.FunctionDef))
    assert not (found := {name: count for name, count in names.items() if count > 2 and name not in CONTRACTS and name != "_"}), found


def stem(word: str) -> str:
    return next((word.removesuffix(end) for end in ("ings", "ing", "ies", "ied", "es", "ed", "s", "er", "or", "ion")
                 if word.endswith(end) and len(word) - len(end) > 2), word)  # fmt: skip


def restates(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """The docstring has only words of the name, the parameters and the types."""
    said = {stem(word) for word in words_of(ast.get_docstring(node) or "") - STOPWORDS}
    signature = [node.name]
    if isinstance(node, ast.FunctionDef):
        signature += [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)] + ([ast.unparse(node.returns)] if node.returns else [])
    return bool(said) and said <= {stem(word) for part in signature for word in words_of(part) - STOPWORDS}


def test_no_docstring_restates_its_signature() -> None:
    rows = ((path, node) for path in SOURCES for node in definitions(path) if "`" not in (ast.get_docstring(node) or ""))
    assert not (found := [f"{path.relative_to(ROOT)}:{node.lineno} {node.name}" for path, node in rows if restates(node)]), "\n".join(found)


@pytest.mark.parametrize("text", ["is told what is wanted", "The whole is held apart.", "it goes on where there is one", "optimised"])
def test_a_word_of_the_list_is_found(text: str) -> None:
    assert banned(text)


def test_faults_in_names_and_docstrings_are_found() -> None:
    (first, second) = ast.parse('def told(x): ...\ndef read_rows(path: Path) -> list[Row]:\n    "Read the rows of a path."').body
    assert isinstance(first, ast.FunctionDef) and isinstance(second, ast.FunctionDef)
    assert words_of(first.name) & DIALECT and restates(second) and not restates(first)
    assert words_of("_PlainValues") == {"plain", "values"}


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
OTHER_PROGRAMS = frozenset((
    "--address", "--batch-size", "--comm", "--float32", "--hostfile", "--local-dir", "--max-failures", "--mount-proc", "--multi-node", "--multi",
    "--nodes", "--nproc-per-node", "--ntasks-per-node", "--num-gpus", "--num", "--nv", "--open-mode", "--pid", "--prefix", "--requeue", "--shm-size",
    "--signal", "--standalone", "--storage",
    "--again", "--anchors", "--minutes", "--out", "--parts", "--recorded", "--seconds", "--start",
))  # fmt: skip
"""Options of launchers, schedulers and scripts, then those of `bench/`, that pages show."""


def test_every_option_and_key_is_in_the_reference_and_the_reverse() -> None:
    options = [option for command in COMMANDS.values() for option in list_options(command.options).values()]
    reference = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert not [option.flag for option in options if not option.by_place and f"`{option.flag}" not in reference]
    keys = (ROOT / "docs" / "plan_keys.md").read_text(encoding="utf-8")
    assert not [key for key in KEYS if f"### {key}\n" not in keys]
    known = {word for option in options for word in (option.flag, option.former, *option.words)} | OTHER_PROGRAMS | {"--help", "--job"}
    pages = [ROOT / "README.md", ROOT / "src/plait/errors.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name != "log.md")]
    found = {word: page.name for page in pages for word in OPTION.findall(page.read_text(encoding="utf-8")) if word not in known}
    assert not found, found
