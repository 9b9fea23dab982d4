"""Text from the model in training: prompts are continued token by token, under any plan, with the same tokens.

Prompts are shared out over the ranks that have other samples; ranks that compute one model together run the same ones. Each new
token takes one forward pass over the whole text, without a cache of keys and values, which models are free to have or not: it is
for looking at samples between steps, and not for serving. Texts of unequal length are padded on the right. In a causal model no
position sees a later one, so each text's next token is read at its own last position as if it were alone.

After a forward pass, one sum over all ranks tells everyone the new token of every text: so later stages' tokens reach the first
stage, every rank has all texts, and all know alike whether any text goes on. No rank waits for one that has stopped.

A token is drawn with one number in [0, 1) that is keyed by (seed, number of the prompt, position): no plan changes it.

`Generate` does it now and then: on the terminal, and in `samples.jsonl` of the run directory.

A row is ``{"step": 500, "prompt": 0, "tokens": [17, 4, …], "text": "…"}``: the new tokens of a prompt, and what `decode` makes of
them. The rows of steps that a resumed run makes again are made again too.
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

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.engine.callbacks import Callback, RunningEngine
from plait.engine.evaluate import forward_only, forward_size, outputs_here, share_now
from plait.engine.run_directory import step_of
from plait.engine.step import Step
from plait.parallel.rank_model import RankModel
from plait.randomness.distributions import key
from plait.tensors.collectives import exchange
from plait.tensors.sharded_tensor import whole

STRETCH = 16
"""Lengths of what the model is given are multiples of it, so that not every token brings new shapes."""


@dataclass(frozen=True)
class TokenSampling:
    """How texts go on."""

    new: int
    """Tokens to add at most."""
    temperature: float = 0.0
    """What logits are divided by before one is drawn; 0: the likeliest is taken, the first of several."""
    top_k: int | None = None
    """Draw among so many of the likeliest only."""
    stop: int | None = None
    """The token that ends a text."""
    seed: int = 0
    length: int | None = None
    """Pad all texts to this length, for a model that takes one length only; None: as far as needed."""

    def problem(self) -> str:
        """What is wrong, or nothing."""
        if self.new < 1:
            return f"max_new_tokens is {self.new}; it is at least 1"
        if not self.temperature >= 0:
            return f"temperature is {self.temperature}; it is at least 0"
        if self.top_k is not None and self.top_k < 1:
            return f"top_k is {self.top_k}; it is at least 1, or None"
        return ""


def generate(
    rank_model: RankModel, prompts: Sequence[Sequence[int]], how: TokenSampling, inputs: Callable[[Tensor], Any] | None = None
) -> list[list[int]]:
    """The new tokens of each prompt, on every rank; the one that ended a text is the last. All ranks call it alike.

    `inputs`: makes the model's inputs of tokens, an int64 tensor of shape [texts, length]; None: as in the job's data.
    U019 for prompts or options that cannot be, and for a model that gives no logits of shape [texts, length, vocabulary].
    """
    texts = _checked(rank_model, prompts, how)
    made = inputs or _like_data(rank_model)
    size, share = forward_size(rank_model), share_now(rank_model)
    held, together = share.sizes(len(texts)), rank_model.techniques.shards is not None or rank_model.plan.ep > 1
    first = np.cumsum([0, *held])
    with forward_only(rank_model):
        for offset in range(0, max(held), size):
            numbers = [range(first[r] + offset, first[r] + min(offset + size, n)) for r, n in enumerate(held)]
            everyone = [i for each in numbers for i in each]
            mine = list(numbers[share.rank]) or ([0] if together else [])
            while going := [i for i in everyone if _goes_on(texts[i], prompts[i], how)]:
                rank_model.setup.place.within("evaluate")
                new = dict.fromkeys(going, 0)
                if together or any(i in new for i in mine):
                    rows = padded([texts[i] for i in mine], _length(texts, prompts, everyone, how))
                    last = _last_logits(rank_model, made(rows.to(rank_model.device)), [len(texts[i]) for i in mine])
                    for i, logits in zip(mine, last):
                        if i in new and i in numbers[share.rank]:
                            new[i] = 1 + chosen_token(logits, how, i, len(texts[i]))
                for i, token in zip(going, _told(rank_model, [new[i] for i in going])):
                    texts[i].append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts)]


def padded(texts: list[list[int]], length: int) -> Tensor:
    """The texts as rows of an int64 tensor of this length, padded on the right with zeros."""
    return torch.tensor([text + [0] * (length - len(text)) for text in texts], dtype=torch.int64)


def chosen_token(logits: np.ndarray, how: TokenSampling, prompt: int, position: int) -> int:
    """The token at `position` of the text of prompt number `prompt`. `logits`: float64, of shape [vocabulary]."""
    if how.temperature == 0:
        return int(np.argmax(logits))
    logits = logits / how.temperature
    if how.top_k is not None and how.top_k < len(logits):
        logits = np.where(logits < np.partition(logits, -how.top_k)[-how.top_k], -np.inf, logits)
    sums = np.cumsum(np.exp(logits - logits.max()))
    raw = Philox(key=key(how.seed, "generate", prompt), counter=position).random_raw(1)[0]
    return int(np.searchsorted(sums, float(raw >> np.uint64(11)) * 2.0**-53 * sums[-1], side="right"))


def _goes_on(text: list[int], prompt: Sequence[int], how: TokenSampling) -> bool:
    new = len(text) - len(prompt)
    return new < how.new and not (new and text[-1] == how.stop)


def _length(texts: list[list[int]], prompts: Sequence[Sequence[int]], numbers: list[int], how: TokenSampling) -> int:
    """What texts are padded to: the same on all ranks, and never more than they may grow to."""
    if how.length is not None:
        return how.length
    longest = max(len(texts[i]) for i in numbers)
    most = max(len(prompts[i]) for i in numbers) + how.new - 1
    return min(-(-longest // STRETCH) * STRETCH, most)


def _last_logits(rank_model: RankModel, inputs: object, lengths: list[int]) -> list[np.ndarray]:
    """Of each text the logits at its last position, in float64; nothing on a rank that has none, or need not say them."""
    outputs, here = outputs_here(rank_model, inputs, len(lengths))
    if not here:
        return []
    logits = _logits(outputs)
    if logits.dim() != 3 or logits.shape[0] != len(lengths):
        why = f"expected [texts, length, vocabulary], found {list(logits.shape)} for {len(lengths)} texts"
        raise _wrong("the model's outputs are no logits of the next token", why)
    last = torch.tensor(lengths, device=rank_model.device) - 1
    found = whole(logits[torch.arange(len(lengths), device=rank_model.device), last])
    first = not any(rank_model.mesh.at[axis] for axis in ("cp", "tp"))
    return list(found.double().cpu().numpy()) if first else []


def _logits(outputs: object) -> Tensor:
    found = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", outputs)
    if not isinstance(found, Tensor):
        raise _wrong("the model's outputs have no logits", f"it gives {type(outputs).__name__}")
    return found


def _told(rank_model: RankModel, mine: list[int]) -> list[int]:
    """What all ranks say together of the texts that go on: each token is one rank's, plus one."""
    if rank_model.mesh.everyone is None:
        return [token - 1 for token in mine]
    row = torch.tensor(mine, dtype=torch.int64, device=rank_model.device)
    dist.all_reduce(row, group=rank_model.mesh.everyone)
    return [token - 1 for token in row.tolist()]


