"""Parts of `bench/gpu.py` on a simulated device: launch order, proofs on one device, and two ranks that share it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from device.test_shadow import HERE, ROOT, library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHARED = ("dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2", "cp=2")
LOOKS = (
    "environment/forks", "environment/a fork after CUDA", "verify/gpt, microbatches=2", "two_ranks/mixture, ep=2",
    *(f"two_ranks/gpt, {plan}" for plan in SHARED),
)  # fmt: skip


def test_looks_on_a_device(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(HERE.parent))), "OMP_NUM_THREADS": "1"}
    env.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # the script itself keeps its processes forkable
    command = [sys.executable, "-W", "ignore", "-m", "device.shadow_bench", str(library()), str(tmp_path), *LOOKS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=290, env=env, cwd=HERE.parent)
    rows = dict(zip(LOOKS, map(json.loads, done.stdout.splitlines())))
    assert list(rows) == list(LOOKS), done.stderr
    assert all(row["ok"] for row in rows.values()), rows
    assert all(row["saw"] == "EQUAL" for name, row in rows.items() if name.startswith("two_ranks"))
