"""Measures checkpoint costs: plait's save and resume against plain torch.distributed.checkpoint, on the same state.

    python bench/checkpoint.py --rounds 9

Two processes train one model under `dp=2` and under `fsdp=2`. Each round runs every way to save and load in
random order, so that noise affects all of them equally. *Stall* is the time that the training loop waits in the call. *Whole*
is the time until the checkpoint is complete, and *load* until weights and optimizer are restored. A cell is the median. A ratio
is the median over rounds of plait's time divided by the other's in the same round. dcp's `save` does not hash and does not sync the
directory; plait's does both, and checks every digest on load.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from plait import Engine, Job, Plan
from plait.launch import fork
from plait.launch.place import Place

KEEP = 10**6
"""No old checkpoint is deleted during the measurement."""


class Rows:
    """Random rows."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((256,), i / 64), torch.zeros(1)


def job(width: int, layers: int) -> Job:
    """A stack of square layers under Adam: width² × layers × 12 bytes of state."""

    def model() -> nn.Module:
        body = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(nn.Linear(256, width), *body, nn.Linear(width, 1))

    return Job(
        model=model,
        loss=nn.functional.mse_loss,
        data=Rows,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
        batch=4,
        steps=10**6,
    )


def timed(act: Any) -> float:
    """Return the seconds of the slowest rank; all ranks start together."""
    dist.barrier()
    start = perf_counter()
    act()
    seconds = torch.tensor(perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure(place: Place, plan: str, asked: Any, root: Path) -> dict[str, Any]:
    """Run one rank's part of all rounds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    engine = Engine(
        job(asked.width, asked.layers), Plan.parse(plan), place=place, device="cpu", directory=root / "plait"
    )
    source = engine.batches()
    control = dist.new_group(backend="gloo")

    def step() -> None:
        engine.step(next(source))

    def theirs() -> dict[str, Any]:
        model, optimizer = get_state_dict(engine.model, engine.optimizer)
        return {"model": model, "optimizer": optimizer}

    def plain() -> dict[str, Any]:
        """Return the state of a sharded model, and this rank's part of the optimizer under the rank's own name."""
        return {"model": dict(engine.model.state_dict()), f"optimizer {place.rank}": engine.optimizer.state_dict()}

    state = plain if "fsdp" in plan else theirs
    rows: list[dict[str, float]] = []
    for number in range(asked.rounds + 1):
        row: dict[str, float] = {}
        step()
        order = random.Random(number).sample(["plait", "plait, beside", "dcp.save", "dcp.async_save"], 4)
        for name in order:
            folder = root / f"dcp-{number}-{name[4:]}"
            if name == "plait":
                row[name] = timed(partial(engine.save, KEEP))
                step()  # the next save belongs to another step
                row["plait load"] = timed(engine.resume)
            elif name == "plait, beside":
                row[name] = timed(partial(engine.save, KEEP, False))
                row["plait, beside, whole"] = row[name] + timed(lambda: engine.checkpoints.finish_save(engine))
                step()
            elif name == "dcp.save":
                row[name] = timed(lambda folder=folder: dcp.save(state(), checkpoint_id=folder))
                row["dcp.load"] = timed(lambda folder=folder: load(engine, folder, state()))
            else:
                future: list[Any] = []
                row[name] = timed(
                    lambda folder=folder, future=future: future.append(
                        dcp.async_save(state(), checkpoint_id=folder, process_group=control)
                    )
                )
                row["dcp.async_save, whole"] = row[name] + timed(future[0].result)
            dist.barrier()
        if place.rank == 0:
            for folder in (*root.glob("dcp-*"), *engine.checkpoints.list_published()[1:]):
                shutil.rmtree(folder)
        dist.barrier()
        rows += [row] if number else []
    size = sum(f.stat().st_size for f in engine.checkpoints.list_published()[0].iterdir())
    return {"plan": plan, "bytes": size, "rows": rows}


def load(engine: Engine, folder: Path, found: dict[str, Any]) -> None:
    """Load with dcp: first into the state dicts, then into model and optimizer."""
    dcp.load(found, checkpoint_id=folder)
    if "optimizer" in found:
        model, optimizer = found["model"], found["optimizer"]
        set_state_dict(engine.model, engine.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    else:
        engine.optimizer.load_state_dict(found[f"optimizer {engine.place.rank}"])


PAIRS = (
    ("save, waiting", "plait", "dcp.save"), ("stall of a save beside training", "plait, beside", "dcp.async_save"),
    ("that save, whole", "plait, beside, whole", "dcp.async_save, whole"), ("load", "plait load", "dcp.load"),
)  # fmt: skip


def show(result: dict[str, Any]) -> str:
    """Format the table of one plan."""
    rows, mib = result["rows"], result["bytes"] / 2**20
    lines = [f"{result['plan']} · 2 processes · {mib:.0f} MiB · {len(rows)} rounds · torch {torch.__version__}"]
    lines.append(f"  {'':<34}{'plait ms':>9}{'MiB/s':>8}{'dcp ms':>9}   plait over dcp")
    for title, mine, other in PAIRS:
        a = [row[mine] for row in rows]
        middle = statistics.median(a)
        text = f"  {title:<34}{middle * 1e3:>9.1f}{mib / middle:>8.0f}"
        if other in rows[0]:
            b = [row[other] for row in rows]
            q = statistics.quantiles([x / y for x, y in zip(a, b)], n=4)
            text += f"{statistics.median(b) * 1e3:>9.1f}   {q[1]:.2f} [{q[0]:.2f}, {q[2]:.2f}]"
        lines.append(text)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="one JSON object per table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    listener = fork.Listener(lambda _, m: print(m["text"], file=sys.stderr) if m["kind"] == "log" else None)
    for plan in ("dp=2", "fsdp=2"):
        with tempfile.TemporaryDirectory() as root:
            result = fork.run_ranks(partial(measure, plan=plan, asked=asked, root=Path(root)), 2, listener)[0]
        print(json.dumps(result) if asked.json else show(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
