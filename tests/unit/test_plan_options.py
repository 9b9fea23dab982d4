"""Errors in the options of `plait plan` are reported before any import or load that takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

SAYS = {
    "--machine mispelled": "M010", "--machine no.toml": "M012", "--machine h100x8 --gpus 12": "U002", "--memory much": "U002", "--set dq=2": "T001",
    "--gpus 0": "U002", "--scale 1,x": "U002", "--objective min-devices": "U002", "--objective min-devices --deadline soon": "U002",
    "--deadline 24h": "U002",
    "--maximize length": "U002", "--learn elsewhere": "U002", "--machine h100x8 --try 2": "U002", "--machine h100x8 --output no/folder/plan.toml": "",
    "--dry-run --plan dp=2 --machine mispelled": "M010", "--map --machine mispelled": "M010",
    "--dry-run --plan no.toml": "T", "--show tensor --plan tq=2": "T001",
}  # fmt: skip
"""By options, the start of the error code."""


@pytest.mark.parametrize("words", [*SAYS, "missing.py"])
def test_wrong_options_load_neither_torch_nor_the_job(tmp_path: Path, words: str) -> None:
    (tmp_path / "job.py").write_text("raise SystemExit('the job was loaded')\n")
    arguments = ["plan", *([] if words == "missing.py" else ["job.py"]), *words.split()]
    code = f"import sys; from plait.cli.main import main; done = main({arguments}); print(done, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert f"error[{SAYS.get(words, 'J001')}" in done.stderr and "the job was loaded" not in done.stderr
    assert done.stdout.split() == ["2", str("--try" in words)]  # whether there is a device for --try, torch is queried
