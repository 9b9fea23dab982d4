"""Weights that somebody keeps: safetensors files, Hugging Face folders and plait's checkpoints, opened for reading by name.

Formats that run code when they are loaded (pickle: .pt, .bin, DCP's .metadata) are refused by name, without being opened.

Libraries put words before or into the model's names, and a tensor of a file is found all the same. peft wraps a model in
`base_model.model.` and a layer in a module that has it as `base_layer`, with the adapter beside it: the file of the base has neither word,
and the adapter is new. A copy that peft trains of a whole module (`modules_to_save`) begins as that module. transformers saves models with
and without the prefix of the model under a head (`model.`, `transformer.`). Nothing else is guessed: what is missing and was not declared
new is an error.

Weights in: the model's parameters and buffers filled from what somebody keeps, each rank reading its own parts only.

[Note: Base of a fine-tuning]
The base of a fine-tuning: frozen parameters that checkpoints name instead of holding.

A job that trains adapters starts from weights that somebody else keeps. What is frozen and was read from there has the same
numbers at every step, so a checkpoint holds what is trained, the buffers and the optimizer's state, and says of the rest where it
is: the path, a digest of it, and for each parameter its name there. Whoever goes on from the checkpoint reads these parameters
from the base again, if its digest is still the same.

The digest of files is the SHA-256 of their SHA-256s, in the order of their names; each rank hashes its share of them. That of a
checkpoint of plait is the SHA-256 of its manifest, which holds the digests of all its bytes.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, convert, structs
from torch import Tensor, nn

from plait.checkpoint import state
from plait.checkpoint.carried_state import Training, exchange_json, problems_in, raise_first
from plait.checkpoint.manifest import EVAL, MANIFEST, Base, Entry, StoredChunk, damaged, published, read_manifest
from plait.checkpoint.reading import Reader
from plait.checkpoint.safetensors_file import DTYPES, LONGEST_HEADER, NAMES, UNREADABLE, Damaged, FileName, ShardFile
from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.files import loads, open_plain, read_plain
from plait.model.pretrained import NameRules, name_rules
from plait.tensors.rows import Part, whole

BLOCK = 1 << 24
"""Bytes that are hashed at a time."""


class Layered(Reader):
    """A checkpoint and, under it, the base that has the rest of its tensors; entries by the model's names."""

    def __init__(self, top: Reader, under: Reader, sources: dict[str, str]):
        super().__init__(top.folder, top.files, {})
        self.entries = top.entries | {name: under.entries[source] for name, source in sources.items()}
        self.places = {name: (top, name) for name in top.entries}
        self.places |= {name: (under, source) for name, source in sources.items()}

    def check(self, name: str, part: Part) -> None:
        """As of a `Reader`, in the one that has it."""
        reader, stored = self.places[name]
        reader.check(stored, part)

    def read(self, name: str, part: Part) -> None:
        """As of a `Reader`, from the one that has it."""
        reader, stored = self.places[name]
        reader.read(stored, part)

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """As of a `Reader`, from the one that has it."""
        reader, stored = self.places[name]
        return reader.whole(stored, dtype)


def digest_of(reader: Reader, training: Training | None = None) -> str:
    """The digest of weights. With a training all its ranks call it, and each hashes its share of the files."""
    if reader.files is not None:
        return _sha256(reader.folder / MANIFEST)
    names = sorted({piece.file for entry in reader.entries.values() for piece in entry.pieces})
    rank, world = (0, 1) if training is None else (training.place.rank, training.place.world)
    mine = dict[str, str]()
    for name in names[rank::world]:
        try:
            mine[name] = _sha256(reader.folder / name)
        except OSError as error:
            mine[name] = f"!{error.strerror or error}"
        if training is not None:
            training.place.within("checkpoint")
    said = [mine] if training is None else exchange_json(training, mine)
    every = {name: digest for word in said for name, digest in word.items()}
    for name, digest in every.items():
        if digest.startswith("!"):
            raise Damaged(name, digest[1:])
    return hashlib.sha256("\n".join(every[name] for name in names).encode()).hexdigest()


def _sha256(path: Path) -> str:
    """The digest of a file's bytes."""
    found = hashlib.sha256()
    with open_plain(path, follow=False) as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


INDEX = "model.safetensors.index.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".distcp", ".metadata")


def open_weights(path: Path) -> Reader:
    """What reads the weights at `path`, its entries by the names of parameters and buffers.

    K001, K002, K007 for what cannot be read; no byte of a tensor is read yet.
    """
    try:
        if path.is_dir() and (path / MANIFEST).exists():
            return of_checkpoint(path)
        if path.is_dir() and (path / INDEX).exists():
            return _of_index(path)
        if path.is_dir() and (path / "model.safetensors").exists():
            return _of_files(path, {"model.safetensors": None})
        saved = [found for p in (path, path / "checkpoints") if (found := published(p))]
        if saved:
            return of_checkpoint(saved[0][0])
        if path.is_file() and path.suffix == ".safetensors":
            file = path.resolve()  # a link that the user names is theirs
            return _of_files(file.parent, {file.name: None})
        wrong = _foreign(path)
    except Damaged as error:
        raise PlaitError(damaged(path if path.is_dir() else path.parent, error)) from None
    except (OSError, ValueError) as error:  # a name that no file can have, a folder that cannot be read
        wrong = Problem("K007", f"there are no weights at {str(path)[:200]}", why=str(error)[:200])
    raise PlaitError(wrong)


