"""No verb computes gradients, or anything else that a device has threads for, before it forks its processes.

Where torch sees a GPU, autograd starts a thread for it at the first backward pass, and a process that did so cannot be
forked for training. A library of 25 lines (`tests/guard.cpp`) pretends that there is one. Every verb then runs in a fork
of one fresh process.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from plait.config.errors import PlaitError
from plait.launch import fork

TESTS = Path(__file__).parents[1]
JOB = str(TESTS / "training.py")
TRAIN = ("train", JOB, "--nproc", "2", "--device", "cpu", "--batch", "4", "--steps", "3")
VERBS = {
    "train": TRAIN,
    "train, auto": (*TRAIN, "--plan", "auto"),
    "verify": ("verify", JOB, "--plan", "dp=2", "--device", "cpu"),
    "verify, auto": ("verify", JOB, "--plan", "auto", "--nproc", "2", "--device", "cpu"),
    "plan": ("plan", JOB, "--machine", "h100x8"),
    "plan, dry run": ("plan", JOB, "--plan", "dp=2", "--dry-run"),
    "sketch": ("sketch", JOB, "--plan", "dp=2"),
    "bench": ("bench", "comm", "--nproc", "2", "--device", "cpu", "--out", "machine.toml"),
    "report": ("report", "runs/latest", "--timeline"),
    "checkpoint": ("checkpoint", "verify", "runs/latest"),
}
FEW = {name: VERBS[name] for name in ("train", "verify", "plan", "report", "checkpoint")}
SCRIPT = """
import ctypes, json, os, sys
import torch
import plait.engine.engine, plait.cli.main
torch.set_num_threads(1)
ctypes.CDLL(sys.argv[1]).put()
found = {}
for name, argv in json.loads(sys.argv[2]).items():
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            log = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if name == "backward":
                torch.ones(1, requires_grad=True).backward()
                argv = argv[1:]
            code = plait.cli.main.main(argv)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found[name] = [code, open("output", errors="replace").read()[-2000:]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def guard() -> str:
    """The library, compiled once for each torch and source."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = TESTS / "guard.cpp"
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"plait-guard-{key}.so"
    if not made.exists():
        home = Path(torch.__file__).parent
        part = made.with_suffix(f".{hash(made)}")
        flags = ["-shared", "-fPIC", "-std=c++20", "-O0", "-w", f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"]
        subprocess.run([compiler, str(source), "-o", str(part), *flags], check=True)
        part.rename(made)
    return str(made)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("verbs", (FEW, pytest.param(VERBS, marks=pytest.mark.prove)), ids=("few", "all"))
def test_every_verb_runs_where_torch_sees_a_device(verbs: dict[str, Sequence[str]], guard: str, tmp_path: Path) -> None:
    verbs = verbs | {"backward": ("backward", *TRAIN)}
    command = [sys.executable, "-c", SCRIPT, guard, json.dumps(verbs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    code, said = found.pop("backward")
    assert code == 2 and "H011" in said and "Traceback" not in said, (
        "the guard does not guard, or nobody says so: " + said
    )
    wrong = {name: told for name, told in found.items() if told[0]}
    assert not wrong and len(found) == len(verbs) - 1, "\n".join(f"{name}: {told[1]}" for name, told in wrong.items())


def test_a_process_that_has_used_cuda_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PlaitError) as caught:
        fork.run(lambda place: {}, 1)
    assert caught.value.codes == ["H011"] and caught.value.exit_code == 2
