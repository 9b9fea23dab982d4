"""Which tensor of a file is which of the model, where a library has put words before or into the model's names.

peft wraps a model in `base_model.model.` and a layer in a module that has it as `base_layer`, with the adapter beside it: the file of
the base has neither word, and the adapter is new. A copy that peft trains of a whole module (`modules_to_save`) begins as that
module. transformers saves models with and without the prefix of the model under a head (`model.`, `transformer.`). Nothing else is
guessed: what is missing and was not declared new is an error.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from plait.model.pretrained import NameRules

WRAPPED = "base_model.model."
ADAPTERS = re.compile(
    r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|ia3_l|hada_w\d_[ab]|lokr_w\d(_[ab])?|oft_r)\."
)
"""Parts of adapters that do not depend on the numbers of the base."""


@dataclass(frozen=True)
class Match:
    """Of every name of the model, its name in the file, or that it is new."""

    sources: dict[str, str]
    new: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    """Names of the file that nothing of the model takes."""


def matched(names: Iterable[str], stored: Iterable[str], aliases: dict[str, str], rules: NameRules) -> Match:
    """Find each of the model's names among those `stored`. `aliases`: tied names of the model -> the name they go by."""
    names, there, tied = list(names), set(stored), dict[str, list[str]]()
    for name, kept in aliases.items():
        tied.setdefault(kept, []).append(name)
    sources = dict[str, str]()
    for name in names:
        spelt = (other for each in (name, *tied.get(name, ())) for other in spellings(each, rules))
        source = next((other for other in spelt if other in there), None)
        if source is not None:
            sources[name] = source
    wrapped = {
        name.partition(".base_layer.")[0]
        for name, source in sources.items()
        if ".base_layer." not in source and ".base_layer." in name
    }
    lacking = [name for name in names if name not in sources]
    new = [name for name in lacking if _declared(bare(name), rules.new) or _adapter(name, wrapped)]
    taken = {*sources.values(), *(other for name in (*sources, *aliases) for other in spellings(name, rules))}
    left = [name for name in stored if name not in taken and not _unused(name, rules)]
    return Match(sources, tuple(new), tuple(name for name in lacking if name not in new), tuple(left))


def bare(name: str) -> str:
    """A name without what peft puts into it."""
    name = name.removeprefix(WRAPPED).replace(".base_layer.", ".")
    return re.sub(r"\.(original_module|modules_to_save\.[^.]+)\.", ".", name)


def spellings(name: str, rules: NameRules) -> list[str]:
    """The names under which a file may have a tensor of the model, the likeliest first."""
    plain, words = bare(name), f"{rules.prefix}."
    found = [name, plain]
    if rules.prefix:
        found.append(plain.removeprefix(words) if plain.startswith(words) else words + plain)
    return list(dict.fromkeys(found))


def _adapter(name: str, wrapped: set[str]) -> bool:
    """Whether it is a part of an adapter of a layer whose base was found."""
    part = ADAPTERS.search(name + ".")
    return part is not None and name[: part.start()] in wrapped


def _unused(name: str, rules: NameRules) -> bool:
    return _declared(name, rules.unused) or any(re.search(pattern, name) for pattern in rules.ignored)


def _declared(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)