def of_checkpoint(path: Path, base: str | None = None, average: bool = False) -> Reader:
    """What reads the model's tensors of a checkpoint, by their names: the weights of the optimizer's eval mode if it has one. `base`:
    where its base is now. `average`: the average of the weights in the place of those that have one. Damaged, K012 without an average, K020."""
    manifest = read_manifest(path)
    if average and manifest.average is None:
        raise PlaitError(_without_average(path))
    reader = Reader(path, manifest.files, manifest.tensors)
    for file in manifest.files:
        reader.file(file)
    reader.entries = {}
    for kind in ("model/", EVAL, *(["ema/"] if average else ())):
        reader.entries |= {n.removeprefix(kind): e for n, e in manifest.tensors.items() if n.startswith(kind)}
    return reader if manifest.base is None else _layered(reader, manifest.base, base or manifest.base.path)


def _without_average(path: Path) -> Problem:
    fix = (
        "leave out --ema: the weights themselves",
        "Job(ema=plait.EMA(0.999)) keeps an average, from the step it is resumed at",
    )
    return Problem("K012", f"{path} has no average of the weights", why="its job had no ema when it was saved", fix=fix)


def _layered(top: Reader, base: Base, path: str) -> Layered:
    """A checkpoint with the base that it names, at `path`. K020 when something else is there."""
    try:
        under = open_weights(Path(path))
        base.check(digest_of(under), Path(path), under.entries)
    except PlaitError as error:
        problem, fix = error.problems[0], ("the base where it was", "export: --base PATH, where it is now")
        if problem.code == "K020":
            raise
        what = f"the base of this checkpoint cannot be read: {problem.what}"
        raise PlaitError(Problem("K020", what, why=problem.why, fix=fix)) from None
    return Layered(top, under, {name: source for name, (source, _, _) in base.tensors.items()})


class ShardIndex(Struct):
    """Which file has which tensor."""

    weight_map: dict[str, FileName]


def _of_index(path: Path) -> Reader:
    """Of a Hugging Face folder: the index says which file has which tensor."""
    try:
        listed = convert(loads(read_plain(path / INDEX, LONGEST_HEADER, follow=False)), ShardIndex)
    except (OSError, *UNREADABLE) as error:
        raise Damaged(INDEX, str(error)[:300]) from None
    files = dict[str, Any]()
    for name, file in listed.weight_map.items():
        files.setdefault(file, set()).add(name)
    return _of_files(path, files)


def _of_files(folder: Path, files: dict[str, Any]) -> Reader:
    entries = {}
    for file, names in files.items():
        stored = ShardFile(folder / file).tensors
        if names is not None and not names <= stored.keys():
            raise Damaged(file, f"{min(names - stored.keys())[:100]} is not in it, although the index says so")
        for name, tensor in stored.items():
            if names is None or name in names:
                piece = StoredChunk(file, name, (0,) * len(tensor.shape), tensor.shape, None)
                entries[name] = Entry(tensor.dtype, tensor.shape, () if 0 in tensor.shape else (piece,))
    return Reader(folder, None, entries)


def _foreign(path: Path) -> Problem:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    pickled = [p for p in files if p.suffix in PICKLED or p.name in PICKLED]
    fix = ("save it as safetensors where you trust it: safetensors.torch.save_file(model.state_dict(), …)",)
    if pickled:
        why = "the format is pickle, which runs code when it is loaded; plait does not open it"
        return Problem("K007", f"{pickled[0]} is not read", why=why, fix=fix)
    why = "expected a .safetensors file, a folder with model.safetensors or its index, or a checkpoint of plait"
    return Problem("K007", f"there are no weights at {path}", why=why, fix=("--weights path/to/model.safetensors",))


def read_base(training: Training, base: Base) -> None:
    """Fill this rank's parts of the frozen parameters from the base that a checkpoint names; all ranks call it.

    It is where the job's weights are, or where the checkpoint says. K020 when something else is there now.
    """
    path = Path(training.job.weights or base.path)
    mine = {name: part for name, part in state.model_parts(training).items() if name in base.tensors}
    word, reader, sources = dict[str, Any](), None, {name: source for name, (source, _, _) in base.tensors.items()}
    try:
        reader = open_weights(path)
    except PlaitError as error:
        word = problems_in(error)
    raise_first(exchange_json(training, word))
    assert reader is not None
    try:
        word = {"digest": digest_of(reader, training)}
        base.check(word["digest"], path, reader.entries)
        for name, part in mine.items():
            reader.check(sources[name], part)
    except Damaged as error:
        word = {"problems": [vars(damaged(path, error))]}
    except PlaitError as error:
        word = problems_in(error)
    raise_first(exchange_json(training, word))
    for name, part in mine.items():
        reader.read(sources[name], part)
    training.base = structs.replace(base, path=str(path.resolve()))


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


def load_weights(training: Training, path: Path) -> None:
    """Fill the model's parameters and buffers from `path`; every rank calls it, and reads its own parts.

    K008 when names or shapes differ from the model's (the head of this file says what may), K021 for adapters that are made of
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
