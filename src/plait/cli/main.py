"""The command line. It imports torch only once a command needs it, so `plait --help` answers at once."""

import argparse
import json
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn, TextIO

from plait.cli import chaos, plan_keys, train_options
from plait.cli.options import both, common_options, job_options, output_options
from plait.config.device import KINDS, NOT_YET
from plait.config.errors import (
    FAILED,
    NO_ROOM,
    PlaitError,
    Problem,
    codes,
    did_you_mean,
    disk_full,
    explain,
    shown,
    trace_of,
)  # fmt: skip
from plait.config.keys import KEYS
from plait.config.version import __version__
from plait.launch import forkable
from plait.launch.descriptors import open_standard
from plait.launch.stopping import WARNINGS

FIRST = "dp=2"
"""What `plait verify` tries when no plan is given: one process alone would prove nothing."""
OTHERS = ("dp=2 microbatches=2", "fsdp=2", "pp=2 microbatches=2", "tp=2")
"""What it names then."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlaitError(Problem("U001", message, fix=(f"{self.prog} --help",)))

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As `argparse` does; and know it, and its name."""
        self.options = [*getattr(self, "options", []), *(name for name in names if name.startswith("--"))]
        self.added = (*getattr(self, "added", ()), super().add_argument(*names, **settings))
        return self.added[-1]


def parsed(words: list[str]) -> argparse.Namespace:
    """The command and its options. U001, with the nearest name, for one that does not exist."""
    parser, commands = _parser()
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None and not {"-h", "--help", "--version"} & {*words}:
        why = f"commands: {', '.join(commands)}"
        raise PlaitError(Problem("U001", "no command was given", why=why, fix=("plait --help",)))
    if first is not None and first not in commands:
        hint = did_you_mean(first, list(commands))
        raise PlaitError(Problem("U001", f"there is no command `{first[:60]}`        {hint}", fix=("plait --help",)))
    options, unknown = parser.parse_known_args(words)
    if unknown:
        command = commands[first or ""]
        option = next((word for word in unknown if word[:1] == "-"), None)
        what = f"unexpected word `{unknown[0][:60]}`"
        if option is not None:
            what = f"unknown option  {option[:60]}        {did_you_mean(option.partition('=')[0], command.options)}"
        raise PlaitError(Problem("U001", what, fix=(f"{command.prog} --help",)))
    return options


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 ok, 1 run failed, 2 usage, 3 verify differs, 75 stopped but resumable."""
    before = {number: signal.getsignal(number) for number in WARNINGS}
    try:
        return _told(argv)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # None: it was not set by Python
                    signal.signal(number, handler)


def _told(argv: list[str] | None) -> int:
    """The command, and what it says when it fails."""
    argv = list(sys.argv[1:] if argv is None else argv)
    open_standard()
    forkable.stay()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="plait")  # what a job or a path says may be no text in this encoding
    verbose, as_json = not {"-v", "--verbose"}.isdisjoint(argv), "--json" in argv
    try:
        _check_folder()
        arguments, rest = job_arguments(argv)
        options = parsed(rest)
        options.arguments = arguments
        return options.run(options)
    except PlaitError as error:
        from plait.launch.said_once import says

        if error.said or not says(str(error)):
            return error.exit_code
        if verbose:
            print(shown(error.trace or trace_of(error.__cause__)), file=sys.stderr)
        if as_json:
            print(json.dumps({"ok": False, "errors": [vars(p) for p in error.problems]}))
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  what is left is flushed into it at the end
        return 0
    except OSError as error:
        from plait.launch.limits import refused

        problem = disk_full(error) if error.errno in NO_ROOM else refused(error)
        if problem is None:
            raise
        if not error.filename and not _written(sys.stdout):
            problem = replace(problem, where="standard output")
        print(problem, file=sys.stderr)
        return FAILED


def _check_folder() -> None:
    """R002 where the working directory was deleted: neither paths nor torch's libraries are found from there."""
    try:
        os.getcwd()
    except OSError as error:
        problem = Problem("R002", "the working directory is not there any more", why=str(error), fix=("cd somewhere/else",))
        raise PlaitError(problem) from error


def _written(stream: TextIO) -> bool:
    """Whether what was printed could be written."""
    try:
        stream.flush()
    except OSError:
        return False
    return True


