"""No command computes gradients before it forks its processes, or runs anything else that starts threads for a device.

If torch sees a GPU, autograd starts a thread for it at the first backward pass, and that process cannot be
forked for training. A library of 25 lines (`tests/guard.cpp`) simulates such a GPU. Every command then runs in a fork
of one fresh process.
"""

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from plait.cli import main
from plait.config.errors import PlaitError
from plait.launch import devices, fork, forkable

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
    "bench": ("bench", "comm", "--nproc", "2", "--device", "cpu", "--output", "machine.toml"),
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
    assert code == 2 and "H011" in said and "autograd has threads for devices here (pt_autograd_0" in said, (
        "the guard does not guard, or nobody says so before the fork: " + said
    )
    assert "Traceback" not in said
    wrong = {name: told for name, told in found.items() if told[0]}
    assert not wrong and len(found) == len(verbs) - 1, "\n".join(f"{name}: {told[1]}" for name, told in wrong.items())


def test_a_process_that_has_used_cuda_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PlaitError) as caught:
        fork.run_ranks(lambda place: {}, 1)
    assert caught.value.codes == ["H011"] and caught.value.exit_code == 2


@pytest.fixture
def with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_cuda_devices", lambda: ["one", "two"])


@pytest.mark.parametrize(
    "name, value, why",
    (
        ("list_autograd_threads", ["pt_autograd_0"], "autograd has threads for devices here (pt_autograd_0)"),
        ("is_driver_started", True, "this process has started the CUDA driver"),
        ("_is_fork_marked", True, "this process has called the CUDA runtime"),
    ),
)
def test_what_spoils_a_process_is_said_before_the_fork(
    name: str, value: object, why: str, monkeypatch: pytest.MonkeyPatch, with_devices: None
) -> None:
    devices.check_devices("cuda", 2)
    monkeypatch.setattr(forkable, name, lambda: value)
    devices.check_devices("cpu", 2)
    with pytest.raises(PlaitError, match=re.escape(why)) as caught:
        devices.check_devices("cuda", 2)
    assert caught.value.codes == ["H011"] and "torchrun" in str(caught.value)


def test_a_mark_on_forks_is_seen_by_a_fork_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()
    assert not forkable.find_fork_obstacle(on_devices=True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)
    assert "called the CUDA runtime" in forkable.find_fork_obstacle(on_devices=True) and not forkable.find_fork_obstacle()


def test_the_driver_itself_says_whether_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library replaces the driver. Open files are no evidence: NVML opens /dev/nvidia-uvm too, and may be used before a fork."""
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text(
        "static int on; void cuInit(void) { on = 1; } int cuDeviceGetCount(int *count) { return on ? *count = 1, 0 : 3; }"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(forkable, "DRIVER_LIBRARY", str(library))
    assert not forkable.is_driver_started(), "nobody has loaded it"
    driver = ctypes.CDLL(str(library))
    assert not forkable.find_fork_obstacle(on_devices=True) and not forkable.list_autograd_threads()
    driver.cuInit()
    assert "started the CUDA driver" in forkable.find_fork_obstacle(on_devices=True)


def test_what_a_library_asks_of_a_device_while_it_is_imported_is_asked_by_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao checks for Triton, and torch then queries the device's properties. That starts CUDA, and ranks could not be forked."""
    asked = []

    class Properties:
        major, minor, name, uuid = 9, 0, "one", object()

        @property
        def pid(self) -> int:
            return os.getpid()

    def get_device_properties(device: object = None) -> Properties:
        asked.append(device)
        if device == 7:
            raise AssertionError("Invalid device id")
        return Properties()

    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
    monkeypatch.setattr(torch.cuda, "current_device", torch.cuda.current_device)
    forkable.answer_by_forks()
    assert torch.cuda.get_device_properties is get_device_properties, "a torch without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with forkable.use_fork_answers():
        assert torch.cuda.get_device_properties(1).major == 9 and not asked
    assert torch.cuda.get_device_properties is get_device_properties, "afterwards all is as before"
    forkable.answer_by_forks()
    forkable.answer_by_forks()
    found = torch.cuda.get_device_properties(0)
    assert (found.major, found.name) == (9, "one") and not hasattr(found, "uuid") and not asked
    assert found.pid != os.getpid() and torch.cuda.get_device_properties(0) is found
    assert torch.cuda.get_device_capability(0) == (9, 0) and not asked
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(7)
    assert asked == [7], "what a fork could not answer, this process asks"
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a rank
    assert torch.cuda.get_device_properties(0).pid == -1 and asked == [7, 0]


def test_a_job_that_asks_whether_cuda_is_there_asks_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(forkable.NVML_CHECK, raising=False)
    main.main(["help", "H011"])
    assert os.environ[forkable.NVML_CHECK] == "1"
    monkeypatch.setenv(forkable.NVML_CHECK, "0")
    forkable.keep_forkable()
    assert os.environ[forkable.NVML_CHECK] == "0", "the user's own choice"
