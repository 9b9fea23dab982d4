"""Programs read a command's result from standard output. Nothing else is written there by the job, its libraries or its processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import os, sys, torch, plait
print("loud: imported")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        print("loud: built")
        os.write(1, b"loud: a library in C\\n")
        os.system("echo loud: another process")
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, rows):
        print("loud: called")
        return self.layers(rows)

def data():
    sys.stdout.write("loud: read\\n")
    return torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))

def job():
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    return plait.Job(model=Net, data=data, loss=torch.nn.functional.mse_loss, optimizer=optimizer, batch=8, steps=4)
"""
COMMANDS = {
    "train": "train loud.py --plan dp=2 --device cpu",
    "a wrong plan": "train loud.py --plan dp=999999 --device cpu --nproc 2",
    "check": "check loud.py --plan dp=2",
    "verify": "verify loud.py --plan dp=2 --device cpu --steps 2",
    "sketch": "sketch loud.py",
    "plan": "plan loud.py --machine h100x8",
    "dry run": "plan loud.py --plan fsdp=2 --dry-run",
    "report": "report runs/latest",
    "memory": "report runs/latest --memory",
    "replay": "replay runs/latest --step 2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the job and one run of it."""
    made = tmp_path_factory.mktemp("loud")
    (made / "loud.py").write_text(JOB, encoding="utf-8")
    ran(made, *COMMANDS["train"].split())
    return made


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "plait", *words], cwd=folder, capture_output=True, text=True, check=False)


QUICK = {"train", "a wrong plan", "report"}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS])
def test_json_stands_alone(name: str, folder: Path):
    found = ran(folder, *COMMANDS[name].split(), "--json")
    assert isinstance(json.loads(found.stdout), dict), found.stderr


def test_a_picture_stands_alone(folder: Path):
    found = ran(folder, "report", "--svg", "loss")
    assert found.stdout.startswith("<svg") and found.stdout.rstrip().endswith("</svg>"), found.stderr


def test_what_the_job_printed_is_kept(folder: Path):
    said = ran(folder, "sketch", "loud.py", "--json").stderr
    assert all(f"loud: {what}" in said for what in ("imported", "built", "a library in C", "another process", "called"))


def test_without_json_all_is_standard_output(folder: Path):
    found = ran(folder, "sketch", "loud.py")
    assert "loud: built" in found.stdout and "loud:" not in found.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", ["help P012 --json", "sketch nothing.py --json", "report --svg loss"])
def test_a_result_that_cannot_be_written(words: str, folder: Path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "plait", *words.split()]
        found = subprocess.run(command, cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert found.returncode and "R006" in found.stderr and "Traceback" not in found.stderr