def _like_data(rank_model: RankModel) -> Callable[[Tensor], Any]:
    """Tokens -> the model's inputs, of the kind that the job's data has."""
    example = rank_model.setup.samples(1)[0]
    if isinstance(example, Tensor) and example.dim() == 2 and not example.is_floating_point():
        return lambda tokens: tokens
    if isinstance(example, (tuple, list)) and len(example) == 1:
        return lambda tokens: (tokens,)
    if isinstance(example, dict) and "input_ids" in example and example.keys() <= _OF_TOKENS.keys() | {"labels"}:
        return lambda tokens: {name: make(tokens) for name, make in _OF_TOKENS.items() if name in example}
    kind = f"a dict of {', '.join(map(str, example))}" if isinstance(example, dict) else type(example).__name__
    fix = ("engine.generate(…, inputs=lambda tokens: {…})    tokens: int64, [texts, length]",)
    raise _wrong("plait does not know how the model is given tokens", f"its inputs are {kind}", fix)


_OF_TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "input_ids": lambda tokens: tokens,
    "attention_mask": torch.ones_like,
    "position_ids": lambda tokens: torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
}
"""What Hugging Face's models are given: padding is on the right, where a causal model does not look."""


def _checked(rank_model: RankModel, prompts: Sequence[Sequence[int]], how: TokenSampling) -> list[list[int]]:
    """The prompts as lists. U019 on all ranks for what is wrong, also where ranks were given other ones."""
    try:
        texts = [[int(token) for token in prompt] for prompt in prompts]
    except (TypeError, ValueError) as error:
        raise _wrong("a prompt is not a list of token ids", in_a_line(error)) from None
    short = [i for i, text in enumerate(texts) if not text or min(text) < 0]
    if short or not texts:
        what = f"prompt {short[0]} has no tokens, or negative ones" if short else "there are no prompts"
        raise _wrong(what, "a text goes on from at least one token")
    if why := how.problem():
        raise _wrong("a text cannot go on so", why)
    longest = max(map(len, texts)) + how.new - 1
    if how.length is not None and how.length < longest:
        raise _wrong(
            f"length={how.length} is too short", f"the longest text may come to {longest} tokens before its last"
        )
    if len(set(exchange(repr((texts, how)).encode(), rank_model.mesh.everyone, rank_model.device))) > 1:
        raise _wrong("ranks were given other prompts, or other options", "all of them continue the same ones")
    return texts


