"""Which layers of a model are mixtures of experts, found by their structure and checked by running them.

Proposed are modules whose direct parameters all are [experts, …] and that are told for each token which experts it goes
to (`stacked`), and layers with a list of alike modules that get only some of the rows each (`listed`). Nothing is known
by name. Each proposal is checked in float64 on what the model really gives the layer, and on noise, without processes:
the layer computed expert by expert, as the ranks of a group would, must return what the whole layer returns. What does
not pass is left whole, and why is said.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import in_a_line
from plait.losses.global_batch import BatchPeers
from plait.model.experts import Format, MoELayer, cut_stacked
from plait.model.units import has_forward
from plait.parallel.expert.layers import ListedExperts, Serve, StackedExperts, at_home, roles, spelled
from plait.randomness.keyed import host_kept, host_state, restore_host
from plait.tensors.float64 import Wide
from plait.tensors.modules import convert, format_in
from plait.tensors.parameters import copy_module
from plait.tensors.torch_private import DropoutBase, leaves, tree_leaves, tree_map_only
from plait.tensors.trees import first_words, tensors_in

NEAR = 1e-9
SAMPLES = 3
"""Of the run that shows what a model gives its layers."""
WORDS = 257
"""Of each row of that run, where the model can run on so few."""
ROUNDS = 3
"""Runs of a check: the first on what the model gives the layer, then on noise, which reaches more experts."""


@dataclass
class Met:
    """What a run of the model showed of a module: what its first call was given, and how many rows it got in all."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int = 0
    calls: int = 0


@dataclass(frozen=True)
class ProbeRun:
    """A run of the model on a few samples."""

    met: dict[str, Met]
    """By module."""
    samples: float
    """As many tokens as so many samples have; a fraction of one where rows were shortened."""


def _wide(module: nn.Module) -> nn.Module:
    """A copy in float64 that drops nothing at random."""
    made = convert(copy_module(module), None, torch.float64)
    for inner in made.modules():
        if isinstance(inner, DropoutBase):
            inner.p = 0.0
    return made


def _examples(met: Met) -> Iterator[tuple[Any, Any]]:
    """What the layer is given, in float64: as it was, then noise in place of what is in it."""
    generator = torch.Generator().manual_seed(0)
    for number in range(ROUNDS):

        def one(t: Tensor, number: int = number) -> Tensor:
            wide = t.to(format_in(t, torch.float64), copy=True)
            if number and t.is_floating_point() and t.dim() > 1:
                return torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.device)
            return wide

        yield tree_map_only(Tensor, one, (met.args, met.kwargs))


def _near(expected: object, output: object) -> bool:
    a, b = (
        [t.to(format_in(t, torch.float64)) for t in leaves(tree) if isinstance(t, Tensor)]
        for tree in (expected, output)
    )
    if [t.shape for t in a] != [t.shape for t in b]:
        return False
    pairs = ((x, y) for x, y in zip(a, b) if x.numel())
    return all(float((x - y).abs().max()) <= NEAR * max(1.0, float(x.abs().max())) for x, y in pairs)


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
                width = _adds_up(module, proposal, given, index=index, places=len(met.args))
        except Exception as error:
            why = f"its forward with some of the experts raised {in_a_line(error)}"
            continue
        if width:
            return replace(proposal, width=(given[hidden].shape[1], width), itemsize=given[hidden].element_size()), ""
    return None, why


def _adds_up(module: nn.Module, mixture: MoELayer, given: dict[str, Any], *, index: str, places: int) -> int:
    """The width of a result when the parts of two ranks make the whole on all examples, else 0. `given`: arguments; `index`:
    which of them says the experts; `places`: how many are given by place."""
    generator, width = torch.Generator().manual_seed(1), 0
    for args, _ in _examples(Met(tuple(given.values()), {})):
        here = dict(zip(given, args))
        if width:  # spread the tokens over all experts
            order = torch.rand(len(here[index]), mixture.experts, generator=generator).argsort(1)
            here[index] = order[:, : here[index].shape[1]].to(here[index])
        expected = spelled(_wide(module), here, places)

        def through(rows: Tensor, counts: list[int | None], serve: Serve) -> Tensor:
            found, at = [], 0
            for mine in (mixture.mine(2, rank) for rank in range(2)):
                part = cut_stacked(_wide(module), mixture, mine)
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


