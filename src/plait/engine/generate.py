"""Text generation with the model being trained: prompts are continued token by token, with the same tokens under any plan.

Prompts are split over the data-parallel ranks; ranks that compute one model together run the same prompts. Each new token takes one
forward pass over the full text, without a KV cache, which models may lack. It is meant for samples during training, not for serving.
Texts of unequal length are padded on the right. In a causal model no position sees a later one, so the next token of each text is
read at its own last position.

After a forward pass, one all-reduce distributes the new token of every text. So tokens of the last stage reach the first, every rank
has all texts, and all ranks agree on which texts continue. No rank waits for one that has stopped.

A token is drawn with one random value in [0, 1), keyed by (seed, number of the prompt, position), so it is the same under every plan.

`Generate` runs it periodically, and writes to the terminal and to `samples.jsonl` of the run directory.

A row is ``{"step": 500, "prompt": 0, "tokens": [17, 4, …], "text": "…"}``: the new tokens of a prompt, and their text from `decode`.
A resumed run rewrites the rows of steps that it repeats.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.random import Philox
from torch import Tensor

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.engine.callbacks import Callback, RunningEngine
from plait.engine.evaluate import compute_outputs, forward_only, get_current_share, get_forward_size
from plait.engine.run_directory import parse_row_step
from plait.engine.step import Step
from plait.parallel.rank_model import RankModel
from plait.randomness.distributions import make_philox_key
from plait.tensors.collectives import all_gather_bytes
from plait.tensors.sharded_tensor import to_full

LENGTH_MULTIPLE = 16
"""Input lengths are multiples of this, so that not every token has a new shape."""


@dataclass(frozen=True)
class TokenSampling:
    """Options for continuing texts."""

    max_new_tokens: int
    """Maximum number of tokens to add."""
    temperature: float = 0.0
    """Divisor of the logits before a token is drawn; 0: take the likeliest token, the first of several."""
    top_k: int | None = None
    """Draw only from this many of the likeliest tokens."""
    stop: int | None = None
    """The token that ends a text."""
    seed: int = 0
    length: int | None = None
    """Pad all texts to this length, for a model with a fixed length; None: pad as far as needed."""

    def find_problem(self) -> str:
        """Describe the invalid option; "" if all are valid."""
        if self.max_new_tokens < 1:
            return f"max_new_tokens is {self.max_new_tokens}; it must be at least 1"
        if not self.temperature >= 0:
            return f"temperature is {self.temperature}; it must be at least 0"
        if self.top_k is not None and self.top_k < 1:
            return f"top_k is {self.top_k}; it must be at least 1, or None"
        return ""


def generate(
    rank_model: RankModel, prompts: Sequence[Sequence[int]], sampling: TokenSampling, inputs: Callable[[Tensor], Any] | None = None
) -> list[list[int]]:
    """Return the new tokens of each prompt, on every rank; an end token is included. All ranks call it with the same arguments.

    `inputs`: makes the model's inputs from tokens, an int64 tensor of shape [texts, length]; None: as in the job's data. U019 for
    invalid prompts or options, and for a model without logits of shape [texts, length, vocabulary].
    """
    texts = _check_prompts(rank_model, prompts, sampling)
    made = inputs or _make_input_builder(rank_model)
    size, share = get_forward_size(rank_model), get_current_share(rank_model)
    held, together = share.compute_sizes(len(texts)), rank_model.techniques.shards is not None or rank_model.plan.ep > 1
    first = np.cumsum([0, *held])
    with forward_only(rank_model):
        for offset in range(0, max(held), size):
            numbers = [range(first[r] + offset, first[r] + min(offset + size, n)) for r, n in enumerate(held)]
            everyone = [i for each in numbers for i in each]
            mine = list(numbers[share.rank]) or ([0] if together else [])
            while going := [i for i in everyone if _needs_token(texts[i], prompts[i], sampling)]:
                rank_model.setup.place.set_phase("evaluate")
                new = dict.fromkeys(going, 0)
                if together or any(i in new for i in mine):
                    rows = pad_texts([texts[i] for i in mine], _get_padded_length(texts, prompts, everyone, sampling))
                    last = _compute_last_logits(rank_model, made(rows.to(rank_model.device)), [len(texts[i]) for i in mine])
                    for i, logits in zip(mine, last):
                        if i in new and i in numbers[share.rank]:
                            new[i] = 1 + choose_token(logits, sampling, i, len(texts[i]))
                for i, token in zip(going, _sum_tokens(rank_model, [new[i] for i in going])):
                    texts[i].append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts)]


def pad_texts(texts: list[list[int]], length: int) -> Tensor:
    """Return the texts as rows of an int64 tensor of this length, padded on the right with zeros."""
    return torch.tensor([text + [0] * (length - len(text)) for text in texts], dtype=torch.int64)


def choose_token(logits: np.ndarray, sampling: TokenSampling, prompt: int, position: int) -> int:
    """Return the token at `position` of the text of prompt number `prompt`. `logits`: float64, of shape [vocabulary]."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = np.where(logits < np.partition(logits, -sampling.top_k)[-sampling.top_k], -np.inf, logits)
    sums = np.cumsum(np.exp(logits - logits.max()))
    raw = Philox(key=make_philox_key(sampling.seed, "generate", prompt), counter=position).random_raw(1)[0]
    return int(np.searchsorted(sums, float(raw >> np.uint64(11)) * 2.0**-53 * sums[-1], side="right"))


