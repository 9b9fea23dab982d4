"""What the job's code sees of torch.distributed: nothing, as on one device.

A model that scales its loss by `get_world_size()`, or an optimizer that sums gradients itself, would train otherwise under every plan: plait has
summed them already. So while plait runs a job's model, loss, optimizer or metrics, torch.distributed is not initialized for this code.
`is_initialized()` is False, so that it takes the branch that it takes on one device. Any other function of torch.distributed raises
J044 with the line that called it. torch and plait see the process group as it is, and so does code that a run is handed over to:
callbacks, data sets, a loop around `plait.Engine`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import currentframe
from types import FrameType
from typing import Any

import torch.distributed as dist

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.config.job import user_line
from plait.config.library import is_library

HIDDEN = (
    "is_initialized", "get_rank", "get_world_size", "get_backend", "init_process_group", "new_group", "barrier", "monitored_barrier",
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "all_reduce_coalesced",
)  # fmt: skip
"""Functions of torch.distributed that ask for the ranks, or communicate; without `isend` and `irecv`, which torch compares by identity."""
HANDS_OVER = (
    "plait.launch", "plait.cli", "plait.api", "plait.integrations.ray", "plait.data", "plait.proof.notes", "plait.engine.callbacks",
    "plait.chaos",
)  # fmt: skip
"""Modules that call code which is not a part of the job's step, and may see the ranks. Samples are read in a proof as in training."""
FIX = (
    "take it out    plait sums gradients, weights losses and gathers metrics by itself",
    "plait.global_mean, plait.global_batch    what a loss needs of the whole batch",
    "an optimizer or a module for one device in place of the one that communicates",
)
WITHOUT = ("process group has not been initialized", "init_process_group")
"""What torch says where there is no process group."""


def hide() -> None:
    """From now on the job's code sees one device, also where its modules have imported a function by its name."""
    if hasattr(dist.is_initialized, "__wrapped__"):
        return
    functions = {name: getattr(dist, name) for name in HIDDEN if hasattr(dist, name)}
    for name, own in functions.items():
        setattr(dist, name, _hidden(name, own))
    known = {id(own): name for name, own in functions.items()}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not is_library(file) and _root(getattr(module, "__name__", "")) not in ("torch", "plait"):
            for name, value in list(vars(module).items()):
                if id(value) in known:
                    setattr(module, name, getattr(dist, known[id(value)]))


def communicates(what: str, where: str = "") -> PlaitError:
    """J044. `what`: the part of the job and the function; `where`: the line, if it is not the one that runs now."""
    why = "a job is written for one device: what it sums over ranks would be summed twice, and its result would depend on the plan"
    return PlaitError(Problem("J044", what, why=why, where=where or _line(), fix=FIX))


def _hidden(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def seen(*args: Any, **kwargs: Any) -> Any:
        if not _in_the_job(_caller()):
            return own(*args, **kwargs)
        if name == "is_initialized":
            return False
        raise communicates(f"the job calls torch.distributed.{name}")

    return seen


def _in_the_job(frame: FrameType | None) -> bool:
    """Whether the job's code calls, and plait runs it for a step: the nearest function of plait says that.

    A profiler that has put its own function in the place of one of torch.distributed's is no code of the job: who called it counts.
    """
    if frame is None or _root(frame.f_globals.get("__name__", "")) in ("torch", "plait"):
        return False
    replaced = {getattr(getattr(dist, name, None), "__code__", None) for name in HIDDEN}
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if _root(name) == "plait":
            return not name.startswith(HANDS_OVER)
        if frame.f_code in replaced:
            return _in_the_job(frame.f_back)
        frame = frame.f_back
    return False


def _caller() -> FrameType | None:
    """Who called the function that calls this one. A frame that knew itself would keep the tensors of all its callers alive."""
    return getattr(getattr(currentframe(), "f_back", None), "f_back", None)


def _root(name: str) -> str:
    return name.partition(".")[0]


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Inside, torch's own refusal to communicate without a process group is J044 of this part of the job."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not any(words in str(error) for words in WITHOUT):
            raise
        what = f"{part} communicates by torch.distributed: {in_a_line(error)}"
        raise communicates(what, user_line(error)) from error


def _line() -> str:
    """`file:line in function` of the innermost frame of the job's own code."""
    frame = _caller()
    while frame is not None:
        code = frame.f_code
        if not (code.co_filename.startswith("<") or is_library(code.co_filename)) and _root(frame.f_globals.get("__name__", "")) != "plait":
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
