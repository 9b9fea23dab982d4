"""Compares the clock of `bench/virtual_clock.py` with real links: four ranks in network namespaces, with links that the kernel shapes.

Every rank has a namespace and a cable to a bridge. Both directions go through a token bucket (`tc … tbf`) of the same rate. The wall
time of a step is measured with and without the buckets. Their difference is compared with the time that the clock adds for such a link
to the same recorded steps. Computation on a busy machine affects both sides.

Requires root on Linux, with `ip` and `tc`.

    python bench/shaped_link.py [--mbit 8] [--steps 16]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from slow_link import RANKS, made
from virtual_clock import Recorded, Trace, Wire, replay

from plait.engine.engine import Engine
from plait.launch.place import Place

PLANS = ("dp=4", "replica_groups=4 sync_every=4")
WARM = 4
PORT = 29533


def ip(*words: str) -> None:
    """Run `ip`, or `tc` in a namespace."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespaces(mbit: float) -> Iterator[list[str]]:
    """Yield the names of the ranks' namespaces. `mbit` 0: cables at full speed."""
    names = [f"plait{os.getpid()}{i}" for i in range(RANKS)]
    hub = f"plait{os.getpid()}hub"
    try:
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "wire", "type", "veth", "peer", "name", f"port{i}", "netns", hub)
            ip("-n", hub, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.78.0.{i + 1}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", name, "link", "set", device, "up")
            for where, device in ((name, "wire"), (hub, f"port{i}")) if mbit else ():
                bucket = ("tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "800ms")
                ip("netns", "exec", where, "tc", "qdisc", "add", "dev", device, "root", *bucket)
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def rank(number: int, steps: int, folder: Path) -> None:
    """Run one rank in its namespace: wall seconds of each step, and its trace, under every plan."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "wire"
    dist.init_process_group("gloo", init_method=f"tcp://10.78.0.1:{PORT}", rank=number, world_size=RANKS)
    for i, plan in enumerate(PLANS):
        took = []
        with Trace() as trace, Engine(made(0, steps + WARM), plan, place=Place(number, RANKS), device="cpu") as engine:
            for batch in engine.batches():
                dist.barrier()
                trace.begin()
                start = time.perf_counter()
                done = engine.step(batch)
                took.append(time.perf_counter() - start)
                trace.end()
                if done.step == WARM:
                    took.clear()
                    trace.steps.clear()
                    trace.yardsticks.clear()
        trace.save(folder / f"{i}-{number}.json")
        (folder / f"{i}-{number}.took").write_text(json.dumps(took))


def launched(mbit: float, steps: int) -> list[tuple[float, Recorded]]:
    """Return for each plan the seconds of a step and the trace. Seconds: the median over means of four steps of the slowest rank."""
    with tempfile.TemporaryDirectory() as root, namespaces(mbit) as names:
        words = [sys.executable, __file__, "--steps", str(steps), "--folder", root]
        ranks = [
            subprocess.Popen(["ip", "netns", "exec", name, *words, "--rank", str(i)], stdout=subprocess.DEVNULL)
            for i, name in enumerate(names)
        ]
        if any(each.wait() for each in ranks):
            raise SystemExit("a rank failed")
        found = []
        for i in range(len(PLANS)):
            took = [json.loads((Path(root) / f"{i}-{r}.took").read_text()) for r in range(RANKS)]
            every = [max(column) for column in zip(*took)]
            periods = [statistics.mean(every[k : k + 4]) for k in range(0, len(every), 4)]
            found.append(
                (statistics.median(periods), Recorded.load([Path(root) / f"{i}-{r}.json" for r in range(RANKS)]))
            )
        return found


def main() -> int:
    """Run the command, or one rank of it with --rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank(asked.rank, asked.steps, asked.folder)
        return 0
    plain, shaped = launched(0, asked.steps), launched(asked.mbit, asked.steps)
    print(
        f"links of {asked.mbit:g} Mbit/s each way; seconds that they add to a step, in the mean of {asked.steps} steps"
    )
    for plan, (before, _), (after, run) in zip(PLANS, plain, shaped):
        wire, none = Wire(asked.mbit * 1e6 / 8, 0.0), Wire(1e15, 0.0)
        said = (replay(run, wire, (1.0,) * RANKS).ends[-1] - replay(run, none, (1.0,) * RANKS).ends[-1]) / asked.steps
        print(
            f"{plan:<28} real {after - before:.4f}   clock {said:.4f}   real over clock {(after - before) / said:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
