"""The command line. Commands import torch only when they need it, so `plait --help` returns at once."""

import argparse
import atexit
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from io import TextIOWrapper
from textwrap import fill
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from plait.cli import plan_and_job
from plait.cli.result import print_result, reserve_stdout
from plait.config import command_options as of
from plait.config import former_names
from plait.config.command_options import REQUIRED, CommandOptions, Option, format_flag, list_options
from plait.config.errors import (
    DISK_FULL_ERRNOS,
    FAILED,
    PlaitError,
    Problem,
    did_you_mean,
    disk_full_problem,
    escape_controls,
    explain,
    format_trace,
    read_error_pages,
)  # fmt: skip
from plait.config.keys import FORMER_KEYS, KEYS
from plait.config.library import pause_gc
from plait.config.version import __version__
from plait.launch import forkable
from plait.launch.child import end_process
from plait.launch.limits import open_standard_streams
from plait.launch.stopping import WARNING_SIGNALS

if TYPE_CHECKING:
    from plait.config.job import Job

MACHINE_READABLE = {"--json", "--svg"}
"""Options whose output is read by programs."""


@dataclass(frozen=True)
class Command:
    """A command of plait."""

    summary: str
    """Its line in `plait --help`."""
    options: type[CommandOptions]
    run: Callable[[Any], int]
    """Runs the command and returns the exit code."""
    examples: tuple[str, ...]
    """Arguments of example calls, which end the command's `--help`."""

    @property
    def flags(self) -> list[str]:
        """The command's options on the command line."""
        return ["--help", *(each.flag for each in list_options(self.options).values() if not each.by_place)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlaitError(Problem("U001", message, fix=(f"{self.prog} --help",)))


def parse_command_line(argv: list[str]) -> tuple[Command, CommandOptions]:
    """Parse a command and its options. Raises U001 with the nearest name for an unknown one."""
    arguments, words = split_job_arguments(argv)
    parser, parsers = _build_parser()
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None and not {"-h", "--help", "--version"} & {*words}:
        why = f"commands: {', '.join(COMMANDS)}"
        raise PlaitError(Problem("U001", "no command was given", why=why, fix=("plait --help",)))
    if first is not None and first not in COMMANDS:
        hint = did_you_mean(first, list(COMMANDS))
        raise PlaitError(Problem("U001", f"unknown command `{first[:60]}`        {hint}", fix=("plait --help",)))
    found, unknown = parser.parse_known_args(words)
    command = COMMANDS[first or ""]
    given = {word.partition("=")[0] for word in words}
    for option in list_options(command.options).values():
        if option.former and format_flag(option.former) in given:
            former_names.warn_renamed("option", format_flag(option.former), option.flag)
    if unknown:
        option = next((word for word in unknown if word[:1] == "-"), None)
        what = f"unexpected argument `{unknown[0][:60]}`"
        if option is not None:
            what = f"unknown option  {option[:60]}        {did_you_mean(option.partition('=')[0], command.flags)}"
        raise PlaitError(Problem("U001", what, fix=(f"{parsers[first or ''].prog} --help",)))
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(found).items()}
    return command, command.options(arguments=arguments, **values)


def main(argv: list[str] | None = None, job: "Job | None" = None) -> int:
    """Run one command; returns the exit code: 0 ok, 1 run failed, 2 usage, 3 verify differs, 75 stopped but resumable.

    `job` is the command's job if it is already loaded.
    """
    before = {number: signal.getsignal(number) for number in WARNING_SIGNALS}
    argv = list(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="plait")  # a text from a job or a path may not be encodable here
    try:
        with (
            reserve_stdout(not MACHINE_READABLE.isdisjoint(word.partition("=")[0] for word in argv)) as output,
            former_names.print_warnings_as_notes(),
        ):
            return _run_guarded(argv, job, output)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # None: not set by Python
                    signal.signal(number, handler)


def start() -> int:
    """Run the command line as this process. Returns the exit code.

    After a plan the process ends without Python's teardown, which takes a second or more to free the model and the modules of its libraries.
    """
    ended = list[int]()
    if sys.argv[1:2] == ["plan"]:
        atexit.register(lambda: ended and end_process(ended[0]))  # runs last: handlers of libraries and of the job are registered later
    ended.append(main())
    return ended[0]


def _run_guarded(argv: list[str], job: "Job | None", output: TextIO) -> int:
    """Run a command, and print errors of the operating system. Results are written to `output`."""
    forkable.keep_forkable()
    try:
        return _run_command(argv, job, output)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  buffered output is flushed into it at exit
        return 0
    except OSError as error:
        from plait.launch.limits import explain_os_limit

        problem = disk_full_problem(error) if error.errno in DISK_FULL_ERRNOS else explain_os_limit(error)
        if problem is None:
            raise
        if not error.filename and not _can_flush(output):
            problem = replace(problem, where="standard output")
        print(problem, file=sys.stderr)
        return FAILED


