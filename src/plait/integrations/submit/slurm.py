"""A script for sbatch: on each machine of the allocation `srun` starts one `plait train`, which starts that machine's ranks.

Two minutes before its time is over, Slurm sends SIGUSR1 to the script, and the script SIGTERM to the ranks' launchers: they save
and end with 75, and the script has itself put into the queue again. Who cancels the job is not asked whether it shall go on: only what
was warned of the end of its time is queued again. (A job that Slurm preempts, or whose machine is lost, Slurm queues again itself.)

The machines find each other by what Slurm says of the step. The secret that they share is drawn by the script and travels in
its environment.
"""

import re

from plait import PlaitError
from plait.config.errors import Problem
from plait.integrations.submit.submission import SECRET, Scheduler, Script, Submission, comment, line

WARNING = 120
"""Seconds before the end of its time in which a run is saved."""
OPTION = re.compile(r"[a-z][a-z0-9-]*")
GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres")
CORES = ("cpus-per-task", "exclusive", "cpus-per-gpu", "oversubscribe")

SCRIPT = Script("""\
#!/bin/bash
@{comment}
@{options}

@{secret}@{setup}# 75 means: saved, run me again. Of a job that was warned of the end of its time, Slurm is told so.
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
MEET = f"""\
# The machines of this job know each other by a secret, which srun passes on.
export PLAIT_SECRET="${{PLAIT_SECRET:-{SECRET}}}"

"""
AGAIN = """\
# 1 means that a rank or a machine was lost: the others ended too, and all go on from the newest checkpoint.
while [ "$code" -eq 1 ] && [ "$left" -gt 0 ] && [ -z "$warned" ]; do
  left=$((left - 1))
  start
done
"""
"""On many machines, where plait does not start the ranks again itself."""


def write(asked: Submission) -> str:
    again = asked.together and asked.restarts > 0 and asked.resume is None
    rows = [f"#SBATCH --{name}" + ("" if value is None else f"={_value(name, value)}") for name, value in _options(asked)]
    return SCRIPT.substitute(
        comment=comment(f"{asked.job}: {asked.told}. Written by plait submit slurm; start it with  sbatch FILE"),
        options="\n".join(rows), secret=MEET if asked.together else "",
        setup="".join(f"{row}\n" for row in (*asked.setup, "")) if asked.setup else "",
        left=f" left={asked.restarts}" if again else "", srun=_srun(asked), again=AGAIN if again else "",
    )  # fmt: skip


def _srun(asked: Submission) -> str:
    cores = str(asked.cpus) if asked.cpus else '"$SLURM_CPUS_ON_NODE"'
    srun = [f"srun --nodes={asked.nodes} --ntasks={asked.nodes} --ntasks-per-node=1"]
    if asked.cpus or not asked.overrules(*CORES):
        srun += [f"--cpus-per-task={cores}"]
    srun += ["--kill-on-bad-exit=0 --export=ALL \\\n   "]
    if asked.resume is not None:
        return " ".join([*srun, line([*asked.train(), asked.counted])])
    folder = f"{asked.own_runs}-"
    words = line([word for word in asked.train() if not word.startswith("--runs=")])
    return " ".join([*srun, words, f'{line([f"--runs={folder}"])}"$SLURM_JOB_ID"', asked.counted])


def _options(asked: Submission) -> list[tuple[str, str | None]]:
    """What stands behind #SBATCH. What the user says of the same thing comes instead."""
    ours: list[tuple[str, str | None]] = [
        ("job-name", asked.name), ("nodes", str(asked.nodes)), ("ntasks-per-node", "1"),
    ]  # fmt: skip
    if asked.gpus and not asked.overrules(*GPUS):
        ours += [("gpus-per-node", f"{asked.gpu}:{asked.each}" if asked.gpu else str(asked.each))]
    if asked.cpus:
        ours += [("cpus-per-task", str(asked.cpus))]
    elif not asked.overrules(*CORES):
        ours += [("exclusive", None)]
        ours += [("mem", "0")] if not asked.overrules("mem-per-cpu", "mem-per-gpu") else []
    if asked.seconds is not None:
        ours += [("time", _clock(asked.seconds))]
    ours += [("chdir", asked.folder)] if asked.folder is not None else []
    ours += [
        ("signal", f"B:USR1@{WARNING}"),
        ("requeue", None),
        ("open-mode", "append"),
        ("output", f"{asked.name}-%j.out"),
    ]
    said = {name for name, _ in asked.options}
    return [*((name, value) for name, value in ours if name not in said), *asked.options]


def _clock(seconds: int) -> str:
    """90061 s is 1-01:01:01."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minute:02}:{second:02}"


def _value(name: str, value: str) -> str:
    """As sbatch reads it: in quotes a space stays, and what follows a backslash stands for itself. S002 for what no line can say."""
    if not OPTION.fullmatch(name):
        what = f"--option {name[:60]} is no option of sbatch"
        raise PlaitError(Problem("S002", what, why="a long name, without dashes", fix=("--option partition=gpu",)))
    if not value.isprintable():
        why = "such an option stands on one line"
        raise PlaitError(Problem("S002", f"--{name} cannot have a line break or a control character", why=why))
    if re.fullmatch(r"[\w@%+=:,./-]+", value):
        return value
    return '"' + re.sub(r"([\"'\\#])", r"\\\1", value) + '"'


SCHEDULER = Scheduler(
    "Slurm", write, "sbatch FILE", frozenset(("cpus", "gpu", "time", "chdir", "setup", "option", "launch_cmd")),
)  # fmt: skip
