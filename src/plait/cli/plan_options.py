"""`plait plan`: check the options before the job is read and torch is imported."""

from plait.config.command_options import PlanOptions
from plait.config.errors import PlaitError, Problem
from plait.config.files import check_writable
from plait.config.hugging_face import PREFIX
from plait.config.job import find_job_file
from plait.config.library import pause_gc
from plait.config.machine import Machine
from plait.config.plan_question import check_plan_options, parse_size
from plait.launch.detect import read_machine
from plait.launch.devices import resolve_kind


def run(options: PlanOptions) -> int:
    """Run the command."""
    check_plan_options(options)
    if not options.job.startswith(PREFIX):
        find_job_file(options.job)
    if options.show:
        with pause_gc():
            from plait.cli.plan_tables import print_parameters, print_tensor

        return {"tensor": print_tensor, "parameters": print_parameters}[options.show](options)
    machine = resolve_machine(options) if not options.dry_run or options.memory or options.machine != "here" else None
    if options.dry_run:
        with pause_gc():
            from plait.cli.plan_tables import print_dry_run
            from plait.planner.plan_request import get_usable_memory

        return print_dry_run(options, None if machine is None else get_usable_memory(machine, parse_size(options.memory)))
    assert machine is not None
    if options.output:
        check_writable(options.output)
    if options.tries and not machine.is_on_cores and resolve_kind("auto") == "cpu":
        why = f"--try runs plans on this machine, and --machine is {machine}"
        raise PlaitError(Problem("U002", "--try works only with the devices of this machine", why=why, fix=("--machine here",)))
    with pause_gc():
        from plait.cli import plan

    return plan.run(options, machine)


def resolve_machine(options: PlanOptions) -> Machine:
    """Read --machine, resized to --gpus."""
    machine = read_machine(options.machine)
    machine = machine.resize(options.gpus) if options.gpus else machine
    if options.gpus and machine.devices != options.gpus:
        why = f"{machine.nodes} nodes with {machine.devices_per_node} devices each have {machine.devices} devices"
        fix = (f"--gpus {machine.devices}",)
        raise PlaitError(Problem("U002", f"--gpus {options.gpus} does not fill complete nodes", why=why, fix=fix))
    return machine