def _wrong(what: str, why: str, fix: tuple[str, ...] = ()) -> PlaitError:
    return PlaitError(Problem("U019", what, why=why, fix=fix))


SHOWN = 3
"""Samples that are printed; the file has all."""


class Generate(Callback):
    """Continues `prompts`, lists of token ids, every `every` steps; 0: after each evaluation.

    `decode` makes text of a list of tokens, such as a tokenizer's `decode`. The other options are those of `Engine.generate`.
    U018 for a number of steps that cannot be; U019 as there.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], every: int = 0, decode: Callable[[list[int]], str] | None = None, *,
        max_new_tokens: int = 64, temperature: float = 0.0, top_k: int | None = None, stop: int | None = None,
        seed: int = 0, length: int | None = None, inputs: Callable[[Tensor], Any] | None = None,
    ):  # fmt: skip
        if every < 0:
            raise PlaitError(Problem("U018", f"Generate(every={every}) cannot be", why="it is a number of steps, or 0"))
        self.prompts, self.every, self.decode, self.inputs = prompts, every, decode, inputs
        self.numbers: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "stop": stop, "seed": seed,
            "length": length,
        }  # fmt: skip

    def on_start(self, engine: RunningEngine) -> None:
        """Forget samples of steps that will be made again."""
        path = file_of(engine)
        if engine.place.rank == 0 and path.exists():
            kept = [row for row in path.read_bytes().splitlines() if step_of(row) <= engine.position.step]
            beside = path.with_name(f"{path.name}.tmp")
            beside.write_bytes(b"".join(row + b"\n" for row in kept))
            os.replace(beside, path)

    def on_step(self, engine: RunningEngine, step: Step) -> None:
        if self.every and step.step % self.every == 0:
            self._generate(engine)

    def on_evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        """Generate, if there is no other time."""
        if not self.every:
            self._generate(engine)

    def _generate(self, engine: RunningEngine) -> None:
        found = engine.generate(self.prompts, inputs=self.inputs, **self.numbers)
        if engine.place.rank != 0:
            return
        step = engine.position.step
        file_of(engine).parent.mkdir(parents=True, exist_ok=True)
        with open(file_of(engine), "a", encoding="utf-8") as file:
            for i, tokens in enumerate(found):
                text = None if self.decode is None else self.decode(tokens)
                file.write(json.dumps({"step": step, "prompt": i, "tokens": tokens, "text": text}) + "\n")
                if i < SHOWN:
                    print(f"sample {i} at step {step}: {tokens if text is None else text}")


def file_of(engine: RunningEngine) -> Path:
    """The run's samples, beside its checkpoints."""
    return engine.checkpoints.directory.parent / "samples.jsonl"
