"""Finds mixtures of experts by their structure, and checks them by running them.

There are two kinds of candidates. Stacked: modules whose direct parameters are all [experts, …], with an argument that selects
the experts of each token. Listed: layers with a list of equal modules, each of which gets only some of the rows. No names are
used. Each candidate is checked in float64, on the inputs that the model passes to the layer and on noise, in one process. The
layer computed expert by expert, as the ranks of a group would, must return the output of the layer. A candidate that fails is not
split, and the reason is reported.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import summarize_error
from plait.losses.global_batch import BatchPeers
from plait.model.experts import MoELayer, ParameterFormat, shard_stacked
from plait.model.units import has_forward
from plait.parallel.expert.layers import (
    ListedExperts,
    ServeRows,
    StackedExperts,
    call_positionally,
    find_roles,
    serve_locally,
)
from plait.randomness.keyed import get_host_state, preserve_host_state, restore_host_state
from plait.tensors.float64 import Float64Mode
from plait.tensors.module_state import choose_dtype, convert_module
from plait.tensors.parameters import copy_module
from plait.tensors.torch_private import DropoutBase, dataclass_leaves, tree_leaves, tree_map_only
from plait.tensors.trees import iter_tensors, take_first_tokens

TOLERANCE = 1e-9
PROBE_SAMPLES = 3
"""Samples of the probe run."""
PROBE_WORDS = 257
"""Words per row of the probe run, if the model can run on so few words."""
CHECK_RUNS = 3
"""Runs of a check: the first on the recorded inputs, then on noise, which reaches more experts."""


@dataclass
class ModuleInputs:
    """The recorded inputs of a module's first call, and the number of its rows and calls."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int = 0
    calls: int = 0


@dataclass(frozen=True)
class ProbeRun:
    """A run of the model on a few samples."""

    inputs: dict[str, ModuleInputs]
    """Recorded inputs by module."""
    samples: float
    """Number of samples with as many tokens; a fraction if rows were shortened."""


def _copy_float64(module: nn.Module) -> nn.Module:
    """Copy a module to float64, without dropout."""
    made = convert_module(copy_module(module), None, torch.float64)
    for inner in made.modules():
        if isinstance(inner, DropoutBase):
            inner.p = 0.0
    return made


def _make_examples(met: ModuleInputs) -> Iterator[tuple[Any, Any]]:
    """Make example inputs in float64: the recorded ones, then noise in their shapes."""
    generator = torch.Generator().manual_seed(0)
    for number in range(CHECK_RUNS):

        def make_example(t: Tensor, number: int = number) -> Tensor:
            wide = t.to(choose_dtype(t, torch.float64), copy=True)
            if number and t.is_floating_point() and t.dim() > 1:
                return torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.device)
            return wide

        yield tree_map_only(Tensor, make_example, (met.args, met.kwargs))


def _is_close(expected: object, output: object) -> bool:
    a, b = (
        [t.to(choose_dtype(t, torch.float64)) for t in dataclass_leaves(tree) if isinstance(t, Tensor)]
        for tree in (expected, output)
    )
    if [t.shape for t in a] != [t.shape for t in b]:
        return False
    pairs = ((x, y) for x, y in zip(a, b) if x.numel())
    return all(float((x - y).abs().max()) <= TOLERANCE * max(1.0, float(x.abs().max())) for x, y in pairs)


def check_stacked(module: nn.Module, mixture: MoELayer, met: ModuleInputs) -> tuple[MoELayer | None, str]:
    """Check stacked experts: run the module's own forward with some experts at a time and one choice per row, and apply the weights after."""
    try:
        given = dict(zip(StackedExperts(module, 0, serve_locally, BatchPeers()).names, met.args)) | met.kwargs
        hidden, index, _ = find_roles(given)
    except KeyError:
        return None, ""
    choices = given[index].shape[1]
    held = {n: v for n, v in vars(module).items() if type(v) is int}
    experts = [(n, 0) for n, v in held.items() if v == mixture.experts]
    chosen = [(n, 1) for n, v in held.items() if v == choices and v != mixture.experts]
    why = "its own forward with some of the experts does not add up to the layer's output"
    for numbers in dict.fromkeys((tuple(experts), (), tuple(experts + chosen))):
        proposal = replace(mixture, count_attributes=numbers)
        try:
            with torch.no_grad(), Float64Mode():
                width = _measure_width(module, proposal, given, index=index, places=len(met.args))
        except Exception as error:
            why = f"its forward with some of the experts raised {summarize_error(error)}"
            continue
        if width:
            return replace(proposal, width=(given[hidden].shape[1], width), itemsize=given[hidden].element_size()), ""
    return None, why


