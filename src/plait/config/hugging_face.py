"""A job made of a Hugging Face config alone: `hf:FOLDER` in the place of a job file. No code, no data and no weights are needed.

The model is the one that the config's `architectures` names, built by transformers with its own classes; code that the config points to
(`auto_map`) is never run, and nothing is downloaded. It learns to predict random tokens, which cost what a text's tokens cost. Such a
job can be planned, sketched and verified, and is not worth training.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plait.config.errors import PlaitError, Problem, did_you_mean, in_a_line
from plait.config.files import loads, read_plain
from plait.config.library import hush_imports

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

PREFIX = "hf:"
CONFIG = "config.json"
LARGEST = 16 << 20
"""Bytes of a config that are read."""
LENGTHS = ("n_positions", "max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")
"""What configs call the longest sequence."""
DEFAULT_LENGTH, LONGEST_DEFAULT = 2048, 8192
"""Tokens of a sequence if the config has no limit, and the most that are taken without --seq."""
STEP_TOKENS = 4 << 20
"""Tokens of a step without --batch."""
SAMPLES = 1 << 24
IGNORED = frozenset({
    "auto_map", "quantization_config", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation",
})  # fmt: skip
"""Keys of a config that name code or kernels to load, or a format of weights that are not read."""


@dataclass(frozen=True)
class LanguageTask:
    """What language models are trained for, by the auto classes of transformers."""

    auto: str
    classes: str
    """The table of transformers from model types to classes."""
    next_token: bool
    """Targets are the tokens one place later; else the same tokens."""
    two_sided: bool = False
    """An encoder and a decoder, each with a sequence."""

    def class_of(self, model_type: str) -> str | None:
        """The name of the class that has this task."""
        from transformers.models.auto import modeling_auto

        found = getattr(modeling_auto, self.classes).get(model_type)
        return found[0] if isinstance(found, tuple) else found


TASKS = (
    LanguageTask("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", True, two_sided=True),
    LanguageTask("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", False),
    LanguageTask("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", True),
)
"""Without `architectures` a model type has the first task that it has a class for: decoders have the last alone."""


class RandomTokens:
    """Samples of random tokens: sample i is the same every time."""

    def __init__(self, vocabulary: int, length: int, task: LanguageTask):
        self.vocabulary, self.length, self.task = vocabulary, length, task

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> "tuple[dict[str, Tensor], Tensor]":
        import torch

        draw = torch.Generator().manual_seed(i)
        tokens = torch.randint(self.vocabulary, (2, self.length + 1), generator=draw)
        inputs = {"input_ids": tokens[0, :-1]}
        if self.task.two_sided:
            return inputs | {"decoder_input_ids": tokens[1, :-1]}, tokens[1, 1:]
        return inputs, tokens[0, 1:] if self.task.next_token else tokens[0, :-1]


def build_job_fields(
    name: str, /, seq: int | None = None, batch: int | None = None, steps: int = 1000, lr: float = 3e-4
) -> dict[str, Any]:
    """The fields of the `Job` that a folder with `config.json`, or a config file, stands for; what was taken by default is printed.

    J055 for a config that cannot be read, J056 for one that is no language model of transformers, J057 for a `seq` that is too long.
    """
    import torch

    values = _read(name)
    hush_imports()
    config, task = _understand(values, name)
    make = _maker(config, task)
    limit = _limit(config, make)
    length = limit.default if seq is None else seq
    if length < 1 or (limit.hard and length > (limit.length or length)):
        raise PlaitError(_too_long(length, limit, name))
    samples = max(1, STEP_TOKENS // length) if batch is None else batch
    _say(f"job       {PREFIX}{name}: {task.class_of(config.model_type)} on random tokens{_describe_length(seq, limit)}")
    return {
        "model": make, "loss": cross_entropy, "batch": samples, "steps": steps,
        "data": lambda: RandomTokens(config.get_text_config().vocab_size, length, task),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=lr, fused=True),
    }  # fmt: skip


class LogitsOutput(Protocol):
    """What a language model of transformers returns."""

    logits: "Tensor"


def cross_entropy(outputs: LogitsOutput, targets: "Tensor") -> "Tensor":
    """The mean over tokens."""
    from torch.nn import functional

    return functional.cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())


def untrainable(name: str) -> Iterator[Problem]:
    """J058: a job of random tokens is not trained."""
    if name.startswith(PREFIX):
        what, why = f"{name} cannot be trained: it has no data", "a job made from a config has random tokens as data"
        fix = ("write a job file with your data, such as examples/llama/job.py", f"plait plan {name}")
        yield Problem("J058", what, why=why, fix=fix)


def _read(name: str) -> dict[str, Any]:
    """The config, as its file has it. J055."""
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
        values = loads(read_plain(file, LARGEST))
        why = "" if isinstance(values, dict) else f"it is a {type(values).__name__}, not an object with the config's values"
    except (OSError, ValueError, RecursionError) as error:
        values, why = {}, in_a_line(error)
    if why:
        raise PlaitError(Problem("J055", f"{file} is not a Hugging Face config", why=why, where=str(file), fix=(download,)))
    return values


def _understand(values: dict[str, Any], name: str) -> "tuple[PreTrainedConfig, LanguageTask]":
    """The config as an object of transformers, and what its model is trained for. J056; U010 without transformers."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        what = "transformers is not installed"
        fix = ("pip install transformers",)
        raise PlaitError(Problem("U010", what, why=f"plait needs it to build the model of {PREFIX}{name}: {in_a_line(error)}", fix=fix)) from error
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise PlaitError(_unknown(values, kind, name, list(CONFIG_MAPPING)))
    try:
        config = CONFIG_MAPPING[kind].from_dict(_without_code(values))
    except Exception as error:  # classes of configs check values in their own ways
        what = f"transformers cannot read the config of {PREFIX}{name}"
        raise PlaitError(Problem("J056", what, why=in_a_line(error), where=name)) from error
    return config, _task_of(values, config, name)


