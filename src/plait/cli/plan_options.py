"""`plait plan`: whatever can be wrong without looking at the job is raised before the job is read, or torch is imported."""

from plait.config.command_options import PlanOptions
from plait.config.errors import PlaitError, Problem
from plait.config.files import check_writable
from plait.config.hugging_face import PREFIX
from plait.config.job import job_file
from plait.config.library import uncollected
from plait.config.machine import Machine
from plait.config.plan_question import check, size
from plait.launch.detect import read_machine
from plait.launch.devices import kind_of


def run(options: PlanOptions) -> int:
    """The command."""
    check(options)
    if not options.job.startswith(PREFIX):
        job_file(options.job)
    if options.show:
        with uncollected():
            from plait.cli.plan_tables import print_parameters, print_tensor

        return {"tensor": print_tensor, "parameters": print_parameters}[options.show](options)
    machine = machine_of(options) if not options.dry_run or options.memory or options.machine != "here" else None
    if options.dry_run:
        with uncollected():
            from plait.cli.plan_tables import print_dry_run
            from plait.planner.question import room

        return print_dry_run(options, None if machine is None else room(machine, size(options.memory)))
    assert machine is not None
    if options.output:
        check_writable(options.output)
    if options.tries and not machine.on_cores and kind_of("auto") == "cpu":
        why = f"--try runs plans on this machine, and --machine is {machine}"
        raise PlaitError(Problem("U002", "--try works only with the devices of this machine", why=why, fix=("--machine here",)))
    with uncollected():
        from plait.cli import plan

    return plan.run(options, machine)


def machine_of(options: PlanOptions) -> Machine:
    """--machine, with as many devices as --gpus says."""
    machine = read_machine(options.machine)
    machine = machine.sized(options.gpus) if options.gpus else machine
    if options.gpus and machine.devices != options.gpus:
        why = f"{machine.nodes} nodes with {machine.devices_per_node} devices each have {machine.devices} devices"
        fix = (f"--gpus {machine.devices}",)
        raise PlaitError(Problem("U002", f"--gpus {options.gpus} does not fill complete nodes", why=why, fix=fix))
    return machine