def _run_command(argv: list[str], job: "Job | None", output: TextIO) -> int:
    """Run a command, and print its errors."""
    try:
        _check_folder()
        command, options = parse_command_line(argv)
        if isinstance(options, of.SplitOptions):
            options = replace(options, loaded=job)
        return command.run(replace(options, stdout=output))
    except PlaitError as error:
        from plait.launch.attempts import should_report

        if error.said or not should_report(str(error)):
            return error.exit_code
        if not {"-v", "--verbose"}.isdisjoint(argv):
            print(escape_controls(error.trace or format_trace(error.__cause__)), file=sys.stderr)
        if "--json" in argv:
            print(json.dumps({"ok": False, "errors": [vars(p) for p in error.problems]}), file=output, flush=True)
        print(error, file=sys.stderr)
        return error.exit_code


def _check_folder() -> None:
    """Raise R002 if the working directory was deleted. Then neither paths nor torch's libraries can be found."""
    try:
        os.getcwd()
    except OSError as error:
        problem = Problem("R002", "the working directory no longer exists", why=str(error), fix=("cd somewhere/else",))
        raise PlaitError(problem) from error


def _can_flush(stream: TextIO) -> bool:
    """Return True if all printed text could be written."""
    try:
        stream.flush()
    except OSError:
        return False
    return True


