"""Plain words: a list of words that readers stumbled over is in no text, and no sentence of an error or of help is too long to read at once."""

import re
from pathlib import Path

import pytest

from plait.config import command_options as of
from plait.config.command_options import options_of
from plait.config.keys import KEYS

ROOT = Path(__file__).parents[2]
LONGEST = 30
"""Words of a sentence."""
BANNED = {
    r"apart": "separate, different, or name the distance",
    r"besides?": "next to, in addition to, with",
    r"told|tells?": "says, shows, returns, reports",
    r"held|hold of": "stores, has",
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
GENERATED = {"docs/api.md", "docs/errors.md", "docs/matrix.md", "docs/log.md"}
"""Pages that programs write from texts that are checked elsewhere, and the log, which quotes what programs printed at its time."""
LATER = re.compile(r"docs/(decisions/|gpu|judged|planner|trackers|long_lists|faults_peers|architecture)")
"""Pages for those who change plait, not yet rewritten."""


def prose(markdown: str) -> str:
    """The text without code, headings' marks and the words of tables' rules."""
    text = re.sub(r"(?s)```.*?```|``.*?``|`[^`\n]*`", " x ", re.sub(r"(?m)^(    |\t).*$", "", markdown))
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def texts() -> dict[str, str]:
    """Everything that users read, by its place."""
    found = {"src/plait/errors.md": prose((ROOT / "src/plait/errors.md").read_text(encoding="utf-8"))}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        place = str(path.relative_to(ROOT))
        if place not in GENERATED and not LATER.match(place):
            found[place] = prose(path.read_text(encoding="utf-8"))
    return found


def helps() -> dict[str, str]:
    commands = [c for c in vars(of).values() if isinstance(c, type) and issubclass(c, of.CommandOptions)]
    found = {f"{c.__name__}.{o.name}": o.help for c in commands for o in options_of(c).values() if o.help}
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
    blocks = re.split(r"\n\s*\n|\n(?=[|#*-])", text)
    return [s.strip() for block in blocks for s in re.split(r"(?<=[.!?:;])\s+", block.replace("\n", " ")) if s.strip()]


def test_no_sentence_of_errors_or_help_is_too_long() -> None:
    places = {"src/plait/errors.md": TEXTS["src/plait/errors.md"], **helps()}
    long = {(place, s) for place, text in places.items() for s in sentences(text) if len(s.split()) > LONGEST}
    assert not long, "\n".join(f"{place}: {len(s.split())} words: {s}" for place, s in sorted(long))
