"""The units that torch.compile compiles, and what became of it (see `parallel/compiled.py`)."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from plait.tensors.torch_private import compiled_so_far


class CompiledUnits:
    """The compiled forward of each class, one for all units of the class; and what became of it."""

    def __init__(self, names: list[str], left: dict[str, str]):
        self.names, self.left = names, left
        self.made: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.before = compiled_so_far()
        self.asked = False

    def of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """(module, its arguments) -> what the forward gives."""
        if forward not in self.made:
            own = not forward.__module__.startswith("torch.")
            self.made[forward] = torch.compile(forward if own else _ours(forward))
        return self.made[forward]

    def notes(self) -> list[str]:
        """What stays uncompiled, or is left out, by this plan; in a line for units that are alike."""
        rows = dict.fromkeys((re.sub(r"\d+", "*", name), why) for name, why in self.left.items())
        return [f"compile: {name} {why}" for name, why in rows]

    def news(self) -> list[str]:
        """After a step: what torch.compile gave up, or that it compiled nothing at all; each once."""
        (graphs, given_up), before = compiled_so_far(), self.before
        lines = []
        if self.made and graphs == before[0] and not self.asked:
            lines.append(
                "compile: torch.compile made no graph, everything runs uncompiled (TORCH_LOGS=graph_breaks says why)"
            )
        if given_up > before[1]:
            lines.append(
                "compile: a part of a unit runs uncompiled from now on, it was compiled too often (TORCH_LOGS=recompiles)"
            )
        self.asked, self.before = True, (graphs, given_up)
        return lines


def _ours(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours: torch.compile skips one of torch's own modules that it would begin with."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return call