def _unknown(values: dict[str, Any], kind: object, name: str, known: list[str]) -> Problem:
    """J056 of a model type that this transformers does not have."""
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


def _without_code(values: dict[str, Any]) -> dict[str, Any]:
    """The config without keys that would have code or kernels loaded, in the configs inside of it too."""
    return {
        key: _without_code(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in IGNORED
    }


def _task_of(values: dict[str, Any], config: "PreTrainedConfig", name: str) -> LanguageTask:
    """What the model of a config is trained for. J056 where that is no sequence of tokens."""
    named = values.get("architectures") or []
    named = [str(each) for each in named] if isinstance(named, list) else [str(named)]
    able = [
        task for task in TASKS
        if task.class_of(config.model_type) and task.two_sided <= bool(getattr(config, "is_encoder_decoder", False)) and _reads_tokens(task, config)
    ]  # fmt: skip
    found = next((task for task in able if not named or task.class_of(config.model_type) in named), None)
    if found is not None:
        return found
    classes = list(dict.fromkeys(str(task.class_of(config.model_type)) for task in able))
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
    """Whether the class of a task takes token ids."""
    import transformers

    kind = getattr(transformers, str(task.class_of(config.model_type)), None)
    has_words = isinstance(getattr(config.get_text_config(), "vocab_size", None), int)
    return has_words and getattr(kind, "main_input_name", "") == "input_ids"


def _maker(config: "PreTrainedConfig", task: LanguageTask) -> "Callable[[], PreTrainedModel]":
    """What builds the model, in float32 whatever format the config's weights have."""

    def make() -> "PreTrainedModel":
        import torch
        import transformers

        return getattr(transformers, task.auto).from_config(config, dtype=torch.float32, trust_remote_code=False)

    return make


@dataclass(frozen=True)
class LengthLimit:
    """The longest sequence of a model, as its config or its table of positions says."""

    length: int | None = None
    name: str = ""
    """The key of the config."""
    hard: bool = False
    """The model has a table with this many positions, and cannot compute longer sequences."""

    @property
    def default(self) -> int:
        return min(self.length or DEFAULT_LENGTH, LONGEST_DEFAULT)


def _limit(config: "PreTrainedConfig", make: "Callable[[], PreTrainedModel]") -> LengthLimit:
    """How long a sequence may be. A model with a learned table of positions has the rows of that table."""
    import torch
    from torch import nn

    text = config.get_text_config()
    named = {name: value for name in LENGTHS if type(value := getattr(text, name, None)) is int and value > 0}
    if not named:
        return LengthLimit()
    name, length = next(iter(named.items()))
    try:
        with torch.device("meta"):
            model = make()
    except Exception:  # one that computes with its weights; it is built in other ways, and errors are shown then
        return LengthLimit(length, name)
    words = {text.vocab_size, *model.get_input_embeddings().state_dict()["weight"].shape[:1]}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and length <= m.num_embeddings <= length + 2]
    tables = [m for m in tables if m.num_embeddings not in words]
    buffers = [b for b in model.buffers() if b.dim() > 1 and b.shape[0] == length]
    begins = max((0 if m.padding_idx is None else m.padding_idx + 1 for m in tables), default=0)
    rows = min((m.num_embeddings for m in tables), default=length)
    return LengthLimit(min(length, rows - begins), name, bool(tables or buffers))


def _too_long(length: int, limit: LengthLimit, name: str) -> Problem:
    """J057."""
    if length < 1:
        return Problem("J057", f"--seq {length} is not a number of tokens ≥ 1", fix=(f"--seq {limit.default}",))
    what = f"--seq {length} is too long for {PREFIX}{name}, which allows at most {limit.length} tokens"
    why = f"{limit.name} in the config is the size of the model's position table"
    fix = (f"--seq {limit.length}", f'"{limit.name}": {length}    in a copy of the config, which makes the table larger')
    return Problem("J057", what, why, name, fix)


@cache
def _say(text: str) -> None:
    """Print it once, however often the job is made."""
    print(text, file=sys.stderr)


def _describe_length(seq: int | None, limit: LengthLimit) -> str:
    """The length that was taken by default, or that one is beyond what the config says."""
    if seq is None and limit.length is None:
        return f", seq={limit.default} (the config has no limit)"
    if seq is None and limit.default < (limit.length or 0):
        return f", seq={limit.default} (of {limit.name} {limit.length}; --seq N for another)"
    if seq is None:
        return f", seq={limit.default} (the config's {limit.name})"
    if limit.length is not None and seq > limit.length:
        return f"; --seq is beyond {limit.name} {limit.length}, which the model has no table for: it computes on positions that it was not made for"
    return ""