def _silent(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


@host_kept()
def find(model: nn.Module, inputs: Callable[[int], Any], call: Callable[..., Any]) -> tuple[list[MoELayer], list[str]]:
    """The mixtures of experts of a model, and of layers that look like one and cannot be split: why. Leaves it as it is."""
    proposed = [*_stacked(model), *_listed(model)]
    if not proposed:
        return [], []
    probe = _probed(model, inputs, call, proposed)
    met, found, whole = probe.met, [], []
    for mixture in proposed:
        if mixture.name not in met:
            continue
        if _used_elsewhere(model, mixture):
            whole.append(f"{mixture.name or 'the model'}: other code uses parameters of its experts too")
            continue
        if mixture.stacked:
            checked, why = check_stacked(model.get_submodule(mixture.name), mixture, met[mixture.name])
        elif _mixes(model, mixture, met):
            checked, why = check_listed(model.get_submodule(mixture.name), mixture, met[mixture.name])
        else:
            continue
        if checked is None and why:
            whole.append(f"{mixture.name or 'the model'}: {why}")
        elif checked is not None:
            trained = checked.names & {n for n, p in model.named_parameters() if p.requires_grad}
            rows, calls = _rows(checked, met) / probe.samples, met[checked.name].calls
            found.append(replace(checked, trained=trained, rows=rows, calls=calls))
    return found, whole


def _stacked(model: nn.Module) -> Iterator[MoELayer]:
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        sizes = {p.shape[0] if p.dim() > 1 else 0 for p in own.values()}
        alone = len(own) == len(list(module.parameters()))
        if own and alone and len(sizes) == 1 and min(sizes) > 1 and any(p.dim() > 2 for p in own.values()):
            yield MoELayer(name, sizes.pop(), (_formats(name, module),))


def _listed(model: nn.Module) -> Iterator[MoELayer]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        kids = list(module.children()) if isinstance(module, nn.ModuleList) else []
        shapes = {(type(k), *((n, p.shape) for n, p in k.named_parameters())) for k in kids}
        if len(kids) < 2 or len(shapes) != 1 or not has_forward(kids[0]) or not list(kids[0].parameters()):
            continue
        layer = name
        while layer and not has_forward(modules[layer]):
            layer = layer.rpartition(".")[0]
        names = tuple(f"{name}.{n}" for n, _ in module.named_children())
        yield MoELayer(layer, len(kids), tuple(_formats(n, modules[n]) for n in names), names)


def _formats(name: str, module: nn.Module) -> tuple[Format, ...]:
    return tuple((f"{name}.{n}".lstrip("."), tuple(p.shape), p.dtype) for n, p in module.named_parameters())


def _used_elsewhere(model: nn.Module, mixture: MoELayer) -> bool:
    """Whether a parameter of an expert has another name too: other code uses it as a whole."""
    every = dict(model.named_parameters(remove_duplicate=False))
    mine = {id(every[name]) for name in mixture.names}
    return any(id(p) in mine and name not in mixture.names for name, p in every.items())


def _probed(model: nn.Module, inputs: Callable[[int], Any], call: Callable[..., Any], proposed: list[MoELayer]) -> ProbeRun:
    """Run the model on a few samples: on the first `WORDS` words of longer rows, if it runs on them."""
    whole = inputs(SAMPLES)
    few = first_words(whole, WORDS)
    words = [sum(t.numel() for t in tensors_in(tree)) for tree in (whole, few)]
    if words[0] > words[1]:
        with suppress(Exception):  # the model's own, on rows of another length
            return ProbeRun(_run(model, few, call, proposed), SAMPLES * words[1] / words[0])
    return ProbeRun(_run(model, whole, call, proposed), SAMPLES)


def _run(
    model: nn.Module, inputs: object, call: Callable[..., Any], proposed: list[MoELayer]
) -> dict[str, Met]:
    """What a run on these samples gives each proposed module, and each expert of a list."""
    model, met = copy_module(model), {}
    names = {n for m in proposed for n in (m.name, *m.modules)}

    def entering(name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows = sum(t[..., 0].numel() for t in tree_leaves((args, kwargs))[:1] if isinstance(t, Tensor) and t.dim())
            if name not in met:
                met[name] = Met(*tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs)))
            met[name].rows += rows
            met[name].calls += 1

        return enter

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(entering(name), with_kwargs=True)
    with torch.no_grad():
        call(model, inputs)
    return met


def _mixes(model: nn.Module, mixture: MoELayer, met: dict[str, Met]) -> bool:
    """Whether the members of a list get a part of the rows each; or all of them the same, and they are most of the layer.

    Others are layers one after another, or some heads on top of a model, whose code is not worth running twice.
    """
    called = [met[name] for name in mixture.modules if name in met]
    if 0 < sum(m.rows for m in called) < mixture.experts * met[mixture.name].rows:
        return True
    sizes = [sum(p.numel() for p in model.get_submodule(n).parameters()) for n in (mixture.modules[0], mixture.name)]
    given = [[t for t in tree_leaves((m.args, m.kwargs)) if isinstance(t, Tensor)] for m in called]
    alike = all(len(g) == 1 and g[0].shape == given[0][0].shape and bool((g[0] == given[0][0]).all()) for g in given)
    return len(called) == mixture.experts and alike and 2 * sizes[0] * mixture.experts >= sizes[1]


def _rows(mixture: MoELayer, met: dict[str, Met]) -> int:
    if mixture.modules:
        return sum(met[name].rows for name in mixture.modules if name in met)
    given = tree_leaves((met[mixture.name].args, met[mixture.name].kwargs))
    chosen = next(t.numel() for t in given if isinstance(t, Tensor) and not t.is_floating_point())
    return chosen * met[mixture.name].calls
