"""Hide torch.distributed from the job's code, which sees one device.

A model that scales its loss by `get_world_size()`, or an optimizer that sums gradients itself, would change the result under every plan,
because plait has summed them already. So while plait runs a job's model, loss, optimizer or metrics, torch.distributed is not initialized
for this code. `is_initialized()` is False, so the code takes its branch for one device. Any other function of torch.distributed raises J044
with the line that called it. torch and plait see the real process group. So does code that a run calls outside of the step: callbacks, data
sets, a loop with `plait.Engine`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import currentframe
from types import FrameType
from typing import Any

import torch.distributed as dist

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.job import find_user_line
from plait.config.library import is_library

HIDDEN_FUNCTIONS = (
    "is_initialized", "get_rank", "get_world_size", "get_backend", "init_process_group", "new_group", "barrier", "monitored_barrier",
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "all_reduce_coalesced",
)  # fmt: skip
"""Functions of torch.distributed that query the ranks or communicate; without `isend` and `irecv`, which torch compares by identity."""
TRUSTED_MODULES = (
    "plait.launch", "plait.cli", "plait.api", "plait.integrations.ray", "plait.data", "plait.proof.activation_recorder", "plait.engine.callbacks",
    "plait.chaos",
)  # fmt: skip
"""Modules that call code outside of the job's step, which may see the ranks. A proof reads samples as training does."""
FIX = (
    "remove it    plait sums gradients, weights losses and gathers metrics by itself",
    "plait.global_mean, plait.global_batch    for a loss over the global batch",
    "an optimizer or a module for one device in place of the one that communicates",
)
NO_GROUP_SIGNS = ("process group has not been initialized", "init_process_group")
"""Parts of torch's errors if there is no process group."""


def hide_process_group() -> None:
    """Hide torch.distributed from now on, also in user modules that have imported its functions by name."""
    if hasattr(dist.is_initialized, "__wrapped__"):
        return
    functions = {name: getattr(dist, name) for name in HIDDEN_FUNCTIONS if hasattr(dist, name)}
    for name, own in functions.items():
        setattr(dist, name, _hide_function(name, own))
    known = {id(own): name for name, own in functions.items()}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not is_library(file) and _root_package(getattr(module, "__name__", "")) not in ("torch", "plait"):
            for name, value in list(vars(module).items()):
                if id(value) in known:
                    setattr(module, name, getattr(dist, known[id(value)]))


def communication_error(what: str, where: str = "") -> PlaitError:
    """J044. `what`: the part of the job and the function; `where`: the line, if it is not the one that runs now."""
    why = "a job is written for one device: its own sums over ranks would be added to plait's, and the result would depend on the plan"
    return PlaitError(Problem("J044", what, why=why, where=where or _find_job_line(), fix=FIX))


def _hide_function(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not _is_job_code(_find_caller()):
            return own(*args, **kwargs)
        if name == "is_initialized":
            return False
        raise communication_error(f"the job calls torch.distributed.{name}")

    return guarded


def _is_job_code(frame: FrameType | None) -> bool:
    """Whether the job's code calls, and plait runs it for a step. The nearest plait function on the stack decides.

    A profiler may have replaced a function of torch.distributed by its own; then the caller of the replacement counts.
    """
    if frame is None or _root_package(frame.f_globals.get("__name__", "")) in ("torch", "plait"):
        return False
    replaced = {getattr(getattr(dist, name, None), "__code__", None) for name in HIDDEN_FUNCTIONS}
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if _root_package(name) == "plait":
            return not name.startswith(TRUSTED_MODULES)
        if frame.f_code in replaced:
            return _is_job_code(frame.f_back)
        frame = frame.f_back
    return False


def _find_caller() -> FrameType | None:
    """Return the caller of the calling function. No frame refers to itself, since that would keep the tensors of all callers alive."""
    return getattr(getattr(currentframe(), "f_back", None), "f_back", None)


def _root_package(name: str) -> str:
    return name.partition(".")[0]


@contextmanager
def name_job_part(part: str) -> Iterator[None]:
    """Inside, torch's error for a missing process group becomes J044 of this part of the job."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not any(words in str(error) for words in NO_GROUP_SIGNS):
            raise
        what = f"{part} communicates by torch.distributed: {summarize_error(error)}"
        raise communication_error(what, find_user_line(error)) from error


def _find_job_line() -> str:
    """Return `file:line in function` of the innermost frame of the job's code."""
    frame = _find_caller()
    while frame is not None:
        code = frame.f_code
        if not (code.co_filename.startswith("<") or is_library(code.co_filename)) and _root_package(frame.f_globals.get("__name__", "")) != "plait":
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
