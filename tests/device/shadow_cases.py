"""Trains jobs under plans on pretended devices, over NCCL's rules: in the process of `shadow_runs.py`.

Each rank tells its losses and norms, and what made its host wait in the last of its steps.
"""

import json
import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from device import nccl, shadow, shadow_jobs
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.fsdp import groups
from plait.proof import own_batch, verify


def trained(
    name: str, plan: str, device: str, steps: int, cast: str | None = "float64", folder: str = "", resume: bool = False
) -> list[dict[str, Any]]:
    """What each rank tells of a few steps, after those of a checkpoint in the folder where it resumes; it leaves one there."""
    job = shadow_jobs.JOBS[name]()

    def run(place: Place) -> dict[str, Any]:
        kind = cast and getattr(torch, cast)
        engine = Engine(job, plan, place=place, device=device, cast=kind, directory=folder or "none")
        if resume:
            engine.resume()
        source, found = engine.batches(), list[float]()
        for _ in range(steps):
            batch = next(source)
            with shadow.WAITS.counted() as waited:
                step = engine.step(batch)
            found += [step.loss, step.norm]
        measured = list(engine.evaluate().values()) if job.evaluate is not None else []
        if folder:
            engine.save()
        return {"numbers": found, "measured": measured, "waits": dict(waited), "unpinned": dict(shadow.WAITS.unpinned)}

    return fork.run(run, Plan.parse(plan).world, fork.Listener(lambda *_: None))


def proved(prove: str, plan: str) -> list[dict[str, Any]]:
    """The verdict on a job of `shadow_jobs.JOBS`."""
    verdict = verify.verify(shadow_jobs.JOBS[prove](), Plan.parse(plan), steps=2, device="cuda")
    return [{"equal": verdict.equal, "cause": str(verdict), "messages": verdict.to_dict()["probes"]["C"]["detail"]}]


def came(case: dict[str, Any]) -> list[dict[str, Any]]:
    return proved(**case) if "prove" in case else probed(**case) if "probe" in case else trained(**case)


def probed(probe: str, world: int) -> list[dict[str, Any]]:
    """A function of `shadow_jobs.PROBES` on each of some ranks."""

    def run(place: Place) -> dict[str, Any]:
        torch.cuda.set_device(place.rank)
        place.connect(torch.device("cuda", place.rank))
        with shadow.WAITS.counted() as waits:
            value = shadow_jobs.PROBES[probe](place.rank)
        return {"value": value, "waits": dict(waits), "unpinned": dict(shadow.WAITS.unpinned)}

    return fork.run(run, world, fork.Listener(lambda *_: None))


def nothing(*args: object) -> None:
    """In place of a stream's waits, where they are left out to see whether that is found."""


def main() -> None:
    groups.GROUP_BYTES = groups.TINY = 0
    own_batch.SECONDS = 0.0
    torch.set_num_threads(1)
    for line in sys.stdin:
        case = json.loads(line)
        deaf = mock.patch.multiple(shadow.Stream, wait_stream=nothing, wait_event=nothing) if case.pop("deaf", False) else None
        backend = case.pop("backend", f"cpu:gloo,cuda:{nccl.NAME}")
        try:
            with deaf or nullcontext(), nccl.instead_of_gloo(
                30.0, backend=backend, host=torch.ops.shadow.host, streams=shadow.Communicators()
            ):
                found = {"ranks": came(case)}
        except Exception as error:
            found = {"error": f"{error}\n{getattr(error, 'trace', '')}"}
        print(json.dumps(found), flush=True)