def _measure_width(module: nn.Module, mixture: MoELayer, given: dict[str, Any], *, index: str, places: int) -> int:
    """Return the width of the output if the parts of two ranks add up to the layer's output on all examples, else 0.

    `given`: arguments. `index`: the argument with the experts. `places`: number of positional arguments.
    """
    generator, width = torch.Generator().manual_seed(1), 0
    for args, _ in _make_examples(ModuleInputs(tuple(given.values()), {})):
        here = dict(zip(given, args))
        if width:  # distribute the tokens over all experts
            order = torch.rand(len(here[index]), mixture.experts, generator=generator).argsort(1)
            here[index] = order[:, : here[index].shape[1]].to(here[index])
        expected = call_positionally(_copy_float64(module), here, places)

        def dispatch_locally(rows: Tensor, counts: list[int | None], serve: ServeRows) -> Tensor:
            found, at = [], 0
            for mine in (mixture.get_rank_experts(2, rank) for rank in range(2)):
                part = shard_stacked(_copy_float64(module), mixture, mine)
                totals = counts[mine.start : mine.stop]
                count = sum(n or 0 for n in totals)
                worker.own = part.forward  # noqa: B023
                found.append(serve(rows.narrow(0, at, count), totals))
                at += count
            return torch.cat(found)

        worker = StackedExperts(module, mixture.experts, dispatch_locally, BatchPeers())
        if not _is_close(expected, call_positionally(worker, here, places)):
            return 0
        width = expected.shape[-1]
    return width


def check_listed(layer: nn.Module, mixture: MoELayer, met: ModuleInputs) -> tuple[MoELayer | None, str]:
    """Check listed experts: run the layer's own code twice, with the experts' results in the second run."""
    names = [n[len(mixture.name) + 1 :] if mixture.name else n for n in mixture.modules]
    first, why = next(t for t in tree_leaves((met.args, met.kwargs)) if isinstance(t, Tensor)), ""
    for width in dict.fromkeys((first.shape[-1], *_list_widths(layer, names))):
        proposal, drawn = replace(mixture, width=(width, width), itemsize=first.element_size()), False
        why = "its code run twice, with its experts called in between, returns another output than the layer"
        try:
            for args, kwargs in _make_examples(met):
                state, whole, twice = get_host_state(), _copy_float64(layer), _copy_float64(layer)
                expected = _run_silently(whole, args, kwargs)
                drawn = drawn or not torch.equal(torch.get_rng_state(), state[2])
                restore_host_state(state)
                twin = ListedExperts(
                    twice, [twice.get_submodule(n) for n in names], range(mixture.experts), serve_locally, BatchPeers()
                )
                twin.width = width
                twin.mark_random_state = partial(partial, restore_host_state, state)
                twice.forward = twin
                if not _is_close(expected, _run_silently(twice, args, kwargs)):
                    raise ValueError(why)
                out = twin.experts[0].own(torch.zeros(0, width, dtype=torch.float64, device=first.device))
                proposal = replace(proposal, width=(width, out.shape[-1]))
            return replace(proposal, coupled=_is_coupled(layer, met, drawn)), ""
        except Exception as error:
            why = f"{error}".partition("\n")[0] or why
    return None, why


def _run_silently(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.no_grad(), Float64Mode():
        return layer(*tree_map_only(Tensor, torch.clone, args), **tree_map_only(Tensor, torch.clone, kwargs))


def _list_widths(layer: nn.Module, names: list[str]) -> list[int]:
    """List the sizes of an expert's parameters: one of them is the width of its rows."""
    return [n for p in layer.get_submodule(names[0]).parameters() for n in p.shape]


def _is_coupled(layer: nn.Module, met: ModuleInputs, drawn: bool) -> bool:
    """Whether equal tokens get unequal results: all select the same experts, and some are dropped."""
    made = _copy_float64(layer)
    if drawn:  # with dropout they differ anyway
        made.eval()
    args, kwargs = next(_make_examples(met))
    first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point())
    alike = first.reshape(-1, first.shape[-1])[:1].expand(first[..., 0].numel(), -1).reshape(first.shape)
    args, kwargs = tree_map_only(Tensor, lambda t: alike if t is first else t, (args, kwargs))
    output = next(t for t in dataclass_leaves(_run_silently(made, args, kwargs)) if isinstance(t, Tensor))
    if output.shape[:-1] != first.shape[:-1]:
        return False
    rows = output.reshape(-1, output.shape[-1])
    return not _is_close(rows, rows[:1].expand_as(rows))


