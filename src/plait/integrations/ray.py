"""plait in Ray Train's workers: `plait.ray.train("job.py", plan="dp=8", max_failures=3)`, or `python -m plait.ray job.py --plan dp=8`.

Ray starts the workers and makes their process group, in which each of them runs `plait train` as a rank. When one is lost, Ray
starts all of them again, `max_failures` times, and they go on from plait's last checkpoint: the run ends with the weights of
one that was never disturbed. What a restart cannot mend, such as a refusal or an exception in the first step, ends the run.

Plait's run directory, with its checkpoints, lies where `storage` says (`--storage` or `--runs`), which all machines see; Ray's own
record lies in `storage/ray`. There Ray keeps a *pointer* to each of the last checkpoints: a file `plait.json` that says where it is.
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
from plait.cli.main import parsed
from plait.config.command_options import TrainOptions, options_of
from plait.config.errors import FAILED, Problem, problem_of, too_small
from plait.launch.failures import LOST, OWN

POINTER = "plait.json"
"""The file of a checkpoint in Ray's record."""
SAID = "said.json"
"""The file in which a rank says why it ends, and whether starting again may mend it."""
OTHERS = ("nnodes", "node_rank", "master")
"""Options of `plait train` that say which machine this is."""


@dataclass(frozen=True)
class Trained:
    """What a run came to."""

    run: Path | None
    """Plait's run directory."""
    checkpoint: Path | None
    """The newest checkpoint in it."""
    step: int
    result: object
    """Ray's `Result`."""


class _Result(Protocol):
    """Ray's `Result`, as far as it is read."""

    metrics: dict[str, Any] | None


