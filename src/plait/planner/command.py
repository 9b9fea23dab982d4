"""`plait plan`: choose a plan for a job on a machine; and `--plan auto` of `plait train`."""

import json
import sys
from dataclasses import replace
from typing import Any

from plait.errors import PlaitError, Problem
from plait.job import Job, load_job
from plait.machine import Machine
from plait.plan import Plan
from plait.planner import goals
from plait.planner.answer import ask, text, toml
from plait.planner.asking import Asked, sized

EVERY = 10**6
UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def run(options: Any) -> int:
    """The command."""
    if options.show:
        from plait import slicetable

        return slicetable.run(options)
    if options.dry_run:
        from plait import dryrun

        return dryrun.run(options)
    pins, memory = pinned(options), size(options.memory)
    machine = machine_of(options)
    if options.batch is not None and options.batch < 1:
        raise PlaitError(Problem("U002", f"--batch {options.batch} is not a whole number ≥ 1"))
    job = load_job(options.job, options.arguments)
    job = replace(job, batch=options.batch or job.batch)
    asked = Asked.of(job, options.job, machine, split=machine.devices > 1 or bool(options.scale))

    def again(arguments: dict[str, str]) -> Asked:
        return Asked.of(load_job(options.job, arguments), options.job, machine, split=machine.devices > 1)

    goal = goals.named(options, again)
    if goal is not None:
        found = goal(asked, pins, memory)
        print(json.dumps(found.to_dict()) if options.json else found.text())
        return 0
    found = ask(asked, pins, memory, EVERY if options.all else options.top)
    if options.tries:
        found = goals.tried(found, options)
    if options.out and found.best:
        options.out.write_text(toml(found), encoding="utf-8")
    print(json.dumps(found.to_dict()) if options.json else text(found))
    return 0 if found.best else 1


def chosen(job: Job, options: Any) -> Plan:
    """The plan of `--plan auto`: the best of this machine for --nproc processes, with the reason said."""
    from plait.launch.place import joining, world

    machine = Machine.read("here")
    ranks = world() if joining() else options.nproc or machine.devices
    job = replace(job, batch=getattr(options, "batch", None) or job.batch)
    asked = Asked.of(job, options.job, sized(machine, ranks), split=ranks > 1)
    found = ask(asked, {"precision": "fp32"} if not asked.accelerated else {}, devices=ranks)
    if found.best is None or found.best.candidate.estimate is None:
        why = f"the least that any plan on {ranks} devices needs is more than {found.question.memory / 2**30:.1f} GiB"
        raise PlaitError(Problem("M001", "no plan fits", why=why, fix=("more processes: --nproc", "a smaller --batch")))
    best = found.best.candidate
    second = next((row for row in found.rows[1:] if row.fits), None)
    rest = f"; next best {second.candidate.plan}: {second.why}" if second else ""
    said = f"{1000 * best.seconds:.3g} ms a step predicted{rest}"
    print(f"plan      {best.plan}, chosen of {found.found.counts.get('priced', 0)}: {said}", file=sys.stderr)
    return best.plan


def pinned(options: Any) -> dict[str, Any]:
    """The keys of --pin, and of --plan: what the search must not change."""
    words = " ".join([*options.pin, *([options.plan] if options.plan else [])])
    given = Plan.parse(words) if words else Plan()
    named = {word.partition("=")[0] for word in words.split()}
    return {key: getattr(given, key) for key in given.to_dict() if key in named}


def size(text_: str | None) -> float | None:
    """Bytes of 80GiB, 40GB or 1e9."""
    if text_ is None:
        return None
    number = text_.strip().upper()
    unit = next((u for u in sorted(UNITS, key=len, reverse=True) if number.endswith(u)), "")
    try:
        found = float(number.removesuffix(unit)) * UNITS.get(unit, 1)
    except ValueError:
        found = 0.0
    if found <= 0:
        raise PlaitError(Problem("U002", f"--memory {text_} is not a size", fix=("--memory 80GiB",)))
    return found


def machine_of(options: Any) -> Machine:
    """--machine, with as many devices as --gpus says."""
    if options.gpus is not None and options.gpus < 1:
        raise PlaitError(Problem("U002", f"--gpus {options.gpus} is not a whole number ≥ 1"))
    machine = Machine.read(options.machine)
    machine = sized(machine, options.gpus) if options.gpus else machine
    if options.gpus and machine.devices != options.gpus:
        why = f"{machine.nodes} nodes of {machine.devices_per_node} are {machine.devices} devices"
        fix = (f"--gpus {machine.devices}",)
        raise PlaitError(Problem("U002", f"--gpus {options.gpus} does not fill its nodes", why=why, fix=fix))
    return machine
