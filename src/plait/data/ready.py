"""Items that are no samples: data whose items are ready batches, as loaders give them.

A sample may have a leading dim of its own, such as the length of a sequence, so the shape of an item tells nothing alone. An item is
taken for a batch if all its tensors have the same leading size, and if the code that makes the items says that this is a batch: it reads
from a DataLoader with batches of that size, has a value of that size whose name says batch, or a generator or class with such a name.
"""

import inspect
import types
from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.data.batch import Remade, pair_of
from plait.data.loaders import LoaderStream
from plait.data.reachable import Reached, reachable

WORD = "batch"
OTHERS = ("collate", "microbatch", "batch_first", "batch_norm", "batchnorm")
"""Names with the word that say nothing of items."""


def check(job: Job, data: object, item: object) -> None:
    """J007 if the items of the job's data are ready batches. `item`: the first of them."""
    size = leading(item)
    if size < 2:
        return
    start: object = data.dataset if isinstance(data, LoaderStream) else data
    if isinstance(data, Remade):
        start = [data.make, data.make()]
    if (told := said(start, size, job.batch)) is None:
        return
    what = f"the items of the data are ready batches of {size}, not samples"
    why = f"{told}, and all tensors of an item have {size} rows: each item would count as one of the {job.batch} samples of a step"
    fix = (
        f"give the data set itself:    data=lambda: dataset, batch={size}",
        "give single samples:    for x, y in batches: yield from zip(x, y)",
        "if an item is one sample, such as a sequence: read it without that loader, and name no value of its size batch",
    )
    raise PlaitError(Problem("J007", what, why=why, where="Job(data=…)", fix=fix))


def leading(item: object) -> int:
    """The first dim's size of all tensors of an item; 0 if they have no such size in common."""
    pair = pair_of(item)
    sizes = set(_sizes(pair)) if pair is not None else {0}
    return sizes.pop() if len(sizes) == 1 else 0


def _sizes(tree: object) -> Iterator[int]:
    if isinstance(tree, (Tensor, np.ndarray)):
        yield tree.shape[0] if tree.ndim else 0
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _sizes(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from _sizes(value)
    else:
        yield len(tree) if isinstance(tree, list) else 0


def said(start: object, size: int, batch: int) -> str | None:
    """How the code that makes the items says that they are batches of `size`; None if it does not. `batch`: the job's."""
    found = list(reachable(start))
    sized = size == batch or any(type(one.value) is int and one.value == size for one in found)
    return next((told for one in found if (told := _told(one, size, sized))), None)


def _told(found: Reached, size: int, sized: bool) -> str | None:
    """What one object says. `sized`: the job, or another object, has the number `size`."""
    value = found.value
    if isinstance(value, DataLoader):
        if value.batch_sampler is None:
            return "they come from a DataLoader with batch_size=None, which makes no batches of its own"
        return f"they come from a DataLoader with batch_size={size}" if value.batch_size == size else None
    if type(value) is int and value == size and _says(found.name):
        return f"{found.path} is {size}"
    code = value if isinstance(value, types.CodeType) else getattr(value, "__code__", None)
    if isinstance(code, types.CodeType) and code.co_flags & inspect.CO_GENERATOR and _named(code):
        return f"the generator {code.co_name} makes them" if sized or size in code.co_consts else None
    if not found.path and sized and _says(type(value).__name__):
        return f"they are those of a {type(value).__name__}"
    return None


def _named(code: types.CodeType) -> bool:
    """Whether the name of a function, or of one of its arguments, says batch."""
    return any(map(_says, (code.co_name, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])))


def _says(name: str) -> bool:
    name = name.lower()
    return WORD in name and not any(other in name for other in OTHERS)
