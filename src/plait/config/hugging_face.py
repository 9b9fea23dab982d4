"""Jobs made from a Hugging Face config: `hf:FOLDER` replaces a job file, without code, data or weights.

The model is the one that `architectures` in the config names, built by transformers with its own classes. Code that the config refers to
(`auto_map`) is never run, and nothing is downloaded. The model predicts random tokens, which cost the same as real ones. Such a job can
be planned, sketched and verified, but training it has no use.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plait.config.errors import PlaitError, Problem, did_you_mean, summarize_error
from plait.config.files import parse_strict_json, read_plain_file
from plait.config.library import silence_imports

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

PREFIX = "hf:"
CONFIG = "config.json"
MAX_CONFIG_BYTES = 16 << 20
"""Maximum size of a config in bytes."""
LENGTH_KEYS = ("n_positions", "max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")
"""Names of the maximum sequence length in configs."""
DEFAULT_LENGTH, MAX_DEFAULT_LENGTH = 2048, 8192
"""Sequence length in tokens if the config has no limit, and the maximum without --seq."""
STEP_TOKENS = 4 << 20
"""Tokens per step without --batch."""
SAMPLE_COUNT = 1 << 24
IGNORED_KEYS = frozenset({
    "auto_map", "quantization_config", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation",
})  # fmt: skip
"""Keys of a config that load code or kernels, or describe the format of unused weights."""


@dataclass(frozen=True)
class LanguageTask:
    """A training task of language models, named by an auto class of transformers."""

    auto_class: str
    class_table: str
    """Table of transformers from model types to classes."""
    next_token: bool
    """Targets are the next tokens; else the same tokens."""
    has_decoder: bool = False
    """The model has an encoder and a decoder, each with a sequence."""

    def find_class(self, model_type: str) -> str | None:
        """Return the name of the class for this task, or None."""
        from transformers.models.auto import modeling_auto

        found = getattr(modeling_auto, self.class_table).get(model_type)
        return found[0] if isinstance(found, tuple) else found


TASKS = (
    LanguageTask("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", True, has_decoder=True),
    LanguageTask("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", False),
    LanguageTask("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", True),
)
"""In order of preference for a config without `architectures`: decoders have only the last task."""


class RandomTokens:
    """Samples of random tokens: sample i has the same tokens every time."""

    def __init__(self, vocabulary: int, length: int, task: LanguageTask):
        self.vocabulary, self.length, self.task = vocabulary, length, task

    def __len__(self) -> int:
        return SAMPLE_COUNT

    def __getitem__(self, i: int) -> "tuple[dict[str, Tensor], Tensor]":
        import torch

        draw = torch.Generator().manual_seed(i)
        tokens = torch.randint(self.vocabulary, (2, self.length + 1), generator=draw)
        inputs = {"input_ids": tokens[0, :-1]}
        if self.task.has_decoder:
            return inputs | {"decoder_input_ids": tokens[1, :-1]}, tokens[1, 1:]
        return inputs, tokens[0, 1:] if self.task.next_token else tokens[0, :-1]


def build_job_fields(
    name: str, /, seq: int | None = None, batch: int | None = None, steps: int = 1000, lr: float = 3e-4
) -> dict[str, Any]:
    """Build the fields of a `Job` from a folder with `config.json`, or from a config file. Prints the values taken by default.

    Raises J055 for an unreadable config, J056 if it is not a language model of transformers, J057 if `seq` is too long.
    """
    import torch

    values = _read_config(name)
    silence_imports()
    config, task = _parse_config(values, name)
    make = _make_builder(config, task)
    limit = _find_length_limit(config, make)
    length = limit.default_length if seq is None else seq
    if length < 1 or (limit.is_hard and length > (limit.length or length)):
        raise PlaitError(_too_long_problem(length, limit, name))
    samples = max(1, STEP_TOKENS // length) if batch is None else batch
    _print_once(f"job       {PREFIX}{name}: {task.find_class(config.model_type)} on random tokens{_describe_length(seq, limit)}")
    return {
        "model": make, "loss": cross_entropy, "batch": samples, "steps": steps,
        "data": lambda: RandomTokens(config.get_text_config().vocab_size, length, task),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=lr, fused=True),
    }  # fmt: skip


class LogitsOutput(Protocol):
    """The output of a language model of transformers."""

    logits: "Tensor"


def cross_entropy(outputs: LogitsOutput, targets: "Tensor") -> "Tensor":
    """Return the mean cross entropy over tokens."""
    from torch.nn import functional

    return functional.cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())


def find_untrainable(name: str) -> Iterator[Problem]:
    """J058: a job of random tokens cannot be trained."""
    if name.startswith(PREFIX):
        what, why = f"{name} cannot be trained: it has no data", "a job made from a config has random tokens as data"
        fix = ("write a job file with your data, such as examples/llama/job.py", f"plait plan {name}")
        yield Problem("J058", what, why=why, fix=fix)


def _read_config(name: str) -> dict[str, Any]:
    """Read the config file. Raises J055."""
    path = Path(name)
    file = path / CONFIG if os.path.isdir(path) else path
    download = f"hf download NAME {CONFIG} --local-dir FOLDER    saves the config of a model on the Hub; then  {PREFIX}FOLDER"
    if not os.path.exists(path):
        on_hub = bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name))
        why = f"looked in {Path.cwd()}" + "; plait does not look up names on the Hugging Face Hub and downloads nothing" * on_hub
        raise PlaitError(Problem("J055", f"the folder or config file {name[:200] or '(empty)'} does not exist", why, fix=(download,)))
    if not os.path.exists(file):
        fix = (f"{PREFIX}path/to/{CONFIG}", download)
        raise PlaitError(Problem("J055", f"the folder {name} has no {CONFIG}", fix=fix))
    try:
        values = parse_strict_json(read_plain_file(file, MAX_CONFIG_BYTES))
        why = "" if isinstance(values, dict) else f"it is a {type(values).__name__}, not an object with the config's values"
    except (OSError, ValueError, RecursionError) as error:
        values, why = {}, summarize_error(error)
    if why:
        raise PlaitError(Problem("J055", f"{file} is not a Hugging Face config", why=why, where=str(file), fix=(download,)))
    return values


def _parse_config(values: dict[str, Any], name: str) -> "tuple[PreTrainedConfig, LanguageTask]":
    """Build the transformers config, and find its training task. Raises J056, or U010 without transformers."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        what = "transformers is not installed"
        fix = ("pip install transformers",)
        raise PlaitError(Problem("U010", what, why=f"the model of {PREFIX}{name} needs it: {summarize_error(error)}", fix=fix)) from error
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise PlaitError(_unknown_type_problem(values, kind, name, list(CONFIG_MAPPING)))
    try:
        config = CONFIG_MAPPING[kind].from_dict(_strip_code(values))
    except Exception as error:  # config classes validate values in different ways
        what = f"transformers cannot read the config of {PREFIX}{name}"
        raise PlaitError(Problem("J056", what, why=summarize_error(error), where=name)) from error
    return config, _find_task(values, config, name)