def job_arguments(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Take ``--job.depth 8`` and ``--job.depth=8`` out of the words."""
    arguments: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith("--job."):
            if rest[-1:] == ["--resume"] and re.search(r"\.py(:\w+)?$", word):
                rest[-1] = "--resume="  # what follows is the job, not the run
            rest.append(word)
            continue
        name, equals, value = word.removeprefix("--job.").partition("=")
        if not equals:
            value = next(words, "")
            if not value or (value.startswith("--") and not value[2:].isdigit()):
                raise PlaitError(Problem("J005", f"--job.{name} needs a value", fix=(f"--job.{name} …",)))
        arguments[name] = value
    return arguments, rest


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser of the command line, and those of its commands by name."""
    keys = "\n".join(f"  {name:<13} {plan_keys.told(key)}" for name, key in KEYS.items())
    parser = _Parser(
        "plait", description="Write your training job for one device. Split it any way. Prove it is the same training.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"plan keys, as in --plan \"dp=2 microbatches=4\" or in a TOML file:\n{keys}\n\nexit codes: 0 ok · 1 run failed"
        " · 2 bad plan or usage · 3 verify found a difference · 75 stopped, resumable",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"plait {__version__}")
    commands = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS), parser_class=_Parser)
    for name, (options, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        options(command)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.epilog = "\n".join(["examples:", *(f"  plait {name} {words}".rstrip() for words in EXAMPLES[name])])
        if "--plan" in command.options:
            names = fill(", ".join(KEYS), 76, initial_indent="  ", subsequent_indent="  ")
            command.epilog += f"\n\nplan keys, which plait help KEY explains:\n{names}"
    return parser, commands.choices


def options_of(command: str) -> dict[str, argparse.Action]:
    """The options of a command, by the names under which it gets their values."""
    return {option.dest: option for option in _parser()[1][command].added if option.dest != "help"}


EXAMPLES = {
    "train": (
        "job.py --nproc 2",
        'job.py --plan "fsdp=4 microbatches=2" --save-every 50',
        "job.py --resume --job.lr 1e-4",
    ),
    "check": ('job.py --plan "dp=2"', 'job.py --plan "dp=8 microbatches=4" --full'),
    "verify": ('job.py --plan "dp=2"', 'job.py --plan "pp=2 tp=2" --steps 8'),
    "chaos": ('job.py --plan "dp=2"', 'job.py --plan "fsdp=2" --only kill --seed 7', "job.py --list"),
    "sketch": ("job.py", 'job.py --plan "fsdp=8 recompute=full"'),
    "plan": (
        "job.py --machine h100x8",
        "job.py --machine a100x8 --objective cheapest",
        'job.py --plan "tp=2" --show tensor',
        "job.py --machine h100x8x4 --map --out map.svg",
    ),
    "submit": (
        'slurm job.py --plan "dp=16" --nnodes 2 --time 24h --option partition=gpu --out job.sbatch',
        "jobset job.py --plan fsdp=16 --machine h100x8x2 --image registry/train:1 --volume shared:/mnt",
        'ssh job.py --plan "dp=4" --hosts node1,node2',
    ),
    "bench": ("compute", "data job.py"),
    "report": ("", "--timeline", "runs/gpt-3 --timeline --json"),
    "checkpoint": ("list runs/gpt-3", "verify runs/gpt-3", "export runs/gpt-3 --to weights.safetensors"),
    "help": ("P012", "fsdp", "train"),
}
"""What people type after each command; its `--help` ends with them."""


def _elsewhere(module: str) -> Callable[[Any], int]:
    """A command whose file has a function `run`, imported when it is called."""
    return lambda options: import_module(module).run(options)


def _submit_options(parser: argparse.ArgumentParser) -> None:
    from plait.integrations.submit import command

    command.kind(parser)
    train_options.add_options(parser)
    command.options(parser, getattr(parser, "added", ()))
    parser.set_defaults(run=_submit)


def _checkpoint_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("list", "info", "verify", "export"))
    add("path", metavar="PATH", help="a run directory, its checkpoints, or one checkpoint")
    add("--step", type=int, help="the checkpoint of this step, instead of all or the newest")
    add("--to", metavar="PATH", help="export: a folder, or a file that ends in .safetensors")
    add("--shard", default="5GB", metavar="SIZE", help="export: largest file in a folder (5GB)")
    add("--dtype", choices=("fp32", "fp16", "bf16", "fp64"), help="export: number format of the weights")
    add(
        "--ema",
        action="store_true",
        help="export: the moving average of the weights (Job.ema) instead of the last ones",
    )
    add("--adapter", action="store_true", help="export: the adapter of a model of peft, alone")
    add("--merge", action="store_true", help="export: the model with its adapter merged into it, held whole here")
    add("--base", metavar="PATH", help="export: where the weights are now that the run started from")
    output_options(parser)
    parser.set_defaults(run=_elsewhere("plait.cli.checkpoint"))