def _needs_token(text: list[int], prompt: Sequence[int], sampling: TokenSampling) -> bool:
    new = len(text) - len(prompt)
    return new < sampling.max_new_tokens and not (new and text[-1] == sampling.stop)


def _get_padded_length(texts: list[list[int]], prompts: Sequence[Sequence[int]], numbers: list[int], sampling: TokenSampling) -> int:
    """Return the padded length of the texts: the same on all ranks, and at most their maximum final length."""
    if sampling.length is not None:
        return sampling.length
    longest = max(len(texts[i]) for i in numbers)
    most = max(len(prompts[i]) for i in numbers) + sampling.max_new_tokens - 1
    return min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, most)


def _compute_last_logits(rank_model: RankModel, inputs: object, lengths: list[int]) -> list[np.ndarray]:
    """Return the logits at the last position of each text, in float64; empty on a rank that does not report them."""
    outputs, here = compute_outputs(rank_model, inputs, len(lengths))
    if not here:
        return []
    logits = _extract_logits(outputs)
    if logits.dim() != 3 or logits.shape[0] != len(lengths):
        why = f"expected [texts, length, vocabulary], found {list(logits.shape)} for {len(lengths)} texts"
        raise _make_error("the model's outputs are not logits of the next token", why)
    last = torch.tensor(lengths, device=rank_model.device) - 1
    found = to_full(logits[torch.arange(len(lengths), device=rank_model.device), last])
    first = not any(rank_model.mesh.coordinates[axis] for axis in ("cp", "tp"))
    return list(found.double().cpu().numpy()) if first else []


def _extract_logits(outputs: object) -> Tensor:
    found = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", outputs)
    if not isinstance(found, Tensor):
        raise _make_error("the model's outputs have no logits", f"it returns {type(outputs).__name__}")
    return found


def _sum_tokens(rank_model: RankModel, mine: list[int]) -> list[int]:
    """Sum the new tokens of continuing texts over all ranks: each token is set on one rank, plus one."""
    if rank_model.mesh.world_group is None:
        return [token - 1 for token in mine]
    row = torch.tensor(mine, dtype=torch.int64, device=rank_model.device)
    dist.all_reduce(row, group=rank_model.mesh.world_group)
    return [token - 1 for token in row.tolist()]


def _make_input_builder(rank_model: RankModel) -> Callable[[Tensor], Any]:
    """Make a function from tokens to the model's inputs, in the form of the job's data."""
    example = rank_model.setup.make_samples(1)[0]
    if isinstance(example, Tensor) and example.dim() == 2 and not example.is_floating_point():
        return lambda tokens: tokens
    if isinstance(example, (tuple, list)) and len(example) == 1:
        return lambda tokens: (tokens,)
    if isinstance(example, dict) and "input_ids" in example and example.keys() <= _TOKEN_INPUTS.keys() | {"labels"}:
        return lambda tokens: {name: make(tokens) for name, make in _TOKEN_INPUTS.items() if name in example}
    kind = f"a dict of {', '.join(map(str, example))}" if isinstance(example, dict) else type(example).__name__
    fix = ("engine.generate(…, inputs=lambda tokens: {…})    tokens: int64, [texts, length]",)
    raise _make_error("plait cannot make the model's inputs from tokens", f"its inputs are {kind}", fix)


