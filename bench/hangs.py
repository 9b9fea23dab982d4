"""Measures how soon a hung rank is named under the default limits: small jobs whose rank 1 hangs, each in another place.

    python bench/hangs.py [CASE …]

For each job, prints the seconds from the start of the hang to the note that names rank 1 with its line. It also prints whether the
note has the step, the phase and a line of the job. The run is then ended; docs/decisions/0016 defines when plait itself ends it.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

JOB = Path(__file__).parents[1] / "tests" / "jobs_hanging.py"
CASES = {
    "construct": ("dp=2", "build"), "data set": ("dp=2", "build"), "loop": ("dp=2", "step 1, forward"),
    "sleep": ("dp=2", "step 1, forward"), "lock": ("fsdp=2", "step 1, forward"), "queue": ("dp=2", "step 1, forward"),
    "child": ("dp=2", "step 1, forward"), "socket": ("dp=2", "step 1, forward"), "pipe": ("dp=2", "step 1, forward"),
    "compiled": ("dp=2", "step 1, forward"), "join": ("dp=2", "step 1, forward"), "product": ("fsdp=2", "step 1, forward"),
    "loss": ("dp=2", "step 1, forward"), "metrics": ("dp=2", "step 5, evaluate"), "schedule": ("dp=2", "step 1, optimizer"),
    "optimizer": ("dp=2", "during build"), "backward": ("dp=2", "step 1, backward"), "hook": ("dp=2", "step 1, forward"),
    "late": ("dp=3", "step 7, forward"), "collective": ("dp=2", "step 1, forward"), "recv": ("dp=2", "step 1, forward"),
    "read": ("dp=2", ", data"), "read loop": ("dp=2", ", data"), "collate": ("dp=2", ", data"),
    "evaluation data": ("dp=2", "step 5, evaluation data"), "sleep under pp": ("pp=2", "step 1, forward"),
    "late under tp": ("tp=2", "step 7, forward"),
}  # fmt: skip
"""By name: the plan, and the place that the note must contain."""
NAMED = re.compile(r"note  rank 1 has made no progress.*|error\[C001\] rank 1 stopped[^,]*,.*\n.*")
LONGEST = 60
"""The limit in seconds after which a case counts as not named."""


def named_after(case: str, plan: str) -> tuple[float | None, str]:
    """Return the seconds from the start of the hang to the note, and the note."""
    with tempfile.TemporaryDirectory(prefix="plait-hangs-") as folder:
        how = case.partition(" under ")[0]
        command = [sys.executable, "-m", "plait", "train", str(JOB), "--plan", plan, "--job.how", how]
        said = Path(folder, "said")
        with said.open("wb") as file:
            run = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, start_new_session=True)
        began, text, deadline = None, "", time.monotonic() + LONGEST
        try:
            while time.monotonic() < deadline:
                time.sleep(0.05)
                text = said.read_text(errors="replace")
                note = NAMED.search(text)
                mark = Path(folder, "began")
                began = float(mark.read_text() or 0) or None if began is None and mark.exists() else began
                if note and began:
                    return time.monotonic() - began, " ".join(note[0].split())
            return None, text[-300:]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def main() -> None:
    chosen = sys.argv[1:] or list(CASES)
    found = []
    for case in chosen:
        plan, where = CASES[case]
        seconds, note = named_after(case, plan)
        right = where in note and "jobs_hanging.py:" in note
        found.append((seconds, right))
        told = "not named" if seconds is None else f"{seconds:6.1f} s"
        print(f"{case:<18} {plan:<7} {told}  {'' if right else '(wrong place) '}{note}", flush=True)
    times = [seconds for seconds, _ in found if seconds is not None]
    print(
        f"{len(times)} of {len(found)} named, {sum(right for _, right in found)} at the right place; slowest {max(times, default=0):.1f} s"
    )


if __name__ == "__main__":
    main()
