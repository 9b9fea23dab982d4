"""`plait submit`: write the file that a scheduler wants, from a plan. It starts nothing, and does not load the job."""

import os
import re
from shlex import quote, split

from plait import PlaitError, Plan
from plait.cli.result import print_result
from plait.cli.train_options import problems
from plait.config.command_options import SubmitOptions, TrainOptions, options_of, out_of_range, words_of
from plait.config.conflicts import without_effect
from plait.config.errors import Problem, shown, too_small
from plait.config.files import check_writable, write
from plait.integrations.submit.submission import (
    OWN,
    Submission,
    check,
    check_name,
    check_text,
    laid_out,
    scheduler,
    slug,
)
from plait.launch.launchers import Reading

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def run(options: SubmitOptions) -> int:
    """The command."""
    if wrong := [*out_of_range(options), *problems(options)]:
        raise PlaitError(wrong)
    chosen = scheduler(options.kind)
    given = {name for name in OWN if getattr(options, name) not in (None, ())}
    if options.output:
        check_writable(options.output)
    check(options.kind, chosen, given, gpus=options.device != "cpu")
    text = chosen.write(_submission(options))
    start = chosen.start.replace("FILE", quote(str(options.output)) if options.output else "FILE")
    if options.output:
        write(options.output, text)
    facts = {"kind": options.kind, "text": text, "file": options.output and str(options.output), "start": start}
    print_result(options, facts, shown(f"{options.output} is written; start it with  {start}" if options.output else text.removesuffix("\n")))
    return 0


def _submission(options: SubmitOptions) -> Submission:
    """What was asked for. Everything that is wrong with it is raised."""
    if options.node_rank is not None:
        why = "the scheduler numbers the machines"
        raise PlaitError(Problem("S002", "plait submit takes no --node-rank", why=why, fix=("leave it out",)))
    hosts = tuple(host for host in (options.hosts or "").split(",") if host)
    nodes, each = _machines(options, len(hosts) or None)
    plan, nodes, each = laid_out(_plan(options.plan), nodes, each, f"--plan {options.plan}" if options.plan else "")
    name = options.name if options.name is not None else slug(options.job)
    check_name(name)
    words = tuple(words_of(options, (each for each in options_of(TrainOptions).values() if each.handed_on)))
    texts = {f"--{key}": getattr(options, key) for key in (*OWN, "job", "runs", "resume") if getattr(options, key)}
    check_text(
        {key: " ".join(value) if isinstance(value, tuple) else str(value) for key, value in texts.items()}
    )
    check_text({word.partition("=")[0]: word for word in words})
    return Submission(
        options.job, plan, nodes, each, name, words, runs=str(options.runs), resume=options.resume,
        restarts=options.max_restarts, gpus=options.device != "cpu", gpu=options.gpu, cpus=options.cpus,
        seconds=seconds(options.time), image=options.image, volumes=tuple(map(_volume, options.volume)),
        folder=options.chdir or (os.getcwd() if options.kind == "ssh" else None), setup=tuple(options.setup), hosts=hosts,
        master=options.master, secret=options.secret or "plait", plait=tuple(split(options.launch_cmd or "plait")),
        options=tuple(_option(text) for text in options.option), least=_counted(options)[1],
    )  # fmt: skip


def _plan(said: str | None) -> Plan:
    if said in (None, "auto"):
        what = "plait submit wants a plan" + ("" if said is None else ": auto would choose one for this machine")
        fix = ('--plan "dp=16"', "plait plan JOB --machine h100x8x2 --output plan.toml    and --plan plan.toml")
        raise PlaitError(Problem("S001", what, fix=fix))
    plan = Plan.read(said)
    if without_effect(plan):
        raise PlaitError(without_effect(plan))
    return plan


def _machines(options: SubmitOptions, hosts: int | None) -> tuple[int | None, int | None]:
    """Machines, and devices of each, as far as they were said."""
    most = _counted(options)[0]
    nodes, each = most if most is not None else hosts, options.nproc
    if nodes is not None and nodes < 1:
        raise PlaitError(too_small("--nnodes", nodes))
    if options.machine is None:
        return nodes, each
    from plait.launch.detect import read_machine

    machine = read_machine(options.machine)
    return machine.nodes if nodes is None else nodes, machine.devices_per_node if each is None else each


def _counted(options: SubmitOptions) -> tuple[int | None, int | None]:
    """--nnodes 2, or 1:2: machines, and the least of them with which the run goes on."""
    said = options.nnodes or ""
    try:
        return Reading("--nnodes", {"--nnodes": said}).counted("--nnodes")
    except PlaitError:
        what = f"--nnodes {said[:60]} is no number of machines, and no range"
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


def _volume(said: str) -> tuple[str, str]:
    name, colon, path = said.partition(":")
    if not (name and colon and path.startswith("/")):
        fix = ("--volume shared:/mnt/shared",)
        raise PlaitError(Problem("S002", f"--volume {said[:80]} is no volume and path", why="NAME:/PATH", fix=fix))
    return name, path


def _option(said: str) -> tuple[str, str | None]:
    name, equals, value = said.partition("=")
    return name.lstrip("-"), value if equals else None