def _unknown_type_problem(values: dict[str, Any], kind: object, name: str, known: list[str]) -> Problem:
    """J056 for a model type that the installed transformers does not support."""
    import transformers

    if kind is None:
        fix = ('"model_type": "llama"',)
        return Problem("J056", f"the config of {PREFIX}{name} has no model_type", where=name, fix=fix)
    what = f"transformers {transformers.__version__} has no model_type {str(kind)[:60]}"
    if "auto_map" in values:
        why = "its auto_map refers to code, and plait never runs the code of a config (trust_remote_code)"
        fix = ("write a job file whose model function builds the model: plait.Job(model=…)",)
        return Problem("J056", f"{PREFIX}{name} needs its own code: {what}", why=why, where=name, fix=fix)
    hint = did_you_mean(str(kind)[:60], known)
    hint = f"        {hint}" if hint.startswith("did") else ""
    return Problem("J056", what + hint, where=name, fix=("pip install --upgrade transformers", '"model_type": "llama"'))


def _strip_code(values: dict[str, Any]) -> dict[str, Any]:
    """Remove keys that load code or kernels from the config and from nested configs."""
    return {
        key: _strip_code(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in IGNORED_KEYS
    }


def _find_task(values: dict[str, Any], config: "PreTrainedConfig", name: str) -> LanguageTask:
    """Find the training task of a config. Raises J056 if its inputs are not sequences of tokens."""
    named = values.get("architectures") or []
    named = [str(each) for each in named] if isinstance(named, list) else [str(named)]
    able = [
        task for task in TASKS
        if task.find_class(config.model_type)
        and task.has_decoder <= bool(getattr(config, "is_encoder_decoder", False))
        and _reads_tokens(task, config)
    ]  # fmt: skip
    found = next((task for task in able if not named or task.find_class(config.model_type) in named), None)
    if found is not None:
        return found
    classes = list(dict.fromkeys(str(task.find_class(config.model_type)) for task in able))
    shown = ", ".join(named)[:120] or config.model_type
    if classes:
        why = f"for this model type, plait supports {' and '.join(classes)}"
        fix = tuple(f'"architectures": ["{each}"]    in a copy of the config' for each in classes)
        problem = Problem("J056", f"{shown} is not trained to predict tokens", why, name, fix)
    else:
        what, why = f"{shown} needs inputs other than token ids", "a job made from a config has only random tokens as data"
        fix = ("write a job file with your data: images, audio, …",)
        problem = Problem("J056", what, why, name, fix)
    raise PlaitError(problem)


def _reads_tokens(task: LanguageTask, config: "PreTrainedConfig") -> bool:
    """Return True if the model class of a task takes token ids."""
    import transformers

    kind = getattr(transformers, str(task.find_class(config.model_type)), None)
    has_words = isinstance(getattr(config.get_text_config(), "vocab_size", None), int)
    return has_words and getattr(kind, "main_input_name", "") == "input_ids"


def _make_builder(config: "PreTrainedConfig", task: LanguageTask) -> "Callable[[], PreTrainedModel]":
    """Return a function that builds the model in float32, independent of the config's dtype."""

    def build_model() -> "PreTrainedModel":
        import torch
        import transformers

        return getattr(transformers, task.auto_class).from_config(config, dtype=torch.float32, trust_remote_code=False)

    return build_model


@dataclass(frozen=True)
class LengthLimit:
    """The maximum sequence length of a model, from its config or its position table."""

    length: int | None = None
    name: str = ""
    """Key of the config."""
    is_hard: bool = False
    """The model has a table of this many positions, and cannot compute longer sequences."""

    @property
    def default_length(self) -> int:
        return min(self.length or DEFAULT_LENGTH, MAX_DEFAULT_LENGTH)


def _find_length_limit(config: "PreTrainedConfig", make: "Callable[[], PreTrainedModel]") -> LengthLimit:
    """Find the maximum sequence length. For a learned position table, it is the number of its rows."""
    import torch
    from torch import nn

    text = config.get_text_config()
    named = {name: value for name in LENGTH_KEYS if type(value := getattr(text, name, None)) is int and value > 0}
    if not named:
        return LengthLimit()
    name, length = next(iter(named.items()))
    try:
        with torch.device("meta"):
            model = make()
    except Exception:  # a model that computes with its weights is built elsewhere, where errors are printed
        return LengthLimit(length, name)
    words = {text.vocab_size, *model.get_input_embeddings().state_dict()["weight"].shape[:1]}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and length <= m.num_embeddings <= length + 2]
    tables = [m for m in tables if m.num_embeddings not in words]
    buffers = [b for b in model.buffers() if b.dim() > 1 and b.shape[0] == length]
    begins = max((0 if m.padding_idx is None else m.padding_idx + 1 for m in tables), default=0)
    rows = min((m.num_embeddings for m in tables), default=length)
    return LengthLimit(min(length, rows - begins), name, bool(tables or buffers))


