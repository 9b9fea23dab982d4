"""plait in Ray Train's workers: `plait.ray.train("job.py", plan="dp=8", max_failures=3)`, or `python -m plait.ray job.py --plan dp=8`.

Ray starts the workers and makes their process group, and each worker runs `plait train` as a rank. When one is lost, Ray restarts all of
them, up to `max_failures` times, and they continue from plait's last checkpoint. The final weights are those of an undisturbed run. Errors
that a restart cannot fix, such as a rejected plan or an exception in the first step, end the run.

Plait's run directory, with its checkpoints, is in `storage` (`--storage` or `--runs`), which all machines must share. Ray's own record is
in `storage/ray`. It has a *pointer* to each of the last checkpoints: a file `plait.json` with its path.
"""

import argparse
import importlib.util
import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from plait import PlaitError, Plan
from plait.cli.main import parse_command_line
from plait.config.command_options import TrainOptions, list_options
from plait.config.errors import FAILED, Problem, parse_problem, too_small_problem
from plait.launch.failures import JOB_CODES, LOST_CODES

POINTER = "plait.json"
"""Pointer file of a checkpoint in Ray's record."""
EXIT_FILE = "said.json"
"""File with a rank's error, and whether a restart may fix it."""
NODE_OPTIONS = ("nnodes", "node_rank", "master")
"""Options of `plait train` that identify this node."""


@dataclass(frozen=True)
class Trained:
    """Result of a run."""

    run: Path | None
    """Plait's run directory."""
    checkpoint: Path | None
    """The newest checkpoint in it."""
    step: int
    result: object
    """Ray's `Result`."""


class _Result(Protocol):
    """The fields of Ray's `Result` that are read."""

    metrics: dict[str, Any] | None


def train(
    job: str, *, plan: str = "dp=*", nproc: int | None = None, max_failures: int | None = None, storage: str | Path = "runs",
    name: str | None = None, address: str | None = None, cpus: float = 1.0, arguments: Mapping[str, object] | None = None,
    **options: object,
) -> Trained:  # fmt: skip
    """Train a job in Ray's workers, with one worker per rank of the plan.

    `max_failures`: number of restarts by Ray (2); -1: unlimited. `name`: of Ray's experiment; the same name continues the same run.
    `address`: of a Ray cluster, if not the default. `cpus`: CPU cores that Ray reserves per rank. `arguments`: the job's.
    `options`: those of `plait train`, such as `steps=100` or `save_every=10`.
    """
    words = [job, "--plan", plan, "--storage", str(storage), "--cpus", str(cpus)]
    for option, value in {
        "nproc": nproc,
        "max_failures": max_failures,
        "name": name,
        "address": address,
        **options,
    }.items():
        if value is True:
            words.append(f"--{option.replace('_', '-')}")
        elif value is not None and value is not False:
            words.append(f"--{option.replace('_', '-')}={value}")
    words += [f"--job.{key}={value}" for key, value in (arguments or {}).items()]
    return _train_in_ray(words)


def main(words: list[str] | None = None) -> int:
    """Run `python -m plait.ray`; returns the exit code of `plait train`."""
    try:
        done = _train_in_ray(sys.argv[1:] if words is None else words)
    except PlaitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"done  step {done.step} · checkpoint {done.checkpoint} · {done.run}", flush=True)
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m plait.ray", allow_abbrev=False, usage="python -m plait.ray JOB [options of plait train] [those below]",
        description="Train a job in the workers of Ray Train. All other options are those of plait train.",
    )  # fmt: skip
    add = parser.add_argument
    add("--max-failures", type=int, metavar="N", help="number of times Ray restarts the ranks; -1: unlimited (--max-restarts)")
    add("--storage", type=Path, help="folder for run directories and Ray's record, shared by all machines (--runs)")
    add("--name", help="name of Ray's experiment; the same name continues the same run")
    add("--address", help="address of a Ray cluster: auto, ray://host:10001 (default: the one that Ray finds, or a new one on this machine)")
    add("--cpus", type=float, default=1.0, metavar="N", help="CPU cores that Ray reserves per rank (default: 1)")
    return parser


