"""`plait submit`: write the file that a scheduler wants, from a plan. It starts nothing, and does not load the job."""

import argparse
import json
import os
import re
from pathlib import Path
from shlex import quote, split

from plait import PlaitError, Plan
from plait.config.errors import Problem, shown, too_small
from plait.config.files import check_writable, write
from plait.integrations.submit.scheduler import KINDS, OWN, check, scheduler
from plait.integrations.submit.submission import Submission, check_name, check_text, laid_out, slug
from plait.launch.launchers.launcher import Reading

HERE = ("help", "plan", "nproc", "nnodes", "node_rank", "master", "runs", "resume", "json", "verbose")
"""Options of `plait train` that are not passed on as they are."""
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
TRAIN = "passed_on"
"""Where the parser keeps the options of `plait train`."""


def kind(parser: argparse.ArgumentParser) -> None:
    """Its first word."""
    parser.add_argument("kind", choices=KINDS, help="who starts it")


def options(parser: argparse.ArgumentParser, train: tuple[argparse.Action, ...]) -> None:
    """Add those of this command to those of `plait train`, which it passes on."""
    add = parser.add_argument
    add("--machine", metavar="NAME", help="such as h100x8x2: gives --nnodes and --nproc, as in plait plan")
    add("--name", help="of the job, and of the folder of its runs (from the job's path)")
    add("--out", type=Path, metavar="FILE", help="write it there, instead of printing it")
    add("--cpus", type=int, metavar="N", help="cores of each machine (slurm: the whole machine)")
    add("--gpu", metavar="KIND", help="what the scheduler calls the GPU: H100, nvidia.com/gpu")
    add("--time", metavar="TIME", help="how long it may run, such as 24h or 1d12h")
    add("--image", help="image of the container")
    add("--volume", action="append", default=[], metavar="NAME:/PATH", help="a volume that all machines see")
    add("--chdir", metavar="FOLDER", help="where plait is started; the job's path begins there")
    add("--setup", action="append", default=[], metavar="LINE", help="a line of shell that comes before")
    add("--hosts", metavar="A,B", help="ssh: the machines, the first is number 0")
    add("--secret", metavar="NAME", help="Kubernetes: the Secret that the machines share (plait)")
    add("--call", metavar="WORDS", help='how plait is called there (plait), such as "python -m plait"')
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="passed on to the scheduler as it is")
    parser.set_defaults(**{TRAIN: train})


def run(options: argparse.Namespace) -> int:
    """The command."""
    chosen = scheduler(options.kind)
    given = {name for name in OWN if getattr(options, name) not in (None, [])}
    if options.out:
        check_writable(options.out)
    check(options.kind, chosen, given, gpus=options.device != "cpu")
    text = chosen.write(_submission(options))
    start = chosen.start.replace("FILE", quote(str(options.out)) if options.out else "FILE")
    if options.out:
        write(options.out, text)
    if options.json:
        print(
            json.dumps({"kind": options.kind, "text": text, "file": options.out and str(options.out), "start": start})
        )
    elif options.out:
        print(shown(f"{options.out} is written; start it with  {start}"))
    else:
        print(shown(text), end="")
    return 0


