"""Inspects steps: the places where the host waits for the device, and a trace of the profiler."""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_checks import gpt
from gpu_looks import Look, Row, Setting, wait
from gpu_speed import made, models
from torch.profiler import ProfilerActivity, profile

from plait.engine.engine import Engine

WARM, STEPS = 4, 4
SYNCHRONIZING = "called a synchronizing CUDA operation"
"""The warning of torch's debug mode."""
OWN = ("gpu_steps.py", "contextlib.py")
ALLOWED = {"offload=optimizer": 2.0, "offload=all microbatches=2": float("inf")}
"""The allowed host synchronizations of a step. Other plans have one, which reads the row of the previous step. An optimizer on the host
also reads gradients. Under offload=all FSDP2 waits for those of each of its groups, and the row is only reported."""
LARGEST = 16 * 2**20
Span = tuple[float, float]


# — synchronizations —


class Waits:
    """The waits of the host, by the innermost line outside of torch."""

    def __init__(self) -> None:
        self.found = Counter[str]()

    def note(self, what: str) -> None:
        frames = [
            f for f in traceback.extract_stack() if not f.filename.endswith(OWN) and "unittest/mock" not in f.filename
        ]
        at = ([f for f in frames if "site-packages" not in f.filename and "/warnings.py" not in f.filename] or frames)[
            -1
        ]
        self.found[f"{at.filename.rpartition('/src/')[2].rpartition('/bench/')[2]}:{at.lineno} ({what})"] += 1

    def warned(self, message: Any, *more: Any, **options: Any) -> None:
        if SYNCHRONIZING in str(message):
            self.note("operator")


@contextmanager
def watched(kind: str) -> Iterator[Waits]:
    """Count waits. torch's debug mode reports operators and streams; waits for events and devices are counted in their methods."""
    waits, cuda = Waits(), torch.cuda
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = waits.warned
        for holder, name in ((cuda.Event, "synchronize"), (cuda, "synchronize")):
            plain = getattr(holder, name)

            def waiting(*args: Any, plain: Any = plain, what: str = f"{holder.__name__}.{name}", **options: Any) -> Any:
                waits.note(what)
                return plain(*args, **options)

            stack.enter_context(patch.object(holder, name, waiting))
        if kind == "cuda":
            cuda.set_sync_debug_mode("warn")
            stack.callback(cuda.set_sync_debug_mode, "default")
        yield waits


def synchronisations(setting: Setting) -> dict[str, Look]:
    plans = (
        "dp=1",
        "precision=bf16",
        "precision=fp16",
        "microbatches=2",
        "activation_checkpointing=full",
        "compile=true",
        "offload=optimizer",
    )
    plans = (*plans, "offload=all microbatches=2")
    return {f"gpt, {plan}": partial(waits_in, setting, plan) for plan in plans}


def waits_in(setting: Setting, plan: str) -> Row:
    """Return the host synchronizations of a step under a plan, with their lines. As in `plait train`, results are read one step late."""
    engine = Engine(gpt(), plan, device=setting.kind)
    source, before = engine.batches(), None
    for _ in range(WARM):
        before = engine.step(next(source))
        _ = before.loss
    with watched(setting.kind) as waits:
        for _ in range(STEPS):
            step = engine.step(next(source))
            _ = before.loss
            before = step
    each = sum(waits.found.values()) / STEPS
    said = ", ".join(f"{n / STEPS:g} × {line}" for line, n in waits.found.most_common(6))
    most = ALLOWED.get(plan, 1.0)
    assert each <= most, f"{each:g} in a step, {most:g} allowed: {said}"
    return {"per step": each, "saw": said or "none"}


# — a trace —


def traces(setting: Setting) -> dict[str, Look]:
    found: dict[str, Look] = {}
    for model in models():
        for plan in ("precision=bf16", "precision=bf16 compile=true") if model == "gpt" else ("precision=bf16",):
            found[f"{model}, {plan}"] = partial(trace, setting, model, plan)
    return found


def trace(setting: Setting, model: str, plan: str) -> Row:
    """Profile three steps: the busy fraction of the device, and its kernels. The trace is saved for chrome://tracing."""
    engine = Engine(made(setting, model), plan, device=setting.kind)
    source = engine.batches()
    for _ in range(WARM):
        engine.step(next(source))
    engine.settle()
    wait(setting)
    with profiled(setting) as prof:
        for _ in range(3):
            engine.step(next(source))
        wait(setting)
    busy = on_device(prof, setting)
    spans = [span for _, span in busy]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    by_name = Counter[str]()
    for name, (begin, end) in busy:
        by_name[name] += end - begin
    total = sum(by_name.values())
    top = ", ".join(f"{name[:40]} {100 * took / total:.0f} %" for name, took in by_name.most_common(5))
    kept = _kept(prof, setting.out, f"trace-{model}-{plan.replace(' ', '-').replace('=', '_')}.json.gz")
    row: Row = {"busy %": 100 * covered(spans) / whole, "kernels per step": len(spans) / 3, "top": top, "trace": kept}
    return row | {"data": {"microseconds by kernel": dict(by_name.most_common(40))}}


def _kept(prof: Any, out: Path, name: str) -> str:
    file = out / name
    prof.export_chrome_trace(str(file))
    size = file.stat().st_size
    if size > LARGEST:
        file.unlink()
        return f"left out: {size / 2**20:.0f} MiB"
    return f"{name} ({size / 2**20:.2f} MiB)"


def profiled(setting: Setting) -> Any:
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.gpu else [])])


def on_device(prof: Any, setting: Setting) -> list[tuple[str, Span]]:
    """Return kernels and copies with their times, in microseconds; on a CPU its operators."""
    kind = torch.autograd.DeviceType.CUDA if setting.gpu else torch.autograd.DeviceType.CPU
    events = [e for e in prof.events() if e.device_type == kind and not getattr(e, "is_user_annotation", False)]
    found = [(e.name, (e.time_range.start, e.time_range.end)) for e in events]
    return [(name, span) for name, span in found if span[1] > span[0]]


def merged(spans: Sequence[Span]) -> list[Span]:
    """Merge overlapping times, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def covered(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in merged(spans))


def shared(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Return the time in which both are active."""
    return covered(one) + covered(other) - covered([*one, *other])
