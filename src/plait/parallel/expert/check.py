"""Whether a layer that looks like a mixture of experts is one: its parts run in float64, without processes.

On what the model gives the layer, and on noise, the layer computed expert by expert, as the ranks of a group would, must
return what the whole layer returns, to rounding. `parallel/expert/find.py` proposes, this decides.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.losses.global_batch import BatchPeers
from plait.model.experts import MoELayer, cut_stacked
from plait.parallel.expert.layers import ListedExperts, StackedExperts, at_home, roles, spelled
from plait.randomness.keyed import host_state, restore_host
from plait.tensors.float64 import Wide
from plait.tensors.torch_private import DropoutBase, leaves, tree_leaves, tree_map_only

NEAR = 1e-9
ROUNDS = 3
"""Runs of a check: the first on what the model gives the layer, then on noise, which reaches more experts."""


@dataclass
class Met:
    """What a run of the model showed of a module: what its first call was given, and how many rows it got in all."""

    args: Any
    kwargs: Any
    rows: int = 0
    calls: int = 0


def _wide(module: nn.Module) -> nn.Module:
    """A copy in float64 that drops nothing at random."""
    made = copy.deepcopy(module).double()
    for inner in made.modules():
        if isinstance(inner, DropoutBase):
            inner.p = 0.0
    return made


def _examples(met: Met) -> Iterator[tuple[Any, Any]]:
    """What the layer is given, in float64: as it was, then noise in place of what is in it."""
    generator = torch.Generator().manual_seed(0)
    for number in range(ROUNDS):

        def one(t: Tensor, number: int = number) -> Tensor:
            wide = t.double() if t.is_floating_point() else t.clone()
            if number and t.is_floating_point() and t.dim() > 1:
                return torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.device)
            return wide

        yield tree_map_only(Tensor, one, (met.args, met.kwargs))


def _near(a: Any, b: Any) -> bool:
    a, b = ([t for t in leaves(tree) if isinstance(t, Tensor)] for tree in (a, b))
    same = len(a) == len(b) and all(x.shape == y.shape for x, y in zip(a, b))
    return same and all(
        float((x.double() - y.double()).abs().max()) <= NEAR * max(1.0, float(x.abs().max()))
        for x, y in zip(a, b)
        if x.numel()
    )


def check_stacked(module: nn.Module, mixture: MoELayer, met: Met) -> tuple[MoELayer | None, str]:
    """By the module's own forward with some of the experts at a time, one choice per row, the weights applied after."""
    try:
        given = dict(zip(StackedExperts(module, 0, at_home, BatchPeers()).names, met.args)) | met.kwargs
        hidden, index, _ = roles(given)
    except KeyError:
        return None, ""
    choices = given[index].shape[1]
    held = {n: v for n, v in vars(module).items() if type(v) is int}
    experts = [(n, 0) for n, v in held.items() if v == mixture.experts]
    chosen = [(n, 1) for n, v in held.items() if v == choices and v != mixture.experts]
    why = "its own forward with some of the experts does not add up to the whole"
    for numbers in dict.fromkeys((tuple(experts), (), tuple(experts + chosen))):
        proposal = replace(mixture, numbers=numbers)
        try:
            with torch.no_grad(), Wide():
                width = _adds_up(module, proposal, (given, index, len(met.args)))
        except Exception as error:
            why = f"its forward with some of the experts raised {type(error).__name__}: {error}".partition("\n")[0]
            continue
        if width:
            return replace(proposal, width=(given[hidden].shape[1], width), itemsize=given[hidden].element_size()), ""
    return None, why


