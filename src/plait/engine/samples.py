"""What the model in training makes of some prompts, now and then: on the terminal, and in `samples.jsonl` of the run directory.

A row is ``{"step": 500, "prompt": 0, "tokens": [17, 4, …], "text": "…"}``: the new tokens of a prompt, and what `decode` makes of
them. The rows of steps that a resumed run makes again are made again too.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.engine.callbacks import Callback, RunningEngine
from plait.engine.run_directory import step_of
from plait.engine.step import Step

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
        """Generate, if it is time."""
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