@preserve_host_state()
def find_mixtures(model: nn.Module, inputs: Callable[[int], Any], call: Callable[..., Any]) -> tuple[list[MoELayer], list[str]]:
    """Find the mixtures of experts of a model. Also return the reasons why similar layers cannot be split. The model is unchanged."""
    proposed = [*_propose_stacked(model), *_propose_listed(model)]
    if not proposed:
        return [], []
    probe = _probe_model(model, inputs, call, proposed)
    met, found, whole = probe.inputs, [], []
    for mixture in proposed:
        if mixture.name not in met:
            continue
        if _is_shared(model, mixture):
            whole.append(f"{mixture.name or 'the model'}: other code also uses parameters of its experts")
            continue
        if mixture.is_stacked:
            checked, why = check_stacked(model.get_submodule(mixture.name), mixture, met[mixture.name])
        elif _is_mixture(model, mixture, met):
            checked, why = check_listed(model.get_submodule(mixture.name), mixture, met[mixture.name])
        else:
            continue
        if checked is None and why:
            whole.append(f"{mixture.name or 'the model'}: {why}")
        elif checked is not None:
            trained = checked.names & {n for n, p in model.named_parameters() if p.requires_grad}
            rows, calls = _count_rows(checked, met) / probe.samples, met[checked.name].calls
            found.append(replace(checked, trained=trained, rows=rows, calls=calls))
    return found, whole


def _propose_stacked(model: nn.Module) -> Iterator[MoELayer]:
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        sizes = {p.shape[0] if p.dim() > 1 else 0 for p in own.values()}
        alone = len(own) == len(list(module.parameters()))
        if own and alone and len(sizes) == 1 and min(sizes) > 1 and any(p.dim() > 2 for p in own.values()):
            yield MoELayer(name, sizes.pop(), (_list_formats(name, module),))


def _propose_listed(model: nn.Module) -> Iterator[MoELayer]:
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
        yield MoELayer(layer, len(kids), tuple(_list_formats(n, modules[n]) for n in names), names)


def _list_formats(name: str, module: nn.Module) -> tuple[ParameterFormat, ...]:
    return tuple((f"{name}.{n}".lstrip("."), tuple(p.shape), p.dtype) for n, p in module.named_parameters())


def _is_shared(model: nn.Module, mixture: MoELayer) -> bool:
    """Whether a parameter of an expert has a second name, so that other code uses it in full."""
    every = dict(model.named_parameters(remove_duplicate=False))
    mine = {id(every[name]) for name in mixture.names}
    return any(id(p) in mine and name not in mixture.names for name, p in every.items())


def _probe_model(model: nn.Module, inputs: Callable[[int], Any], call: Callable[..., Any], proposed: list[MoELayer]) -> ProbeRun:
    """Run the model on a few samples: on the first `PROBE_WORDS` words of longer rows, if the model runs on them."""
    whole = inputs(PROBE_SAMPLES)
    few = take_first_tokens(whole, PROBE_WORDS)
    words = [sum(t.numel() for t in iter_tensors(tree)) for tree in (whole, few)]
    if words[0] > words[1]:
        with suppress(Exception):  # the model may reject rows of another length
            return ProbeRun(_run(model, few, call, proposed), PROBE_SAMPLES * words[1] / words[0])
    return ProbeRun(_run(model, whole, call, proposed), PROBE_SAMPLES)


def _run(
    model: nn.Module, inputs: object, call: Callable[..., Any], proposed: list[MoELayer]
) -> dict[str, ModuleInputs]:
    """Record the inputs of each candidate, and of each expert of a list, in a run on these samples."""
    model, met = copy_module(model), {}
    names = {n for m in proposed for n in (m.name, *m.modules)}

    def make_hook(name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows = sum(t[..., 0].numel() for t in tree_leaves((args, kwargs))[:1] if isinstance(t, Tensor) and t.dim())
            if name not in met:
                met[name] = ModuleInputs(*tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs)))
            met[name].rows += rows
            met[name].calls += 1

        return enter

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(make_hook(name), with_kwargs=True)
    with torch.no_grad():
        call(model, inputs)
    return met


def _is_mixture(model: nn.Module, mixture: MoELayer, met: dict[str, ModuleInputs]) -> bool:
    """Whether each module of a list gets a part of the rows, or all get the same rows and are most of the layer.

    Other lists are consecutive layers, or some heads on top of a model, whose code should not run twice.
    """
    called = [met[name] for name in mixture.modules if name in met]
    if 0 < sum(m.rows for m in called) < mixture.experts * met[mixture.name].rows:
        return True
    sizes = [sum(p.numel() for p in model.get_submodule(n).parameters()) for n in (mixture.modules[0], mixture.name)]
    given = [[t for t in tree_leaves((m.args, m.kwargs)) if isinstance(t, Tensor)] for m in called]
    alike = all(len(g) == 1 and g[0].shape == given[0][0].shape and bool((g[0] == given[0][0]).all()) for g in given)
    return len(called) == mixture.experts and alike and 2 * sizes[0] * mixture.experts >= sizes[1]


def _count_rows(mixture: MoELayer, met: dict[str, ModuleInputs]) -> int:
    if mixture.modules:
        return sum(met[name].rows for name in mixture.modules if name in met)
    given = tree_leaves((met[mixture.name].args, met[mixture.name].kwargs))
    chosen = next(t.numel() for t in given if isinstance(t, Tensor) and not t.is_floating_point())
    return chosen * met[mixture.name].calls
