"""Weights from outside of the run: safetensors files, Hugging Face folders and plait's checkpoints, read by name.

Formats that run code when they are loaded (pickle: .pt, .bin, DCP's .metadata) are rejected by name, without being opened.

[Note: Names of tensors]
Libraries add words to a model's names; these are matched. peft wraps a model in `base_model.model.` and a layer in a module that has it as
`base_layer`. The base's file has neither word, and the adapter's parameters are new. A copy that peft trains of a full module
(`modules_to_save`) starts from that module's weights. transformers saves models with and without the prefix of the model under a head
(`model.`, `transformer.`). No other name is guessed: a missing name that was not declared new is an error.

[Note: Base of a fine-tuning]
A job that trains adapters starts from base weights outside of the run. Frozen parameters read from there never change. So a checkpoint
holds the trained parameters, the buffers and the optimizer's state. For the others it records the base's path, its digest, and each
parameter's name there. A resumed run reads them from the base again if the digest still matches.

The digest of files is the SHA-256 of their SHA-256s, in the order of their names; each rank hashes some of the files. The digest of a
plait checkpoint is the SHA-256 of its manifest, which holds the digests of all its bytes.
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

from plait.checkpoint import training_state
from plait.checkpoint.carried_state import Training, encode_problems, exchange_json, raise_first_problem
from plait.checkpoint.checkpoint_reader import CheckpointReader
from plait.checkpoint.manifest import (
    EVAL_PREFIX,
    MANIFEST_NAME,
    BaseWeights,
    StoredChunk,
    TensorEntry,
    damaged_problem,
    list_checkpoints,
    read_manifest,
)
from plait.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    MAX_HEADER_BYTES,
    PARSE_ERRORS,
    DamagedFileError,
    FileName,
    ShardFile,
)
from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.files import open_plain_file, parse_strict_json, read_plain_file
from plait.model.pretrained import NameRules, get_name_rules
from plait.tensors.rows import Part, make_full_part

HASH_BLOCK = 1 << 24
"""Bytes that are hashed at a time."""


class LayeredReader(CheckpointReader):
    """A checkpoint with base weights for the tensors that it lacks; entries have the model's names."""

    def __init__(self, top: CheckpointReader, under: CheckpointReader, sources: dict[str, str]):
        super().__init__(top.folder, top.files, {})
        self.entries = top.entries | {name: under.entries[source] for name, source in sources.items()}
        self.places = {name: (top, name) for name in top.entries}
        self.places |= {name: (under, source) for name, source in sources.items()}

    def check_part(self, name: str, part: Part) -> None:
        """Call `check_part` of the reader that has the tensor."""
        reader, stored = self.places[name]
        reader.check_part(stored, part)

    def read_part(self, name: str, part: Part) -> None:
        """Call `read_part` of the reader that has the tensor."""
        reader, stored = self.places[name]
        reader.read_part(stored, part)

    def read_full(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Call `read_full` of the reader that has the tensor."""
        reader, stored = self.places[name]
        return reader.read_full(stored, dtype)


def digest_weights(reader: CheckpointReader, training: Training | None = None) -> str:
    """Return the digest of weights. With `training` it is collective, and each rank hashes some of the files."""
    if reader.files is not None:
        return _hash_file(reader.folder / MANIFEST_NAME)
    names = sorted({piece.file for entry in reader.entries.values() for piece in entry.pieces})
    rank, world = (0, 1) if training is None else (training.place.rank, training.place.world)
    mine = dict[str, str]()
    for name in names[rank::world]:
        try:
            mine[name] = _hash_file(reader.folder / name)
        except OSError as error:
            mine[name] = f"!{error.strerror or error}"
        if training is not None:
            training.place.set_phase("checkpoint")
    said = [mine] if training is None else exchange_json(training, mine)
    every = {name: digest for word in said for name, digest in word.items()}
    for name, digest in every.items():
        if digest.startswith("!"):
            raise DamagedFileError(name, digest[1:])
    return hashlib.sha256("\n".join(every[name] for name in names).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    found = hashlib.sha256()
    with open_plain_file(path, follow=False) as file:
        while block := file.read(HASH_BLOCK):
            found.update(block)
    return found.hexdigest()


INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".distcp", ".metadata")


def open_weights(path: Path) -> CheckpointReader:
    """Open the weights at `path`, with entries by the names of parameters and buffers.

    K001, K002, K007 if they cannot be opened. No tensor data is read yet.

    """
    try:
        if path.is_dir() and (path / MANIFEST_NAME).exists():
            return open_checkpoint_weights(path)
        if path.is_dir() and (path / INDEX_NAME).exists():
            return _open_indexed_folder(path)
        if path.is_dir() and (path / "model.safetensors").exists():
            return _open_files(path, {"model.safetensors": None})
        saved = [found for p in (path, path / "checkpoints") if (found := list_checkpoints(p))]
        if saved:
            return open_checkpoint_weights(saved[0][0])
        if path.is_file() and path.suffix == ".safetensors":
            file = path.resolve()  # the user's own link may be followed
            return _open_files(file.parent, {file.name: None})
        wrong = _unsupported_error(path)
    except DamagedFileError as error:
        raise PlaitError(damaged_problem(path if path.is_dir() else path.parent, error)) from None
    except (OSError, ValueError) as error:  # an invalid file name, or an unreadable folder
        wrong = Problem("K007", f"there are no weights at {str(path)[:200]}", why=str(error)[:200])
    raise PlaitError(wrong)


def open_checkpoint_weights(path: Path, base: str | None = None, average: bool = False) -> CheckpointReader:
    """Open a checkpoint's model tensors by name. Weights of the optimizer's eval mode replace the trained ones, if saved.

    `base`: current path of the base weights. `average`: use the moving average. DamagedFileError, K012 without an average, K020.

    """
    manifest = read_manifest(path)
    if average and manifest.average is None:
        raise PlaitError(_missing_average_error(path))
    reader = CheckpointReader(path, manifest.files, manifest.tensors)
    for file in manifest.files:
        reader.open_file(file)
    reader.entries = {}
    for kind in ("model/", EVAL_PREFIX, *(["ema/"] if average else ())):
        reader.entries |= {n.removeprefix(kind): e for n, e in manifest.tensors.items() if n.startswith(kind)}
    return reader if manifest.base is None else _layer_on_base(reader, manifest.base, base or manifest.base.path)


def _missing_average_error(path: Path) -> Problem:
    fix = (
        "leave out --ema: the weights themselves",
        "Job(ema=plait.EMA(0.999)) keeps an average, from the step it is resumed at",
    )
    return Problem("K012", f"{path} has no average of the weights", why="its job had no ema when it was saved", fix=fix)


def _layer_on_base(top: CheckpointReader, base: BaseWeights, path: str) -> LayeredReader:
    """Combine a checkpoint with its base weights at `path`. K020 if their digest differs."""
    try:
        under = open_weights(Path(path))
        base.check(digest_weights(under), Path(path), under.entries)
    except PlaitError as error:
        problem, fix = error.problems[0], ("move the base back to its path", "export: --base PATH    its current path")
        if problem.code == "K020":
            raise
        what = f"the base of this checkpoint cannot be read: {problem.what}"
        raise PlaitError(Problem("K020", what, why=problem.why, fix=fix)) from None
    return LayeredReader(top, under, {name: source for name, (source, _, _) in base.tensors.items()})


class ShardIndex(Struct):
    """File of each tensor."""

    weight_map: dict[str, FileName]


def _open_indexed_folder(path: Path) -> CheckpointReader:
    """Open a Hugging Face folder by its index."""
    try:
        listed = convert(parse_strict_json(read_plain_file(path / INDEX_NAME, MAX_HEADER_BYTES, follow=False)), ShardIndex)
    except (OSError, *PARSE_ERRORS) as error:
        raise DamagedFileError(INDEX_NAME, str(error)[:300]) from None
    files = dict[str, Any]()
    for name, file in listed.weight_map.items():
        files.setdefault(file, set()).add(name)
    return _open_files(path, files)


def _open_files(folder: Path, files: dict[str, Any]) -> CheckpointReader:
    entries = {}
    for file, names in files.items():
        stored = ShardFile(folder / file).tensors
        if names is not None and not names <= stored.keys():
            raise DamagedFileError(file, f"{min(names - stored.keys())[:100]} is not in it, although the index says so")
        for name, tensor in stored.items():
            if names is None or name in names:
                piece = StoredChunk(file, name, (0,) * len(tensor.shape), tensor.shape, None)
                entries[name] = TensorEntry(tensor.dtype, tensor.shape, () if 0 in tensor.shape else (piece,))
    return CheckpointReader(folder, None, entries)


def _unsupported_error(path: Path) -> Problem:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    pickled = [p for p in files if p.suffix in PICKLE_SUFFIXES or p.name in PICKLE_SUFFIXES]
    fix = ("convert it to safetensors on a machine you trust: safetensors.torch.save_file(model.state_dict(), …)",)
    if pickled:
        why = "the format is pickle, which runs code when it is loaded; plait does not open it"
        return Problem("K007", f"{pickled[0]} cannot be read", why=why, fix=fix)
    why = "expected a .safetensors file, a folder with model.safetensors or its index, or a checkpoint of plait"
    return Problem("K007", f"there are no weights at {path}", why=why, fix=("--weights path/to/model.safetensors",))


def read_base(training: Training, base: BaseWeights) -> None:
    """Fill this rank's parts of the frozen parameters from a checkpoint's base weights. Collective.

    The path is `Job.weights`, or the one that the checkpoint records. K020 if the digest differs.

    """
    path = Path(training.job.weights or base.path)
    mine = {name: part for name, part in training_state.collect_model_parts(training).items() if name in base.tensors}
    word, reader, sources = dict[str, Any](), None, {name: source for name, (source, _, _) in base.tensors.items()}
    try:
        reader = open_weights(path)
    except PlaitError as error:
        word = encode_problems(error)
    raise_first_problem(exchange_json(training, word))
    assert reader is not None
    try:
        word = {"digest": digest_weights(reader, training)}
        base.check(word["digest"], path, reader.entries)
        for name, part in mine.items():
            reader.check_part(sources[name], part)
    except DamagedFileError as error:
        word = {"problems": [vars(damaged_problem(path, error))]}
    except PlaitError as error:
        word = encode_problems(error)
    raise_first_problem(exchange_json(training, word))
    for name, part in mine.items():
        reader.read_part(sources[name], part)
    training.base = structs.replace(base, path=str(path.resolve()))


PEFT_PREFIX = "base_model.model."
ADAPTER_PATTERN = re.compile(
    r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|ia3_l|hada_w\d_[ab]|lokr_w\d(_[ab])?|oft_r)\."
)
"""Adapter parameters whose initial values do not depend on the base weights."""


@dataclass(frozen=True)
class NameMatch:
    """The file's name for each of the model's names, or the fact that the name is new."""

    sources: dict[str, str]
    new: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    """Names of the file that match no tensor of the model."""


def match_names(names: Iterable[str], stored: Iterable[str], aliases: dict[str, str], rules: NameRules) -> NameMatch:
    """Find each of the model's names among the names `stored`. `aliases`: tied names of the model -> their stored name."""
    names, there, tied = list(names), set(stored), dict[str, list[str]]()
    for name, kept in aliases.items():
        tied.setdefault(kept, []).append(name)
    sources = dict[str, str]()
    for name in names:
        spelt = (other for each in (name, *tied.get(name, ())) for other in candidate_names(each, rules))
        source = next((other for other in spelt if other in there), None)
        if source is not None:
            sources[name] = source
    wrapped = {
        name.partition(".base_layer.")[0]
        for name, source in sources.items()
        if ".base_layer." not in source and ".base_layer." in name
    }
    lacking = [name for name in names if name not in sources]
    new = [name for name in lacking if _is_declared(strip_adapter_name(name), rules.new) or _is_adapter_part(name, wrapped)]
    taken = {*sources.values(), *(other for name in (*sources, *aliases) for other in candidate_names(name, rules))}
    left = [name for name in stored if name not in taken and not _is_unused(name, rules)]
    return NameMatch(sources, tuple(new), tuple(name for name in lacking if name not in new), tuple(left))


def strip_adapter_name(name: str) -> str:
    """Remove the words that peft adds to a name."""
    name = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
    return re.sub(r"\.(original_module|modules_to_save\.[^.]+)\.", ".", name)


def candidate_names(name: str, rules: NameRules) -> list[str]:
    """Return the names under which a file may store a tensor of the model, most likely first."""
    plain, words = strip_adapter_name(name), f"{rules.prefix}."
    found = [name, plain]
    if rules.prefix:
        found.append(plain.removeprefix(words) if plain.startswith(words) else words + plain)
    return list(dict.fromkeys(found))


def _is_adapter_part(name: str, wrapped: set[str]) -> bool:
    """Return whether the parameter belongs to an adapter of a layer whose base weights were found."""
    part = ADAPTER_PATTERN.search(name + ".")
    return part is not None and name[: part.start()] in wrapped


def _is_unused(name: str, rules: NameRules) -> bool:
    return _is_declared(name, rules.unused) or any(re.search(pattern, name) for pattern in rules.ignored)


def _is_declared(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def load_weights(training: Training, path: Path) -> None:
    """Fill the model's parameters and buffers from `path`. Collective; each rank reads its own parts.

    K008 if names or shapes differ from the model's (see [Note: Names of tensors]), K021 for adapters that initialize from
    the base weights. Values are cast to the model's dtype. Nothing changes unless all ranks can read all of their parts.

    """
    mine = training_state.collect_model_parts(training)
    frozen = [name for name, p in training.rank_model.params.items() if not p.requires_grad]
    said = exchange_json(training, {"names": list(mine), "frozen": frozen})
    everyone = list(dict.fromkeys(name for word in said for name in word["names"]))
    found = _agree_on_weights(training, path, everyone, mine)
    reader, sources = found.reader, found.sources
    for name, part in mine.items():
        if name in sources:
            reader.read_part(sources[name], part)
    training.rank_model.refresh()
    rewritten = training.rank_model.global_sketch.rewritten
    kept = {name for word in said for name in word["frozen"] if name in sources and name not in rewritten}
    training.base = _record_base(training, path, reader, {name: source for name, source in sources.items() if name in kept})


@dataclass(frozen=True)
class ReadableWeights:
    """Weights that all ranks can read, and the file's name for each of the model's names."""

    reader: CheckpointReader
    sources: dict[str, str]


def _agree_on_weights(training: Training, path: Path, everyone: list[str], mine: dict[str, Part]) -> ReadableWeights:
    """Open the weights at `path`, of which this rank reads `mine`. Collective; raises the error of any rank on all."""
    word, found = dict[str, Any](), None
    try:
        _check_adapter_init(training.model)
        found = _open_readable(training.model, path, everyone, mine)
    except DamagedFileError as error:
        word = {"problems": [vars(damaged_problem(path, error))]}
    except PlaitError as error:
        word = encode_problems(error)
    raise_first_problem(exchange_json(training, word))
    assert found is not None
    return found


def _open_readable(model: nn.Module, path: Path, everyone: list[str], mine: dict[str, Part]) -> ReadableWeights:
    """Open the weights at `path` and check every byte of the parts `mine`. DamagedFileError, K007, K008."""
    reader = open_weights(path)
    match = match_names(everyone, reader.entries, training_state.find_tied_names(model), get_name_rules(model))
    _check_complete(path, match)
    mine = {name: part for name, part in mine.items() if name in match.sources}
    wrong = list(_find_shape_mismatch(path, reader.entries, match.sources, mine))
    if wrong:
        raise PlaitError(wrong)
    for name, part in mine.items():
        reader.check_part(match.sources[name], part)
    return ReadableWeights(reader, match.sources)


def _record_base(training: Training, path: Path, reader: CheckpointReader, sources: dict[str, str]) -> BaseWeights | None:
    """Return the record of frozen parameters read from these weights, for checkpoints. Collective.

    None if checkpoints hold every parameter: without frozen ones, and with replica groups.

    """
    if not sources or training.plan.replica_groups > 1:
        return None
    specs = dict[str, list[Any]]()
    for name, part in training_state.collect_model_parts(training).items():
        specs[name] = [DTYPE_NAMES[part.tensor.dtype], part.shape] if part.tensor.dtype in DTYPE_NAMES else ["", ()]
    every = {name: spec for word in exchange_json(training, specs) for name, spec in word.items() if spec[0]}
    tensors = {
        name: (source, every[name][0], tuple(every[name][1])) for name, source in sources.items() if name in every
    }
    return BaseWeights(str(path.resolve()), digest_weights(reader, training), tensors)


def fill_model(model: nn.Module, path: Path) -> None:
    """Copy the weights at `path` into a full model, for example for inference. K002, K007, K008 as `load_weights`."""
    kept = {name for name, _ in model.named_parameters()} | set(model.state_dict(keep_vars=True))
    mine = {n: make_full_part(t) for n, t in (*model.named_parameters(), *model.named_buffers()) if n in kept}
    try:
        found = _open_readable(model, path, list(mine), mine)
        for name, source in found.sources.items():
            found.reader.read_part(source, mine[name])
    except DamagedFileError as error:
        raise PlaitError(damaged_problem(path, error)) from None


def _check_adapter_init(model: nn.Module) -> None:
    """K021 if a peft adapter initializes from base weights, which the constructor has not loaded yet."""
    for config in getattr(model, "peft_config", {}).values():
        how = getattr(config, "init_lora_weights", True)
        if isinstance(how, bool) or how in ("gaussian", "orthogonal"):
            how = next((flag for flag in ("use_dora", "use_kasa", "use_qalora") if getattr(config, flag, False)), "")
        if how:
            what = f"these adapters initialize from the base weights ({how}), before Job.weights are loaded"
            why = "they would use the constructor's random weights instead"
            fix = (
                "load the base in the job's model function:  from_pretrained(…), then get_peft_model(…), without Job.weights",
            )
            raise PlaitError(Problem("K021", what, why=why, fix=fix))


def _check_complete(path: Path, match: NameMatch) -> None:
    """K008 for names that the weights lack, and for names that the model lacks."""
    missing, unknown, problems = list(match.missing), list(match.unknown), list[Problem]()
    if not missing and not unknown:
        return
    fix = _suggest_fix(missing, unknown)
    for kind, names, others in (("lack", missing, unknown), ("have", unknown, missing)):
        if names:
            hint = did_you_mean(names[0], others) if others and kind == "lack" else ""
            hint = hint if hint.startswith("did") else ""
            what = f"the weights at {path} {kind} {names[0]}" + ("" if kind == "lack" else ", which the model lacks")
            more = f"{len(names)} names: {', '.join(names[:3])}" + (", …" if len(names) > 3 else "")
            problems.append(Problem("K008", what + (f"        {hint}" if hint else ""), why=more, fix=fix))
    raise PlaitError(problems)


def _suggest_fix(missing: list[str], unknown: list[str]) -> tuple[str, ...]:
    """Suggest a fix for names that differ. A wrapper of the model (LoRA, DDP, compile) adds a prefix or infix to its names."""
    if words := _common_prefix(dict.fromkeys(missing, ""), unknown):
        return (
            f"the job's model wraps the saved one (its names start with {words}): load the weights in the job's model"
            " function, before it is wrapped,    model.load_state_dict(load_file(…))    or  from_pretrained",
        )
    if words := _common_prefix(dict.fromkeys(unknown, ""), missing):
        return (f"save the weights again without the prefix {words} of a wrapped model",)
    same = "build the job's model with the same arguments as the saved one"
    module = (missing or unknown)[0].rpartition(".")[0] or (missing or unknown)[0]
    said = f'"{module}"' if missing else f'unused=("{module}",)'
    return same, f"declare intended differences in the job's model function:  plait.new_modules(model, {said})"


def _common_prefix(longer: dict[str, str], shorter: list[str]) -> str:
    """Return the prefix that most of the shorter names lack, if it is the same for them; else ""."""
    for name in shorter[:1]:
        for other in longer:
            if other.endswith(f".{name}") and (words := other.removesuffix(name)):
                fitting = sum(f"{words}{each}" in longer for each in shorter)
                return words if fitting > len(shorter) / 2 else ""
    return ""


def _find_shape_mismatch(
    path: Path, entries: dict[str, TensorEntry], sources: dict[str, str], mine: dict[str, Part]
) -> Iterator[Problem]:
    for name, part in mine.items():
        entry = entries[sources[name]]
        if entry.shape != part.shape:
            why = f"it is {list(entry.shape)} there, {list(part.shape)} in the model"
            yield Problem("K008", f"{name} has another shape in the weights at {path}", why=why)
        elif DTYPES[entry.dtype].is_floating_point != part.tensor.dtype.is_floating_point:
            why = f"it is {entry.dtype} there, {part.tensor.dtype} in the model"
            yield Problem("K008", f"{name} has another kind of dtype in the weights at {path}", why=why)