def _too_long_problem(length: int, limit: LengthLimit, name: str) -> Problem:
    """J057 for an invalid or too long `--seq`."""
    if length < 1:
        return Problem("J057", f"--seq {length} is not a number of tokens ≥ 1", fix=(f"--seq {limit.default_length}",))
    what = f"--seq {length} is too long for {PREFIX}{name}, which allows at most {limit.length} tokens"
    why = f"{limit.name} in the config is the size of the model's position table"
    fix = (f"--seq {limit.length}", f'"{limit.name}": {length}    in a copy of the config, which makes the table larger')
    return Problem("J057", what, why, name, fix)


@cache
def _print_once(text: str) -> None:
    """Print a text once, even if the job is created several times."""
    print(text, file=sys.stderr)


def _describe_length(seq: int | None, limit: LengthLimit) -> str:
    """Describe a default length, or a given one beyond the config's limit."""
    if seq is None and limit.length is None:
        return f", seq={limit.default_length} (the config has no limit)"
    if seq is None and limit.default_length < (limit.length or 0):
        return f", seq={limit.default_length} (of {limit.name} {limit.length}; --seq N for another)"
    if seq is None:
        return f", seq={limit.default_length} (the config's {limit.name})"
    if limit.length is not None and seq > limit.length:
        return f"; --seq exceeds {limit.name} {limit.length}: the model computes such positions, but was not designed for them"
    return ""