_TOKEN_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "input_ids": lambda tokens: tokens,
    "attention_mask": torch.ones_like,
    "position_ids": lambda tokens: torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
}
"""Inputs of Hugging Face models: padding is on the right, where a causal model does not attend."""


def _check_prompts(rank_model: RankModel, prompts: Sequence[Sequence[int]], sampling: TokenSampling) -> list[list[int]]:
    """Return the prompts as lists. Raises U019 on all ranks for invalid prompts, or for prompts that differ between ranks."""
    try:
        texts = [[int(token) for token in prompt] for prompt in prompts]
    except (TypeError, ValueError) as error:
        raise _make_error("a prompt is not a list of token ids", summarize_error(error)) from None
    short = [i for i, text in enumerate(texts) if not text or min(text) < 0]
    if short or not texts:
        what = f"prompt {short[0]} has no tokens, or negative ones" if short else "the list of prompts is empty"
        raise _make_error(what, "each prompt needs at least one token")
    if why := sampling.find_problem():
        raise _make_error("a generation option is invalid", why)
    longest = max(map(len, texts)) + sampling.max_new_tokens - 1
    if sampling.length is not None and sampling.length < longest:
        raise _make_error(
            f"length={sampling.length} is too short", f"the longest text may have {longest} tokens before its last"
        )
    if len(set(all_gather_bytes(repr((texts, sampling)).encode(), rank_model.mesh.world_group, rank_model.device))) > 1:
        raise _make_error("prompts or options differ between ranks", "all ranks must call generate with the same prompts and options")
    return texts


def _make_error(what: str, why: str, fix: tuple[str, ...] = ()) -> PlaitError:
    return PlaitError(Problem("U019", what, why=why, fix=fix))


PRINTED_SAMPLES = 3
"""Samples to print; the file has all."""


class Generate(Callback):
    """Continues `prompts`, lists of token ids, every `every` steps; 0: after each evaluation.

    `decode` converts a list of tokens to text, such as a tokenizer's `decode`. The other options are those of `Engine.generate`. U018
    for an invalid number of steps; U019 as there.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], every: int = 0, decode: Callable[[list[int]], str] | None = None, *,
        max_new_tokens: int = 64, temperature: float = 0.0, top_k: int | None = None, stop: int | None = None,
        seed: int = 0, length: int | None = None, inputs: Callable[[Tensor], Any] | None = None,
    ):  # fmt: skip
        if every < 0:
            raise PlaitError(Problem("U018", f"Generate(every={every}) is invalid", why="it must be a number of steps, or 0"))
        self.prompts, self.every, self.decode, self.inputs = prompts, every, decode, inputs
        self.numbers: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "stop": stop, "seed": seed,
            "length": length,
        }  # fmt: skip

    def on_start(self, engine: RunningEngine) -> None:
        """Remove samples of steps that will be repeated."""
        path = get_samples_path(engine)
        if engine.place.rank == 0 and path.exists():
            kept = [row for row in path.read_bytes().splitlines() if parse_row_step(row) <= engine.position.step]
            beside = path.with_name(f"{path.name}.tmp")
            beside.write_bytes(b"".join(row + b"\n" for row in kept))
            os.replace(beside, path)

    def on_step(self, engine: RunningEngine, step: Step) -> None:
        if self.every and step.step % self.every == 0:
            self._generate(engine)

    def on_evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        """Generate if `every` is 0."""
        if not self.every:
            self._generate(engine)

    def _generate(self, engine: RunningEngine) -> None:
        found = engine.generate(self.prompts, inputs=self.inputs, **self.numbers)
        if engine.place.rank != 0:
            return
        step = engine.position.step
        get_samples_path(engine).parent.mkdir(parents=True, exist_ok=True)
        with open(get_samples_path(engine), "a", encoding="utf-8") as file:
            for i, tokens in enumerate(found):
                text = None if self.decode is None else self.decode(tokens)
                file.write(json.dumps({"step": step, "prompt": i, "tokens": tokens, "text": text}) + "\n")
                if i < PRINTED_SAMPLES:
                    print(f"sample {i} at step {step}: {tokens if text is None else text}")


def get_samples_path(engine: RunningEngine) -> Path:
    """Return the path of the run's samples, next to its checkpoints."""
    return engine.checkpoints.directory.parent / "samples.jsonl"
