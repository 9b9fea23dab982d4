"""Library code, wherever it is installed, is distinguished from the user's own: in the locations of errors, and in a run's fingerprint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.checkpoint import fingerprint
from plait.config.job import import_job_file
from plait.config.library import is_library
from plait.launch.hangs import StackFrame

LAYERS = """
class Layer:
    scale = 2

    def forward(self, x):
        return x * self.scale

def loss(outputs, targets):
    return Layer().forward(outputs).mean()
"""


def put(folder: Path, name: str, listed: bool = True) -> Path:
    """A package. If it is `listed`, it has the folder by which pip identifies installed packages."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(LAYERS)
    if listed:
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n{info.name}/RECORD,,\n")
    return folder / name / "__init__.py"


def test_what_is_installed_is_a_library_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = put(tmp_path / "opt", "layers_of_a_module_system")
    plain = put(tmp_path / "centre" / "site-packages", "plain_layers", listed=False)
    mine = put(tmp_path / "opt", "mine", listed=False)
    source = put(tmp_path / "project" / "src", "editable", listed=False)
    assert not is_library(str(target)), "nobody can import it"
    for folder in ("opt", "centre/site-packages/", "project/src"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])  # a Path there, which Python ignores, must not cause a failure
    assert is_library(str(target)) and is_library(str(plain))
    assert not is_library(str(mine)) and not is_library(str(source)) and not is_library(str(tmp_path / "opt" / "job.py"))
    assert StackFrame(str(target), "1", "loss").owner == "library" and StackFrame(str(mine), "1", "loss").owner == "user"
    import importlib

    layers, own = importlib.import_module("layers_of_a_module_system"), importlib.import_module("mine")
    assert fingerprint.digest_function(own.loss)["code"] != fingerprint.digest_function(layers.loss)["code"]
    before = [fingerprint.digest_function(module.loss)["code"] for module in (layers, own)]
    for module in (layers, own):
        module.loss.__defaults__ = (0, 1)
    after = [fingerprint.digest_function(module.loss)["code"] for module in (layers, own)]
    assert before[0] == after[0] and before[1] != after[1], "a library is told by its name, the user's code by what it does"


def test_a_job_beside_installed_packages_is_the_user_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "vendored")
    (tmp_path / "job.py").write_text("import vendored\n\ndef loss(a, b):\n    return vendored.loss(a, b)\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    loss = import_job_file(tmp_path / "job.py").loss
    assert not is_library(str(tmp_path / "job.py")) and is_library(str(tmp_path / "vendored" / "__init__.py"))
    assert fingerprint.digest_function(loss)["code"] != fingerprint.digest_function(lambda a, b: a)["code"]


NOISY = """
import logging
def asked():
    logging.getLogger(__name__).warning("you called it")
    logging.getLogger("torch.noisy").warning("torch says so")
logging.getLogger(__name__).error("it is broken")
logging.getLogger(__name__).warning("a kernel is missing")
logging.getLogger("torch.noisy").warning("an enum is deprecated")
asked()
"""


def test_what_libraries_log_while_they_are_imported_is_not_shown(tmp_path: Path) -> None:
    put(tmp_path / "opt", "noisy").write_text(NOISY)
    (tmp_path / "own.py").write_text("import logging, noisy\nlogging.getLogger('mine').warning('mine')\n")
    (tmp_path / "calls.py").write_text("import noisy\nnoisy.asked()\n")
    (tmp_path / "late.py").write_text("def job():\n    import noisy\n    noisy.asked()\n")
    (tmp_path / "asks.py").write_text("import logging\nlogging.basicConfig()\nimport noisy\n")

    def said(job: str, then: str = "") -> list[str]:
        imports = "from pathlib import Path; from plait.config.job import import_job_file"
        program = f"{imports}; module = import_job_file(Path('{tmp_path}/{job}.py')){then}"
        environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{tmp_path / 'opt'}"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True, check=True)
        return [line.rpartition("] ")[2] for line in done.stderr.splitlines()]

    assert said("own") == ["it is broken", "mine"]
    assert said("calls") == said("late", ".job()") == ["it is broken", "you called it", "torch says so"]
    assert said("asks") == ["ERROR:noisy:it is broken", "WARNING:noisy:a kernel is missing", "WARNING:noisy:you called it"]


def told(value: object) -> dict[str, object]:
    """The digest of a function that uses a value."""
    return fingerprint.digest_function(lambda: value)


def test_values_that_share_their_parts_are_read_once() -> None:
    class Shared:
        reads = 0

        def __init__(self) -> None:
            self.numbers = [1, 2, 3]

        def __getattribute__(self, name: str) -> object:
            Shared.reads += name == "__dict__"
            return object.__getattribute__(self, name)

    one = Shared()
    tangled: list[object] = [one, one]
    for _ in range(fingerprint.MAX_DEPTH - 3):
        tangled = [tangled] * 12
    found = told(tangled)
    assert 0 < Shared.reads < 5 and "most" not in found
    again: list[object] = [Shared(), Shared()]
    for _ in range(fingerprint.MAX_DEPTH - 3):
        again = [[*again] for _ in range(12)]
    assert found["code"] == told(again)["code"], "equal values, whether they are the same or not"
    again[0] = []
    assert found["code"] != told(again)["code"]


def test_what_refers_to_itself_ends_and_what_is_too_much_is_told() -> None:
    ring: list[object] = [1]
    ring.append({"ring": ring})
    other: list[object] = [1]
    other.append({"ring": other})
    assert told(ring)["code"] == told(other)["code"]
    many = [[[number] for number in range(1000)] for _ in range(fingerprint.MAX_REFERENCES // 1000)]
    found = told(many)
    assert found["most"] == fingerprint.MAX_REFERENCES
    assert fingerprint.describe_code_changes("loss", found, found) == ["loss: only the first 100,000 values that it uses were compared"]
