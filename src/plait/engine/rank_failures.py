"""What a rank keeps when its training ends in an error: the last good state, its record, and what its memory was used for."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from plait.config.errors import FAILED, PlaitError, Problem
from plait.engine.elastic import Keeper
from plait.engine.engine import Engine
from plait.engine.memory import measured
from plait.engine.memory_use import size
from plait.engine.metrics import Recorder
from plait.engine.run_directory import RunDirectory
from plait.launch.failures import described, located
from plait.launch.stopping import Stopped, given_up

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


@contextmanager
def good_state_saved(engine: Engine, recorder: Recorder, keep: int) -> Iterator[None]:
    """Around a step and what follows it. If the step is not finite and the run stops, the state before it, which is good, is saved
    first. All ranks raise then, so all save."""
    try:
        yield
    except PlaitError as error:
        if error.codes[0] not in ("N001", "N002") or not engine.position.step or not engine.whole():
            raise
        recorder.flush()
        first, *rest = error.problems
        fix = (f"the state before it is saved in {engine.save(keep)}", *first.fix)
        raise PlaitError([dataclasses.replace(first, fix=fix), *rest], error.exit_code) from None


def failure_of(
    engine: Engine, run: RunDirectory, recorder: Recorder, keeper: Keeper | None, raised: Exception | Stopped
) -> BaseException:
    """What the rank raises for what ended its training. Flushes the record, and hands the rank's state to the launcher's next start."""
    error = given_up(engine.place.rank, engine.position.step) if isinstance(raised, Stopped) else raised
    with suppress(Exception):  # the device may be what failed
        recorder.flush()
    if keeper is not None:
        keeper.lost(error, recorder.row)
    return out_of_memory(engine, run, error) or error
