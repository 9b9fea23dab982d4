"""A rank whose device is full: what its allocator counted, in an error and in the run directory."""

import re

import torch

from plait.config.errors import FAILED, PlaitError, Problem
from plait.engine.engine import Engine
from plait.engine.memory import measured
from plait.engine.memory_use import size
from plait.engine.run_directory import RunDirectory
from plait.launch.failure_report import described, located

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
WANTED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|[KMGT]iB)")
"""In the message of CUDA's allocator: the bytes that it could not give."""
FIXES = ("more micro-batches (--plan microbatches=…)", "a smaller batch (--batch …)")


def out_of_memory(engine: Engine, run: RunDirectory, error: BaseException) -> PlaitError | None:
    """M002 if the device is full, with what its memory is used for; None: it is another error."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    said, use, rank = described(error), measured(engine), engine.place.rank
    wanted = asked(said["text"])
    run.write_memory(rank, {"step": engine.position.step, "failed": {**use.to_dict(), "wanted": wanted}})
    held = ", ".join(f"{name} {size(n)}" for name, n in use.by_category().items())
    device = (
        f"of {size(use.total)} of {use.device}, tensors had at most {size(use.requested)} ({held}); the allocator kept"
        f" {size(use.fragmented)} beside them; context, NCCL and others {size(use.beside)}"
    )
    step = engine.position.step
    what = f"out of memory on rank {rank} {f'after step {step}' if step else 'in the first step'}"
    return PlaitError(Problem("M002", what, why=f"{said['text']}\n{device}", where=located(said), fix=FIXES), FAILED)


def asked(text: str) -> int:
    """Bytes that the allocator could not give, from its message; 0 if that has no number."""
    found = WANTED.search(text)
    return round(float(found[1]) * UNITS[found[2]]) if found else 0