def _verify_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    common_options(parser)
    add("--steps", type=int, default=4, help="optimizer steps to compare, at least 3 (4)")
    add("--full", action="store_true", help="also batches of the job's own size that take long on one device")
    parser.set_defaults(run=_verify)


def _check_options(parser: argparse.ArgumentParser) -> None:
    common_options(parser)
    parser.add_argument("--full", action="store_true", help="more batches and points, for up to some minutes")
    parser.set_defaults(run=_check)


def _sketch_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    job_options(parser)
    add("--batch", type=int, default=1, help="samples to show the figures of (1)")
    add("--plan", help="also the memory that each rank needs under this plan, at the job's batch")
    parser.set_defaults(run=_elsewhere("plait.cli.sketch"))


def _plan_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser)
    add = parser.add_argument
    add(
        "--machine", default="here",
        help="what to train on: here, a name such as h100x8 or h100x8x16 (16 nodes of 8), or a TOML file (here)",
    )  # fmt: skip
    add("--gpus", type=int, metavar="N", help="so many devices of the machine, instead of all")
    add("--batch", type=int, help="global batch, instead of the job's")
    add("--memory", metavar="SIZE", help="memory of a device, such as 80GiB, instead of the machine's")
    add("--plan", help="keys that are given, as one line; with --show or --dry-run the plan to look at")
    add("--pin", action="append", default=[], metavar="KEY=VALUE", help="the same, one key at a time")
    add("--top", type=int, default=5, metavar="N", help="how many of the best plans to show (5)")
    add("--all", action="store_true", help="show the best plan of every mesh, and what does not fit")
    add("--out", type=Path, metavar="FILE", help="write the choice there, as a plan file")
    add(
        "--objective", choices=("fastest", "cheapest", "fewest", "largest"), default="fastest",
        help="fastest step; cheapest or fewest devices; largest batch that fits (fastest)",
    )  # fmt: skip
    add("--vary", metavar="NAME", help="largest: not the batch but this argument of the job, such as length")
    add("--deadline", metavar="TIME", help="the whole job must end within it, such as 24h (fewest)")
    add("--scale", metavar="N,N,…", help="the best plan at each number of devices, and its efficiency")
    add(
        "--allow-inexact",
        action="store_true",
        help="also plans that are another training: rare or compressed synchronisation",
    )
    add(
        "--map",
        action="store_true",
        help="which way to synchronise is fastest, by link speed and spread; --out map.svg draws it",
    )
    add("--try", type=int, default=0, dest="tries", metavar="K", help="run the first K for a few steps, here")
    add("--show", choices=("tensor",), help="of --plan: which layers tp cuts, how, what stays whole and why")
    add("--dry-run", action="store_true", help="make a step of --plan, of one rank of each kind, without processes")
    parser.set_defaults(run=_elsewhere("plait.cli.plan"))


def _bench_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", choices=("compute", "comm", "data", "all"), nargs="?", default="all")
    add("job", metavar="JOB", nargs="?", help="the job whose data is read (data, all)")
    add("--out", type=Path, default=Path("machine.toml"), help="file to write (machine.toml)")
    add("--nproc", type=int, help="processes that measure at once (one per device or core)")
    add(
        "--device",
        choices=(*KINDS, *NOT_YET),
        metavar=f"{{{','.join(KINDS)}}}",
        default="auto",
        help="cuda: also ROCm's (auto)",
    )
    output_options(parser)
    parser.set_defaults(run=_elsewhere("plait.cli.bench"))


