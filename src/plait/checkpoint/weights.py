"""Weights in: the model's parameters and buffers filled from what somebody keeps, each rank reading its own parts only."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from plait.checkpoint import state
from plait.checkpoint.base import digest_of
from plait.checkpoint.manifest import Base, Entry, damaged
from plait.checkpoint.opening import Match, matched, open_weights
from plait.checkpoint.reading import Reader
from plait.checkpoint.safetensors_file import DTYPES, NAMES, Damaged
from plait.checkpoint.training import Training, exchange_json, problems_in, raise_first
from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.model.pretrained import name_rules
from plait.tensors.part import Part, whole


def load_weights(training: Training, path: Path) -> None:
    """Fill the model's parameters and buffers from `path`; every rank calls it, and reads its own parts.

    K008 when names or shapes differ from the model's (`checkpoint/opening.py` says what may), K021 for adapters that are made of
    the base's numbers. Numbers are cast to the model's format. Nothing is changed unless all ranks can read all of theirs.
    """
    mine = state.model_parts(training)
    frozen = [name for name, p in training.rank_model.params.items() if not p.requires_grad]
    said = exchange_json(training, {"names": list(mine), "frozen": frozen})
    everyone = list(dict.fromkeys(name for word in said for name in word["names"]))
    found = _found(training, path, everyone, mine)
    reader, sources = found.reader, found.sources
    for name, part in mine.items():
        if name in sources:
            reader.read(sources[name], part)
    training.rank_model.refresh()
    rewritten = training.rank_model.whole_sketch.rewritten
    kept = {name for word in said for name in word["frozen"] if name in sources and name not in rewritten}
    training.base = _base(training, path, reader, {name: source for name, source in sources.items() if name in kept})


@dataclass(frozen=True)
class Readable:
    """Weights that all ranks can read, and the model's names of what they have."""

    reader: Reader
    sources: dict[str, str]


def _found(training: Training, path: Path, everyone: list[str], mine: dict[str, Part]) -> Readable:
    """What is at `path`, of which this rank takes `mine`. All ranks call it, and raise what any of them cannot read."""
    word, found = dict[str, Any](), None
    try:
        _independent(training.model)
        found = _readable(training.model, path, everyone, mine)
    except Damaged as error:
        word = {"problems": [vars(damaged(path, error))]}
    except PlaitError as error:
        word = problems_in(error)
    raise_first(exchange_json(training, word))
    assert found is not None
    return found


def _readable(model: nn.Module, path: Path, everyone: list[str], mine: dict[str, Part]) -> Readable:
    """What is at `path` of the tensors of these names, of which `mine` are checked to the last byte. Damaged, K007, K008."""
    reader = open_weights(path)
    match = matched(everyone, reader.entries, state.aliases_of(model), name_rules(model))
    _complete(path, match)
    mine = {name: part for name, part in mine.items() if name in match.sources}
    wrong = list(_misshaped(path, reader.entries, match.sources, mine))
    if wrong:
        raise PlaitError(wrong)
    for name, part in mine.items():
        reader.check(match.sources[name], part)
    return Readable(reader, match.sources)


def _base(training: Training, path: Path, reader: Reader, sources: dict[str, str]) -> Base | None:
    """What checkpoints say of frozen parameters that were read from these weights, each by its name there. All ranks call it.

    None where checkpoints hold everything: without any, and of replica groups.
    """
    if not sources or training.plan.replica_groups > 1:
        return None
    specs = dict[str, list[Any]]()
    for name, part in state.model_parts(training).items():
        specs[name] = [NAMES[part.tensor.dtype], part.shape] if part.tensor.dtype in NAMES else ["", ()]
    every = {name: spec for word in exchange_json(training, specs) for name, spec in word.items() if spec[0]}
    tensors = {
        name: (source, every[name][0], tuple(every[name][1])) for name, source in sources.items() if name in every
    }
    return Base(str(path.resolve()), digest_of(reader, training), tensors)


