"""Injects the same faults into the same small training under plait's own launcher, torchrun and Ray Train, in turn, in one run.

    python bench/faults.py [--systems plait,torchrun,…] [--faults kill,stop,…] [--rounds 1] [--json]

    plait           plait train, which forks and restarts the ranks itself
    plait-torchrun  plait train as torchrun's ranks, --max-restarts 3
    plait-ray       python -m plait.ray, --max-failures 3
    torchrun        a plain hand-written DDP script with checkpoints (`script`, below), under torchrun --max-restarts 3
    `torchrun-apart` the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    ray             the same script as the loop of a TorchTrainer, FailureConfig(max_failures=3)

    kill      kill -9 of rank 1 in the middle of a step
    raise     an exception on rank 1, once
    save      kill -9 of rank 1 while a checkpoint is written
    stop      SIGSTOP of rank 1: it hangs (the model injects these four faults itself, by `plait.chaos.strike`)
    launcher  kill -9 of the launcher; the same command is started again after two seconds

Two ranks, 60 steps of at least 50 ms, a checkpoint every 10. The table has the seconds from the fault to the first step
after it, and the number of completed steps that were repeated. It also has whether the final weights equal, bit for bit, those of
the same system without a fault. For `launcher`, `left` is the number of ranks of the dead launcher that still ran at the second start.
Systems that are not installed are listed. On a busy machine, only ratios of seconds are meaningful.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from plait.chaos.strike import Strike, Striker, read_marks

HERE = Path(__file__).resolve()
STEPS, EVERY, AT, PAUSE, BATCH = 60, 10, 25, 0.05, 16
LONGEST = 60.0
"""Seconds after a fault within which a system must make the next step."""
ROWS = "rows.jsonl"
"""The file of a run to which each rank appends a row per completed step."""
SAVING = "**/s*.tmp*"
"""The pattern of files that exist while a checkpoint is written: the script's saved.pt.tmp, plait's step-000030.tmp-…."""
FAULTS: dict[str, dict[int, Strike]] = {
    "kill": {0: Strike("kill", step=AT + 1)},
    "raise": {0: Strike("raise", step=AT + 1)},
    "save": {0: Strike("kill", step=3 * EVERY, until=SAVING)},
    "stop": {0: Strike("stop", step=AT + 1)},
    "launcher": {},
}
"""The strikes on rank 1 in the model's forward pass; the launcher is killed from outside."""


class Noted(torch.optim.AdamW):
    """Writes a row with time, process and step after each step, and a digest of the weights after the last step."""

    def step(self, closure: object = None) -> None:
        super().step()
        parameters = [p for group in self.param_groups for p in group["params"]]
        step = int(self.state[parameters[0]]["step"])
        if not Slow.ran:
            return  # plait tests the optimizer beforehand
        Slow.ran = False
        row: dict[str, object] = {"t": time.monotonic(), "pid": os.getpid(), "step": step}
        if step == STEPS:
            row["digest"] = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()[:16]
        with open(Path(os.environ["BENCH_FOLDER"], ROWS), "a") as file:
            file.write(json.dumps(row) + "\n")