def _chaos_options(parser: argparse.ArgumentParser) -> None:
    common_options(parser)
    chaos.add_options(parser)
    parser.set_defaults(run=lambda options: chaos.run(options, *both(options, []), main))


def _report_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="RUN", nargs="?", default="runs/latest", help="a run directory (runs/latest)")
    add("--timeline", action="store_true", help="write RUN/timeline.html and RUN/trace.json, for Perfetto")
    add("--memory", action="store_true", help="what the fullest rank's memory was used for, beside the plan's bill")
    add("--step", type=int, metavar="N", help="which step to draw (one that took the median time)")
    add("--open", action="store_true", help="open the picture in a browser")
    output_options(parser)
    parser.set_defaults(run=_elsewhere("plait.cli.report"))


def _help_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", metavar="CODE | KEY | COMMAND", nargs="?")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_help)


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "train": (train_options.add_options, "train a job under a plan"),
    "verify": (_verify_options, "prove that the split run computes what one device computes"),
    "check": (_check_options, "see in seconds whether a plan can cut the job's batches"),
    "chaos": (_chaos_options, "pose the fault matrix on a small run of the job: is what plait promises kept?"),
    "sketch": (_sketch_options, "show what a model costs, unit by unit, without running it"),
    "plan": (_plan_options, "choose a plan: will it fit, how fast, why; or look at one"),
    "submit": (_submit_options, "write what a scheduler wants: Slurm, Kubernetes, SkyPilot, Ray, ssh"),
    "bench": (_bench_options, "measure this machine: compute, communication, a job's loader"),
    "report": (_report_options, "sum up a run; draw a step of it: what each rank did, and was to do"),
    "checkpoint": (_checkpoint_options, "list, inspect, verify or export checkpoints"),
    "help": (_help_options, "explain an error code, a plan key or a command: P012, fsdp, train"),
}
"""What adds a command's options, and what the command does."""


def _submit(options: argparse.Namespace) -> int:
    problems = train_options.out_of_range(options)
    if problems:
        raise PlaitError(problems)
    from plait.integrations.submit import command

    return command.run(options)


def _verify(options: argparse.Namespace) -> int:
    few = Problem("U002", f"--steps {options.steps}: at least 3 are compared", fix=("--steps 4",))
    problems = [few] if options.steps < 3 else []
    from plait.launch.place import joining

    asked = options.plan is not None or options.nproc is not None or joining()
    if not asked:
        options.plan = FIRST
    plan, job = both(options, problems)
    if not (asked or options.json):
        told = f"{FIRST} is tried, two copies of the model with half of each batch"
        print(shown(f"plan        none was given: {told}"), flush=True)
    from plait.launch.devices import kind_of
    from plait.planner.refusals import foresee
    from plait.proof.verdict import table
    from plait.proof.verify import verify

    foresee(job, plan, kind_of(options.device))
    seconds = math.inf if options.full else None
    verdict = verify(job, plan, options.steps, options.device, seconds=seconds)
    print(json.dumps(verdict.to_dict()) if options.json else table(verdict, options.job))
    if not (asked or options.json):
        others = (f'plait verify {options.job} --plan "{text}"' for text in OTHERS)
        print(shown("other plans  " + "\n             ".join(others)))
    return verdict.exit_code


def _check(options: argparse.Namespace) -> int:
    plan, job = both(options, list[Problem]())
    from plait.cli.check import run

    return run(options, plan, job)


def _help(options: argparse.Namespace) -> int:
    """Explain an error code, a key of a plan, or a command."""
    word, (parser, commands) = options.word, _parser()
    if word is None or word in commands:
        (parser if word is None else commands[word]).print_help()
        return 0
    text = plan_keys.explained(word) if word in KEYS else explain(word.upper())
    if text is None:
        known = [*commands, *KEYS, *codes()]
        hint = did_you_mean(word, known) if len(word) < 30 else ""
        hint = hint if hint.startswith("did you mean") else "codes look like P012"
        fix = ("plait help fsdp", "plait --help")
        raise PlaitError(Problem("U003", f"there is no help on `{word[:60]}`        {hint}", fix=fix))
    print(json.dumps({"code": word.upper() if word not in KEYS else word, "text": text}) if options.json else text)
    return 0