def fill(model: nn.Module, path: Path) -> None:
    """Copy the weights at `path` into a whole model, such as one to predict with. K002, K007, K008 as `load_weights`."""
    kept = {name for name, _ in model.named_parameters()} | set(model.state_dict(keep_vars=True))
    mine = {n: whole(t) for n, t in (*model.named_parameters(), *model.named_buffers()) if n in kept}
    try:
        found = _readable(model, path, list(mine), mine)
        for name, source in found.sources.items():
            found.reader.read(source, mine[name])
    except Damaged as error:
        raise PlaitError(damaged(path, error)) from None


def _independent(model: nn.Module) -> None:
    """K021 when an adapter of peft begins with numbers that it makes of the base, which the constructor has not got yet."""
    for config in getattr(model, "peft_config", {}).values():
        how = getattr(config, "init_lora_weights", True)
        if isinstance(how, bool) or how in ("gaussian", "orthogonal"):
            how = next((flag for flag in ("use_dora", "use_kasa", "use_qalora") if getattr(config, flag, False)), "")
        if how:
            what = f"{how} makes adapters of the base's numbers, before Job.weights are read"
            why = "they would be those of the numbers that the constructor drew"
            fix = (
                "read the base in the job's model function:  from_pretrained(…), then get_peft_model(…), without Job.weights",
            )
            raise PlaitError(Problem("K021", what, why=why, fix=fix))


def _complete(path: Path, match: Match) -> None:
    """K008 for what is missing in the weights, and for what is too much there."""
    missing, unknown, problems = list(match.missing), list(match.unknown), list[Problem]()
    if not missing and not unknown:
        return
    fix = _way_out(missing, unknown)
    for kind, names, others in (("lack", missing, unknown), ("have", unknown, missing)):
        if names:
            hint = did_you_mean(names[0], others) if others and kind == "lack" else ""
            hint = hint if hint.startswith("did") else ""
            what = f"the weights at {path} {kind} {names[0]}" + ("" if kind == "lack" else ", which the model has not")
            more = f"{len(names)} names: {', '.join(names[:3])}" + (", …" if len(names) > 3 else "")
            problems.append(Problem("K008", what + (f"        {hint}" if hint else ""), why=more, fix=fix))
    raise PlaitError(problems)


def _way_out(missing: list[str], unknown: list[str]) -> tuple[str, ...]:
    """What to do when names differ. A wrapper of the model (LoRA, DDP, compile) puts words before or into its names."""
    if words := _prefix(dict.fromkeys(missing, ""), unknown):
        return (
            f"the model wraps the one that was saved (its names begin with {words}): load the weights in the job's model"
            " function, before it is wrapped,    model.load_state_dict(load_file(…))    or  from_pretrained",
        )
    if words := _prefix(dict.fromkeys(unknown, ""), missing):
        return (f"the weights are those of a wrapped model: save them again without {words}",)
    same = "the job's model and the one that was saved are built differently: give both the same arguments"
    module = (missing or unknown)[0].rpartition(".")[0] or (missing or unknown)[0]
    said = f'"{module}"' if missing else f'unused=("{module}",)'
    return same, f"what is meant to differ is declared in the job's model function:  plait.new_modules(model, {said})"


def _prefix(longer: dict[str, str], shorter: list[str]) -> str:
    """What most of the shorter names lack at their beginning, if it is the same for all of them; else empty."""
    for name in shorter[:1]:
        for other in longer:
            if other.endswith(f".{name}") and (words := other.removesuffix(name)):
                fitting = sum(f"{words}{each}" in longer for each in shorter)
                return words if fitting > len(shorter) / 2 else ""
    return ""


def _misshaped(
    path: Path, entries: dict[str, Entry], sources: dict[str, str], mine: dict[str, Part]
) -> Iterator[Problem]:
    for name, part in mine.items():
        entry = entries[sources[name]]
        if entry.shape != part.shape:
            why = f"it is {list(entry.shape)} there, {list(part.shape)} in the model"
            yield Problem("K008", f"{name} has another shape in the weights at {path}", why=why)
        elif DTYPES[entry.dtype].is_floating_point != part.tensor.dtype.is_floating_point:
            why = f"it is {entry.dtype} there, {part.tensor.dtype} in the model"
            yield Problem("K008", f"{name} has another kind of numbers in the weights at {path}", why=why)
