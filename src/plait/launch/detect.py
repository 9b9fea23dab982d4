"""`--machine here`: this machine, from a `machine.toml` that `plait bench` wrote, or from the driver and the system.

No CUDA call is made, so this process can still fork. NVML is used if nvidia-ml-py is installed; otherwise a separate process queries torch.
A device that is listed in a file of `machines/` gets that file's data sheet.
"""

import platform
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from plait.config.errors import PlaitError, Problem
from plait.config.hardware import CORES_NOTE, HOP_SECONDS, LINK_EFFICIENCY, Device, Link
from plait.config.machine import Machine
from plait.config.machine_file import CATALOG_FOLDER
from plait.launch import devices
from plait.launch.find_launcher import find_membership
from plait.launch.place import count_cores

MACHINE_FILE = Path("machine.toml")
"""Output file of `plait bench`, and the first source of `--machine here`: in the current directory."""


class DriverInfo(NamedTuple):
    """Driver's report on the first device: bytes of memory, and whether NVLinks are up (None: unknown)."""

    memory: int
    nvlink: bool | None


def load_local_machine() -> Machine:
    """Return this machine as measured if `MACHINE_FILE` exists, else as detected."""
    return Machine.load(MACHINE_FILE) if MACHINE_FILE.exists() else detect_machine()


def detect_machine(kind: str = "auto") -> Machine:
    """Return this machine's devices, or its CPU cores if it has no device or `kind` is cpu. Raises H001 as a run does."""
    from psutil import virtual_memory

    memory = min(virtual_memory().total, _read_memory_limit())
    names = devices.list_cuda_devices() if devices.resolve_kind(kind) == "cuda" else []
    if names:
        machine = _build_machine(names, _query_driver())
    else:  # every core is a device, with one process and one thread; no data sheet has its speed
        device = Device(_read_cpu_name(), memory // count_cores())
        machine = Machine("here", device, devices_per_node=count_cores(), notes=CORES_NOTE, source="found here")
    member = find_membership()
    nodes = 1 if member is None else member.nodes or max(1, member.count // (member.local_count or member.count))
    return replace(machine, name="here", cores=count_cores(), host_memory=memory, nodes=nodes)


def _build_machine(names: list[str], driver: DriverInfo) -> Machine:
    said = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(CATALOG_FOLDER.glob("*.toml"))]
    reported = {name.removeprefix("NVIDIA "): one["name"] for one in said for name in one.get("reported", ())}
    slug = reported.get(names[0].removeprefix("NVIDIA "))
    if slug is None:
        device = Device(names[0], driver.memory)
        return Machine("here", device, devices_per_node=len(names), source="found here; no data sheet has this name")
    machine = Machine.from_name(f"{slug}x{len(names)}x1")
    links = machine.links
    if driver.nvlink is False and machine.host is not None:
        bus = Link("PCIe", len(names), machine.host, HOP_SECONDS["pcie"][0], "pcie", (), LINK_EFFICIENCY)
        links = (bus, *(link for link in links if link.is_between_nodes))
    return replace(machine, links=links, device=replace(machine.device, memory=driver.memory))


def _query_driver() -> DriverInfo:
    try:
        pynvml = import_module("pynvml")  # of nvidia-ml-py
    except ImportError:
        code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
        try:
            command = [sys.executable, "-c", code]
            asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            return DriverInfo(int(asked.stdout), None)
        except (subprocess.SubprocessError, ValueError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            what, why = "torch cannot read the memory size of the first device", said[-1] if said else ""
            fix = ("pip install nvidia-ml-py", "--machine NAME    a machine of the catalog", "--device cpu")
            raise PlaitError(Problem("H009", what, why=why, fix=fix)) from None
    pynvml.nvmlInit()
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
        return DriverInfo(memory, any(_is_nvlink_up(pynvml, device, i) for i in range(18)))
    finally:
        pynvml.nvmlShutdown()


def _is_nvlink_up(pynvml: ModuleType, device: object, link: int) -> bool:
    """Whether an NVLink is active; False on a device without that link."""
    try:
        return bool(pynvml.nvmlDeviceGetNvLinkState(device, link))
    except pynvml.NVMLError:
        return False


def _read_cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"


def _read_memory_limit() -> int:
    """Return the bytes of host memory that a container may use."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return 2**62


def read_machine(text: str) -> Machine:
    """Read a value of ``--machine``: `here`, a file, or a name."""
    if text == "here":
        return load_local_machine()
    return Machine.load(text) if text.endswith(".toml") or "/" in text else Machine.from_name(text)
