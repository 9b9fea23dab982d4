"""Which layers of a model are mixtures of experts, found by their structure and checked by running them.

Proposed are modules whose direct parameters all are [experts, …] and that are told for each token which experts it goes
to (`stacked`), and layers with a list of alike modules that get only some of the rows each (`listed`). Nothing is known
by name. Each proposal is checked in float64 on what the model really gives the layer, and on noise, without processes:
the layer computed expert by expert, as the ranks of a group would, must return what the whole layer returns. What does
not pass is left whole, and why is said.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.model.experts import Format, MoELayer
from plait.model.units import has_forward
from plait.parallel.expert.check import Met, check_listed, check_stacked
from plait.randomness.keyed import host_state, restore_host
from plait.tensors.torch_private import tree_leaves, tree_map_only

SAMPLES = 3


def find(model: nn.Module, inputs: Callable[[int], Any], call: Callable[..., Any]) -> tuple[list[MoELayer], list[str]]:
    """The mixtures of experts of a model, and of layers that look like one and cannot be split: why. Leaves it as it is."""
    proposed = [*_stacked(model), *_listed(model)]
    if not proposed:
        return [], []
    state, met = host_state(), _run(model, inputs, call, proposed)
    found, whole = [], []
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
            told = {"rows": _rows(checked, met) / SAMPLES, "calls": met[checked.name].calls}
            found.append(replace(checked, trained=trained, **told))
    restore_host(state)
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


def _run(
    model: nn.Module, inputs: Callable[[int], Any], call: Callable[..., Any], proposed: list[MoELayer]
) -> dict[str, Met]:
    """What a run on a few samples gives each proposed module, and each expert of a list."""
    model, met = copy.deepcopy(model), {}
    names = {n for m in proposed for n in (m.name, *m.modules)}

    def entering(name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            rows = sum(t[..., 0].numel() for t in tree_leaves((args, kwargs))[:1] if isinstance(t, Tensor) and t.dim())
            if name not in met:
                met[name] = Met(*tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs)))
            met[name].rows += rows
            met[name].calls += 1

        return enter

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(entering(name), with_kwargs=True)
    with torch.no_grad():
        call(model, inputs(SAMPLES))
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
