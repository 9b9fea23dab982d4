"""`plait prove`: check that a distributed script trains the same model as another command does on one device."""

from dataclasses import replace

from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.config.command_options import ProveOptions, check_range
from plait.config.errors import USAGE, PlaitError, escape_controls
from plait.proof.verdict import Verdict, format_probe
from plait.scripts.commands import ScriptCommand
from plait.scripts.prove import prove


def run(options: ProveOptions) -> int:
    """Run the command."""
    check_range(options)
    reference = ScriptCommand("reference", options.reference, options.steps, options.hang_timeout, int(options.disk_limit * 2**30), options.float64)
    try:
        with ProgressLine("prove", options.json) as line:
            verdict = prove(reference, replace(reference, side="candidate", words=options.candidate), line.show)
    except PlaitError as error:
        if error.exit_code != USAGE or error.codes[0][:1] != "E":
            raise
        print_result(options, {"verdict": "CANNOT TELL", "errors": [vars(p) for p in error.problems]}, f"CANNOT TELL\n{error}")
        return error.exit_code
    facts = {"verdict": "SAME" if verdict.equal else "DIFFERENT"} | verdict.to_dict()
    print_result(options, facts, escape_controls("\n".join(format_proof(verdict))))
    return verdict.exit_code


def format_proof(verdict: Verdict) -> list[str]:
    processes = f"{verdict.world} process" + ("es" if verdict.world > 1 else "")
    found = [f"reference   {verdict.job}", f"candidate   {verdict.plan}   {processes}", f"{'':32}{'worst relative':>16}   tolerance"]
    found += [*map(format_probe, verdict.probes), *(f"note  {line}" for line in verdict.notes)]
    if verdict.equal:
        return [*found, "SAME  both commands train the same model"]
    found.append(f"DIFFERENT  {verdict.cause}.   `plait help {verdict.code}`")
    return [*found, *(f"  fix   {line}" for problem in verdict.problems for line in problem.fix)]
