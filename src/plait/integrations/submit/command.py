"""`plait submit`: write a file for a scheduler from a plan. It starts nothing, and does not load the job."""

import os
import re
from shlex import quote, split

from plait import PlaitError, Plan
from plait.cli.result import print_result
from plait.cli.train_options import find_option_problems
from plait.config.command_options import SubmitOptions, TrainOptions, find_out_of_range, format_words, list_options
from plait.config.conflicts import find_ineffective_keys
from plait.config.errors import Problem, escape_controls, too_small_problem
from plait.config.files import check_writable, write_output
from plait.integrations.submit.submission import (
    SCHEDULER_OPTIONS,
    Submission,
    check_name,
    check_options,
    check_text,
    load_scheduler,
    make_slug,
    resolve_layout,
)
from plait.launch.launchers import EnvironmentReader

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def run(options: SubmitOptions) -> int:
    """Run the command."""
    if wrong := [*find_out_of_range(options), *find_option_problems(options)]:
        raise PlaitError(wrong)
    chosen = load_scheduler(options.kind)
    given = {name for name in SCHEDULER_OPTIONS if getattr(options, name) not in (None, ())}
    if options.output:
        check_writable(options.output)
    check_options(options.kind, chosen, given, gpus=options.device != "cpu")
    text = chosen.write(_build_submission(options))
    start = chosen.start.replace("FILE", quote(str(options.output)) if options.output else "FILE")
    if options.output:
        write_output(options.output, text)
    facts = {"kind": options.kind, "text": text, "file": options.output and str(options.output), "start": start}
    print_result(
        options,
        facts,
        escape_controls(
            f"{options.output} is written; start it with  {start}" if options.output else text.removesuffix("\n")
        ),
    )
    return 0


def _build_submission(options: SubmitOptions) -> Submission:
    """Build the submission from the options. Raises all errors in them."""
    if options.node_rank is not None:
        why = "the scheduler sets the ranks of the machines"
        raise PlaitError(Problem("S002", "plait submit does not accept --node-rank", why=why, fix=("remove it",)))
    hosts = tuple(host for host in (options.hosts or "").split(",") if host)
    nodes, each = _read_layout(options, len(hosts) or None)
    plan, nodes, each = resolve_layout(_read_plan(options.plan), nodes, each, f"--plan {options.plan}" if options.plan else "")
    name = options.name if options.name is not None else make_slug(options.job)
    check_name(name)
    words = tuple(format_words(options, (each for each in list_options(TrainOptions).values() if each.handed_on)))
    texts = {f"--{key}": getattr(options, key) for key in (*SCHEDULER_OPTIONS, "job", "runs", "resume") if getattr(options, key)}
    check_text(
        {key: " ".join(value) if isinstance(value, tuple) else str(value) for key, value in texts.items()}
    )
    check_text({word.partition("=")[0]: word for word in words})
    return Submission(
        options.job, plan, nodes, each, name, words, runs=str(options.runs), resume=options.resume,
        restarts=options.max_restarts, gpus=options.device != "cpu", gpu=options.gpu, cpus=options.cpus,
        seconds=parse_seconds(options.time), image=options.image, volumes=tuple(map(_parse_volume, options.volume)),
        folder=options.chdir or (os.getcwd() if options.kind == "ssh" else None), setup=tuple(options.setup), hosts=hosts,
        master=options.master, secret=options.secret or "plait", plait=tuple(split(options.launch_cmd or "plait")),
        options=tuple(_parse_option(text) for text in options.option), min_nodes=_read_node_range(options)[1],
    )  # fmt: skip


def _read_plan(said: str | None) -> Plan:
    if said in (None, "auto"):
        what = "plait submit needs a plan" + ("" if said is None else ": auto would choose one for this machine")
        fix = ('--plan "dp=16"', "plait plan JOB --machine h100x8x2 --output plan.toml    and --plan plan.toml")
        raise PlaitError(Problem("S001", what, fix=fix))
    plan = Plan.read(said)
    if find_ineffective_keys(plan):
        raise PlaitError(find_ineffective_keys(plan))
    return plan


def _read_layout(options: SubmitOptions, hosts: int | None) -> tuple[int | None, int | None]:
    """Return the numbers of nodes and of devices per node, as far as they are given."""
    most = _read_node_range(options)[0]
    nodes, each = most if most is not None else hosts, options.nproc
    if nodes is not None and nodes < 1:
        raise PlaitError(too_small_problem("--nnodes", nodes))
    if options.machine is None:
        return nodes, each
    from plait.launch.detect import read_machine

    machine = read_machine(options.machine)
    return machine.nodes if nodes is None else nodes, machine.devices_per_node if each is None else each


def _read_node_range(options: SubmitOptions) -> tuple[int | None, int | None]:
    """Parse --nnodes 2, or 1:2: the number of nodes, and the minimum with which the run continues."""
    said = options.nnodes or ""
    try:
        return EnvironmentReader("--nnodes", {"--nnodes": said}).read_range("--nnodes")
    except PlaitError:
        what = f"--nnodes {said[:60]} is not a number of machines or a range"
        raise PlaitError(Problem("U002", what, fix=("--nnodes 2", "--nnodes 1:2"))) from None


def parse_seconds(said: str | None) -> int | None:
    """Parse 90m, 24h or 1d12h to seconds. Raises S002 for other text."""
    if said is None:
        return None
    parts = re.findall(r"(\d{1,6})([dhms])", said)
    total = sum(int(number) * UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != said or not total:
        raise PlaitError(Problem("S002", f"--time {said[:60]} is not a duration", fix=("--time 24h", "--time 1d12h")))
    return total


def _parse_volume(said: str) -> tuple[str, str]:
    name, colon, path = said.partition(":")
    if not (name and colon and path.startswith("/")):
        fix = ("--volume shared:/mnt/shared",)
        raise PlaitError(Problem("S002", f"--volume {said[:80]} is not a volume and path", why="NAME:/PATH", fix=fix))
    return name, path


def _parse_option(said: str) -> tuple[str, str | None]:
    name, equals, value = said.partition("=")
    return name.lstrip("-"), value if equals else None
