"""Slices of what torch itself provides: its packed attention, embeddings and heads.

`nn.MultiheadAttention` calls no layers that could be followed: it is cut by its heads, as `tensors/multihead.py` computes it.
Embeddings and heads are cut by rows of the vocabulary. What remains to be seen is how the model uses them.
"""

from collections.abc import Mapping

import torch
from torch import nn

from plait.model.slices import ColumnRowPair, DividedNumber, ParameterSlice, Ranges
from plait.parallel.tensor.find.propose import Refused
from plait.parallel.tensor.find.trace import DataflowTrace


def attention(name: str, module: nn.MultiheadAttention, follow: DataflowTrace, n: int) -> ColumnRowPair:
    """The group of one `nn.MultiheadAttention`: its own call is the column, its `out_proj` the row."""
    heads, width = module.num_heads, module.embed_dim
    calls = follow.made_by(name)
    if heads % n:
        raise Refused(f"{name} has {heads} heads, which {n} does not divide")
    if any(set(made.used) - {0} for made in calls):
        raise Refused(f"the weights that {name} returns are used: they are a mean over all heads")
    own = {follow.parameters[id(p)] for p in module.parameters()}
    if own & follow.stray:
        raise Refused(f"{min(own & follow.stray)} is used outside of {name}")
    step = width // n
    one: tuple[Ranges, ...] = tuple(((r * step, step),) for r in range(n))
    three: tuple[Ranges, ...] = tuple(tuple((p * width + r * step, step) for p in range(3)) for r in range(n))
    dims = {"q_proj_weight": 0, "k_proj_weight": 0, "v_proj_weight": 0, "bias_k": 2, "bias_v": 2}
    cuts = [
        ParameterSlice(f"{name}.{k}", 0, three)
        for k in ("in_proj_weight", "in_proj_bias")
        if getattr(module, k) is not None
    ]
    cuts += [ParameterSlice(f"{name}.{k}", dim, one) for k, dim in dims.items() if getattr(module, k) is not None]
    cuts.append(ParameterSlice(f"{name}.out_proj.weight", 1, one))
    integers = (DividedNumber(name, "num_heads", n), DividedNumber(f"{name}.out_proj", "in_features", n))
    return ColumnRowPair(name, (name,), f"{name}.out_proj", tuple(cuts), integers)


def vocabulary(
    model: nn.Module, follow: DataflowTrace, wanted: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Embeddings and heads that can be cut by rows, and why others cannot: those with as many rows as the largest.

    A matrix that several modules hold is cut only if each of them can work on rows of it.
    """
    tables = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    largest = max((m.weight.numel() for m in tables.values()), default=0)
    lengths = {m.num_embeddings for m in tables.values() if m.weight.numel() == largest}
    modules = dict(model.named_modules())
    named = {n: modules[n] for n, word in wanted.items() if word == "vocabulary"}
    lengths |= {int(m.weight.shape[0]) for m in named.values() if isinstance(m.weight, torch.Tensor)}
    heads = {n: m for n, m in follow.opaque.items() if isinstance(m, nn.Linear) and m.out_features in lengths}
    found, reasons = dict[str, nn.Module](), dict[str, str]()
    for name, module in ({n: m for n, m in tables.items() if m.num_embeddings in lengths} | heads | named).items():
        reason = _unfit(name, module, follow)
        if not reason and wanted.get(name, "vocabulary") == "vocabulary":
            found[name] = module
        else:
            reasons[name] = reason or f"Job.tensor wants it {wanted[name]}"
    running = {frame.name for frame in follow.frames} | {made.name for made in follow.calls}
    for name, module in dict(found).items():
        for other, holder in modules.items():
            used = other in running or other not in tables
            if used and other not in found and any(p is module.weight for p in holder.parameters(recurse=False)):
                found.pop(name, None)
                why = f", and {reasons[other]}" if other in reasons else ""
                reasons[name] = f"{other or 'the model'} has the same weight{why}"
    return tuple(found), reasons


def _unfit(name: str, module: nn.Module, follow: DataflowTrace) -> str:
    """Why a module cannot work on rows of its weight, or nothing."""
    own = {follow.parameters[id(p)] for p in module.parameters(recurse=False)}
    if own & follow.stray:
        return f"{min(own & follow.stray)} is used outside of {name}"
    if isinstance(module, nn.Embedding):
        plain = type(module).forward is nn.Embedding.forward and "forward" not in vars(module)
        if not plain or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return f"{name} does more than look rows up"
        called = any(frame.name == name for frame in follow.frames)
        return "" if called else f"{name} is not called"
    if not isinstance(module, nn.Linear):
        return f"{name} is neither nn.Embedding nor nn.Linear"
    calls = follow.made_by(name)
    bits = sum(1 << made.bit for made in calls)
    readers = {made.name for made in follow.calls if made.reads & bits}
    if readers:
        return f"what {name} returns reaches {min(readers)}"
    if not calls or not all(made.returned for made in calls):
        return f"the model does not return what {name} returns as it is"
    return ""