def split_job_arguments(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Remove ``--job.depth 8`` and ``--job.depth=8`` from the words, and return them as a dict."""
    arguments: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith("--job."):
            if rest[-1:] == ["--resume"] and re.search(r"\.py(:\w+)?$", word):
                rest[-1] = "--resume="  # the next word is the job, not the run
            rest.append(word)
            continue
        name, equals, value = word.removeprefix("--job.").partition("=")
        if not equals:
            value = next(words, "")
            if not value or (value.startswith("--") and not value[2:].isdigit()):
                raise PlaitError(Problem("J005", f"--job.{name} needs a value", fix=(f"--job.{name} …",)))
        arguments[name] = value
    return arguments, rest


def _build_parser() -> tuple[_Parser, dict[str, _Parser]]:
    """Build the parser of the command line, and those of its commands by name."""
    keys = "\n".join(f"  {name:<13} {plan_and_job.format_key_help(key)}" for name, key in KEYS.items())
    parser = _Parser(
        "plait", description="Write your training job for one device. Split it any way. Prove it is the same training.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"plan keys, as in --plan \"dp=2 microbatches=4\" or in a TOML file:\n{keys}\n\nexit codes: 0 ok · 1 run failed"
        " · 2 bad plan or usage · 3 verify found a difference · 75 stopped, resumable",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"plait {__version__}")
    commands = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS), parser_class=_Parser)
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        for option in list_options(command.options).values():
            _add_option(added, option)
        added.epilog = "\n".join(["examples:", *(f"  plait {name} {words}".rstrip() for words in command.examples)])
        if "--plan" in command.flags:
            names = fill(", ".join(KEYS), 76, initial_indent="  ", subsequent_indent="  ")
            added.epilog += f"\n\nplan keys, which plait help KEY explains:\n{names}"
    return parser, commands.choices


def _add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    """Add an option to a parser. The parser sets no default, because the dataclass field has it."""
    settings: dict[str, Any] = {"help": option.help}
    if option.kind is bool:
        settings["action"] = "store_true"
    else:
        settings |= {"type": option.kind, "choices": option.choices or None, "metavar": option.metavar}
    if option.former_values:
        settings["type"] = option.replace_former
    if option.many:
        settings["action"] = "append"
    if option.bare is not None:
        settings |= {"nargs": "?", "const": option.bare}
    if not option.by_place:
        parser.add_argument(*option.words or (option.flag,), dest=option.name, default=argparse.SUPPRESS, **settings)
        if option.former:
            settings["help"] = argparse.SUPPRESS
            parser.add_argument(format_flag(option.former), dest=option.name, default=argparse.SUPPRESS, **settings)
    elif option.default is REQUIRED:
        parser.add_argument(option.name, **settings)
    elif option.many:
        parser.add_argument(option.name, nargs="*", default=option.default, **{k: v for k, v in settings.items() if k != "action"})
    else:
        parser.add_argument(option.name, nargs="?", default=option.default, **settings)


def _defer_run(module: str) -> Callable[[Any], int]:
    """Return a function that imports a module when it is called, and calls its `run`."""
    return lambda options: _import_command(module).run(options)


def _import_command(module: str) -> ModuleType:
    if module not in sys.modules:
        with pause_gc():
            import_module(module)
    return sys.modules[module]


def _print_help(options: of.HelpOptions) -> int:
    """Explain an error code, a plan key, or a command."""
    word, (parser, commands) = FORMER_KEYS.get(options.word or "", options.word), _build_parser()
    if word is None or word in commands:
        (parser if word is None else commands[word]).print_help()
        return 0
    text = plan_and_job.explain_key(word) if word in KEYS else explain(word.upper())
    if text is None:
        known = [*commands, *KEYS, *read_error_pages()]
        hint = did_you_mean(word, known) if len(word) < 30 else ""
        hint = hint if hint.startswith("did you mean") else "codes look like P012"
        fix = ("plait help fsdp", "plait --help")
        raise PlaitError(Problem("U003", f"no help exists for `{word[:60]}`        {hint}", fix=fix))
    print_result(options, {"code": word.upper() if word not in KEYS else word, "text": text}, text)
    return 0


COMMANDS = {
    "train": Command(
        "train a job under a plan", of.TrainOptions, _defer_run("plait.cli.train_options"),
        (
            "job.py --nproc 2",
            'job.py --plan "fsdp=4 microbatches=2" --save-every 50',
            "job.py --resume --job.lr 1e-4",
        ),
    ),
    "verify": Command(
        "check that the split run computes the same as one device", of.VerifyOptions, _defer_run("plait.cli.verify"),
        ('job.py --plan "dp=2"', 'job.py --plan "pp=2 tp=2" --steps 8'),
    ),
    "prove": Command(
        "check that your own distributed script, without plait, trains the same as on one device", of.ProveOptions, _defer_run("plait.cli.prove"),
        ('"python train.py --batch-size 32" "torchrun --nproc-per-node 2 train.py --batch-size 16"',),
    ),
    "check": Command(
        "check that a plan is valid for this job's data and loss (takes seconds)", of.CheckOptions, _defer_run("plait.cli.check"),
        ('job.py --plan "dp=2"', 'job.py --plan "dp=8 microbatches=4" --full'),
    ),
    "chaos": Command(
        "inject faults into a small run of the job and check that it recovers", of.ChaosOptions, _defer_run("plait.cli.chaos"),
        ('job.py --plan "dp=2"', 'job.py --plan "fsdp=2" --only kill --seed 7', "job.py --list"),
    ),
    "sketch": Command(
        "show the cost of each unit of a model, without running it", of.SketchOptions, _defer_run("plait.cli.sketch"),
        ("job.py", 'job.py --plan "fsdp=8 activation_checkpointing=full"'),
    ),
    "plan": Command(
        "choose a plan by predicted memory and speed, or inspect one plan", of.PlanOptions, _defer_run("plait.cli.plan_options"),
        (
            "job.py --machine h100x8",
            "job.py --machine a100x8 --objective min-cost",
            'job.py --plan "tp=2" --show tensor',
            "job.py --machine h100x8x4 --map --output map.svg",
        ),
    ),
    "submit": Command(
        "write the file for a scheduler: Slurm, Kubernetes, SkyPilot, Ray, ssh", of.SubmitOptions, _defer_run("plait.integrations.submit.command"),
        (
            'slurm job.py --plan "dp=16" --nnodes 2 --time 24h --option partition=gpu --output job.sbatch',
            "jobset job.py --plan fsdp=16 --machine h100x8x2 --image registry/train:1 --volume shared:/mnt",
            'ssh job.py --plan "dp=4" --hosts node1,node2',
        ),
    ),
    "bench": Command(
        "measure this machine's compute and communication, or a job's data loading", of.BenchOptions, _defer_run("plait.cli.bench"),
        ("compute", "data job.py"),
    ),
    "report": Command(
        "write a page about a run: its speed, where the time went, what to change", of.ReportOptions, _defer_run("plait.cli.report"),
        ("", "--timeline", "runs/gpt-3 --timeline --json", "--try 3"),
    ),
    "replay": Command(
        "recompute a past step of a run, and rank its samples", of.ReplayOptions, _defer_run("plait.cli.replay"),
        ("--step 57", "runs/gpt-3 --step 57 --bisect", 'runs/gpt-3 --step 57 --plan "dp=2 tp=2"'),
    ),
    "checkpoint": Command(
        "list, inspect, verify or export checkpoints", of.CheckpointOptions, _defer_run("plait.cli.checkpoint"),
        ("list runs/gpt-3", "verify runs/gpt-3", "export runs/gpt-3 --output weights.safetensors"),
    ),
    "help": Command(
        "explain an error code, a plan key or a command: P012, fsdp, train", of.HelpOptions, _print_help,
        ("P012", "fsdp", "train"),
    ),
}  # fmt: skip
"""The commands, in the order of `plait --help`."""
