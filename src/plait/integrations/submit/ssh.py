"""A command for each of some hosts, which ssh starts there; the script waits for all.

The secret that they share is drawn by the script, and goes to each over ssh's own channel: it is in no file and no list of processes.
The channel stays open: when it ends, because of Ctrl-C or because the script is gone, the host sends SIGTERM to its launcher, and the
run is saved.
"""

import re

from plait import PlaitError
from plait.config.errors import Problem
from plait.integrations.submit.submission import SECRET, Scheduler, Script, Submission, comment, line

HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)")
"""A name or an address, of a user there or not; nothing that ssh could take for an option."""
PORT = 29500

SCRIPT = Script("""\
#!/bin/bash
@{comment}
# When it was stopped (exit code 75), start it again: it goes on from the newest checkpoint.

@{secret}# What each command reads ends with Ctrl-C, SIGTERM or this script; then it saves and stops.
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
WATCHED = Script("""exec 3<&0 && { @{command} 3<&- & step=$!; { cat <&3; kill -TERM "$step"; } >/dev/null 2>&1 & wait "$step"; }""")
READ = "IFS= read -r PLAIT_SECRET && export PLAIT_SECRET && "


def write(asked: Submission) -> str:
    _check(asked)
    read = READ if asked.together else ""
    return SCRIPT.substitute(
        comment=comment(f"{asked.job}: {asked.told}. Written by plait submit ssh; start it with  bash FILE"),
        secret=f'secret="${{PLAIT_SECRET:-{SECRET}}}"\n' if asked.together else "",
        options="".join(f"-o {line([f'{name}={value}'])} " for name, value in asked.options),
        said="printf '%s\\n' \"$secret\"; " if asked.together else "",
        starts="\n".join(f"start {line([host, read + _command(asked, k)])}" for k, host in enumerate(asked.hosts)),
    )


def _command(asked: Submission, index: int) -> str:
    """What the shell of a host is given."""
    words = [*asked.train(), asked.counted]
    if asked.together:
        words += [f"--node-rank={index}", f"--master={asked.master or _address(asked.hosts[0])}"]
    assert asked.folder is not None
    before = [f"cd -- {line([asked.folder])}", *asked.setup]
    return " && ".join([*before, WATCHED.substitute(command=line(words))])


def _address(host: str) -> str:
    name = host.rpartition("@")[2]
    return f"[{name}]:{PORT}" if ":" in name else f"{name}:{PORT}"


def _check(asked: Submission) -> None:
    wrong = next((host for host in asked.hosts if not HOST.fullmatch(host)), None)
    if wrong is not None:
        raise PlaitError(Problem("S002", f"`{wrong[:80]}` is no host", fix=("--hosts node1,user@node2",)))
    if len(asked.hosts) != asked.nodes:
        what = f"--hosts names {len(asked.hosts)}, and --nnodes says {asked.nodes}"
        raise PlaitError(Problem("S001", what, fix=("leave out --nnodes", f"{asked.nodes} hosts")))
    bare = next((name for name, value in asked.options if value is None), None)
    if bare is not None:
        what = f"--option {bare[:60]} has no value"
        raise PlaitError(Problem("S002", what, why="ssh -o wants NAME=VALUE", fix=("--option Port=2222",)))


SCHEDULER = Scheduler(
    "ssh", write, "bash FILE", frozenset(("chdir", "setup", "hosts", "option", "launch_cmd", "master")), ("hosts",)
)