def _adds_up(module: nn.Module, mixture: MoELayer, how: tuple[dict[str, Any], str, int]) -> int:
    """The width of a result when the parts of two ranks make the whole on all examples, else 0. `how`: arguments, which of them
    says the experts, how many are given by place."""
    (given, index, places), generator = how, torch.Generator().manual_seed(1)
    width = 0
    for args, _ in _examples(Met(tuple(given.values()), {})):
        here = dict(zip(given, args))
        if width:  # spread the tokens over all experts
            here[index] = (
                torch.rand(len(here[index]), mixture.experts, generator=generator)
                .argsort(1)[:, : here[index].shape[1]]
                .to(here[index])
            )
        expected, parts = spelled(_wide(module), here, places), []
        for rank in range(2):
            part = cut_stacked(_wide(module), mixture, mixture.mine(2, rank))
            parts.append((part, mixture.mine(2, rank)))

        def through(rows: Tensor, counts: list[int | None], serve: Any, parts: Any = parts) -> Tensor:
            found, at = [], 0
            for part, mine in parts:
                totals = counts[mine.start : mine.stop]
                count = sum(n or 0 for n in totals)
                worker.own = part.forward  # noqa: B023
                found.append(serve(rows.narrow(0, at, count), totals))
                at += count
            return torch.cat(found)

        worker = StackedExperts(module, mixture.experts, through, BatchPeers())
        if not _near(expected, spelled(worker, here, places)):
            return 0
        width = expected.shape[-1]
    return width


def check_listed(layer: nn.Module, mixture: MoELayer, met: Met) -> tuple[MoELayer | None, str]:
    """By the layer's own code run twice, with what the experts return in between."""
    names = [n[len(mixture.name) + 1 :] if mixture.name else n for n in mixture.modules]
    first, why = next(t for t in tree_leaves((met.args, met.kwargs)) if isinstance(t, Tensor)), ""
    for width in dict.fromkeys((first.shape[-1], *_widths(layer, names))):
        proposal, drawn = replace(mixture, width=(width, width), itemsize=first.element_size()), False
        why = "its code run twice, with its experts called in between, does not return what the layer returns"
        try:
            for args, kwargs in _examples(met):
                state, whole, twice = host_state(), _wide(layer), _wide(layer)
                expected = _silent(whole, args, kwargs)
                drawn = drawn or not torch.equal(torch.get_rng_state(), state[2])
                restore_host(state)
                twin = ListedExperts(
                    twice, [twice.get_submodule(n) for n in names], range(mixture.experts), at_home, BatchPeers()
                )
                twin.width = width
                twin.again = partial(partial, restore_host, state)
                twice.forward = twin
                if not _near(expected, _silent(twice, args, kwargs)):
                    raise ValueError(why)
                out = twin.experts[0].own(torch.zeros(0, width, dtype=torch.float64, device=first.device))
                proposal = replace(proposal, width=(width, out.shape[-1]))
            return replace(proposal, coupled=_coupled(layer, met, drawn)), ""
        except Exception as error:
            why = f"{error}".partition("\n")[0] or why
    return None, why


def _silent(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    with torch.no_grad(), Wide():
        return layer(*tree_map_only(Tensor, torch.clone, args), **tree_map_only(Tensor, torch.clone, kwargs))


def _widths(layer: nn.Module, names: list[str]) -> list[int]:
    """Sizes that an expert's parameters have: one of them is the width of its rows."""
    return [n for p in layer.get_submodule(names[0]).parameters() for n in p.shape]


def _coupled(layer: nn.Module, met: Met, drawn: bool) -> bool:
    """Whether equal tokens come out unequal: all go to the same experts, and some are dropped."""
    made = _wide(layer)
    if drawn:  # at random they differ anyway
        made.eval()
    args, kwargs = next(_examples(met))
    first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point())
    alike = first.reshape(-1, first.shape[-1])[:1].expand(first[..., 0].numel(), -1).reshape(first.shape)
    args, kwargs = tree_map_only(Tensor, lambda t: alike if t is first else t, (args, kwargs))
    output = next(t for t in leaves(_silent(made, args, kwargs)) if isinstance(t, Tensor))
    if output.shape[:-1] != first.shape[:-1]:
        return False
    rows = output.reshape(-1, output.shape[-1])
    return not _near(rows, rows[:1].expand_as(rows))