def _submission(options: argparse.Namespace) -> Submission:
    """What was asked for. Everything that is wrong with it is raised."""
    if options.node_rank is not None:
        why = "the scheduler numbers the machines"
        raise PlaitError(Problem("S002", "plait submit takes no --node-rank", why=why, fix=("leave it out",)))
    hosts = tuple(host for host in (options.hosts or "").split(",") if host)
    nodes, each = _machines(options, len(hosts) or None)
    plan, nodes, each = laid_out(_plan(options.plan), nodes, each, f"--plan {options.plan}" if options.plan else "")
    name = options.name if options.name is not None else slug(options.job)
    check_name(name)
    words = (*_words(options), *(f"--job.{key}={value}" for key, value in options.arguments.items()))
    texts = {f"--{key}": getattr(options, key) for key in (*OWN, "job", "runs", "resume") if getattr(options, key)}
    check_text(
        {key: " ".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in texts.items()}
    )
    check_text({word.partition("=")[0]: word for word in words})
    return Submission(
        options.job, plan, nodes, each, name, words, runs=str(options.runs), resume=options.resume,
        restarts=options.restarts, gpus=options.device != "cpu", gpu=options.gpu, cpus=_cpus(options.cpus),
        seconds=seconds(options.time), image=options.image, volumes=tuple(map(_volume, options.volume)),
        folder=options.chdir or (os.getcwd() if options.kind == "ssh" else None), setup=tuple(options.setup), hosts=hosts,
        master=options.master, secret=options.secret or "plait", plait=tuple(split(options.call or "plait")),
        options=tuple(_option(text) for text in options.option), least=_counted(options)[1],
    )  # fmt: skip


def _words(options: argparse.Namespace) -> list[str]:
    """Options of `plait train` that differ from what they are when left out."""
    words: list[str] = []
    for action in getattr(options, TRAIN):
        value, option = getattr(options, action.dest, None), action.option_strings[-1:]
        if action.dest in HERE or not option or value == action.default:
            continue
        values = value if isinstance(value, list) else [value]
        words += [option[0] if value is True else f"{option[0]}={one}" for one in values]
    return words


def _plan(said: str | None) -> Plan:
    if said in (None, "auto"):
        what = "plait submit wants a plan" + ("" if said is None else ": auto would choose one for this machine")
        fix = ('--plan "dp=16"', "plait plan JOB --machine h100x8x2 --out plan.toml    and --plan plan.toml")
        raise PlaitError(Problem("S001", what, fix=fix))
    plan = Plan.read(said)
    if plan.idle():
        raise PlaitError(plan.idle())
    return plan


def _machines(options: argparse.Namespace, hosts: int | None) -> tuple[int | None, int | None]:
    """Machines, and devices of each, as far as they were said."""
    most = _counted(options)[0]
    nodes, each = most if most is not None else hosts, options.nproc
    for option, number in (("--nnodes", nodes), ("--nproc", each)):
        if number is not None and number < 1:
            raise PlaitError(too_small(option, number))
    if options.machine is None:
        return nodes, each
    from plait.launch.detect import read_machine

    machine = read_machine(options.machine)
    return machine.nodes if nodes is None else nodes, machine.devices_per_node if each is None else each


def _counted(options: argparse.Namespace) -> tuple[int | None, int | None]:
    """--nnodes 2, or 1:2: machines, and the least of them with which the run goes on."""
    try:
        return Reading("--nnodes", {"--nnodes": options.nnodes or ""}).counted("--nnodes")
    except PlaitError:
        what = f"--nnodes {options.nnodes[:60]} is no number of machines, and no range"
        raise PlaitError(Problem("U002", what, fix=("--nnodes 2", "--nnodes 1:2"))) from None


def seconds(said: str | None) -> int | None:
    """The seconds of 90m, 24h or 1d12h. S002 for what is no time."""
    if said is None:
        return None
    parts = re.findall(r"(\d{1,6})([dhms])", said)
    total = sum(int(number) * UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != said or not total:
        raise PlaitError(Problem("S002", f"--time {said[:60]} is no time", fix=("--time 24h", "--time 1d12h")))
    return total


def _cpus(said: int | None) -> int | None:
    if said is not None and said < 1:
        raise PlaitError(too_small("--cpus", said))
    return said


def _volume(said: str) -> tuple[str, str]:
    name, colon, path = said.partition(":")
    if not (name and colon and path.startswith("/")):
        fix = ("--volume shared:/mnt/shared",)
        raise PlaitError(Problem("S002", f"--volume {said[:80]} is no volume and path", why="NAME:/PATH", fix=fix))
    return name, path


def _option(said: str) -> tuple[str, str | None]:
    name, equals, value = said.partition("=")
    return name.lstrip("-"), value if equals else None
