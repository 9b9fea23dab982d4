"""Compares plait's sharded step with hand-written FSDP2's, Accelerate's, and the step without communication.

The method is that of overhead.py: all variants run in the same forked processes and take steps in turn. Ratios are of the same
round, with medians and quartiles. It uses two processes, gloo, and one thread each.

    plait fsdp=2 …    Engine.batches() and Engine.step under that plan
    hand-written      fully_shard on every block and on the model, clip_grad_norm_, the optimizer on DTensors
    hand-written z2   the same with reshard_after_forward=False: parameters stay gathered until backward
    Accelerate        its FSDP2 plugin, the same blocks
    replicas          plait dp=2
    no communication  the hand-written loop on each rank's local batch alone: a bound, not the same training
"""

import argparse
import json
import mmap
import os
import statistics
import sys
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import overhead
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.model.build_model import make_model

PLANS = ("fsdp=2", "fsdp=2 zero_stage=2", "fsdp=2 zero_stage=1", "dp=2")


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that one wraps by hand: the members of the model's lists."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    outer = lists[:1]
    return [b for found in outer for b in found if any(True for _ in b.parameters())]


def by_hand(job: Job, place: Place, reshard: bool) -> overhead.Take:
    model = make_model(job)
    mesh = init_device_mesh("cpu", (place.world,))
    for module in (*blocks(model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard and module is not model)
    optimizer = job.optimizer(list(model.parameters()))
    loader = DataLoader(job.data(), job.batch // place.world, sampler=overhead.Order(job, place.rank, place.world))
    clip = lambda parameters, largest: nn.utils.clip_grad_norm_(parameters, largest)  # noqa: E731
    return overhead.loop(job, model, optimizer, loader, clip=clip)


def with_accelerate(job: Job, place: Place) -> overhead.Take:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model = make_model(job)
    kinds = list({type(b).__name__ for b in blocks(model)})
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=kinds,
        cpu_offload=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    loader = DataLoader(job.data(), job.batch // place.world, sampler=overhead.Order(job))
    model, optimizer, loader = accelerator.prepare(model, job.optimizer(list(model.parameters())), loader)
    return overhead.loop(job, model, optimizer, loader, accelerator.backward, accelerator.clip_grad_norm_)


def with_plait(job: Job, place: Place, plan: str, spans: list[dict[str, float]]) -> overhead.Take:
    engine = Engine(job, Plan.parse(plan), place=place, device="cpu")
    source = engine.batches()

    def take() -> float:
        step = engine.step(next(source))
        spans.append({name: seconds for name, _, seconds in step.spans})
        return step.loss

    return take


def measure(place: Place, job: Job, rounds: int, gate: Any, asked: Any) -> dict[str, Any]:
    place.connect(torch.device("cpu"))
    torch.set_num_threads(asked.threads)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(place.rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(place.world)) | {"MASTER_ADDR": "127.0.0.1"}
    spans: dict[str, list[dict[str, float]]] = {plan: [] for plan in PLANS}
    takes = {f"plait {plan}": with_plait(job, place, plan, spans[plan]) for plan in PLANS}
    takes |= {"hand-written": by_hand(job, place, True), "hand-written z2": by_hand(job, place, False)}
    if asked.accelerate:
        takes["Accelerate"] = with_accelerate(job, place)
    takes["no communication"] = overhead.by_hand(job, place, False)
    losses = torch.tensor([[take() for _ in range(3)] for take in takes.values()], dtype=torch.float64)
    seconds = overhead.in_turn(list(takes.values()), rounds, place, gate)
    plaits = losses[: len(PLANS)].clone()  # plait's loss is global, the others' is that of a rank
    dist.all_reduce(losses.div_(place.world))
    losses[: len(PLANS)] = plaits
    middle = {p: {n: statistics.median(s[n] for s in rows[3:]) * 1e3 for n in rows[0]} for p, rows in spans.items()}
    return {"names": list(takes), "losses": losses.tolist(), "seconds": seconds.tolist(), "spans": middle}


def show(name: str, job: Job, result: dict[str, Any]) -> str:
    times = dict(zip(result["names"], zip(*result["seconds"])))
    against = [n for n in times if n == "no communication" or not n.startswith("plait")]
    lines = [f"{name} · nproc 2 · batch {job.batch} · {len(result['seconds'])} rounds · torch {torch.__version__}"]
    lines.append(f"  {'':<20}{'ms':>8}   " + "".join(f"{'over ' + n:<26}" for n in against))
    for n, row in times.items():
        ratios = [
            statistics.quantiles((a / b for a, b in zip(row, times[other])), n=4) for other in against if other != n
        ]
        text = "".join(f"{f'{r[1]:.3f} [{r[0]:.3f}, {r[2]:.3f}]':<26}" for r in ratios) if n.startswith("plait") else ""
        lines.append(f"  {n:<20}{statistics.median(row) * 1e3:>8.2f}   {text}".rstrip())
    losses = [row for n, row in zip(result["names"], result["losses"]) if n != "no communication"]
    apart = " ".join(f"{max(c) - min(c):.1e}" for c in zip(*losses))
    lines += [
        f"  spans of {p}, ms: " + "  ".join(f"{n} {t:.2f}" for n, t in s.items()) for p, s in result["spans"].items()
    ]
    return "\n".join([*lines, f"  losses at most {apart} apart in steps 1, 2, 3"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=("gpt", "cnn", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=20, help="of gpt; gpt-large a third, cnn five times")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--accelerate", action="store_true", help="also Accelerate's FSDP2")
    parser.add_argument("--json", action="store_true", help="one JSON object per table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        found = {n: j for n, j in overhead.workloads(asked.job).items() if n in ("gpt", "gpt-large", "cnn")}
    listener = fork.Listener(lambda _, m: print(m["text"], file=sys.stderr) if m["kind"] == "log" else None)
    for name, job in found.items():
        rounds = max(4, round(asked.rounds * overhead.ROUNDS[name]))
        gate = memoryview(mmap.mmap(-1, 16)).cast("q")
        result = fork.run_ranks(partial(measure, job=job, rounds=rounds, gate=gate, asked=asked), 2, listener)[0]
        print(json.dumps(result) if asked.json else show(name, job, result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