def _train_in_ray(words: list[str]) -> Trained:
    own, rest = _build_parser().parse_known_args(words)
    rest = ["train", *rest]
    _, options = parse_command_line(rest)
    assert isinstance(options, TrainOptions)
    if importlib.util.find_spec("ray") is None:
        fix = ("pip install 'plait[ray]'", "pip install 'ray[train]'", "plait train …    starts the ranks without Ray")
        raise PlaitError(
            Problem("U010", "Ray is not installed here", why="plait.ray runs ranks in workers of Ray Train", fix=fix)
        )
    said = next((name for name in NODE_OPTIONS if getattr(options, name) is not None), None)
    if said is not None:
        what = f"{list_options(TrainOptions)[said].flag} is not supported by plait.ray: Ray places the ranks"
        raise PlaitError(Problem("U002", what, fix=("--nproc <ranks on all machines together>",)))
    if own.max_failures is not None and own.max_failures < -1:
        raise PlaitError(too_small_problem("--max-failures", own.max_failures, -1))
    failures = options.max_restarts if own.max_failures is None else own.max_failures
    plan = Plan.read(options.plan or "dp=*").fill(options.nproc)
    storage = (own.storage or options.runs).absolute()
    start = (
        own.name
        or f"{Path(options.job.partition(':')[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    )
    record = storage / "ray" / start
    (record / EXIT_FILE).unlink(missing_ok=True)
    told = _check_before_start(options, plan)
    config = {
        "words": [*rest, "--runs", str(storage), "--plan", str(plan), "--check", "none"],
        "folder": os.getcwd(),
        "start": f"{storage} {start}",
        "said": str(record / EXIT_FILE),
        "told": told,
    }
    return _fit_trainer(config, plan.world, options, own, failures=failures)


def _check_before_start(options: TrainOptions, plan: Plan) -> list[str]:
    """Reject invalid jobs and plans before Ray starts; return lines for the start of the run.

    The check forks processes, which is impossible in a process that runs Ray.
    """
    from plait.config import hugging_face
    from plait.config.job import load_job
    from plait.launch.devices import resolve_kind
    from plait.planner.refusals import validate_plan
    from plait.proof.job import check

    if wrong := [*hugging_face.find_untrainable(options.job)]:
        raise PlaitError(wrong)
    job = load_job(options.job, options.arguments)
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        why = "Ray already runs in this process, so it cannot be forked"
        found = check.CheckResult.from_failure(options.check, why)
        if found.problems and not options.allow_inexact:
            raise PlaitError(found.problems)
        return [] if options.check == "none" else found.lines
    validate_plan(job, plan, "cuda" if options.device == "cuda" else resolve_kind(options.device))
    found = check.check_job(job, plan, options.check, name=options.job, arguments=options.arguments, workers=options.workers)
    if found.problems and not options.allow_inexact:
        raise PlaitError(found.problems)
    return found.lines


def _fit_trainer(
    config: dict[str, Any], world: int, options: TrainOptions, own: argparse.Namespace, *, failures: int
) -> Trained:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    said = Path(config["said"])
    began = not ray.is_initialized()
    if began:
        ray.init(address=own.address)
    try:
        gpu = options.device == "cuda" or (options.device == "auto" and ray.cluster_resources().get("GPU", 0) >= world)
        config["words"] += ["--device", "cuda" if gpu else "cpu"]
        trainer = TorchTrainer(
            _run_worker, train_loop_config=config, torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=world, use_gpu=gpu, resources_per_worker={"CPU": own.cpus, **({"GPU": 1} if gpu else {})}),
            run_config=RunConfig(
                name=said.parent.name, storage_path=str(said.parent.parent),
                failure_config=FailureConfig(max_failures=failures), checkpoint_config=CheckpointConfig(num_to_keep=options.keep),
            ),
        )  # fmt: skip
        try:
            result = trainer.fit()
        except Exception as error:
            raise _explain_ray_failure(error, said, failures) from error
    finally:
        if began:
            ray.shutdown()
    if _is_unrecoverable(said):
        raise _read_error(said)
    return _make_trained(result)


