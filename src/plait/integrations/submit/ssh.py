"""A script that starts one command per host by ssh, and waits for all of them.

The script generates the hosts' shared secret, and sends it over ssh's channel, so it is in no file and no process list. The channel stays
open. When it ends, because of Ctrl-C or the end of the script, the host sends SIGTERM to its launcher, and the run is saved.
"""

import re

from plait import PlaitError
from plait.config.errors import Problem
from plait.integrations.submit.submission import SECRET, Scheduler, Script, Submission, format_comment, join_shell_words

HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)")
"""A host name or address, with an optional user; nothing that ssh could parse as an option."""
PORT = 29500

SCRIPT = Script("""\
#!/bin/bash
@{comment}
# When it was stopped (exit code 75), start it again: it continues from the newest checkpoint.

@{secret}# The input of each command ends with Ctrl-C, SIGTERM or this script; then it saves and stops.
open=$(mktemp)
trap 'rm -f "$open"' EXIT
trap 'again=yes; rm -f "$open"' INT TERM
steps=()
start() {
  ssh @{options}-- "$1" "$2" < <(@{said}while [ -e "$open" ] && kill -0 $$ 2>/dev/null; do sleep 1; done) &
  steps+=($!)
}

@{starts}

code=0
for step in "${steps[@@]}"; do
  while again=''; wait "$step"; one=$?; [ "$again" ]; do :; done
  [ "$one" -eq 0 ] || code=$one
done
exit "$code"
""")
WATCHED_COMMAND = Script("""exec 3<&0 && { @{command} 3<&- & step=$!; { cat <&3; kill -TERM "$step"; } >/dev/null 2>&1 & wait "$step"; }""")
READ_SECRET = "IFS= read -r PLAIT_SECRET && export PLAIT_SECRET && "


def write_ssh_script(submission: Submission) -> str:
    _check_hosts(submission)
    read = READ_SECRET if submission.is_multi_node else ""
    return SCRIPT.substitute(
        comment=format_comment(f"{submission.job}: {submission.description}. Written by plait submit ssh; start it with  bash FILE"),
        secret=f'secret="${{PLAIT_SECRET:-{SECRET}}}"\n' if submission.is_multi_node else "",
        options="".join(f"-o {join_shell_words([f'{name}={value}'])} " for name, value in submission.options),
        said="printf '%s\\n' \"$secret\"; " if submission.is_multi_node else "",
        starts="\n".join(f"start {join_shell_words([host, read + _build_host_command(submission, k)])}" for k, host in enumerate(submission.hosts)),
    )


def _build_host_command(submission: Submission, index: int) -> str:
    """Build the shell command of a host."""
    words = [*submission.build_train_words(), submission.nnodes_flag]
    if submission.is_multi_node:
        words += [f"--node-rank={index}", f"--master={submission.master or _format_address(submission.hosts[0])}"]
    assert submission.folder is not None
    before = [f"cd -- {join_shell_words([submission.folder])}", *submission.setup]
    return " && ".join([*before, WATCHED_COMMAND.substitute(command=join_shell_words(words))])


def _format_address(host: str) -> str:
    name = host.rpartition("@")[2]
    return f"[{name}]:{PORT}" if ":" in name else f"{name}:{PORT}"


def _check_hosts(submission: Submission) -> None:
    wrong = next((host for host in submission.hosts if not HOST.fullmatch(host)), None)
    if wrong is not None:
        raise PlaitError(Problem("S002", f"`{wrong[:80]}` is not a host", fix=("--hosts node1,user@node2",)))
    if len(submission.hosts) != submission.nodes:
        what = f"--hosts names {len(submission.hosts)}, and --nnodes says {submission.nodes}"
        raise PlaitError(Problem("S001", what, fix=("leave out --nnodes", f"{submission.nodes} hosts")))
    bare = next((name for name, value in submission.options if value is None), None)
    if bare is not None:
        what = f"--option {bare[:60]} has no value"
        raise PlaitError(Problem("S002", what, why="ssh -o needs NAME=VALUE", fix=("--option Port=2222",)))


SCHEDULER = Scheduler(
    "ssh", write_ssh_script, "bash FILE", frozenset(("chdir", "setup", "hosts", "option", "launch_cmd", "master")), ("hosts",)
)
