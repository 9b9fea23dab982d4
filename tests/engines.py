"""Unpack Debian's packages of other launchers (Open MPI, MPICH, Slurm) into `.engines`, without installing them.

The system stays unchanged; the package lists are separate too. Without apt-get or a network, a test that needs a launcher is skipped
with the reason.
"""

import fcntl
import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("PLAIT_ENGINES", Path(__file__).parents[1] / ".engines"))
PACKAGES = {"mpi": ("openmpi-bin", "mpich"), "slurm": ("slurmctld", "slurmd", "slurm-client", "munge")}
PATIENCE = 120


class Missing(Exception):
    """The packages are unavailable; the message has the reason."""


def engine(name: str) -> Path:
    """Return the folder into which `PACKAGES[name]` is unpacked, laid out as in `/`. Without the packages, the test is skipped."""
    try:
        return _unpacked(name)
    except Missing as why:
        pytest.skip(f"{' '.join(PACKAGES[name])} could not be unpacked: {why}")


@functools.cache
def _unpacked(name: str) -> Path:
    if missing := [tool for tool in ("apt-get", "dpkg") if shutil.which(tool) is None]:
        raise Missing(f"there is no {missing[0]} here")
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / ".lock", "w") as lock:  # two lanes of `make test` may run at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        root, ready = CACHE / name, CACHE / f".{name}-ready"
        if not ready.exists():
            shutil.rmtree(root, ignore_errors=True)
            for package in _fetched(name):
                _run("dpkg", "-x", str(package), str(root))
            shutil.rmtree(CACHE / f"{name}-archives")
            ready.touch()
    return root


def _fetched(name: str) -> list[Path]:
    """Return the packages and their dependencies that are not installed."""
    lists, archives = CACHE / "lists", CACHE / f"{name}-archives"
    shutil.rmtree(archives, ignore_errors=True)
    for folder in (lists, archives):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
    own = {
        "Dir::State::Lists": lists,
        "Dir::Cache": CACHE / "apt",
        "Dir::Cache::archives": archives,
        "Debug::NoLocking": 1,
    }
    own |= {
        "APT::Sandbox::User": "root",
        "Acquire::Retries": 0,
        "Acquire::http::Timeout": 10,
        "Acquire::https::Timeout": 10,
    }
    options = ["-qq", "-y", *(f"-o{key}={value}" for key, value in own.items())]
    (CACHE / "apt").mkdir(exist_ok=True)
    _run("apt-get", *options, "-oAPT::Update::Error-Mode=any", "update")
    _run("apt-get", *options, "--no-install-recommends", "--download-only", "install", *PACKAGES[name])
    packages = sorted(archives.glob("*.deb"))
    if not packages:
        raise Missing("they are installed, or apt-get fetched none")
    return packages


def _run(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise Missing(f"{words[0]} took longer than {PATIENCE} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Missing(said[-1] if said else f"{words[0]} ended with {done.returncode}")


def libraries(root: Path, *more: str) -> str:
    """Return the value for LD_LIBRARY_PATH."""
    folders = [folder for base in ("usr/lib", "lib") for folder in sorted(root.glob(f"{base}/*-linux-*"))]
    return os.pathsep.join(map(str, [*folders, *(folder / name for folder in folders for name in more)]))
