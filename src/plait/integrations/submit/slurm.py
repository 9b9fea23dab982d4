"""A script for sbatch: on each node of the allocation `srun` starts one `plait train`, which starts that node's ranks.

Two minutes before its time limit, Slurm sends SIGUSR1 to the script, and the script sends SIGTERM to the launchers. They save and end with
75, and the script requeues itself. Only a job that received this warning is requeued, so a canceled job stays canceled. (Slurm itself
requeues a preempted job, or one that lost a node.)

The nodes find each other by Slurm's variables of the step. The script generates their shared secret, and passes it in its environment.
"""

import re

from plait import PlaitError
from plait.config.errors import Problem
from plait.integrations.submit.submission import SECRET, Scheduler, Script, Submission, format_comment, join_shell_words

WARNING_S = 120
"""Seconds before its time limit in which a run is saved."""
OPTION = re.compile(r"[a-z][a-z0-9-]*")
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres")
CORE_OPTIONS = ("cpus-per-task", "exclusive", "cpus-per-gpu", "oversubscribe")

SCRIPT = Script("""\
#!/bin/bash
@{comment}
@{options}

@{secret}@{setup}# 75 means: saved, run me again. After a warning about the time limit, the job is requeued.
warned='' again=''@{left}
trap 'warned=yes again=yes; scancel --quiet --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'again=yes' TERM
start() {
  @{srun} &
  step=$!
  while again=''; wait "$step"; code=$?; [ "$again" ]; do :; done
}
start
@{again}if [ "$warned" ] && [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
""")
SECRET_SECTION = f"""\
# The machines of this job authenticate each other by a secret, which srun passes on.
export PLAIT_SECRET="${{PLAIT_SECRET:-{SECRET}}}"

"""
RETRY_SECTION = """\
# 1 means that a rank or a machine was lost: the others ended too, and all continue from the newest checkpoint.
while [ "$code" -eq 1 ] && [ "$left" -gt 0 ] && [ -z "$warned" ]; do
  left=$((left - 1))
  start
done
"""
"""For several nodes, where plait itself does not restart the ranks."""


def write_sbatch(submission: Submission) -> str:
    again = submission.is_multi_node and submission.restarts > 0 and submission.resume is None
    rows = [
        f"#SBATCH --{name}" + ("" if value is None else f"={_quote_sbatch_value(name, value)}")
        for name, value in _list_sbatch_options(submission)
    ]
    return SCRIPT.substitute(
        comment=format_comment(f"{submission.job}: {submission.description}. Written by plait submit slurm; start it with  sbatch FILE"),
        options="\n".join(rows), secret=SECRET_SECTION if submission.is_multi_node else "",
        setup="".join(f"{row}\n" for row in (*submission.setup, "")) if submission.setup else "",
        left=f" left={submission.restarts}" if again else "", srun=_build_srun(submission), again=RETRY_SECTION if again else "",
    )  # fmt: skip


def _build_srun(submission: Submission) -> str:
    cores = str(submission.cpus) if submission.cpus else '"$SLURM_CPUS_ON_NODE"'
    srun = [f"srun --nodes={submission.nodes} --ntasks={submission.nodes} --ntasks-per-node=1"]
    if submission.cpus or not submission.has_option(*CORE_OPTIONS):
        srun += [f"--cpus-per-task={cores}"]
    srun += ["--kill-on-bad-exit=0 --export=ALL \\\n   "]
    if submission.resume is not None:
        return " ".join([*srun, join_shell_words([*submission.build_train_words(), submission.nnodes_flag])])
    folder = f"{submission.own_runs}-"
    words = join_shell_words([word for word in submission.build_train_words() if not word.startswith("--runs=")])
    return " ".join([*srun, words, f'{join_shell_words([f"--runs={folder}"])}"$SLURM_JOB_ID"', submission.nnodes_flag])


def _list_sbatch_options(submission: Submission) -> list[tuple[str, str | None]]:
    """List the options for #SBATCH lines. The user's options replace options of the same name."""
    ours: list[tuple[str, str | None]] = [
        ("job-name", submission.name), ("nodes", str(submission.nodes)), ("ntasks-per-node", "1"),
    ]  # fmt: skip
    if submission.gpus and not submission.has_option(*GPU_OPTIONS):
        ours += [("gpus-per-node", f"{submission.gpu}:{submission.per_node}" if submission.gpu else str(submission.per_node))]
    if submission.cpus:
        ours += [("cpus-per-task", str(submission.cpus))]
    elif not submission.has_option(*CORE_OPTIONS):
        ours += [("exclusive", None)]
        ours += [("mem", "0")] if not submission.has_option("mem-per-cpu", "mem-per-gpu") else []
    if submission.seconds is not None:
        ours += [("time", _format_clock(submission.seconds))]
    ours += [("chdir", submission.folder)] if submission.folder is not None else []
    ours += [
        ("signal", f"B:USR1@{WARNING_S}"),
        ("requeue", None),
        ("open-mode", "append"),
        ("output", f"{submission.name}-%j.out"),
    ]
    said = {name for name, _ in submission.options}
    return [*((name, value) for name, value in ours if name not in said), *submission.options]


def _format_clock(seconds: int) -> str:
    """Format seconds: 90061 s is 1-01:01:01."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minute:02}:{second:02}"


def _quote_sbatch_value(name: str, value: str) -> str:
    """Quote a value for sbatch: quotes preserve a space, and a backslash escapes the next character.

    Raises S002 for values that do not fit on a line.
    """
    if not OPTION.fullmatch(name):
        what = f"--option {name[:60]} is not an option of sbatch"
        raise PlaitError(Problem("S002", what, why="it must be a long name, without dashes", fix=("--option partition=gpu",)))
    if not value.isprintable():
        why = "such an option must fit on one line"
        raise PlaitError(Problem("S002", f"--{name} cannot have a line break or a control character", why=why))
    if re.fullmatch(r"[\w@%+=:,./-]+", value):
        return value
    return '"' + re.sub(r"([\"'\\#])", r"\\\1", value) + '"'


SCHEDULER = Scheduler(
    "Slurm", write_sbatch, "sbatch FILE", frozenset(("cpus", "gpu", "time", "chdir", "setup", "option", "launch_cmd")),
)  # fmt: skip