def train(
    job: str, *, plan: str = "dp=*", nproc: int | None = None, max_failures: int | None = None, storage: str | Path = "runs",
    name: str | None = None, address: str | None = None, cpus: float = 1.0, arguments: Mapping[str, object] | None = None,
    **options: object,
) -> Trained:  # fmt: skip
    """Train a job in Ray's workers, a worker for each rank of the plan.

    `max_failures`: how often Ray starts the ranks again (2); -1: always. `name`: of Ray's experiment; the same name goes on with
    the same run. `address`: of a Ray cluster, if not the one that Ray finds. `cpus`: those that Ray counts for each rank.
    `arguments`: the job's. `options`: those of `plait train`, such as `steps=100` or `save_every=10`.
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
    return _run(words)


def main(words: list[str] | None = None) -> int:
    """`python -m plait.ray`: the same on the command line; its exit code is that of `plait train`."""
    try:
        done = _run(sys.argv[1:] if words is None else words)
    except PlaitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"done  step {done.step} · checkpoint {done.checkpoint} · {done.run}", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m plait.ray", allow_abbrev=False, usage="python -m plait.ray JOB [options of plait train] [those below]",
        description="Train a job in the workers of Ray Train. Words that are not below are those of plait train.",
    )  # fmt: skip
    add = parser.add_argument
    add("--max-failures", type=int, metavar="N", help="how often Ray starts the ranks again; -1: always (--max-restarts)")
    add("--storage", type=Path, help="where run directories and Ray's record go; all machines see it (--runs)")
    add("--name", help="of Ray's experiment: the same name goes on with the same run")
    add("--address", help="of a Ray cluster: auto, ray://host:10001 (the one that Ray finds, or one on this machine)")
    add("--cpus", type=float, default=1.0, metavar="N", help="processors that Ray counts for each rank (1)")
    return parser


def _run(words: list[str]) -> Trained:
    own, rest = _parser().parse_known_args(words)
    rest = ["train", *rest]
    _, options = parsed(rest)
    assert isinstance(options, TrainOptions)
    if importlib.util.find_spec("ray") is None:
        fix = ("pip install 'plait[ray]'", "pip install 'ray[train]'", "plait train …    starts the ranks itself")
        raise PlaitError(
            Problem("U010", "Ray is not installed here", why="plait.ray runs ranks in workers of Ray Train", fix=fix)
        )
    said = next((name for name in OTHERS if getattr(options, name) is not None), None)
    if said is not None:
        what = f"{options_of(TrainOptions)[said].flag} is not for plait.ray: Ray places the ranks"
        raise PlaitError(Problem("U002", what, fix=("--nproc <ranks on all machines together>",)))
    if own.max_failures is not None and own.max_failures < -1:
        raise PlaitError(too_small("--max-failures", own.max_failures, -1))
    failures = options.max_restarts if own.max_failures is None else own.max_failures
    plan = Plan.read(options.plan or "dp=*").fill(options.nproc)
    storage = (own.storage or options.runs).absolute()
    start = (
        own.name
        or f"{Path(options.job.partition(':')[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    )
    record = storage / "ray" / start
    (record / SAID).unlink(missing_ok=True)
    told = _before(options, plan)
    config = {
        "words": [*rest, "--runs", str(storage), "--plan", str(plan), "--check", "none"],
        "folder": os.getcwd(),
        "start": f"{storage} {start}",
        "said": str(record / SAID),
        "told": told,
    }
    return _fit(config, plan.world, options, own, failures=failures)


def _before(options: TrainOptions, plan: Plan) -> list[str]:
    """Refuse what can be refused before Ray starts anything; lines for the beginning of the run.

    Processes are forked for it, which a process that Ray runs in cannot do.
    """
    from plait.config import hugging_face
    from plait.config.job import load_job
    from plait.launch.devices import kind_of
    from plait.planner.refusals import foresee
    from plait.proof.job import check

    if wrong := [*hugging_face.untrainable(options.job)]:
        raise PlaitError(wrong)
    job = load_job(options.job, options.arguments)
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        why = "Ray runs in this process already, so no process can be forked from it"
        found = check.Checked.not_run(options.check, why)
        if found.problems and not options.allow_inexact:
            raise PlaitError(found.problems)
        return [] if options.check == "none" else found.lines
    foresee(job, plan, "cuda" if options.device == "cuda" else kind_of(options.device))
    found = check.check(job, plan, options.check, name=options.job, arguments=options.arguments, workers=options.workers)
    if found.problems and not options.allow_inexact:
        raise PlaitError(found.problems)
    return found.lines


def _fit(
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
            _work, train_loop_config=config, torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=world, use_gpu=gpu, resources_per_worker={"CPU": own.cpus, **({"GPU": 1} if gpu else {})}),
            run_config=RunConfig(
                name=said.parent.name, storage_path=str(said.parent.parent),
                failure_config=FailureConfig(max_failures=failures), checkpoint_config=CheckpointConfig(num_to_keep=options.keep),
            ),
        )  # fmt: skip
        try:
            result = trainer.fit()
        except Exception as error:
            raise _ended(error, said, failures) from error
    finally:
        if began:
            ray.shutdown()
    if _hopeless(said):
        raise _error_in(said)
    return _came_to(result)


def _work(config: dict[str, Any]) -> None:
    """A worker of Ray Train: one rank, in the process group that Ray made."""
    from plait.launch.attempts import name_start
    from plait.launch.place import SAVED

    said = Path(config["said"])
    if _hopeless(said):  # Ray starts the ranks again although that mends nothing
        return
    if Path(config["folder"]).is_dir():
        os.chdir(config["folder"])
    name_start(config["start"])
    _begin(said, config["told"])
    token = SAVED.set(_report)
    try:
        command, options = parsed(config["words"])
        command.run(options)
    except PlaitError as error:
        if error.codes[0] != "C004" and not error.said:  # that is another rank's doing, who says it
            word = {"problems": [vars(problem) for problem in error.problems], "exit_code": error.exit_code}
            beside = said.with_name(f"{SAID}.{os.getpid()}")
            said.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({**word, "mended": _mended(error)}), encoding="utf-8")
            os.replace(beside, said)
        raise
    finally:
        SAVED.reset(token)


def _begin(said: Path, lines: list[str]) -> None:
    """What one rank does for all before they meet: forget why the attempt before ended, and say what there is to say."""
    from ray.train import get_context

    if get_context().get_world_rank() == 0:
        said.unlink(missing_ok=True)
        for line in lines:
            print(line, flush=True)


def _report(path: Path) -> None:
    """Tell Ray of a checkpoint. Every rank calls it; rank 0 gives the pointer."""
    from ray.train import Checkpoint, get_context, report

    whole = path.absolute()
    facts = {"step": int(path.name.rpartition("-")[2]), "checkpoint": str(whole), "run": str(whole.parents[1])}
    if get_context().get_world_rank() != 0:
        report(facts)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / POINTER).write_text(json.dumps(facts), encoding="utf-8")
        report(facts, checkpoint=Checkpoint.from_directory(folder))


def _mended(error: PlaitError) -> bool:
    """Whether it is worth starting again: a rank was lost, and not in the job's first step, where its own code is wrong."""
    if error.codes[0] not in LOST:
        return False
    made = re.search(r"at step (\d+)", str(error))
    return error.codes[0] not in OWN or (made is not None and int(made.group(1)) > 1)


def _hopeless(said: Path) -> bool:
    """Whether a rank has said what starting again does not mend."""
    return said.exists() and not json.loads(said.read_text(encoding="utf-8"))["mended"]


def _error_in(said: Path) -> PlaitError:
    """What a rank said there."""
    told = json.loads(said.read_text(encoding="utf-8"))
    return PlaitError(map(problem_of, told["problems"]), int(told["exit_code"]))


def _ended(error: Exception, said: Path, failures: int) -> PlaitError:
    """What a run ends with that Ray has given up."""
    if said.exists():
        return _error_in(said)
    lost = getattr(error, "worker_failures", {})
    why = "\n".join(
        dict.fromkeys(f"rank {rank}: {f'{one}'.splitlines()[0] or type(one).__name__}" for rank, one in lost.items())
    )
    what = f"Ray ended the run: ranks were lost more than {failures} times" if lost else "Ray ended the run"
    fix = (
        "--max-failures N    lets Ray start the ranks again more often",
        "the same command with --name, or --resume, goes on",
    )
    return PlaitError(Problem("L021", what, why=why or f"{type(error).__name__}: {error}"[:2000], fix=fix), FAILED)


def _came_to(result: _Result) -> Trained:
    facts = result.metrics or {}
    if "checkpoint" not in facts:  # the run that was to be resumed was complete
        return Trained(None, None, 0, result)
    return Trained(Path(facts["run"]), Path(facts["checkpoint"]), int(facts["step"]), result)