class Slow(nn.Module):
    """A small model with a slow forward pass, in which rank 1 is struck once."""

    ran = False

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 8))
        self.calls = 0
        self.striker = Striker(FAULTS.get(os.environ["BENCH_FAULT"], {}), Path(os.environ["BENCH_FOLDER"]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and type(x) is Tensor:
            Slow.ran, self.calls = True, self.calls + 1
            time.sleep(PAUSE)
            if rank() == 1:
                self.striker.begin_phase(self.calls, "forward")
        return self.body(x)


def rank() -> int:
    """Return the rank of this process; 0 before a process group exists."""
    import torch.distributed.distributed_c10d as dist

    return dist.get_rank() if dist.is_initialized() else 0


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random samples."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(1024, 32, generator=made), torch.randn(1024, 8, generator=made)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def job() -> object:
    """The job for plait."""
    import plait

    loss = nn.functional.mse_loss
    return plait.Job(
        model=Slow, loss=loss, data=Data, optimizer=lambda ps: Noted(ps, lr=1e-3), batch=BATCH, steps=STEPS, seed=3
    )


def script(begun: bool = False) -> None:
    """Train with a hand-written script: DDP, a checkpoint every 10 steps that is renamed into place, and the newest is loaded at the start."""
    import torch.distributed as dist

    if not begun:
        dist.init_process_group("gloo")
    me, world, saved = dist.get_rank(), dist.get_world_size(), Path(os.environ["BENCH_FOLDER"], "saved.pt")
    torch.manual_seed(3)
    model = Slow()
    optimizer, first, data = Noted(model.parameters(), lr=1e-3), 0, Data()
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    parallel = nn.parallel.DistributedDataParallel(model)
    for step in range(first, STEPS):
        share = BATCH // world
        at = [(step * BATCH + me * share + i) % len(data) for i in range(share)]
        optimizer.zero_grad()
        nn.functional.mse_loss(parallel(data.x[at]), data.y[at]).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0 and me == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, f"{saved}.tmp"
            )
            os.replace(f"{saved}.tmp", saved)
        if (step + 1) % EVERY == 0:
            dist.barrier()
    if not begun:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # a regular exit of gloo aborts sometimes


def by_ray() -> None:
    """Run the script in Ray's ranks."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init()
    run = RunConfig(
        name="faults", storage_path=os.environ["BENCH_FOLDER"], failure_config=FailureConfig(max_failures=3)
    )
    loop = lambda: __import__("runpy").run_path(str(HERE))["script"](True)  # noqa: E731
    TorchTrainer(
        loop, scaling_config=ScalingConfig(num_workers=2), run_config=run, torch_config=TorchConfig(backend="gloo")
    ).fit()


PYTHON = sys.executable
PLAIT = ["-m", "plait", "train", f"{HERE}:job", "--plan", "dp=2", "--save-every", str(EVERY), "--check", "none"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
SYSTEMS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "plait": ([PYTHON, *PLAIT], {}, "plait"),
    "plait-torchrun": ([*TORCHRUN, *PLAIT], {}, "plait"),
    "plait-ray": ([PYTHON, "-m", "plait.ray", *PLAIT[3:], "--max-failures", "3"], {}, "ray"),
    "torchrun": ([*TORCHRUN, str(HERE), "--by", "script"], {}, "torch"),
    "torchrun-apart": ([*TORCHRUN, str(HERE), "--by", "script"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "torch"),
    "ray": ([PYTHON, str(HERE), "--by", "ray"], {}, "ray"),
}
"""The command, its environment, and the required package, by the name of the system."""


@dataclass
class Outcome:
    """The outcome of one run."""

    system: str
    fault: str
    next_step: float | None = None
    """Seconds from the fault to the first step after it; None if no step followed in time."""
    again: int | None = None
    """The number of completed steps that were repeated."""
    equal: bool | None = None
    """Whether the final weights equal those of the undisturbed run; None if the run failed."""
    left: int | None = None
    note: str = ""


class Run:
    """One run of a system in its own folder."""

    def __init__(self, system: str, fault: str, folder: Path):
        self.folder, (self.command, extra, _) = folder, SYSTEMS[system]
        own = {"BENCH_FOLDER": str(folder), "BENCH_FAULT": fault, "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | own | extra
        self.said = open(folder / "said.txt", "ab")  # noqa: SIM115
        self.start(())

    def start(self, more: tuple[str, ...]) -> None:
        command = [*self.command, *more]
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=self.said, stderr=self.said, start_new_session=True
        )

    def rows(self) -> list[dict]:
        """Return the rows of all ranks, in the order in which they were written."""
        with suppress(OSError):
            return [json.loads(line) for line in (self.folder / ROWS).read_text().splitlines() if line.endswith("}")]
        return []

    def ranks(self) -> list[int]:
        """Return the live processes that wrote rows, in the order of their first rows."""
        return [pid for pid in dict.fromkeys(row["pid"] for row in self.rows()) if alive(pid)]

    def until(self, ready: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end or (self.process.poll() is not None and not ready()):
                return ready()
            time.sleep(0.005)
        return True

    def digest(self) -> str:
        return next((row["digest"] for row in reversed(self.rows()) if "digest" in row), "")

    def close(self) -> None:
        """End all remaining processes of the run."""
        for pid in (self.process.pid, *self.ranks()):
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL) if pid == self.process.pid else os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.said.close()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def one(system: str, fault: str, undisturbed: str) -> Outcome:
    """Measure one run with one fault. `undisturbed`: the digest of the weights without a fault."""
    outcome = Outcome(system, fault)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        run = Run(system, fault, Path(name))
        try:
            made = lambda: max((row["step"] for row in run.rows()), default=0)  # noqa: E731
            posed = lambda: made() >= AT and len(run.ranks()) > 1 if fault == "launcher" else bool(read_marks(run.folder))  # noqa: E731
            if not run.until(posed, 240):
                outcome.note = "it never came so far: " + tail(run)
                return outcome
            before, struck = {row["pid"] for row in run.rows()}, struck_at(run, fault, outcome)
            done = max(row["step"] for row in run.rows() if row["t"] <= struck + 0.02)
            further = done + 1 if fault != "launcher" else STEPS  # a rank that lost another rank within a step may still count it
            fresh = partial(after, run, struck, before, further)
            if not run.until(lambda: bool(fresh()), LONGEST):
                ended = run.process.poll()
                outcome.note = (
                    f"ended with {ended}: {tail(run)}" if ended is not None else f"nothing within {LONGEST:.0f} s"
                )
                return outcome
            first = fresh()[0]
            outcome.next_step, outcome.again = first["t"] - struck, max(0, done + 1 - first["step"])
            if run.until(lambda: run.process.poll() is not None, LONGEST) and run.process.returncode == 0:
                outcome.equal = run.digest() == undisturbed
            else:
                outcome.note = f"did not end well: {tail(run)}"
            return outcome
        finally:
            run.close()


def after(run: Run, struck: float, before: set[int], further: int) -> list[dict]:
    """Return the steps after the fault: those of a new process, or beyond the step in progress."""
    return [r for r in run.rows() if r["t"] > struck and (r["pid"] not in before or r["step"] > further)]


def struck_at(run: Run, fault: str, outcome: Outcome) -> float:
    """Return the time of the fault. Rank 1 has struck itself by then, or the launcher is killed now."""
    if fault != "launcher":
        return read_marks(run.folder)[0].time
    time.sleep(0.02)
    os.kill(run.process.pid, signal.SIGKILL)
    struck = time.monotonic()
    run.process.wait()
    time.sleep(2.0)
    outcome.left = len(run.ranks())
    for pid in run.ranks():  # time for a cleanup before the command is started again
        os.kill(pid, signal.SIGKILL)
    run.start(("--resume",) if outcome.system.startswith("plait") else ())
    return struck


def tail(run: Run) -> str:
    """Return the last line of output with an error that is no frame of a stack."""
    lines = (run.folder / "said.txt").read_text(errors="replace").splitlines()
    told = [line.strip() for line in lines if "rror" in line and "file" not in line.lower()]
    return (told or lines or [""])[-1][:160]


def alone(system: str) -> str:
    """Return the final digest of a run without a fault."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        run = Run(system, "", Path(name))
        try:
            run.until(lambda: run.process.poll() is not None, 240)
            return run.digest()
        finally:
            run.close()


def missing(system: str) -> str:
    """Return the name of a required package that is not installed, or an empty string."""
    needs = SYSTEMS[system][2]
    return needs if importlib.util.find_spec(needs) is None else ""


def told(outcomes: list[Outcome]) -> str:
    """Format a table with a row for each system and fault."""
    lines = [f"{'system':<16} {'fault':<9} {'next step':>10} {'made again':>11} {'equal':>6} {'left':>5}  note"]
    for key in dict.fromkeys((one.system, one.fault) for one in outcomes):
        same = [one for one in outcomes if (one.system, one.fault) == key]
        back = [one for one in same if one.next_step is not None]
        seconds = f"{statistics.median(one.next_step or 0.0 for one in back):.2f} s" if back else "-"
        again = str(max(one.again or 0 for one in back)) if back else "-"
        equal = (
            "-" if not any(one.equal is not None for one in same) else "yes" if all(one.equal for one in same) else "no"
        )
        left = next((str(one.left) for one in same if one.left is not None), "")
        note = next((one.note for one in same if one.note), "")
        lines.append(f"{key[0]:<16} {key[1]:<9} {seconds:>10} {again:>11} {equal:>6} {left:>5}  {note}".rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=("script", "ray"), help=argparse.SUPPRESS)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.by:
        {"script": script, "ray": by_ray}[options.by]()
        return
    systems, outcomes = options.systems.split(","), list[Outcome]()
    for system in [s for s in systems if missing(s)]:
        print(f"{system}: {missing(system)} is not installed, nothing was measured", file=sys.stderr)
    systems = [s for s in systems if not missing(s)]
    undisturbed = {system: alone(system) for system in systems}
    for system in [s for s, digest in undisturbed.items() if not digest]:
        print(f"{system}: an undisturbed run does not end, nothing was measured", file=sys.stderr)
    for _ in range(options.rounds):
        order = [(system, fault) for system in systems if undisturbed[system] for fault in options.faults.split(",")]
        random.shuffle(order)
        for system, fault in order:
            outcomes.append(one(system, fault, undisturbed[system]))
            print(asdict(outcomes[-1]), file=sys.stderr, flush=True)
    print(json.dumps([asdict(one) for one in outcomes]) if options.json else told(outcomes))


if __name__ == "__main__":
    main()