def _run_worker(config: dict[str, Any]) -> None:
    """Run one rank in a worker of Ray Train, in the process group that Ray made."""
    from plait.launch.attempts import set_start_id
    from plait.launch.place import ON_CHECKPOINT

    said = Path(config["said"])
    if _is_unrecoverable(said):  # Ray restarts the ranks although that fixes nothing
        return
    if Path(config["folder"]).is_dir():
        os.chdir(config["folder"])
    set_start_id(config["start"])
    _reset_attempt(said, config["told"])
    token = ON_CHECKPOINT.set(_report_checkpoint)
    try:
        command, options = parse_command_line(config["words"])
        command.run(options)
    except PlaitError as error:
        if error.codes[0] != "C004" and not error.said:  # another rank caused it, and reports it
            word = {"problems": [vars(problem) for problem in error.problems], "exit_code": error.exit_code}
            beside = said.with_name(f"{EXIT_FILE}.{os.getpid()}")
            said.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({**word, "mended": _is_recoverable(error)}), encoding="utf-8")
            os.replace(beside, said)
        raise
    finally:
        ON_CHECKPOINT.reset(token)


def _reset_attempt(said: Path, lines: list[str]) -> None:
    """On rank 0, delete the error of the previous attempt, and print the run's first lines."""
    from ray.train import get_context

    if get_context().get_world_rank() == 0:
        said.unlink(missing_ok=True)
        for line in lines:
            print(line, flush=True)


def _report_checkpoint(path: Path) -> None:
    """Report a checkpoint to Ray. Every rank calls it; rank 0 passes the pointer."""
    from ray.train import Checkpoint, get_context, report

    whole = path.absolute()
    facts = {"step": int(path.name.rpartition("-")[2]), "checkpoint": str(whole), "run": str(whole.parents[1])}
    if get_context().get_world_rank() != 0:
        report(facts)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / POINTER).write_text(json.dumps(facts), encoding="utf-8")
        report(facts, checkpoint=Checkpoint.from_directory(folder))


def _is_recoverable(error: PlaitError) -> bool:
    """Whether a restart may help: a rank was lost, and not in the job's first step, where the job's code is the likely cause."""
    if error.codes[0] not in LOST_CODES:
        return False
    made = re.search(r"at step (\d+)", str(error))
    return error.codes[0] not in JOB_CODES or (made is not None and int(made.group(1)) > 1)


def _is_unrecoverable(said: Path) -> bool:
    """Whether a rank has recorded an error that a restart does not fix."""
    return said.exists() and not json.loads(said.read_text(encoding="utf-8"))["mended"]


def _read_error(said: Path) -> PlaitError:
    """Read the error that a rank recorded."""
    told = json.loads(said.read_text(encoding="utf-8"))
    return PlaitError(map(parse_problem, told["problems"]), int(told["exit_code"]))


def _explain_ray_failure(error: Exception, said: Path, failures: int) -> PlaitError:
    """Return the error of a run that Ray has ended."""
    if said.exists():
        return _read_error(said)
    lost = getattr(error, "worker_failures", {})
    why = "\n".join(
        dict.fromkeys(f"rank {rank}: {f'{one}'.splitlines()[0] or type(one).__name__}" for rank, one in lost.items())
    )
    what = f"Ray ended the run: ranks were lost more than {failures} times" if lost else "Ray ended the run"
    fix = (
        "--max-failures N    allows more restarts by Ray",
        "the same command with --name, or with --resume, continues the run",
    )
    return PlaitError(Problem("L021", what, why=why or f"{type(error).__name__}: {error}"[:2000], fix=fix), FAILED)


def _make_trained(result: _Result) -> Trained:
    facts = result.metrics or {}
    if "checkpoint" not in facts:  # the resumed run was already complete
        return Trained(None, None, 0, result)
    return Trained(Path(facts["run"]), Path(facts["checkpoint"]), int(facts["step"]), result)
